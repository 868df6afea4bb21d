//! Tests migrations in which the source loses the control lane around *commit*, a journal fails, or
//! no process answers the source's inquiries. The tests use real sockets. A test relay between the
//! two sides drops bytes and connections at the engine's events.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dunlin::Incoming;
use dunlin::engine::destination::{self, DestinationEvent};
use dunlin::engine::journal::{
    DestinationRecord, Disk, Journal, JournalError, Record, Role, SessionJournal, SourceRecord,
    State,
};
use dunlin::engine::source::{Doubt, Resolution};
use dunlin::engine::vmm::{FaultCode, RunState};
use dunlin::engine::{Cancel, Event, VmIs};
use dunlin::lane::peers::Principal;
use dunlin_proto::control::Verdict;
use dunlin_proto::journal::{SlotError, decode};
use dunlin_test_support::engine::doubt::{
    Destination, FailingDisk, JournalDirectory, PeerlessDisk, Relay, TO_DESTINATION, TO_SOURCE,
    ask, principal_of, running, runs, send, send_with,
};
use dunlin_test_support::engine::{TestBuilder, tls, verified};

/// Claim P11 of docs/security.
#[test]
fn i1_a_commit_that_never_arrived_is_asked_about_and_the_vm_goes_on_at_the_source() {
    let (client, server) = tls();
    // Whether the destination notices the end of the control lane before the inquiry, or still
    // considers the lane open when the inquiry arrives.
    for noticed in [true, false] {
        let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
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
        // The destination keeps its record, because the source might ask again.
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
        let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
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
        // If the destination had not noticed the end of the control lane, the session was still
        // open and answered the inquiry itself. Otherwise a separate answering thread answered.
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
fn i2_a_vm_without_an_answer_is_held_until_an_operator_decides() {
    let (client, server) = tls();
    let here = JournalDirectory::new();
    for resolution in [Resolution::RunHere, Resolution::Destroy] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let relay = Arc::new(Relay::start(listener.local_addr().unwrap()));
        let builder = TestBuilder::default();
        let at = Box::new(|_: &DestinationEvent| ());
        // Each session gets a new, empty journal. The destination therefore answers like another
        // process at the same address.
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
        std::fs::remove_dir_all(here.path()).unwrap();
    }
}

/// The source's process has died, and the VM with it. The operator can only use the record.
#[test]
fn i2_a_copy_that_died_in_doubt_is_given_up_but_not_while_its_process_lives() {
    const SESSION: [u8; 16] = [1; 16];
    let recorded = |journal: &Journal, state| {
        let record = Record {
            state,
            session: SESSION,
            attempt: 1,
            epoch: 1,
            vm_uuid: [7; 16],
            vm_name: "vm".into(),
            peer: "host-b.example:4444".into(),
            owner: String::new(),
            started_ms: 0,
            written_ms: 0,
        };
        let mut owner = SessionJournal::create(journal, record).unwrap();
        owner.write(state).unwrap();
        owner
    };
    let here = JournalDirectory::new();
    let journal = here.journal();
    for (before, after) in [
        (SourceRecord::Committing, SourceRecord::GivenUp),
        (SourceRecord::RanThenDied, SourceRecord::GivenUp),
        // This record contains the destination's decision, so giving up does not change it.
        (SourceRecord::Released, SourceRecord::Released),
    ] {
        let (before, after) = (State::Source(before), State::Source(after));
        let owner = recorded(&journal, before);
        let refused = Doubt::taken_over(&journal, SESSION, false).unwrap_err();
        assert!(matches!(refused, JournalError::Held { .. }), "{refused}");
        assert_eq!(here.states(), [before]);
        drop(owner);
        let mut doubt = Doubt::taken_over(&journal, SESSION, false).unwrap();
        doubt.give_up().unwrap();
        assert_eq!(doubt.record().state, after);
        assert_eq!(here.states(), [after]);
        doubt.forget().unwrap();
        assert_eq!(here.states(), []);
    }
    // If the disk is full, the decision cannot be recorded, and the session stays in doubt.
    let full = here.on(FailingDisk(Some(State::Source(SourceRecord::GivenUp))));
    let committing = State::Source(SourceRecord::Committing);
    drop(recorded(&full, committing));
    let mut doubt = Doubt::taken_over(&full, SESSION, false).unwrap();
    assert_eq!(doubt.give_up().unwrap_err().code(), FaultCode::Journal);
    let error = doubt.forget().unwrap_err();
    assert!(matches!(error, JournalError::Undecided { .. }), "{error}");
    assert_eq!(here.states(), [committing]);
}

/// Claim N10 of docs/security.
#[test]
fn i2_a_destination_that_cannot_be_reached_leaves_the_vm_in_doubt_at_the_limit() {
    let (client, server) = tls();
    let here = JournalDirectory::new();
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
    // Each inquiry has a higher epoch, and the source's record contains the latest epoch.
    assert!(error.doubt.unwrap().record().epoch > 2);
    assert!(!runs(&destination.finish().1.built.unwrap()));
}

#[test]
fn a_full_disk_on_either_side_is_found_while_the_guest_runs() {
    let (client, server) = tls();
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
    type Disk = fn(&JournalDirectory) -> Journal;
    const PREPARED: State = State::Destination(DestinationRecord::Prepared);
    const COMMITTING: State = State::Source(SourceRecord::Committing);
    let full: Disk = |scratch| scratch.on(FailingDisk(None));
    let unprepared: Disk = |scratch| scratch.on(FailingDisk(Some(PREPARED)));
    let uncommitting: Disk = |scratch| scratch.on(FailingDisk(Some(COMMITTING)));
    // The peer block must be written too, because later processes of either side identify the peer
    // by it.
    let peerless: Disk = |scratch| scratch.on(PeerlessDisk);
    for (source, destination) in [
        (full, JournalDirectory::journal as Disk),
        (JournalDirectory::journal, full),
        (JournalDirectory::journal, unprepared),
        (uncommitting, JournalDirectory::journal),
        (peerless, JournalDirectory::journal),
        (JournalDirectory::journal, peerless),
    ] {
        let journal = destination(&there);
        let receiving = Destination::start(&server, journal, TestBuilder::default());
        let vm = running();
        let error = send(&vm, receiving.address, &client, source(&here), &|_| ()).unwrap_err();
        assert_eq!(
            (error.code(), error.vm),
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
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
    let disk = FailingDisk(Some(State::Destination(DestinationRecord::Running)));
    let destination = Destination::start(&server, there.on(disk), TestBuilder::default());
    let vm = running();
    let error = send(&vm, destination.address, &client, here.journal(), &|_| ()).unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
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
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
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
    // The journal shows that the VM's process is alive, whether or not that process answers
    // inquiries.
    assert!(there.journal().list().unwrap()[0].lives);
    received.answering.unwrap().stop();
    assert!(there.journal().list().unwrap()[0].lives);
}

#[test]
fn i1_a_vm_that_has_moved_on_is_not_taken_for_dead() {
    let (client, server) = tls();
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
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
    // A later migration moves the VM elsewhere, and the process ends.
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

/// If the listener fails, the process still holds the lock of its record, and `moved_on` can still
/// write the record.
#[test]
fn i1_a_vm_moves_on_after_its_listener_has_failed() {
    let (client, server) = tls();
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let same = TcpStream::from(OwnedFd::from(listener.try_clone().unwrap()));
    let journal = there.journal();
    let destination = Destination::on(
        listener,
        &server,
        Box::new(move || journal.clone()),
        TestBuilder::default(),
        Box::new(|_| ()),
    );
    let disk = FailingDisk(Some(State::Source(SourceRecord::Released)));
    send(&running(), address, &client, here.on(disk), &|_| ()).unwrap();
    let received = destination.finish().0.pop().unwrap().unwrap();
    let answering = received.answering.unwrap();
    same.shutdown(Shutdown::Both).unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while !answering.is_over() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(there.journal().list().unwrap()[0].lives);
    answering.moved_on().unwrap();
    let left = there.journal().list().unwrap();
    assert_eq!(
        there.states(),
        [State::Destination(DestinationRecord::MovedOn)]
    );
    assert!(!left[0].lives);
}

#[test]
fn i5_the_attempt_after_one_that_failed_moves_the_vm() {
    let (client, server) = tls();
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
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
    // The destination has removed its record of the first session, because a source that starts
    // another session sends no more inquiries about the first.
    assert_eq!(there.states(), []);
}

/// Collects the states of the records that are written, and the peer blocks.
struct NotingDisk(Arc<Mutex<Vec<String>>>);

impl Disk for NotingDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        if let Ok(bytes) = bytes.try_into() {
            let what = match decode(bytes) {
                Ok((record, _)) => record.state.to_string(),
                Err(SlotError::Foreign) => "peer block".into(),
                Err(error) => panic!("{error}"),
            };
            self.0.lock().unwrap().push(what);
        }
        file.write_all_at(bytes, offset)
    }
}

#[test]
fn one_record_is_written_while_the_guest_is_paused() {
    let (client, server) = tls();
    for remembered in [false, true] {
        let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
        let order = Arc::<Mutex<Vec<String>>>::default();
        let journal = |scratch: &JournalDirectory| {
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
                "peer block",
                "peer block",
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

#[test]
fn i1_a_destination_that_was_started_again_answers_what_its_journal_says() {
    let (client, server) = tls();
    let there = JournalDirectory::new();
    let journal = there.journal();
    let record = |number: u8, peer: &Principal, state| {
        let state = State::Destination(state);
        let record = Record {
            state,
            session: [number; 16],
            attempt: 1,
            epoch: 1,
            vm_uuid: [7; 16],
            vm_name: "test".into(),
            peer: "for people".into(),
            owner: String::new(),
            started_ms: 1,
            written_ms: 1,
        };
        let mut session = SessionJournal::create(&journal, record).unwrap();
        session.write_peer(peer).unwrap();
        session.write(state).unwrap();
        session
    };
    let source = &principal_of(&server, &client);
    let stranger = &Principal::Certificate([5; 32]);
    drop(record(1, source, DestinationRecord::Prepared));
    drop(record(2, source, DestinationRecord::Running));
    drop(record(3, source, DestinationRecord::Aborted));
    drop(record(5, stranger, DestinationRecord::Prepared));
    drop(record(7, source, DestinationRecord::MovedOn));
    // The process of session 6 is alive, so no other process answers inquiries about this session.
    let _held = record(6, source, DestinationRecord::Running);
    // Ask a host that waits for a VM, and a host that only answers.
    let waiting = Destination::start(&server, there.journal(), TestBuilder::default());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let answering = listener.local_addr().unwrap();
    let stop = Cancel::new();
    let (same, stopped) = (there.journal(), stop.clone());
    let thread = std::thread::spawn(move || {
        let options = destination::Options::builder()
            .journal(same)
            .build()
            .unwrap();
        let incoming = Incoming::builder(listener, &server).options(options);
        incoming.cancel(&stopped).answer().unwrap();
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
    // The answering host recorded *aborted* before it sent the answer.
    let first = SessionJournal::take(&journal, [1; 16], Role::Destination).unwrap();
    let aborted = State::Destination(DestinationRecord::Aborted);
    assert_eq!(first.record().state, aborted);
    // Session 5 belongs to another peer, so the inquiry has not changed its record.
    let fifth = SessionJournal::take(&journal, [5; 16], Role::Destination).unwrap();
    let prepared = State::Destination(DestinationRecord::Prepared);
    assert_eq!(fifth.record().state, prepared);
}
