//! Connections to a port of the other host arrive there through the tunnels, without any setting of
//! the program that connects. Plain sockets take the place of a toolstack.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};
use dunlin_rig::need;
use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, with_timeout};
use support::{Hosts, finish, words};
use tunnel::{Tunnel, control};

/// The toolstack's ports, as for libvirt.
const PORTS: &str = "49152-49215";
const PORT: u16 = 49_160;
const REDIRECT_PORT: u16 = 18_301;

/// Two hosts with one configuration but for the identity, a tunnel and the rules on each.
struct Scene {
    near: Tunnel,
    far: Tunnel,
    link: Link,
    a: Host,
    b: Host,
    files: Hosts,
}

impl Scene {
    fn new() -> Option<Self> {
        if !need::hosts() {
            return None;
        }
        let (a, b) = (Host::new("a").unwrap(), Host::new("b").unwrap());
        let link = Link::new(&a, &b, &LinkOptions::default()).unwrap();
        let files = Hosts::new();
        let start = |host: &Host, name: &str| {
            let peers = [(&a, "a.test"), (&b, "b.test")].map(|(host, identity)| {
                let both = [Family::V4, Family::V6].map(|family| link.address(host, family));
                format!(
                    "{:?} = {identity:?}, {:?} = {identity:?}",
                    both[0].to_string(),
                    both[1].to_string()
                )
            });
            let config = format!(
                "listen = \"[::]:18300\"\nidentity = {:?}\n\
                 [redirect.libvirt]\nports = {PORTS:?}\npeers = {{ {} }}\nusers = [\"root\"]\n",
                files.scratch.join(name),
                peers.join(", "),
            );
            let file = files.scratch.join(format!("{name}.toml"));
            fs::write(&file, config).unwrap();
            apply(&link, host, [&a, &b]);
            let mut command = words("tunnel run --confine no --config");
            command.arg(&file).arg("--control");
            command.arg(control(&files).join(name));
            Tunnel::follow(host.enter(&command), file)
        };
        let (near, far) = (start(&a, "a"), start(&b, "b"));
        Some(Self {
            near,
            far,
            link,
            a,
            b,
            files,
        })
    }

    /// Connects from host A to a port of B.
    fn connect(&self, family: Family, port: u16) -> std::io::Result<TcpStream> {
        let to = SocketAddr::new(self.link.address(&self.b, family), port);
        self.a
            .run(|| TcpStream::connect_timeout(&to, TIMEOUT))
            .unwrap()
    }

    fn listen(&self, at: IpAddr) -> TcpListener {
        self.b
            .run(|| TcpListener::bind((at, PORT)))
            .unwrap()
            .unwrap()
    }

    /// Packets that arrived at B from the wire for the toolstack's ports.
    fn in_the_clear(&self) -> u64 {
        let mut list = self.b.command("nft");
        let listed = list.args(["-j", "list", "counter", "inet", "test", "clear"]);
        let listed = listed.output().unwrap();
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
        let counters = listed["nftables"].as_array().unwrap().iter();
        let packets = counters.filter_map(|one| one["counter"]["packets"].as_u64());
        packets.sum()
    }
}
