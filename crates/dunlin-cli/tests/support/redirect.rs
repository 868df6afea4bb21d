//! Three hosts for tests of redirects: `a` and `b` are peers, and `c` reaches `b` through `a`.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};
use dunlin_rig::need;
use dunlin_test_base::Scratch;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{Ip6tOriginalDst, OriginalDst};
use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::thread::set_thread_res_uid;
use serde_json::Value;

use crate::support::{Done, finish, words};

pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
/// The first port of the redirect, and the first of other services' ports.
pub const PORT: u16 = 49152;
pub const SERVICE: u16 = 22000;
/// The first port of the listeners for redirected connections.
pub const REDIRECT: u16 = 18301;
/// Two users: the rules redirect the connections of `MEMBER` and of root, and reject those of
/// `STRANGER`.
pub const MEMBER: u32 = 4242;
pub const STRANGER: u32 = 4243;
pub const ROOT: u32 = 0;
/// How soon a rejected program must have its error.
const SOON: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(10);

pub struct Net {
    pub a: Host,
    pub b: Host,
    pub c: Host,
    pub ab: Link,
    pub ca: Link,
    pub scratch: Scratch,
}

impl Net {
    /// Returns `None` if this system cannot create the three hosts.
    pub fn new() -> Option<Self> {
        if !need::hosts() {
            return None;
        }
        let [a, b, c] = ["a", "b", "c"].map(|name| Host::new(name).unwrap());
        let ab = Link::new(&a, &b, &LinkOptions::default()).unwrap();
        let ca = Link::new(&c, &a, &LinkOptions::default()).unwrap();
        for (family, network) in [(Family::V4, "default"), (Family::V6, "::/0")] {
            for (host, via) in [(&c, ca.address(&a, family)), (&b, ab.address(&a, family))] {
                let mut ip = host.command("ip");
                ip.args(["route", "add", network, "via", &via.to_string()]);
                finish(ip).expect(0);
            }
        }
        let forwarding = ["ipv4/ip_forward", "ipv6/conf/all/forwarding"];
        a.run(|| {
            for switch in forwarding {
                fs::write(format!("/proc/sys/net/{switch}"), "1").unwrap();
            }
        })
        .unwrap();
        // Counts the SYNs that reach a host from the wire, before any filter of the test.
        for host in [&a, &b] {
            let text = "table inet seen { chain pre { type filter hook prerouting priority -300; \
                        iif != lo tcp dport 49152-49215 tcp flags & (syn | ack) == syn counter; }\n}";
            nft(host, &[text]).expect(0);
        }
        let scratch = Scratch::new();
        let net = Self {
            a,
            b,
            c,
            ab,
            ca,
            scratch,
        };
        net.configure(&net.usual());
        Some(net)
    }

    pub fn address(&self, host: &Host, family: Family) -> IpAddr {
        self.ab.address(host, family)
    }

    /// A configuration with `b` as the peer of `a`.
    pub fn usual(&self) -> String {
        let [v4, v6] = FAMILIES.map(|family| self.address(&self.b, family));
        format!(
            "listen = \"127.0.0.1:18300\"\nidentity = \"/none\"\n[redirect.vm]\n\
             ports = \"49152-49215\"\npeers = {{ \"{v4}\" = \"b.test\", \"{v6}\" = \"b.test\" }}\n\
             users = [\"root\", \"{MEMBER}\"]\n"
        )
    }

    pub fn configure(&self, text: &str) {
        fs::write(self.scratch.join("tunnel.toml"), text).unwrap();
    }

    /// `dunlin redirect` on a host, with the files of this test for that host.
    pub fn redirect(&self, host: &Host, command: &str) -> Command {
        let mut line = words(&format!("redirect {command}"));
        let name = host.namespace();
        line.arg("--run-dir")
            .arg(self.scratch.join(format!("{name}.run")));
        if !command.starts_with("remove") {
            line.arg("--config").arg(self.scratch.join("tunnel.toml"));
        }
        if !command.starts_with("show") && !command.starts_with("watch") {
            let state = self.scratch.join(format!("{name}.state"));
            line.arg("--state-dir").arg(state);
        }
        host.enter(&line)
    }

    pub fn apply(&self, host: &Host) {
        finish(self.redirect(host, "apply")).expect(0);
    }

    /// The result of `show`, which must have this exit code.
    pub fn show(&self, host: &Host, code: i32) -> Value {
        finish(self.redirect(host, "show --json"))
            .expect(code)
            .last()
    }

    /// The state file of `watch`.
    pub fn state(&self, host: &Host) -> Option<Value> {
        let directory = self.scratch.join(format!("{}.run", host.namespace()));
        let text = fs::read_to_string(directory.join("state.json")).ok()?;
        Some(serde_json::from_str(&text).unwrap())
    }
}

pub fn nft(host: &Host, arguments: &[&str]) -> Done {
    let mut nft = host.command("nft");
    nft.args(arguments);
    finish(nft)
}

/// The SYNs to the redirect's ports that have reached a host from the wire.
pub fn seen(host: &Host) -> u64 {
    let done = nft(host, &["-j", "list", "table", "inet", "seen"]).expect(0);
    let list: Value = serde_json::from_str(&done.out).unwrap();
    let objects = list["nftables"].as_array().unwrap();
    let expressions = objects
        .iter()
        .filter_map(|one| one["rule"]["expr"].as_array());
    let mut packets = expressions
        .flatten()
        .filter_map(|one| one["counter"]["packets"].as_u64());
    packets.next().unwrap()
}

/// Listens on an address. A listener on an IPv6 address does not accept IPv4 connections.
pub fn listen(host: &Host, at: impl Into<SocketAddr>) -> TcpListener {
    let at = at.into();
    let open = || -> io::Result<OwnedFd> {
        let socket = open_socket(at)?;
        if at.is_ipv6() {
            set_ipv6_v6only(&socket, true)?;
        }
        bind(&socket, &at)?;
        rustix::net::listen(&socket, 64)?;
        Ok(socket)
    };
    let listener = TcpListener::from(host.run(open).unwrap().unwrap());
    listener.set_nonblocking(true).unwrap();
    listener
}

/// Ends a listener at once. A drop is not enough, because the child processes of other tests keep
/// the inherited listener open until they run their programs.
pub fn close(listener: &TcpListener) {
    rustix::net::shutdown(listener, Shutdown::Both).unwrap();
}

/// Listens for redirected connections to the peer of [`Net::usual`], as the tunnel does.
pub fn listen_redirected(host: &Host, family: Family) -> TcpListener {
    let more = match family {
        Family::V4 => 0,
        Family::V6 => 1,
    };
    listen_redirected_at(host, family, more)
}

/// Listens at one of the ports for redirected connections. There is one port for each address in
/// `peers`, in the order of the addresses as text. `more` is the position of the other host's
/// address in that order, from 0.
pub fn listen_redirected_at(host: &Host, family: Family, more: u16) -> TcpListener {
    listen(host, (loopback(family), REDIRECT + more))
}

pub fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    }
}

pub fn any(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Connects as a user, from a thread with this user's id.
pub fn dial(host: &Host, uid: u32, to: impl Into<SocketAddr>) -> io::Result<TcpStream> {
    let to = to.into();
    let dial = || {
        if uid != ROOT {
            let uid = rustix::process::Uid::from_raw(uid);
            set_thread_res_uid(uid, uid, uid).unwrap();
        }
        TcpStream::connect_timeout(&to, LIMIT)
    };
    host.run(dial).unwrap()
}

/// Connects from a given port.
pub fn dial_from(host: &Host, from: SocketAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let dial = || -> io::Result<OwnedFd> {
        let socket = open_socket(from)?;
        bind(&socket, &from)?;
        connect(&socket, &to)?;
        Ok(socket)
    };
    host.run(dial).unwrap().map(TcpStream::from)
}

/// A socket that may share its port with other connections, and that no child process inherits.
fn open_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    Ok(socket)
}

/// Asserts that a connection is reset at once.
pub fn assert_reset(dial: impl FnOnce() -> io::Result<TcpStream>) {
    let began = Instant::now();
    let error = dial().expect_err("the connection was not rejected");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
}

/// The next connection of a listener.
pub fn accept(listener: &TcpListener) -> TcpStream {
    let until = Instant::now() + LIMIT;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                return stream;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                assert!(Instant::now() < until, "no connection");
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Asserts that no connection waits in a listener. The check needs no delay: the kernel would have
/// added a connection to the listener before the client's connect returned.
pub fn assert_idle(listener: &TcpListener) {
    let error = listener.accept().expect_err("a connection waits");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}

/// The destination to which the client connected, before the redirect changed it.
pub fn original(stream: &TcpStream) -> SocketAddr {
    if stream.local_addr().unwrap().is_ipv4() {
        let found = getsockopt(stream, OriginalDst).unwrap();
        let address = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
        (address, u16::from_be(found.sin_port)).into()
    } else {
        let found = getsockopt(stream, Ip6tOriginalDst).unwrap();
        let address = Ipv6Addr::from(found.sin6_addr.s6_addr);
        (address, u16::from_be(found.sin6_port)).into()
    }
}

/// Sends bytes in both directions.
pub fn assert_talk(one: &TcpStream, other: &TcpStream) {
    for (mut from, mut to) in [(one, other), (other, one)] {
        to.set_read_timeout(Some(LIMIT)).unwrap();
        from.write_all(b"dunlin").unwrap();
        let mut found = [0; 6];
        to.read_exact(&mut found).unwrap();
        assert_eq!(&found, b"dunlin");
    }
}

/// Waits until `found` returns a value.
pub fn wait_for<T>(what: &str, found: impl Fn() -> Option<T>) -> T {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(value) = found() {
            return value;
        }
        assert!(Instant::now() < until, "no {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
