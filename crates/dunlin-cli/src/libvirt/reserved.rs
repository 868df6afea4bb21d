//! `net.ipv4.ip_local_reserved_ports`: ports that the kernel does not assign to outgoing
//! connections, so that libvirt finds its range free.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use dunlin_ipsec::PortRange;

/// The file with the setting, which is applied at boot.
pub(super) const SYSCTL: &str = "/etc/sysctl.d/60-dunlin-libvirt.conf";
pub(super) const LIVE: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// The setting, with `ports` added: ranges in ascending order without overlaps.
pub(super) fn with(setting: &str, ports: PortRange) -> String {
    let mut all = ranges(setting);
    all.push((ports.first(), ports.last()));
    text(all)
}

/// Whether the setting contains all of `ports`.
pub(super) fn covers(setting: &str, ports: PortRange) -> bool {
    with(setting, ports) == text(ranges(setting))
}

/// Removes `ports` from the setting. Keeps those that `before` contains: the setting as it was
/// before Dunlin added `ports`.
pub(super) fn without(setting: &str, ports: PortRange, before: &str) -> String {
    let before = ranges(before);
    let was_there = |port: u16| {
        before
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&port))
    };
    let now = ranges(setting)
        .into_iter()
        .flat_map(|(first, last)| first..=last);
    let stay = now.filter(|port| !ports.contains(*port) || was_there(*port));
    text(stay.map(|port| (port, port)).collect())
}

/// Reads the setting of the running kernel.
pub(super) fn live() -> Result<String> {
    let text = fs::read_to_string(LIVE).with_context(|| format!("cannot read {LIVE}"))?;
    Ok(text.trim().to_owned())
}

/// Replaces the setting of the running kernel.
pub(super) fn set_live(setting: &str) -> Result<()> {
    // The kernel reads an empty line as an empty list.
    fs::write(Path::new(LIVE), format!("{setting}\n"))
        .with_context(|| format!("cannot write {LIVE}"))
}

fn ranges(setting: &str) -> Vec<(u16, u16)> {
    let parts = setting.split(',').map(str::trim);
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    parts.filter_map(range).collect()
}

fn text(mut ranges: Vec<(u16, u16)>) -> String {
    ranges.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if u32::from(first) <= u32::from(*end) + 1 => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    let part = |(first, last): &(u16, u16)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    merged.iter().map(part).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn libvirt() -> PortRange {
        "49152-49215".parse().unwrap()
    }

    #[test]
    fn ports_are_merged_and_none_is_lost() {
        for (before, after) in [
            ("", "49152-49215"),
            ("8080,9000-9010", "8080,9000-9010,49152-49215"),
            ("49000-49151", "49000-49215"),
            ("49160-49300", "49152-49300"),
            ("65535", "49152-49215,65535"),
        ] {
            assert_eq!(with(before, libvirt()), after, "{before}");
            assert!(covers(after, libvirt()) && !covers(before, libvirt()));
        }
    }

    #[test]
    fn only_what_was_added_is_taken_away() {
        for before in [
            "",
            "8080",
            "49160",
            "49160-49300",
            "49000-49151,49200-49215",
        ] {
            let added = with(before, libvirt());
            assert_eq!(without(&added, libvirt(), before), text(ranges(before)));
        }
        // Ports that another program has added in the meantime stay.
        assert_eq!(without("22,49152-49215", libvirt(), ""), "22");
    }
}
