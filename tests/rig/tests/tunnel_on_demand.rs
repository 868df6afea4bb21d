//! QEMU migrates through a listener that is opened only for this migration. Migration tools open
//! one for each migration.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::net::TcpListener;
use std::time::Instant;

use dunlin_rig::guest::{Content, Workload};
use dunlin_rig::machine::{Credentials, Machine, Migration, migrate};
use dunlin_rig::need;
use dunlin_test_base::Scratch;
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{FAR, NEAR, TIMEOUT, identities};
use dunlin_tunnel::{Demand, Entrance, Exit, Listen, Mode, Routes, Target, Tunnel, WINDOW_BYTES};

const WORKLOAD: Workload = Workload {
    memory_mib: 128,
    pages: 24_000,
    hot: 4_000,
    rate: Some(10_000),
    content: Content::Mixed,
    seed: 0xe44a,
};

/// With QEMU's own TLS, QEMU treats the first accepted connection as the main one, so the listener
/// must preserve the order. Afterwards the listener leaves nothing behind, and it has counted no
/// connection as failed. Some connections may count as ended with unread bytes. QEMU's destination
/// closes the memory connections as soon as it has all pages. It does not wait for the close_notify
/// of the source's TLS.
#[test]
fn a_listener_for_one_migration_carries_it_in_order_and_goes() {
    let Some(setup) = need::bare_guest(WORKLOAD) else {
        return;
    };
    let _turn = need::turn();
    let (authority, scratch) = (Authority::new(), Scratch::new());
    let any = || TcpListener::bind("127.0.0.1:0").unwrap();
    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[NEAR]),
        target: Target::Unix(scratch.join("{vm}.sock")),
        window_bytes: WINDOW_BYTES,
    };
    let routes = Routes::new(Vec::new(), vec![exit]).unwrap();
    let far = identities(authority.identity(&[FAR]));
    let far = Tunnel::builder(any(), far, &routes).start().unwrap();
    let entrance = Entrance {
        route: "ram".to_owned(),
        listen: Listen::OnDemand,
        to: far.address().unwrap().to_string(),
        peers: names(&[FAR]),
        lanes: 2,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    };
    let routes = Routes::new(vec![entrance], Vec::new()).unwrap();
    let near = identities(authority.identity(&[NEAR]));
    let near = Tunnel::builder(any(), near, &routes).start().unwrap();
    let place = scratch.join("web.listener");
    let demand = Demand {
        route: "ram".to_owned(),
        parameter: Some("vm=web".parse().unwrap()),
        listen: Listen::Unix(place.clone()),
        lanes: Some(3),
        once: false,
        access: dunlin_tunnel::FileAccess::default(),
    };
    let listener = near.open(&demand).unwrap();

    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let target = scratch.join("web.sock");
    let mut migration = Migration::through(
        &format!("unix:{}", place.display()),
        &format!("unix:{}", target.display()),
    );
    migration.multifd = Some(4);
    migration.tls = Some((credentials.folder(), "destination.example".to_owned()));
    let mut source = Machine::start(&setup, None).unwrap();
    let mut destination = Machine::start_incoming(&setup, None).unwrap();
    source.wait_ready().unwrap();
    migrate(&mut source, &mut destination, &migration).unwrap();
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
    destination.resume().unwrap();
    assert_eq!(destination.check_pages().unwrap(), setup.workload.pages);

    drop(source);
    let status = listener.wait(Some(Instant::now() + TIMEOUT));
    assert!(status.is_over(), "{status:?}");
    println!("{status:?}");
    assert_eq!((status.ended(), status.failed), (5, 0), "{status:?}");
    let far = far.routes()[0].traffic;
    assert_eq!(
        (far.closed + far.left_unread, far.failed),
        (5, 0),
        "{far:?}"
    );
    assert!(!place.exists());
}
