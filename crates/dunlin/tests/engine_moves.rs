//! Tests whole migrations between two threads, with real lanes, real TLS, ordinary memory and a
//! guest that writes.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dunlin::Migration;
use dunlin::engine::destination::{self, DestinationEvent};
use dunlin::engine::source::{self, AtTimeLimit, LaneSecurity, Resolution};
use dunlin::engine::vmm::{FaultCode, Refusal, RunState};
use dunlin::engine::{Cancel, Event, VmIs};
use dunlin_test_support::engine::{
    Moved, Receiving, Scan, TestBuilder, TestVm, run, send_observed, state, tls, verified,
};
use vm_memory::{Bytes, GuestAddress};

fn moved(vm: &Arc<TestVm>, options: &source::Options, builder: TestBuilder) -> Moved {
    let (client, server) = tls();
    let destination = destination::Options::default();
    run(
        vm,
        (&client, &server),
        options,
        &destination,
        builder,
        &Cancel::new(),
    )
}

/// A VM with memory content and a guest that writes.
fn running(bytes: usize) -> Arc<TestVm> {
    let vm = TestVm::new(bytes);
    vm.fill(bytes / 4);
    vm.start(500, Duration::from_micros(50));
    vm
}

#[test]
fn i3_a_running_vm_arrives_byte_for_byte_over_1_to_8_lanes() {
    for lanes in [1, 2, 3, 8] {
        let vm = TestVm::new(48 << 20);
        vm.fill(16 << 20);
        vm.start(2000, Duration::from_micros(20));
        let moved = moved(&vm, &verified(lanes), TestBuilder::default());
        let report = moved.source.unwrap();
        let received = moved.destination.unwrap();
        let built = moved.builder.built.unwrap();
        assert_eq!(report.digests_equal, Some(true));
        assert_eq!(vm.digest(), built.digest());
        assert_eq!(*built.loaded.lock().unwrap(), state());
        assert!(received.runs && report.runs);
        assert_eq!(report.lanes.len(), usize::from(lanes));
        assert!(vm.writes.load(Ordering::SeqCst) > 0);
        assert_eq!(
            vm.calls(),
            ["describe", "pause", "deactivate", "save", "hold", "destroy"]
        );
        assert_eq!(built.calls(), ["load", "acquire", "resume", "announce"]);
        // The counters of the source and of the destination must agree.
        let traffic = report.traffic;
        assert_eq!(traffic.raw_pages + traffic.zero_pages, received.pages);
    }
}

#[test]
fn i3_a_page_that_was_something_and_becomes_zero_arrives_as_zero() {
    const PAGE: GuestAddress = GuestAddress(7 * 4096);
    let vm = TestVm::with_ranges(&[
        (GuestAddress(0), 1 << 20),
        (GuestAddress(3 << 20), 4096),
        (GuestAddress(1 << 32), 2 << 20),
    ]);
    vm.fill(1 << 20);
    *vm.state.lock().unwrap() = RunState::Running;
    let again = Arc::downgrade(&vm);
    // During the pause, after the first iteration, the VMM writes zeros to one page and other bytes
    // to a hole.
    *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
        if step == "pause" {
            let memory = Arc::clone(&again.upgrade().unwrap().memory);
            memory.write_slice(&[0; 4096], PAGE).unwrap();
            memory
                .write_obj(1_u8, GuestAddress((1 << 32) + (2 << 20) - 1))
                .unwrap();
        }
    }));
    let moved = moved(&vm, &verified(3), TestBuilder::default());
    assert_eq!(moved.source.unwrap().digests_equal, Some(true));
    let built = moved.builder.built.unwrap();
    let mut page = [1; 4096];
    built.memory.read_slice(&mut page, PAGE).unwrap();
    assert_eq!(page, [0; 4096]);
    let end = GuestAddress((1 << 32) + (2 << 20) - 1);
    assert_eq!(built.memory.read_obj::<u8>(end).unwrap(), 1);
    assert_eq!(built.digest(), vm.digest());
}

#[test]
fn i3_an_idle_vm_arrives_whatever_secures_its_lanes() {
    let (client, server) = tls();
    for security in [LaneSecurity::Tls, LaneSecurity::Plain] {
        for filled in [0, 4 << 20] {
            let vm = TestVm::new(16 << 20);
            vm.fill(filled);
            let options = verified(3).to_builder().security(security).build().unwrap();
            let allowing = destination::Options::builder()
                .allow_plain(true)
                .build()
                .unwrap();
            let builder = TestBuilder::default();
            let tls = (&client, &server);
            let moved = run(&vm, tls, &options, &allowing, builder, &Cancel::new());
            let report = moved.source.unwrap();
            assert_eq!(
                (report.digests_equal, report.security),
                (Some(true), security)
            );
        }
    }
}

/// Claim A8 of docs/security.
#[test]
fn i3_a_difference_planted_at_the_destination_is_found_and_the_vm_goes_on() {
    let vm = running(4 << 20);
    let builder = TestBuilder {
        planted: Some(Box::new(|vm| {
            vm.memory.write_obj(1_u8, GuestAddress(3 << 20)).unwrap();
        })),
        ..TestBuilder::default()
    };
    let moved = moved(&vm, &verified(2), builder);
    let error = moved.source.unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::VerificationFailed, VmIs::AtSource)
    );
    assert!(vm.goes_on());
    assert_eq!(
        vm.calls()[1..],
        ["pause", "deactivate", "save", "reactivate", "resume"]
    );
    assert_eq!(moved.builder.built.unwrap().calls(), ["load", "discard"]);
    assert_eq!(moved.destination.err().unwrap().vm, VmIs::AtSource);
}

/// Zero pages take no payload, so a chunk with zero pages can contain more than 64 pages. Each
/// separate page takes a range in the chunk's header, and one header does not have room for all
/// ranges of this memory.
#[test]
fn i3_zeros_that_lie_apart_fill_a_chunk_up_to_its_ranges() {
    const APART: u64 = 384;
    const TURNS: u64 = 512;
    let vm = TestVm::new(8 << 20);
    for page in (1..TURNS).step_by(2) {
        let address = GuestAddress((1024 + page) * 4096);
        vm.memory.write_slice(&[7; 4096], address).unwrap();
    }
    // The scan reports every second page of the first part of memory. In the second part, zero
    // pages and other pages alternate.
    *vm.scan.lock().unwrap() = Some(|_, _, found| {
        for page in 0..APART {
            found(2 * page * 4096..(2 * page + 1) * 4096);
        }
        found(1024 * 4096..(1024 + TURNS) * 4096);
        Ok(())
    });
    let moved = moved(&vm, &verified(1), TestBuilder::default());
    let report = moved.source.unwrap();
    assert_eq!(report.digests_equal, Some(true));
    let traffic = &report.traffic;
    let pages = (traffic.raw_pages, traffic.zero_pages);
    assert_eq!(pages, (TURNS / 2, TURNS / 2 + APART));
    // Each page has its own range. If zero pages counted towards the limit of 64 pages per chunk,
    // there would be 14 chunks. `frames` also includes the lane's marks and its end, so there are
    // fewer chunks than `frames`.
    let frames = traffic.header_bytes / 24 - (APART + TURNS);
    assert!(frames < 14, "{frames}");
    assert_eq!(moved.builder.built.unwrap().digest(), vm.digest());
}

#[test]
fn i3_two_regions_of_one_file_arrive() {
    let vm = TestVm::in_one_file([1 << 20, 3 << 20]);
    // Both regions have content, at different offsets, and most of it is in the second region.
    vm.fill(8 << 10);
    let end = GuestAddress((1 << 32) + (2 << 20));
    vm.memory.write_slice(&[7; 12 << 10], end).unwrap();
    let moved = moved(&vm, &verified(2), TestBuilder::default());
    let report = moved.source.unwrap();
    assert_eq!(report.digests_equal, Some(true));
    // Two pages in each region from `fill`, and three pages at `end`. Holes are not sent.
    assert_eq!(report.iterations[0].pages, 7);
    let built = moved.builder.built.unwrap();
    for (start, bytes) in [(0, 1 << 20), (1 << 32, 3 << 20)] {
        let read = |vm: &TestVm| {
            let mut content = vec![0; bytes];
            let start = GuestAddress(start);
            vm.memory.read_slice(&mut content, start).unwrap();
            content
        };
        assert!(read(&vm) == read(&built), "{start:#x}");
    }
}

/// Each mistake in the sender's scan omits pages with content. The digests show the omission,
/// because they do not use that scan.
#[test]
fn i3_pages_that_the_senders_scan_forgets_are_found_by_the_digests() {
    use dunlin::engine::vmm::GuestMemory;
    let lies: [(&str, Scan); 4] = [
        ("nothing is populated", |_, _, _| Ok(())),
        (
            "the first populated range is dropped",
            |memory, index, found| {
                let mut dropped = false;
                memory.ranges_to_send(index, &mut |range| {
                    if std::mem::replace(&mut dropped, true) {
                        found(range);
                    }
                })
            },
        ),
        (
            "one page in the middle counts as swapped out",
            |memory, index, found| {
                memory.ranges_to_send(index, &mut |range| {
                    let middle = (range.start + range.end) / 2 / 4096 * 4096;
                    found(range.start..middle);
                    found(middle + 4096..range.end);
                })
            },
        ),
        (
            "the offset in the file is ignored",
            |memory, index, found| {
                // A scan that ignores a region's offset in the file begins at the file's start. The
                // first region begins there, so scan it instead of the region `index`.
                let length = memory.regions()[index].length;
                memory.ranges_to_send(0, &mut |range| {
                    if range.start < length {
                        found(range.start..range.end.min(length));
                    }
                })
            },
        ),
    ];
    for in_file in [false, true] {
        for (lie, scan) in lies {
            let vm = if in_file {
                TestVm::in_one_file([1 << 20, 3 << 20])
            } else {
                TestVm::with_ranges(&[(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 3 << 20)])
            };
            vm.fill(64 << 10);
            let beyond = GuestAddress((1 << 32) + (2 << 20));
            vm.memory.write_slice(&[7; 64 << 10], beyond).unwrap();
            let digest = vm.digest();
            *vm.scan.lock().unwrap() = Some(scan);
            let context = format!("{lie}, in a file: {in_file}");

            let verified = moved(&vm, &verified(2), TestBuilder::default());
            let error = verified.source.unwrap_err();
            let found = (error.code(), error.vm);
            let expected = (FaultCode::VerificationFailed, VmIs::AtSource);
            assert_eq!(found, expected, "{context}: {error}");
            assert_eq!(vm.digest(), digest, "{context}");

            // Without the comparison of digests, the migration succeeds and the VM has wrong
            // memory.
            let options = source::Options::builder().lanes(2).build().unwrap();
            let unverified = moved(&vm, &options, TestBuilder::default());
            assert_eq!(unverified.source.unwrap().digests_equal, None, "{context}");
            assert_ne!(
                unverified.builder.built.unwrap().digest(),
                digest,
                "{context}"
            );
        }
    }
}

#[test]
fn a_guest_that_its_owner_paused_arrives_paused() {
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    let moved = moved(&vm, &verified(2), TestBuilder::default());
    assert!(!moved.source.unwrap().runs);
    let received = moved.destination.unwrap();
    assert!(received.offered.paused && !received.runs);
    assert_eq!(moved.builder.built.unwrap().calls(), ["load", "acquire"]);
}

#[test]
fn a_guest_that_its_owner_pauses_on_the_way_arrives_paused() {
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(16, Duration::from_micros(100));
    let same = Arc::downgrade(&vm);
    *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
        if step == "describe" {
            *same.upgrade().unwrap().state.lock().unwrap() = RunState::Paused;
        }
    }));
    assert!(
        !moved(&vm, &verified(2), TestBuilder::default())
            .source
            .unwrap()
            .runs
    );
}

#[test]
fn i2_every_failing_step_at_the_source_leaves_the_vm_there() {
    for (step, calls) in [
        ("describe", &["describe"][..]),
        ("pause", &["describe", "pause", "resume"]),
        (
            "deactivate",
            &["describe", "pause", "deactivate", "reactivate", "resume"],
        ),
        (
            "save",
            &[
                "describe",
                "pause",
                "deactivate",
                "save",
                "reactivate",
                "resume",
            ],
        ),
        (
            "hold",
            &[
                "describe",
                "pause",
                "deactivate",
                "save",
                "hold",
                "reactivate",
                "resume",
            ],
        ),
    ] {
        let vm = running(4 << 20);
        *vm.fail.lock().unwrap() = Some(step);
        let moved = moved(&vm, &verified(2), TestBuilder::default());
        let error = moved.source.unwrap_err();
        assert_eq!(error.vm, VmIs::AtSource, "{step}: {error}");
        assert_eq!(vm.calls(), calls);
        assert!(vm.goes_on(), "{step}");
        assert_eq!(vm.throttle.load(Ordering::SeqCst), 0);
        let error = moved.destination.err().unwrap();
        assert_eq!(error.vm, VmIs::AtSource);
        if let Some(built) = moved.builder.built {
            assert_eq!(built.calls().last(), Some(&"discard"), "{step}");
            assert!(!built.calls().contains(&"resume"));
        }
    }
}

#[test]
fn i2_a_vm_that_cannot_be_resumed_is_reported_as_stuck() {
    for step in ["reactivate", "resume"] {
        let vm = running(4 << 20);
        let same = Arc::downgrade(&vm);
        *vm.fail.lock().unwrap() = Some("hold");
        *vm.hook.lock().unwrap() = Some(Box::new(move |now| {
            if now == "reactivate" {
                *same.upgrade().unwrap().fail.lock().unwrap() = Some(step);
            }
        }));
        let error = moved(&vm, &verified(2), TestBuilder::default())
            .source
            .unwrap_err();
        assert_eq!(error.vm, VmIs::StuckAtSource, "{step}");
        assert_eq!(vm.calls().contains(&"resume"), step == "resume");
    }
}

#[test]
fn i2_a_destination_that_refuses_or_cannot_load_gives_its_reason() {
    let refusing = TestBuilder {
        refuse: Some(Refusal {
            fault: FaultCode::NoMemory,
            text: "no huge pages are left".into(),
        }),
        ..TestBuilder::default()
    };
    let failing = TestBuilder {
        fail: Some("load"),
        ..TestBuilder::default()
    };
    for (builder, fault, words) in [
        (refusing, FaultCode::NoMemory, "no huge pages are left"),
        (failing, FaultCode::StateLoadFailed, "planted: load fails"),
    ] {
        let vm = running(4 << 20);
        let moved = moved(&vm, &verified(2), builder);
        let error = moved.source.unwrap_err();
        assert_eq!((error.code(), error.vm), (fault, VmIs::AtSource));
        assert!(error.what.contains(words), "{error}");
        assert_eq!(moved.destination.err().unwrap().code(), fault);
        assert!(vm.goes_on());
        if let Some(built) = moved.builder.built {
            assert_eq!(built.calls(), ["load", "discard"]);
        }
    }
}

#[test]
fn i2_a_vm_whose_disks_the_destination_cannot_take_goes_on_at_the_source() {
    let vm = running(4 << 20);
    let builder = TestBuilder {
        fail: Some("acquire"),
        ..TestBuilder::default()
    };
    let moved = moved(&vm, &verified(2), builder);
    let error = moved.source.unwrap_err();
    assert_eq!(error.vm, VmIs::AtSource, "{error}");
    assert!(error.what.contains("planted: acquire fails"), "{error}");
    assert_eq!(moved.destination.err().unwrap().vm, VmIs::AtSource);
    assert!(vm.goes_on());
    let built = moved.builder.built.unwrap();
    assert_eq!(built.calls(), ["load", "acquire", "discard"]);
}

#[test]
fn i1_a_vm_that_the_destination_cannot_start_runs_nowhere_until_an_operator_decides() {
    for resolution in [Resolution::RunHere, Resolution::Destroy] {
        let vm = running(4 << 20);
        let builder = TestBuilder {
            fail: Some("resume"),
            ..TestBuilder::default()
        };
        let moved = moved(&vm, &verified(2), builder);
        let error = moved.source.unwrap_err();
        assert_eq!(error.vm, VmIs::RanThenDied, "{error}");
        let there = moved.destination.err().unwrap();
        assert_eq!(there.vm, VmIs::RanThenDied);
        assert_eq!(vm.calls().last(), Some(&"hold"));
        assert_eq!(*vm.state.lock().unwrap(), RunState::Paused);
        let built = moved.builder.built.unwrap();
        assert_eq!(built.calls(), ["load", "acquire", "resume", "discard"]);
        assert_eq!(*built.state.lock().unwrap(), RunState::Paused);
        let mut doubt = error.doubt.unwrap();
        doubt.resolve(&*vm, resolution).unwrap();
        match resolution {
            Resolution::RunHere => assert!(vm.goes_on()),
            Resolution::Destroy => assert_eq!(vm.calls().last(), Some(&"destroy")),
        }
        // A doubt is resolved only once: a second decision has no effect.
        let calls = vm.calls();
        doubt.resolve(&*vm, Resolution::RunHere).unwrap();
        assert_eq!(vm.calls(), calls);
    }
}

#[test]
fn a_guest_that_powers_off_on_the_way_ends_the_migration_on_both_sides() {
    // The guest powers off when the source describes the VM, at the pause, or just before *commit*.
    for step in ["describe", "pause", "hold"] {
        let vm = running(8 << 20);
        let same = Arc::downgrade(&vm);
        *vm.hook.lock().unwrap() = Some(Box::new(move |now| {
            if now == step {
                let vm = same.upgrade().unwrap();
                vm.stop_writer();
                *vm.state.lock().unwrap() = RunState::PoweredOff;
            }
        }));
        let moved = moved(&vm, &verified(2), TestBuilder::default());
        let error = moved.source.unwrap_err();
        assert_eq!(
            (error.code(), error.vm),
            (FaultCode::GuestPoweredOff, VmIs::Gone),
            "{step}"
        );
        assert!(!vm.calls().contains(&"resume"));
        assert_eq!(vm.calls().contains(&"reactivate"), step == "hold");
        assert_eq!(
            moved.destination.err().unwrap().code(),
            FaultCode::GuestPoweredOff
        );
        assert_eq!(
            moved.builder.built.unwrap().calls().last(),
            Some(&"discard")
        );
    }
}

/// Cancels at `step` of the source's VM, and returns the result.
fn cancelled_at(step: &'static str) -> (Arc<TestVm>, Moved) {
    let (client, server) = tls();
    let vm = running(8 << 20);
    let cancel = Cancel::new();
    let same = cancel.clone();
    *vm.hook.lock().unwrap() = Some(Box::new(move |now| {
        if now == step {
            same.cancel();
        }
    }));
    let options = destination::Options::default();
    let builder = TestBuilder::default();
    let moved = run(
        &vm,
        (&client, &server),
        &verified(2),
        &options,
        builder,
        &cancel,
    );
    (vm, moved)
}

#[test]
fn i2_cancelled_at_any_time_before_commit_the_vm_goes_on() {
    for step in ["describe", "pause", "save", "hold"] {
        let (vm, moved) = cancelled_at(step);
        let error = moved.source.unwrap_err();
        assert_eq!(
            (error.code(), error.vm),
            (FaultCode::Cancelled, VmIs::AtSource),
            "{step}"
        );
        assert!(vm.goes_on(), "{step}");
        assert_eq!(
            moved.destination.err().unwrap().code(),
            FaultCode::Cancelled
        );
        if let Some(built) = moved.builder.built {
            assert_eq!(built.calls().last(), Some(&"discard"));
        }
    }
}

#[test]
fn i1_a_cancellation_after_commit_is_too_late() {
    let (client, server) = tls();
    let vm = running(8 << 20);
    let cancel = Cancel::new();
    let (warned, warning) = sync_channel(1);
    // When the destination acquires the disks, the source has sent *commit*. The hook waits until
    // the source has warned that the cancellation is too late.
    let (same, warning) = (cancel.clone(), Arc::new(Mutex::new(warning)));
    let builder = TestBuilder {
        planted: Some(Box::new(move |vm| {
            let (same, warning) = (same.clone(), Arc::clone(&warning));
            *vm.hook.lock().unwrap() = Some(Box::new(move |step| {
                if step == "acquire" {
                    same.cancel();
                    let warning = warning.lock().unwrap();
                    warning.recv_timeout(Duration::from_secs(5)).unwrap();
                }
            }));
        })),
        ..TestBuilder::default()
    };
    let options = destination::Options::default();
    let receiving = Receiving::start(&server, &options, builder);
    let to = receiving.address.to_string();
    let observe = |event: &Event| {
        if matches!(event, Event::Warning(text) if text.contains("too late")) {
            // Ignore the error if a warning is already in the channel: one warning is enough.
            let _ = warned.try_send(());
        }
    };
    let report = send_observed(&vm, &to, &client, &verified(2), &observe, &cancel);
    assert!(report.unwrap().runs);
    assert!(receiving.finish(false).0.unwrap().runs);
}

/// Claim N6 of docs/security.
#[test]
fn i6_plain_lanes_need_the_destinations_consent() {
    let vm = running(4 << 20);
    let options = verified(2)
        .to_builder()
        .security(LaneSecurity::Plain)
        .build()
        .unwrap();
    let moved = moved(&vm, &options, TestBuilder::default());
    let error = moved.source.unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::SecurityNotAgreed, VmIs::AtSource)
    );
    assert!(moved.builder.built.is_none());
    assert!(vm.goes_on());
    assert_eq!(vm.calls(), ["describe"]);
    let offered = |event: &DestinationEvent| matches!(event, DestinationEvent::Offered(_));
    assert!(!moved.destination_events.iter().any(offered));
}

#[test]
fn i6_a_lane_of_the_other_security_is_turned_away() {
    use dunlin_proto::control::Message;
    use dunlin_test_support::engine::Receiving;
    use dunlin_test_support::engine::peer::{Peer, SESSION, describe, lane_open, open_lane};
    let (client, server) = tls();
    for agreed in [LaneSecurity::Tls, LaneSecurity::Plain] {
        let options = destination::Options::builder()
            .allow_plain(true)
            .build()
            .unwrap();
        let receiving = Receiving::start(&server, &options, TestBuilder::default());
        let (mut peer, _) = Peer::source(receiving.address, &client, agreed);
        peer.send(&describe());
        let Some(Message::Accept(accept)) = peer.receive() else {
            panic!("not accepted")
        };
        let other = (agreed == LaneSecurity::Plain).then_some(&client);
        let _lane = open_lane(
            receiving.address,
            other,
            &lane_open(SESSION, &accept.secret, 1),
        );
        let Some(Message::LaneRefused { fault, .. }) = peer.receive() else {
            panic!("not refused")
        };
        assert_eq!(fault, FaultCode::SecurityNotAgreed);
        drop(peer);
        assert!(receiving.finish(true).0.is_err());
    }
}

/// A guest that dirties more than 20 MiB/s.
fn outrunning() -> (Arc<TestVm>, source::Options) {
    let vm = TestVm::new(8 << 20);
    vm.fill(4 << 20);
    vm.start(1000, Duration::from_micros(60));
    let options = verified(2)
        .to_builder()
        .rate(Some(20 << 20))
        .downtime_limit(Duration::from_millis(40))
        .build()
        .unwrap();
    (vm, options)
}

#[test]
fn a_guest_that_outruns_the_link_is_slowed_step_by_step_and_moves() {
    let (vm, options) = outrunning();
    let moved = moved(&vm, &options, TestBuilder::default());
    let report = moved.source.unwrap();
    let steps: Vec<u8> = moved
        .source_events
        .iter()
        .filter_map(|event| match event {
            Event::Throttled { percent } => Some(*percent),
            _ => None,
        })
        .collect();
    assert!(steps.len() > 2 && steps[..2] == [20, 30], "{steps:?}");
    assert_eq!(steps.last(), Some(&0));
    assert_eq!(vm.throttle.load(Ordering::SeqCst), 0);
    assert_eq!(report.digests_equal, Some(true));
}

#[test]
fn at_its_time_limit_a_migration_is_cancelled_or_the_guest_is_stopped() {
    for at_time_limit in [AtTimeLimit::Cancel, AtTimeLimit::Stop] {
        let (vm, options) = outrunning();
        // The time limit also takes effect in the middle of a pass. At this rate, the first pass
        // takes 800 ms, which is longer than the limit.
        let options = options
            .to_builder()
            .throttle(false)
            .time_limit(Some(Duration::from_millis(400)))
            .at_time_limit(at_time_limit)
            .rate(Some(5 << 20))
            .build()
            .unwrap();
        let began = Instant::now();
        let moved = moved(&vm, &options, TestBuilder::default());
        assert!(began.elapsed() < Duration::from_secs(2));
        match at_time_limit {
            AtTimeLimit::Cancel => {
                let error = moved.source.unwrap_err();
                assert_eq!(
                    (error.code(), error.vm),
                    (FaultCode::TimeLimit, VmIs::AtSource)
                );
                assert!(vm.goes_on());
            }
            AtTimeLimit::Stop => assert_eq!(moved.source.unwrap().digests_equal, Some(true)),
        }
    }
}

#[test]
fn a_downtime_limit_below_the_fixed_cost_is_named_as_such() {
    let vm = running(4 << 20);
    let options = verified(2)
        .to_builder()
        .downtime_limit(Duration::from_millis(1))
        .build()
        .unwrap();
    let error = moved(&vm, &options, TestBuilder::default())
        .source
        .unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::NotConverging, VmIs::AtSource),
        "{error}"
    );
    assert!(vm.goes_on());
}

#[test]
fn one_cap_holds_for_all_lanes_together() {
    let vm = TestVm::new(64 << 20);
    vm.fill(32 << 20);
    let options = source::Options::builder()
        .lanes(4)
        .rate(Some(50 << 20))
        .build()
        .unwrap();
    let report = moved(&vm, &options, TestBuilder::default()).source.unwrap();
    let first = &report.iterations[0];
    let rate = first.wire_bytes as f64 / first.duration.as_secs_f64() / f64::from(50 << 20);
    assert!((0.9..1.1).contains(&rate), "{rate}");
    assert!(first.duration > Duration::from_secs(1));
}

#[test]
fn a_panic_in_the_vmms_memory_ends_the_session_and_not_the_process() {
    use dunlin::engine::memory::MappedMemory;
    use dunlin::engine::vmm::{DirtyLog, GuestMemory, Section, SourceVm, VmDescription, VmmError};
    struct Panicking(MappedMemory, AtomicBool);
    impl GuestMemory for Panicking {
        fn regions(&self) -> &[dunlin_proto::control::Region] {
            self.0.regions()
        }
        fn slice(
            &self,
            index: usize,
            offset: u64,
            length: usize,
        ) -> std::io::Result<vm_memory::VolatileSlice<'_>> {
            assert!(!self.1.swap(true, Ordering::SeqCst), "planted");
            self.0.slice(index, offset, length)
        }
        fn ranges_to_send(
            &self,
            index: usize,
            found: &mut dyn FnMut(std::ops::Range<u64>),
        ) -> std::io::Result<()> {
            found(0..self.0.regions()[index].length);
            Ok(())
        }
    }
    struct Vm(Arc<TestVm>);
    impl SourceVm for Vm {
        fn describe(&self) -> Result<VmDescription, VmmError> {
            self.0.describe()
        }
        fn memory(&self) -> Arc<dyn GuestMemory> {
            let mapped = MappedMemory::new(Arc::clone(&self.0.memory), 4096);
            Arc::new(Panicking(mapped, AtomicBool::new(false)))
        }
        fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
            self.0.dirty_logs()
        }
        fn run_state(&self) -> RunState {
            self.0.run_state()
        }
        fn pause(&self) -> Result<(), VmmError> {
            self.0.pause()
        }
        fn resume(&self) -> Result<(), VmmError> {
            SourceVm::resume(&*self.0)
        }
        fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
            self.0.throttle(percent)
        }
        fn save(&self) -> Result<Vec<Section>, VmmError> {
            self.0.save()
        }
        fn deactivate(&self) -> Result<(), VmmError> {
            self.0.deactivate()
        }
        fn reactivate(&self) -> Result<(), VmmError> {
            self.0.reactivate()
        }
        fn hold(&self) -> Result<(), VmmError> {
            self.0.hold()
        }
        fn destroy(&self) {
            self.0.destroy();
        }
    }
    let (client, server) = tls();
    let vm = running(8 << 20);
    let options = destination::Options::default();
    let receiving =
        dunlin_test_support::engine::Receiving::start(&server, &options, TestBuilder::default());
    let as_source: Arc<dyn SourceVm> = Arc::new(Vm(Arc::clone(&vm)));
    let host: Arc<dyn dunlin::engine::Host> = Arc::new(dunlin::engine::StandardHost);
    let to = receiving.address.to_string();
    let observe = |_: &Event| ();
    let options = verified(2);
    let result = Migration::builder(Arc::clone(&as_source), &to, &client)
        .options(options.clone())
        .host(Arc::clone(&host))
        .observer(&observe)
        .run();
    let error = result.unwrap_err();
    assert_eq!(
        (error.code(), error.vm),
        (FaultCode::Internal, VmIs::AtSource),
        "{error}"
    );
    assert!(vm.goes_on());
    assert!(receiving.finish(false).0.is_err());
}
