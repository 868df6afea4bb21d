//! Two hosts in namespaces, with the directories that an installation uses.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};
use dunlin_rig::need;

use super::support::{Done, Hosts, finish, words};
use super::tunnel::{Tunnel, control};

pub const RESERVED: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// The number of the group `dunlin` on these hosts.
pub const GROUP: u32 = 4712;

/// Two hosts, each with directories of its own in place of /etc/dunlin, /etc/sysctl.d, /run and
/// /var/lib/dunlin. On both hosts, each of the names a.test and b.test has an IPv4 and an IPv6
/// address.
pub struct Scene {
    pub link: Link,
    pub a: Host,
    pub b: Host,
    pub files: Hosts,
}

impl Scene {
    pub fn new() -> Option<Self> {
        if !need::hosts() {
            return None;
        }
        let (a, b) = (Host::new("a").unwrap(), Host::new("b").unwrap());
        let link = Link::new(&a, &b, &LinkOptions::default()).unwrap();
        let files = Hosts::new();
        for host in ["a", "b"] {
            for directory in ["etc", "sysctl", "run", "state"] {
                fs::create_dir_all(files.scratch.join(format!("host-{host}/{directory}"))).unwrap();
            }
        }
        let scene = Self { link, a, b, files };
        let mut names = "127.0.0.1 localhost\n".to_owned();
        for (host, name) in [(&scene.a, "a.test"), (&scene.b, "b.test")] {
            for family in [Family::V4, Family::V6] {
                names += &format!("{} {name}\n", scene.link.address(host, family));
            }
        }
        fs::write(scene.files.scratch.join("hosts"), names).unwrap();
        let groups = fs::read_to_string("/etc/group").unwrap();
        let groups = format!("dunlin:x:{GROUP}:\n{groups}");
        fs::write(scene.files.scratch.join("group"), groups).unwrap();
        Some(scene)
    }

    pub fn host(&self, name: &str) -> &Host {
        if name == "a" { &self.a } else { &self.b }
    }

    pub fn path(&self, host: &str, path: &str) -> PathBuf {
        self.files.scratch.join(format!("host-{host}")).join(path)
    }

    /// A command on a host. `ip netns exec` gives it mounts of its own.
    pub fn command(&self, host: &str, command: &Command) -> Command {
        self.command_after(host, "true", command)
    }

    /// A command on a host. The shell command `first` runs before it, with the same mounts.
    pub fn command_after(&self, host: &str, first: &str, command: &Command) -> Command {
        let mounts = [
            ("etc", "/etc/dunlin"),
            ("sysctl", "/etc/sysctl.d"),
            ("state", "/var/lib/dunlin"),
            ("run", "/run"),
        ];
        let mounts = mounts.map(|(from, to)| {
            let from = self.path(host, from);
            format!("mkdir -p {to} && mount --bind {} {to}", from.display())
        });
        let files = ["hosts", "group"].map(|name| {
            let file = self.files.scratch.join(name);
            format!("mount --bind {} /etc/{name}", file.display())
        });
        let mut shell = Command::new("sh");
        let script = format!(
            "{} && {} && {first} && exec \"$@\"",
            mounts.join(" && "),
            files.join(" && ")
        );
        shell.args(["-c", &script, "sh"]);
        shell.arg(command.get_program()).args(command.get_args());
        self.host(host).enter(&shell)
    }

    pub fn dunlin(&self, host: &str, line: &str) -> Command {
        self.command(host, &words(line))
    }

    /// `libvirt enable` on a host, for the other host as peer.
    pub fn enable(&self, host: &str, more: &str) -> Done {
        self.enable_after(host, "true", more)
    }

    /// `libvirt enable` on a host, after a line of shell.
    pub fn enable_after(&self, host: &str, first: &str, more: &str) -> Done {
        let (peer, identity) = match host {
            "a" => (&self.b, "b.test"),
            _ => (&self.a, "a.test"),
        };
        let peer = self.link.address(peer, Family::V4);
        let mut command = words("libvirt enable --qemu-conf /none --users root");
        command.args(["--peer", &format!("{peer}={identity}")]);
        command.arg("--identity").arg(self.files.scratch.join(host));
        command.args(more.split_whitespace());
        finish(self.command_after(host, first, &command))
    }

    pub fn tunnel(&self, host: &str) -> Tunnel {
        let mut command = words("tunnel run --confine no --config /etc/dunlin/tunnel.toml");
        command
            .arg("--control")
            .arg(control(&self.files).join(host));
        Tunnel::follow(
            self.command(host, &command),
            self.path(host, "etc/tunnel.toml"),
        )
    }

    pub fn reserved(&self, host: &str) -> String {
        let mut cat = self.host(host).command("cat");
        String::from_utf8(cat.arg(RESERVED).output().unwrap().stdout)
            .unwrap()
            .trim()
            .to_owned()
    }

    pub fn rules(&self, host: &str) -> String {
        let mut list = self.host(host).command("nft");
        String::from_utf8(list.args(["list", "tables"]).output().unwrap().stdout).unwrap()
    }
}
