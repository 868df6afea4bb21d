//! Which CPUs a thread may run on, and how much CPU time was used
//! (sched_setaffinity(2), getrusage(2)).

use std::io;
use std::time::Duration;

/// Keeps the calling thread on the given CPU.
///
/// # Errors
/// `EINVAL` when the CPU does not exist or is outside the process's cpuset.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    keep_to(&[cpu])
}

/// Keeps the calling thread, and all that it starts later, on the given CPUs.
///
/// # Errors
/// `EINVAL` when one is beyond what a set holds (1024), or none of them exists within
/// the process's cpuset.
pub fn keep_to(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: cpu_set_t is a plain bit mask for which all zero means empty.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus {
        if cpu >= libc::CPU_SETSIZE as usize {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: `cpu` is below CPU_SETSIZE, so the bit lies within the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: 0 is the calling thread; the set outlives the call and its size
    // is given.
    let result =
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The CPUs on which the calling thread may run, in ascending order.
///
/// # Errors
/// Whatever sched_getaffinity(2) reports.
pub fn allowed() -> io::Result<Vec<usize>> {
    // SAFETY: cpu_set_t is a plain bit mask for which all zero means empty.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is the calling thread; the set is writable and its size given.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((0..libc::CPU_SETSIZE as usize)
        // SAFETY: every index is below CPU_SETSIZE.
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// User and system time that this process has used, all its threads together.
#[must_use]
pub fn process_cpu_time() -> Duration {
    cpu_time(libc::RUSAGE_SELF)
}

/// User and system time that the calling thread has used.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    cpu_time(libc::RUSAGE_THREAD)
}

fn cpu_time(who: libc::c_int) -> Duration {
    // SAFETY: rusage is a plain struct of integers; zero is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is writable; both values of `who` are always valid, so
    // the call cannot fail.
    unsafe { libc::getrusage(who, &raw mut usage) };
    let part = |time: libc::timeval| {
        Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
            + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
    };
    part(usage.ru_utime) + part(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_pinned_thread_may_run_on_that_cpu_only() {
        std::thread::spawn(|| {
            let last = *allowed().unwrap().last().unwrap();
            pin_to(last).unwrap();
            assert_eq!(allowed().unwrap(), [last]);
            assert!(pin_to(libc::CPU_SETSIZE as usize).is_err());
            assert!(keep_to(&[]).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn threads_that_are_started_later_are_kept_to_the_same_cpus() {
        std::thread::spawn(|| {
            let first = allowed().unwrap()[0];
            // One that is not there is as good as none.
            keep_to(&[first, libc::CPU_SETSIZE as usize - 1]).unwrap();
            let child = std::thread::spawn(|| allowed().unwrap());
            assert_eq!(child.join().unwrap(), [first]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn work_shows_in_the_threads_time() {
        let before = thread_cpu_time();
        let mut sum = 0_u64;
        while thread_cpu_time() - before < Duration::from_millis(5) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(process_cpu_time() >= thread_cpu_time() - before);
    }
}
