//! `dunlin tunnel stdio`: standard input and output as a channel, for tools that
//! run a command to reach the other host.
//!
//! ```text
//!  stdin ──▶ copies ──▶ a listener for one connection ═══▶ the far target
//!  stdout ◀─ copies ◀──                               ◀═══
//!                 exit code ◀── control socket: how it has ended
//! ```
//!
//! The descriptors themselves stay here. They may be files or terminals, which
//! cannot be waited for, and a mode that the tunnel set on them would be set for
//! their other owners too; and a unix socket cannot tell an abort from an end, which
//! the control socket does. From a pipe the kernel moves the bytes by itself.

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
            .with_context(|| format!("the tunnel does not listen on {path}"))?;
        let input = channel.try_clone()?;
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&is_cut);
        // It is left behind where the channel ends before the input does.
        start("stdin", move || send(&input, &cut))?;
        let mut from = &channel;
        // Not through std's stdout, which keeps back what ends no line.
        let mut output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let took = io::copy(&mut from, &mut output);
        drop(output);
        let took = match took {
            // Not the output's failure: how the channel has ended is the tunnel's to tell.
            Err(error) if is_channels(&error, &channel) => Ok(()),
            took => took.map(|_| ()),
        };
        // Whoever reads the output sees its end, while the input may go on.
        let ended = took.and_then(|()| dunlin_linux::stdio::end_output());
        if let Err(error) = ended {
            // Fails only where it has gone.
            let _ = channel.shutdown(Shutdown::Both);
            eprintln!("dunlin: the output cannot be written: {error}");
            return Ok(FAILED);
        }
        let code = client.done(false)?;
        // The target took what was read for all there is; whoever runs this hears otherwise.
        Ok(if is_cut.load(Ordering::SeqCst) {
            FAILED
        } else {
            code
        })
    }
}

/// Whether a copy has failed because the tunnel closed the channel. It does so with bytes of ours
/// unread where it refuses one, which a unix socket tells as a reset (unix(7)); the other end of the
/// copy may be a socket that was reset itself.
fn is_channels(error: &io::Error, channel: &UnixStream) -> bool {
    // Hung up counts as ready, whatever is waited for.
    let hung_up = Interest::failure(&channel);
    error.kind() == io::ErrorKind::ConnectionReset
        && poll(&[hung_up], Some(Duration::ZERO)).is_ok_and(|ready| ready == [true])
}

/// Sends the input and its end; says in `cut` that there was an error in its place.
fn send(to: &UnixStream, cut: &AtomicBool) {
    let mut into = to;
    let how = match io::copy(&mut io::stdin().lock(), &mut into) {
        Ok(_) => Shutdown::Write,
        Err(error) => {
            // A channel that was aborted is told of by the tunnel.
            if error.kind() != io::ErrorKind::BrokenPipe && !is_channels(&error, to) {
                cut.store(true, Ordering::SeqCst);
                eprintln!("dunlin: the input cannot be read: {error}");
            }
            Shutdown::Both
        }
    };
    // Fails only where it has gone.
    let _ = to.shutdown(how);
}
