//! Passes sockets to another program: a payload over a unix socket, with the sockets attached to
//! its first byte (SCM_RIGHTS, unix(7)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use dunlin_linux::fdpass;
use dunlin_linux::socket::wait_writable;

/// Sends all of `payload`, with `sockets` attached to its first byte. The caller's descriptors stay
/// open.
///
/// # Errors
/// `TimedOut` if not all of `payload` could be written before `deadline`; otherwise an error
/// from [`fdpass::send`]. If part of the payload was sent before the error, the receiver can have
/// the sockets.
pub fn send_sockets(
    to: impl AsFd,
    payload: &[u8],
    sockets: &[BorrowedFd<'_>],
    deadline: Instant,
) -> io::Result<()> {
    let to = to.as_fd();
    let (mut rest, mut sockets) = (payload, sockets);
    loop {
        match fdpass::send(to, rest, sockets) {
            Ok(count) => {
                rest = &rest[count..];
                sockets = &[];
                if rest.is_empty() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !wait_writable(to, deadline)? {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn a_payload_sent_in_parts_carries_the_sockets_once() {
        let (here, there) = UnixStream::pair().unwrap();
        there
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let (passed, _other) = UnixStream::pair().unwrap();
        let payload: Vec<u8> = (0..1_000_000_u32).map(|number| number as u8).collect();
        let expected = payload.clone();
        let sender = thread::spawn(move || {
            let deadline = Instant::now() + Duration::from_secs(30);
            send_sockets(&here, &payload, &[passed.as_fd()], deadline)
        });
        let (mut all, mut sockets) = (Vec::new(), 0);
        while all.len() < expected.len() {
            let mut part = vec![0; 65_536];
            let received = fdpass::receive(&there, &mut part).unwrap();
            assert_ne!(received.bytes, 0);
            all.extend_from_slice(&part[..received.bytes]);
            sockets += received.descriptors.len();
        }
        sender.join().unwrap().unwrap();
        assert!(all == expected);
        assert_eq!(sockets, 1);
    }

    #[test]
    fn sending_to_a_slow_receiver_ends_at_the_deadline() {
        let (here, there) = UnixStream::pair().unwrap();
        let error = send_sockets(&here, &vec![0; 1 << 24], &[], soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(there);
        let error = send_sockets(&here, b"x", &[], soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
