//! Reports: texts that a tunnel sends to peers that may use one of its targets.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use dunlin_proto::fault::FaultCode;
use dunlin_test_base::Scratch;
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{FAR, NEAR, OTHER, identities};
use dunlin_tunnel::{
    Entrance, Exit, Listen, MAX_REPORT_BYTES, Mode, Routes, Target, Tunnel, WINDOW_BYTES,
};

/// The name of the route of reports, as the wire format defines it.
const ROUTE: &str = "dunlin-report";

fn any_port() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

fn entrance(to: &str, peer: &str) -> Entrance {
    Entrance {
        route: "ram".to_owned(),
        listen: Listen::OnDemand,
        to: to.to_owned(),
        peers: names(&[peer]),
        lanes: 1,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    }
}

fn exit(route: &str, allow: &str, socket: &Path) -> Exit {
    Exit {
        route: route.to_owned(),
        allow: names(&[allow]),
        target: Target::Unix(socket.to_owned()),
        window_bytes: WINDOW_BYTES,
    }
}

/// A far tunnel with these routes; `report` makes its reports.
fn far(
    authority: &Authority,
    routes: &Routes,
    report: Option<Box<dyn Fn() -> String + Send + Sync>>,
) -> Tunnel {
    let own = identities(authority.identity(&[FAR]));
    let builder = Tunnel::builder(any_port(), own, routes);
    match report {
        Some(report) => builder.report(report).start().unwrap(),
        None => builder.start().unwrap(),
    }
}

/// A far tunnel with a target for NEAR.
fn far_for_near(
    authority: &Authority,
    report: Option<Box<dyn Fn() -> String + Send + Sync>>,
) -> Tunnel {
    let routes = vec![exit("ram", NEAR, Path::new("/nowhere.sock"))];
    far(authority, &Routes::new(Vec::new(), routes).unwrap(), report)
}

fn near(authority: &Authority) -> Tunnel {
    let own = identities(authority.identity(&[NEAR]));
    let routes = Routes::default();
    Tunnel::builder(any_port(), own, &routes).start().unwrap()
}

fn to(far: &Tunnel) -> Entrance {
    entrance(&far.address().unwrap().to_string(), FAR)
}

/// Claim P25 of docs/security.
#[test]
fn a_report_arrives_and_a_second_one_is_refused_for_a_second() {
    let authority = Authority::new();
    let made = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&made);
    let text = "x".repeat(MAX_REPORT_BYTES);
    let longest = text.clone();
    let report = move || {
        counter.fetch_add(1, Ordering::SeqCst);
        longest.clone()
    };
    let far = far_for_near(&authority, Some(Box::new(report)));
    let near = near(&authority);
    assert_eq!(near.report(&to(&far)).unwrap().text, text);
    let refused = near.report(&to(&far)).unwrap_err();
    assert_eq!(refused.code(), FaultCode::Busy, "{refused}");
    assert_eq!(made.load(Ordering::SeqCst), 1);
    // The trunk works as before.
    assert_eq!(near.probe(&to(&far), 1).unwrap().bytes, 1);
}

/// A tunnel without a reporter answers like an older version, which does not have the route of
/// reports.
#[test]
fn a_peer_without_reports_refuses_the_route() {
    let authority = Authority::new();
    let far = far_for_near(&authority, None);
    let near = near(&authority);
    let refused = near.report(&to(&far)).unwrap_err();
    assert_eq!(refused.code(), FaultCode::UnknownRoute, "{refused}");
    assert_eq!(near.probe(&to(&far), 1).unwrap().bytes, 1);
}

/// The far side has a route to NEAR and therefore admits NEAR as a peer, but allows NEAR no target.
///
/// Claim P25 of docs/security.
#[test]
fn a_peer_that_may_use_no_target_gets_no_report() {
    let authority = Authority::new();
    let routes = Routes::new(
        vec![entrance("127.0.0.1:1", NEAR)],
        vec![exit("ram", OTHER, Path::new("/nowhere.sock"))],
    );
    let made = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&made);
    let report = move || {
        counter.fetch_add(1, Ordering::SeqCst);
        "secret".to_owned()
    };
    let far = far(&authority, &routes.unwrap(), Some(Box::new(report)));
    let near = near(&authority);
    let refused = near.report(&to(&far)).unwrap_err();
    assert_eq!(refused.code(), FaultCode::UnknownRoute, "{refused}");
    assert_eq!(made.load(Ordering::SeqCst), 0);
    // A peer that no route names gets no trunk.
    let routes = vec![exit("ram", OTHER, Path::new("/nowhere.sock"))];
    let routes = Routes::new(Vec::new(), routes).unwrap();
    let closed = self::far(&authority, &routes, Some(Box::new(String::new)));
    let refused = near.report(&to(&closed)).unwrap_err();
    assert_eq!(refused.code(), FaultCode::Unauthorised, "{refused}");
}

/// A reporter with a mistake harms neither the tunnel nor the peer.
#[test]
fn i7_a_report_over_the_limit_is_not_sent() {
    let authority = Authority::new();
    let report = || "x".repeat(MAX_REPORT_BYTES + 1);
    let far = far_for_near(&authority, Some(Box::new(report)));
    let near = near(&authority);
    assert!(near.report(&to(&far)).is_err());
    assert_eq!(near.probe(&to(&far), 1).unwrap().bytes, 1);
}

/// A hostile peer can send any bytes as its report. Here, a target with the name of the report's
/// route sends them.
///
/// Claim P26 of docs/security.
#[test]
fn i7_a_hostile_report_is_refused_by_the_side_that_asked() {
    for (bytes, code) in [
        (vec![b'x'; 4 << 20], FaultCode::Malformed),
        (vec![0xff; 8], FaultCode::Malformed),
    ] {
        let (authority, scratch) = (Authority::new(), Scratch::new());
        let socket = scratch.join("report.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let routes = Routes::new(Vec::new(), vec![exit(ROUTE, NEAR, &socket)]).unwrap();
        let far = far(&authority, &routes, None);
        let near = near(&authority);
        let hostile = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // This fails if the asking side closes the channel before it has read everything.
            let _ = stream.write_all(&bytes);
        });
        let refused = near.report(&to(&far)).unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        hostile.join().unwrap();
    }
}
