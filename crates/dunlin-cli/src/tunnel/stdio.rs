//! `dunlin tunnel stdio`: standard input and output as a channel, for tools that run a command to
//! reach the other host.
//!
//! ```text
//!  stdin ──▶ copies ──▶ a listener for one connection ═══▶ the far target
//!  stdout ◀─ copies ◀──                               ◀═══
//!                 exit code ◀── control socket: result of the channel
//! ```
//!
//! The process keeps its descriptors to itself. They may be files or terminals, which cannot be
//! polled, and a mode set by the tunnel would affect their other users. A unix socket also cannot
//! tell an abort from an end; the control socket does. If an end is a pipe, the kernel moves the
//! bytes without copying them to this process.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin_linux::poll::{Interest, poll};

use super::ask::Wanted;
use crate::code::FAILED;
use crate::service::start;

#[derive(Debug, Args)]
pub(crate) struct Stdio {
    #[command(flatten)]
    wanted: Wanted,
}

impl Stdio {
    pub(crate) fn run(&self) -> Result<i32> {
        let (mut client, opened) = self.wanted.open(None, true, true)?;
        let Some(path) = opened.listen.strip_prefix("unix:") else {
            bail!("the tunnel listens on {}", opened.listen);
        };
        let channel = UnixStream::connect(path)
            .with_context(|| format!("cannot connect to the tunnel at {path}"))?;
        let input = channel.try_clone()?;
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&is_cut);
        // If the channel ends before the input, this thread is abandoned.
        start("stdin", move || send(&input, &cut))?;
        let mut from = &channel;
        // Not std's stdout, which buffers incomplete lines.
        let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let took = io::copy(&mut from, &mut output);
        drop(output);
        let took = match took {
            // This is not a failure of the output: the tunnel reports the channel's result.
            Err(error) if is_channels(&error, &channel) => Ok(()),
            took => took.map(|_| ()),
        };
        // The reader of the output sees its end even if the input continues.
        let ended = took.and_then(|()| dunlin_linux::stdio::end_output());
        if let Err(error) = ended {
            // Fails only if the channel is closed.
            let _ = channel.shutdown(Shutdown::Both);
            eprintln!("dunlin: cannot write the output: {error}");
            return Ok(FAILED);
        }
        let code = client.done(false)?;
        // The target treated the truncated input as complete; the exit code reports the failure.
        Ok(if is_cut.load(Ordering::SeqCst) {
            FAILED
        } else {
            code
        })
    }
}

/// Whether a copy failed because the tunnel closed the channel. If the tunnel refuses a channel
/// while input from this process is unread, a unix socket reports a reset (unix(7)). The other
/// end of the copy may be a socket that was itself reset.
fn is_channels(error: &io::Error, channel: &UnixStream) -> bool {
    // POLLHUP is reported for any requested event.
    let hung_up = Interest::failure(&channel);
    error.kind() == io::ErrorKind::ConnectionReset
        && poll(&[hung_up], Some(Duration::ZERO)).is_ok_and(|ready| ready == [true])
}

/// Sends the input and its end; sets `cut` if reading the input failed.
fn send(to: &UnixStream, cut: &AtomicBool) {
    let mut into = to;
    let how = match io::copy(&mut io::stdin().lock(), &mut into) {
        Ok(_) => Shutdown::Write,
        Err(error) => {
            // The tunnel reports aborted channels.
            if error.kind() != io::ErrorKind::BrokenPipe && !is_channels(&error, to) {
                cut.store(true, Ordering::SeqCst);
                eprintln!("dunlin: cannot read the input: {error}");
            }
            Shutdown::Both
        }
    };
    // Fails only if the channel is closed.
    let _ = to.shutdown(how);
}
