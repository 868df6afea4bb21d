//! The far half of a channel: whether the peer may have it, and the connection
//! to the hypervisor.

use dunlin_proto::text::harmless;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use dunlin_linux::signals::unblock_in;
use dunlin_linux::socket::{connect as connect_tcp, connect_unix};
use dunlin_proto::fault::FaultCode;

use super::counted::Counted;
use super::event::Event;
use super::failure::Failure;
use super::hub::{Channel, Hub};
use super::meter::Count;
use super::parameter;
use super::route::Target;
use super::site::Site;
use super::socket::Socket;
use dunlin_lane::reach::first_of;

/// Makes a channel's connection and tells the core; the body of a thread.
pub(super) fn connect(hub: &Arc<Hub>, channel: u32, route: &str, parameter: &str) {
    let reached = reach(hub, route, parameter);
    let mut core = hub.lock();
    core.connecting -= 1;
    match reached {
        Ok((socket, window_bytes)) => {
            if core.trunk.connected(channel, window_bytes) {
                let route = route.to_owned();
                let socket = Arc::new(socket);
                core.channels.insert(channel, Channel::new(socket, route));
                hub.watch(&mut core, channel, hub.now_ns());
            } else {
                socket.abort();
            }
        }
        Err(failure) => {
            let (code, text) = (failure.code(), failure.for_peer());
            core.trunk.refuse(channel, code, text, hub.now_ns());
            // The name is the peer's.
            let route = harmless(route);
            hub.site.tell(Event::Refused { route, failure });
        }
    }
    hub.settle(&mut core);
}

/// The connection that a route stands for, and its window.
fn reach(hub: &Hub, route: &str, parameter: &str) -> Result<(Socket, u64), Failure> {
    let Some(exit) = hub.site.exit(route) else {
        let text = format!("no route {:?} has a target here", harmless(route));
        return Err(Failure::new(FaultCode::UnknownRoute, text));
    };
    let peer = &hub.terms.peer;
    hub.site
        .check_admitted(peer)
        .and_then(|()| exit.allow.authorise_further(peer))
        .map_err(|refused| {
            let text = format!("route {route:?} is not for this peer");
            Failure::new(FaultCode::Unauthorised, text).because(&refused)
        })?;
    let target = parameter::fill(route, &exit.target, parameter)?;
    let deadline = Instant::now() + hub.site.limits.connect;
    let socket = open(&hub.site, &hub.programs, &target, deadline).map_err(|error| {
        let text = format!("route {route:?}: {target} cannot be reached");
        Failure::new(FaultCode::TargetUnreachable, text).because(&error)
    })?;
    let count = Count::new(hub.site.meter(route), None);
    Ok((socket.counted(count), exit.window_bytes))
}

/// Connects to a target; `programs` counts those that the same peers have had
/// started and that have not ended.
///
/// # Errors
/// It cannot be reached before `deadline`.
pub(super) fn open(
    site: &Arc<Site>,
    programs: &Arc<AtomicUsize>,
    target: &Target,
    deadline: Instant,
) -> io::Result<Socket> {
    match target {
        Target::Unix(path) => Socket::unix(connect_unix(path, deadline)?),
        Target::Tcp(to) => Socket::tcp(first_of(to, |address| connect_tcp(address, deadline))?),
        Target::Exec(words) => execute(site, programs, words),
    }
}

/// Starts a program whose standard input and output are one end of a pair.
fn execute(site: &Arc<Site>, programs: &Arc<AtomicUsize>, words: &[String]) -> io::Result<Socket> {
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let (near, far) = UnixStream::pair()?;
    let near = Socket::unix(near)?;
    let input = OwnedFd::from(far.try_clone()?);
    // A program need not end because its channel has.
    let most = site.limits.channels;
    let running = Counted::one_more(programs, most).ok_or_else(|| {
        let text = format!("{most} programs of this peer have not ended");
        io::Error::new(io::ErrorKind::QuotaExceeded, text)
    })?;
    // The thread first: a program for which nobody waits stays as a zombie.
    let (started, child) = channel::<Child>();
    let (site, name) = (Arc::clone(site), program.clone());
    thread::Builder::new()
        .name("dunlin-exec".to_owned())
        .spawn(move || {
            let _running = running;
            // Nothing comes where the program could not be started.
            let Ok(mut child) = child.recv() else { return };
            let text = match child.wait() {
                Ok(status) if status.success() => return,
                Ok(status) => format!("{name} ended with {status}"),
                Err(error) => format!("{name} is lost: {error}"),
            };
            site.tell(Event::Warning(text));
        })?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(OwnedFd::from(far)));
    // This process may have a thread for its signals, and all others block them.
    unblock_in(&mut command);
    let child = command.spawn()?;
    // It waits until it gets it.
    let _ = started.send(child);
    Ok(near)
}
