//! Tests that the destination refuses false openings, and a second source.

use std::net::TcpListener;
use std::time::Duration;

use dunlin::engine::destination::DestinationEvent;
use dunlin::engine::vmm::FaultCode;
use dunlin::lane::control;
use dunlin_proto::control::Message;
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, Selection, VERSIONS, VersionRange,
};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::engine::*;
use dunlin_test_support::hostile::*;
use dunlin_test_support::lane::{Authority, SOURCE, soon};

/// Claim P3 of docs/security.
#[test]
fn i7_openings_that_lie_begin_no_session_and_the_next_one_does() {
    let _alone = alone();
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let before = Before::now();
    let options = impatient();
    let receiving = Receiving::on(listener, &server, &options, TestBuilder::default());
    let to = receiving.address;
    let honest = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session: SESSION,
        attempt: 1,
        epoch: 1,
    };
    let selection = Selection {
        version: 1,
        features: Features::NONE,
        security: LaneSecurity::Tls,
    };
    // For each false opening: the message, the expected fault, and words that only this error
    // contains.
    let lies = [
        (
            Opening::Offer(Offer {
                versions: VersionRange { min: 9, max: 9 },
                ..honest.clone()
            }),
            FaultCode::VersionMismatch,
            "the source speaks versions 9",
        ),
        (
            Opening::Offer(Offer {
                required: Features::from_bits(1 << 60),
                ..honest.clone()
            }),
            FaultCode::FeatureMissing,
            "the source requires",
        ),
        (
            Opening::Offer(Offer {
                security: LaneSecurity::Plain,
                ..honest.clone()
            }),
            FaultCode::SecurityNotAgreed,
            "plain lanes",
        ),
        (
            Opening::Select(selection),
            FaultCode::Malformed,
            "expected an offer as the first message",
        ),
    ];
    for (opening, fault, text) in lies {
        let stream = std::net::TcpStream::connect(to).unwrap();
        let stream = control::client(stream, &client, soon()).unwrap();
        let mut bytes = Vec::new();
        opening.encode(&mut bytes).unwrap();
        stream.send(&bytes).unwrap();
        let answer = read_opening(&stream);
        let Opening::Refuse(versions, refusal) = answer else {
            panic!("{opening:?} was answered by {answer:?}")
        };
        assert_eq!((versions, refusal.fault), (VERSIONS, fault), "{refusal}");
        assert!(refusal.text.contains(text), "{refusal}");
        // The destination's own event has the same text and also the peer's name.
        receiving.await_event(|event| {
            matches!(event, DestinationEvent::Rejected { reason }
                if reason.contains(SOURCE) && reason.contains(text))
        });
    }
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    let (report, _) = send(
        &vm,
        &to.to_string(),
        &client,
        &verified(2),
        &dunlin::engine::Cancel::new(),
    );
    assert_eq!(report.unwrap().digests_equal, Some(true));
    receiving.finish(false).0.unwrap();
    before.settled("offer: newer, with more, plain, or none at all");
}

/// A second control lane for the same session is refused, and the first session continues. The
/// second lane comes from the same host, or from a host of the same name with a certificate from
/// another authority.
#[test]
fn i1_a_second_session_of_the_same_name_is_turned_away() {
    let _alone = alone();
    let (authority, other) = (Authority::named("one"), Authority::named("two"));
    let (client, server) = trusting(&authority, &other);
    let (twin, _) = trusting(&other, &authority);
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let before = Before::now();
    let options = impatient();
    let receiving = Receiving::on(listener, &server, &options, TestBuilder::default());
    let victim = Victim {
        to: receiving.address,
        tls: &client,
    };
    let mut liar = victim.liar();
    for (who, epoch) in [(&client, 0), (&client, 1), (&twin, 1), (&twin, 2)] {
        let stream = std::net::TcpStream::connect(victim.to).unwrap();
        let stream = control::client(stream, who, soon()).unwrap();
        let offer = Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::NONE,
            security: LaneSecurity::Tls,
            session: SESSION,
            attempt: 1,
            epoch,
        };
        let mut bytes = Vec::new();
        offer.encode(&mut bytes).unwrap();
        stream.send(&bytes).unwrap();
        let mut answer = [0; 16];
        stream.receive_exact(&mut answer, soon()).unwrap();
        assert_eq!(answer[8], 3, "epoch {epoch} was let in");
    }
    liar.frame(&zero_chunk(0, 0, 0));
    liar.conclude(1, 1);
    liar.await_ready();
    liar.peer.send(&Message::Commit { run: false });
    assert!(matches!(liar.peer.receive(), Some(Message::Running { .. })));
    liar.peer.send(&Message::Release);
    let (result, builder, events) = receiving.finish(false);
    assert!(!result.unwrap().runs);
    drop(liar);
    assert_eq!(runs(&builder.built.unwrap()), 0);
    let turned_away = |event: &&DestinationEvent| matches!(event, DestinationEvent::Rejected { reason } if reason.contains(SOURCE));
    assert_eq!(events.iter().filter(turned_away).count(), 4);
    before.settled("offer: a second session of the same name");
}

#[test]
fn i7_a_second_source_is_refused_as_busy() {
    let _alone = alone();
    let (client, server) = tls();
    let options = impatient();
    let receiving = Receiving::start(&server, &options, TestBuilder::default());
    let to = receiving.address.to_string();
    let vm = TestVm::new(4 << 20);
    vm.fill(4 << 20);
    let (held, release) = (
        std::sync::mpsc::channel::<()>(),
        std::sync::mpsc::channel::<()>(),
    );
    let (began, go_on) = (held.0, release.1);
    *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
        if step == "hold" {
            began.send(()).unwrap();
            go_on.recv().unwrap();
        }
    }));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            send(
                &vm,
                &to,
                &client,
                &verified(2),
                &dunlin::engine::Cancel::new(),
            )
        });
        held.1.recv().unwrap();
        let second = TestVm::new(4 << 20);
        second.start(16, Duration::from_micros(100));
        let (result, _) = send(
            &second,
            &to,
            &client,
            &verified(2),
            &dunlin::engine::Cancel::new(),
        );
        let error = result.unwrap_err();
        assert_eq!(
            (error.code(), error.vm),
            (FaultCode::Busy, dunlin::engine::VmIs::AtSource),
            "{error}"
        );
        assert!(second.goes_on());
        release.0.send(()).unwrap();
        assert_eq!(first.join().unwrap().0.unwrap().digests_equal, Some(true));
    });
    let (result, _, events) = receiving.finish(false);
    result.unwrap();
    let turned_away = |event: &DestinationEvent| matches!(event, DestinationEvent::Rejected { reason } if reason.contains(SOURCE));
    assert!(events.iter().any(turned_away), "{events:?}");
}
