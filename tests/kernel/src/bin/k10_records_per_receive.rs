//! One receive call returns many records of any size; a record of another type ends the call.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::tls::{
    ALERT, DATA, Half, Keys, RECORD, await_bytes, kernel_and_peer, receive,
};
use dunlin_kernel_tests::{Needs, run};
use dunlin_test_base::pattern;
use nix::sys::socket::{MsgFlags, recv};

const BYTES: usize = 1 << 20;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        receives_all_queued_records();
        waitall_waits_for_all_bytes();
        odd_sizes();
        a_control_record_is_received_alone();
        peek_consumes_nothing();
    })
}

/// One receive call returns eight queued records.
fn receives_all_queued_records() {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    let data = pattern(8 * 4000, 1);
    let on_the_wire = queue(&mut peer.socket, &mut peer.seals, &data, 4000);
    await_bytes(&kernel, on_the_wire);
    let mut buffer = vec![0; BYTES];
    let received = receive(&kernel, &mut buffer).expect("the record is authentic");
    println!("count of records a receive: {}", received.1 / 4000);
    assert_eq!(received, (DATA, data.len()));
    assert!(buffer[..data.len()] == data);
}

fn waitall_waits_for_all_bytes() {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    let data = pattern(BYTES, 1);
    let sender = thread::spawn({
        let data = data.clone();
        move || queue(&mut peer.socket, &mut peer.seals, &data, RECORD)
    });
    let mut buffer = vec![0; BYTES];
    let got = recv(kernel.as_raw_fd(), &mut buffer, MsgFlags::MSG_WAITALL);
    assert_eq!(got, Ok(BYTES));
    assert!(buffer == data);
    sender.join().expect("the sender does not panic");
}

fn odd_sizes() {
    for (record, read) in [
        (1, 3),
        (1000, 7),
        (RECORD, 4096),
        (RECORD, 16385),
        (777, 16383),
    ] {
        let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
        let data = pattern(record * 20, 1);
        let sender = thread::spawn({
            let data = data.clone();
            move || queue(&mut peer.socket, &mut peer.seals, &data, record)
        });
        let mut got: Vec<u8> = Vec::new();
        let mut buffer = vec![0; read];
        while got.len() < data.len() {
            let taken = kernel.read(&mut buffer).expect("the record is authentic");
            assert_ne!(taken, 0);
            got.extend(&buffer[..taken]);
        }
        assert!(got == data, "records of {record}, reads of {read}");
        sender.join().expect("the sender does not panic");
    }
}

fn a_control_record_is_received_alone() {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    let mut wire = Vec::new();
    for (kind, content) in [
        (DATA, &b"one "[..]),
        (DATA, b"two"),
        (ALERT, &[1, 90]),
        (ALERT, &[1, 91]),
        (DATA, b"three"),
    ] {
        wire.extend(peer.seals.seal(kind, content));
    }
    peer.socket.write_all(&wire).expect("the data is sent");
    await_bytes(&kernel, wire.len());
    let mut buffer = [0; 64];
    assert_eq!(receive(&kernel, &mut buffer), Ok((DATA, 7)));
    assert_eq!(receive(&kernel, &mut buffer), Ok((ALERT, 2)));
    assert_eq!(buffer[1], 90);
    assert_eq!(receive(&kernel, &mut buffer), Ok((ALERT, 2)));
    assert_eq!(buffer[1], 91);
    assert_eq!(receive(&kernel, &mut buffer), Ok((DATA, 5)));
}

fn peek_consumes_nothing() {
    let (mut kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    peer.send(DATA, b"there");
    let mut buffer = [0; 5];
    for _ in 0..2 {
        assert_eq!(
            kernel.peek(&mut buffer).expect("the record is authentic"),
            5
        );
        assert_eq!(&buffer, b"there");
    }
    kernel
        .read_exact(&mut buffer)
        .expect("the data is still queued");
    assert_eq!(&buffer, b"there");
}

/// Sends `data` in records of `record` bytes each. Returns the number of bytes on the wire.
fn queue(socket: &mut TcpStream, seals: &mut Half, data: &[u8], record: usize) -> usize {
    let wire: Vec<u8> = data
        .chunks(record)
        .flat_map(|content| seals.seal(DATA, content))
        .collect();
    socket.write_all(&wire).expect("the data is sent");
    wire.len()
}
