//! `dunlin tunnel stdio`: standard input and output as a channel, for tools that run a command to
//! reach the other host.
//!
//! ```text
//!  stdin ──▶ copies ──▶ a listener for one connection ═══▶ the far target
//!  stdout ◀─ copies ◀──                               ◀═══
//!                 exit code ◀── control socket: result of the channel
//! ```
//!
//! The process copies the bytes instead of passing its descriptors to the tunnel. The descriptors
//! may be files, which cannot be polled. If the tunnel set a descriptor to non-blocking mode, this
//! would affect all programs that share it. A unix socket does not show whether the channel was
//! aborted or ended, so the control socket reports that. If standard input or output is a pipe, the
//! kernel moves the bytes without copying them to this process.

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
use dunlin_tunnel::FileAccess;

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
        let (mut client, opened) = self
            .wanted
            .open(None, FileAccess::default(), (true, true))?;
        let Some(path) = opened.listen.strip_prefix("unix:") else {
            bail!(
                "the running tunnel listens on {} instead of a unix socket, so it is of another \
                 version (at fault: this side): restart the tunnel with this version of dunlin",
                opened.listen
            );
        };
        let channel = UnixStream::connect(path)
            .with_context(|| format!("cannot connect to the tunnel at {path}"))?;
        let input = channel.try_clone()?;
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&is_cut);
        // If the channel ends before the input, this thread stays blocked until the process ends.
        start("stdin", move || send(&input, &cut))?;
        let mut from = &channel;
        // Do not use std's stdout, because it buffers incomplete lines.
        let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let took = io::copy(&mut from, &mut output);
        drop(output);
        let took = match took {
            // The tunnel closed the channel. `client` receives the channel's result from the
            // tunnel.
            Err(error) if is_channels(&error, &channel) => Ok(()),
            took => took.map(|_| ()),
        };
        // End the output now, so that its reader sees the end even if the input continues.
        let ended = took.and_then(|()| dunlin_linux::stdio::end_output());
        if let Err(error) = ended {
            // This fails only if the channel is closed.
            let _ = channel.shutdown(Shutdown::Both);
            eprintln!("dunlin: cannot write the output: {error}");
            return Ok(FAILED);
        }
        let code = client.done(false)?;
        // If reading the input failed, the target cannot tell the truncated input from a complete
        // one. So the exit code reports the failure.
        Ok(if is_cut.load(Ordering::SeqCst) {
            FAILED
        } else {
            code
        })
    }
}

/// Whether a copy failed because the tunnel closed the channel. If the tunnel refuses a channel
/// while input from this process is unread, a unix socket reports a reset (unix(7)). A reset alone
/// proves nothing, because standard input or output may be a socket that was itself reset.
fn is_channels(error: &io::Error, channel: &UnixStream) -> bool {
    // poll(2) reports POLLHUP even if no event is requested.
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
            // The tunnel reports an aborted channel, so do not report it here too.
            if error.kind() != io::ErrorKind::BrokenPipe && !is_channels(&error, to) {
                cut.store(true, Ordering::SeqCst);
                eprintln!("dunlin: cannot read the input: {error}");
            }
            Shutdown::Both
        }
    };
    // This fails only if the channel is closed.
    let _ = to.shutdown(how);
}
