//! Moves the bytes of one connection to another inside the kernel, without copying them into this
//! process.
//!
//! One thread serves one direction: it runs [`carry`] until the sender closes, a connection fails,
//! or [`Stop::request`] is called. The caller decides what an end or a failure means for the other
//! direction, because TLS does not accept an end that is not authenticated.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use dunlin_linux::poll::{Interest, Waker, Wakeup, poll, waker};
use dunlin_linux::splice::Conduit;

/// Why a direction stopped.
#[derive(Debug)]
pub enum Pause {
    /// The sender has closed, and everything is delivered.
    Ended,
    /// [`Stop::request`] was called.
    Stopped,
    /// The sender's connection failed. Everything received before that is delivered.
    ///
    /// If the next record on a socket with kernel TLS is not data, the error is `EINVAL`. After the
    /// caller has read that record, it can call [`carry`] again.
    From(io::Error),
    /// The receiver's connection failed.
    To(io::Error),
}

/// Stops both directions of a connection. If a direction is not waiting when the stop is requested,
/// it stops before its next step.
#[derive(Debug)]
pub struct Stop {
    is_requested: AtomicBool,
    waker: Waker,
    wakeup: Wakeup,
}

impl Stop {
    /// Returns a stop that has not been requested.
    pub fn new() -> io::Result<Self> {
        let (waker, wakeup) = waker()?;
        Ok(Self {
            is_requested: AtomicBool::new(false),
            waker,
            wakeup,
        })
    }

    /// Ends every wait that uses this stop.
    pub fn request(&self) {
        self.is_requested.store(true, Ordering::SeqCst);
        // The wake-up is never cleared, so every later wait ends immediately.
        self.waker.wake();
    }

    /// A descriptor that becomes readable when the stop is requested, for threads that do not wait
    /// with [`wait`].
    pub fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }

    /// Whether [`Stop::request`] has been called.
    pub fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::SeqCst)
    }
}

/// Moves the bytes of one direction between two non-blocking sockets and calls `carried` with the
/// number of bytes moved after each step. When this function returns, `conduit` holds the bytes
/// that `to` has not accepted.
pub fn carry(
    conduit: &mut Conduit,
    from: &impl AsFd,
    to: &impl AsFd,
    stop: &Stop,
    mut carried: impl FnMut(u64),
) -> Pause {
    while !stop.is_requested() {
        if conduit.held() == 0 {
            match conduit.take(from) {
                Ok(0) => return Pause::Ended,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Err(error) = wait(from, Readiness::Readable, stop) {
                        return Pause::From(error);
                    }
                    continue;
                }
                Err(error) => return Pause::From(error),
            }
        }
        let held = conduit.held();
        match conduit.give(to) {
            Ok(left) => carried(held.abs_diff(left) as u64),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if let Err(error) = wait(to, Readiness::Writable, stop) {
                    return Pause::To(error);
                }
            }
            Err(error) => return Pause::To(error),
        }
    }
    Pause::Stopped
}

/// The condition to wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// The socket has data to read.
    Readable,
    /// The socket has space to write.
    Writable,
}

/// Waits for the socket or the stop, without a timeout.
///
/// # Errors
/// An error from poll(2).
pub fn wait(socket: &impl AsFd, readiness: Readiness, stop: &Stop) -> io::Result<()> {
    let socket = Interest {
        fd: socket.as_fd(),
        read: readiness == Readiness::Readable,
        write: readiness == Readiness::Writable,
    };
    let stopped = Interest::read(&stop.wakeup);
    poll(&[socket, stopped], None).map(|_| ())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use dunlin_linux::socket::{set_reset_on_close, wait_writable};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        far.set_nonblocking(true).unwrap();
        (near, far)
    }

    #[test]
    fn a_slow_receiver_gets_everything_and_then_the_end() {
        let (mut near, from) = pair();
        let (mut far, to) = pair();
        let sent: Vec<u8> = (0..8 << 20)
            .map(|at: u32| (at >> 7) as u8 ^ at as u8)
            .collect();
        let stop = Stop::new().unwrap();
        let mut carried = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                near.write_all(&sent).unwrap();
                near.shutdown(Shutdown::Write).unwrap();
            });
            let carrier = scope.spawn(|| {
                let mut conduit = Conduit::new().unwrap();
                let pause = carry(&mut conduit, &from, &to, &stop, |count| carried += count);
                to.shutdown(Shutdown::Write).unwrap();
                pause
            });
            // The receiver starts late, so `carry` blocks first.
            thread::sleep(Duration::from_millis(50));
            let mut received = Vec::new();
            far.read_to_end(&mut received).unwrap();
            assert!(received == sent);
            assert!(matches!(carrier.join().unwrap(), Pause::Ended));
        });
        assert_eq!(carried, sent.len() as u64);
    }

    #[test]
    fn a_reset_differs_from_an_end_and_follows_the_sent_data() {
        let (mut near, from) = pair();
        let (mut far, to) = pair();
        let stop = Stop::new().unwrap();
        let mut conduit = Conduit::new().unwrap();
        near.write_all(b"last words").unwrap();
        thread::scope(|scope| {
            let carrier = scope.spawn(|| carry(&mut conduit, &from, &to, &stop, |_| {}));
            let mut received = [0; 10];
            far.read_exact(&mut received).unwrap();
            assert_eq!(&received, b"last words");
            set_reset_on_close(&near).unwrap();
            drop(near);
            let Pause::From(error) = carrier.join().unwrap() else {
                panic!("the sender's failure was not reported");
            };
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        });
    }

    #[test]
    fn it_stops_at_once_while_waiting_for_sender_or_receiver() {
        const LIMIT: Duration = Duration::from_secs(5);
        for is_full in [false, true] {
            let (mut near, from) = pair();
            let (mut far, to) = pair();
            let stop = Stop::new().unwrap();
            thread::scope(|scope| {
                let (pause, paused) = mpsc::channel();
                let (from, to, stop) = (&from, &to, &stop);
                scope.spawn(move || {
                    let mut conduit = Conduit::new().unwrap();
                    pause.send(carry(&mut conduit, from, to, stop, |_| {}))
                });
                if is_full {
                    near.set_nonblocking(true).unwrap();
                    // Fill both sockets and the pipe between them until no more bytes move.
                    let still = Duration::from_millis(100);
                    while wait_writable(&near, Instant::now() + still).unwrap() {
                        near.write_all(&[7]).unwrap();
                        while near.write(&[7; 65536]).is_ok() {}
                    }
                } else {
                    near.write_all(b"x").unwrap();
                    far.read_exact(&mut [0]).unwrap();
                }
                assert!(paused.try_recv().is_err(), "`carry` ended before the stop");
                stop.request();
                let pause = paused.recv_timeout(LIMIT);
                // Shut down the sockets in any case, because the scope would not end if `carry` did
                // not stop.
                for end in [from, to] {
                    let _ = end.shutdown(Shutdown::Both);
                }
                assert!(matches!(pause, Ok(Pause::Stopped)), "{pause:?}");
            });
        }
    }
}
