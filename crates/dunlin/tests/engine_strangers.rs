//! Only a session's peer may query, settle or release the session: not another authorised host, and
//! not a host of the same name with a certificate from another authority. A host with a renewed
//! certificate is the same peer.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin::Incoming;
use dunlin::engine::destination::{self, DestinationEvent};
use dunlin::engine::journal::{
    DestinationRecord, Journal, Record, RecordedPeer, Role, SessionId, SessionJournal,
    SourceRecord, State,
};
use dunlin::engine::source::{Doubt, VmLocation};
use dunlin::engine::vmm::FaultCode;
use dunlin::engine::{Cancel, Event, Host, StandardHost, VmIs};
use dunlin::lane::identity::Identity;
use dunlin::lane::peers::{Peers, Principal};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{Crypto, Provider};
use dunlin_proto::control::{Message, Verdict};
use dunlin_proto::negotiate::{LaneSecurity, Opening};
use dunlin_test_support::engine::doubt::{
    Destination, JournalDirectory, Relay, TO_SOURCE, ask, inquirer, inquirer_of, principal_of,
    running, runs, send_with,
};
use dunlin_test_support::engine::peer::{Peer, SESSION};
use dunlin_test_support::engine::{Receiving, TestBuilder, verified};
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, load, names};

const OTHER: &str = "other.test";

fn crypto() -> Crypto {
    Crypto::with(Provider::built_in()[0])
}

fn client(identity: &Identity, peers: Peers) -> ClientTls {
    identity.client(&crypto(), peers).unwrap()
}

fn server(identity: &Identity, peers: Peers) -> ServerTls {
    identity.server(&crypto(), peers).unwrap()
}

/// Two authorities, which the hosts of the site trust.
struct Site {
    ours: Authority,
    theirs: Authority,
}

impl Site {
    fn new() -> Self {
        Self {
            ours: Authority::named("one"),
            theirs: Authority::named("two"),
        }
    }

    fn host(&self, name: &str) -> Identity {
        load(&self.ours.host_trusting(&[name], &[&self.theirs]))
    }

    /// A host with a certificate from the authority `theirs`.
    fn twin(&self, name: &str) -> Identity {
        load(&self.theirs.host_trusting(&[name], &[&self.ours]))
    }
}

/// Returns the only session that is recorded in a journal.
fn session_of(scratch: &JournalDirectory) -> SessionId {
    let entries = scratch.journal().list().unwrap();
    assert_eq!(entries.len(), 1);
    entries[0].session
}

/// A host that answers inquiries and receives no VM.
struct Answerer {
    address: SocketAddr,
    stop: Cancel,
    thread: Option<JoinHandle<()>>,
}

impl Answerer {
    fn start(tls: &ServerTls, journal: Journal) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Cancel::new();
        let (tls, stopped) = (tls.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let options = destination::Options::builder()
                .journal(journal)
                .build()
                .unwrap();
            let incoming = Incoming::builder(listener, &tls).options(options);
            incoming.cancel(&stopped).answer().unwrap();
        });
        Self {
            address,
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Answerer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Writes the record of a destination process that has died.
fn leave(journal: &Journal, session: SessionId, state: DestinationRecord, peer: &Principal) {
    let state = State::Destination(state);
    let record = Record {
        state,
        session,
        attempt: 1,
        epoch: 1,
        vm_uuid: [7; 16],
        vm_name: "test".into(),
        peer: format!("DNS {SOURCE}"),
        owner: String::new(),
        started_ms: 1,
        written_ms: 1,
    };
    let mut session = SessionJournal::create(journal, record).unwrap();
    session.write_peer(peer).unwrap();
    session.write(state).unwrap();
}

/// The VM has arrived and its process is alive; the source has received no answer.
///
/// Claim A9 of docs/security.
#[test]
fn i1_another_authorised_host_neither_asks_about_nor_releases_a_vm_that_has_arrived() {
    let site = Site::new();
    let tls = server(&site.host(DESTINATION), names(&[SOURCE, OTHER]));
    let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let relay = Arc::new(Relay::start(listener.local_addr().unwrap()));
    let same = Arc::clone(&relay);
    let at = move |event: &DestinationEvent| match event {
        DestinationEvent::Committed => same.swallow(TO_SOURCE),
        DestinationEvent::Running { .. } => {
            same.refuse();
            same.cut(true);
        }
        _ => {}
    };
    let journal = there.journal();
    let journals = Box::new(move || journal.clone());
    let destination = Destination::on(
        listener,
        &tls,
        journals,
        TestBuilder::default(),
        Box::new(at),
    );
    let address = destination.address;
    let to = names(&[DESTINATION]);
    let source = client(&site.host(SOURCE), to.clone());
    let options = verified(2)
        .to_builder()
        .journal(here.journal())
        .doubt_limit(Duration::from_secs(1))
        .build()
        .unwrap();
    let vm = running();
    let error = send_with(&vm, relay.address, &source, &options, &|_| ()).unwrap_err();
    assert_eq!(error.vm, VmIs::InDoubt);
    let session = session_of(&here);
    let (mut ended, builder) = destination.finish();
    let answering = ended.pop().unwrap().unwrap().answering.unwrap();
    for stranger in [site.host(OTHER), site.twin(SOURCE)] {
        let stranger = client(&stranger, to.clone());
        let refused = inquirer(address, &stranger, session).err();
        assert_eq!(refused, Some(FaultCode::WrongIdentity));
    }
    let running = State::Destination(DestinationRecord::Running);
    assert_eq!(there.states(), [running]);
    assert!(!answering.is_over());
    // The source, with a renewed certificate, asks about a session of which the destination has no
    // record.
    let renewed = client(&site.host(SOURCE), to);
    assert_eq!(ask(address, &renewed, [1; 16]), Some(Verdict::NoRecord));
    let mut peer = inquirer(address, &renewed, session).unwrap();
    peer.send(&Message::Inquire { attempt: 1 });
    let answer = peer.receive();
    let verdict = Verdict::Running;
    let attempt = 1;
    assert_eq!(answer, Some(Message::Answer { attempt, verdict }));
    peer.send(&Message::Release);
    let until = Instant::now() + Duration::from_secs(10);
    while !answering.is_over() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(there.states(), []);
    assert!(runs(&builder.built.unwrap()) && !runs(&vm));
}

/// Tests a session that has its control lane, and a session that has lost it.
#[test]
fn i1_another_authorised_host_neither_resumes_nor_displaces_a_session() {
    let site = Site::new();
    let tls = server(&site.host(DESTINATION), names(&[SOURCE, OTHER]));
    let of = |identity: Identity| client(&identity, names(&[DESTINATION]));
    let options = destination::Options::builder()
        .control_limit(Duration::from_secs(30))
        .build()
        .unwrap();
    let receiving = Receiving::start(&tls, &options, TestBuilder::default());
    let to = receiving.address;
    let (source, _) = Peer::accepted(to, &of(site.host(SOURCE)));
    let strangers = [site.host(OTHER), site.twin(SOURCE)].map(of);
    for open in [true, false] {
        if !open {
            source.stream.shutdown();
            receiving.await_event(|event| matches!(event, DestinationEvent::ControlLost { .. }));
        }
        for stranger in &strangers {
            let refused = inquirer(to, stranger, SESSION).err();
            assert_eq!(refused, Some(FaultCode::WrongIdentity), "{open}");
            // The stranger offers a session of its own, which would replace the running one.
            match Peer::source_of(to, stranger, LaneSecurity::Tls, [8; 16]).1 {
                Opening::Refuse(_, refusal) => assert_eq!(refusal.fault, FaultCode::Busy),
                other => panic!("{other:?}"),
            }
        }
    }
    let renewed = of(site.host(SOURCE));
    // If the session's own peer repeats its first offer, with the same epoch, the offer is refused
    // as malformed.
    match Peer::source(to, &renewed, LaneSecurity::Tls).1 {
        Opening::Refuse(_, refusal) => assert_eq!(refusal.fault, FaultCode::Malformed),
        other => panic!("{other:?}"),
    }
    let of_another_attempt = inquirer_of(to, &renewed, SESSION, 2).err();
    assert_eq!(of_another_attempt, Some(FaultCode::Malformed));
    let _resumed = inquirer(to, &renewed, SESSION).unwrap();
    receiving.await_event(|event| matches!(event, DestinationEvent::ControlResumed));
    receiving.finish(true).0.map(|_| ()).unwrap_err();
}

/// The destination's process has died, and another process answers from the journal.
///
/// Claim A10 of docs/security.
#[test]
fn i1_a_journal_answers_the_peer_of_its_session_alone() {
    let site = Site::new();
    let to = || names(&[DESTINATION]);
    let (source, renewed) = (site.host(SOURCE), site.host(SOURCE));
    // These hosts have a certificate from an authority that the destination does not trust.
    let third = Authority::named("three");
    let pinned = [&[][..], &[SOURCE]].map(|names| load(&third.host_trusting(names, &[&site.ours])));
    let pins = pinned.each_ref().map(|one| one.summary().unwrap().pin);
    let allowed = [SOURCE, OTHER]
        .map(str::to_owned)
        .into_iter()
        .chain(pins.map(|pin| pin.to_string()))
        .map(|peer| peer.parse().unwrap());
    let tls = server(&site.host(DESTINATION), allowed.collect());
    let there = JournalDirectory::new();
    let journal = there.journal();
    let answerer = Answerer::start(&tls, there.journal());
    let ask = |identity: &Identity, session: u8| {
        ask(answerer.address, &client(identity, to()), [session; 16])
    };
    let principal = principal_of(&tls, &client(&source, to()));
    assert!(matches!(&principal, Principal::Name { name, .. } if name == SOURCE));
    let by_pin = |at: usize| principal_of(&tls, &client(&pinned[at], to()));
    let running = DestinationRecord::Running;
    leave(&journal, [1; 16], running, &principal);
    leave(&journal, [2; 16], running, &by_pin(0));
    leave(&journal, [3; 16], running, &by_pin(1));
    // A record as commit ca8670a wrote it: without a peer block.
    leave(&journal, [4; 16], running, &principal);
    let legacy = there
        .path()
        .join(format!("{}.destination", "04".repeat(16)));
    let file = File::options().write(true).open(legacy).unwrap();
    file.set_len(8192).unwrap();
    let died = Some(Verdict::RanThenDied);
    for (who, identity, may) in [
        ("itself", &source, [1, 4].as_slice()),
        ("renewed", &renewed, &[1, 4]),
        ("another name", &site.host(OTHER), &[]),
        // The record of session 4 has the peer's names but not its authority.
        (
            "the same name of another authority",
            &site.twin(SOURCE),
            &[4],
        ),
        ("pinned, without names", &pinned[0], &[2]),
        ("pinned, with the source's name", &pinned[1], &[3]),
    ] {
        for session in 1..=4 {
            let expected = died.filter(|_| may.contains(&session));
            assert_eq!(ask(identity, session), expected, "{who}, session {session}");
        }
    }
    for session in 1..=4 {
        let session = SessionJournal::take(&journal, [session; 16], Role::Destination).unwrap();
        assert_eq!(session.record().state, State::Destination(running));
    }
}

/// After *commit*, another authorised host listens at the destination's address. It answers that
/// the attempt was aborted, although the VM runs at the destination.
///
/// Claim A10 of docs/security.
#[test]
fn i1_a_source_in_doubt_believes_its_destination_alone_in_the_process_and_after_it() {
    let site = Site::new();
    let tls = |identity: &Identity| server(identity, names(&[SOURCE]));
    for (who, stranger) in [
        ("another name", Some(site.host(OTHER))),
        (
            "the same name of another authority",
            Some(site.twin(DESTINATION)),
        ),
        ("a renewed certificate", None),
    ] {
        let is_stranger = stranger.is_some();
        let impostor = tls(&stranger.unwrap_or_else(|| site.host(DESTINATION)));
        let (here, there) = (JournalDirectory::new(), JournalDirectory::new());
        let elsewhere = JournalDirectory::new();
        let source = client(&site.host(SOURCE), names(&[DESTINATION, OTHER]));
        let destination = Destination::start(
            &tls(&site.host(DESTINATION)),
            there.journal(),
            TestBuilder::default(),
        );
        let relay = Relay::start(destination.address);
        let journal = elsewhere.journal();
        let answerer = Answerer::start(&impostor, elsewhere.journal());
        let inquiries = Mutex::new(0);
        let at = |event: &Event| match event {
            Event::Committing => {
                let us = principal_of(&impostor, &source);
                leave(
                    &journal,
                    session_of(&here),
                    DestinationRecord::Prepared,
                    &us,
                );
                relay.redirect(answerer.address);
                relay.swallow(TO_SOURCE);
            }
            Event::Committed => relay.cut(true),
            Event::InDoubt { .. } => *inquiries.lock().unwrap() += 1,
            _ => {}
        };
        let options = verified(2)
            .to_builder()
            .journal(here.journal())
            .doubt_limit(Duration::from_secs(1))
            .build()
            .unwrap();
        let vm = running();
        let error = send_with(&vm, relay.address, &source, &options, &at).unwrap_err();
        assert!(*inquiries.lock().unwrap() > 0, "{who}");
        if !is_stranger {
            assert_eq!(error.vm, VmIs::AtSource, "{who}");
            assert!(vm.goes_on());
            continue;
        }
        assert_eq!(error.vm, VmIs::InDoubt, "{who}: {error}");
        assert!(!runs(&vm), "{who}");
        // The source's process dies, and a restarted process sends the inquiry.
        drop(error);
        let session = session_of(&here);
        let committing = State::Source(SourceRecord::Committing);
        assert_eq!(here.states(), [committing]);
        let host: Arc<dyn Host> = Arc::new(StandardHost);
        let ask = |to: &Answerer| {
            relay.redirect(to.address);
            let mut doubt = Doubt::taken_over(&here.journal(), session, false).unwrap();
            doubt.ask(None, &source, &options, &host).unwrap()
        };
        let VmLocation::InDoubt(why) = ask(&answerer) else {
            panic!("{who}");
        };
        // The reason names the certificate of the host that answered, not a timeout.
        assert!(why.contains("sha256"), "{who}: {why}");
        assert_eq!(here.states(), [committing], "{who}");
        // Then the destination itself answers, with a renewed certificate.
        drop(destination.finish());
        let renewed = Answerer::start(&tls(&site.host(DESTINATION)), elsewhere.journal());
        assert_eq!(ask(&renewed), VmLocation::AtSource, "{who}");
        let record = here.journal().list().unwrap().pop().unwrap();
        assert!(matches!(
            record.peer,
            RecordedPeer::Known(Principal::Name { .. })
        ));
    }
}
