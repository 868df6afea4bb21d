//! An earlier and the current version of `dunlin` share sessions, renew keys and migrate a VM.

use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;

use dunlin_kernel_tests::sealed_lanes::{POOL, no_records};
use dunlin_kernel_tests::sessions::{
    AT, BYTES, Capture, HOSTS, Process, SERVER, associations_by, captured, carry, connect,
    connect_to, credentials, inside, nothing_left, status, until, up_of,
};
use dunlin_kernel_tests::vm::{Vm, migrate_from_a};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use serde_json::Value;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "tcpdump"],
    dunlin: true,
    previous: true,
    limit_seconds: 300,
    under: Under::Newest,
    ..Needs::NOTHING
};

/// The number of connections of a session.
const CONNECTIONS: usize = 2;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let versions = guest.versions();
        connect(guest);
        credentials(guest);
        let capture = Capture::begin("b", "skew.pcap");
        for pair in versions {
            for mode in ["connection", "cpu"] {
                println!("{pair:?} have a session, an SA for each {mode}");
                i6_connections_use_esp_and_keys_are_renewed(guest, pair, mode);
            }
            println!("a VM moves between {pair:?}");
            i6_a_vm_moves_over_ipsec(guest, pair);
        }
        capture.end(guest);
        let seen = |filter: &str| captured(guest, "skew.pcap", filter);
        // Exclude the control connections, which use TLS.
        assert_eq!(seen("tcp and not port 7302 and not port 7400"), 0);
        assert_eq!(seen(&format!("tcp portrange {POOL}")), 0);
        assert!(seen("esp") > 100);
    })
}

fn i6_connections_use_esp_and_keys_are_renewed(guest: &Guest, [near, far]: [&str; 2], mode: &str) {
    let serve = Process::serve_of(far, &[]);
    let session = Process::begin(up_of(near, SERVER, &["--mode", mode]), "up");
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let connections: Vec<(TcpStream, TcpStream)> = (0..CONNECTIONS)
        .map(|_| {
            let near = inside("a", || connect_to(AT)).expect("a connects");
            (near, listener.accept().expect("b accepts").0)
        })
        .collect();
    // Query each process with the other version of the command.
    let both = [("a", far), ("b", near)];
    let own = |(host, by): (&str, &str)| -> Vec<Value> {
        let mut all = associations_by(by, guest, host);
        all.retain(|one| one["direction"] == "out" && !one["connection"].is_null());
        all
    };
    if mode == "connection" {
        until("each connection has its SAs", || {
            both.iter().all(|&of| own(of).len() == CONNECTIONS)
        });
    }
    carry(guest, &connections);
    for (host, by) in both {
        guest.command(by, &status(host, &["--rekey"]));
    }
    until("new keys", || {
        both.iter().all(|(host, by)| {
            let all = associations_by(by, guest, host);
            all.iter().all(|one| one["epoch"] == 2)
        })
    });
    carry(guest, &connections);
    let all = associations_by(far, guest, "a");
    assert!(all.iter().all(|one| one["not_authentic"] == 0), "{all:?}");
    let bytes: u64 = all
        .iter()
        .filter(|one| one["direction"] == "out")
        .filter_map(|one| one["bytes"].as_u64())
        .sum();
    assert!(bytes >= (CONNECTIONS * BYTES) as u64, "{all:?}");
    drop((connections, listener));
    session.end(guest);
    nothing_left(guest);
    serve.end(guest);
}

fn i6_a_vm_moves_over_ipsec(guest: &Guest, [near, far]: [&str; 2]) {
    let (destination, _) = Vm::start_at(
        "b",
        far,
        "vm receive --listen 10.0.0.2:7400 --ipsec --identity host-b --peer host-a.example",
    )
    .until("listening");
    let (source, _) = Vm::start_at(
        "a",
        near,
        "vm run --name vm --guest process --memory 64M --fill-size 8M --workload idle --ipsec",
    )
    .until("started");
    let moved = migrate_from_a(
        near,
        "vm migrate --name vm --to 10.0.0.2:7400 --lanes 2 --security ipsec --verify \
         --downtime-limit 20s --identity host-a --peer host-b.example --json --control run-a",
    );
    assert_eq!(moved["event"], "moved", "{moved}");
    assert_eq!(moved["security"], "ipsec", "{moved}");
    assert_eq!(moved["digests_equal"], true, "{moved}");
    nothing_left(guest);
    for (host, _) in HOSTS {
        assert!(no_records(host), "{host}");
    }
    drop((source, destination));
}
