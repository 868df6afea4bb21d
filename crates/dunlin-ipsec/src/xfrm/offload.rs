//! Detects the kernel's segmentation offload for ESP, in the modules `esp4_offload` and
//! `esp6_offload`. Without the offload, every TCP segment passes the SA as a packet of its own. An
//! SA can use the offload only if the module was loaded before the SA was added. The kernel loads
//! the modules automatically only for a network card that seals ESP.

use std::fs;
use std::path::Path;

/// The address families for which the offload is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EspOffload {
    /// `esp4_offload`.
    pub ipv4: bool,
    /// `esp6_offload`.
    pub ipv6: bool,
}

impl EspOffload {
    /// The command that loads the missing modules, to be run as root before any SA is added;
    /// `None` if nothing is missing.
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

/// Checks the kernel's modules, loaded and built in.
#[must_use]
pub fn esp_offload() -> EspOffload {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let built_in = Path::new("/lib/modules")
        .join(release.trim_end())
        .join("modules.builtin");
    let built_in = fs::read_to_string(built_in).unwrap_or_default();
    let is_available =
        |name: &str| Path::new("/sys/module").join(name).exists() || is_built_in(&built_in, name);
    EspOffload {
        ipv4: is_available("esp4_offload"),
        ipv6: is_available("esp6_offload"),
    }
}

/// Whether a module is in the list of built-in modules, which has one path per line.
fn is_built_in(list: &str, name: &str) -> bool {
    list.lines()
        .filter_map(|line| Path::new(line).file_stem())
        .any(|stem| stem == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_built_in_module_is_found() {
        let list = "kernel/net/ipv4/esp4.ko\nkernel/net/ipv6/esp6_offload.ko\n";
        assert!(is_built_in(list, "esp6_offload"));
        assert!(!is_built_in(list, "esp4_offload"));
    }

    #[test]
    fn the_command_loads_what_is_missing() {
        let command = |ipv4, ipv6| EspOffload { ipv4, ipv6 }.how_to_load();
        assert_eq!(command(true, true), None);
        assert_eq!(command(false, true), Some("modprobe esp4_offload"));
        assert_eq!(command(true, false), Some("modprobe esp6_offload"));
    }
}
