//! A partial send reports exactly the bytes that arrive; the sends of two writers are not mixed.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dunlin_kernel_tests::tls::{DATA, Keys, RECORD, kernel_and_peer, kernels};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::socket::{set_buffers, wait_writable};
use dunlin_rig::linux::interrupt::Thread;
use dunlin_test_base::pattern;
use std::time::{Duration, Instant};

const BYTES: usize = 4 << 20;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        a_full_socket_accepts_a_part();
        an_interrupted_send_reports_the_accepted_bytes();
        an_interrupted_receive_loses_nothing();
        two_writers();
    })
}

fn a_full_socket_accepts_a_part() {
    let (mut near, far) = kernels();
    near.set_nonblocking(true).expect("the socket is open");
    let data = pattern(BYTES, 1);
    // The peer does not read yet, so the buffers fill up.
    let mut sent = near.write(&data).expect("the buffers are empty");
    assert!(sent < BYTES, "the buffers held everything");
    while let Ok(more) = near.write(&data[sent..]) {
        sent += more;
    }
    let reader = thread::spawn(move || read_all(far));
    let mut parts = 0;
    while sent < BYTES {
        match near.write(&data[sent..]) {
            Ok(taken) => {
                parts += 1;
                sent += taken;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let deadline = Instant::now() + Duration::from_secs(30);
                assert!(wait_writable(&near, deadline).expect("the descriptor is a socket"));
            }
            Err(error) => panic!("{error}"),
        }
    }
    // The data was sent in at least two parts: one or more before the loop, and one or more in it.
    // The number of parts is not fixed, because the kernel chooses their sizes.
    assert!(parts > 0, "the rest was accepted in one write");
    near.shutdown(Shutdown::Write).expect("the socket is open");
    assert!(reader.join().expect("the reader does not panic") == data);
}

fn an_interrupted_send_reports_the_accepted_bytes() {
    let (mut near, far) = kernels();
    let data = pattern(BYTES, 1);
    let writer = Thread::this().expect("the signal can be taken");
    let (done, started) = (AtomicBool::new(false), Barrier::new(2));
    let (mut sent, mut parts, mut nothing) = (0, 0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            started.wait();
            while !done.load(Ordering::Relaxed) {
                writer.interrupt().expect("the thread exists");
                thread::sleep(Duration::from_millis(1));
            }
        });
        let reader = scope.spawn(|| {
            // Read slowly, so that the writer has to wait.
            let mut far = far;
            let mut got = vec![0; BYTES];
            for part in got.chunks_mut(RECORD * 4) {
                far.read_exact(part).expect("the record is authentic");
                thread::sleep(Duration::from_millis(3));
            }
            got
        });
        started.wait();
        while sent < BYTES {
            match near.write(&data[sent..]) {
                Ok(taken) => {
                    parts += 1;
                    sent += taken;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => nothing += 1,
                Err(error) => panic!("{error}"),
            }
        }
        done.store(true, Ordering::Relaxed);
        assert!(
            reader.join().expect("the reader does not panic") == data,
            "bytes were lost or repeated"
        );
    });
    println!("{parts} parts, and {nothing} times nothing");
    assert!(parts > 1, "no send was interrupted");
}

fn an_interrupted_receive_loses_nothing() {
    let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    let reader = Thread::this().expect("the signal can be taken");
    let record = peer.seals.seal(DATA, &pattern(RECORD, 1));
    let (half, rest) = record.split_at(RECORD / 2);
    peer.socket.write_all(half).expect("the data is sent");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                reader.interrupt().expect("the thread exists");
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut kernel = &kernel;
        let mut got = vec![0; RECORD];
        let error = kernel
            .read(&mut got)
            .expect_err("half a record is not readable");
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        done.store(true, Ordering::Relaxed);
        peer.socket.write_all(rest).expect("the data is sent");
        while let Err(error) = kernel.read_exact(&mut got) {
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        }
        assert!(got == pattern(RECORD, 1));
    });
}

/// Two threads send on one socket. The buffer of each thread repeats one byte value.
fn two_writers() {
    for bytes in [3000, RECORD, 3 * RECORD + 100] {
        const SENDS: usize = 60;
        let (kernel, mut peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
        // Make the socket's buffer smaller than the largest send, so that a writer waits in the
        // middle of a send.
        set_buffers(&kernel, Some(RECORD as u32), None).expect("the option can be set");
        let (received, sizes) = thread::scope(|scope| {
            let receiver = scope.spawn(|| peer.receive_all());
            let writers = [1, 2].map(|byte| {
                let mut socket = &kernel;
                scope.spawn(move || {
                    for _ in 0..SENDS {
                        assert_eq!(
                            socket.write(&vec![byte; bytes]).expect("the data is sent"),
                            bytes
                        );
                    }
                })
            });
            for writer in writers {
                writer.join().expect("the writer does not panic");
            }
            kernel
                .shutdown(Shutdown::Write)
                .expect("the socket is open");
            receiver.join().expect("every record is authentic")
        });
        assert_eq!(received.len(), 2 * SENDS * bytes);
        let mut at = 0;
        for size in sizes {
            let record = &received[at..at + size];
            assert!(
                record.iter().all(|byte| *byte == record[0]),
                "a record has bytes of two writers"
            );
            at += size;
        }
        for send in received.chunks(bytes) {
            assert!(
                send.iter().all(|byte| *byte == send[0]),
                "one send is inside another"
            );
        }
    }
}

fn read_all(mut socket: TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    socket
        .read_to_end(&mut got)
        .expect("the record is authentic");
    got
}
