//! Common parts of the long-running commands: signals, the service manager and its sockets.

mod notify;

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::process::exit;
use std::sync::mpsc::{Receiver, Sender};
use std::thread;

use anyhow::{Context, Error, Result, anyhow};
use dunlin_linux::signals::{EndSignal, EndSignals, HangUps};
use dunlin_tunnel::Sockets;
use tracing::warn;

pub(crate) use self::notify::Manager;
use crate::code::{DONE, FAILED, SIGNAL};
use crate::fault::fault_name;
use crate::log::say;
use crate::text::{chained, clean, count};

/// Events for the main thread of a service.
pub(crate) enum ServiceEvent {
    Reload,
    End(EndSignal),
    /// The service failed or ended without a signal, and accepts no more connections.
    Failed,
}

/// The error of a failed bind; `flag` names the setting of the address.
pub(crate) fn cannot_listen(address: impl Display, flag: &str, error: &io::Error) -> Error {
    let why = match error.kind() {
        ErrorKind::AddrInUse => "another process listens there: end it",
        ErrorKind::AddrNotAvailable => "that is not an address of this host",
        ErrorKind::PermissionDenied => "ports below 1024 need root",
        ErrorKind::InvalidInput => "give an address and a port, such as 0.0.0.0:4444 or [::]:4444",
        _ => "if there is no such address, correct it",
    };
    anyhow!(
        "cannot listen on {address} (at fault: configuration): {error}: {why}, or choose another \
         {flag}"
    )
}

/// The sockets passed by the service manager.
pub(crate) fn passed() -> Result<Sockets> {
    let mut sockets = Sockets::default();
    for one in dunlin_linux::passed::take()? {
        let name = one.name;
        sockets
            .insert(&name, one.socket)
            .map_err(|error| anyhow!("socket {name:?} from the service manager: {error}"))?;
    }
    Ok(sockets)
}

/// Starts threads that wait for signals and send them to `sender` as events. After the first SIGINT
/// or SIGTERM, a thread calls `ending`; a second signal ends the process immediately.
pub(crate) fn wait_for(
    sender: Sender<ServiceEvent>,
    ends: EndSignals,
    hang_ups: HangUps,
    ending: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let reloads = sender.clone();
    start("dunlin-hang-ups", move || {
        while hang_ups.wait().is_ok() && reloads.send(ServiceEvent::Reload).is_ok() {}
    })?;
    start("dunlin-signals", move || {
        if let Ok(signal) = ends.wait() {
            // An error only means that the process is ending.
            let _ = sender.send(ServiceEvent::End(signal));
            ending();
        }
        if let Ok(signal) = ends.wait() {
            exit(SIGNAL + signal.number());
        }
    })?;
    Ok(())
}

/// Reloads `what` at each SIGHUP. Returns the signal that ends the service, or `None` if the
/// service fails or ends without one.
pub(crate) fn serve(
    events: Receiver<ServiceEvent>,
    manager: &Manager,
    what: &str,
    mut reload: impl FnMut() -> Result<()>,
) -> Option<EndSignal> {
    for event in events {
        match event {
            ServiceEvent::Reload => {
                manager.reloading();
                let how = match reload() {
                    Ok(()) => {
                        let how = format!("{what} reloaded");
                        say(&how);
                        how
                    }
                    Err(error) => {
                        let why = chained(&error);
                        let how = format!("{what} not reloaded, everything stays as it was: {why}");
                        warn!(fault = fault_name(&error), "{how}");
                        how
                    }
                };
                // The status must be one line.
                manager.ready(&clean(&how));
            }
            ServiceEvent::End(signal) => {
                manager.stopping();
                return Some(signal);
            }
            ServiceEvent::Failed => break,
        }
    }
    None
}

/// Reports how many connections or channels the service aborted when it ended, and returns its exit
/// code. `what` is the noun for them.
pub(crate) fn drained(cut: usize, what: &str) -> i32 {
    if cut == 0 {
        return DONE;
    }
    say(&format!("aborted {}", count(cut as u64, what)));
    FAILED
}

/// Starts a detached thread.
pub(crate) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let named = thread::Builder::new().name(name.to_owned());
    named.spawn(work).map(drop)
}

/// Runs `work` on a new thread and waits for it. The end of the thread frees its stack, and the
/// free memory that malloc caches for it.
pub(crate) fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("dunlin-session".into());
        let started = thread.spawn_scoped(scope, work);
        let ended = started.context("cannot start a thread")?.join();
        ended.map_err(|_| anyhow!("a thread panicked"))
    })
}
