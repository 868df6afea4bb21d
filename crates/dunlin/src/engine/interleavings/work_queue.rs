//! Scenarios of the source's work queue: lanes that share work, wait for work, are held back by a
//! rate cap, and end.

use std::sync::{Arc, Mutex as Plain};

use dunlin_proto::bitmap::Run;
use dunlin_proto::control::{ChunkSet, Message};
use dunlin_proto::lanes::{Action, KeyUsage, Sending, Timeouts};
use dunlin_proto::limits::{CHUNK_PAGES, MAX_IN_FLIGHT_RANGES};
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::{ChunkPlan, Schedule, Work};
use shuttle::sync::Mutex;
use shuttle::sync::mpsc::{Sender, channel};
use shuttle::thread::{JoinHandle, spawn};

use super::super::source::event::SessionEvent;
use super::super::source::work_queue::WorkQueue;
use super::super::tune::{Tune, TuneError};
use super::connection::Connection;
use super::sync;

/// Time limits that never expire, and no delay between attempts to open a lane. In the scenarios
/// the current time is always 0.
pub(super) const TIMEOUTS: Timeouts = Timeouts {
    progress_ns: 1 << 60,
    open_ns: 1 << 60,
    retry_first_ns: 0,
    retry_last_ns: 0,
    alone_ns: 1 << 60,
};

/// A work queue over one region with lanes 1 to `lanes`, none of them admitted.
fn work_queue(pages: u64, lanes: u16, rate: Option<u64>) -> Arc<WorkQueue> {
    let schedule = Schedule::new([(0, pages)]);
    let work_queue = WorkQueue::new(Sending::new(schedule, TIMEOUTS), Pace::new(rate));
    work_queue.change(|state| {
        state.lanes.want(lanes);
        for lane in 1..=lanes {
            assert_eq!(state.lanes.poll(0), Some(Action::Open(lane)));
        }
        assert_eq!(state.lanes.poll(0), None);
    });
    for lane in 1..=lanes {
        work_queue.expect(lane);
    }
    Arc::new(work_queue)
}

fn admit(work_queue: &WorkQueue, lane: u16) {
    let news = work_queue.change(|state| state.lanes.lane_up(lane, 0));
    assert_eq!(news, Ok(true));
}

/// A lane's thread without a connection: reports the iteration and pages of each chunk, and
/// whether the lane ended cleanly.
fn lane(
    work_queue: &Arc<WorkQueue>,
    number: u16,
    events: &Sender<SessionEvent>,
    chunks: &Sender<(u32, u64)>,
) -> JoinHandle<bool> {
    let (work_queue, events, chunks) = (Arc::clone(work_queue), events.clone(), chunks.clone());
    spawn(move || {
        let mut plan = ChunkPlan::default();
        loop {
            let report = |event| events.send(event).unwrap();
            match work_queue.next(number, KeyUsage::Fresh, &mut plan, report, || false) {
                Ok(Work::Chunk) => chunks.send((plan.iteration, plan.pages)).unwrap(),
                Ok(Work::Wait | Work::Mark(_)) => {}
                Ok(Work::End { .. }) => return true,
                Ok(Work::Stop) => return false,
                Err(error) => panic!("{error:?}"),
            }
        }
    })
}

/// Every page of every iteration is sent once, each iteration's last chunk is reported to the
/// session, and the lanes end after the last iteration.
pub(super) fn share() {
    const PAGES: u64 = 2 * CHUNK_PAGES + 1;
    let work_queue = work_queue(PAGES, 2, None);
    let (events, reported) = channel();
    let (chunks, sent) = channel();
    let lanes = [1, 2].map(|number| lane(&work_queue, number, &events, &chunks));
    drop((events, chunks));
    admit(&work_queue, 1);
    for iteration in 1..=3 {
        work_queue.change(|state| {
            let run = Run {
                first: 0,
                count: PAGES,
            };
            state.lanes.schedule_mut().mark_run(0, run);
        });
        assert_eq!(
            work_queue.begin_iteration(iteration == 3),
            (iteration, PAGES)
        );
        if iteration == 1 {
            admit(&work_queue, 2);
        }
        match reported.recv() {
            Ok(SessionEvent::Cut { iteration: cut }) => assert_eq!(cut, iteration),
            _ => panic!("no lane reported the last chunk of iteration {iteration}"),
        }
    }
    for lane in lanes {
        assert!(lane.join().unwrap(), "a lane did not end cleanly");
    }
    let mut pages = [0; 3];
    for (iteration, count) in sent.iter() {
        pages[iteration as usize - 1] += count;
    }
    assert_eq!(pages, [PAGES; 3]);
    assert!(reported.recv().is_err(), "one iteration was cut twice");
}

/// Lanes at the limit of chunks in flight continue after some of these chunks are acknowledged.
pub(super) fn acknowledged() {
    // Every second page is dirty, so each dirty page is a separate range.
    const WORDS: usize = 2 * MAX_IN_FLIGHT_RANGES / 64 + 4;
    let work_queue = work_queue(WORDS as u64 * 64, 2, None);
    admit(&work_queue, 1);
    admit(&work_queue, 2);
    work_queue.change(|state| {
        let log = vec![0x5555_5555_5555_5555; WORDS];
        state.lanes.schedule_mut().mark_dirty(0, &log);
    });
    work_queue.begin_iteration(true);
    let given = work_queue.change(|state| {
        let mut plan = ChunkPlan::default();
        let mut given = 0;
        while state.lanes.next(1, KeyUsage::Fresh, 0, &mut plan) == Work::Chunk {
            given += 1;
        }
        given
    });
    let (events, _reported) = channel();
    let (chunks, _sent) = channel();
    let lanes = [1, 2].map(|number| lane(&work_queue, number, &events, &chunks));
    let all = ChunkSet {
        first: 0,
        count: given,
    };
    let message = Message::Ack {
        sets: vec![all],
        reached: Vec::new(),
    };
    assert!(work_queue.acknowledge(&message).unwrap());
    for lane in lanes {
        assert!(lane.join().unwrap(), "a lane did not end cleanly");
    }
}

/// Two lanes: one waits for work, one is blocked in a call.
fn busy(work_queue: &Arc<WorkQueue>) -> [JoinHandle<bool>; 2] {
    let (events, _) = channel();
    let (chunks, _) = channel();
    let connection = Connection::new();
    let blocked = {
        let work_queue = Arc::clone(work_queue);
        spawn(move || {
            let interrupt = connection.interrupt();
            if work_queue.interrupted_by(2, interrupt).is_ok() {
                connection.await_end();
            }
            false
        })
    };
    [lane(work_queue, 1, &events, &chunks), blocked]
}

/// `WorkQueue::cut` ends a lane, whatever the lane is waiting for.
pub(super) fn cut() {
    let work_queue = work_queue(1, 2, None);
    admit(&work_queue, 1);
    let lanes = busy(&work_queue);
    for (index, lane) in lanes.into_iter().enumerate() {
        work_queue.cut(index as u16 + 1);
        assert!(!lane.join().unwrap());
    }
}

/// Every lane ends with the session.
pub(super) fn stop() {
    let work_queue = work_queue(1, 2, None);
    admit(&work_queue, 1);
    let lanes = busy(&work_queue);
    work_queue.stop();
    for lane in lanes {
        assert!(!lane.join().unwrap());
    }
}

/// A lane ends if its connection ends before the lane is admitted.
pub(super) fn not_admitted() {
    let work_queue = work_queue(1, 1, None);
    let ended = Arc::new(Mutex::new(false));
    let lane = {
        let (work_queue, ended) = (Arc::clone(&work_queue), Arc::clone(&ended));
        spawn(move || {
            let mut plan = ChunkPlan::default();
            let has_ended = || *ended.lock().unwrap();
            work_queue.next(1, KeyUsage::Fresh, &mut plan, |_| {}, has_ended)
        })
    };
    *ended.lock().unwrap() = true;
    assert!(lane.join().unwrap().is_err());
}

/// Two lanes that send two pieces each. The rate cap allows only the first of these four pieces to
/// be sent immediately.
fn held_back(work_queue: &Arc<WorkQueue>) -> [JoinHandle<()>; 2] {
    [1, 2].map(|lane| {
        let work_queue = Arc::clone(work_queue);
        spawn(move || {
            for _ in 0..2 {
                work_queue.await_rate(lane, 1000).unwrap();
            }
        })
    })
}

/// A lane that is held back continues when the cap is removed.
pub(super) fn rate_changes() {
    let work_queue = work_queue(1, 2, Some(1));
    let lanes = held_back(&work_queue);
    work_queue.set_rate(Some(2));
    work_queue.set_rate(None);
    for lane in lanes {
        lane.join().unwrap();
    }
}

/// The rate cap holds regardless of which thread is woken first.
pub(super) fn rate_holds() {
    const PIECE: u64 = 100_000;
    const PIECE_NS: u64 = 100_000_000;
    let work_queue = work_queue(1, 2, Some(1_000_000));
    let sent = Arc::new(Plain::new(0));
    let lanes = [1, 2].map(|lane| {
        let (work_queue, sent) = (Arc::clone(&work_queue), Arc::clone(&sent));
        spawn(move || {
            for _ in 0..3 {
                work_queue.await_rate(lane, PIECE).unwrap();
                let mut sent = sent.lock().unwrap();
                *sent += 1;
                let now_ns = sync::now().as_nanos() as u64;
                let allowed = now_ns + PIECE_NS + dunlin_proto::pace::BURST_NS;
                assert!(*sent * PIECE_NS <= allowed, "{sent} sent by {now_ns}");
            }
        })
    });
    for lane in lanes {
        lane.join().unwrap();
    }
}

/// An operator may set rates at any time before the switchover. They reach the lanes in order.
pub(super) fn tuned() {
    let work_queue = work_queue(1, 2, Some(1));
    let tune = Tune::new();
    let operator = {
        let tune = tune.clone();
        spawn(move || {
            tune.set_rate(Some(3)).unwrap();
            tune.set_rate(None).unwrap();
            // This call may come before or after the end of pre-copy.
            tune.set_rate(Some(5)).is_ok()
        })
    };
    let rates = Arc::new(Plain::new(Vec::new()));
    {
        let (work_queue, rates) = (Arc::clone(&work_queue), Arc::clone(&rates));
        tune.attach(move |rate| {
            rates.lock().unwrap().push(rate);
            // Apply no cap for the last rate, 5, so that it does not hold the lanes back.
            work_queue.set_rate(rate.filter(|rate| *rate == 3));
        });
    }
    for lane in held_back(&work_queue) {
        lane.join().unwrap();
    }
    tune.detach();
    let in_time = operator.join().unwrap();
    assert_eq!(tune.set_rate(None), Err(TuneError::TooLate));
    let rates = rates.lock().unwrap();
    let last = if in_time { Some(5) } else { None };
    assert_eq!(rates.last(), Some(&last));
    let order = [Some(3), None, Some(5)];
    assert!(order[..2 + usize::from(in_time)].ends_with(&rates));
}
