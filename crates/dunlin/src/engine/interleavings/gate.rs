//! The destination's gate: lanes at marks, that end, are fenced or stopped, and
//! what they tell the session.

use std::sync::{Arc, Mutex as Plain};

use dunlin_proto::lanes::{Fence, Receiving};
use shuttle::sync::mpsc::channel;
use shuttle::thread::{JoinHandle, spawn};

use super::super::destination::gate::Gate;
use super::line::Line;

/// The last mark that each lane has reached.
type Reached = Arc<Plain<[u32; 3]>>;

/// A gate, and lanes 1 to 3 that can be cut.
fn gate() -> (Arc<Gate>, [Arc<Line>; 3], Reached) {
    let gate = Gate::new(3);
    let lines = [1, 2, 3].map(|lane| {
        let line = Line::new();
        gate.admit(lane, line.interrupt()).unwrap();
        line
    });
    (Arc::new(gate), lines, Reached::default())
}

/// A lane that reads marks 1 to `last`; false if it was given up at one.
fn lane(gate: &Arc<Gate>, lane: u16, last: u32, reached: &Reached) -> JoinHandle<bool> {
    let (gate, reached) = (Arc::clone(gate), Arc::clone(reached));
    spawn(move || {
        for mark in 1..=last {
            reached.lock().unwrap()[usize::from(lane) - 1] = mark;
            if !gate.pass(lane, mark, || {}).unwrap() {
                return false;
            }
            let reached = *reached.lock().unwrap();
            let all = reached.iter().all(|at| *at >= mark);
            assert!(all, "lane {lane} passed mark {mark} at {reached:?}");
        }
        reached.lock().unwrap()[usize::from(lane) - 1] = u32::MAX;
        gate.report(|lanes| lanes.ended(lane, 0), || {}).unwrap();
        true
    })
}

/// No lane passes a mark before every other has reached it, and all pass.
pub(super) fn marks() {
    let (gate, _, reached) = gate();
    for lane in [1, 2, 3].map(|number| lane(&gate, number, 3, &reached)) {
        assert!(lane.join().unwrap());
    }
}

/// Nobody waits for a lane that has ended.
pub(super) fn ends() {
    let (gate, _, reached) = gate();
    for lane in [1, 2, 3].map(|number| lane(&gate, number, 4 - u32::from(number), &reached)) {
        assert!(lane.join().unwrap());
    }
}

/// A fence ends a lane that waits at a mark and one that waits for bytes;
/// then, and not before, the others go on.
pub(super) fn fences() {
    let (gate, lines, reached) = gate();
    let waits = lane(&gate, 1, 1, &reached);
    let passes = lane(&gate, 2, 1, &reached);
    let reads = {
        let line = Arc::clone(&lines[2]);
        spawn(move || line.await_end())
    };
    let fence = |lane| {
        assert_eq!(gate.lanes(|lanes| lanes.fence(lane)), Fence::Close);
        gate.cut(lane);
    };
    fence(1);
    assert!(!waits.join().unwrap(), "lane 1 passed without lane 3");
    assert!(gate.lanes(|lanes| lanes.gone(1)));
    fence(3);
    reads.join().unwrap();
    reached.lock().unwrap()[2] = u32::MAX;
    assert!(gate.lanes(|lanes| lanes.gone(3)));
    assert!(passes.join().unwrap());
}

/// Every lane ends when the session does, whatever it waits for.
pub(super) fn stop() {
    let (gate, lines, reached) = gate();
    let waits = [1, 2].map(|number| lane(&gate, number, 1, &reached));
    let reads = {
        let line = Arc::clone(&lines[2]);
        spawn(move || line.await_end())
    };
    gate.stop();
    reads.join().unwrap();
    for lane in waits {
        assert!(!lane.join().unwrap());
    }
}

/// The session hears of everything that has to be acknowledged, however it
/// is gathered.
pub(super) fn acknowledgements() {
    const CHUNKS: u64 = 3;
    let (gate, ..) = gate();
    let (events, heard) = channel();
    let lanes = [1, 2].map(|lane| {
        let (gate, events) = (Arc::clone(&gate), events.clone());
        spawn(move || {
            for number in 0..CHUNKS {
                let number = number * 2 + u64::from(lane) - 1;
                gate.report(
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
        heard.recv().expect("what is not acknowledged was told");
        let (sets, _) = gate.lanes(Receiving::take_reports);
        acknowledged += sets.iter().map(|set| u64::from(set.count)).sum::<u64>();
    }
    for lane in lanes {
        lane.join().unwrap();
    }
}
