//! Common parts of the long-running commands: signals, the service manager and its sockets.

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

/// Signals for the main thread.
pub(crate) enum ServiceEvent {
    Reload,
    End(EndSignal),
}

/// The error of a failed bind; `flag` names the setting of the address.
pub(crate) fn cannot_listen(address: impl Display, flag: &str, error: &io::Error) -> Error {
    let why = match error.kind() {
        ErrorKind::AddrInUse => "another process listens there; end it, or",
        ErrorKind::AddrNotAvailable => "that is not an address of this host;",
        ErrorKind::PermissionDenied => "ports below 1024 need root;",
        ErrorKind::InvalidInput => "give an address and a port, such as 0.0.0.0:4444 or [::]:4444;",
        _ => "no such address;",
    };
    anyhow!(
        "cannot listen on {address} (at fault: configuration): {why} choose another {flag}: {error}"
    )
}

/// The sockets passed by the service manager.
pub(crate) fn passed() -> Result<Sockets> {
    let mut sockets = Sockets::default();
    for one in dunlin_linux::passed::take()? {
        let name = one.name;
        sockets
            .insert(&name, one.socket)
            .map_err(|error| anyhow!("passed socket {name:?}: {error}"))?;
    }
    Ok(sockets)
}

/// Sends the process's signals as events, and calls `ending` after the first one to end. A second one
/// exits immediately.
pub(crate) fn wait_for<T: From<ServiceEvent> + Send + 'static>(
    sender: Sender<T>,
    ends: EndSignals,
    hang_ups: HangUps,
    ending: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let reloads = sender.clone();
    start("dunlin-hang-ups", move || {
        while hang_ups.wait().is_ok() && reloads.send(ServiceEvent::Reload.into()).is_ok() {}
    })?;
    start("dunlin-signals", move || {
        if let Ok(signal) = ends.wait() {
            // The main thread receives until the process ends.
            let _ = sender.send(ServiceEvent::End(signal).into());
            ending();
        }
        if let Ok(signal) = ends.wait() {
            exit(SIGNAL + signal.number());
        }
    })?;
    Ok(())
}

/// Starts a detached thread.
pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let named = thread::Builder::new().name(name.to_owned());
    named.spawn(work).map(drop)
}
