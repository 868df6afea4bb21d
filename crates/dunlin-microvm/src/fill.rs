//! The initial content of guest memory.

use std::thread;

use dunlin_linux::mapping::{PAGE_BYTES, TrackedMemory};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::config::WORKLOAD_START;
use crate::config::{Config, Fill};
use crate::layout;

/// Writes the initial content of every page that `fill` applies to, on as many threads as this
/// process has CPUs.
pub(crate) fn fill(memory: &TrackedMemory, config: &Config) -> Result<(), GuestMemoryError> {
    if config.fill == Fill::Zero {
        return Ok(());
    }
    let first = WORKLOAD_START / PAGE_BYTES;
    let pages = layout::fill_end(config) - first;
    let threads = thread::available_parallelism().map_or(1, |count| count.get() as u64);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let share =
                    first + pages * thread / threads..first + pages * (thread + 1) / threads;
                scope.spawn(move || {
                    share
                        .into_iter()
                        .try_for_each(|page| fill_page(memory, config, page))
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("filling a page does not panic"))
    })
}

fn fill_page(memory: &TrackedMemory, config: &Config, page: u64) -> Result<(), GuestMemoryError> {
    let frame = layout::frame(page);
    let Some(signature) = layout::signature(config.fill, config.seed, frame) else {
        return Ok(());
    };
    let mut bytes = [0; PAGE_BYTES as usize];
    let (words, _) = bytes.as_chunks_mut::<8>();
    let (last, rest) = words.split_last_mut().expect("a page has 512 words");
    // Marsaglia's xorshift generator, which needs a non-zero state.
    let mut state = signature | 1;
    let mut sum = signature;
    for word in &mut rest[1..] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        sum ^= state;
        *word = state.to_le_bytes();
    }
    *last = sum.to_le_bytes();
    memory.write_slice(&bytes, GuestAddress(frame * PAGE_BYTES))
}
