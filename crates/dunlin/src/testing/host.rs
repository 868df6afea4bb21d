//! Checks of the sockets and threads that a host provides.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::poll::waker;

use super::{Violation, broken};
use crate::engine::Host;

/// How long after its deadline a call may return.
const GRACE: Duration = Duration::from_secs(2);

/// Tests the connections and the threads of `host`. The connections go to a listener on
/// `127.0.0.1`; `endpoint` turns a port into the address by which `host` reaches this listener.
///
/// # Errors
/// The first [`Violation`].
pub fn check_host(host: &dyn Host, endpoint: &dyn Fn(u16) -> String) -> Result<(), Violation> {
    const CONNECT: &str = "Connector::connect";
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port();
    let deadline = Instant::now() + Duration::from_secs(5);
    let (waker, stop) = waker()?;
    let connected = host.connect(&endpoint(port), deadline, &stop);
    let mut near = connected.map_err(|error| {
        let promise = "it connects to a listener";
        broken(CONNECT, promise, format!("it fails: {error}"))
    })?;
    let mut far = listener.accept()?.0;
    let (sender, receiver) = channel();
    let reader = thread::spawn(move || {
        let mut byte = [0];
        // Sending fails only if the check below has already timed out.
        let _ = sender.send(near.read_exact(&mut byte).map(|()| byte[0]));
    });
    // The wait is long enough for a read on a non-blocking socket to fail.
    thread::sleep(Duration::from_millis(20));
    far.write_all(&[7])?;
    let byte = receiver.recv_timeout(GRACE);
    if !matches!(byte, Ok(Ok(7))) {
        return Err(broken(
            CONNECT,
            "its sockets block until there is something to read",
            format!("a sent byte was received as {byte:?}"),
        ));
    }
    drop(reader.join());

    drop(listener);
    let began = Instant::now();
    let limit = Duration::from_millis(200);
    let refused = host.connect(&endpoint(port), began + limit, &stop);
    drop(waker);
    if refused.is_ok() || began.elapsed() > limit + GRACE {
        return Err(broken(
            CONNECT,
            "it fails by the deadline if there is no listener",
            format!("it returned {refused:?} after {:?}", began.elapsed()),
        ));
    }

    let (sender, receiver) = channel();
    let body = move || {
        // Sending fails only if the check below has already timed out.
        let _ = sender.send(thread::current().id());
    };
    let spawned = host.spawn("dunlin-testing".into(), Box::new(body))?;
    let ran = receiver.recv_timeout(GRACE);
    if ran.is_err() || ran == Ok(thread::current().id()) || spawned.join().is_err() {
        return Err(broken(
            "Host::spawn",
            "the body runs on its own thread, which can be joined",
            format!("it ran on {ran:?}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io;
    use std::net::TcpStream;
    use std::thread::JoinHandle;

    use super::*;
    use crate::engine::{Connector, StandardHost, Wakeup};

    /// The defect of a broken host.
    enum Fault {
        /// The host's sockets do not block.
        NonBlocking,
        /// The host runs the body immediately, on the calling thread.
        SameThread,
        /// The host waits far beyond the deadline.
        Late,
    }

    impl Connector for Fault {
        fn connect(
            &self,
            endpoint: &str,
            deadline: Instant,
            stop: &Wakeup,
        ) -> io::Result<TcpStream> {
            let stream = StandardHost.connect(endpoint, deadline, stop);
            match self {
                Self::NonBlocking => stream.inspect(|stream| stream.set_nonblocking(true).unwrap()),
                Self::Late => {
                    if stream.is_err() {
                        thread::sleep(GRACE + Duration::from_millis(300));
                    }
                    stream
                }
                Self::SameThread => stream,
            }
        }
    }

    impl Host for Fault {
        fn spawn(
            &self,
            name: String,
            body: Box<dyn FnOnce() + Send>,
        ) -> io::Result<JoinHandle<()>> {
            match self {
                Self::SameThread => {
                    body();
                    StandardHost.spawn(name, Box::new(|| ()))
                }
                _ => StandardHost.spawn(name, body),
            }
        }
    }

    #[test]
    fn broken_hosts_are_found() {
        let endpoint = |port| format!("127.0.0.1:{port}");
        check_host(&StandardHost, &endpoint).unwrap();
        for (fault, sentence) in [
            (
                Fault::NonBlocking,
                "Connector::connect promises that its sockets",
            ),
            (Fault::SameThread, "Host::spawn promises that the body"),
            (Fault::Late, "Connector::connect promises that it fails by"),
        ] {
            let text = check_host(&fault, &endpoint).unwrap_err().to_string();
            assert!(text.starts_with(sentence), "{text}");
        }
    }
}
