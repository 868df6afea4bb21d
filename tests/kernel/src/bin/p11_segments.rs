//! Segments pass through an SA as one packet only if esp4_offload is loaded before the SA is added.
//! Otherwise each segment passes through the SA separately. The overhead of ESP makes segments
//! shorter.

use std::net::UdpSocket;
use std::process::ExitCode;

use dunlin_ipsec::xfrm::{Encapsulation, Protocol, esp_offload};
use dunlin_kernel_tests::ipsec::lanes::{Acceptor, Lane};
use dunlin_kernel_tests::ipsec::{CPUS, ENCAPSULATED, Family, Hosts, Sa, protect};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_linux::udp_encap::receive_encapsulated;
use nix::sys::socket::{getsockopt, sockopt::TcpMaxSeg};

const NEEDS: Needs = Needs {
    cpus: CPUS,
    packages: &["iproute2"],
    limit_seconds: 120,
    under: Under::Oldest,
    ..Needs::NOTHING
};

const BYTES: usize = 1 << 20;
/// The MTU of the link, in bytes.
const LONGEST_PACKET: u64 = 1500;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        before_and_after(guest);
        for family in [Family::V4, Family::V6] {
            shorter(guest, family);
        }
    })
}

/// Compares the packet sizes of SAs that are added before and after the module is loaded.
fn before_and_after(guest: &Guest) {
    let _unloaded = guest.without_module("esp4_offload");
    let offload = esp_offload();
    assert!(!offload.ipv4);
    println!("the advice is {:?}", offload.how_to_load());
    let hosts = Hosts::without_offload(guest);
    let (a, b) = (&hosts.a, &hosts.b);
    let _ = protect(&hosts, Family::V4, Protocol::TCP);
    Sa::new(0x2000).add(b, a);
    let old = Sa::new(0x1000);
    old.add(a, b);
    let listener = Acceptor::open(b, Family::V4, 0);
    let bytes_of_a_packet = |sa: &Sa| {
        let lane = Lane::connect(a, 0, &listener);
        let before = a.carried(&sa.id(b));
        lane.send(0, BYTES);
        let after = a.carried(&sa.id(b));
        let bytes = after.bytes - before.bytes;
        let packets = after.packets - before.packets;
        println!("{bytes} bytes in {packets} packets");
        // Return the lane to keep it open. Otherwise the next measurement would count its final
        // packets.
        (bytes / packets, lane)
    };
    let (without, first) = bytes_of_a_packet(&old);
    assert!(without < LONGEST_PACKET, "{without}");
    guest.command("modprobe", &["esp4_offload"]);
    assert!(esp_offload().ipv4);
    let (late, second) = bytes_of_a_packet(&old);
    assert!(
        late < LONGEST_PACKET,
        "an existing SA uses the module: {late}"
    );
    let new = Sa::new(0x1001);
    new.add(a, b);
    assert!(a.xfrm.remove_state(&old.id(b)).expect("the kernel answers"));
    let (with, _third) = bytes_of_a_packet(&new);
    println!("bytes of a packet: without {without}, late {late}, with {with}");
    // Require only twice the MTU, because the average includes acknowledgements and retransmitted
    // segments.
    assert!(with > 2 * LONGEST_PACKET, "{with}");
    drop((first, second));
}

/// Compares the number of data bytes in a segment without ESP, with ESP, and with ESP in UDP.
fn shorter(guest: &Guest, family: Family) {
    let data = |protected: bool, within_udp: bool| {
        let hosts = Hosts::new(guest);
        let (a, b) = (&hosts.a, &hosts.b);
        let address = (b.address(family), ENCAPSULATED);
        let socket = b
            .run(|| UdpSocket::bind(address))
            .expect("the port is free");
        receive_encapsulated(&socket).expect("the kernel has ESP in UDP");
        let there = Sa {
            encapsulation: within_udp.then_some(Encapsulation {
                source_port: 50_000,
                destination_port: ENCAPSULATED,
            }),
            ..Sa::new(0x1000).of(family)
        };
        if protected {
            let _ = protect(&hosts, family, Protocol::TCP);
            there.add(a, b);
            Sa::new(0x2000).of(family).add(b, a);
        }
        let lane = Lane::connect(a, 0, &Acceptor::open(b, family, 0));
        lane.send(0, BYTES);
        let held = a.carried(&there.id(b));
        if protected {
            println!("{} bytes by {} packets", held.bytes, held.packets);
        }
        getsockopt(&lane.near, TcpMaxSeg).expect("the socket is connected")
    };
    let (plain, esp, within_udp) = (data(false, false), data(true, false), data(true, true));
    println!(
        "{family:?}: {plain} bytes of data without ESP, {esp} with it, {within_udp} within UDP"
    );
    assert!(plain > esp && esp > within_udp);
    // The overhead of ESP is the SPI, the sequence number, the IV, the tag, and two to seven bytes
    // of padding and trailer. ESP in UDP also has the UDP header.
    assert!(
        (8 + 8 + 16 + 2..8 + 8 + 16 + 8).contains(&(plain - esp)),
        "{plain} {esp}"
    );
    assert!((8..12).contains(&(esp - within_udp)), "{esp} {within_udp}");
}
