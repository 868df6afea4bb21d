//! What the kernel reports about a process, and about the time that a hypervisor takes.

use std::fs;

use anyhow::{Context, Result, bail};

/// USER_HZ, which is the same on all current architectures.
const TICKS_PER_S: f64 = 100.0;

/// Returns the user and system time of a process in seconds, with a resolution of 10 ms
/// (proc_pid_stat(5)). The process may be a zombie.
///
/// # Errors
/// /proc/PID/stat cannot be read or parsed, usually because there is no such process.
pub fn cpu_s(id: u32) -> Result<f64> {
    let path = format!("/proc/{id}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The name before the fields may contain spaces. The first field after the name is field 3; the
    // times are fields 14 and 15.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<f64>);
    match (times.next(), times.next()) {
        (Some(Ok(user)), Some(Ok(system))) => Ok((user + system) / TICKS_PER_S),
        _ => bail!("{path} has no CPU times"),
    }
}

/// Returns the CPU time in seconds since this host started, summed over its processors, for which
/// they waited although they had work, because this host is a virtual machine and its hypervisor did
/// something else (`steal` in proc_stat(5)). Resolution: 10 ms. The CPU times of processes can
/// include it.
///
/// # Errors
/// /proc/stat cannot be read or parsed.
pub fn stolen_s() -> Result<f64> {
    let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    stolen_of(&stat).context("/proc/stat has no steal time")
}

/// The stolen seconds in the first line of /proc/stat, which is the sum over all processors.
fn stolen_of(stat: &str) -> Option<f64> {
    let ticks: f64 = stat.split_whitespace().nth(8)?.parse().ok()?;
    Some(ticks / TICKS_PER_S)
}

/// Returns the largest amount of resident memory of a process so far, in bytes
/// (proc_pid_status(5)).
///
/// # Errors
/// There is no such process, or it has ended.
pub fn peak_bytes(id: u32) -> Result<u64> {
    let path = format!("/proc/{id}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    bytes_of(&status, "VmHWM:").with_context(|| format!("{path} has no VmHWM"))
}

/// The bytes in a line of a file in /proc, such as `VmHWM:  1024 kB`.
pub(crate) fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    #[test]
    fn the_stolen_time_is_the_eighth_of_the_sums() {
        let stat = "cpu  100 200 300 400 500 600 700 850 900 1000\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(super::stolen_of(stat), Some(8.5));
        assert_eq!(super::stolen_of("cpu  1 2 3"), None);
        assert!(super::stolen_s().unwrap() >= 0.0);
    }

    #[test]
    fn this_process_has_used_time_and_memory() {
        let id = std::process::id();
        let buffer = std::hint::black_box(vec![1_u8; 32 << 20]);
        assert!(super::peak_bytes(id).unwrap() >= buffer.len() as u64);
        let begin = super::cpu_s(id).unwrap();
        // Wait long, because the kernel counts CPU time in steps of 10 ms, and a busy host gives
        // this process little of it.
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while super::cpu_s(id).unwrap() <= begin {
            assert!(std::time::Instant::now() < until, "no time was counted");
        }
    }
}
