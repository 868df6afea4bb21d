//! A relay in front of a destination.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A relay to a destination that can delay and drop the destination's answers.
pub struct Way {
    pub address: String,
    held_ms: Arc<AtomicU64>,
}

/// In place of a delay: drop.
const CUT: u64 = u64::MAX;

impl Way {
    pub fn to(destination: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let held_ms = Arc::<AtomicU64>::default();
        let (held, destination) = (Arc::clone(&held_ms), destination.to_owned());
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                // If the destination does not listen, the connection is refused.
                let Ok(far) = TcpStream::connect(&destination) else {
                    continue;
                };
                let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let held = Arc::clone(&held);
                std::thread::spawn(move || copy(near_too, far_too, &AtomicU64::new(0)));
                std::thread::spawn(move || copy(far, near, &held));
            }
        });
        Self { address, held_ms }
    }

    /// Delays each answer by `time` from now on.
    pub fn hold(&self, time: Duration) {
        let millis = time.as_millis().try_into().unwrap();
        self.held_ms.store(millis, Ordering::SeqCst);
    }

    /// Drops the delayed answers and all later ones.
    pub fn cut(&self) {
        self.held_ms.store(CUT, Ordering::SeqCst);
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, held_ms: &AtomicU64) {
    let mut buffer = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        match held_ms.load(Ordering::SeqCst) {
            CUT => break,
            millis => std::thread::sleep(Duration::from_millis(millis)),
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
