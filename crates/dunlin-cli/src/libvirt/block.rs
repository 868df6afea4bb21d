//! The part of the tunnel's configuration that `dunlin libvirt enable` writes, between two marks.

use anyhow::{Result, bail};

const BEGIN: &str = "# Written by `dunlin libvirt enable`; `dunlin libvirt disable` removes it.";
const END: &str = "# End of what `dunlin libvirt enable` wrote.";
/// The first line of a configuration that `enable` created.
const CREATED: &str = "# Created by `dunlin libvirt enable`.";
/// The keys outside the block, in a configuration that `enable` created.
const OURS: [&str; 2] = ["listen", "identity"];

/// A new configuration without routes.
pub(super) fn created(identity: &str, listen: &str) -> String {
    format!("{CREATED}\nlisten = {listen:?}\nidentity = {identity:?}\n")
}

/// Puts `block` into a configuration, in place of an earlier block.
///
/// # Errors
/// The configuration has the first mark but not the last.
pub(super) fn insert(text: &str, block: &str) -> Result<String> {
    let mut rest = remove(text)?;
    if !rest.is_empty() && !rest.ends_with('\n') {
        rest.push('\n');
    }
    Ok(format!("{rest}{BEGIN}\n{block}{END}\n"))
}

/// The configuration without the block.
///
/// # Errors
/// The configuration has the first mark but not the last.
pub(super) fn remove(text: &str) -> Result<String> {
    let Some(begin) = text.find(BEGIN) else {
        return Ok(text.to_owned());
    };
    let (before, from) = text.split_at(begin);
    let Some(end) = from.find(END) else {
        bail!(
            "the configuration has the first line of the block of `dunlin libvirt enable` and not \
             the last one: delete the block by hand"
        );
    };
    let after = &from[end + END.len()..];
    let after = after.strip_prefix('\n').unwrap_or(after);
    Ok(format!("{before}{after}"))
}

/// Whether the configuration contains a block.
pub(super) fn is_in(text: &str) -> bool {
    text.contains(BEGIN)
}

/// Whether `enable` created the configuration, and no key was added to it.
pub(super) fn is_only_ours(text: &str) -> bool {
    let is_ours = |table: toml::Table| table.keys().all(|key| OURS.contains(&&**key));
    text.starts_with(CREATED) && text.parse().is_ok_and(is_ours)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_block_is_replaced_and_removed_without_a_trace() {
        let own = "listen = \"[::]:18300\"\n[route.ram]\nto = \"b:1\"";
        let once = insert(own, "[redirect.libvirt]\nports = \"1-2\"\n").unwrap();
        let twice = insert(&once, "[redirect.libvirt]\nports = \"3-4\"\n").unwrap();
        assert_eq!(twice.matches("[redirect.libvirt]").count(), 1);
        assert!(twice.contains("3-4") && twice.contains("to = \"b:1\""));
        assert!(is_in(&twice) && !is_only_ours(&twice));
        assert_eq!(remove(&twice).unwrap(), format!("{own}\n"));
    }

    #[test]
    fn a_damaged_block_is_not_guessed_at() {
        let text = insert("", "[redirect.libvirt]\n").unwrap();
        let damaged = text.replace(END, "");
        assert!(remove(&damaged).is_err());
    }

    #[test]
    fn a_created_file_is_recognised_once_its_block_is_gone() {
        let text = created("/etc/pki/qemu", "[::]:18300");
        let with = insert(&text, "[redirect.libvirt]\n").unwrap();
        assert!(!is_only_ours(&with));
        assert!(is_only_ours(&remove(&with).unwrap()));
        for added in [
            "[route.ram]\nto = \"b:1\"\n",
            "route.ram.to = \"b:1\"\n",
            "route = { ram = { to = \"b:1\" } }\n",
            "  [ route . ram ]\n",
            "drain = \"5s\"\n",
            "a mistake\n",
        ] {
            let with = insert(&format!("{text}{added}"), "[redirect.libvirt]\n").unwrap();
            assert!(!is_only_ours(&remove(&with).unwrap()), "{added}");
        }
    }
}
