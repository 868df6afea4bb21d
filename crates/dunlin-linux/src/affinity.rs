//! Which CPUs a thread may run on, and how much CPU time a thread or the process has used
//! (sched_setaffinity(2), clock_gettime(2)).

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

/// Keeps the calling thread on the given CPU.
///
/// # Errors
/// `EINVAL` if the CPU does not exist or is outside the process's cpuset.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    keep_to(&[cpu])
}

/// Keeps the calling thread, and the threads that it starts later, on the given CPUs.
///
/// # Errors
/// `EINVAL` if a number is 1024 (the size of the set) or more, or if none of the CPUs is in the
/// process's cpuset.
pub fn keep_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(Errno::INVAL.into());
        }
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// The CPUs on which the calling thread may run, in ascending order.
///
/// # Errors
/// An error from sched_getaffinity(2).
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    let cpus = 0..CpuSet::MAX_CPU;
    Ok(cpus.filter(|&cpu| set.is_set(cpu)).collect())
}

/// The number of CPUs that the host has and uses, or 1 if the kernel does not report it
/// (sysconf(3)).
#[must_use]
pub fn online() -> usize {
    // SAFETY: the call takes no pointers.
    let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    usize::try_from(count).unwrap_or(1).max(1)
}

/// User and system time that the calling thread has used.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    cpu_time(ClockId::ThreadCPUTime)
}

/// User and system time that all threads of the process have used.
#[must_use]
pub fn process_cpu_time() -> Duration {
    cpu_time(ClockId::ProcessCPUTime)
}

fn cpu_time(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).expect("CPU time is not negative")
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
            assert!(pin_to(CpuSet::MAX_CPU).is_err());
            assert!(keep_to(&[]).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_cpus_that_the_host_uses_are_counted() {
        let list = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        let count = |range: &str| {
            let mut ends = range.split('-').map(|end| end.parse::<usize>().unwrap());
            let first = ends.next().unwrap();
            ends.next().unwrap_or(first) - first + 1
        };
        let cpus: usize = list.trim().split(',').map(count).sum();
        assert_eq!(online(), cpus);
    }

    #[test]
    fn threads_that_are_started_later_inherit_the_cpus() {
        std::thread::spawn(|| {
            let first = allowed().unwrap()[0];
            // The kernel ignores CPUs that do not exist.
            keep_to(&[first, CpuSet::MAX_CPU - 1]).unwrap();
            let child = std::thread::spawn(|| allowed().unwrap());
            assert_eq!(child.join().unwrap(), [first]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn thread_cpu_time_counts_work_and_stays_below_elapsed_time() {
        let (began, before) = (std::time::Instant::now(), thread_cpu_time());
        let mut sum = 0_u64;
        while thread_cpu_time() - before < Duration::from_millis(5) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let used = thread_cpu_time() - before;
        assert!(used <= began.elapsed() + Duration::from_millis(1));
    }
}
