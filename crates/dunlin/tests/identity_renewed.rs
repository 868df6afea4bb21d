//! Tests a source that has lost its control lane, and the host that answers at the destination's
//! address afterwards.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use dunlin::engine::Cancel;
use dunlin::engine::vmm::FaultCode;
use dunlin::lane::identity::Identity;
use dunlin::lane::provider::Crypto;
use dunlin_proto::control::{Accept, Message};
use dunlin_proto::negotiate::SessionSecret;
use dunlin_test_support::engine::peer::{Peer, take_lane};
use dunlin_test_support::engine::{TestVm, send, verified};
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, load, names};

/// Disconnects a session's control lane in pre-copy. Afterwards, the host `after` answers at the
/// address of the host `before`. Returns how the migration failed.
fn meets(before: &Identity, after: &Identity, source: &Identity) -> FaultCode {
    let client = source
        .client(&Crypto::auto(), names(&[DESTINATION, "other.test"]))
        .unwrap();
    let server = |host: &Identity| host.server(&Crypto::auto(), names(&[SOURCE])).unwrap();
    let (before, after) = (server(before), server(after));
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let vm = TestVm::new(4 << 20);
    vm.fill(4 << 20);
    vm.start(64, Duration::from_micros(100));
    let slow = verified(1)
        .to_builder()
        .rate(Some(1 << 20))
        .build()
        .unwrap();
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            let mut peer = Peer::destination(&listener, &before, None);
            assert!(matches!(peer.receive(), Some(Message::Describe(_))));
            peer.send(&Message::Accept(Accept {
                secret: SessionSecret([5; 32]),
                lanes_max: 4,
                endpoints: Vec::new(),
            }));
            let (_lane, _) = take_lane(&listener, &before);
            peer.send(&Message::LaneUp { lane: 1 });
            peer.stream.shutdown();
            let mut again = Peer::destination(&listener, &after, None);
            (again.envelope.epoch, again.envelope.sequence) = (2, peer.envelope.sequence);
            // The source reports this fault only if it has accepted this host as the destination.
            let fault = FaultCode::NoMemory;
            let text = "as a test".into();
            again.send(&Message::Cancel { fault, text });
            while again.receive().is_some() {}
        });
        send(&vm, &to, &client, &slow, &Cancel::new())
            .0
            .unwrap_err()
    });
    assert!(vm.goes_on());
    error.code()
}

#[test]
fn i6_a_destination_comes_back_with_a_renewed_certificate_and_no_other_host_in_its_place() {
    let (ours, theirs) = (Authority::named("one"), Authority::named("two"));
    let source = load(&ours.host_trusting(&[SOURCE], &[&theirs]));
    let before = ours.identity(&[DESTINATION]);
    let renewed = ours.identity(&[DESTINATION]);
    let twin = load(&theirs.host_trusting(&[DESTINATION], &[&ours]));
    let other = ours.identity(&["other.test"]);
    let wrong = FaultCode::WrongIdentity;
    assert_eq!(meets(&before, &renewed, &source), FaultCode::NoMemory);
    assert_eq!(meets(&before, &twin, &source), wrong);
    assert_eq!(meets(&before, &other, &source), wrong);
}
