//! An unmodified QEMU migrates with plain multifd while `dunlin ipsec up` protects its ports.
//! Each connection has an SA, keys are renewed during the migration, and no data is sent in the
//! clear.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_kernel_tests::ipsec::tap::Tap;
use dunlin_kernel_tests::sessions::{
    LIMIT, Process, associations, connect, credentials, inside, nothing_left, status, until,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_rig::debian::Qemu;
use dunlin_rig::guest::{self, Content, Workload};
use dunlin_rig::machine::{Accelerator, Machine, Migration, Setup, TIMEOUT, begin, cancel, finish};
use serde_json::{Value, json};

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "qemu-system-x86"],
    dunlin: true,
    limit_seconds: 300,
    under: Under::Newest,
    ..Needs::NOTHING
};

/// The number of QEMU's multifd connections, in addition to the main connection.
const CHANNELS: usize = 4;
/// The guest's memory, and its writes during the migration. QEMU sends every byte of a non-zero
/// page.
const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 6_000,
    hot: 400,
    rate: Some(200),
    content: Content::Random,
    seed: 0x5a,
};
/// A bandwidth in bytes per second. It is so low that the migration lasts until the keys of its SAs
/// have been renewed.
const SLOW: u64 = 1 << 20;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        let tap = Tap::begin();
        let serve = Process::serve();
        let session = Process::up("connection");
        let mut options = Setup::new(
            &Qemu::installed(),
            guest::Guest::Bare,
            WORKLOAD,
            Accelerator::Tcg,
        );
        options.options = ["-cpu", "max"].map(str::to_owned).into();
        let mut source = inside("a", || Machine::start(&options, None)).expect("QEMU starts");
        source.wait_ready().expect("the guest fills its pages");
        if guest.is_soak() {
            one_is_cancelled(guest, &options, &mut source);
        }
        let mut destination = destination(&options);
        each_connection_has_its_sa(guest, &mut source, &mut destination);
        assert_eq!(
            source
                .first_difference(&mut destination)
                .expect("both are paused"),
            None,
            "the first address that differs"
        );
        destination.resume().expect("the guest continues");
        let pages = destination.check_pages().expect("every page is right");
        assert_eq!(pages, WORKLOAD.pages);
        drop((source, destination));
        session.end(guest);
        nothing_left(guest);
        serve.end(guest);
        let left = tap.end();
        assert!(left.is_sealed(&(4444..=4447)), "{left:?}");
        let sealed: u64 = left.sealed.values().sum();
        assert!(
            sealed > WORKLOAD.pages * 4096 / 1500,
            "not all pages were sent in ESP: {left:?}"
        );
    })
}

fn destination(setup: &Setup) -> Machine {
    inside("b", || Machine::start_incoming(setup, None)).expect("QEMU starts")
}

fn migration(bandwidth: u64) -> Migration {
    let mut migration = Migration::tcp("10.0.0.2:4444".parse().expect("an address"));
    migration.multifd = Some(CHANNELS as u8);
    migration.bandwidth = Some(bandwidth);
    migration
}

/// When a migration is cancelled, its SAs are removed with its connections, and the guest continues
/// to run.
fn one_is_cancelled(guest: &Guest, setup: &Setup, source: &mut Machine) {
    let mut destination = destination(setup);
    begin(source, &mut destination, &migration(SLOW)).expect("the migration begins");
    until("each connection has its SA", || {
        own(guest, "a").len() == CHANNELS + 1
    });
    cancel(source).expect("the migration is in progress");
    drop(destination);
    connections_have_no_sas(guest);
    source.next_beat().expect("the guest continues");
}

/// Migrates, and renews the keys during the migration. Reads the counters of each SA before the
/// last pages are sent, because an SA is removed with its connection.
fn each_connection_has_its_sa(guest: &Guest, source: &mut Machine, destination: &mut Machine) {
    let wait = json!({"capabilities": [{"capability": "pause-before-switchover", "state": true}]});
    let qmp = |machine: &mut Machine, command: &str, arguments: Value| {
        let done = machine.execute(command, arguments);
        done.unwrap_or_else(|error| panic!("{error}: {error:?}"))
    };
    qmp(source, "migrate-set-capabilities", wait);
    begin(source, destination, &migration(SLOW)).expect("the migration begins");
    for host in ["a", "b"] {
        until("each connection has its SA", || {
            own(guest, host).len() == CHANNELS + 1
        });
    }
    let early = fallback(guest);
    for host in ["a", "b"] {
        guest.command("dunlin", &status(host, &["--rekey"]));
    }
    for host in ["a", "b"] {
        until("new keys", || {
            let epochs = associations(guest, host);
            epochs.iter().all(|one| one["epoch"] == 2)
        });
    }
    qmp(
        source,
        "migrate-set-parameters",
        json!({"max-bandwidth": 0}),
    );
    let event = source.qmp().wait_event(TIMEOUT, |name, data| {
        name == "MIGRATION" && data["status"] == "pre-switchover"
    });
    event.expect("the migration proceeds");
    let used = own(guest, "a");
    let late = fallback(guest);
    let bytes = |one: &Value| one["bytes"].as_u64().expect("the SA has counters");
    println!(
        "bytes by the fallback: {early}, then {late}; by connections: {:?}",
        used.iter().map(bytes).collect::<Vec<_>>()
    );
    let ports: BTreeSet<_> = used
        .iter()
        .map(|one| one["connection"].to_string())
        .collect();
    assert_eq!(ports.len(), CHANNELS + 1, "{used:?}");
    // QEMU does not share the pages equally, and may send most of them before these SAs exist. The
    // main connection carries less than 1 KiB.
    let carry = used.iter().filter(|one| bytes(one) > 16 << 10).count();
    assert_eq!(
        carry, CHANNELS,
        "the SA of a connection carried no pages: {used:?}"
    );
    // The counters of the new SAs do not include bytes that were sent with the old SAs.
    assert!(late < 64 << 10, "by the fallback: {late} bytes");
    assert!(used.iter().all(|one| one["not_authentic"] == 0), "{used:?}");
    qmp(
        source,
        "migrate-continue",
        json!({"state": "pre-switchover"}),
    );
    finish(source, "source").expect("the migration completes");
    finish(destination, "destination").expect("the migration completes");
    connections_have_no_sas(guest);
}

/// Waits until no SA belongs to a connection, because SAs are removed with their connections.
fn connections_have_no_sas(guest: &Guest) {
    let limit = Instant::now() + LIMIT;
    for host in ["a", "b"] {
        while !own(guest, host).is_empty() {
            if Instant::now() > limit {
                println!("{:#?}", own(guest, host));
                for host in ["a", "b"] {
                    let sockets = guest.output("ip", &["netns", "exec", host, "ss", "-tanoi"]);
                    println!("TCP sockets of {host}:\n{sockets}");
                }
                panic!("{host} still has SAs of connections");
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Returns the outbound SAs of a host that belong to single connections.
fn own(guest: &Guest, host: &str) -> Vec<Value> {
    let all = associations(guest, host);
    let own = |one: &Value| one["direction"] == "out" && !one["connection"].is_null();
    all.into_iter().filter(own).collect()
}

/// Returns the number of bytes that host a has sent with the fallback SA.
fn fallback(guest: &Guest) -> u64 {
    let all = associations(guest, "a");
    let found = all
        .iter()
        .find(|one| one["direction"] == "out" && one["connection"].is_null());
    found
        .and_then(|one| one["bytes"].as_u64())
        .unwrap_or_else(|| panic!("no fallback: {all:?}"))
}
