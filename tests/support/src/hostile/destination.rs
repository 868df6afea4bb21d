//! A destination that lies in the protocol: the steps up to its lie, and the options of its source.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use dunlin::engine::source;
use dunlin_lane::data::DataReceiver;
use dunlin_lane::policy::ServerTls;
use dunlin_proto::control::{Accept, Message};
use dunlin_proto::negotiate::SessionSecret;

use crate::engine::peer::{Peer, take_lane};

/// Options of a source with one lane and short limits.
pub fn one_lane() -> source::Options {
    source::Options::builder()
        .lanes(1)
        .connect_limit(Duration::from_secs(2))
        .no_lane_limit(Duration::from_millis(500))
        .control_limit(Duration::from_millis(500))
        .build()
        .unwrap()
}

/// Options with which the source switches over as soon as possible.
pub fn hasty(verify: bool) -> source::Options {
    one_lane()
        .to_builder()
        .time_limit(Some(Duration::from_millis(200)))
        .at_time_limit(source::AtTimeLimit::Stop)
        .verify(verify)
        .doubt_limit(Duration::from_millis(300))
        .build()
        .unwrap()
}

pub fn accept_message() -> Accept {
    Accept {
        secret: SessionSecret([5; 32]),
        lanes_max: 4,
        endpoints: Vec::new(),
    }
}

pub fn until_it_hangs_up(peer: &mut Peer) {
    while peer.receive().is_some() {}
}

/// A destination that has received the VM's description.
pub fn described(listener: &TcpListener, tls: &ServerTls) -> Peer {
    let mut peer = Peer::destination(listener, tls, None);
    assert!(matches!(peer.receive(), Some(Message::Describe(_))));
    peer
}

/// A destination with one established lane, which a thread reads to its end.
pub fn with_lane(
    listener: &TcpListener,
    tls: &ServerTls,
) -> (Peer, thread::JoinHandle<DataReceiver>) {
    let mut peer = described(listener, tls);
    peer.send(&Message::Accept(accept_message()));
    let (mut lane, open) = take_lane(listener, tls);
    assert_eq!(open.lane, 1);
    peer.send(&Message::LaneUp { lane: 1 });
    let reader = thread::spawn(move || {
        while lane.read_exact(&mut [0; 24]).is_ok() {}
        lane
    });
    (peer, reader)
}

/// A destination that has received everything and must answer *ready*.
pub fn finalised(listener: &TcpListener, tls: &ServerTls) -> Peer {
    let (mut peer, reader) = with_lane(listener, tls);
    let last = peer.await_message(|message| matches!(message, Message::Final(_)));
    assert!(last.is_some());
    reader.join().unwrap();
    peer
}
