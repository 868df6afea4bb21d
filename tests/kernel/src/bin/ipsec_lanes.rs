//! Each lane over IPsec uses the SA of its CPU or of its connection.
//! If a lane uses another SA, the lane's thread moves the lane back to its own SA. A lane from a
//! port that no session protects is rejected.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender as Channel, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin::lane::accept::{Arrival, LaneSocket, accept};
use dunlin::lane::control::{self, ControlStream};
use dunlin::lane::data::LaneGuard;
use dunlin::lane::dial::{Connector, DialCancel, LaneRequest, StandardConnector};
use dunlin::lane::peers::{PeerIdentity, Principal};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::Crypto;
use dunlin::lane::security::SealedLanes;
use dunlin_ipsec::lanes::{IpsecDialer, IpsecLanes, LaneError, ProtectedLane};
use dunlin_ipsec::{Event, Mode, Sender};
use dunlin_kernel_tests::sealed_lanes::{
    POOL, Said, carried, cut, ipsec_lanes, ipsec_lanes_with, no_records, refused,
};
use dunlin_kernel_tests::sessions::{
    Capture, LIMIT, captured, connect, inside, nothing_left, until,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_linux::affinity::pin_to;
use dunlin_linux::poll::{Waker, waker};
use dunlin_linux::socket::set_reset_on_close;
use dunlin_linux::tcp::{set_traffic_class, unacknowledged_bytes};
use dunlin_proto::negotiate::{Features, LaneDirection, LaneOpen, LaneSecurity, Offer, VERSIONS};
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, names};

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "tcpdump"],
    limit_seconds: 240,
    under: Under::Newest,
    ..Needs::NOTHING
};

/// The address on which host b accepts lanes.
const AT: &str = "10.0.0.2:7400";
/// The number of bytes that a lane sends at a time.
const BYTES: usize = 256 << 10;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        let capture = Capture::begin("b", "lanes.pcap");
        let tls = Tls::new();
        println!("lanes_use_the_sas_of_their_cpus");
        let all = [(vec![0, 1], 4), (vec![2], 1), (vec![0, 1, 2, 3], 4)];
        let count = if guest.is_soak() { all.len() } else { 2 };
        for (cpus, lanes) in all.into_iter().take(count) {
            lanes_use_the_sas_of_their_cpus(guest, &tls, &cpus, lanes);
        }
        println!("an_sa_for_another_cpu_is_added_while_lanes_send");
        an_sa_for_another_cpu_is_added_while_lanes_send(guest, &tls);
        println!("a_lane_that_strays_is_moved_back");
        a_lane_that_strays_is_moved_back(guest, &tls);
        println!("each_connection_has_an_sa");
        each_connection_has_an_sa(guest, &tls);
        println!("i6_a_lane_from_another_port_or_peer_is_rejected");
        i6_a_lane_from_another_port_or_peer_is_rejected(guest, &tls);
        println!("i6_ports_of_a_lost_session_stay_blocked_and_the_next_lane_uses_others");
        i6_ports_of_a_lost_session_stay_blocked_and_the_next_lane_uses_others(guest, &tls);
        capture.end(guest);
        let seen = |filter: &str| captured(guest, "lanes.pcap", filter);
        assert_eq!(
            seen(&format!("tcp portrange {POOL}")),
            0,
            "packets in the clear"
        );
        assert!(seen("esp") > 100);
        for host in ["a", "b"] {
            assert!(no_records(host), "{host}");
        }
    })
}

fn lanes_use_the_sas_of_their_cpus(guest: &Guest, tls: &Tls, cpus: &[u32], count: usize) {
    let near = Near::new(tls, Mode::Cpu, cpus);
    let lanes: Vec<Lane> = (0..count).map(|_| near.lane()).collect();
    let mut each = BTreeMap::new();
    for lane in &lanes {
        *each
            .entry(lane.cpu.expect("the lane has a CPU"))
            .or_insert(0) += BYTES as u64;
    }
    assert!(each.keys().eq(cpus), "{each:?}");
    assert!(
        each.values()
            .all(|sum| *sum == (BYTES * count / cpus.len()) as u64)
    );
    let answers = || {
        let sessions = near.far.sealed.peers().expect("the kernel answers");
        let status = sessions[0].status.as_ref().expect("terms are agreed");
        carried(status)
    };
    let mut rounds = 0;
    // At first, the packets that host b sends use the fallback SA. Each lane switches when the SA
    // of its CPU is installed.
    until("answers use their own SAs", || {
        let before = answers();
        lanes.iter().for_each(Lane::send);
        lanes.iter().for_each(Lane::has_sent);
        rounds += 1;
        let grown = |(sender, bytes): (Sender, u64)| {
            let before = before.get(&sender).copied().unwrap_or(0);
            (sender, bytes - before)
        };
        let grown: BTreeMap<Sender, u64> = answers().into_iter().map(grown).collect();
        2 * grown[&Sender::Fallback] < grown.values().sum()
    });
    let by = near.carried();
    println!("{cpus:?}: {by:?}, answers {:?}", answers());
    assert_eq!(by[&Sender::Fallback], 0, "{by:?}");
    for (cpu, sum) in each {
        let own = by[&Sender::Cpu(cpu)];
        let sum = rounds * sum;
        assert!((sum..sum + sum / 4).contains(&own), "{cpu}: {by:?}");
    }
    assert_eq!(near.far.results(), vec![true; count]);
    drop(lanes);
    near.end(guest);
}

/// The SA of a CPU is installed when the first lane on that CPU connects. No packet is dropped.
fn an_sa_for_another_cpu_is_added_while_lanes_send(guest: &Guest, tls: &Tls) {
    let near = Near::new(tls, Mode::Cpu, &[0, 1, 2]);
    let lanes = [near.lane(), near.lane()];
    let before = near.carried();
    assert_eq!(
        before.len(),
        3,
        "not the fallback SA and two others: {before:?}"
    );
    for _ in 0..4 {
        lanes.iter().for_each(Lane::send);
    }
    let third = near.lane();
    third.send();
    third.has_sent();
    for _ in 0..4 {
        lanes.iter().for_each(Lane::has_sent);
    }
    let by = near.carried();
    assert_eq!(third.cpu, Some(2));
    assert!(by[&Sender::Cpu(2)] >= BYTES as u64, "{by:?}");
    assert_eq!(by[&Sender::Fallback], 0, "{by:?}");
    for host in ["a", "b"] {
        let refused = refused(guest, host);
        assert_eq!(refused, [], "{host}");
    }
    drop((lanes, third));
    near.end(guest);
}

/// A thread on another CPU sends on a lane while the kernel looks up the lane's route. The lane
/// then uses the SA of that CPU, and its own thread must move it back.
fn a_lane_that_strays_is_moved_back(guest: &Guest, tls: &Tls) {
    let near = Near::new(tls, Mode::Cpu, &[1, 3]);
    let (lane, other) = (near.lane(), near.lane());
    assert_eq!((lane.cpu, other.cpu), (Some(1), Some(3)));
    let mut astray = lane.stream.try_clone().expect("a descriptor");
    inside("a", || {
        pin_to(3).expect("the CPU exists");
        set_traffic_class(&astray, 0x40).expect("a socket");
        astray.write_all(&[7; 1000]).expect("the far end reads");
    });
    let begun = near.carried();
    let until = Instant::now() + LIMIT;
    let mut sent = 0;
    while !near
        .said
        .has(|event| matches!(event, Event::Strayed { cpu: 1, .. }))
    {
        lane.send();
        lane.has_sent();
        sent += BYTES as u64;
        assert!(Instant::now() < until, "the stray lane is not reported");
    }
    let by = near.carried();
    let went = |sender| by[&sender] - begun[&sender];
    println!(
        "strayed: {sent} bytes, {} of them with the lane's SA",
        went(Sender::Cpu(1))
    );
    assert!(
        went(Sender::Cpu(1)) < went(Sender::Cpu(3)),
        "{begun:?} {by:?}"
    );
    // Now the lane's thread refreshes the route, and tries again if that fails. So the test sends
    // until the bytes go through the SA of CPU 1.
    loop {
        let before = near.carried();
        lane.send();
        lane.has_sent();
        let after = near.carried();
        let went = |sender| after[&sender] - before[&sender];
        if went(Sender::Cpu(1)) >= BYTES as u64 {
            assert!(went(Sender::Cpu(3)) < BYTES as u64 / 20, "{after:?}");
            break;
        }
        assert!(
            Instant::now() < until,
            "the lane does not return: {after:?}"
        );
    }
    drop((lane, other, astray));
    near.end(guest);
}

fn each_connection_has_an_sa(guest: &Guest, tls: &Tls) {
    let near = Near::new(tls, Mode::Connection, &[]);
    let lanes = [near.lane(), near.lane()];
    lanes.iter().for_each(Lane::send);
    lanes.iter().for_each(Lane::has_sent);
    let by = near.carried();
    for lane in &lanes {
        assert_eq!(lane.cpu, None);
        let (from, to) = (lane.port, 7400);
        let own = by[&Sender::Connection { from, to }];
        assert!(own >= BYTES as u64, "{by:?}");
    }
    // The fallback SA carried handshakes and first messages only.
    assert!(by[&Sender::Fallback] < 8192, "{by:?}");
    drop(lanes);
    near.end(guest);
}

fn i6_a_lane_from_another_port_or_peer_is_rejected(guest: &Guest, tls: &Tls) {
    let near = Near::new(tls, Mode::Cpu, &[0]);
    let lane = near.lane();
    until("the lane is checked", || near.far.results() == [true]);
    // Act like an attacker who has seen the first message of a lane and repeats it.
    let mut plain = inside("a", || TcpStream::connect(AT)).expect("b listens");
    plain.write_all(&lane_open()).expect("the data is read");
    until("the lane is checked", || near.far.results().len() == 2);
    assert_eq!(near.far.results(), [true, false]);
    // Let host b expect another peer. A lane that uses an SA then belongs to a session with the
    // wrong peer.
    let other = Tls::new();
    let (_other, identity) = Far::identify(&other);
    *near.far.expected.lock().expect("no thread panicked") = Some(identity);
    let second = near.lane();
    until("the lane is checked", || near.far.results().len() == 3);
    assert_eq!(near.far.results(), [true, false, false]);
    // No session starts with a peer that differs from the peer of the control lane.
    let dialer = IpsecDialer::new(near.sealed.clone());
    let other = Principal::Certificate([0; 32]);
    let refused = inside("a", || dial(&dialer, &tls.client, &other));
    assert!(
        matches!(refused, Err(LaneError::OtherPeer { .. })),
        "{refused:?}"
    );
    drop((lane, plain, second));
    near.end(guest);
}

/// Destroys the control connections of the sessions, one after another. The ports of a lost session
/// must stay blocked, and the next lane must use other ports.
fn i6_ports_of_a_lost_session_stay_blocked_and_the_next_lane_uses_others(guest: &Guest, tls: &Tls) {
    const BLOCKS: usize = 4;
    // The range has as many blocks of 64 ports as there are sessions.
    let near = Near::with_ports(tls, Mode::Cpu, &[0], "28416-28671");
    let ports = || {
        let sessions = near.sealed.sessions().expect("the kernel answers");
        let up = sessions
            .iter()
            .find(|one| one.up)
            .expect("one session is up");
        up.parameters.ports
    };
    let mut lanes = vec![near.lane()];
    let mut used = vec![ports()];
    assert!(used[0].contains(lanes[0].port));
    for _ in 1..BLOCKS {
        cut(guest, "a", "dport = :7400 and sport >= :32768");
        until("the session is over", || {
            let sessions = near.sealed.sessions().expect("the kernel answers");
            let is_left = |event: &Event| matches!(event, Event::Left { .. });
            near.said.has(is_left) && sessions.iter().all(|one| !one.up)
        });
        let policies = guest.output("ip", &["-n", "a", "xfrm", "policy"]);
        assert!(policies.contains("action block"));
        let next = near.lane();
        next.send();
        next.has_sent();
        let others = ports();
        assert!(others.contains(next.port));
        assert!(!used.contains(&others), "{others} of {used:?}");
        used.push(others);
        lanes.push(next);
    }
    // Data on a lost lane cannot leave, and the lane's owner gets an error.
    lanes[..BLOCKS - 1].iter().for_each(Lane::fails);
    // A lost lane cannot be closed cleanly. With a reset on close, both kernels discard it, as if
    // its owners had died.
    near.far.hang_up();
    for lane in &lanes {
        set_reset_on_close(&lane.stream).expect("a socket");
    }
    drop(lanes);
    near.end(guest);
}

/// Host a, which opens lanes, and host b, which accepts them.
struct Near {
    sealed: IpsecLanes,
    said: Said,
    dialer: Arc<IpsecDialer>,
    tls: ClientTls,
    peer: Principal,
    far: Far,
    _control: ControlStream,
}

impl Near {
    fn new(tls: &Tls, mode: Mode, cpus: &[u32]) -> Self {
        Self::with_ports(tls, mode, cpus, POOL)
    }

    fn with_ports(tls: &Tls, mode: Mode, cpus: &[u32], ports: &str) -> Self {
        let (sealed, said) = ipsec_lanes_with("a", mode, cpus, ports);
        let far = Far::start(tls, mode);
        let control = inside("a", || {
            let stream = TcpStream::connect(AT).expect("b listens");
            let control = control::client(stream, &tls.client, Instant::now() + LIMIT);
            let control = control.expect("the handshake succeeds");
            control.send(&offer()).expect("b listens");
            control
        });
        until("b has its peer", || {
            far.expected.lock().expect("no thread panicked").is_some()
        });
        let dialer = IpsecDialer::new(sealed.clone());
        let peer = control.peer().principal();
        Self {
            sealed,
            said,
            dialer: Arc::new(dialer),
            tls: tls.client.clone(),
            peer,
            far,
            _control: control,
        }
    }

    fn lane(&self) -> Lane {
        Lane::open(
            Arc::clone(&self.dialer),
            self.tls.clone(),
            self.peer.clone(),
        )
    }

    /// Returns the bytes that each SA of the only session has carried.
    fn carried(&self) -> BTreeMap<Sender, u64> {
        let sessions = self.sealed.sessions().expect("the kernel answers");
        let [session] = &sessions[..] else {
            panic!("{} sessions", sessions.len());
        };
        carried(session)
    }

    /// Ends all lanes and sessions, and checks that nothing is left on either host.
    fn end(self, guest: &Guest) {
        // Drop the host's clones of the lanes. The reading threads have clones of their own.
        self.far.lanes.lock().expect("no thread panicked").clear();
        let dialer = self.dialer;
        inside("a", || drop(dialer));
        drop(self.sealed);
        drop(self.far);
        // The ports of a lost session become free only when the session's connections have ended.
        for host in ["a", "b"] {
            until("the remains are removed", || {
                drop(ipsec_lanes(host, Mode::Connection, &[]));
                no_records(host)
            });
        }
        nothing_left(guest);
    }
}

/// A lane with a thread that sends data when the test requests it.
struct Lane {
    cpu: Option<u32>,
    port: u16,
    stream: TcpStream,
    orders: Option<Channel<()>>,
    done: Receiver<std::io::Result<()>>,
    thread: Option<JoinHandle<()>>,
}

fn dial(
    dialer: &IpsecDialer,
    tls: &ClientTls,
    peer: &Principal,
) -> Result<ProtectedLane, LaneError> {
    let connector: Arc<dyn Connector> = Arc::new(StandardConnector);
    dialer.connect(&LaneRequest {
        endpoint: AT,
        peer,
        tls,
        deadline: Instant::now() + LIMIT,
        cancel: &DialCancel::new().expect("a descriptor"),
        connector: &connector,
    })
}

impl Lane {
    fn open(dialer: Arc<IpsecDialer>, tls: ClientTls, peer: Principal) -> Self {
        let (orders, received) = channel::<()>();
        let (report, done) = channel();
        let (send_stream, opened) = channel();
        let body = move || {
            let lane = dial(&dialer, &tls, &peer).expect("the lane opens");
            let (mut stream, hold) = (lane.stream, lane.hold);
            stream.set_nodelay(true).expect("a socket");
            stream.write_all(&lane_open()).expect("the data is read");
            let same = stream.try_clone().expect("a descriptor");
            send_stream
                .send((same, hold.cpu()))
                .expect("the test waits for the lane");
            // Send in pieces, like the frames of a lane.
            let mut send = || {
                let mut pieces = vec![7; BYTES];
                pieces.chunks_mut(64 << 10).try_for_each(|piece| {
                    hold.before_send();
                    stream.write_all(piece)
                })?;
                // Bytes in the socket buffer have possibly not used an SA yet, so wait until they
                // are acknowledged.
                while unacknowledged_bytes(&stream)? > 0 {
                    thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            };
            while received.recv().is_ok() {
                let _ = report.send(send());
            }
        };
        let thread = inside("a", || thread::spawn(body));
        let (stream, cpu) = opened.recv_timeout(LIMIT).expect("a lane");
        Self {
            cpu,
            port: stream.local_addr().expect("the socket is connected").port(),
            stream,
            orders: Some(orders),
            done,
            thread: Some(thread),
        }
    }

    fn send(&self) {
        let orders = self.orders.as_ref().expect("the thread is alive");
        orders.send(()).expect("its thread is alive");
    }

    fn has_sent(&self) {
        let sent = self.done.recv_timeout(LIMIT).expect("the far end reads");
        sent.expect("the socket is open");
    }

    fn fails(&self) {
        self.send();
        let sent = self.done.recv_timeout(LIMIT).expect("the thread reports");
        assert!(sent.is_err());
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the thread does not panic");
        }
    }
}

/// Host b, which accepts lanes and reads from them.
struct Far {
    sealed: IpsecLanes,
    /// The host accepts lanes from the peer with this identity.
    expected: Arc<Mutex<Option<PeerIdentity>>>,
    results: Arc<Mutex<Vec<bool>>>,
    /// The lanes from which the host reads.
    lanes: Arc<Mutex<Vec<TcpStream>>>,
    stop: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Far {
    fn start(tls: &Tls, mode: Mode) -> Self {
        let (sealed, _) = ipsec_lanes("b", mode, &[0, 1, 2, 3]);
        let listener = inside("b", || TcpListener::bind(AT)).expect("the port is free");
        let expected = Arc::<Mutex<Option<PeerIdentity>>>::default();
        let results = Arc::<Mutex<Vec<bool>>>::default();
        let (stop, stopped) = waker().expect("a descriptor");
        let (own, known, checked) = (sealed.clone(), Arc::clone(&expected), Arc::clone(&results));
        let lanes = Arc::<Mutex<Vec<TcpStream>>>::default();
        let read = Arc::clone(&lanes);
        let server = tls.server.clone();
        let mut controls = Vec::new();
        let body = move || {
            accept(&listener, &server, &stopped, |arrival| {
                match own.take(arrival) {
                    Some(Arrival::Control { stream, .. }) => {
                        *known.lock().expect("no thread panicked") = Some(stream.peer().clone());
                        controls.push(stream);
                    }
                    Some(Arrival::Lane {
                        socket: LaneSocket::Plain(mut stream),
                        ..
                    }) => {
                        let known = known.lock().expect("no thread panicked");
                        let peer = known.as_ref().expect("the control lane arrived first");
                        let principal = peer.principal();
                        let covered = own.covers(&|other| other.is(&principal), &stream).is_ok();
                        checked.lock().expect("no thread panicked").push(covered);
                        if covered {
                            let same = stream.try_clone().expect("a descriptor");
                            read.lock().expect("no thread panicked").push(same);
                            thread::spawn(move || {
                                let mut bytes = vec![0; 1 << 16];
                                while matches!(stream.read(&mut bytes), Ok(1..)) {}
                            });
                        }
                    }
                    None => {}
                    Some(other) => panic!("{other:?}"),
                }
            })
            .expect("the listener lives");
        };
        let thread = inside("b", || thread::spawn(body));
        Self {
            sealed,
            expected,
            results,
            lanes,
            stop,
            thread: Some(thread),
        }
    }

    /// Drops the lanes as if their process had died.
    fn hang_up(&self) {
        for lane in self.lanes.lock().expect("no thread panicked").drain(..) {
            set_reset_on_close(&lane).expect("a socket");
            // This ends the reading thread.
            let _ = lane.shutdown(Shutdown::Both);
        }
    }

    fn results(&self) -> Vec<bool> {
        self.results.lock().expect("no thread panicked").clone()
    }

    /// Performs a control handshake in which both ends use `tls`. Returns the client's end, and the
    /// client's identity as the server sees it.
    fn identify(tls: &Tls) -> (ControlStream, PeerIdentity) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = listener.local_addr().expect("the listener is bound");
        let client = tls.client.clone();
        let near = thread::spawn(move || {
            let stream = TcpStream::connect(at).expect("the listener is open");
            control::client(stream, &client, Instant::now() + LIMIT)
                .expect("the handshake succeeds")
        });
        let (stream, _) = listener.accept().expect("the peer connects");
        let far = control::server(stream, &tls.server, Instant::now() + LIMIT);
        let far = far.expect("the handshake succeeds");
        let identity = far.peer().clone();
        (near.join().expect("the thread does not panic"), identity)
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the thread does not panic");
        }
    }
}

/// The TLS configurations of both hosts.
struct Tls {
    client: ClientTls,
    server: ServerTls,
}

impl Tls {
    fn new() -> Self {
        let authority = Authority::new();
        let (source, destination) = (
            authority.identity(&[SOURCE]),
            authority.identity(&[DESTINATION]),
        );
        let client = source.client(&Crypto::auto(), names(&[DESTINATION]));
        let server = destination.server(&Crypto::auto(), names(&[SOURCE]));
        Self {
            client: client.expect("the settings are valid"),
            server: server.expect("the settings are valid"),
        }
    }
}

/// The first message of a control lane.
fn offer() -> Vec<u8> {
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Ipsec,
        session: [9; 16],
        attempt: 1,
        epoch: 1,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).expect("the message is short");
    bytes
}

/// The first message of a data lane.
fn lane_open() -> Vec<u8> {
    let open = LaneOpen::unproved(VERSIONS.max, [9; 16], 1, LaneDirection::FromDialer);
    let mut bytes = Vec::new();
    open.encode(&mut bytes).expect("the message is short");
    bytes
}
