//! Tests that the source replaces a failed control lane and the migration continues. A proxy
//! between the two sides injects each of its faults at five points before the switchover. Another
//! test loses the control lane several times in a row. A third tests that a cancellation does not
//! wait for the replacement. The tests use real sockets and a guest that writes.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::Event;
use dunlin::engine::vmm::FaultCode;
use dunlin_test_support::engine::proxy::{At, FAULTS, Fault};
use dunlin_test_support::engine::scene::{
    HOT_PAGES, Scene, is_up, patient, quick, rounds, side_by_side,
};
use dunlin_test_support::engine::tls;

#[derive(Clone, Copy, Debug)]
enum Point {
    Accepted,
    LanesUp,
    FirstPass,
    LaterInIt,
    SecondPass,
}

impl Point {
    const ALL: [Self; 5] = [
        Self::Accepted,
        Self::LanesUp,
        Self::FirstPass,
        Self::LaterInIt,
        Self::SecondPass,
    ];

    /// The number of pages to which the guest writes. For `SecondPass` it is larger, so that the
    /// second pass takes some time.
    fn hot_pages(self) -> u64 {
        match self {
            Self::SecondPass => 1536,
            _ => HOT_PAGES,
        }
    }
}

#[test]
fn the_control_lane_killed_at_any_point_and_in_any_way_is_made_anew() {
    let tls = tls();
    let mut cases = Vec::new();
    for _ in 0..rounds() {
        for point in Point::ALL {
            for fault in FAULTS {
                cases.extend([(point, fault, false), (point, fault, true)]);
            }
        }
    }
    side_by_side(&cases, |&(point, fault, with_lane)| {
        let scene = Scene::with(&tls, 16, &patient(), point.hot_pages());
        let (ups, ticks) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let options = quick(3, 8)
            .to_builder()
            .connect_limit(Duration::from_secs(4))
            .build()
            .unwrap();
        let report = scene
            .send_with(&options, |event| {
                let now = match (point, event) {
                    (Point::Accepted, Event::Accepted { .. }) => true,
                    (Point::LanesUp, Event::LaneUp { .. }) => {
                        ups.fetch_add(1, Ordering::SeqCst) == 2
                    }
                    (Point::FirstPass, Event::Progress(_)) => {
                        ticks.fetch_add(1, Ordering::SeqCst) == 0
                    }
                    (Point::LaterInIt, Event::Progress(_)) => {
                        ticks.fetch_add(1, Ordering::SeqCst) == 2
                    }
                    (Point::SecondPass, Event::Iterated(pass)) => pass.number == 1,
                    _ => false,
                };
                if now {
                    scene.proxy.strike(0, fault);
                    if with_lane && scene.proxy.connections() > 2 {
                        scene.proxy.strike(2, fault);
                    }
                }
            })
            .unwrap_or_else(|error| {
                panic!(
                    "{point:?} {fault:?} {with_lane}: {error:?} {:?}",
                    scene.events.lock()
                )
            });
        println!(
            "control at {point:?} by {fault:?}{}: {} lost, {} pages again, {:?}",
            if with_lane { " with a lane" } else { "" },
            report.lanes_lost,
            report.pages_again,
            report.total
        );
        let events = scene.events.lock().unwrap().clone();
        assert_eq!(report.control_resumed, 1, "{point:?} {fault:?} {events:?}");
        let most = u32::from(with_lane);
        assert!(
            report.lanes_lost <= most,
            "{point:?} {fault:?} {with_lane} {events:?}"
        );
        // Only the first iteration sends all pages. Each later iteration sends the pages to which
        // the guest wrote, and the pages that were in flight on a lost lane.
        let most = scene.hot_pages + report.pages_again;
        assert!(
            report.iterations[1..].iter().all(|one| one.pages <= most),
            "{:?}",
            report.iterations
        );
        scene.finish(&report);
    });
}

#[test]
fn the_control_lane_may_be_lost_again_and_again_and_no_iteration_restarts() {
    let tls = tls();
    side_by_side(&FAULTS, |&fault| {
        let scene = Scene::new(&tls, 16);
        let options = quick(2, 3);
        let report = thread::scope(|scope| {
            let sending = scope.spawn(|| scene.send(&options).unwrap());
            scene.await_events(2, is_up);
            for time in 1..=3 {
                // After a replacement, the newest connection is the control lane.
                let newest = if time == 1 {
                    0
                } else {
                    scene.proxy.connections() - 1
                };
                scene.proxy.strike(newest, fault);
                scene.await_events(time, |event| matches!(event, Event::ControlResumed));
            }
            sending.join().unwrap()
        });
        assert_eq!(report.control_resumed, 3, "{fault:?}");
        assert_eq!((report.lanes_lost, report.pages_again), (0, 0), "{fault:?}");
        let numbers: Vec<u32> = report.iterations.iter().map(|one| one.number).collect();
        assert!(numbers.iter().copied().eq(1..=numbers.len() as u32));
        assert!(
            report.iterations[1..]
                .iter()
                .all(|one| one.pages <= HOT_PAGES)
        );
        scene.finish(&report);
    });
}

#[test]
fn cancelling_does_not_wait_for_a_control_lane_that_is_being_made_anew() {
    let scene = Scene::new(&tls(), 16);
    // The proxy holds back all bytes of the second control lane, so the source gets no answer.
    scene.proxy.strike_at(3, At::Bytes(0), Fault::Hold);
    let options = quick(2, 4)
        .to_builder()
        .connect_limit(Duration::from_secs(20))
        .control_limit(Duration::from_secs(20))
        .build()
        .unwrap();
    let took = thread::scope(|scope| {
        let sending = scope.spawn(|| scene.send(&options).unwrap_err());
        scene.await_events(2, is_up);
        scene.proxy.cut(0);
        scene.proxy.await_connections(4);
        scene
            .proxy
            .await_progress(3, |progress| progress.struck.is_some());
        let began = Instant::now();
        scene.cancel.cancel();
        assert_eq!(sending.join().unwrap().code(), FaultCode::Cancelled);
        began.elapsed()
    });
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(scene.vm.goes_on());
    assert!(scene.receiving.finish(true).0.is_err());
}
