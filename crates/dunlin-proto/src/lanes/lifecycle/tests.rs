#![allow(clippy::unwrap_used)]

use std::fmt::Write;

use super::*;

const TIMEOUTS: Timeouts = Timeouts {
    progress_ns: 100,
    open_ns: 1000,
    retry_first_ns: 10,
    retry_last_ns: 80,
    alone_ns: 5000,
};

/// Whether a confirmation of the peer is outstanding.
#[derive(Debug, Default)]
struct Owed(bool);

impl Load for Owed {
    fn unconfirmed_since(lane: &Lane<Self>) -> Option<u64> {
        lane.load.0.then_some(lane.clock_ns())
    }
}

type Lanes = Lifecycle<Owed>;

fn lanes(loss: Loss, wanted: u16) -> Lanes {
    let mut lanes = Lanes::new(loss, TIMEOUTS);
    lanes.want(wanted);
    lanes
}

fn actions(lanes: &mut Lanes, now_ns: u64) -> Vec<Action> {
    std::iter::from_fn(|| lanes.poll(false, now_ns)).collect()
}

/// The states of lane 1 before each event. Lane 1 reaches them at time 0.
const STATES: [&str; 10] = [
    "never opened",
    "Opening",
    "Up",
    "Up, near limit",
    "Leaving",
    "Ended",
    "Ended, connection over",
    "Fencing",
    "Fencing, connection over",
    "gone",
];

/// Returns lanes with lane 1 in this state; `None` if this `loss` policy does not have the state.
fn in_state(loss: Loss, state: &str) -> Option<Lanes> {
    let mut lanes = lanes(loss, 1);
    if state == "never opened" {
        return Some(lanes);
    }
    actions(&mut lanes, 0);
    if state != "Opening" {
        lanes.up(1, 0);
    }
    match state {
        "Up, near limit" => lanes.record_usage(1, KeyUsage::NearLimit),
        "Leaving" => lanes.record_usage(1, KeyUsage::Spent),
        "Ended" => lanes.end(1),
        "Ended, connection over" => {
            lanes.end(1);
            lanes.over(1, true, 0);
        }
        "Fencing" => _ = lanes.lose(1, 0),
        "Fencing, connection over" => lanes.over(1, false, 0),
        "gone" => _ = lanes.remove(1, 0),
        _ => {}
    }
    // Discards the actions that led to the state, including the one that opens a replacement lane.
    actions(&mut lanes, 0);
    lanes.take_dropped();
    let fencing = state.starts_with("Fencing");
    (loss == Loss::Fenced || !fencing).then_some(lanes)
}

type Event = (&'static str, fn(&mut Lanes));

const EVENTS: [Event; 15] = [
    ("up", |lanes| _ = lanes.up(1, 1)),
    ("another lane up", |lanes| {
        lanes.want(2);
        actions(lanes, 80);
        let opening = lanes.numbers(|lane| lane.is(State::Opening));
        lanes.up(*opening.last().unwrap(), 80);
    }),
    ("use to near limit", |lanes| {
        lanes.record_usage(1, KeyUsage::NearLimit)
    }),
    ("use to limit", |lanes| {
        lanes.record_usage(1, KeyUsage::Spent)
    }),
    ("leave all", |lanes| {
        lanes.want(0);
        lanes.leave_all();
    }),
    ("end", |lanes| lanes.end(1)),
    ("forget", |lanes| lanes.forget(1)),
    ("over in order", |lanes| lanes.over(1, true, 1)),
    ("over with a failure", |lanes| lanes.over(1, false, 1)),
    ("lose", |lanes| _ = lanes.lose(1, 1)),
    ("remove", |lanes| {
        let load = lanes.remove(1, 1);
        lanes.dropped.extend(load);
    }),
    ("resumed", |lanes| lanes.resumed(1)),
    ("open_ns passes", |lanes| passes(lanes, TIMEOUTS.open_ns)),
    ("progress_ns passes", |lanes| {
        passes(lanes, TIMEOUTS.progress_ns);
    }),
    ("alone_ns passes", |lanes| passes(lanes, TIMEOUTS.alone_ns)),
];

/// Lets `span_ns` pass and polls the lanes every 10 ns. During this time, the peer confirms nothing
/// that lane 1 carried.
fn passes(lanes: &mut Lanes, span_ns: u64) {
    lanes.want(0);
    if let Some(lane) = lanes.get_mut(1) {
        lane.load.0 = true;
    }
    let mut all = Vec::new();
    for now_ns in (0..=span_ns).step_by(10) {
        all.extend(actions(lanes, now_ns));
    }
    lanes.actions.extend(all);
}

fn cell(loss: Loss, state: &str, event: &Event) -> String {
    let Some(mut lanes) = in_state(loss, state) else {
        return "no such state".into();
    };
    event.1(&mut lanes);
    let mut text = match lanes.get_mut(1) {
        None => "none".into(),
        Some(lane) => {
            let near_limit = if lane.near_limit { ", near limit" } else { "" };
            let over = if lane.connected {
                ""
            } else {
                ", connection over"
            };
            format!("{:?}{near_limit}{over}", lane.state)
        }
    };
    let actions: Vec<String> = lanes.actions.iter().map(|one| format!("{one:?}")).collect();
    write!(text, " [{}]", actions.join(", ")).unwrap();
    if !lanes.take_dropped().is_empty() {
        text += " returns its load";
    }
    text
}

#[test]
fn the_whole_table_is_as_recorded() {
    let mut table = String::new();
    for loss in [Loss::Fenced, Loss::Dropped] {
        for state in STATES {
            for event in &EVENTS {
                let cell = cell(loss, state, event);
                writeln!(table, "{loss:?}: {state} + {} = {cell}", event.0).unwrap();
            }
        }
    }
    let recorded = include_str!("table.txt");
    assert!(
        table == recorded,
        "the table has changed; if this is intended, record it in lifecycle/table.txt:\n{table}"
    );
}

/// The lanes that are opened at `now_ns`.
fn opened(lanes: &mut Lanes, now_ns: u64) -> Vec<u16> {
    let all = actions(lanes, now_ns).into_iter();
    all.filter_map(|action| match action {
        Action::Open(number) => Some(number),
        _ => None,
    })
    .collect()
}

#[test]
fn lanes_that_are_lost_together_count_as_one_attempt() {
    for loss in [Loss::Fenced, Loss::Dropped] {
        let mut lanes = lanes(loss, 3);
        assert_eq!(opened(&mut lanes, 0), [1, 2, 3]);
        for lane in 1..=3 {
            lanes.over(lane, false, 5);
        }
        assert_eq!(opened(&mut lanes, 14), []);
        assert_eq!(opened(&mut lanes, 15), [4, 5, 6]);
        for lane in 4..=6 {
            lanes.over(lane, false, 15);
        }
        assert_eq!(opened(&mut lanes, 34), []);
        assert_eq!(opened(&mut lanes, 35), [7, 8, 9]);
    }
}

#[test]
fn the_delay_doubles_up_to_its_limit_until_the_peer_accepts_a_lane() {
    let mut lanes = lanes(Loss::Dropped, 1);
    let mut now_ns = 0;
    for delay_ns in [10, 20, 40, 80, 80] {
        let lane = opened(&mut lanes, now_ns)[0];
        // The lane connects, and the peer refuses it.
        assert!(lanes.up(lane, now_ns));
        lanes.lose(lane, now_ns);
        assert_eq!(opened(&mut lanes, now_ns + delay_ns - 1), []);
        now_ns += delay_ns;
    }
    let lane = opened(&mut lanes, now_ns)[0];
    lanes.up(lane, now_ns);
    lanes.taken();
    lanes.over(lane, false, now_ns);
    assert_eq!(opened(&mut lanes, now_ns + 9), []);
    assert_eq!(opened(&mut lanes, now_ns + 10), [lane + 1]);
}

#[test]
fn i8_lanes_that_are_not_gone_count_against_the_limit() {
    let mut lanes = lanes(Loss::Fenced, u16::MAX);
    assert_eq!(opened(&mut lanes, 0).len(), usize::from(MAX_LANES));
    lanes.over(7, false, 1);
    assert_eq!(opened(&mut lanes, 100), []);
    assert!(lanes.remove(7, 100).is_some());
    assert_eq!(opened(&mut lanes, 100), [MAX_LANES + 1]);
}

#[test]
fn i4_no_number_is_used_twice() {
    let mut lanes = lanes(Loss::Dropped, 1);
    let mut now_ns = 0;
    for number in 1..=u16::MAX {
        assert!(!lanes.is_exhausted());
        assert_eq!(opened(&mut lanes, now_ns), [number]);
        lanes.over(number, false, now_ns);
        now_ns += TIMEOUTS.retry_last_ns;
    }
    assert!(lanes.is_exhausted());
    assert_eq!(opened(&mut lanes, now_ns), []);
    assert_eq!(lanes.due_ns(), None, "no lane can be opened");
    assert!(lanes.was_opened(u16::MAX) && !lanes.was_opened(0));
}

#[test]
fn work_is_given_up_after_too_long_without_a_lane() {
    let mut lanes = lanes(Loss::Dropped, 0);
    for now_ns in (0..2 * TIMEOUTS.alone_ns).step_by(10) {
        let action = lanes.poll(true, now_ns);
        let is_over = now_ns == TIMEOUTS.alone_ns;
        assert_eq!(action, is_over.then_some(Action::GiveUp), "{now_ns}");
    }
}

#[test]
fn a_suspended_caller_blames_no_lane() {
    const LATE_NS: u64 = 3 * TIMEOUTS.alone_ns;
    for loss in [Loss::Fenced, Loss::Dropped] {
        let mut lanes = lanes(loss, 3);
        assert_eq!(opened(&mut lanes, 0), [1, 2, 3]);
        lanes.up(1, 0);
        lanes.get_mut(1).unwrap().load.0 = true;
        lanes.up(2, 0);
        lanes.lose(2, 0);
        lanes.want(0);
        actions(&mut lanes, 1);
        assert_eq!(actions(&mut lanes, LATE_NS), []);
        let due_ns = LATE_NS + TIMEOUTS.progress_ns;
        assert_eq!(lanes.due_ns(), Some(due_ns));
        assert_eq!(actions(&mut lanes, due_ns)[0], Action::Cut(1));
    }
}
