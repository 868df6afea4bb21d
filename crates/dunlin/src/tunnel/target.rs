//! The far half of a channel: whether the peer may have it, and the connection
//! to the hypervisor.

use std::io;
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use dunlin_proto::fault::FaultCode;
use dunlin_sys::socket::{connect as connect_tcp, connect_unix};

use super::event::Event;
use super::failure::{Failure, harmless};
use super::hub::{Channel, Hub};
use super::options::Target;
use super::site::Site;
use super::socket::Socket;

/// Makes a channel's connection and tells the core; the body of a thread.
pub(super) fn connect(hub: &Arc<Hub>, channel: u32, route: &str, parameter: &str) {
    let reached = reach(hub, route, parameter);
    let mut core = hub.lock();
    match reached {
        Ok((socket, window_bytes)) => {
            if core.association.connected(channel, window_bytes) {
                let route = route.to_owned();
                let socket = Arc::new(socket);
                core.channels.insert(channel, Channel { socket, route });
                hub.watch(&mut core, channel, hub.now_ns());
            } else {
                socket.abort();
            }
        }
        Err(failure) => {
            let (code, text) = (failure.code(), failure.for_peer());
            core.association.refuse(channel, code, text, hub.now_ns());
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
    exit.allow
        .authorise_further(&hub.terms.peer)
        .map_err(|refused| {
            let text = format!("route {route:?} is not for this peer");
            Failure::new(FaultCode::Unauthorised, text).because(&refused)
        })?;
    if !parameter.is_empty() {
        let text = format!("the target of route {route:?} takes no parameter");
        return Err(Failure::new(FaultCode::ParameterRefused, text));
    }
    let deadline = Instant::now() + hub.site.limits.connect;
    let socket = open(&hub.site, &exit.target, deadline).map_err(|error| {
        let text = format!("route {route:?}: {} cannot be reached", exit.target);
        Failure::new(FaultCode::TargetUnreachable, text).because(&error)
    })?;
    Ok((socket, exit.window_bytes))
}

/// Connects to a target.
///
/// # Errors
/// It cannot be reached before `deadline`.
pub(super) fn open(site: &Arc<Site>, target: &Target, deadline: Instant) -> io::Result<Socket> {
    match target {
        Target::Unix(path) => Socket::unix(connect_unix(path, deadline)?),
        Target::Tcp(to) => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "it has no address");
            for address in to.to_socket_addrs()? {
                match connect_tcp(address, deadline) {
                    Ok(stream) => return Socket::tcp(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
        Target::Exec(words) => execute(site, words),
    }
}

/// Starts a program whose standard input and output are one end of a pair.
fn execute(site: &Arc<Site>, words: &[String]) -> io::Result<Socket> {
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let (near, far) = UnixStream::pair()?;
    let input = OwnedFd::from(far.try_clone()?);
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(OwnedFd::from(far)))
        .spawn()?;
    let own = Arc::clone(site);
    let program = program.clone();
    let name = "dunlin-exec".to_owned();
    site.spawn_free(name, move || match child.wait() {
        Ok(status) if status.success() => {}
        Ok(status) => own.tell(Event::Warning(format!("{program} ended with {status}"))),
        Err(error) => own.tell(Event::Warning(format!("{program} is lost: {error}"))),
    });
    Socket::unix(near)
}
