//! Checks that the tests of keying sessions find mistakes that are planted in the decisions.

use std::panic::catch_unwind;

use super::exchange::tests as exchange;
use super::plan::adopt::tests as adopt;
use super::plan::tests as plan;
use crate::mistake::{Mistake, plant};

#[test]
fn i6_planted_mistakes_of_ipsec_are_found() {
    let finds = |test: fn(), mistake| {
        let _planted = plant(mistake);
        catch_unwind(test).is_err()
    };
    let all = [&exchange::FOUND_BY[..], &plan::FOUND_BY, &adopt::FOUND_BY].concat();
    for (mistake, test) in &all {
        assert!(
            !finds(*test, None),
            "the test for {mistake:?} fails without it"
        );
        assert!(finds(*test, Some(*mistake)), "{mistake:?} was not found");
    }
    for mistake in Mistake::IPSEC {
        assert!(all.iter().any(|(tried, _)| tried == mistake), "{mistake:?}");
    }
}
