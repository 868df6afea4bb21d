//! Migrations over IPsec complete although a lane is killed and keys are renewed.
//! All pages are compared, and no data is sent in the clear.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin::Migration;
use dunlin::engine::destination;
use dunlin::engine::source::{LaneSecurity, Options};
use dunlin::engine::vmm::{FaultCode, SourceVm};
use dunlin::engine::{Cancel, Connector, Event, Host, Report, StandardHost, VmIs, Wakeup};
use dunlin::lane::control;
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::Crypto;
use dunlin_ipsec::lanes::IpsecLanes;
use dunlin_ipsec::{Direction, Mode, Sender};
use dunlin_kernel_tests::sealed_lanes::{POOL, carried, cut, ipsec_lanes, no_records, refused};
use dunlin_kernel_tests::sessions::{
    Capture, LIMIT, captured, connect, inside, netns, nothing_left, until,
};
use dunlin_kernel_tests::vm::{slowly, unhurried};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_proto::control::{Accept, Message};
use dunlin_proto::negotiate::{Opening, SessionSecret};
use dunlin_test_support::engine::peer::{Peer, SESSION, describe, lane_open, open_lane};
use dunlin_test_support::engine::scene::{HOT_PAGES, is_lost, pages, patient, quick};
use dunlin_test_support::engine::{Receiving, TestBuilder, TestVm, send};
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, names};
use serde_json::Value;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "tcpdump"],
    dunlin: true,
    limit_seconds: 240,
    under: Under::Newest,
    ..Needs::NOTHING
};

/// The address on which host b accepts VMs.
const AT: &str = "10.0.0.2:7400";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        let capture = Capture::begin("b", "migration.pcap");
        let tls = tls();
        println!("i3_sas_carry_the_bytes_of_their_lanes");
        let all = [(&[0, 1, 2, 3][..], 4), (&[1], 1), (&[0, 1], 4)];
        let count = if guest.is_soak() { all.len() } else { 1 };
        for (cpus, lanes) in all.into_iter().take(count) {
            i3_sas_carry_the_bytes_of_their_lanes(guest, &tls, cpus, lanes);
        }
        println!("i3_i4_a_guest_migrates_while_a_lane_dies_and_keys_are_renewed");
        i3_i4_a_guest_migrates_while_a_lane_dies_and_keys_are_renewed(guest, &tls);
        println!("i6_a_plain_lane_of_an_ipsec_session_is_refused");
        i6_a_plain_lane_of_an_ipsec_session_is_refused(guest, &tls);
        println!("i6_a_destination_that_is_not_prepared_refuses");
        i6_a_destination_that_is_not_prepared_refuses(&tls);
        println!("i2_a_cancelled_migration_does_not_wait_for_a_session");
        for answers in [false, true] {
            i2_a_cancelled_migration_does_not_wait_for_a_session(guest, &tls, answers);
        }
        capture.end(guest);
        let seen = |filter: &str| captured(guest, "migration.pcap", filter);
        assert_eq!(
            seen(&format!("tcp portrange {POOL}")),
            0,
            "packets in the clear"
        );
        assert!(seen("esp") > 1000);
        assert!(
            seen("tcp port 7400") > 100,
            "too few packets of the control lanes"
        );
    })
}

/// The SA of each CPU carries the bytes of that CPU's lanes plus the overhead of TCP and of lanes.
/// The fallback SA carries none of these bytes.
fn i3_sas_carry_the_bytes_of_their_lanes(guest: &Guest, tls: &Tls, cpus: &[u32], lanes: u16) {
    let vm = guest_of(8 << 20);
    let options = slowly(quick(lanes, 64).to_builder());
    let counted = Arc::<Mutex<Vec<(Sender, u64)>>>::default();
    let how = How {
        options,
        mode: Mode::Cpu,
        cpus,
        strikes: false,
    };
    let (report, sealed) = moves(guest, tls, &vm, how, {
        let counted = Arc::clone(&counted);
        move |sealed: &IpsecLanes| {
            let sessions = sealed.sessions().expect("the kernel answers");
            let [session] = &sessions[..] else {
                panic!("{} sessions", sessions.len());
            };
            *counted.lock().expect("no thread panicked") = carried(session).into_iter().collect();
            is_shown(guest, &carried(session));
        }
    });
    drop(sealed);
    let counted = counted.lock().expect("no thread panicked");
    println!("{cpus:?}: {counted:?}, lanes {:?}", report.lanes);
    assert_eq!(counted[0], (Sender::Fallback, 0));
    let by_cpu: Vec<u64> = counted[1..].iter().map(|(_, bytes)| *bytes).collect();
    assert_eq!(by_cpu.len(), cpus.len());
    let sum: u64 = by_cpu.iter().sum();
    let wire = report.traffic.wire_bytes;
    assert!(
        (wire..wire + wire / 4).contains(&sum),
        "the SAs carried {sum} bytes, the lanes {wire}"
    );
    // Lanes carry different amounts of data, so a CPU's bytes can be compared only if the CPU has a
    // single lane.
    if cpus.len() == usize::from(lanes) {
        let mut by_lane: Vec<u64> = report.lanes.iter().map(|(_, bytes)| *bytes).collect();
        let mut by_cpu = by_cpu;
        by_lane.sort_unstable();
        by_cpu.sort_unstable();
        for (own, sealed) in by_lane.into_iter().zip(by_cpu) {
            assert!(
                (own..own + own / 10 + 65_536).contains(&sealed),
                "{counted:?}"
            );
        }
    }
    nothing_left(guest);
}

/// Checks the output of `dunlin ipsec status` on both hosts. The command contacts no other process.
fn is_shown(guest: &Guest, carried: &BTreeMap<Sender, u64>) {
    let status = |host: &str, more: &[&str]| {
        let state = format!("state-{host}");
        let words = ["dunlin", "ipsec", "status", "--state-dir", &state];
        guest.output("ip", &netns(host, &[&words, more].concat()))
    };
    for (host, direction) in [("a", "out"), ("b", "in")] {
        let said = status(host, &["--json"]);
        let session: Value = serde_json::from_str(&said).expect("one session");
        assert_eq!(session["process"], std::process::id(), "{said}");
        assert!(session["up"] == true && session["kept"] == true, "{said}");
        assert!(!said.contains("key"), "{said}");
        let sas = session["associations"]
            .as_array()
            .expect("the session has SAs");
        for (sender, bytes) in carried {
            let cpu = match sender {
                Sender::Cpu(cpu) => Value::from(*cpu),
                _ => Value::Null,
            };
            let own = |one: &&Value| one["direction"] == direction && one["cpu"] == cpu;
            let shown = sas.iter().find(own).unwrap_or_else(|| panic!("{said}"));
            assert_eq!(shown["not_authentic"], 0, "{said}");
            assert!(shown["bytes"].as_u64() >= Some(*bytes), "{bytes}: {said}");
        }
    }
    let said = status("a", &[]);
    for words in ["10.0.0.1", "10.0.0.2", "ethtool -N"] {
        assert!(said.contains(words), "{said}");
    }
    println!("{said}");
}

fn i3_i4_a_guest_migrates_while_a_lane_dies_and_keys_are_renewed(guest: &Guest, tls: &Tls) {
    let modes = [Mode::Cpu, Mode::Connection];
    for mode in modes.into_iter().take(if guest.is_soak() { 2 } else { 1 }) {
        let vm = guest_of(16 << 20);
        let how = How {
            options: slowly(quick(4, 4).to_builder()),
            mode,
            cpus: &[0, 1, 2, 3],
            strikes: true,
        };
        let (report, sealed) = moves(guest, tls, &vm, how, |_| {});
        assert_eq!(report.lanes_lost, 1, "{mode}");
        drop(sealed);
        for host in ["a", "b"] {
            assert_eq!(refused(guest, host), [], "{host}");
            assert!(no_records(host), "{host}");
        }
        nothing_left(guest);
    }
}

/// A peer with the session's secret connects from an unprotected port, so IPsec would not protect
/// its packets.
fn i6_a_plain_lane_of_an_ipsec_session_is_refused(guest: &Guest, tls: &Tls) {
    let (receiving, far) = receive(tls);
    let (mut peer, answer) = inside("a", || {
        Peer::source(receiving.address, &tls.0, LaneSecurity::Ipsec)
    });
    assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
    peer.send(&describe());
    let Some(Message::Accept(accept)) = peer.receive() else {
        panic!("the session is not accepted");
    };
    let open = lane_open(SESSION, &accept.secret, 1);
    let lane = inside("a", || open_lane(receiving.address, None, &open));
    let refused = peer.await_message(|message| matches!(message, Message::LaneRefused { .. }));
    match refused {
        Some(Message::LaneRefused { lane, fault, .. }) => {
            assert_eq!((lane, fault), (1, FaultCode::SecurityNotAgreed));
        }
        other => panic!("{other:?}"),
    }
    // A lane with another security than the agreed one is also refused.
    let open = lane_open(SESSION, &accept.secret, 2);
    let sealed = inside("a", || open_lane(receiving.address, Some(&tls.0), &open));
    let refused =
        peer.await_message(|message| matches!(message, Message::LaneRefused { lane: 2, .. }));
    assert!(refused.is_some());
    drop((lane, sealed, peer));
    let (result, ..) = receiving.finish(true);
    assert!(result.is_err());
    drop(far);
    nothing_left(guest);
}

fn i6_a_destination_that_is_not_prepared_refuses(tls: &Tls) {
    let listener = inside("b", || TcpListener::bind(AT)).expect("the port is free");
    let receiving = inside("b", || {
        Receiving::on(listener, &tls.1, &patient(), TestBuilder::default())
    });
    let (near, _) = ipsec_lanes("a", Mode::Cpu, &[0]);
    let vm = guest_of(1 << 20);
    let options = slowly(
        quick(1, 64)
            .to_builder()
            .security(LaneSecurity::Ipsec)
            .ipsec(Some(Arc::new(near))),
    );
    let (result, _) = inside("a", || send(&vm, AT, &tls.0, &options, &Cancel::new()));
    let error = result.expect_err("the migration is refused");
    assert_eq!(error.code(), FaultCode::SecurityNotAgreed);
    assert!(receiving.finish(true).0.is_err());
}

/// The destination either does not answer the request for a keying session, or stops responding
/// after its answer.
fn i2_a_cancelled_migration_does_not_wait_for_a_session(guest: &Guest, tls: &Tls, answers: bool) {
    let listener = inside("b", || TcpListener::bind(AT)).expect("the port is free");
    let (near, _) = ipsec_lanes("a", Mode::Cpu, &[0]);
    let vm = guest_of(1 << 20);
    let options = slowly(
        quick(2, 64)
            .to_builder()
            .security(LaneSecurity::Ipsec)
            .ipsec(Some(Arc::new(near))),
    );
    let cancel = Cancel::new();
    let (asked, is_asked) = channel();
    let (result, took) = thread::scope(|scope| {
        scope.spawn(|| {
            let mut peer = Peer::destination(&listener, &tls.1, None);
            assert!(matches!(peer.receive(), Some(Message::Describe(_))));
            peer.send(&Message::Accept(Accept {
                secret: SessionSecret([5; 32]),
                lanes_max: 4,
                endpoints: Vec::new(),
            }));
            let session = if answers {
                Peer::destination(&listener, &tls.1, None).stream
            } else {
                let (stream, _) = listener.accept().expect("the peer connects");
                control::server(stream, &tls.1, Instant::now() + LIMIT)
                    .expect("the peer is authorised")
            };
            let mut first = [0; 1];
            let received = session.receive_exact(&mut first, Instant::now() + LIMIT);
            received.expect("a message arrives");
            asked.send(()).expect("the test waits");
            while peer.receive().is_some() {}
            // The source closes the connection of the keying session when the migration ends.
            while session
                .receive_exact(&mut first, Instant::now() + LIMIT)
                .is_ok()
            {}
        });
        let migrating = scope.spawn(|| inside("a", || send(&vm, AT, &tls.0, &options, &cancel).0));
        is_asked.recv().expect("the source requests a session");
        let began = Instant::now();
        cancel.cancel();
        (
            migrating.join().expect("the thread does not panic"),
            began.elapsed(),
        )
    });
    let error = result.expect_err("the migration is cancelled");
    println!("cancelled after {took:?}: {error}");
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::Cancelled, VmIs::AtSource),
        "{error}"
    );
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(vm.goes_on());
    nothing_left(guest);
    assert!(no_records("a"));
}

/// The parameters of a test migration.
struct How<'a> {
    options: Options,
    mode: Mode,
    cpus: &'a [u32],
    /// Whether one of four lanes is killed during the migration. If so, the test renews the keys
    /// before and after the lane is killed.
    strikes: bool,
}

/// Opens all connections of the VMM, as a privileged process does for a confined VMM, and counts
/// them.
#[derive(Default)]
struct Counting {
    connected: AtomicU32,
    from_a_port: AtomicU32,
}

impl Connector for Counting {
    fn connect(&self, endpoint: &str, deadline: Instant, stop: &Wakeup) -> io::Result<TcpStream> {
        self.connected.fetch_add(1, SeqCst);
        StandardHost.connect(endpoint, deadline, stop)
    }

    fn connect_from(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        deadline: Instant,
        stop: &Wakeup,
    ) -> io::Result<TcpStream> {
        self.from_a_port.fetch_add(1, SeqCst);
        StandardHost.connect_from(local, remote, deadline, stop)
    }
}

impl Host for Counting {
    fn spawn(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
        StandardHost.spawn(name, body)
    }
}

/// Migrates the guest. Calls `before_commit` after all data has been sent.
fn moves(
    guest: &Guest,
    tls: &Tls,
    vm: &Arc<TestVm>,
    how: How<'_>,
    before_commit: impl Fn(&IpsecLanes) + Send + Sync,
) -> (Report, IpsecLanes) {
    let How {
        options,
        mode,
        cpus,
        strikes,
    } = how;
    let (receiving, far) = receive(tls);
    let (near, _said) = ipsec_lanes("a", mode, cpus);
    let options = options
        .to_builder()
        .security(LaneSecurity::Ipsec)
        .ipsec(Some(Arc::new(near.clone())))
        .build()
        .expect("the options are consistent");
    let (result, events) = thread::scope(|scope| {
        let moving = scope.spawn(|| {
            inside("a", || {
                let events = Mutex::new(Vec::new());
                let observe = |event: &Event| {
                    // At this event, all data of the lanes has arrived.
                    if matches!(event, Event::Committing) {
                        before_commit(&near);
                    }
                    events
                        .lock()
                        .expect("no thread panicked")
                        .push(event.clone());
                };
                let as_source: Arc<dyn SourceVm> = Arc::clone(vm) as _;
                let counting = Arc::new(Counting::default());
                let host: Arc<dyn Host> = Arc::clone(&counting) as _;
                let none = Cancel::new();
                let result = Migration::builder(Arc::clone(&as_source), AT, &tls.0)
                    .options(options.clone())
                    .host(Arc::clone(&host))
                    .observer(&observe)
                    .cancel(&none)
                    .run();
                // The source has opened the control lane and the control connection of the keying
                // session. It has opened each data lane from a chosen port.
                if let Ok(report) = &result {
                    assert!(counting.connected.load(SeqCst) >= 2);
                    let lanes = u32::try_from(report.lanes.len()).expect("there are few");
                    assert!(lanes > 0 && counting.from_a_port.load(SeqCst) >= lanes);
                }
                (result, events.into_inner().expect("no thread panicked"))
            })
        });
        if strikes {
            until("a session is up", || {
                near.sessions()
                    .is_ok_and(|all| all.iter().any(|one| one.up))
            });
            until("four lanes send", || lane_ports(guest).len() == 4);
            near.rekey();
            far.rekey();
            until("new keys", || epochs(&near) == 2);
            let ports = lane_ports(guest);
            cut(guest, "a", &format!("sport = :{}", ports[0]));
            until("another lane opens", || {
                lane_ports(guest).iter().any(|port| !ports.contains(port))
            });
            near.rekey();
            until("new keys again", || epochs(&near) == 3);
        }
        moving.join().expect("the thread does not panic")
    });
    let report = result.unwrap_or_else(|error| panic!("{error}: {events:?}"));
    assert_eq!(report.digests_equal, Some(true));
    assert_eq!(report.security, LaneSecurity::Ipsec);
    assert_eq!(events.iter().any(is_lost), strikes, "{events:?}");
    let (received, builder, _) = receiving.finish(false);
    assert!(received.expect("the VM arrived").runs);
    let there = builder.built.expect("the VM was built");
    assert!(pages(&vm.memory) == pages(&there.memory));
    let warned = events
        .iter()
        .any(|event| matches!(event, Event::Warning(_)));
    assert!(!warned, "{events:?}");
    drop(far);
    (report, near)
}

/// Returns the source ports of the open lanes.
fn lane_ports(guest: &Guest) -> Vec<u16> {
    let filter =
        "ss -H -n -t state established dport = :7400 and sport >= :24576 and sport <= :28671";
    let command: Vec<&str> = ["netns", "exec", "a"]
        .into_iter()
        .chain(filter.split(' '))
        .collect();
    let said = guest.output("ip", &command);
    let port = |line: &str| {
        let local = line.split_whitespace().nth(2)?;
        local.rsplit(':').next()?.parse().ok()
    };
    said.lines().filter_map(port).collect()
}

/// Returns the highest epoch of the outbound SAs. Each renewal of keys increases it.
fn epochs(sealed: &IpsecLanes) -> u32 {
    let sessions = sealed.sessions().expect("the kernel answers");
    let associations = sessions.iter().flat_map(|one| &one.associations);
    let outbound = associations.filter(|one| one.association.direction == Direction::Out);
    outbound.map(|one| one.association.epoch).max().unwrap_or(0)
}

/// Starts a destination on host b.
fn receive(tls: &Tls) -> (Receiving, IpsecLanes) {
    let (far, _) = ipsec_lanes("b", Mode::Connection, &[]);
    let options = unhurried().to_builder().ipsec(Some(Arc::new(far.clone())));
    let options: destination::Options = options.build().expect("the options are consistent");
    let listener = inside("b", || TcpListener::bind(AT)).expect("the port is free");
    let receiving = inside("b", || {
        Receiving::on(listener, &tls.1, &options, TestBuilder::default())
    });
    (receiving, far)
}

fn guest_of(bytes: usize) -> Arc<TestVm> {
    let vm = TestVm::new(bytes);
    vm.fill(bytes);
    vm.start(HOT_PAGES, Duration::from_micros(500));
    vm
}

type Tls = (ClientTls, ServerTls);

fn tls() -> Tls {
    let authority = Authority::new();
    let (source, destination) = (
        authority.identity(&[SOURCE]),
        authority.identity(&[DESTINATION]),
    );
    let client = source.client(&Crypto::auto(), names(&[DESTINATION]));
    let server = destination.server(&Crypto::auto(), names(&[SOURCE]));
    (
        client.expect("the settings are valid"),
        server.expect("the settings are valid"),
    )
}
