//! The thread that hears the peer.

use std::sync::mpsc::{Receiver, Sender as Channel};
use std::time::{Duration, Instant};

use dunlin_proto::ipsec::message::{Header, MESSAGE_HEADER_BYTES, Message};

use super::shared::Told;
use crate::error::IpsecError;
use dunlin_lane::control::{ControlError, ControlStream};

/// How long the rest of a message may take.
const REST: Duration = Duration::from_secs(10);

/// The body of the thread that hears the peer. It reads a message once the one before has
/// been dealt with, so that a peer that says much waits, by TCP.
pub(super) fn read(control: &ControlStream, heard: &Channel<Told>, dealt: &Receiver<()>) {
    loop {
        let told = match hear(control) {
            Ok(None) => continue,
            Ok(Some(message)) => Told::Heard(message),
            Err(error) => Told::Lost(error),
        };
        let last = matches!(told, Told::Lost(_));
        if heard.send(told).is_err() || last || dealt.recv().is_err() {
            return;
        }
    }
}

/// One message; none where nothing came for long, or it may be skipped.
fn hear(control: &ControlStream) -> Result<Option<Message>, IpsecError> {
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
