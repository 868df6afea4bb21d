//! Memory that is swapped out on demand.

use std::io;

use vm_memory::VolatileSlice;

/// Asks the kernel to swap out `memory`, which consists of whole pages. The kernel may skip some
/// pages, such as those that another CPU has just accessed.
///
/// # Errors
/// An error from madvise(2).
pub fn page_out(memory: &VolatileSlice<'_>) -> io::Result<()> {
    let start = memory.ptr_guard_mut().as_ptr();
    // SAFETY: the range is mapped. MADV_PAGEOUT moves pages between memory and swap, or writes them
    // to their file, and does not change the content of the mapping.
    let result = unsafe { libc::madvise(start.cast(), memory.len(), libc::MADV_PAGEOUT) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
