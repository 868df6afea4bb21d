//! If pages are written during a send, the records still authenticate at the receiver.
//! Each byte of a page is the old or the new one.

use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use dunlin_kernel_tests::tls::{Keys, Peer, file, kernel_and_peer};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::mapping::{Backing, allocate};
use dunlin_linux::memory::untracked;
use nix::sys::sendfile::sendfile;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, WriteVolatile};

const BYTES: usize = 8 << 20;
const PAGE: usize = 4096;
const PAGES: usize = BYTES / PAGE;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        memory();
        file_pages();
    })
}

/// Tests the memory of a guest, which is passed directly to the send call.
fn memory() {
    let memory = allocate(BYTES as u64, Backing::Memfd).expect("there is memory");
    let send = |socket: &mut TcpStream| {
        let whole = memory
            .get_slice(GuestAddress(0), BYTES)
            .expect("the memory is one region");
        let mut rest = untracked(&whole);
        while !rest.is_empty() {
            let sent = socket.write_volatile(&rest).expect("the data is sent");
            rest = rest.offset(sent).expect("the range is inside the memory");
        }
    };
    let scribble = |page: usize, byte: u8| {
        memory
            .write_slice(&[byte; PAGE], GuestAddress((page * PAGE) as u64))
            .expect("the range is inside the memory");
    };
    arrives_authentic_although_written(send, scribble);
}

/// Tests the pages of a file, which sendfile(2) sends by reference.
fn file_pages() {
    let file: File = file(&[0; BYTES]);
    let send = |socket: &mut TcpStream| {
        let mut at = 0;
        while at < BYTES as i64 {
            let rest = BYTES - at as usize;
            sendfile(&*socket, &file, Some(&mut at), rest).expect("the data is sent");
        }
    };
    let scribble = |page: usize, byte: u8| {
        file.write_all_at(&[byte; PAGE], (page * PAGE) as u64)
            .expect("the file is writable");
    };
    arrives_authentic_although_written(send, scribble);
}

fn arrives_authentic_although_written(
    send: impl FnOnce(&mut TcpStream) + Send,
    scribble: impl Fn(usize, u8) + Sync,
) {
    let (mut kernel, peer) = kernel_and_peer(Keys::new(1), Keys::new(2));
    let (done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let received = thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            // The peer fails at the first record that is not authentic.
            let mut peer: Peer = peer;
            peer.receive_all().0
        });
        scope.spawn(|| {
            for byte in (0..=255).cycle() {
                for page in (0..PAGES).step_by(7) {
                    scribble(page, byte);
                }
                rounds.fetch_add(1, Ordering::Relaxed);
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        // Wait for at least one round of writes before the first byte is sent.
        while rounds.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        let before = rounds.load(Ordering::Relaxed);
        send(&mut kernel);
        let during = rounds.load(Ordering::Relaxed) - before;
        done.store(true, Ordering::Relaxed);
        kernel.flush().expect("the data is sent");
        kernel
            .shutdown(std::net::Shutdown::Write)
            .expect("the socket is open");
        let received = receiver.join().expect("every record was authentic");
        println!("written to {during} times over while it was sent");
        assert!(during > 0, "no page was written during the send");
        received
    });
    assert_eq!(received.len(), BYTES);
    let mut seen: Vec<u8> = received.iter().step_by(7 * PAGE).copied().collect();
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() > 1, "bytes of only one write arrived: {seen:?}");
}
