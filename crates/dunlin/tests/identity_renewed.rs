//! A destination that is there again, under the same name and with another certificate.
#![allow(clippy::unwrap_used)]

mod engine_support;
mod lane_support;

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, VmIs};
use dunlin::lane::provider::Crypto;
use dunlin_proto::control::{Accept, Message};
use dunlin_proto::negotiate::SessionSecret;
use engine_support::peer::{Peer, take_lane};
use engine_support::{TestVm, client_of, send, verified};
use lane_support::{Authority, DESTINATION, SOURCE, names};

#[test]
fn i6_a_destination_that_comes_back_with_another_certificate_is_named_with_both() {
    let authority = Authority::new();
    let client = client_of(&authority, SOURCE);
    let hosts = [(); 2].map(|()| authority.identity(&[DESTINATION]));
    let pins = hosts
        .each_ref()
        .map(|host| host.summary().unwrap().pin.to_string());
    let servers = hosts.map(|host| host.server(&Crypto::auto(), names(&[SOURCE])).unwrap());
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
            let [before, after] = &servers;
            let mut peer = Peer::destination(&listener, before, None);
            assert!(matches!(peer.receive(), Some(Message::Describe(_))));
            peer.send(&Message::Accept(Accept {
                secret: SessionSecret([5; 32]),
                lanes_max: 4,
                endpoints: Vec::new(),
            }));
            let (_lane, _) = take_lane(&listener, before);
            peer.send(&Message::LaneUp { lane: 1 });
            peer.stream.shutdown();
            let mut again = Peer::destination(&listener, after, None);
            while again.receive().is_some() {}
        });
        send(&vm, &to, &client, &slow, &Cancel::new())
            .0
            .unwrap_err()
    });
    assert_eq!(
        (error.fault, error.vm),
        (FaultCode::WrongIdentity, VmIs::AtSource)
    );
    let text = error.to_string();
    for part in [&pins[0], &pins[1], "renewed", "another host"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert!(vm.goes_on());
}
