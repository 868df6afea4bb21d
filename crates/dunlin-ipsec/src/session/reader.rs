//! The thread that receives the peer's messages.

use std::sync::mpsc::{Receiver, Sender as Channel};
use std::time::{Duration, Instant};

use dunlin_proto::ipsec::message::{Header, MESSAGE_HEADER_BYTES, Message};

use super::shared::Command;
use crate::error::IpsecError;
use dunlin_lane::control::{ControlError, ControlStream};

/// The timeout for the first byte of a message's body.
const REST: Duration = Duration::from_secs(10);

/// The body of the thread. It reads a message only after the previous one has been handled, so that
/// TCP slows down a peer that sends too much.
pub(super) fn read(control: &ControlStream, commands: &Channel<Command>, handled: &Receiver<()>) {
    loop {
        let command = match receive(control) {
            Ok(None) => continue,
            Ok(Some(message)) => Command::Received(message),
            Err(error) => Command::Lost(error),
        };
        let last = matches!(command, Command::Lost(_));
        if commands.send(command).is_err() || last || handled.recv().is_err() {
            return;
        }
    }
}

/// Reads one message. Returns `None` if nothing arrived for a long time, or if the message is one
/// that this side can skip.
fn receive(control: &ControlStream) -> Result<Option<Message>, IpsecError> {
    const LONG: Duration = Duration::from_secs(60);
    let mut bytes = [0; MESSAGE_HEADER_BYTES];
    match control.receive_exact(&mut bytes, Instant::now() + LONG) {
        Err(ControlError::Deadline) => return Ok(None),
        other => other?,
    }
    let header = Header::decode(&bytes)?;
    let mut body = vec![0; header.body_bytes()];
    control.receive_exact(&mut body, Instant::now() + REST)?;
    Ok(Message::decode(&header, &body)?)
}
