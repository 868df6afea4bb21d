//! The packet filter's rules, and libvirt's settings for migrations.

use std::net::IpAddr;
use std::path::Path;

use anyhow::Result;
use dunlin_linux::privileges::{Capability, has};

use super::verdict::{AS_ROOT, Verdict};
use crate::libvirt::{QemuConf, are_reserved};
use crate::redirect::{Rules, has_nft, rules_in_force};
use crate::text::chained;

/// Examines the packet filter's rules for redirects. `config` is the path of a configuration with
/// redirects, if there is one.
pub(super) fn redirects(config: Option<&Path>) -> Vec<Verdict> {
    let check = "redirect.rules";
    let may_ask = has(Capability::Network).unwrap_or(false);
    let is_installed = has_nft();
    let rules = match (is_installed, may_ask) {
        (true, true) => rules(rules_in_force(config)),
        (true, false) => Verdict::unknown(check, "nft needs CAP_NET_ADMIN", AS_ROOT),
        (false, _) if config.is_none() => Verdict::ok(check, "none", "no redirect is configured"),
        (false, _) => Verdict::fail(
            check,
            "missing",
            "the toolstack's migrations leave in the clear",
            "install the package nftables, and run dunlin redirect apply",
        ),
    };
    vec![nft(is_installed), rules]
}

fn nft(is_installed: bool) -> Verdict {
    let check = "redirect.nft";
    match is_installed {
        true => Verdict::ok(check, "yes", "redirects can be applied"),
        false => Verdict::warn(
            check,
            "no",
            "redirects, which libvirt, Nova and Proxmox VE need, cannot be applied",
            "install the package nftables",
        ),
    }
}

fn rules(found: Result<Rules>) -> Verdict {
    let check = "redirect.rules";
    match found {
        Ok(Rules::Applied) => Verdict::ok(
            check,
            "applied",
            "the toolstack's migrations go through the tunnel",
        ),
        Ok(Rules::None) => Verdict::ok(check, "none", "no redirect is configured"),
        Ok(Rules::Different(text)) => {
            Verdict::fail(check, "different", text, "dunlin redirect apply")
        }
        Ok(Rules::Unexpected) => Verdict::warn(
            check,
            "unexpected",
            "rules of redirects are in force, but no configuration with a redirect was read",
            "give the configuration with --config, or run dunlin redirect remove",
        ),
        Err(error) => Verdict::unknown(check, chained(&error), "remove the cause"),
    }
}

/// Examines libvirt's settings. `conf` is the file with the settings of libvirt's QEMU driver.
pub(super) fn libvirt(conf: &Path, has_redirect: bool) -> Vec<Verdict> {
    let checks = ["libvirt.migration", "libvirt.ports"];
    // libvirt's package creates the directory. Without the file, libvirt uses its defaults.
    if !conf.parent().is_some_and(Path::is_dir) {
        return checks
            .map(|check| Verdict::ok(check, "none", "libvirt is not installed"))
            .into();
    }
    match QemuConf::read(conf).and_then(|conf| Ok((conf.listens_at()?, conf))) {
        Ok((address, conf)) => vec![
            migration(&conf, address, has_redirect),
            ports(&conf, are_reserved(&conf)),
        ],
        Err(error) => checks
            .map(|check| Verdict::unknown(check, chained(&error), AS_ROOT))
            .into(),
    }
}

fn migration(conf: &QemuConf, at: Option<IpAddr>, has_redirect: bool) -> Verdict {
    let check = "libvirt.migration";
    let address = at.map(|address| address.to_string());
    let value = format!(
        "ports {}, address {}, host {}",
        conf.ports,
        address.as_deref().unwrap_or("any"),
        conf.host.as_deref().unwrap_or("none")
    );
    let is_loopback = at.is_some_and(|address| address.is_loopback());
    match (has_redirect, is_loopback) {
        (true, true) => Verdict::ok(
            check,
            value,
            "migrations reach QEMU only through the tunnel",
        ),
        (true, false) => Verdict::warn(
            check,
            value,
            "QEMU listens for migrations on the network, where only the rules protect it",
            "migration_address = \"127.0.0.1\" in qemu.conf",
        ),
        (false, true) => Verdict::fail(
            check,
            value,
            "QEMU listens on loopback, and no redirect leads migrations there",
            "dunlin libvirt enable, or remove migration_address from qemu.conf",
        ),
        (false, false) => Verdict::warn(
            check,
            value,
            "migrations are in the clear, unless each requests TLS or a socket of the tunnel",
            "dunlin libvirt enable --peer HOST",
        ),
    }
}

fn ports(conf: &QemuConf, reserved: Result<bool>) -> Verdict {
    let check = "libvirt.ports";
    match reserved {
        Ok(true) => Verdict::ok(check, "reserved", "no other program gets libvirt's ports"),
        Ok(false) => Verdict::warn(
            check,
            "not reserved",
            "an outgoing connection of any program may hold a port that libvirt needs",
            format!("add {} to net.ipv4.ip_local_reserved_ports", conf.ports),
        ),
        Err(error) => Verdict::unknown(check, chained(&error), "let this process read /proc/sys"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    #[test]
    fn rules_that_are_not_those_of_the_configuration_are_a_failure() {
        let of = |rules_found| rules(Ok(rules_found)).state;
        assert_eq!(of(Rules::Applied), State::Ok);
        assert_eq!(of(Rules::None), State::Ok);
        assert_eq!(of(Rules::Unexpected), State::Warn);
        assert_eq!(of(Rules::Different(String::new())), State::Fail);
        assert_eq!(rules(Err(anyhow::anyhow!("x"))).state, State::Unknown);
    }

    #[test]
    fn loopback_is_right_with_a_redirect_and_wrong_without() {
        let conf = |address: Option<&str>| QemuConf {
            ports: "49152-49215".parse().unwrap(),
            address: address.map(str::to_owned),
            host: None,
            user: None,
        };
        let of = |address, has_redirect| {
            let conf = conf(address);
            migration(&conf, conf.listens_at().unwrap(), has_redirect).state
        };
        assert_eq!(of(Some("127.0.0.1"), true), State::Ok);
        assert_eq!(of(None, true), State::Warn);
        assert_eq!(of(Some("127.0.0.1"), false), State::Fail);
        assert_eq!(of(Some("10.0.0.1"), false), State::Warn);
        let states = [true, false].map(|reserved| ports(&conf(None), Ok(reserved)).state);
        assert_eq!(states, [State::Ok, State::Warn]);
    }
}
