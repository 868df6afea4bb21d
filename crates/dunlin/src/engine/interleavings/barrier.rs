//! Scenarios of the destination's barrier: lanes that wait at marks, end, are fenced or stopped,
//! and their reports to the session.

use std::sync::{Arc, Mutex as Plain};

use dunlin_proto::lanes::{Fence, Receiving};
use shuttle::sync::mpsc::channel;
use shuttle::thread::{JoinHandle, spawn};

use super::super::destination::barrier::IterationBarrier;
use super::connection::Connection;

/// The last mark that each lane has reached.
type Reached = Arc<Plain<[u32; 3]>>;

/// A barrier with lanes 1 to 3, and the lanes' connections, which scenarios can interrupt.
fn barrier() -> (Arc<IterationBarrier>, [Arc<Connection>; 3], Reached) {
    let barrier = IterationBarrier::new(3);
    let connections = [1, 2, 3].map(|lane| {
        let connection = Connection::new();
        barrier.admit(lane, connection.interrupt()).unwrap();
        connection
    });
    (Arc::new(barrier), connections, Reached::default())
}

/// A lane's thread that reads marks 1 to `last`. Returns false if the lane was given up at a mark.
fn lane(
    barrier: &Arc<IterationBarrier>,
    lane: u16,
    last: u32,
    reached: &Reached,
) -> JoinHandle<bool> {
    let (barrier, reached) = (Arc::clone(barrier), Arc::clone(reached));
    spawn(move || {
        for mark in 1..=last {
            reached.lock().unwrap()[usize::from(lane) - 1] = mark;
            if !barrier.pass(lane, mark, || {}).unwrap() {
                return false;
            }
            let reached = *reached.lock().unwrap();
            let all = reached.iter().all(|at| *at >= mark);
            assert!(all, "lane {lane} passed mark {mark} at {reached:?}");
        }
        reached.lock().unwrap()[usize::from(lane) - 1] = u32::MAX;
        barrier.report(|lanes| lanes.ended(lane, 0), || {}).unwrap();
        true
    })
}

/// No lane passes a mark before every other lane has reached it. In the end, every lane has passed
/// all marks.
pub(super) fn marks() {
    let (barrier, _, reached) = barrier();
    for lane in [1, 2, 3].map(|number| lane(&barrier, number, 3, &reached)) {
        assert!(lane.join().unwrap());
    }
}

/// No lane waits for a lane that has ended.
pub(super) fn ends() {
    let (barrier, _, reached) = barrier();
    for lane in [1, 2, 3].map(|number| lane(&barrier, number, 4 - u32::from(number), &reached)) {
        assert!(lane.join().unwrap());
    }
}

/// A fence ends its lane, whether the lane waits at a mark or for bytes. The other lanes continue
/// only after that.
pub(super) fn fences() {
    let (barrier, connections, reached) = barrier();
    let waits = lane(&barrier, 1, 1, &reached);
    let passes = lane(&barrier, 2, 1, &reached);
    let reads = {
        let connection = Arc::clone(&connections[2]);
        spawn(move || connection.await_end())
    };
    let fence = |lane| {
        assert_eq!(barrier.lanes(|lanes| lanes.fence(lane)), Fence::Close);
        barrier.cut(lane);
    };
    fence(1);
    assert!(!waits.join().unwrap(), "lane 1 passed without lane 3");
    assert!(barrier.lanes(|lanes| lanes.gone(1)));
    fence(3);
    reads.join().unwrap();
    reached.lock().unwrap()[2] = u32::MAX;
    assert!(barrier.lanes(|lanes| lanes.gone(3)));
    assert!(passes.join().unwrap());
}

/// Every lane ends with the session, whatever it is waiting for.
pub(super) fn stop() {
    let (barrier, connections, reached) = barrier();
    let waits = [1, 2].map(|number| lane(&barrier, number, 1, &reached));
    let reads = {
        let connection = Arc::clone(&connections[2]);
        spawn(move || connection.await_end())
    };
    barrier.stop();
    reads.join().unwrap();
    for lane in waits {
        assert!(!lane.join().unwrap());
    }
}

/// The session is notified of everything to acknowledge, regardless of how the reports are batched.
pub(super) fn acknowledgements() {
    const CHUNKS: u64 = 3;
    let (barrier, ..) = barrier();
    let (events, notified) = channel();
    let lanes = [1, 2].map(|lane| {
        let (barrier, events) = (Arc::clone(&barrier), events.clone());
        spawn(move || {
            for number in 0..CHUNKS {
                let number = number * 2 + u64::from(lane) - 1;
                barrier
                    .report(
                        |lanes| lanes.written(lane, number, 1),
                        || events.send(()).unwrap(),
                    )
                    .unwrap();
            }
        })
    });
    drop(events);
    let mut acknowledged = 0;
    while acknowledged < 2 * CHUNKS {
        notified.recv().expect("a report caused no notification");
        let (sets, _) = barrier.lanes(Receiving::take_reports);
        acknowledged += sets.iter().map(|set| u64::from(set.count)).sum::<u64>();
    }
    for lane in lanes {
        lane.join().unwrap();
    }
}
