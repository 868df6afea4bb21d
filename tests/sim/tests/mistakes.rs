//! Plants each mistake, and checks that the simulator finds it. A mistake affects the whole
//! process, so these tests run in their own process.

#![allow(clippy::unwrap_used)]

use dunlin_proto::mistake::{Mistake, plant};
use dunlin_sim::{Plan, Violation, run, shrink, stripe};

const SEEDS: u64 = 10_000;

fn first_failure() -> Option<(Plan, Violation)> {
    (0..SEEDS).find_map(|seed| {
        let plan = Plan::new(seed);
        let violation = run(&plan).err()?;
        Some((plan, violation))
    })
}

#[test]
fn i1_i2_i3_i4_i5_every_planted_mistake_is_found() {
    let mut missed = Vec::new();
    for &mistake in Mistake::ALL {
        let planted = plant(Some(mistake));
        let found = first_failure();
        drop(planted);
        let Some((plan, violation)) = found else {
            missed.push(mistake);
            continue;
        };
        println!("{mistake:?}: after {} seeds: {violation}", plan.seed + 1);
        let _none = plant(None);
        let without = run(&plan);
        assert!(
            without.is_ok(),
            "the run also fails without {mistake:?}: {without:?}"
        );
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn i8_every_planted_mistake_of_the_tunnel_is_found() {
    let mut missed = Vec::new();
    for &mistake in Mistake::STRIPE {
        let planted = plant(Some(mistake));
        let found = (0..1000).find_map(|seed| {
            let violation = stripe::run(&stripe::Plan::new(seed)).err()?;
            Some((seed, violation))
        });
        drop(planted);
        let Some((seed, violation)) = found else {
            missed.push(mistake);
            continue;
        };
        println!("{mistake:?}: after {} seeds: {violation}", seed + 1);
        let _none = plant(None);
        let without = stripe::run(&stripe::Plan::new(seed));
        assert!(
            without.is_ok(),
            "the run also fails without {mistake:?}: {without:?}"
        );
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn a_plan_that_fails_shrinks() {
    let _planted = plant(Some(Mistake::NoRedirty));
    let (plan, violation) = first_failure().unwrap();
    let (smaller, same) = shrink(&plan, &violation);
    assert_eq!(same.invariant, violation.invariant);
    assert!(smaller.faults.len() <= 2, "{:?}", smaller.faults);
    assert!(smaller.pages <= plan.pages && smaller.lanes <= plan.lanes);
    assert!(run(&smaller).is_err());
}
