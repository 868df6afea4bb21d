//! An unmodified QEMU migrates a running guest through a tunnel, and every page arrives, even if
//! lanes are lost during the migration.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dunlin_lane::identity::{Identity, LoadOptions, Role};
use dunlin_lane::policy::OldestTls;
use dunlin_lane::provider::Crypto;
use dunlin_rig::guest::{Content, Workload};
use dunlin_rig::machine::{self, Credentials, Machine, MachineError, Migration, Setup, migrate};
use dunlin_rig::need;
use dunlin_test_base::Scratch;
use dunlin_test_support::lane::names;
use dunlin_test_support::tunnel::{Events, Pair, Setup as Tunnels};
use dunlin_tunnel::{
    Entrance, Event, Identities, Limits, Listen, Mode, Routes, Tunnel, WINDOW_BYTES,
};
use serde_json::json;

/// 192 MiB, of which the guest writes to 40 MiB about twice a second.
const WORKLOAD: Workload = Workload {
    memory_mib: 192,
    pages: 44_000,
    hot: 10_000,
    rate: Some(20_000),
    content: Content::Mixed,
    seed: 0x7ee1,
};

fn guest() -> Option<Setup> {
    need::bare_guest(WORKLOAD)
}

fn tunnels() -> Pair {
    limited(Limits::default())
}

/// Two tunnels in which every lane sends, however few processors there are.
fn sending_on_every_lane() -> Pair {
    limited(Limits {
        sending_threads: usize::MAX,
        ..Limits::default()
    })
}

fn limited(limits: Limits) -> Pair {
    Pair::start(&Tunnels {
        is_target: false,
        relayed: true,
        limits: Limits {
            vanished: Duration::from_secs(4),
            ..limits
        },
        ..Tunnels::default()
    })
}

fn through(pair: &Pair) -> Migration {
    Migration::through(
        &format!("unix:{}", pair.entrance().display()),
        &format!("unix:{}", pair.target().display()),
    )
}

/// Migrates a running guest, compares the memories, resumes the guest and makes it check its pages.
fn move_and_check(setup: &Setup, migration: &Migration) {
    let mut source = Machine::start(setup, None).unwrap();
    let mut destination = Machine::start_incoming(setup, None).unwrap();
    source.wait_ready().unwrap();
    let before = source.next_beat().unwrap();
    let migrated = migrate(&mut source, &mut destination, migration).unwrap();
    println!(
        "{:?}, downtime {:?}, {} passes, {} MiB",
        migrated.total,
        migrated.downtime,
        migrated.passes,
        migrated.sent_bytes >> 20
    );
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
    destination.resume().unwrap();
    assert_eq!(destination.check_pages().unwrap(), setup.workload.pages);
    let after = destination.next_beat().unwrap();
    assert!(after.0 > before.0, "{before:?} {after:?}");
}

/// The number of QEMU's connections carried by the tunnel.
fn opened(pair: &Pair) -> usize {
    pair.near_events
        .count(|event| matches!(event, Event::Opened { .. }))
}

#[test]
fn a_migration_goes_through_a_stripe() {
    let Some(setup) = guest() else { return };
    let _turn = need::turn();
    let pair = tunnels();
    move_and_check(&setup, &through(&pair));
    assert_eq!(opened(&pair), 1);
}

#[test]
fn multifd_goes_through_a_stripe() {
    let Some(setup) = guest() else { return };
    let _turn = need::turn();
    let pair = tunnels();
    let mut migration = through(&pair);
    migration.multifd = Some(4);
    move_and_check(&setup, &migration);
    assert_eq!(opened(&pair), 5);
}

/// With its own TLS, QEMU treats the first accepted connection as the main one, because it cannot
/// inspect encrypted connections. The connections must therefore arrive in the order in which they
/// were opened.
#[test]
fn multifd_with_tls_of_its_own_keeps_its_order() {
    let Some(setup) = guest() else { return };
    let _turn = need::turn();
    let pair = tunnels();
    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let mut migration = through(&pair);
    migration.multifd = Some(4);
    migration.tls = Some((credentials.folder(), "destination.example".to_owned()));
    move_and_check(&setup, &migration);
    assert_eq!(opened(&pair), 5);
}

/// One lane is slow. Its data, including the first bytes of a connection, arrives after newer data
/// on the other lanes.
#[test]
fn a_delayed_lane_changes_no_order_under_qemus_own_tls() {
    // The guest writes so slowly that even a delayed lane can keep up.
    let workload = Workload {
        pages: 10_000,
        hot: 100,
        rate: Some(100),
        ..WORKLOAD
    };
    let Some(setup) = need::bare_guest(workload) else {
        return;
    };
    let _turn = need::turn();
    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let carried = || {
        let pair = sending_on_every_lane();
        let relay = pair.relay.clone().unwrap();
        // Delay the first lane after the control lane.
        relay.delay(1);
        let mut migration = through(&pair);
        migration.multifd = Some(4);
        migration.tls = Some((credentials.folder(), "destination.example".to_owned()));
        move_and_check(&setup, &migration);
        relay.forwarded(1)
    };
    // Usually the near side sends on the delayed lane. If the first lane that the far side requests
    // is opened earlier, that lane is delayed instead, so try three times.
    let late: Vec<_> = std::iter::repeat_with(carried).take(3).collect();
    assert!(
        late.iter().any(|bytes| *bytes > Some(64 << 10)),
        "{late:?} bytes on the delayed lane"
    );
}

#[test]
fn lanes_that_are_cut_and_swallowed_are_not_noticed_by_qemu() {
    let Some(setup) = guest() else { return };
    let _turn = need::turn();
    let pair = tunnels();
    let relay = pair.relay.clone().unwrap();
    let harm = thread::spawn(move || {
        let cut = relay.wait_busy(8 << 20, None);
        relay.cut(cut);
        relay.swallow(relay.wait_carrying(4 << 20, cut));
    });
    let mut migration = through(&pair);
    migration.multifd = Some(4);
    move_and_check(&setup, &migration);
    harm.join().unwrap();
    pair.near_events
        .wait("lost lane", |event| matches!(event, Event::LaneLost { .. }));
}

/// Waits until a data lane has carried 512 KiB more than the busiest data lane had carried at the
/// time of the call.
fn carries(pair: &Pair) {
    let relay = pair.relay.as_ref().unwrap();
    relay.wait_busy(relay.busiest() + (512 << 10), None);
}

/// A failed migration leaves the guest running at the source, and the next migration succeeds.
#[test]
fn a_cancelled_migration_and_a_lost_peer_leave_the_guest_running() {
    let Some(setup) = guest() else { return };
    let _turn = need::turn();
    let pair = tunnels();
    let mut source = Machine::start(&setup, None).unwrap();
    source.wait_ready().unwrap();
    let mut slow = through(&pair);
    slow.bandwidth = Some(8 << 20);

    let mut cancelled = Machine::start_incoming(&setup, None).unwrap();
    machine::begin(&mut source, &mut cancelled, &slow).unwrap();
    carries(&pair);
    machine::cancel(&mut source).unwrap();
    assert!(source.runs().unwrap());
    drop(cancelled);
    let _ = std::fs::remove_file(pair.target());

    let mut killed = Machine::start_incoming(&setup, None).unwrap();
    machine::begin(&mut source, &mut killed, &slow).unwrap();
    carries(&pair);
    drop(killed);
    let failed = machine::finish(&mut source, "source");
    assert!(
        matches!(failed, Err(MachineError::Migration { .. })),
        "{failed:?}"
    );
    assert!(source.runs().unwrap());
    let _ = std::fs::remove_file(pair.target());

    let mut destination = Machine::start_incoming(&setup, None).unwrap();
    migrate(&mut source, &mut destination, &through(&pair)).unwrap();
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
}

/// The destination uses TLS itself, but the source does not. A relay on the source's side adds
/// TLS to each connection.
#[test]
fn a_relay_speaks_with_qemus_own_tls() {
    let Some(setup) = guest() else { return };
    let _turn = need::turn();
    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let load = |role| {
        let options = LoadOptions {
            role: Some(role),
            ..LoadOptions::default()
        };
        Arc::new(Identity::load(&credentials.folder(), options).unwrap().0)
    };
    let identities = Identities {
        connecting: load(Role::Source),
        accepting: load(Role::Destination),
        crypto: Crypto::auto(),
    };
    let any = || TcpListener::bind("127.0.0.1:0").unwrap();
    // Choose a free port, on which the destination then listens.
    let qemu = any().local_addr().unwrap();
    let scratch = Scratch::new();
    let entrance = Entrance {
        route: "ram".to_owned(),
        listen: Listen::Unix(scratch.join("in")),
        to: qemu.to_string(),
        peers: names(&["destination.example"]),
        lanes: 1,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Relay(OldestTls::V1_3),
    };
    let routes = Routes::new(vec![entrance], Vec::new()).unwrap();
    let events = Events::default();
    let limits = Limits::default();
    let _tunnel = Tunnel::builder(any(), identities, &routes)
        .limits(limits)
        .observer(events.observer())
        .start()
        .unwrap();

    let mut source = Machine::start(&setup, None).unwrap();
    let mut destination = Machine::start_incoming(&setup, None).unwrap();
    let credentials = json!({
        "qom-type": "tls-creds-x509", "id": "own", "dir": credentials.folder(),
        "endpoint": "server", "verify-peer": true,
    });
    let qmp = destination.qmp();
    qmp.execute("object-add", credentials).unwrap();
    let parameters = json!({"tls-creds": "own"});
    qmp.execute("migrate-set-parameters", parameters).unwrap();
    source.wait_ready().unwrap();
    let mut migration = Migration::through(
        &format!("unix:{}", scratch.join("in").display()),
        &format!("tcp:{qemu}"),
    );
    migration.multifd = Some(2);
    migrate(&mut source, &mut destination, &migration).unwrap();
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
    destination.resume().unwrap();
    assert_eq!(destination.check_pages().unwrap(), setup.workload.pages);
    let opened = events.count(|event| matches!(event, Event::Opened { .. }));
    assert_eq!(opened, 3, "{:#?}", events.all());
}
