//! The heap of the C library (malloc(3)).

/// Returns free memory of the heap to the kernel (malloc_trim(3)). free(3) returns only large
/// blocks and the free memory at the end of a heap. Does nothing with a C library other than glibc.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) has no preconditions and is safe in every thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
