//! Each send makes records of its own, unless MSG_MORE is set.
//! A close discards data that MSG_MORE held back.

use std::io::{IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::tls::{Keys, Peer, RECORD, await_bytes, file, kernel_and_peer, pipe};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::socket::unread_bytes;
use dunlin_test_base::pattern;
use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::sendfile::sendfile;
use nix::sys::socket::{MsgFlags, send};
use std::net::TcpStream;

const BYTES: usize = 1 << 20;

/// `MsgFlags` has no constant for this flag.
const MORE: MsgFlags = MsgFlags::from_bits_retain(nix::libc::MSG_MORE);

/// The number of bytes that each record adds: header, content type and tag.
const OVERHEAD: usize = 5 + 1 + 16;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        for (bytes, plain, more) in [
            (BYTES, 64, 64),
            (RECORD + 1, 127, 64),
            (RECORD, 64, 64),
            (4096, 256, 64),
            (1000, 1049, 64),
        ] {
            let count = records(|socket, data| pieces(socket, data, bytes, MsgFlags::empty()));
            let held = records(|socket, data| pieces(socket, data, bytes, MORE));
            println!("count of records a MiB, sends of {bytes}: {count}, with MSG_MORE {held}");
            assert_eq!((count, held), (plain, more), "sends of {bytes}");
        }
        let gathered = records(|socket, data| {
            let parts: Vec<IoSlice<'_>> = data.chunks(4096).map(IoSlice::new).collect();
            assert_eq!(
                socket.write_vectored(&parts).expect("the data is sent"),
                BYTES
            );
        });
        assert_eq!(gathered, 64, "the parts of one call are not one send");
        let count = records(by_sendfile);
        println!("count of records a MiB, sendfile: {count}");
        assert_eq!(count, 64);
        for pipe_bytes in [4096, 1 << 16, BYTES] {
            let count = records(|socket, data| by_splice(socket, data, pipe_bytes));
            println!("count of records a MiB, splices of {pipe_bytes}: {count}");
            assert_eq!(count, (BYTES / pipe_bytes).max(64));
        }
        held_data_is_sent_with_the_next_send();
        a_close_loses_held_data();
    })
}

/// Sends one mebibyte with `send`, and returns the number of records that arrived.
fn records(send: impl FnOnce(&mut TcpStream, &[u8]) + Send) -> usize {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    let data = pattern(BYTES, 1);
    let (received, sizes) = thread::scope(|scope| {
        let receiver = scope.spawn(|| Peer::receive_all(&mut peer));
        send(&mut kernel, &data);
        kernel
            .shutdown(Shutdown::Write)
            .expect("the socket is open");
        receiver.join().expect("all of it is authentic")
    });
    assert!(received == data, "the received data differs");
    sizes.len()
}

/// Sends the data in calls of `bytes` bytes each. All calls except the last have `flags`.
fn pieces(socket: &TcpStream, data: &[u8], bytes: usize, flags: MsgFlags) {
    let mut pieces = data.chunks(bytes).peekable();
    while let Some(piece) = pieces.next() {
        let flags = if pieces.peek().is_some() {
            flags
        } else {
            MsgFlags::empty()
        };
        let sent = send(socket.as_raw_fd(), piece, flags).expect("the data is sent");
        assert_eq!(sent, piece.len());
    }
}

fn by_sendfile(socket: &mut TcpStream, data: &[u8]) {
    let file = file(data);
    let mut at = 0;
    while at < BYTES as i64 {
        let rest = BYTES - at as usize;
        sendfile(&*socket, &file, Some(&mut at), rest).expect("the data is sent");
    }
}

fn by_splice(socket: &mut TcpStream, data: &[u8], bytes: usize) {
    let file = file(data);
    let (from, to) = pipe();
    for at in (0..BYTES).step_by(bytes) {
        let mut offset = at as i64;
        let mut held = 0;
        while held < bytes {
            let rest = bytes - held;
            let flags = SpliceFFlags::empty();
            held +=
                splice(&file, Some(&mut offset), &to, None, rest, flags).expect("the data is read");
        }
        while held > 0 {
            let flags = SpliceFFlags::empty();
            held -= splice(&from, None, &*socket, None, held, flags).expect("the data is sent");
        }
    }
}

fn held_data_is_sent_with_the_next_send() {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    send(kernel.as_raw_fd(), b"first, ", MORE).expect("the data is accepted");
    assert_eq!(
        unread_bytes(&peer.socket).expect("the descriptor is a socket"),
        0
    );
    kernel.write_all(b"second").expect("the data is sent");
    await_bytes(&peer.socket, OVERHEAD + 13);
    assert_eq!(peer.receive(), Some((23, b"first, second".to_vec())));
}

fn a_close_loses_held_data() {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    kernel.write_all(b"sent").expect("the data is sent");
    send(kernel.as_raw_fd(), b"lost", MORE).expect("the data is accepted");
    drop(kernel);
    let mut rest = Vec::new();
    peer.socket.read_to_end(&mut rest).expect("the stream ends");
    assert_eq!(
        rest.len(),
        OVERHEAD + 4,
        "not exactly one of the two records arrived"
    );
}
