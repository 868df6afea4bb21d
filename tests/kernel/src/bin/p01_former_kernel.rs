//! On a kernel older than Linux 6.10, a session with an SA for each connection works.
//! This kernel lacks directions of SAs (since Linux 6.10) and per-CPU SAs (since Linux 6.13), so a
//! session with an SA for each CPU is refused.

use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;

use dunlin_ipsec::xfrm::{Direction, Error};
use dunlin_kernel_tests::ipsec::{Hosts, Sa};
use dunlin_kernel_tests::sessions::{
    AT, BYTES, Capture, PORTS, Process, SERVER, associations, captured, carry, connect, connect_to,
    credentials, inside, nothing_left, status, until, up_with,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use serde_json::Value;

const NEEDS: Needs = Needs {
    cpus: 2,
    packages: &["iproute2", "tcpdump"],
    dunlin: true,
    under: Under::Former,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        if keeps_directions(guest) {
            guest.skip("this kernel has directions of SAs");
        }
        println!("ignored_attributes_are_found_by_reading_back");
        ignored_attributes_are_found_by_reading_back(guest);
        connect(guest);
        credentials(guest);
        let capture = Capture::begin("b", "former.pcap");
        let serve = Process::serve();
        println!("an_sa_for_each_cpu_is_refused_with_the_reason");
        an_sa_for_each_cpu_is_refused_with_the_reason(guest);
        println!("i6_an_sa_for_each_connection_works");
        i6_an_sa_for_each_connection_works(guest);
        serve.end(guest);
        capture.end(guest);
        let seen = |filter: &str| captured(guest, "former.pcap", filter);
        let clear = format!("tcp portrange {PORTS}");
        assert_eq!(seen(&clear), 0, "packets in the clear");
        assert!(seen("esp") > 100, "too few packets in ESP");
    })
}

/// Whether the kernel stores the direction of an SA. Uses iproute2, which shares no code with the
/// library.
fn keeps_directions(guest: &Guest) -> bool {
    const SA: &str = "xfrm state add src 10.9.0.1 dst 10.9.0.2 proto esp spi 0x900 mode transport \
                      aead rfc4106(gcm(aes)) 0x000102030405060708090a0b0c0d0e0f10111213 128 dir out";
    guest.command("ip", &["netns", "add", "asked"]);
    let ip = |words: &str| {
        let words: Vec<&str> = words.split_whitespace().collect();
        guest.output("ip", &[&["-n", "asked"], &words[..]].concat())
    };
    let _ = ip(SA);
    let held = ip("xfrm state list");
    guest.command("ip", &["netns", "del", "asked"]);
    assert!(held.contains("spi 0x00000900"), "{held}");
    held.contains("dir out")
}

/// The kernel silently accepts the attributes for the CPU and the direction, but does not store
/// them.
fn ignored_attributes_are_found_by_reading_back(guest: &Guest) {
    let hosts = Hosts::new(guest);
    let Hosts { a, b, .. } = &hosts;
    let probed = a.xfrm.probe().expect("the kernel answers");
    assert_eq!((probed.cpu, probed.direction), (None, None));
    assert_eq!(a.xfrm.states().expect("the kernel answers"), []);
    let mut state = Sa::new(0x1000).of_cpu(1).state(a, b, Direction::Out);
    let refused = a.xfrm.add_state(&state);
    println!("without a replay window: {refused:?}");
    assert!(
        refused.is_err(),
        "an outbound SA without a replay window was added"
    );
    state.replay_window = 32;
    a.xfrm.add_state(&state).expect("the kernel accepts it");
    let held = a.xfrm.state(&state.id).expect("the kernel answers");
    let held = held.expect("the SA exists");
    assert_eq!((held.cpu, held.direction), (None, None));
    let verified = a.xfrm.verify(&state);
    let Err(Error::Differs { what: "the CPU" }) = verified else {
        panic!("{verified:?}")
    };
}

fn an_sa_for_each_cpu_is_refused_with_the_reason(guest: &Guest) {
    let refused = up_with(SERVER, &["--mode", "cpu"])
        .output()
        .expect("ip starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    println!("{said}");
    assert!(!refused.status.success());
    for text in ["[feature-missing]", "--mode connection", "Linux 6.13"] {
        assert!(said.contains(text), "{text}: {said}");
    }
    nothing_left(guest);
}

/// A client uses several connections at once, as hypervisors do. Each connection has its own SA,
/// also after rekeying.
fn i6_an_sa_for_each_connection_works(guest: &Guest) {
    let session = Process::up("connection");
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let connections: Vec<(TcpStream, TcpStream)> = (0..4)
        .map(|_| {
            let near = inside("a", || connect_to(AT)).expect("a connects");
            (near, listener.accept().expect("b accepts").0)
        })
        .collect();
    let own = |host: &str| -> Vec<Value> {
        let is_own = |one: &Value| one["direction"] == "out" && !one["connection"].is_null();
        associations(guest, host)
            .into_iter()
            .filter(is_own)
            .collect()
    };
    for (host, epoch) in [("a", 1), ("b", 1), ("a", 2), ("b", 2)] {
        if host == "a" && epoch == 2 {
            carry(guest, &connections);
            for host in ["a", "b"] {
                guest.command("dunlin", &status(host, &["--rekey"]));
            }
        }
        until("each connection has its SA", || {
            let own = own(host);
            own.len() == 4 && own.iter().all(|one| one["epoch"] == epoch)
        });
    }
    carry(guest, &connections);
    let used = own("a");
    for one in &used {
        assert!(one["bytes"].as_u64() >= Some(BYTES as u64), "{used:?}");
        assert_eq!(one["cpu"], Value::Null, "{used:?}");
    }
    drop(connections);
    session.end(guest);
    nothing_left(guest);
}
