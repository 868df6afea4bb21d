//! Resolves host names before a deadline, for a caller that can stop waiting.
//!
//! getaddrinfo(3) has no deadline and cannot be interrupted, so it runs on a thread that may
//! outlive the call. An address is parsed without a thread. At most [`LOOKUPS_MAX`] lookups run at
//! the same time in a process; any further lookup fails immediately.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use dunlin_linux::poll::{Interest, Wakeup, poll, waker};
use dunlin_linux::socket::remaining;
use dunlin_proto::limits::MAX_LANES;

/// Maximum number of lookups that run at the same time in this process, each on a thread. All lanes
/// of a session may look up their host simultaneously. A lookup that its caller has abandoned
/// counts towards this limit until the resolver returns.
pub const LOOKUPS_MAX: usize = MAX_LANES as usize;

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Returns the addresses of `endpoint`, a host and a port. An IPv6 address needs
/// brackets.
///
/// # Errors
/// `InvalidInput` for a malformed endpoint; otherwise the errors of [`host`].
pub fn endpoint(endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<Vec<SocketAddr>> {
    let wanted = "malformed endpoint: give a host and a port, as in host-b.example:4444 or \
                  [2001:db8::7]:4444";
    let malformed = || io::Error::new(io::ErrorKind::InvalidInput, wanted);
    let (name, port) = parts(endpoint).ok_or_else(malformed)?;
    host(name, port, deadline, stop)
}

/// Returns the addresses of `host` with `port`. `host` is a name or an address; an
/// IPv6 address may have brackets.
///
/// # Errors
/// The resolver's error, `TimedOut` if the deadline passed, `ConnectionAborted` if `stop` became
/// readable, or `ResourceBusy` if [`LOOKUPS_MAX`] lookups are running. Also an error of the system
/// if it has no free descriptor or thread.
pub fn host(
    host: &str,
    port: u16,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<Vec<SocketAddr>> {
    let look_up = move |name: &str| Ok((name, port).to_socket_addrs()?.collect());
    host_by(look_up, &RUNNING, host, port, deadline, stop)
}

/// Splits an endpoint into host and port. An IPv6 address needs brackets, because its last group
/// would otherwise be parsed as the port.
fn parts(endpoint: &str) -> Option<(&str, u16)> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let is_host = !host.is_empty() && (in_brackets(host).is_some() || !host.contains(':'));
    is_host.then_some((host, port.parse().ok()?))
}

fn in_brackets(host: &str) -> Option<&str> {
    host.strip_prefix('[')?.strip_suffix(']')
}

/// Parses `host` as an address, or calls `look_up` on a thread that `running` counts.
fn host_by(
    look_up: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
    running: &'static AtomicUsize,
    host: &str,
    port: u16,
    deadline: Instant,
    stop: &Wakeup,
) -> io::Result<Vec<SocketAddr>> {
    let bare = in_brackets(host).unwrap_or(host);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let name = bare.to_owned();
    let slot = Slot::take(running)?;
    let (waker, ended) = waker()?;
    let thread = thread::Builder::new().name("dunlin-resolver".to_owned());
    let thread = thread.spawn(move || {
        // Both values are dropped after the lookup, even if the lookup panics. The drop frees the
        // slot and makes `ended` readable.
        let _held = (slot, waker);
        look_up(&name)
    })?;
    loop {
        let left = remaining(deadline).map_err(|error| {
            let text = "name resolution timed out: the resolver did not answer in time; use an \
                        address, or check the name servers";
            io::Error::new(error.kind(), text)
        })?;
        let ready = poll(&[Interest::read(&ended), Interest::read(&stop)], Some(left))?;
        if ready[1] {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if ready[0] {
            break;
        }
    }
    let panicked = |_| io::Error::other("the resolver's thread panicked");
    thread.join().map_err(panicked)?
}

/// Counts one lookup as running until this value is dropped.
struct Slot(&'static AtomicUsize);

impl Slot {
    fn take(running: &'static AtomicUsize) -> io::Result<Self> {
        let one_more = |count| (count < LOOKUPS_MAX).then_some(count + 1);
        let text = "too many name lookups are running: use an address, or check the name servers";
        let taken = running.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more);
        taken.map_err(|_| io::Error::new(io::ErrorKind::ResourceBusy, text))?;
        Ok(Self(running))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    const FOUND: &str = "192.0.2.7:80";

    /// A deadline that only a failing test reaches.
    fn late() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn found() -> Vec<SocketAddr> {
        vec![FOUND.parse().unwrap()]
    }

    /// Maximum time that a lookup of a test hangs, so that a failing test ends too.
    const HANG: Duration = Duration::from_secs(20);

    /// A lookup that reports its start on `started` and returns when the sender of `end` is
    /// dropped.
    fn hanging(
        started: Sender<()>,
        end: Receiver<()>,
    ) -> impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> {
        move |_| {
            started.send(()).unwrap();
            let _ = end.recv_timeout(HANG);
            Ok(found())
        }
    }

    /// Waits until the abandoned thread has returned; no event reports its end.
    fn await_none(running: &AtomicUsize) {
        let limit = late();
        while running.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < limit);
            thread::yield_now();
        }
    }

    #[test]
    fn a_lookup_that_hangs_ends_at_the_deadline_and_counts_until_it_returns() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        let (_waker, stop) = waker().unwrap();
        let (started, starts) = channel();
        let (end, ends) = channel();
        let deadline = Instant::now() + Duration::from_millis(20);
        let look_up = hanging(started, ends);
        let error = host_by(look_up, &RUNNING, "host.example", 80, deadline, &stop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let late = Instant::now().duration_since(deadline);
        assert!(late < HANG, "{late:?}");
        starts.recv().unwrap();
        assert_eq!(RUNNING.load(Ordering::SeqCst), 1);
        drop(end);
        await_none(&RUNNING);
    }

    #[test]
    fn a_lookup_that_hangs_ends_on_cancellation() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        let (waker, stop) = waker().unwrap();
        let (started, starts) = channel();
        let (end, ends) = channel();
        let begin = Instant::now();
        thread::scope(|scope| {
            scope.spawn(move || {
                starts.recv().unwrap();
                waker.wake();
            });
            let look_up = hanging(started, ends);
            let error = host_by(look_up, &RUNNING, "host.example", 80, late(), &stop).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        });
        assert!(begin.elapsed() < HANG);
        assert_eq!(RUNNING.load(Ordering::SeqCst), 1);
        drop(end);
        await_none(&RUNNING);
    }

    #[test]
    fn a_lookup_returns_what_the_resolver_returns() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        let (_waker, stop) = waker().unwrap();
        let by = |found: fn() -> io::Result<Vec<SocketAddr>>| {
            let look_up = move |name: &str| {
                assert_eq!(name, "host.example");
                found()
            };
            host_by(look_up, &RUNNING, "host.example", 80, late(), &stop)
        };
        assert_eq!(by(|| Ok(found())).unwrap(), found());
        let kind = |found| by(found).unwrap_err().kind();
        let error = || Err(io::ErrorKind::HostUnreachable.into());
        assert_eq!(kind(error), io::ErrorKind::HostUnreachable);
        assert_eq!(kind(|| panic!("a planted panic")), io::ErrorKind::Other);
        assert_eq!(RUNNING.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn i8_lookups_beyond_the_limit_fail_at_once() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        let (_waker, stop) = waker().unwrap();
        let one = || host_by(|_| Ok(found()), &RUNNING, "host.example", 80, late(), &stop);
        let mut slots: Vec<_> = (0..LOOKUPS_MAX)
            .map(|_| Slot::take(&RUNNING).unwrap())
            .collect();
        assert_eq!(one().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        slots.pop();
        assert_eq!(one().unwrap(), found());
    }

    #[test]
    fn an_address_needs_no_thread_and_no_time() {
        static RUNNING: AtomicUsize = AtomicUsize::new(LOOKUPS_MAX);
        let (waker, stop) = waker().unwrap();
        waker.wake();
        for (host, address) in [
            ("192.0.2.7", FOUND),
            ("2001:db8::7", "[2001:db8::7]:80"),
            ("[2001:db8::7]", "[2001:db8::7]:80"),
        ] {
            let look_up = |_: &str| unreachable!();
            let found = host_by(look_up, &RUNNING, host, 80, Instant::now(), &stop);
            assert_eq!(found.unwrap(), [address.parse().unwrap()]);
        }
    }

    #[test]
    fn an_endpoint_is_a_host_and_a_port() {
        assert_eq!(parts("host-b.example:80"), Some(("host-b.example", 80)));
        assert_eq!(parts("[::1]:80"), Some(("[::1]", 80)));
        for malformed in [
            "127.0.0.1",
            ":80",
            "host-b.example:",
            "host-b.example:65536",
            "::1:4444",
            "2001:db8::2",
            "[::1]",
        ] {
            assert_eq!(parts(malformed), None, "{malformed}");
        }
    }
}
