#![allow(clippy::unwrap_used)]

use super::*;

fn last(chunks: u64, pages: u64, fenced: u32) -> Final {
    Final {
        chunks,
        iteration: 1,
        sections: 0,
        pages,
        fenced,
        digest: None,
    }
}

fn receiving(lanes: u16) -> Receiving {
    let mut receiving = Receiving::new(8);
    for lane in 1..=lanes {
        receiving.admit(lane).unwrap();
    }
    receiving
}

#[test]
fn complete_once_lanes_have_ended_and_counts_match() {
    let mut receiving = receiving(1);
    receiving.check_chunk(1, 0, 1).unwrap();
    receiving.written(1, 0, 64).unwrap();
    receiving.finish(last(1, 64, 0));
    assert_eq!(receiving.is_complete(), Ok(false), "lane 1 is open");
    receiving.mark(1, 1).unwrap();
    receiving.ended(1, 1).unwrap();
    assert_eq!(receiving.is_complete(), Ok(true));
    assert_eq!(receiving.admit(2), Err(LaneRefusal::Complete));
    assert!(!receiving.gone(1));
}

#[test]
fn i3_a_final_sent_before_a_lane_was_lost_is_not_enough() {
    let mut receiving = receiving(2);
    receiving.written(1, 0, 64).unwrap();
    receiving.ended(1, 1).unwrap();
    receiving.finish(last(2, 128, 0));
    assert!(receiving.gone(2));
    assert_eq!(receiving.is_complete(), Ok(false));
    receiving.admit(3).unwrap();
    receiving.written(3, 2, 64).unwrap();
    receiving.ended(3, 1).unwrap();
    assert_eq!(receiving.is_complete(), Ok(false));
    receiving.finish(last(2, 128, 1));
    assert_eq!(receiving.is_complete(), Ok(true));
}

#[test]
fn i7_wrong_counts_are_the_sources_fault() {
    let mut receiving = receiving(1);
    receiving.written(1, 0, 64).unwrap();
    assert!(receiving.ended(1, 2).is_err());
    receiving.ended(1, 1).unwrap();
    receiving.finish(last(2, 64, 0));
    assert!(receiving.is_complete().is_err());
}

#[test]
fn i4_a_lane_number_is_never_used_twice_even_if_never_opened() {
    let mut receiving = receiving(1);
    assert_eq!(receiving.admit(1), Err(LaneRefusal::Used { lane: 1 }));
    assert_eq!(receiving.fence(2), Fence::Answer);
    assert_eq!(receiving.admit(2), Err(LaneRefusal::Used { lane: 2 }));
    assert_eq!(receiving.fence(1), Fence::Close);
    assert!(receiving.is_closing(1));
    assert!(receiving.gone(1));
    assert_eq!(receiving.fence(1), Fence::Answer, "a repetition");
    receiving.finish(last(0, 0, 2));
    assert_eq!(receiving.is_complete(), Ok(true));
}

#[test]
fn i4_a_chunk_must_match_the_iteration_of_the_lanes_marks() {
    let mut receiving = receiving(2);
    assert!(receiving.check_chunk(1, 0, 2).is_err());
    receiving.mark(1, 1).unwrap();
    assert!(!receiving.may_pass(1));
    assert!(receiving.check_chunk(1, 0, 1).is_err());
    receiving.check_chunk(1, 0, 2).unwrap();
    receiving.gone(2);
    assert!(receiving.may_pass(1));
    assert!(receiving.check_chunk(2, 1, 1).is_err());
}

#[test]
fn i7_lanes_over_the_limit_are_refused() {
    let mut receiving = Receiving::new(1);
    receiving.admit(4).unwrap();
    assert_eq!(receiving.admit(5), Err(LaneRefusal::Limit { open: 1 }));
    receiving.ended(4, 0).unwrap();
    receiving.admit(5).unwrap();
}

#[test]
fn reports_are_taken_once_and_repeated_in_full() {
    let mut receiving = receiving(2);
    for number in [1, 0] {
        receiving.written(1, number, 1).unwrap();
    }
    receiving.mark(1, 1).unwrap();
    let (sets, reached) = receiving.take_reports();
    assert_eq!(sets, [ChunkSet { first: 0, count: 2 }]);
    let at = |lane, position| Reached { lane, position };
    assert_eq!(reached, [at(1, Position::Mark(1))]);
    assert!(!receiving.has_reports());
    receiving.written(2, 3, 1).unwrap();
    receiving.ended(2, 1).unwrap();
    let (sets, reached) = receiving.repeat();
    assert_eq!(sets.len(), 2);
    assert_eq!(reached, [at(1, Position::Mark(1)), at(2, Position::End)]);
}

#[test]
fn a_fence_is_answered_even_if_the_lane_ends_in_order_meanwhile() {
    let mut receiving = receiving(1);
    receiving.written(1, 0, 1).unwrap();
    assert_eq!(receiving.fence(1), Fence::Close);
    receiving.ended(1, 1).unwrap();
    assert!(receiving.gone(1));
    assert!(!receiving.gone(1));
}
