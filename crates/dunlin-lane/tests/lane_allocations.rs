//! Sending and receiving frames allocates nothing. The test is a separate program, because the
//! counter replaces the process's allocator.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use dunlin_lane::data::*;
use dunlin_lane::provider::{Crypto, Provider};
use dunlin_rig::linux::allocations::{Counting, allocations, count_this_thread};
use dunlin_test_support::lane::*;
use vm_memory::VolatileSlice;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FRAMES: usize = 200;
const WARM_UP: usize = 20;
const HEADER_BYTES: usize = 600;

#[test]
fn i8_no_frame_allocates_on_either_side() {
    count_this_thread(true);
    let stall = Duration::from_secs(10);
    for &provider in Provider::built_in() {
        let (near, far) = secured(&Crypto::with(provider));
        let mut sender = DataSender::tls(near, stall).unwrap();
        let mut receiver = DataReceiver::tls(far, stall).unwrap();
        // Both threads stop at the barrier while the count is read. A channel is not used, because
        // the first wait on it would allocate.
        let barrier = Barrier::new(2);
        let (before, after, sum) = thread::scope(|scope| {
            scope.spawn(|| {
                let mut memory = [7; PAGE_BYTES];
                let guest = VolatileSlice::from(&mut memory[..]);
                count_this_thread(true);
                for number in 0..FRAMES {
                    if number == WARM_UP {
                        barrier.wait();
                        barrier.wait();
                    }
                    let mut frame = sender.frame();
                    for page in 0..PAGES_PER_FRAME {
                        if page % 3 != 0 {
                            assert_eq!(frame.guest_page(&guest), Ok(true));
                        }
                    }
                    frame.finish(&[7; HEADER_BYTES]).unwrap();
                }
                barrier.wait();
            });
            let pages = (0..PAGES_PER_FRAME).filter(|page| page % 3 != 0).count();
            let mut header = [0; HEADER_BYTES];
            let mut sum = 0_u64;
            let mut before = 0;
            for number in 0..FRAMES {
                if number == WARM_UP {
                    barrier.wait();
                    before = allocations();
                    barrier.wait();
                }
                assert!(receiver.next(&mut header, None).unwrap());
                receiver
                    .payload((pages * PAGE_BYTES) as u64, |part| {
                        sum += u64::from(part[0])
                    })
                    .unwrap();
            }
            let after = allocations();
            barrier.wait();
            (before, after, sum)
        });
        assert!(sum > 0);
        assert_eq!(
            after - before,
            0,
            "{provider}: allocations in {} frames",
            FRAMES - WARM_UP
        );
    }
}
