//! With ESP in transport mode, each SA counts its packets.
//! A host with policies sends and accepts no packet without an SA.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};

use dunlin_kernel_tests::{Guest, Needs, run};

const NEEDS: Needs = Needs {
    packages: &["iproute2", "tcpdump"],
    ..Needs::NOTHING
};

/// The two hosts, each a network namespace, and their addresses.
const HOSTS: [(&str, &str); 2] = [("a", "10.0.0.1"), ("b", "10.0.0.2")];

/// A key of 32 bytes followed by a salt of 4 bytes (RFC 4106, section 8.1).
const KEY: &str = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        let [(a, at_a), (b, at_b)] = HOSTS;
        for (host, _) in HOSTS {
            associate(guest, host, at_a, at_b, "0x100");
            associate(guest, host, at_b, at_a, "0x200");
        }
        protect(guest, a, at_a, at_b);
        protect(guest, b, at_b, at_a);

        let capture = Capture::begin("b", "esp.pcap");
        assert!(ping(a, at_b, 5), "the packets pass");
        capture.end(guest);

        for (host, _) in HOSTS {
            assert_eq!(packets(guest, host, at_a, at_b, "0x100"), 5, "at {host}");
            assert_eq!(packets(guest, host, at_b, at_a, "0x200"), 5, "at {host}");
        }
        let seen = |filter| captured(guest, "esp.pcap", filter);
        assert_eq!((seen("esp"), seen("icmp")), (10, 0));

        // A host without policies sends in the clear, but its peer drops the packets.
        guest.command("ip", &["-n", a, "xfrm", "policy", "flush"]);
        assert!(!ping(a, at_b, 2), "the packets are dropped");
        assert_eq!(packets(guest, b, at_a, at_b, "0x100"), 5);
    })
}

/// Creates a link between the two hosts.
fn connect(guest: &Guest) {
    let ip = |arguments: &str| {
        guest.command("ip", &arguments.split(' ').collect::<Vec<_>>());
    };
    for (host, _) in HOSTS {
        ip(&format!("netns add {host}"));
    }
    ip("link add link-a netns a type veth peer name link-b netns b");
    for (host, address) in HOSTS {
        ip(&format!("-n {host} addr add {address}/24 dev link-{host}"));
        ip(&format!("-n {host} link set link-{host} up"));
    }
}

/// Adds an SA at `host` for packets from `from` to `to`.
fn associate(guest: &Guest, host: &str, from: &str, to: &str, spi: &str) {
    let sa = [
        "-n",
        host,
        "xfrm",
        "state",
        "add",
        "src",
        from,
        "dst",
        to,
        "proto",
        "esp",
        "spi",
        spi,
        "mode",
        "transport",
        "aead",
        "rfc4106(gcm(aes))",
        KEY,
        "128",
    ];
    guest.command("ip", &sa);
}

/// Adds policies at `host` that require ESP for all packets between the host and its peer.
fn protect(guest: &Guest, host: &str, own: &str, peer: &str) {
    for (from, to, direction) in [(own, peer, "out"), (peer, own, "in")] {
        let policy = [
            "-n",
            host,
            "xfrm",
            "policy",
            "add",
            "src",
            from,
            "dst",
            to,
            "dir",
            direction,
            "tmpl",
            "src",
            from,
            "dst",
            to,
            "proto",
            "esp",
            "mode",
            "transport",
        ];
        guest.command("ip", &policy);
    }
}

/// Returns the number of packets that an SA has carried.
fn packets(guest: &Guest, host: &str, from: &str, to: &str, spi: &str) -> u64 {
    let sa = [
        "-n", host, "-s", "xfrm", "state", "get", "src", from, "dst", to, "proto", "esp", "spi",
        spi,
    ];
    let text = guest.output("ip", &sa);
    // In the output, "  420(bytes), 5(packets)" follows "lifetime current:".
    text.split_once("lifetime current:")
        .and_then(|(_, current)| current.split_once("(packets)"))
        .and_then(|(before, _)| before.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no count of packets:\n{text}"))
}

fn ping(host: &str, to: &str, count: u32) -> bool {
    Command::new("ip")
        .args(["netns", "exec", host, "ping", "-W", "5", "-c"])
        .args([&count.to_string(), to])
        .status()
        .expect("ip starts")
        .success()
}

/// A running tcpdump that captures a host's link.
struct Capture(Child);

impl Capture {
    fn begin(host: &str, file: &str) -> Self {
        let mut child = Command::new("ip")
            .args(["netns", "exec", host, "tcpdump", "-Z", "root"])
            .args([
                "--immediate-mode",
                "-U",
                "-i",
                &format!("link-{host}"),
                "-w",
                file,
            ])
            .stderr(Stdio::piped())
            .spawn()
            .expect("ip starts");
        let said = child.stderr.take().expect("the stream is piped");
        let mut lines = BufReader::new(said).lines();
        let listens = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("listening on"));
        assert!(listens, "tcpdump ended");
        Self(child)
    }

    fn end(mut self, guest: &Guest) {
        // On SIGINT tcpdump writes out its buffer.
        guest.command("kill", &["-INT", &self.0.id().to_string()]);
        self.0.wait().expect("the process ends");
    }
}

fn captured(guest: &Guest, file: &str, filter: &str) -> usize {
    guest
        .output("tcpdump", &["-Z", "root", "-n", "-r", file, filter])
        .lines()
        .count()
}
