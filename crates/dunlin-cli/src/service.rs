//! What the commands have in common that run until they are told to end: signals, the service
//! manager and its sockets.

mod notify;

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::process::exit;
use std::sync::mpsc::Sender;
use std::thread;

use anyhow::{Error, Result, anyhow};
use dunlin_linux::signals::{EndSignal, EndSignals, HangUps};
use dunlin_tunnel::Sockets;

pub(crate) use self::notify::Manager;
use crate::code::SIGNAL;

/// What the main thread waits for.
pub(crate) enum Told {
    Again,
    End(EndSignal),
}

/// Why nobody can be taken in at an address, which was `chosen` there.
pub(crate) fn cannot_listen(address: impl Display, chosen: &str, error: &io::Error) -> Error {
    let why = match error.kind() {
        ErrorKind::AddrInUse => "another process listens there; end it, or",
        ErrorKind::AddrNotAvailable => "that is not an address of this host;",
        ErrorKind::PermissionDenied => "ports below 1024 are root's;",
        ErrorKind::InvalidInput => "give an address and a port, such as 0.0.0.0:4444 or [::]:4444;",
        _ => "there is no such address;",
    };
    anyhow!(
        "cannot listen on {address} (at fault: configuration): {why} choose another {chosen}: {error}"
    )
}

/// The sockets that the service manager has passed.
pub(crate) fn passed() -> Result<Sockets> {
    let mut sockets = Sockets::default();
    for one in dunlin_linux::passed::take()? {
        let name = one.name;
        sockets
            .insert(&name, one.socket)
            .map_err(|error| anyhow!("the socket {name:?} that was passed: {error}"))?;
    }
    Ok(sockets)
}

/// Tells of signals. A second one to end waits for nobody.
pub(crate) fn wait_for<T: From<Told> + Send + 'static>(
    told: Sender<T>,
    ends: EndSignals,
    hang_ups: HangUps,
) -> Result<()> {
    let again = told.clone();
    start("dunlin-hang-ups", move || {
        while hang_ups.wait().is_ok() && again.send(Told::Again.into()).is_ok() {}
    })?;
    start("dunlin-signals", move || {
        if let Ok(signal) = ends.wait() {
            // The main thread is there until the process ends.
            let _ = told.send(Told::End(signal).into());
        }
        if let Ok(signal) = ends.wait() {
            exit(SIGNAL + signal.number());
        }
    })?;
    Ok(())
}

/// Starts a thread that ends by itself, or with the process.
pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let named = thread::Builder::new().name(name.to_owned());
    named.spawn(work).map(drop)
}
