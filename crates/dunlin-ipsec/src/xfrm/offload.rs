//! Whether the kernel can leave the cutting of ESP's packets into segments to the end (`esp4_offload`,
//! `esp6_offload`). An SA finds it when it is added, never later; without it a TCP connection hands
//! over one packet for each segment. It comes by itself only for a network card that seals ESP.

use std::fs;
use std::path::Path;

/// For which address families it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EspOffload {
    /// `esp4_offload`.
    pub ipv4: bool,
    /// `esp6_offload`.
    pub ipv6: bool,
}

impl EspOffload {
    /// What an operator does about what is missing, as root and before any SA is added; `None`
    /// where nothing is.
    #[must_use]
    pub fn how_to_load(self) -> Option<&'static str> {
        match (self.ipv4, self.ipv6) {
            (true, true) => None,
            (false, true) => Some("modprobe esp4_offload"),
            (true, false) => Some("modprobe esp6_offload"),
            (false, false) => Some("modprobe --all esp4_offload esp6_offload"),
        }
    }
}

/// Looks among the kernel's modules, those that are built in included.
#[must_use]
pub fn esp_offload() -> EspOffload {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let built_in = Path::new("/lib/modules")
        .join(release.trim_end())
        .join("modules.builtin");
    let built_in = fs::read_to_string(built_in).unwrap_or_default();
    let is_there =
        |name: &str| Path::new("/sys/module").join(name).exists() || is_built_in(&built_in, name);
    EspOffload {
        ipv4: is_there("esp4_offload"),
        ipv6: is_there("esp6_offload"),
    }
}

/// Whether a module is in the list of those that the kernel was built with, a path a line.
fn is_built_in(list: &str, name: &str) -> bool {
    list.lines()
        .filter_map(|line| Path::new(line).file_stem())
        .any(|stem| stem == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_found_in_the_list_of_the_kernels_own() {
        let list = "kernel/net/ipv4/esp4.ko\nkernel/net/ipv6/esp6_offload.ko\n";
        assert!(is_built_in(list, "esp6_offload"));
        assert!(!is_built_in(list, "esp4_offload"));
    }

    #[test]
    fn what_to_load_is_what_is_missing() {
        let said = |ipv4, ipv6| EspOffload { ipv4, ipv6 }.how_to_load();
        assert_eq!(said(true, true), None);
        assert_eq!(said(false, true), Some("modprobe esp4_offload"));
        assert_eq!(said(true, false), Some("modprobe esp6_offload"));
    }
}
