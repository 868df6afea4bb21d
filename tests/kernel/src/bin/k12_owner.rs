//! The owner of a kernel-TLS socket can use non-blocking mode, can write from several threads, and
//! can end the stream.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::process::ExitCode;
use std::thread;

use dunlin_kernel_tests::handoff::{Stunnel, certificate, connected, stunnel};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::socket::wait_writable;
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 180,
    ..Needs::NOTHING
};
const TRUSTED: [&str; 2] = ["--cert-bundle-file", "pool.pem"];

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let stunnel = stunnel(guest, 4443, "");
        non_blocking_writes(&stunnel);
        two_writers(&stunnel);
    })
}

/// A non-blocking writer sends more than all buffers can hold.
fn non_blocking_writes(stunnel: &Stunnel) {
    let (near, far) = connected(stunnel, &TRUSTED);
    near.set_nonblocking(true)
        .expect("the descriptor is a socket");
    let bytes = pattern(24 << 20, 11);
    let (mut early, mut partial) = (0, 0);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut all = Vec::new();
            (&far).read_to_end(&mut all).expect("the data arrives");
            all
        });
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let part = &rest[..rest.len().min(300_001)];
            match (&near).write(part) {
                Ok(count) => {
                    partial += usize::from(count < part.len());
                    rest = &rest[count..];
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    early += 1;
                    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
                    assert!(wait_writable(&near, until).expect("the socket can be polled"));
                }
                Err(error) => panic!("{error}"),
            }
        }
        near.shutdown(Shutdown::Write).expect("the socket is open");
        assert!(reader.join().expect("the thread does not panic") == bytes);
    });
    println!("{early} writes would have waited, {partial} were partial");
    assert!(
        early > 0,
        "the buffers held everything, so no write blocked"
    );
}

/// The bytes of a write that is shorter than a record stay contiguous, even if another thread
/// writes at the same time.
fn two_writers(stunnel: &Stunnel) {
    const BLOCK: usize = 4096;
    const BLOCKS: usize = 600;
    let (near, far) = connected(stunnel, &TRUSTED);
    let received = thread::scope(|scope| {
        let writers: Vec<_> = [b'a', b'b']
            .map(|mark| {
                let near = &near;
                scope.spawn(move || {
                    let mut near = near;
                    for _ in 0..BLOCKS {
                        near.write_all(&[mark; BLOCK]).expect("the data is sent");
                    }
                })
            })
            .into();
        let ender = scope.spawn(|| {
            for writer in writers {
                writer.join().expect("the thread does not panic");
            }
            near.shutdown(Shutdown::Write).expect("the socket is open");
        });
        let mut all = Vec::new();
        (&far).read_to_end(&mut all).expect("the data arrives");
        ender.join().expect("the thread does not panic");
        all
    });
    assert_eq!(received.len(), 2 * BLOCKS * BLOCK);
    let is_whole = |block: &[u8]| block.iter().all(|byte| *byte == block[0]);
    assert!(received.chunks(BLOCK).all(is_whole), "two writes are mixed");
    let count = |mark: u8| received.iter().filter(|&&byte| byte == mark).count();
    assert_eq!(count(b'a'), BLOCKS * BLOCK);
    assert_eq!(count(b'b'), BLOCKS * BLOCK);
}
