//! Accepting without free descriptors. The test is a separate program, because it limits the
//! descriptors of its process.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use dunlin_lane::accept::{Arrival, RejectReason, accept};
use dunlin_lane::provider::Crypto;
use dunlin_linux::poll::waker;
use dunlin_test_support::lane::*;
use rustix::net::{AddressFamily, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Permits no further descriptors. (The limit applies to the number of each new descriptor, which
/// is the lowest free one.)
fn exhaust() {
    let lowest = File::open("/dev/null").unwrap().as_raw_fd();
    let limit = Rlimit {
        current: Some(u64::try_from(lowest).unwrap()),
        ..getrlimit(Resource::Nofile)
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// The first connection has been rejected, and stays open until its peer has read the alert. A
/// second connection cannot be accepted without a free descriptor, so the first is closed early.
#[test]
fn a_rejected_connection_is_not_reported_again_if_descriptors_run_out() {
    let identity = Authority::new().identity(&[DESTINATION]);
    let tls = identity.server(&Crypto::auto(), names(&[SOURCE])).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let (stop, stopped) = waker().unwrap();
    // Create both sockets while descriptors are free.
    let clients = [(); 2].map(|()| {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        TcpStream::from(socket)
    });
    let begin = |mut client: &TcpStream| {
        connect(client, &to).unwrap();
        client.write_all(b"x").unwrap();
    };
    begin(&clients[0]);
    let mut rejected = Vec::new();
    accept(&listener, &tls, &stopped, |arrival| {
        let Arrival::Rejected { from, reason } = arrival else {
            panic!("{arrival:?}")
        };
        rejected.push((from, matches!(reason, RejectReason::Unknown(b'x'))));
        if rejected.len() == 1 {
            exhaust();
            begin(&clients[1]);
        } else {
            stop.wake();
        }
    })
    .unwrap();
    let expected = clients.map(|client| (client.local_addr().unwrap(), true));
    assert_eq!(rejected, expected);
}
