//! The memory limits of this process's control groups
//! (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A memory limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// The limit in bytes, for all processes of the group together.
    pub bytes: u64,
    /// The file that sets the limit.
    pub file: PathBuf,
}

/// The lowest memory limit of this process, set by its own group or by an ancestor of that group.
/// `None` if no limit can be read.
///
/// # Errors
/// /proc cannot be read.
pub(crate) fn memory_limit() -> io::Result<Option<MemoryLimit>> {
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(directories(&groups, &mounts)
        .iter()
        .flat_map(|(mount, directory, file)| {
            directory
                .ancestors()
                .take_while(move |above| above.starts_with(mount))
                .map(move |above| above.join(file))
        })
        .filter_map(|file| {
            let bytes = fs::read_to_string(&file).ok()?.trim().parse().ok()?;
            Some(MemoryLimit { bytes, file })
        })
        .min_by_key(|limit| limit.bytes))
}

/// Bytes of swap on this host.
///
/// # Errors
/// /proc cannot be read.
pub(crate) fn swap_bytes() -> io::Result<u64> {
    let information = fs::read_to_string("/proc/meminfo")?;
    let kibibytes = information
        .lines()
        .find_map(|line| line.strip_prefix("SwapTotal:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kibibytes.unwrap_or(0) << 10)
}

/// Returns one entry for each visible hierarchy that can limit memory: the mount point, the
/// directory of this process's group, and the name of the file with the limit. The arguments are
/// the contents of /proc/self/cgroup (cgroups(7)) and /proc/self/mountinfo
/// (proc_pid_mountinfo(5)).
fn directories(groups: &str, mounts: &str) -> Vec<(PathBuf, PathBuf, &'static str)> {
    let mut found = Vec::new();
    for mount in mounts.lines() {
        let Some((before, after)) = mount.split_once(" - ") else {
            continue;
        };
        let (before, after): (Vec<_>, Vec<_>) =
            (before.split(' ').collect(), after.split(' ').collect());
        let (&[_, _, _, root, point, ..], &[kind, _, options, ..]) = (&before[..], &after[..])
        else {
            continue;
        };
        let (controllers, file) = match kind {
            "cgroup2" => ("", "memory.max"),
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                ("memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let named = fields.next()?.split(',').any(|one| one == controllers);
            fields.next().filter(|_| named)
        });
        // The mount may show only a part of the hierarchy. A group outside that part is not
        // visible.
        let below = group.and_then(|group| Path::new(group).strip_prefix(root).ok());
        if let Some(below) = below {
            found.push((point.into(), Path::new(point).join(below), file));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_either_version_and_below_a_mounted_part() {
        let mounts = "\
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
37 31 0:34 /pods/a /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
38 31 0:35 / /proc rw - proc proc rw\n";
        let groups = "4:memory:/vms/web\n1:cpu:/\n0::/pods/a/web\n";
        let found = directories(groups, mounts);
        assert_eq!(
            found,
            [
                (
                    "/sys/fs/cgroup/memory".into(),
                    "/sys/fs/cgroup/memory/vms/web".into(),
                    "memory.limit_in_bytes"
                ),
                (
                    "/sys/fs/cgroup/unified".into(),
                    "/sys/fs/cgroup/unified/web".into(),
                    "memory.max"
                ),
            ]
        );
        assert!(directories("0::/elsewhere\n", mounts).is_empty());
    }

    #[test]
    fn the_limits_of_this_process_can_be_read() {
        let limit = memory_limit();
        assert!(
            limit
                .as_ref()
                .is_ok_and(|limit| { limit.as_ref().is_none_or(|limit| limit.bytes > 1 << 20) }),
            "{limit:?}"
        );
        assert!(swap_bytes().is_ok());
    }
}
