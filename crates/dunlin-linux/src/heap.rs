//! The heap of the C library (malloc(3)).

/// Makes all threads that the process starts from now on share one arena of the heap (M_ARENA_MAX,
/// mallopt(3)). By default glibc creates up to 8 arenas per CPU, and each arena keeps memory that
/// its threads have freed. The drawback is that threads wait for each other when they allocate.
/// Does nothing with a C library other than glibc.
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
