//! A proxy in front of a destination.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A proxy in front of a destination. It can delay or drop the messages to the destination, and the
/// destination's answers.
pub struct Proxy {
    pub address: String,
    answers_held_ms: Arc<AtomicU64>,
    messages_held_ms: Arc<AtomicU64>,
}

/// A special value of a delay, with which the proxy drops all bytes.
const CUT: u64 = u64::MAX;

impl Proxy {
    pub fn to(destination: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let answers_held_ms = Arc::<AtomicU64>::default();
        let messages_held_ms = Arc::<AtomicU64>::default();
        let (answers, messages) = (Arc::clone(&answers_held_ms), Arc::clone(&messages_held_ms));
        let destination = destination.to_owned();
        std::thread::spawn(move || {
            for (number, near) in listener.incoming().map_while(Result::ok).enumerate() {
                // If the destination does not listen, close the connection.
                let Ok(far) = TcpStream::connect(&destination) else {
                    continue;
                };
                let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let (answers, messages) = (Arc::clone(&answers), Arc::clone(&messages));
                // The first connection is the control lane. Only its messages are delayed, because
                // the same delay for each read of pages would take minutes.
                let waits = number == 0;
                std::thread::spawn(move || copy(near_too, far_too, &messages, waits));
                std::thread::spawn(move || copy(far, near, &answers, true));
            }
        });
        Self {
            address,
            answers_held_ms,
            messages_held_ms,
        }
    }

    /// Delays each answer by `time` after its arrival. This also applies to the answers that are
    /// already delayed.
    pub fn hold(&self, time: Duration) {
        self.answers_held_ms.store(millis(time), Ordering::SeqCst);
    }

    /// Drops all answers from now on, including the delayed ones. When the proxy drops an answer,
    /// it ends that direction of the connection.
    pub fn cut(&self) {
        self.answers_held_ms.store(CUT, Ordering::SeqCst);
    }

    /// Delays each message on the first control lane by `time` after its arrival.
    pub fn hold_messages(&self, time: Duration) {
        self.messages_held_ms.store(millis(time), Ordering::SeqCst);
    }

    /// Drops all messages from now on, including the delayed ones, on every connection. When the
    /// proxy drops a message, it ends that direction of the connection.
    pub fn cut_messages(&self) {
        self.messages_held_ms.store(CUT, Ordering::SeqCst);
    }

    /// Forwards new connections without delay.
    pub fn mend(&self) {
        for held in [&self.answers_held_ms, &self.messages_held_ms] {
            held.store(0, Ordering::SeqCst);
        }
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap()
}

fn copy(mut from: TcpStream, mut to: TcpStream, held_ms: &AtomicU64, waits: bool) {
    let mut buffer = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let read = Instant::now();
        let is_held = |held| held != CUT && read.elapsed() < Duration::from_millis(held);
        while waits && is_held(held_ms.load(Ordering::SeqCst)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if held_ms.load(Ordering::SeqCst) == CUT {
            break;
        }
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
