//! Recorded sessions stand in for peers of old releases. The current code must still work with
//! them.
//!
//! `tests/recorded` has one session for each supported version, recorded with
//!
//! ```text
//! DUNLIN_RECORD=version-1 cargo test --package dunlin --test recorded
//! ```
//! Recordings never change. A new version gets a new recording.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dunlin::engine::Cancel;
use dunlin::engine::destination::Options;
use dunlin::engine::vmm::RunState;
use dunlin_test_support::engine::{
    Receiving, TestBuilder, TestVm, client_of, send, server_of, state, tls, verified,
};
use dunlin_test_support::lane::{Authority, SOURCE};
use dunlin_test_support::recorded::relay::Relay;
use dunlin_test_support::recorded::{Entry, Side, from_text, player, to_text};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded")
}

/// Every recording, with its name.
fn recordings() -> Vec<(String, Vec<Entry>)> {
    let mut found = Vec::new();
    for file in std::fs::read_dir(directory()).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        found.push((name, from_text(&text)));
    }
    assert!(!found.is_empty());
    found
}

/// The VM of the recordings: two of 64 pages have content. It counts as running but writes nothing,
/// so that every session is the same.
fn vm() -> Arc<TestVm> {
    let vm = TestVm::new(64 * 4096);
    vm.fill(2 * 4096);
    *vm.state.lock().unwrap() = RunState::Running;
    vm
}

fn kinds(entries: &[Entry], from: Side) -> Vec<&str> {
    let said = entries.iter().filter(|entry| entry.from == from);
    let mut kinds: Vec<_> = said.map(|entry| &*entry.kind).collect();
    kinds.retain(|kind| !["ack", "ping", "pong"].contains(kind));
    kinds
}

/// Records a complete session of the current code.
fn record() -> Vec<Entry> {
    let authority = Authority::new();
    let (near, far) = (client_of(&authority, SOURCE), server_of(&authority));
    let receiving = Receiving::start(&far, &Options::default(), TestBuilder::default());
    let relay = Relay::start(receiving.address, far.clone(), near.clone());
    let vm = vm();
    let to = relay.address.to_string();
    let (sent, _) = send(&vm, &to, &near, &verified(1), &Cancel::new());
    sent.unwrap();
    let (received, _, _) = receiving.finish(false);
    received.unwrap();
    relay.entries()
}

#[test]
fn a_session_of_today_is_recorded_whole() {
    let entries = record();
    let source = kinds(&entries, Side::Source);
    println!("{source:?}\n{:?}", kinds(&entries, Side::Destination));
    for kind in [
        "offer",
        "describe",
        "lane-open",
        "chunk",
        "mark",
        "end",
        "section",
        "final",
        "commit",
        "release",
    ] {
        assert!(source.contains(&kind), "{kind}");
    }
    let destination = kinds(&entries, Side::Destination);
    assert_eq!(
        destination,
        ["select", "accept", "lane-up", "ready", "running"]
    );
    let text = to_text(&entries);
    assert_eq!(from_text(&text), entries);
    if let Some(name) = std::env::var_os("DUNLIN_RECORD") {
        let mut path = directory().join(name);
        path.set_extension("txt");
        std::fs::write(path, text).unwrap();
    }
}

#[test]
fn i3_a_recorded_source_moves_its_vm_to_the_destination_of_today() {
    for (name, recording) in recordings() {
        println!("{name}: {} messages", recording.len());
        let (near, far) = tls();
        let receiving = Receiving::start(&far, &Options::default(), TestBuilder::default());
        player::source(&recording, receiving.address, &near);
        let (received, builder, events) = receiving.finish(false);
        let received = received.unwrap_or_else(|error| panic!("{name}: {error:?}\n{events:?}"));
        assert!(received.runs, "{name}");
        let arrived = builder.built.unwrap();
        assert_eq!(arrived.digest(), vm().digest(), "{name}");
        assert_eq!(*arrived.loaded.lock().unwrap(), state(), "{name}");
        assert_eq!(
            arrived.calls(),
            ["load", "acquire", "resume", "announce"],
            "{name}"
        );
    }
}

#[test]
fn i1_the_source_of_today_moves_its_vm_to_a_recorded_destination() {
    for (name, recording) in recordings() {
        let (near, far) = tls();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let to = listener.local_addr().unwrap().to_string();
        let played = recording.clone();
        let playing = std::thread::spawn(move || player::destination(&played, listener, &far));
        let vm = vm();
        let (sent, events) = send(&vm, &to, &near, &verified(1), &Cancel::new());
        let report = sent.unwrap_or_else(|error| panic!("{name}: {error:?}\n{events:?}"));
        playing.join().unwrap();
        assert!(report.runs, "{name}");
        assert_eq!(report.digests_equal, Some(true), "{name}");
        assert_eq!(vm.calls().last(), Some(&"destroy"), "{name}");
    }
}
