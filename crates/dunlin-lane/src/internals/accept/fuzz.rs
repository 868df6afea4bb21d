//! Fuzz target: a connection from an unauthenticated peer.

use std::io::{IoSlice, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use dunlin_proto::limits::MAX_OPENING_BODY_BYTES;
use dunlin_proto::negotiate::{PRELUDE_BYTES, Prelude};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use webpki::KeyUsage;

use super::pending::Purpose;
use super::pending::{Pending, Stage, Step};
use super::{Arrival, LaneSocket, OPENING_DEADLINE, ServerTls};
use crate::internals::denied::Denied;
use crate::internals::offload::Offload;
use crate::internals::peers::Peers;
use crate::internals::policy::{ServerSettings, Side};
use crate::internals::provider::{Crypto, Provider};
use crate::internals::record::RECEIVED_RECORD_BYTES;
use crate::internals::trust::{Authorities, Trust};
use dunlin_proto::negotiate::Opening;

/// A host without a certificate, so no handshake succeeds.
#[derive(Debug)]
struct NoCertificate;

impl ResolvesServerCert for NoCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

static TLS: LazyLock<ServerTls> = LazyLock::new(|| {
    let provider = Provider::built_in()[0];
    let rustls = Crypto::with(provider)
        .rustls_for_lanes()
        .expect("the provider is built in");
    let algorithms = rustls.signature_verification_algorithms;
    let config = ServerConfig::builder_with_provider(rustls)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("every suite is of TLS 1.3")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(NoCertificate));
    ServerTls::new(ServerSettings {
        config: Arc::new(config),
        side: Side {
            trust: Arc::new(Trust::new(
                Arc::new(Authorities {
                    anchors: RootCertStore::empty(),
                    revocations: Vec::new(),
                    denied: Denied::default(),
                }),
                algorithms,
                Peers::AnyFromAuthority,
                KeyUsage::client_auth(),
            )),
            provider,
            offload: Offload::Process,
        },
    })
});

/// Sends arbitrary first bytes to an acceptor of lanes, and to one of a relay.
pub fn fuzz_connection(bytes: &[u8]) {
    for purpose in [Purpose::Lanes(&TLS), Purpose::Relay(&TLS)] {
        connect(bytes, purpose);
    }
}

/// Sends arbitrary first bytes in two pieces, then closes. After the close the acceptor must not
/// wait for more bytes, and its memory must be within the bound. Nothing but a plain lane can
/// arrive; its opening message must be exactly the one that was sent.
fn connect(bytes: &[u8], purpose: Purpose<'_>) {
    let (mut near, far) = crate::fuzz::pair();
    far.set_nonblocking(true).expect("the connection is open");
    let mut pending = Pending {
        stream: far,
        from: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
        deadline: Instant::now() + OPENING_DEADLINE,
        stage: Stage::Silent,
        opening: Vec::new(),
    };
    let at = bytes
        .first()
        .map_or(0, |&byte| usize::from(byte) % bytes.len());
    let mut step = Step::Wait;
    for part in [&bytes[..at], &bytes[at..]] {
        // The write fails if the connection has already been refused and closed.
        let _ = near.write_vectored(&[IoSlice::new(part)]);
        if matches!(step, Step::Wait) {
            step = pending.advance(purpose);
        }
    }
    if matches!(step, Step::Wait) {
        near.shutdown(Shutdown::Write)
            .expect("the connection is open");
        step = pending.advance(purpose);
    }
    assert!(pending.opening.len() <= PRELUDE_BYTES + MAX_OPENING_BODY_BYTES);
    if let Stage::Tls(handshake) = &pending.stage {
        assert!(handshake.reading.record.len() <= RECEIVED_RECORD_BYTES);
    }
    match step {
        Step::Wait => panic!("the connection waits although the peer has closed"),
        Step::Gone => panic!("the connection ended without being refused"),
        Step::Refused(_) => pending.linger(Instant::now()),
        Step::Complete => {
            let opening = pending.opening.clone();
            assert_eq!(opening, bytes[..opening.len()]);
            let (prelude, body) = opening
                .split_first_chunk::<PRELUDE_BYTES>()
                .expect("a complete opening has its prelude");
            let decoded =
                Prelude::decode(prelude).and_then(|prelude| Opening::decode(&prelude, body));
            match pending.arrive() {
                Arrival::Control { .. } => panic!("a control lane without a handshake"),
                Arrival::Lane { socket, opening } => {
                    assert!(matches!(socket, LaneSocket::Plain(_)));
                    assert_eq!(Ok(opening), decoded);
                }
                Arrival::Rejected { .. } => assert!(decoded.is_err()),
                Arrival::Starved(error) => panic!("nothing was accepted: {error}"),
            }
        }
    }
}
