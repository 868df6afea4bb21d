//! QEMU migrates the bare guest and Linux between two hosts without Dunlin, and every page arrives.
//! This is the reference for tests in which Dunlin carries the migration.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use dunlin_rig::debian::{self, Which};
use dunlin_rig::guest::{Content, Guest, Workload};
use dunlin_rig::hosts::{Direction, Family, Host, Link, LinkOptions};
use dunlin_rig::machine::{
    self, Accelerator, Credentials, Machine, MachineError, Migrated, Migration, Setup, migrate,
};
use dunlin_rig::need;
use serde_json::{Value, json};

const PORT: u16 = 4444;

/// 192 MiB, of which the guest writes to 40 MiB about twice a second.
const WORKLOAD: Workload = Workload {
    memory_mib: 192,
    pages: 44_000,
    hot: 10_000,
    rate: Some(20_000),
    content: Content::Mixed,
    seed: 0x5eed,
};

/// The bare guest, if hosts can be created.
fn bare() -> Option<Setup> {
    need::bare_guest(WORKLOAD).filter(|_| need::hosts())
}

struct Pair {
    source: Host,
    destination: Host,
    link: Link,
}

impl Pair {
    fn new(options: &LinkOptions) -> Self {
        let source = Host::new("source").unwrap();
        let destination = Host::new("destination").unwrap();
        let link = Link::new(&source, &destination, options).unwrap();
        Self {
            source,
            destination,
            link,
        }
    }

    fn migration(&self, family: Family) -> Migration {
        Migration::tcp((self.link.address(&self.destination, family), PORT).into())
    }
}

/// Migrates a running guest, compares the memories, resumes the guest and makes it check its pages.
fn move_and_check(pair: &Pair, setup: &Setup, migration: &Migration) -> Migrated {
    let mut source = Machine::start(setup, Some(&pair.source)).unwrap();
    let mut destination = Machine::start_incoming(setup, Some(&pair.destination)).unwrap();
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
    assert!(!source.runs().unwrap() && !destination.runs().unwrap());
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);

    destination.resume().unwrap();
    assert_eq!(
        destination.check_pages().unwrap(),
        setup.workload.pages,
        "not all pages were checked"
    );
    let after = destination.next_beat().unwrap();
    assert!(
        after.0 > before.0 && after.1 >= before.1,
        "{before:?} {after:?}"
    );
    migrated
}

#[test]
fn a_plain_migration_moves_the_bare_guest() {
    let Some(setup) = bare() else { return };
    let _turn = need::turn();
    let pair = Pair::new(&LinkOptions::default());
    move_and_check(&pair, &setup, &pair.migration(Family::V4));
}

#[test]
fn multifd_moves_the_bare_guest() {
    let Some(setup) = bare() else { return };
    let _turn = need::turn();
    let pair = Pair::new(&LinkOptions::default());
    let mut migration = pair.migration(Family::V6);
    migration.multifd = Some(2);
    move_and_check(&pair, &setup, &migration);
}

#[test]
fn multifd_over_tls_moves_the_bare_guest_and_refuses_another_name() {
    let Some(setup) = bare() else { return };
    let _turn = need::turn();
    let pair = Pair::new(&LinkOptions::default());
    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let mut migration = pair.migration(Family::V6);
    migration.multifd = Some(2);
    migration.tls = Some((credentials.folder(), "destination.example".to_owned()));
    move_and_check(&pair, &setup, &migration);

    // The source rejects a certificate with another name, and the guest continues to run.
    migration.tls = Some((credentials.folder(), "other.example".to_owned()));
    let mut source = Machine::start(&setup, Some(&pair.source)).unwrap();
    let mut destination = Machine::start_incoming(&setup, Some(&pair.destination)).unwrap();
    source.wait_ready().unwrap();
    match migrate(&mut source, &mut destination, &migration) {
        Err(MachineError::Migration { side, status, .. }) => {
            assert_eq!((side, status.as_str()), ("source", "failed"));
        }
        other => panic!("{other:?}"),
    }
    assert!(source.runs().unwrap());
    source.check_pages().unwrap();
}

#[test]
fn a_cancelled_migration_leaves_the_guest_and_the_next_one_arrives() {
    let Some(setup) = bare() else { return };
    let _turn = need::turn();
    let pair = Pair::new(&LinkOptions {
        // At this rate, sending the pages that the guest has filled takes seven seconds.
        rate_bits: Some(100_000_000),
        delay: Some(Duration::from_millis(10)),
        ..LinkOptions::default()
    });
    let migration = pair.migration(Family::V6);
    let mut source = Machine::start(&setup, Some(&pair.source)).unwrap();
    let mut destination = Machine::start_incoming(&setup, Some(&pair.destination)).unwrap();
    source.wait_ready().unwrap();
    machine::begin(&mut source, &mut destination, &migration).unwrap();
    source.next_beat().unwrap();
    machine::cancel(&mut source).unwrap();
    assert!(source.runs().unwrap());
    source.check_pages().unwrap();
    drop(destination);

    // During the second migration, the link drops all packets for a while.
    let mut destination = Machine::start_incoming(&setup, Some(&pair.destination)).unwrap();
    machine::begin(&mut source, &mut destination, &migration).unwrap();
    let active = |name: &str, data: &Value| name == "MIGRATION" && data["status"] == "active";
    let qmp = source.qmp();
    qmp.wait_event(machine::TIMEOUT, active).unwrap();
    pair.link.swallow(Direction::Both).unwrap();
    source.forget_lines();
    source.next_beat().unwrap();
    let status = source.qmp().execute("query-migrate", json!({})).unwrap();
    assert_eq!(status["status"], "active", "the link lost packets too late");
    pair.link.set_rate(None).unwrap();
    pair.link.restore().unwrap();
    machine::finish(&mut source, "source").unwrap();
    machine::finish(&mut destination, "destination").unwrap();
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
    destination.resume().unwrap();
    destination.check_pages().unwrap();
}

#[test]
fn a_changed_byte_is_found_by_us_and_by_the_guest() {
    let Some(mut setup) = bare() else { return };
    let _turn = need::turn();
    setup.workload.hot = 0;
    setup.workload.content = Content::Random;
    let pair = Pair::new(&LinkOptions::default());
    let proxy = pair
        .source
        .run(|| TcpListener::bind("127.0.0.1:0"))
        .unwrap()
        .unwrap();
    let to = SocketAddr::from((pair.link.address(&pair.destination, Family::V4), PORT));
    let connect = format!("tcp:{}", proxy.local_addr().unwrap());
    let migration = Migration::through(&connect, &format!("tcp:{to}"));
    let mut source = Machine::start(&setup, Some(&pair.source)).unwrap();
    let mut destination = Machine::start_incoming(&setup, Some(&pair.destination)).unwrap();
    source.wait_ready().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| change_a_byte(&proxy, &pair.source, to));
        migrate(&mut source, &mut destination, &migration).unwrap();
    });
    let place = source.first_difference(&mut destination).unwrap();
    let page = place.expect("no difference, although a byte was changed") / 4096 - 0x400;
    destination.resume().unwrap();
    match destination.check_pages() {
        Err(MachineError::Wrong { page: found, .. }) => assert_eq!(found, page),
        other => panic!("the guest has not detected the change of page {page}: {other:?}"),
    }
}

/// Forwards one connection, and changes a byte after 64 MiB.
fn change_a_byte(listener: &TcpListener, host: &Host, to: SocketAddr) {
    let (mut from, _) = listener.accept().unwrap();
    let mut to = host.run(|| TcpStream::connect(to)).unwrap().unwrap();
    let mut back = (to.try_clone().unwrap(), from.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            // Copy the opposite direction. It may be reset at the end, which is not an error.
            let _ = std::io::copy(&mut back.0, &mut back.1);
        });
        let mut buffer = vec![0; 1 << 16];
        let mut left = 64_usize << 20;
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if left < count {
                buffer[left] ^= 1;
                left = usize::MAX;
            }
            left -= count;
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}

#[test]
fn a_plain_migration_moves_linux() {
    let Some(qemu) = need::qemu() else { return };
    let Some(kernel) = need::fetched(debian::kernel(&Which::Newest)) else {
        return;
    };
    if !need::hosts() {
        return;
    }
    let _turn = need::turn();
    let workload = Workload {
        memory_mib: 384,
        pages: 16_000,
        hot: 2_000,
        rate: Some(500),
        ..WORKLOAD
    };
    let setup = Setup::new(&qemu, Guest::Linux(kernel), workload, Accelerator::Tcg);
    let pair = Pair::new(&LinkOptions::default());
    move_and_check(&pair, &setup, &pair.migration(Family::V6));
}

/// Migrates the bare guest with every kind of content, and Linux with two kernels. Each migrates
/// over a link with a delay, with and without multifd and TLS.
#[test]
fn in_the_soak_everything_moves_over_a_long_line() {
    if std::env::var_os("DUNLIN_SOAK").is_none_or(|soak| soak != "1") {
        println!("skipped: runs only in the soak");
        return;
    }
    let Some(setup) = bare() else { return };
    let _turn = need::turn();
    let pair = Pair::new(&LinkOptions {
        rate_bits: Some(2_000_000_000),
        delay: Some(Duration::from_millis(10)),
        ..LinkOptions::default()
    });
    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let mut kernels = vec![Guest::Bare];
    for which in [Which::Oldest, Which::Newest] {
        kernels.push(Guest::Linux(debian::kernel(&which).unwrap()));
    }
    for guest in kernels {
        let mut setup = setup.clone();
        let mut contents = &[
            Content::Zero,
            Content::Random,
            Content::Mixed,
            Content::Text,
        ][..];
        if matches!(guest, Guest::Linux(_)) {
            setup.accelerator = Accelerator::Tcg;
            setup.workload.memory_mib = 384;
            setup.workload.rate = Some(500);
            contents = &[Content::Mixed];
        }
        setup.guest = guest;
        let families = [Family::V4, Family::V6].repeat(2);
        for (content, family) in contents.iter().copied().zip(families) {
            setup.workload.content = content;
            for multifd in [None, Some(1), Some(4)] {
                for tls in [false, true] {
                    let mut migration = pair.migration(family);
                    migration.multifd = multifd;
                    if tls {
                        let name = "destination.example".to_owned();
                        migration.tls = Some((credentials.folder(), name));
                    }
                    println!("{content:?}, {family:?}, multifd {multifd:?}, TLS {tls}");
                    move_and_check(&pair, &setup, &migration);
                }
            }
        }
    }
}
