//! Connects a route's channels to their target.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Interest, Wakeup, poll};
use dunlin_linux::redirected::is_own_address;
use dunlin_linux::signals::unblock_in;
use dunlin_linux::socket::connect_unix;
use dunlin_proto::fault::FaultCode;

use super::counted::Counted;
use super::event::Event;
use super::failure::{Failure, OrFailure};
use super::meter::{Count, Tally};
use super::reached::Reached;
use super::route::Target;
use super::site::Site;
use super::socket::{Socket, Stream};

/// How often a channel checks whether the channels to an earlier socket have ended.
const AGAIN: Duration = Duration::from_millis(50);

/// Connects a channel of `route` to a target. `programs` counts the running programs of the same
/// trunk or, for a relay, of all relays.
///
/// # Errors
/// The target cannot be reached in time, its program cannot be started, another process has bound
/// its path, or `stop` becomes readable first.
pub(super) fn open(
    site: &Arc<Site>,
    programs: &Arc<AtomicUsize>,
    route: &str,
    target: &Target,
    stop: &Wakeup,
) -> Result<Socket, Failure> {
    let deadline = Instant::now() + site.limits.connect;
    let reached = match target {
        Target::Unix(path) => Some(enter(site, route, path, deadline, stop)?),
        _ => None,
    };
    let opened = match target {
        Target::Unix(path) => connect_unix(path, deadline, stop).and_then(Stream::unix),
        Target::Tcp(to) => site
            .connector
            .connect(to, deadline, stop)
            .and_then(Stream::tcp),
        Target::Exec(words) => execute(site, programs, words),
        Target::Ports { addresses, ports } => {
            connect_first(site, addresses, ports.first(), deadline, stop).and_then(Stream::tcp)
        }
    };
    let text = format!("route {route:?}: {target} cannot be reached");
    let stream = opened.or_failure(FaultCode::TargetUnreachable, text)?;
    let reached = reached.map(|one| one.check(route).map(|()| one));
    let tally = reached
        .transpose()?
        .map(|one| Arc::new(one) as Arc<dyn Tally>);
    Ok(stream.counted(Count::new(site.meter(route), tally)))
}

/// Adds a channel to the socket at `path`. Waits until channels to an earlier socket at the path
/// have ended: if a peer's tunnel was killed, its channels end only after some seconds.
///
/// # Errors
/// The errors of [`ReachedSockets::enter`]. If channels to an earlier socket have not ended, the
/// error is returned at the deadline or when `stop` becomes readable.
///
/// [`ReachedSockets::enter`]: super::reached::ReachedSockets::enter
fn enter(
    site: &Site,
    route: &str,
    path: &Path,
    deadline: Instant,
    stop: &Wakeup,
) -> Result<Reached, Failure> {
    loop {
        match site.reached.enter(route, path) {
            Err(failure)
                if failure.code() == FaultCode::TargetReplaced
                    && Instant::now() < deadline
                    && poll(&[Interest::read(stop)], Some(AGAIN)).is_ok_and(|it| it == [false]) => {
            }
            result => return result,
        }
    }
}

/// Connects to the first of these addresses that accepts a connection at `port`. If none does,
/// returns the error of the last address. An address that does not belong to this host is refused:
/// the connection would carry the channel's bytes to another host in the clear.
fn connect_first(
    site: &Site,
    addresses: &[IpAddr],
    port: u16,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<TcpStream> {
    let mut result = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in addresses {
        if !is_own_address(*address) {
            let text = format!("{address} is not an address of this host: correct the target");
            result = Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
            continue;
        }
        let to = SocketAddr::new(*address, port).to_string();
        result = site.connector.connect(&to, deadline, stop);
        if result.is_ok() {
            break;
        }
    }
    result
}

/// Starts a program with one end of a socket pair as its standard input and output.
fn execute(site: &Arc<Site>, programs: &Arc<AtomicUsize>, words: &[String]) -> io::Result<Stream> {
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let (near, far) = UnixStream::pair()?;
    let near = Stream::unix(near)?;
    let input = OwnedFd::from(far.try_clone()?);
    // The program may outlive its channel, so programs are limited separately.
    let most = site.limits.channels;
    let running = Counted::one_more(programs, most).ok_or_else(|| {
        let text = format!("limit of running programs reached for this peer ({most})");
        io::Error::new(io::ErrorKind::QuotaExceeded, text)
    })?;
    // Start the thread before the program: if no thread waits for the program, it becomes a zombie
    // when it ends.
    let (started, child) = channel::<Child>();
    let (site, name) = (Arc::clone(site), program.clone());
    thread::Builder::new()
        .name("dunlin-exec".to_owned())
        .spawn(move || {
            let _running = running;
            // Fails if the program was not started.
            let Ok(mut child) = child.recv() else { return };
            let text = match child.wait() {
                Ok(status) if status.success() => return,
                Ok(status) => format!("target program {name} failed: {status}"),
                Err(error) => format!("cannot wait for target program {name}: {error}"),
            };
            site.report(Event::Warning(text));
        })?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::from(input))
        .stdout(Stdio::from(OwnedFd::from(far)));
    // A process can run the tunnel with its signals blocked in all threads except one. The program
    // must not inherit that signal mask.
    unblock_in(&mut command);
    let child = command.spawn()?;
    // This does not fail: the thread waits in `recv` until it receives the child.
    let _ = started.send(child);
    Ok(near)
}
