//! What becomes of a VM when the control lane is lost around *commit*, when a
//! journal fails, and when nobody answers: over real sockets, through a relay
//! that swallows and cuts at the engine's own events.
#![allow(clippy::unwrap_used)]

mod engine_support;
mod lane_support;

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin::engine::destination::{self, DestinationEvent, Received, receive};
use dunlin::engine::journal::{
    DestinationRecord, Disk, Journal, Record, Role, SourceRecord, StandardDisk, State,
};
use dunlin::engine::source::{self, Resolution, migrate};
use dunlin::engine::vmm::{FaultCode, RunState, SourceVm};
use dunlin::engine::{Cancel, Event, Host, MigrateError, Report, StandardHost, VmIs};
use dunlin::lane::control;
use dunlin::lane::identity::{ClientTls, ServerTls};
use dunlin_proto::control::{Envelope, Message, Verdict};
use dunlin_proto::negotiate::{Features, LaneSecurity, Offer, PRELUDE_BYTES, Prelude, VERSIONS};
use engine_support::peer::Peer;
use engine_support::{TestBuilder, TestVm, tls, verified};
use lane_support::soon;

/// A journal in a directory of the test's own, removed at its end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dunlin-doubt-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    fn journal(&self) -> Journal {
        self.on(StandardDisk)
    }

    fn on(&self, disk: impl Disk + 'static) -> Journal {
        Journal::open_on(&self.0, Arc::new(disk)).unwrap()
    }

    /// What the records of this host say.
    fn states(&self) -> Vec<State> {
        let entries = self.journal().list().unwrap().into_iter();
        entries
            .filter_map(|entry| entry.record.unwrap().map(|record| record.state))
            .collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Fails to write records of one kind, or everything.
struct FailingDisk(Option<State>);

impl Disk for FailingDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let fails = match self.0 {
            None => true,
            Some(state) => bytes.try_into().is_ok_and(|bytes| {
                Record::decode(bytes).is_ok_and(|(record, _)| record.state == state)
            }),
        };
        if fails {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(bytes, offset)
    }
}

/// Forwards connections; the first is the control lane.
struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Bytes of the first connection are read and dropped, by direction.
    swallow: [AtomicBool; 2],
    /// The end of the first connection is kept from the destination.
    mute: AtomicBool,
    refuse: AtomicBool,
    first: Mutex<Option<(TcpStream, TcpStream)>>,
}

const TO_DESTINATION: usize = 0;
const TO_SOURCE: usize = 1;

impl Relay {
    fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        // It ends with the test's process: its threads hold nothing else.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if own.refuse.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(to) else {
                    continue;
                };
                let both = || (near.try_clone().unwrap(), far.try_clone().unwrap());
                let first = {
                    let mut first = own.first.lock().unwrap();
                    let is_first = first.is_none();
                    if is_first {
                        *first = Some(both());
                    }
                    is_first
                };
                for direction in [TO_DESTINATION, TO_SOURCE] {
                    let (near, far) = both();
                    let (from, to) = if direction == TO_DESTINATION {
                        (near, far)
                    } else {
                        (far, near)
                    };
                    let own = Arc::clone(&own);
                    std::thread::spawn(move || {
                        pump(from, to, first.then_some((&*own, direction)));
                    });
                }
            }
        });
        Self { address, shared }
    }

    /// Forwards no further connection.
    fn refuse(&self) {
        self.shared.refuse.store(true, Ordering::SeqCst);
    }

    /// From now on nothing more of the control lane arrives there.
    fn swallow(&self, direction: usize) {
        self.shared.swallow[direction].store(true, Ordering::SeqCst);
    }

    /// Cuts the first control lane; the destination notices only if it shall.
    fn cut(&self, at_destination: bool) {
        self.shared.mute.store(!at_destination, Ordering::SeqCst);
        if let Some((near, far)) = &*self.shared.first.lock().unwrap() {
            let _ = near.shutdown(Shutdown::Both);
            if at_destination {
                let _ = far.shutdown(Shutdown::Both);
            }
        }
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, control: Option<(&Shared, usize)>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        // Looked at after the bytes have come: whoever swallows says so before
        // they are sent.
        let swallowed = control
            .is_some_and(|(shared, direction)| shared.swallow[direction].load(Ordering::SeqCst));
        if !swallowed && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    if control.is_none_or(|(shared, _)| !shared.mute.load(Ordering::SeqCst)) {
        let _ = to.shutdown(Shutdown::Write);
    }
}

/// What a test does at an event.
type At<E> = Box<dyn Fn(&E) + Send + Sync>;

/// The journal of each VM that comes, one after another.
type Journals = Box<dyn Fn() -> Journal + Send>;

/// A host that takes in one VM after another, answering all the while.
struct Destination {
    address: SocketAddr,
    cancel: Cancel,
    thread: JoinHandle<(Vec<Result<Received, MigrateError>>, TestBuilder)>,
}

impl Destination {
    fn start(tls: &ServerTls, journal: Journal, builder: TestBuilder) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let journals = Box::new(move || journal.clone());
        Self::on(listener, tls, journals, builder, Box::new(|_| ()))
    }

    fn on(
        listener: TcpListener,
        tls: &ServerTls,
        journals: Journals,
        mut builder: TestBuilder,
        at: At<DestinationEvent>,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let cancel = Cancel::new();
        let (tls, cancelled) = (tls.clone(), cancel.clone());
        let thread = std::thread::spawn(move || {
            let host: Arc<dyn Host> = Arc::new(StandardHost);
            let mut ended = Vec::new();
            loop {
                let options = destination::Options::builder()
                    .journal(journals())
                    .build()
                    .unwrap();
                let listener = listener.try_clone().unwrap();
                let result = receive(
                    listener,
                    &tls,
                    &options,
                    &mut builder,
                    &host,
                    &*at,
                    &cancelled,
                );
                let arrived = result.is_ok();
                if cancelled.is_cancelled() && !arrived {
                    return (ended, builder);
                }
                ended.push(result);
                if arrived {
                    return (ended, builder);
                }
            }
        });
        Self {
            address,
            cancel,
            thread,
        }
    }

    fn finish(self) -> (Vec<Result<Received, MigrateError>>, TestBuilder) {
        self.cancel.cancel();
        self.thread.join().unwrap()
    }
}

fn running() -> Arc<TestVm> {
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(64, Duration::from_micros(50));
    vm
}

fn send(
    vm: &Arc<TestVm>,
    to: SocketAddr,
    client: &ClientTls,
    journal: Journal,
    at: &(dyn Fn(&Event) + Send + Sync),
) -> Result<Report, MigrateError> {
    let options = verified(2)
        .to_builder()
        .journal(journal)
        .doubt_limit(Duration::from_secs(5))
        .build()
        .unwrap();
    send_with(vm, to, client, &options, at)
}

fn send_with(
    vm: &Arc<TestVm>,
    to: SocketAddr,
    client: &ClientTls,
    options: &source::Options,
    at: &(dyn Fn(&Event) + Send + Sync),
) -> Result<Report, MigrateError> {
    let vm: Arc<dyn SourceVm> = Arc::clone(vm) as _;
    let host: Arc<dyn Host> = Arc::new(StandardHost);
    migrate(
        &vm,
        &to.to_string(),
        client,
        options,
        &host,
        &|event: &Event| at(event),
        &Cancel::new(),
    )
}

fn runs(vm: &TestVm) -> bool {
    *vm.state.lock().unwrap() == RunState::Running
}

#[test]
fn i1_a_commit_that_never_arrived_is_asked_about_and_the_vm_goes_on_at_the_source() {
    let (client, server) = tls();
    // Whether the destination sees the end of the control lane before it is
    // asked, or believes until then that it stands.
    for noticed in [true, false] {
        let (here, there) = (Scratch::new("lost-s"), Scratch::new("lost-d"));
        let destination = Destination::start(&server, there.journal(), TestBuilder::default());
        let relay = Relay::start(destination.address);
        let vm = running();
        let events = Mutex::new(Vec::new());
        let at = |event: &Event| {
            match event {
                Event::Committing => relay.swallow(TO_DESTINATION),
                Event::Committed => relay.cut(noticed),
                _ => {}
            }
            events.lock().unwrap().push(format!("{event:?}"));
        };
        let error = send(&vm, relay.address, &client, here.journal(), &at).unwrap_err();
        assert_eq!(error.vm, VmIs::AtSource, "{error}");
        assert!(vm.goes_on());
        let order = ["Recorded(Committing)", "Paused", "Committing", "Committed"];
        let events = events.into_inner().unwrap();
        let places = order.map(|name| events.iter().position(|one| one == name).unwrap());
        assert!(places.is_sorted(), "{events:?}");
        assert!(events.iter().any(|event| event.starts_with("InDoubt")));
        let (ended, builder) = destination.finish();
        assert_eq!(ended.len(), 1);
        assert_eq!(ended[0].as_ref().err().unwrap().vm, VmIs::AtSource);
        let built = builder.built.unwrap();
        assert_eq!(built.calls(), ["load", "discard"]);
        assert!(!runs(&built));
        assert_eq!(here.states(), []);
        // The source might ask again.
        assert_eq!(
            there.states(),
            [State::Destination(DestinationRecord::Aborted)]
        );
    }
}

#[test]
fn i1_a_running_that_never_came_back_is_asked_about_and_the_vm_is_the_destinations() {
    let (client, server) = tls();
    for noticed in [true, false] {
        let (here, there) = (Scratch::new("ran-s"), Scratch::new("ran-d"));
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let relay = Arc::new(Relay::start(listener.local_addr().unwrap()));
        let same = Arc::clone(&relay);
        let at = move |event: &DestinationEvent| match event {
            DestinationEvent::Committed => same.swallow(TO_SOURCE),
            DestinationEvent::Running { .. } => same.cut(noticed),
            _ => {}
        };
        let builder = TestBuilder::default();
        let journal = there.journal();
        let journals = Box::new(move || journal.clone());
        let destination = Destination::on(listener, &server, journals, builder, Box::new(at));
        let vm = running();
        let report = send(&vm, relay.address, &client, here.journal(), &|_| ()).unwrap();
        assert!(report.runs);
        assert_eq!(vm.calls().last(), Some(&"destroy"));
        assert!(!runs(&vm));
        let (mut ended, builder) = destination.finish();
        assert!(runs(&builder.built.unwrap()));
        let received = ended.pop().unwrap().unwrap();
        // Where the session was over already, somebody else has answered.
        assert_eq!(received.answering.is_some(), noticed);
        if let Some(answering) = received.answering {
            let until = Instant::now() + Duration::from_secs(5);
            while !answering.is_over() {
                assert!(Instant::now() < until);
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(here.states(), []);
        assert_eq!(there.states(), []);
    }
}

#[test]
fn i2_without_a_journal_a_lost_commit_is_answered_as_long_as_both_processes_live() {
    let (client, server) = tls();
    let destination = Destination::start(&server, Journal::none(), TestBuilder::default());
    let relay = Relay::start(destination.address);
    let vm = running();
    let cutting = |event: &Event| match event {
        Event::Committing => relay.swallow(TO_DESTINATION),
        Event::Committed => relay.cut(true),
        _ => {}
    };
    let error = send(&vm, relay.address, &client, Journal::none(), &cutting).unwrap_err();
    assert_eq!(error.vm, VmIs::AtSource, "{error}");
    assert!(vm.goes_on());
    assert!(!runs(&destination.finish().1.built.unwrap()));
}

#[test]
fn i2_a_vm_that_nobody_answers_for_is_held_until_an_operator_decides() {
    let (client, server) = tls();
    let here = Scratch::new("held");
    for resolution in [Resolution::RunHere, Resolution::Destroy] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let relay = Arc::new(Relay::start(listener.local_addr().unwrap()));
        let builder = TestBuilder::default();
        let at = Box::new(|_: &DestinationEvent| ());
        // As if another process without a journal had taken this one's place.
        let journals = Box::new(Journal::none);
        let destination = Destination::on(listener, &server, journals, builder, at);
        let vm = running();
        let cutting = |event: &Event| match event {
            Event::Committing => relay.swallow(TO_DESTINATION),
            Event::Committed => relay.cut(true),
            _ => {}
        };
        let error = send(&vm, relay.address, &client, here.journal(), &cutting).unwrap_err();
        assert_eq!(error.vm, VmIs::InDoubt, "{error}");
        assert!(error.what.contains("no record"), "{error}");
        assert_eq!(*vm.state.lock().unwrap(), RunState::Paused);
        assert_eq!(vm.calls().last(), Some(&"hold"));
        assert!(!runs(&destination.finish().1.built.unwrap()));
        let mut doubt = error.doubt.unwrap();
        let committing = State::Source(SourceRecord::Committing);
        assert_eq!(doubt.record().state, committing);
        assert_eq!(here.states(), [committing]);
        assert!(here.journal().list().unwrap()[0].lives);
        doubt.resolve(&*vm, resolution).unwrap();
        assert_eq!(vm.goes_on(), resolution == Resolution::RunHere);
        let (last, record) = match resolution {
            Resolution::RunHere => ("resume", SourceRecord::Kept),
            Resolution::Destroy => ("destroy", SourceRecord::GivenUp),
        };
        assert_eq!(vm.calls().last(), Some(&last));
        assert_eq!(here.states(), [State::Source(record)]);
        drop(doubt);
        std::fs::remove_dir_all(&here.0).unwrap();
    }
}

#[test]
fn i2_a_destination_that_cannot_be_reached_leaves_the_vm_in_doubt_at_the_limit() {
    let (client, server) = tls();
    let here = Scratch::new("limit");
    let destination = Destination::start(&server, Journal::none(), TestBuilder::default());
    let relay = Relay::start(destination.address);
    let vm = running();
    let at = |event: &Event| match event {
        Event::Committing => {
            relay.swallow(TO_DESTINATION);
            relay.refuse();
        }
        Event::Committed => relay.cut(true),
        _ => {}
    };
    let options = verified(1)
        .to_builder()
        .journal(here.journal())
        .doubt_limit(Duration::from_millis(400))
        .build()
        .unwrap();
    let began = Instant::now();
    let error = send_with(&vm, relay.address, &client, &options, &at).unwrap_err();
    assert_eq!(error.vm, VmIs::InDoubt, "{error}");
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(*vm.state.lock().unwrap(), RunState::Paused);
    // Each inquiry had an epoch of its own, in the record too.
    assert!(error.doubt.unwrap().record().epoch > 2);
    assert!(!runs(&destination.finish().1.built.unwrap()));
}

#[test]
fn a_full_disk_on_either_side_is_found_while_the_guest_runs() {
    let (client, server) = tls();
    let (here, there) = (Scratch::new("full-s"), Scratch::new("full-d"));
    let prepared = State::Destination(DestinationRecord::Prepared);
    let committing = State::Source(SourceRecord::Committing);
    type Disks = (Option<Option<State>>, Option<Option<State>>);
    let disks: [Disks; 4] = [
        (Some(None), None),
        (None, Some(None)),
        (None, Some(Some(prepared))),
        (Some(Some(committing)), None),
    ];
    for (source, destination) in disks {
        let on = |scratch: &Scratch, fails: Option<Option<State>>| match fails {
            Some(fails) => scratch.on(FailingDisk(fails)),
            None => scratch.journal(),
        };
        let journal = on(&there, destination);
        let receiving = Destination::start(&server, journal, TestBuilder::default());
        let vm = running();
        let journal = on(&here, source);
        let error = send(&vm, receiving.address, &client, journal, &|_| ()).unwrap_err();
        assert_eq!(
            (error.fault, error.vm),
            (FaultCode::Journal, VmIs::AtSource),
            "{error}"
        );
        assert!(!vm.calls().contains(&"pause"), "{:?}", vm.calls());
        assert!(runs(&vm) && vm.goes_on());
        let (ended, builder) = receiving.finish();
        assert!(ended.iter().all(Result::is_err));
        if let Some(built) = builder.built {
            assert_eq!(built.calls(), ["discard"]);
        }
        assert_eq!((here.states(), there.states()), (vec![], vec![]));
    }
}

#[test]
fn i2_running_that_cannot_be_recorded_gives_the_vm_back() {
    let (client, server) = tls();
    let (here, there) = (Scratch::new("unrun-s"), Scratch::new("unrun-d"));
    let disk = FailingDisk(Some(State::Destination(DestinationRecord::Running)));
    let destination = Destination::start(&server, there.on(disk), TestBuilder::default());
    let vm = running();
    let error = send(&vm, destination.address, &client, here.journal(), &|_| ()).unwrap_err();
    assert_eq!(
        (error.fault, error.vm),
        (FaultCode::Journal, VmIs::AtSource),
        "{error}"
    );
    assert!(vm.goes_on());
    let (ended, builder) = destination.finish();
    assert_eq!(ended[0].as_ref().err().unwrap().vm, VmIs::AtSource);
    let built = builder.built.unwrap();
    assert_eq!(built.calls(), ["load", "acquire", "discard"]);
    assert_eq!(
        there.states(),
        [State::Destination(DestinationRecord::Aborted)]
    );
}

#[test]
fn i2_released_that_cannot_be_recorded_keeps_the_destinations_answer() {
    let (client, server) = tls();
    let (here, there) = (Scratch::new("unrel-s"), Scratch::new("unrel-d"));
    let disk = FailingDisk(Some(State::Source(SourceRecord::Released)));
    let destination = Destination::start(&server, there.journal(), TestBuilder::default());
    let vm = running();
    send(&vm, destination.address, &client, here.on(disk), &|_| ()).unwrap();
    assert_eq!(vm.calls().last(), Some(&"destroy"));
    let (mut ended, builder) = destination.finish();
    assert!(runs(&builder.built.unwrap()));
    let received = ended.pop().unwrap().unwrap();
    let running = [State::Destination(DestinationRecord::Running)];
    assert_eq!(here.states(), [State::Source(SourceRecord::Committing)]);
    assert_eq!(there.states(), running);
    // Nobody else takes the VM for dead, whether or not it is answered for.
    assert!(there.journal().list().unwrap()[0].lives);
    received.answering.unwrap().stop();
    assert!(there.journal().list().unwrap()[0].lives);
}

#[test]
fn i1_a_vm_that_has_moved_on_is_not_taken_for_dead() {
    let (client, server) = tls();
    let (here, there) = (Scratch::new("on-s"), Scratch::new("on-d"));
    let disk = FailingDisk(Some(State::Source(SourceRecord::Released)));
    let destination = Destination::start(&server, there.journal(), TestBuilder::default());
    send(
        &running(),
        destination.address,
        &client,
        here.on(disk),
        &|_| (),
    )
    .unwrap();
    let received = destination.finish().0.pop().unwrap().unwrap();
    // A later migration takes it elsewhere, and the process ends.
    received.answering.unwrap().moved_on().unwrap();
    let left = there.journal().list().unwrap();
    let moved_on = State::Destination(DestinationRecord::MovedOn);
    assert_eq!(there.states(), [moved_on]);
    assert!(!left[0].lives);
    let again = Destination::start(&server, there.journal(), TestBuilder::default());
    let answer = ask(again.address, &client, left[0].session);
    assert_eq!(answer, Some(Verdict::Running));
    assert!(again.finish().0.is_empty());
}

#[test]
fn i5_the_attempt_after_one_that_failed_moves_the_vm() {
    let (client, server) = tls();
    let (here, there) = (Scratch::new("again-s"), Scratch::new("again-d"));
    let destination = Destination::start(&server, there.journal(), TestBuilder::default());
    let relay = Relay::start(destination.address);
    let vm = running();
    let cutting = |event: &Event| match event {
        Event::Committing => relay.swallow(TO_DESTINATION),
        Event::Committed => relay.cut(true),
        _ => {}
    };
    let failed = send(&vm, relay.address, &client, here.journal(), &cutting).unwrap_err();
    assert_eq!(failed.vm, VmIs::AtSource);
    assert!(vm.goes_on());
    let report = send(&vm, destination.address, &client, here.journal(), &|_| ()).unwrap();
    assert_eq!(report.digests_equal, Some(true));
    let (ended, builder) = destination.finish();
    assert_eq!(ended.len(), 2);
    assert_eq!(builder.built.unwrap().digest(), vm.digest());
    assert_eq!(here.states(), []);
    // A source that begins anew asks no more about its first session.
    assert_eq!(there.states(), []);
}

/// Notes which records are written.
struct NotingDisk(Arc<Mutex<Vec<String>>>);

impl Disk for NotingDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        if let Ok(bytes) = bytes.try_into() {
            let (record, _) = Record::decode(bytes).unwrap();
            self.0.lock().unwrap().push(record.state.to_string());
        }
        file.write_all_at(bytes, offset)
    }
}

#[test]
fn one_record_is_written_while_the_guest_stands_still() {
    let (client, server) = tls();
    for remembered in [false, true] {
        let (here, there) = (Scratch::new("order-s"), Scratch::new("order-d"));
        let order = Arc::<Mutex<Vec<String>>>::default();
        let journal = |scratch: &Scratch| {
            if remembered {
                scratch.on(NotingDisk(Arc::clone(&order)))
            } else {
                Journal::none()
            }
        };
        let destination = Destination::start(&server, journal(&there), TestBuilder::default());
        let vm = running();
        let at = |event: &Event| {
            if matches!(event, Event::Paused) {
                order.lock().unwrap().push("paused".into());
            }
        };
        let to = destination.address;
        let report = send(&vm, to, &client, journal(&here), &at).unwrap();
        let downtime = report.downtime;
        println!(
            "with a journal: {remembered}; downtime {:?}, of it {:?} after commit",
            downtime.total, downtime.resume
        );
        assert!(destination.finish().0[0].is_ok());
        let expected: &[&str] = if remembered {
            &[
                "source, migrating",
                "destination, prepared",
                "source, committing",
                "paused",
                "destination, running",
                "source, released",
            ]
        } else {
            &["paused"]
        };
        assert_eq!(*order.lock().unwrap(), expected);
    }
}

/// Asks about a session by hand; none where there is no answer.
fn ask(to: SocketAddr, client: &ClientTls, session: [u8; 16]) -> Option<Verdict> {
    let stream = control::client(TcpStream::connect(to).unwrap(), client, soon()).unwrap();
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session,
        attempt: 1,
        epoch: 2,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).unwrap();
    stream.send(&bytes).unwrap();
    let mut prelude = [0; PRELUDE_BYTES];
    stream.receive_exact(&mut prelude, soon()).unwrap();
    let mut body = vec![0; Prelude::decode(&prelude).unwrap().body_bytes];
    stream.receive_exact(&mut body, soon()).unwrap();
    let envelope = Envelope {
        session,
        epoch: 2,
        sequence: 0,
    };
    let mut peer = Peer { stream, envelope };
    peer.send(&Message::Inquire { attempt: 1 });
    match peer.receive() {
        Some(Message::Answer {
            attempt: 1,
            verdict,
        }) => Some(verdict),
        None => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn i1_a_destination_that_was_started_again_answers_what_its_journal_says() {
    let (client, server) = tls();
    let there = Scratch::new("again");
    let journal = there.journal();
    let record = |number: u8, peer: &str, state| {
        let state = State::Destination(state);
        let record = Record {
            state,
            session: [number; 16],
            attempt: 1,
            epoch: 1,
            vm_uuid: [7; 16],
            vm_name: "test".into(),
            peer: peer.into(),
            owner: String::new(),
            started_ms: 1,
            written_ms: 1,
        };
        let mut session = journal.create(record).unwrap();
        session.write(state).unwrap();
        session
    };
    let source = &*format!("DNS {}", lane_support::SOURCE);
    drop(record(1, source, DestinationRecord::Prepared));
    drop(record(2, source, DestinationRecord::Running));
    drop(record(3, source, DestinationRecord::Aborted));
    drop(record(5, "somebody.else", DestinationRecord::Prepared));
    drop(record(7, source, DestinationRecord::MovedOn));
    // Its process lives: that is the one to ask.
    let _held = record(6, source, DestinationRecord::Running);
    // While a host waits for a VM, and where it takes none in.
    let waiting = Destination::start(&server, there.journal(), TestBuilder::default());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let answering = listener.local_addr().unwrap();
    let stop = Cancel::new();
    let (same, stopped) = (there.journal(), stop.clone());
    let thread = std::thread::spawn(move || {
        let host: Arc<dyn Host> = Arc::new(StandardHost);
        destination::answer(&listener, &server, &same, &host, &stopped).unwrap();
    });
    for to in [waiting.address, answering] {
        for (number, verdict) in [
            (1, Some(Verdict::Aborted)),
            (2, Some(Verdict::RanThenDied)),
            (3, Some(Verdict::Aborted)),
            (4, Some(Verdict::NoRecord)),
            (5, None),
            (6, None),
            (7, Some(Verdict::Running)),
        ] {
            assert_eq!(ask(to, &client, [number; 16]), verdict, "session {number}");
        }
    }
    stop.cancel();
    thread.join().unwrap();
    assert!(waiting.finish().0.is_empty());
    // *aborted* was recorded before it was told.
    let first = journal.take([1; 16], Role::Destination).unwrap();
    let aborted = State::Destination(DestinationRecord::Aborted);
    assert_eq!(first.record().state, aborted);
    // And a stranger has changed nothing.
    let fifth = journal.take([5; 16], Role::Destination).unwrap();
    let prepared = State::Destination(DestinationRecord::Prepared);
    assert_eq!(fifth.record().state, prepared);
}
