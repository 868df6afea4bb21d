//! Network cards: offloads for TLS and ESP, and the MTU.

use std::fs;
use std::net::UdpSocket;
use std::path::Path;

use dunlin_linux::ethtool::{Feature, features};

use super::verdict::{Verdict, setting};

const DEVICES: &str = "/sys/class/net";
const LOOPBACK: &str = "lo";

#[derive(Clone, Debug, Default)]
struct Device {
    name: String,
    /// Whether the driver of a card provides the device: false for bridges and bonds.
    is_card: bool,
    /// The bridge or bond of which the device is a part.
    master: Option<String>,
    is_up: bool,
    mtu: u32,
    features: Vec<Feature>,
}

impl Device {
    fn has(&self, feature: &str) -> bool {
        self.features
            .iter()
            .any(|one| one.name == feature && one.is_on)
    }

    fn can_turn_on(&self, feature: &str) -> bool {
        self.features
            .iter()
            .any(|one| one.name == feature && !one.is_on && one.can_change)
    }
}

pub(super) fn examine() -> Vec<Verdict> {
    let devices = devices();
    let tls = ["tls-hw-tx-offload", "tls-hw-rx-offload"];
    let esp = ["esp-hw-offload", "esp-tx-csum-hw-offload"];
    vec![
        offload("nic.tls", "TLS records", &tls, &devices),
        offload("nic.esp", "ESP packets", &esp, &devices),
        mtu(&devices),
    ]
}

/// The devices in /sys: those of the network namespace in which /sys was mounted.
fn devices() -> Vec<Device> {
    let entries = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    let socket = UdpSocket::bind(("127.0.0.1", 0)).ok();
    let of = |name: String| {
        let directory = Path::new(DEVICES).join(&name);
        let read = |file: &str| setting(&format!("{DEVICES}/{name}/{file}"));
        let master = fs::read_link(directory.join("master")).ok();
        let features = socket
            .as_ref()
            .and_then(|socket| features(socket, &name).ok());
        Device {
            is_card: directory.join("device").exists(),
            master: master.and_then(|path| Some(path.file_name()?.to_str()?.to_owned())),
            is_up: read("operstate").is_some_and(|state| state == "up" || state == "unknown"),
            mtu: read("mtu").and_then(|mtu| mtu.parse().ok()).unwrap_or(0),
            features: features.unwrap_or_default(),
            name,
        }
    };
    names.into_iter().map(of).collect()
}

/// The verdict on the cards: with one of the features `wanted`, a card can seal and open `what`.
fn offload(check: &str, what: &str, wanted: &[&str], devices: &[Device]) -> Verdict {
    let (mut values, mut useless, mut available) = (Vec::new(), Vec::new(), Vec::new());
    for card in devices.iter().filter(|one| one.is_card) {
        let on: Vec<_> = wanted.iter().filter(|one| card.has(one)).collect();
        let mut off = wanted.iter().filter(|one| card.can_turn_on(one));
        available.extend(
            off.next()
                .map(|one| format!("ethtool -K {} {one} on", card.name)),
        );
        if on.is_empty() {
            continue;
        }
        let top = top(card, devices);
        let lost: Vec<_> = on.iter().filter(|one| !top.has(one)).collect();
        let names = on.iter().map(|one| **one).collect::<Vec<_>>().join(" ");
        values.push(format!("{}: {names}", card.name));
        if !lost.is_empty() {
            let lacks = "which lacks the feature";
            useless.push(format!("{} is a part of {}, {lacks}", card.name, top.name));
        }
    }
    if values.is_empty() {
        let mut means = format!("this host's processors seal and open {what}");
        if !available.is_empty() {
            means = format!(
                "{means}; a card can do this instead after: {}",
                available.join(", ")
            );
        }
        return Verdict::ok(check, "none", means);
    }
    let value = values.join("; ");
    if useless.is_empty() {
        return Verdict::ok(check, value, format!("a card can seal and open {what}"));
    }
    Verdict::warn(
        check,
        value,
        format!("the offload has no effect: {}", useless.join("; ")),
        "give the card an address of its own, and let migrations use it",
    )
}

/// The device to which a card's addresses belong: the bridge or bond on top of it, if any.
fn top<'a>(card: &'a Device, devices: &'a [Device]) -> &'a Device {
    let mut top = card;
    // The kernel allows eight levels of devices (MAX_NEST_DEV).
    for _ in 0..8 {
        let above = devices
            .iter()
            .find(|one| Some(&one.name) == top.master.as_ref());
        match above {
            Some(above) => top = above,
            None => break,
        }
    }
    top
}

fn mtu(devices: &[Device]) -> Verdict {
    let check = "net.mtu";
    let up = |one: &&Device| one.is_up && one.name != LOOPBACK && one.master.is_none();
    let mtus: Vec<_> = devices.iter().filter(up).collect();
    if mtus.is_empty() {
        return Verdict::warn(
            check,
            "none",
            "no network device is up, so no peer can be reached",
            "ip link set DEVICE up",
        );
    }
    let value = mtus.iter().map(|one| format!("{} {}", one.name, one.mtu));
    Verdict::ok(
        check,
        value.collect::<Vec<_>>().join(", "),
        "both hosts need the same MTU on the network between them",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    const TLS: [&str; 1] = ["tls-hw-tx-offload"];

    fn device(name: &str, master: Option<&str>, is_on: bool) -> Device {
        let feature = Feature {
            name: TLS[0].to_owned(),
            is_on,
            can_change: true,
        };
        Device {
            name: name.to_owned(),
            is_card: name.starts_with("eth"),
            master: master.map(str::to_owned),
            is_up: true,
            mtu: 9000,
            features: vec![feature],
        }
    }

    #[test]
    fn a_bridge_or_bond_without_the_feature_makes_an_offload_useless() {
        let judge = |devices: &[Device]| offload("nic.tls", "TLS records", &TLS, devices);
        let alone = judge(&[device("eth0", None, true)]);
        assert_eq!(
            (alone.state, &*alone.value),
            (State::Ok, "eth0: tls-hw-tx-offload")
        );
        let below = [
            device("br0", None, false),
            device("eth0", Some("br0"), true),
        ];
        let bridged = judge(&below);
        assert_eq!(bridged.state, State::Warn, "{bridged:?}");
        assert!(bridged.means.contains("br0"), "{bridged:?}");
        // A bond of kernel 5.12 or newer passes keys to its cards, unless a bridge is on top of it.
        let bond = device("bond0", None, true);
        let card = device("eth0", Some("bond0"), true);
        assert_eq!(judge(&[bond, card.clone()]).state, State::Ok);
        let bond = device("bond0", Some("br0"), true);
        let bridge = device("br0", None, false);
        assert_eq!(judge(&[bond, card, bridge]).state, State::Warn);
        let off = judge(&[device("eth0", None, false), device("veth1", None, true)]);
        assert_eq!((off.state, &*off.value), (State::Ok, "none"));
        assert!(off.means.contains("ethtool -K eth0"), "{off:?}");
    }

    #[test]
    fn only_devices_that_have_addresses_have_an_mtu() {
        let down = Device {
            is_up: false,
            ..device("eth1", None, false)
        };
        let loopback = device(LOOPBACK, None, false);
        assert_eq!(mtu(&[loopback, down]).state, State::Warn);
        let found = mtu(&[
            device("br0", None, false),
            device("eth0", Some("br0"), false),
        ]);
        assert_eq!(found.value, "br0 9000");
    }
}
