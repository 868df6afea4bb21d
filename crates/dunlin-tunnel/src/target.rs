//! Connections to what a route's channels are connected to.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use dunlin_linux::poll::Wakeup;
use dunlin_linux::signals::unblock_in;
use dunlin_linux::socket::connect_unix_unless;

use super::counted::Counted;
use super::event::Event;
use super::route::Target;
use super::site::Site;
use super::socket::Stream;

/// Connects to a target; `programs` counts those that the same peers have had
/// started and that have not ended.
///
/// # Errors
/// It cannot be reached before `deadline`, or `stop` becomes readable before that.
pub(super) fn open(
    site: &Arc<Site>,
    programs: &Arc<AtomicUsize>,
    target: &Target,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<Stream> {
    match target {
        Target::Unix(path) => Stream::unix(connect_unix_unless(path, deadline, stop)?),
        Target::Tcp(to) => Stream::tcp(site.connector.connect(to, deadline, stop)?),
        Target::Exec(words) => execute(site, programs, words),
    }
}

/// Starts a program whose standard input and output are one end of a pair.
fn execute(site: &Arc<Site>, programs: &Arc<AtomicUsize>, words: &[String]) -> io::Result<Stream> {
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let (near, far) = UnixStream::pair()?;
    let near = Stream::unix(near)?;
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
