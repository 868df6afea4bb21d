//! Helpers for the tests of several files.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::provider::{Offer, Provider, TlsVersion};
use dunlin_proto::fault::FaultCode;
use dunlin_test_support::lane::{Authority, DESTINATION};

use super::{Acceptor, Backend, Event, HandoffName, Limits, Options, Target};

/// The timeout for every wait.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// Starts an acceptor that forwards every client to `to`, at most `most` clients at a time. Also
/// returns a channel with the codes of its refusals.
pub(super) fn acceptor(to: Target, most: usize) -> (Acceptor, Receiver<FaultCode>) {
    acceptor_of(Vec::new(), to, most)
}

/// The TLS parameters that the client and the server of a test allow.
pub(super) fn offer() -> Offer {
    let ciphers = "TLS_AES_256_GCM_SHA384";
    Offer::new(TlsVersion::V1_3, ciphers, "X25519", Provider::built_in()[0]).unwrap()
}

/// Like [`acceptor`], with these hand-off names.
pub(super) fn acceptor_of(
    names: Vec<HandoffName>,
    to: Target,
    most: usize,
) -> (Acceptor, Receiver<FaultCode>) {
    let identity = Authority::new().identity(&[DESTINATION]);
    let options = Options {
        names,
        backend: Some(Backend { to, header: None }),
        forwards_plain: true,
        describe: Box::new(|_| String::new()),
        inspector: Box::new(()),
        limits: Limits {
            forwarded: most,
            // This timeout is longer than every test, so it never expires.
            connect_timeout: 10 * TIMEOUT,
            ..Limits::default()
        },
    };
    let (sender, events) = channel();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tls = identity.handoff_server(offer(), None).unwrap();
    let acceptor = Acceptor::start(listener, tls, options, move |event: &Event| {
        if let Event::Refused { refusal, .. } = event {
            // Sending fails if a test that ignores events has dropped the receiver.
            let _ = sender.send(refusal.code());
        }
    });
    (acceptor.unwrap(), events)
}

/// Polls until `holds` returns true.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < limit, "{what}: not yet");
        thread::sleep(Duration::from_millis(1));
    }
}
