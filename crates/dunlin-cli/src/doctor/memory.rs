//! Huge pages for guest memory.

use std::fs;

use super::verdict::{Verdict, setting};

const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";
const RESERVED: &str = "/sys/kernel/mm/hugepages";

/// Reserved huge pages of one size.
#[derive(Clone, Copy, Debug)]
struct Pool {
    kib: u64,
    total: u64,
    free: u64,
}

pub(super) fn examine() -> Vec<Verdict> {
    let chosen = |file: &str| chosen(&setting(&format!("{TRANSPARENT}/{file}"))?);
    vec![
        transparent(chosen("enabled")),
        shmem(chosen("shmem_enabled")),
        reserved(&pools()),
    ]
}

/// The value in brackets in a file such as `always [madvise] never`.
fn chosen(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

fn transparent(chosen: Option<String>) -> Verdict {
    let check = "memory.transparent";
    match chosen.as_deref() {
        Some(value @ ("always" | "madvise")) => {
            Verdict::ok(check, value, "VMMs that ask for huge pages get them")
        }
        Some(value) => Verdict::warn(
            check,
            value,
            "guest memory consists of 4 KiB pages: migrations take more processor time",
            format!("echo madvise > {TRANSPARENT}/enabled"),
        ),
        None => absent(check),
    }
}

fn shmem(chosen: Option<String>) -> Verdict {
    let check = "memory.shmem";
    match chosen.as_deref() {
        Some(value @ ("never" | "deny")) => Verdict::warn(
            check,
            value,
            "shared guest memory (memfd, as for vhost-user) consists of 4 KiB pages",
            format!("echo advise > {TRANSPARENT}/shmem_enabled, if guests use shared memory"),
        ),
        Some(value) => Verdict::ok(check, value, "shared guest memory can have huge pages"),
        None => absent(check),
    }
}

fn absent(check: &str) -> Verdict {
    Verdict::warn(
        check,
        "absent",
        "guest memory consists of 4 KiB pages: migrations take more processor time",
        "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
    )
}

fn pools() -> Vec<Pool> {
    let entries = fs::read_dir(RESERVED).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let pool = |name: String| {
        let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
        let read = |file: &str| setting(&format!("{RESERVED}/{name}/{file}"))?.parse().ok();
        Some(Pool {
            kib: kib.parse().ok()?,
            total: read("nr_hugepages")?,
            free: read("free_hugepages")?,
        })
    };
    let mut pools: Vec<_> = names.filter_map(pool).collect();
    pools.sort_by_key(|pool| pool.kib);
    pools
}

fn reserved(pools: &[Pool]) -> Verdict {
    let check = "memory.reserved";
    let used: Vec<_> = pools.iter().filter(|pool| pool.total > 0).collect();
    if used.is_empty() {
        let means = "VMs that require reserved huge pages cannot run here";
        return Verdict::ok(check, "none", means);
    }
    let value = used
        .iter()
        .map(|pool| format!("{} of {} MiB", pool.total, pool.kib >> 10));
    let value = value.collect::<Vec<_>>().join(", ");
    let free: u64 = used.iter().map(|pool| pool.free * pool.kib).sum();
    if free == 0 {
        return Verdict::warn(
            check,
            value,
            "all are in use: no further VM with reserved huge pages can arrive",
            "raise vm.nr_hugepages",
        );
    }
    Verdict::ok(check, value, format!("{} MiB are free", free >> 10))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    #[test]
    fn the_value_in_brackets_is_in_force() {
        let text = "always within_size [advise] never deny force";
        assert_eq!(chosen(text).unwrap(), "advise");
        assert_eq!(shmem(chosen(text)).state, State::Ok);
        assert_eq!(shmem(Some("deny".to_owned())).state, State::Warn);
        assert_eq!(chosen("never"), None);
        let states =
            ["always", "madvise", "never"].map(|one| transparent(Some(one.to_owned())).state);
        assert_eq!(states, [State::Ok, State::Ok, State::Warn]);
        assert_eq!(transparent(None).state, State::Warn);
    }

    #[test]
    fn a_pool_without_free_pages_is_a_warning() {
        let pool = |kib, total, free| Pool { kib, total, free };
        assert_eq!(reserved(&[pool(2048, 0, 0)]).value, "none");
        let full = reserved(&[pool(2048, 8, 0), pool(1 << 20, 0, 0)]);
        assert_eq!((full.state, &*full.value), (State::Warn, "8 of 2 MiB"));
        let both = reserved(&[pool(2048, 8, 0), pool(1 << 20, 2, 1)]);
        assert_eq!((both.state, &*both.means), (State::Ok, "1024 MiB are free"));
    }
}
