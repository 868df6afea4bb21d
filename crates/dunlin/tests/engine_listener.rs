//! Tests several sessions of one listener: they run at the same time, up to the maximum, and each
//! is protected from the other sessions and from strangers.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::Incoming;
use dunlin::engine::destination::{DestinationEvent, Listener};
use dunlin::engine::source;
use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, Event, MigrateError, Report, VmIs};
use dunlin::lane::policy::ClientTls;
use dunlin_proto::control::Message;
use dunlin_proto::negotiate::{LaneSecurity, Opening, SessionSecret};
use dunlin_test_support::engine::doubt::{Relay, TO_SOURCE, send_with};
use dunlin_test_support::engine::peer::{Peer, describe_as, lane_open, open_lane, read_opening};
use dunlin_test_support::engine::{Sessions, TestBuilder, TestVm, impatient, send, tls, verified};

const LIMIT: Duration = Duration::from_secs(20);

/// A running VM with this number in its UUID.
fn guest(number: u8) -> Arc<TestVm> {
    let vm = TestVm::new((2 + 2 * usize::from(number)) << 20);
    *vm.uuid.lock().unwrap() = [number; 16];
    vm.fill(1 << 20);
    vm.start(64, Duration::from_micros(200));
    vm
}

fn builders(count: usize) -> impl Iterator<Item = TestBuilder> {
    (0..count).map(|_| TestBuilder::default())
}

/// A gate at which VMs wait during their pause until enough threads have arrived. The test's own
/// thread can arrive too.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<usize>, Condvar)>);

impl Gate {
    /// Makes the VM's pause wait until `count` threads have arrived at this gate.
    fn guard(&self, vm: &TestVm, count: usize) {
        let gate = self.clone();
        *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
            if step == "pause" {
                gate.enter();
                gate.wait(count);
            }
        }));
    }

    fn enter(&self) {
        *self.0.0.lock().unwrap() += 1;
        self.0.1.notify_all();
    }

    /// Waits until `count` threads have arrived.
    fn wait(&self, count: usize) {
        let entered = self.0.0.lock().unwrap();
        let (_entered, waited) = self
            .0
            .1
            .wait_timeout_while(entered, LIMIT, |entered| *entered < count)
            .unwrap();
        assert!(!waited.timed_out(), "fewer than {count} at the gate");
    }
}

/// Moves the VM on another thread.
fn moving(
    vm: &Arc<TestVm>,
    to: SocketAddr,
    client: &ClientTls,
) -> thread::JoinHandle<Result<Report, MigrateError>> {
    let (vm, client) = (Arc::clone(vm), client.clone());
    thread::spawn(move || {
        let to = to.to_string();
        send(&vm, &to, &client, &verified(2), &Cancel::new()).0
    })
}

/// No VM pauses before all three have sent their memory, so the sessions must run at the same time.
#[test]
fn i1_i3_three_vms_arrive_at_once_through_one_listener() {
    let (client, server) = tls();
    let sessions = Sessions::start(&server, &impatient(), builders(3));
    let gate = Gate::default();
    let vms = [1, 2, 3].map(guest);
    let threads = vms.each_ref().map(|vm| {
        gate.guard(vm, 3);
        moving(vm, sessions.address, &client)
    });
    for thread in threads {
        assert_eq!(thread.join().unwrap().unwrap().digests_equal, Some(true));
    }
    let mut arrived = Vec::new();
    for session in sessions.each {
        let (received, builder, events) = session.finish(false);
        let received = received.unwrap();
        assert!(received.runs);
        let uuid = received.offered.vm.uuid;
        let vm = &vms[usize::from(uuid[0]) - 1];
        assert_eq!(vm.digest(), builder.built.unwrap().digest(), "{uuid:?}");
        assert!(!vm.goes_on(), "{uuid:?} runs twice");
        let offers = |event: &&DestinationEvent| matches!(event, DestinationEvent::Offered(_));
        assert_eq!(events.iter().filter(offers).count(), 1);
        arrived.push(uuid);
    }
    arrived.sort_unstable();
    assert_eq!(arrived, [[1; 16], [2; 16], [3; 16]]);
}

#[test]
fn i2_i7_an_offer_beyond_the_maximum_is_refused_and_its_vm_stays() {
    let (client, server) = tls();
    let sessions = Sessions::start(&server, &impatient(), builders(2));
    let gate = Gate::default();
    let vms = [1, 2, 3].map(guest);
    let threads = [&vms[0], &vms[1]].map(|vm| {
        gate.guard(vm, 3);
        moving(vm, sessions.address, &client)
    });
    gate.wait(2);
    let refused = moving(&vms[2], sessions.address, &client).join().unwrap();
    let refused = refused.unwrap_err();
    assert_eq!(
        (refused.code(), refused.vm),
        (FaultCode::Busy, VmIs::AtSource)
    );
    assert!(vms[2].goes_on());
    assert!(vms[2].calls().iter().all(|call| *call != "pause"));
    gate.enter();
    for thread in threads {
        thread.join().unwrap().unwrap();
    }
    for session in sessions.each {
        session.finish(false).0.unwrap();
    }
}

/// Calls `work`, and cancels it at the limit.
fn within_the_limit<R>(work: impl FnOnce(&Cancel) -> R) -> R {
    let cancel = Cancel::new();
    let (done, waits) = channel::<()>();
    thread::scope(|scope| {
        let at_limit = &cancel;
        scope.spawn(move || {
            if waits.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                at_limit.cancel();
            }
        });
        let result = work(&cancel);
        drop(done);
        result
    })
}

/// One `Listener` value serves one session after another. An offer that arrives between two
/// sessions waits for the next session; until then, further offers are refused.
#[test]
fn i2_one_value_serves_one_session_after_another() {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = Incoming::builder(listener, &server).options(impatient());
    let mut shared = incoming.share().unwrap();
    let early = Peer::offering(address, &client, LaneSecurity::Tls, [1; 16]);
    match Peer::source_of(address, &client, LaneSecurity::Tls, [2; 16]).1 {
        Opening::Refuse(_, refusal) => assert_eq!(refusal.fault, FaultCode::Busy),
        other => panic!("{other:?}"),
    }
    let mut receive = |fail| {
        let mut builder = TestBuilder {
            fail,
            ..TestBuilder::default()
        };
        let ignored = |_: &DestinationEvent| ();
        let received = within_the_limit(|cancel| shared.receive(&mut builder, &ignored, cancel));
        (received, builder)
    };
    let waited = thread::spawn(move || {
        assert!(matches!(read_opening(&early.stream), Opening::Select(_)));
    });
    assert_eq!(receive(None).0.unwrap_err().code(), FaultCode::ControlLost);
    waited.join().unwrap();
    let vm = guest(1);
    for fail in [Some("load"), None] {
        let sent = moving(&vm, address, &client);
        let (received, builder) = receive(fail);
        let sent = sent.join().unwrap();
        if fail.is_some() {
            assert_eq!(received.unwrap_err().code(), FaultCode::StateLoadFailed);
            assert_eq!(sent.unwrap_err().vm, VmIs::AtSource);
            assert!(vm.goes_on());
        } else {
            assert!(received.unwrap().runs && sent.is_ok());
            assert_eq!(vm.digest(), builder.built.unwrap().digest());
        }
    }
    drop(shared);
    // The listening socket is closed when the last `Listener` value is dropped.
    let refused = TcpStream::connect(address).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
}

/// An offer goes to a `Listener` value that waits for one, not to a value that is between two
/// sessions. If a value is dropped, the offer that waited for it goes to another value.
#[test]
fn i2_no_offer_is_lost_to_a_value_that_receives_no_more() {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = Incoming::builder(listener, &server).options(impatient());
    let mut first = incoming.share().unwrap();
    let mut second = first.clone();
    let receive = |listener: &mut Listener| {
        let mut builder = TestBuilder::default();
        let ignored = |_: &DestinationEvent| ();
        within_the_limit(|cancel| listener.receive(&mut builder, &ignored, cancel))
    };
    for (value, number) in [(&mut first, 1), (&mut second, 2)] {
        let sent = moving(&guest(number), address, &client);
        receive(value).unwrap();
        sent.join().unwrap().unwrap();
    }
    // One offer waits for each of the two `Listener` values, and a third offer is refused.
    let offer = |session| Peer::offering(address, &client, LaneSecurity::Tls, [session; 16]);
    let [early, _other] = [1, 2].map(offer);
    let answer = read_opening(&offer(3).stream);
    assert!(matches!(answer, Opening::Refuse(..)), "{answer:?}");
    let mut third = second.clone();
    drop(first);
    let waited = thread::spawn(move || read_opening(&early.stream));
    let lost = receive(&mut third).unwrap_err();
    assert_eq!(lost.code(), FaultCode::ControlLost);
    let answer = waited.join().unwrap();
    assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
}

/// A builder that waits after it has built a VM. The receiver gets a message when the builder
/// waits. The builder continues when the test sends a message on the sender or drops the sender.
fn stuck() -> (TestBuilder, Receiver<()>, Sender<()>) {
    let (built, waits) = channel();
    let (go_on, gone) = channel();
    let gone = Mutex::new(gone);
    let planted = Box::new(move |_: &Arc<TestVm>| {
        built.send(()).unwrap();
        // An error means that the test has ended.
        let _ = gone.lock().unwrap().recv();
    });
    let builder = TestBuilder {
        planted: Some(planted),
        ..TestBuilder::default()
    };
    (builder, waits, go_on)
}

/// Sends a description, and does not wait for an answer.
fn describing(to: SocketAddr, client: &ClientTls, number: u8) -> Peer {
    let (mut peer, answer) = Peer::source_of(to, client, LaneSecurity::Tls, [number; 16]);
    assert!(matches!(answer, Opening::Select(_)), "{answer:?}");
    peer.send(&describe_as([number; 16]));
    peer
}

/// One session hangs in the VMM while a stranger floods it with lanes. The queue of that session is
/// bounded, and another VM arrives meanwhile.
#[test]
fn i7_i8_a_session_that_hangs_and_is_flooded_delays_no_other() {
    const QUEUE: usize = 256;
    let (client, server) = tls();
    let (builder, waits, go_on) = stuck();
    let sessions = Sessions::start(&server, &impatient(), [builder, TestBuilder::default()]);
    let to = sessions.address;
    let _hangs = describing(to, &client, 9);
    waits.recv_timeout(LIMIT).unwrap();
    let open = lane_open([9; 16], &SessionSecret([0; 32]), 1);
    let mut bytes = Vec::new();
    open.encode(&mut bytes).unwrap();
    // Lanes wait in the queue until the queue is full. The destination closes the next lane.
    let mut flood: Vec<TcpStream> = Vec::new();
    let mut most = 0;
    let until = Instant::now() + LIMIT;
    while most <= QUEUE || flood.len() != QUEUE {
        if flood.len() <= QUEUE {
            let mut stream = TcpStream::connect(to).unwrap();
            stream.write_all(&bytes).unwrap();
            stream.set_nonblocking(true).unwrap();
            flood.push(stream);
        }
        most = most.max(flood.len());
        let is_open = |stream: &TcpStream| {
            let read = stream.peek(&mut [0]).map_err(|error| error.kind());
            read == Err(ErrorKind::WouldBlock)
        };
        flood.retain(is_open);
        assert!(Instant::now() < until, "{} lanes wait", flood.len());
    }
    let vm = guest(1);
    moving(&vm, to, &client).join().unwrap().unwrap();
    let mut each = sessions.each.into_iter();
    let (hanging, other) = (each.next().unwrap(), each.next().unwrap());
    assert!(other.finish(false).0.unwrap().runs);
    go_on.send(()).unwrap();
    hanging.await_rejection("proof");
    hanging.finish(true).0.map(drop).unwrap_err();
}

#[test]
fn i1_a_vm_that_is_arriving_is_refused_in_another_session() {
    let (client, server) = tls();
    let sessions = Sessions::start(&server, &impatient(), builders(3));
    let to = sessions.address;
    let vm = [5; 16];
    let (first, accepted) = Peer::describing(to, &client, [1; 16], vm);
    assert!(matches!(accepted, Some(Message::Accept(_))));
    let refused = |session| match Peer::describing(to, &client, session, vm).1 {
        Some(Message::Cancel { fault, .. }) => fault,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused([2; 16]), FaultCode::Busy);
    // The first session has lost its control lane. The next offer of the same VM ends that session,
    // so that a further offer succeeds.
    let mut each = sessions.each.into_iter();
    let session = each.next().unwrap();
    first.stream.shutdown();
    session.await_event(|event| matches!(event, DestinationEvent::ControlLost { .. }));
    assert_eq!(refused([3; 16]), FaultCode::Busy);
    let (ended, ..) = session.finish(false);
    assert_eq!(ended.unwrap_err().code(), FaultCode::ControlLost);
    drop(each.map(|session| session.finish(true)).collect::<Vec<_>>());
}

/// A lane that names one session but has another session's proof is refused. A lane with the right
/// proof is admitted.
#[test]
fn i4_i7_a_lane_of_one_session_is_refused_by_another() {
    let (client, server) = tls();
    let sessions = Sessions::start(&server, &impatient(), builders(2));
    let to = sessions.address;
    let peers = [1, 2].map(|number| {
        let (peer, answer) = Peer::describing(to, &client, [number; 16], [number; 16]);
        match answer {
            Some(Message::Accept(accept)) => (peer, accept.secret),
            other => panic!("{other:?}"),
        }
    });
    let [(mut first, secret), (mut second, other)] = peers;
    for (session, proof, receiving) in [
        ([1; 16], &other, &sessions.each[0]),
        ([2; 16], &secret, &sessions.each[1]),
    ] {
        let _lane = open_lane(to, Some(&client), &lane_open(session, proof, 1));
        receiving.await_rejection("proof");
    }
    // A lane of a session that does not exist is refused too.
    let _lane = open_lane(to, Some(&client), &lane_open([3; 16], &secret, 1));
    sessions.each[0].await_rejection("no such session");
    for (peer, session, proof) in [
        (&mut first, [1; 16], &secret),
        (&mut second, [2; 16], &other),
    ] {
        let _lane = open_lane(to, Some(&client), &lane_open(session, proof, 1));
        let answer = peer.await_message(|message| {
            matches!(
                message,
                Message::LaneUp { .. } | Message::LaneRefused { .. }
            )
        });
        assert_eq!(answer, Some(Message::LaneUp { lane: 1 }));
    }
    drop((first, second));
    for session in sessions.each {
        session.finish(true).0.map(drop).unwrap_err();
    }
}

#[test]
fn i2_cancelling_one_session_leaves_the_others() {
    let (client, server) = tls();
    let sessions = Sessions::start(&server, &impatient(), builders(2));
    let gate = Gate::default();
    let vms = [1, 2].map(guest);
    let threads = vms.each_ref().map(|vm| {
        gate.guard(vm, 3);
        moving(vm, sessions.address, &client)
    });
    gate.wait(2);
    let mut each = sessions.each.into_iter();
    let (one, other) = (each.next().unwrap(), each.next().unwrap());
    let (cancelled, ..) = one.finish(true);
    assert_eq!(cancelled.unwrap_err().code(), FaultCode::Cancelled);
    gate.enter();
    let arrived = other.finish(false).0.unwrap().offered.vm.uuid[0];
    for (vm, thread) in vms.iter().zip(threads) {
        let is_there = *vm.uuid.lock().unwrap() == [arrived; 16];
        assert_eq!(thread.join().unwrap().is_ok(), is_there);
        assert_eq!(vm.goes_on(), !is_there);
    }
}

/// The control lane breaks after *commit*. Before the source can ask for the outcome, the
/// listener's only session ends and the last clone of the listener is dropped.
#[test]
fn i1_a_listener_answers_for_a_vm_until_its_source_has_released_it() {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let relay = Arc::new(Relay::start(address));
    let nowhere = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let nowhere = nowhere.local_addr().unwrap();
    let mut shared = Incoming::builder(listener, &server).share().unwrap();
    let same = Arc::clone(&relay);
    let receiving = thread::spawn(move || {
        let mut builder = TestBuilder::default();
        let observe = |event: &DestinationEvent| match event {
            DestinationEvent::Committed => same.swallow(TO_SOURCE),
            DestinationEvent::Running { .. } => {
                same.redirect(nowhere);
                same.cut(true);
            }
            _ => {}
        };
        let received = shared.receive(&mut builder, &observe, &Cancel::new());
        (received.unwrap(), builder)
    });
    let vm = guest(1);
    let options = source::Options::builder()
        .doubt_limit(LIMIT)
        .build()
        .unwrap();
    let sent = {
        let (vm, client, to) = (Arc::clone(&vm), client.clone(), relay.address);
        thread::spawn(move || send_with(&vm, to, &client, &options, &|_: &Event| ()))
    };
    let (received, builder) = receiving.join().unwrap();
    let answering = received.answering.unwrap();
    assert!(!answering.is_over() && received.runs);
    relay.redirect(address);
    sent.join().unwrap().unwrap();
    let until = Instant::now() + LIMIT;
    while !answering.is_over() || TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(2));
    }
    assert!(!vm.goes_on());
    drop(builder);
}

/// Two sessions always have more data than the rate cap allows. Each gets half of the rate, and the
/// session that remains at the end gets all of it.
#[test]
fn two_sessions_share_one_rate() {
    const RATE: u64 = 16 << 20;
    let (client, server) = tls();
    let options = impatient().to_builder().rate(RATE).build().unwrap();
    let sessions = Sessions::start(&server, &options, builders(2));
    let vms = [1, 2].map(|number| {
        let vm = TestVm::new(8 << 20);
        *vm.uuid.lock().unwrap() = [number; 16];
        vm.fill(8 << 20);
        vm
    });
    let began = Instant::now();
    let threads = vms
        .each_ref()
        .map(|vm| moving(vm, sessions.address, &client));
    let took = threads.map(|thread| {
        thread.join().unwrap().unwrap();
        began.elapsed().as_secs_f64()
    });
    // Both VMs together have 16 MiB. Without the cap, their migrations take a tenth of a second.
    let fair = (16_u64 << 20) as f64 / RATE as f64;
    assert!(took[0] > 0.7 * fair, "{took:?}");
    assert!(took[1] > 0.9 * fair, "{took:?}");
    for session in sessions.each {
        session.finish(false).0.unwrap();
    }
}
