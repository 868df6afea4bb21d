//! An allocator that counts the allocations of some threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, for a test program's `#[global_allocator]`. Counts nothing until a
/// thread calls [`count_this_thread`].
pub struct Counting;

/// Starts or stops counting the allocations of the calling thread.
pub fn count_this_thread(is_counted: bool) {
    IS_COUNTED.with(|flag| flag.set(is_counted));
}

/// The number of allocations of all counted threads so far.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::SeqCst)
}

// SAFETY: every call is passed unchanged to the system's allocator, which upholds the contract.
// Counting uses an atomic and a thread-local that is initialised by a constant and needs no drop,
// so it allocates nothing itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_COUNTED.with(Cell::get) {
            ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` above, hence from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}
