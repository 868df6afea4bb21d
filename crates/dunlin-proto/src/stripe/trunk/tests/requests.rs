//! Trunks on which the connecting side opens the lanes of both directions.

use super::*;

fn one_opener() -> Config {
    Config {
        version: 2,
        one_opener: true,
        lanes: 2,
        ..Config::default()
    }
}

/// A pair with one channel that both sides have connected. No lane is open.
fn connected(config: Config) -> (Pair, u32) {
    let mut pair = Pair::with(config);
    let channel = pair.sides[0].open(opening(1)).unwrap();
    pair.settle();
    assert!(pair.sides[1].connected(channel, DEFAULT_WINDOW));
    pair.settle();
    (pair, channel)
}

fn lanes_of(actions: &[Action]) -> Vec<&Action> {
    let is_lane = |action: &&Action| matches!(action, Action::OpenLane(_) | Action::OpenLaneFor(_));
    actions.iter().filter(is_lane).collect()
}

/// The connecting side opens lane 1, on which the accepting side sends.
fn opens_for(pair: &mut Pair) {
    assert!(pair.sides[0].opened_for(1));
    assert!(pair.sides[1].is_awaited(1));
    assert!(pair.sides[1].lane_established(1, pair.now_ns));
    pair.settle();
}

#[test]
fn the_connecting_side_opens_the_lanes_of_both_directions() {
    let (mut pair, channel) = connected(one_opener());
    let (near, far) = (pair.did(0), pair.did(1));
    let both = [&Action::OpenLane(1), &Action::OpenLaneFor(1)];
    let opened = lanes_of(&near);
    assert!(
        opened.len() == 2 && both.iter().all(|one| opened.contains(one)),
        "{near:?}"
    );
    assert!(lanes_of(&far).is_empty(), "{far:?}");
    assert!(pair.sides[0].lane_established(1, 0));
    pair.sides[1].admit(1).unwrap();
    opens_for(&mut pair);
    for side in 0..2 {
        pair.sides[side].readable(channel);
        let data = pair.reads(side, 1, 1000, false).unwrap();
        pair.delivers(1 - side, 1, &data);
    }
    pair.now_ns += ACK_DELAY_NS;
    pair.settle();
    assert!(
        pair.sides
            .iter()
            .all(|side| side.usage().unacknowledged == 0)
    );
}

#[test]
fn a_requested_lane_with_a_used_up_key_is_replaced_by_request() {
    let (mut pair, channel) = connected(one_opener());
    opens_for(&mut pair);
    pair.did(0);
    pair.sides[1].readable(channel);
    let data = pair.reads(1, 1, 100, true).unwrap();
    pair.delivers(0, 1, &data);
    let work = pair.sides[1].next(1, KeyUsage::NearLimit, 0);
    assert!(matches!(work, Work::Read { .. }), "{work:?}");
    pair.sides[1].read(1, channel, Outcome::Nothing, 0);
    assert_eq!(pair.did(0), [Action::OpenLaneFor(2)]);
    assert!(pair.sides[0].opened_for(2));
    assert!(pair.sides[1].carries_on(1) && !pair.sides[1].carries_on(2));
    assert!(pair.sides[1].lane_established(2, 0));
    assert!(!pair.sides[1].carries_on(1) && pair.sides[1].carries_on(2));
    let end = Work::End { frames: 1 };
    assert_eq!(pair.sides[1].next(1, KeyUsage::NearLimit, 0), end);
    pair.sides[1].lane_over(1, 0);
    assert_eq!(pair.sides[0].lane_ended(1, 1), Ok(()));
    pair.sides[0].admitted_over(1);
    pair.settle();
    assert_eq!(pair.sides[1].usage().unacknowledged, 0);
}

/// Claim A13 of docs/security.
#[test]
fn i7_a_lane_that_was_not_requested_or_comes_twice_or_late_is_not_taken() {
    let (mut pair, _) = connected(one_opener());
    assert!(!pair.sides[1].is_awaited(2), "not requested");
    opens_for(&mut pair);
    assert!(!pair.sides[1].is_awaited(1), "it came before");
    assert!(!pair.sides[1].lane_established(1, 0));
    pair.sides[1].lane_over(1, 0);
    assert!(!pair.sides[1].is_awaited(1), "it is lost");
    pair.now_ns = 100 * MS;
    pair.settle();
    assert!(pair.sides[1].is_awaited(2));
    pair.now_ns += Timeouts::default().open_ns;
    pair.settle();
    assert!(!pair.sides[1].is_awaited(2), "it comes too late");
    assert!(!pair.sides[1].lane_established(2, pair.now_ns));
}

/// Claim A13 of docs/security.
#[test]
fn i7_the_side_that_opens_all_lanes_takes_none_and_the_other_side_opens_none() {
    let (mut pair, _) = connected(one_opener());
    assert!(!pair.sides[0].is_awaited(1));
    assert_eq!(pair.sides[0].admit(7), Err(FaultCode::Malformed));
    assert!(!pair.sides[0].has_message(0), "a refusal of 7 is due");
    let wanted = |side: &mut Trunk<u64>| side.handle(Message::LaneWanted { lane: 9 }, 0);
    let refused = Err(PeerFault::LaneNotOurs { lane: 9 });
    assert_eq!(wanted(&mut pair.sides[1]), refused);
    for side in &mut Pair::new().sides {
        assert_eq!(wanted(side), refused);
    }
}

/// Claim A13 of docs/security.
#[test]
fn i7_i8_requested_lanes_are_limited_and_a_number_is_opened_once() {
    let config = Config {
        lanes_max: 2,
        ..one_opener()
    };
    let mut side = Trunk::<u64>::new(Side::Connecting, config, 0);
    side.control_up(0);
    while side.next_message(0).is_some() {}
    let asks = |side: &mut Trunk<u64>, lane| {
        side.handle(Message::LaneWanted { lane }, 0).unwrap();
        side.poll(0)
    };
    assert_eq!(asks(&mut side, 1), Some(Action::OpenLaneFor(1)));
    assert_eq!(asks(&mut side, 1), None, "a repeated request");
    assert_eq!(asks(&mut side, 65_535), Some(Action::OpenLaneFor(65_535)));
    assert_eq!(asks(&mut side, 3), None);
    let limit = FaultCode::LaneLimit;
    let refused = |message: Option<Message>, number, code| match message {
        Some(Message::LaneRefused { lane, fault, .. }) => (lane, fault) == (number, code),
        _ => false,
    };
    assert!(refused(side.next_message(0), 3, limit));
    // A lane that could not be opened makes room, but its number stays used.
    side.not_opened(1, FaultCode::LaneLost, "no".to_owned());
    assert!(refused(side.next_message(0), 1, FaultCode::LaneLost));
    assert_eq!(asks(&mut side, 1), None);
    assert!(!side.opened_for(1));
    assert_eq!(asks(&mut side, 4), Some(Action::OpenLaneFor(4)));
    // An open lane counts against the limit until it is over.
    assert!(side.opened_for(4));
    assert!(!side.opened_for(4), "opened twice");
    assert_eq!(asks(&mut side, 5), None);
    assert!(refused(side.next_message(0), 5, limit));
    side.admitted_over(4);
    assert!(matches!(side.next_message(0), Some(Message::LaneLost(_))));
    assert_eq!(asks(&mut side, 5), Some(Action::OpenLaneFor(5)));
}

#[test]
fn a_request_repeats_on_a_later_control_lane_until_the_lane_is_up() {
    let (mut pair, _) = connected(one_opener());
    let asked = |side: &mut Trunk<u64>| {
        let mut asked = Vec::new();
        while let Some(message) = side.next_message(0) {
            if let Message::LaneWanted { lane } = message {
                asked.push(lane);
            }
        }
        asked
    };
    pair.sides[1].control_up(0);
    assert_eq!(asked(&mut pair.sides[1]), [1]);
    assert!(!pair.sides[1].has_message(0));
    assert!(pair.sides[1].lane_established(1, 0));
    pair.sides[1].control_up(0);
    assert_eq!(asked(&mut pair.sides[1]), [0; 0]);
}

#[test]
fn a_lane_that_cannot_be_opened_is_reported_and_requested_again_later() {
    let (mut pair, _) = connected(one_opener());
    pair.did(0);
    let (fault, text) = (FaultCode::LaneLost, "cannot reach it".to_owned());
    pair.sides[0].not_opened(1, fault, text.clone());
    let refused = |lane| Action::LaneRefused {
        lane,
        fault,
        text: text.clone(),
    };
    let did = pair.did(1);
    assert!(did.contains(&refused(1)), "{did:?}");
    assert_eq!(pair.did(0), []);
    pair.now_ns += Timeouts::default().retry_first_ns;
    assert_eq!(pair.did(0), [Action::OpenLaneFor(2)]);
    // The reason why a lane was not opened arrives after the lane has timed out. It is still
    // reported, but only once.
    pair.now_ns += Timeouts::default().open_ns;
    pair.did(1);
    pair.sides[0].not_opened(2, fault, text.clone());
    assert_eq!(pair.did(1), [refused(2)]);
    pair.sides[0].refuse_lane(2, fault, text.clone());
    assert_eq!(pair.did(1), []);
}

#[test]
fn a_side_reports_the_lanes_that_it_cannot_open_from_version_2_on() {
    for version in [1, 2] {
        let config = Config {
            version,
            ..Config::default()
        };
        let (mut pair, _) = connected(config);
        pair.did(1);
        let (fault, text) = (FaultCode::LaneLost, "cannot reach it".to_owned());
        let failed = Action::LaneFailed {
            lane: 1,
            fault,
            text: text.clone(),
        };
        for expected in [vec![failed], vec![]] {
            pair.sides[0].lane_failed(1, fault, text.clone(), 0);
            let expected = if version == 1 { vec![] } else { expected };
            assert_eq!(pair.did(1), expected, "version {version}");
        }
    }
}

/// Polls until the accepting side has waited too long for a lane.
fn waits_for_lanes(pair: &mut Pair, channel: u32) {
    pair.sides[1].readable(channel);
    pair.settle();
    let until_ns = pair.now_ns + Timeouts::default().alone_ns;
    while pair.now_ns < until_ns {
        assert_eq!(pair.sides[1].channels(), 1);
        pair.now_ns += 1_000 * MS;
        // The opening side neither opens a lane nor reports why.
        pair.settle();
    }
}

#[test]
fn without_lanes_from_the_opening_side_channels_are_aborted_and_the_trunk_ends() {
    let (mut pair, channel) = connected(one_opener());
    waits_for_lanes(&mut pair, channel);
    let fault = FaultCode::LaneLost;
    let far = pair.did(1);
    assert!(far.contains(&abort(channel, fault, false)), "{far:?}");
    assert_eq!(far.last(), Some(&Action::GiveUp(fault)), "{far:?}");
    // The other side has received the reason before the end.
    let near = pair.did(0);
    assert!(near.contains(&abort(channel, fault, true)), "{near:?}");
    assert!(pair.sides[0].drained());
}

#[test]
fn i7_a_trunk_without_lanes_ends_although_the_peer_confirms_nothing() {
    let (mut pair, channel) = connected(one_opener());
    pair.sides[1].readable(channel);
    let alone_ns = Timeouts::default().alone_ns;
    let side = &mut pair.sides[1];
    let mut ended = None;
    for second in 1..=3 * alone_ns / (1_000 * MS) {
        let now_ns = second * 1_000 * MS;
        while let Some(action) = side.poll(now_ns) {
            if let Action::GiveUp(fault) = action {
                ended = ended.or(Some((now_ns, fault)));
            }
        }
        while side.next_message(now_ns).is_some() {}
    }
    let (at_ns, fault) = ended.unwrap();
    assert_eq!(fault, FaultCode::LaneLost);
    assert!(at_ns >= 2 * alone_ns - 1_000 * MS, "{at_ns}");
    assert_eq!(side.open(opening(1)), Err(OpenError::Over));
}
