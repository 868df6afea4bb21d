//! The heap of the C library (malloc(3)).

/// Lets all threads that the process starts from now on share one part of the heap (M_ARENA_MAX, mallopt(3)).
/// Otherwise each part keeps what the thread that needed most once had: with two CPUs, there are up to 16
/// parts. In return, threads wait for each other while they allocate. Does nothing with a C library other
/// than glibc.
pub fn share() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) has no preconditions. Its lock makes it safe in every thread.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns free memory of the heap to the kernel (malloc_trim(3)). free(3) returns only large
/// blocks and the free memory at the end of a heap. Does nothing with a C library other than glibc.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) has no preconditions and is safe in every thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
