//! If a keying session is cancelled while the peer is silent, the session ends immediately and the
//! peer's connection is closed.
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_ipsec::{IpsecError, Mode, Options, up};
use dunlin_lane::control;
use dunlin_lane::dial::DialCancel;
use dunlin_lane::policy::ServerTls;
use dunlin_lane::provider::Crypto;
use dunlin_test_base::Scratch;
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, names};

/// The time within which a cancelled session must end: well below the timeout of 60 s, but long
/// enough for a host under load.
const AT_ONCE: Duration = Duration::from_secs(2);

/// A peer that falls silent at some point: it calls the third argument when it falls silent, and
/// returns when the connection has ended.
type Silent = fn(TcpStream, &ServerTls, &dyn Fn());

#[test]
fn a_session_can_be_cancelled_while_its_peer_is_silent() {
    let before_tls: Silent = |mut stream, _, silent| {
        let mut first = [0; 1];
        stream.read_exact(&mut first).unwrap();
        silent();
        while stream.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {}
    };
    let after_the_offer: Silent = |stream, tls, silent| {
        let limit = Instant::now() + Duration::from_secs(60);
        let control = control::server(stream, tls, limit).unwrap();
        let mut first = [0; 1];
        control.receive_exact(&mut first, limit).unwrap();
        silent();
        while control.receive_exact(&mut first, limit).is_ok() {}
    };
    for silent in [before_tls, after_the_offer] {
        is_given_up(silent);
    }
}

fn is_given_up(peer: Silent) {
    let authority = Authority::new();
    let (near, far) = (
        authority.identity(&[SOURCE]),
        authority.identity(&[DESTINATION]),
    );
    let client = near.client(&Crypto::auto(), names(&[DESTINATION])).unwrap();
    let server = far.server(&Crypto::auto(), names(&[SOURCE])).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let scratch = Scratch::new();
    let mut options = Options::new(
        Mode::Cpu,
        "49152-49215".parse().unwrap(),
        scratch.path().to_owned(),
    );
    options.timeout = Duration::from_secs(60);
    let since = Arc::<Mutex<Option<Instant>>>::default();
    let (ended, end) = channel();
    let cancel = DialCancel::new().unwrap();
    let (is_silent, own) = (Arc::clone(&since), cancel.clone());
    let peer = thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        peer(stream, &server, &|| {
            *is_silent.lock().unwrap() = Some(Instant::now());
            own.cancel();
        });
        ended.send(()).unwrap();
    });
    let result = up(
        &at,
        &client,
        &options,
        &(Arc::new(|_: &dunlin_ipsec::Event| {}) as _),
        &cancel,
    );
    let since = since.lock().unwrap().unwrap();
    assert!(matches!(result, Err(IpsecError::Ended)), "{result:?}");
    assert!(since.elapsed() < AT_ONCE, "after {:?}", since.elapsed());
    end.recv_timeout(AT_ONCE).unwrap();
    peer.join().unwrap();
}
