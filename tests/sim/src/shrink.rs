//! Minimises a failing plan.

use crate::check::Violation;
use crate::plan::{MS, Plan};
use crate::run;

/// After this number of runs, the minimisation ends with the next smaller plan that it finds.
const TRIES: usize = 2000;
/// The number of other seeds with which a plan is tried after one of its faults was removed. The
/// removal changes all later random events, so the violation may occur only with another seed.
const COURSES: u64 = 16;

/// The smallest plan found that violates the same invariant as the given plan. The search removes
/// faults first, then reduces pages and lanes, and shortens the run.
#[must_use]
pub fn shrink(plan: &Plan, violation: &Violation) -> (Plan, Violation) {
    let mut best = (plan.clone(), violation.clone());
    let mut tries = 0;
    loop {
        let mut smaller = candidates(&best.0).into_iter();
        let found = smaller.find_map(|plan| {
            tries += 1;
            let failure = run(&plan).err()?;
            (failure.invariant == violation.invariant).then_some((plan, failure))
        });
        match found {
            Some(found) if tries < TRIES => best = found,
            Some(found) => return found,
            None => return best,
        }
    }
}

/// Smaller plans: with fewer faults, pages or lanes, or smaller in another respect.
fn candidates(plan: &Plan) -> Vec<Plan> {
    let mut all = Vec::new();
    let mut add = |change: &dyn Fn(&mut Plan)| {
        let mut smaller = plan.clone();
        change(&mut smaller);
        all.push(smaller);
    };
    if plan.faults.len() > 2 {
        let half = plan.faults.len() / 2;
        add(&|plan| plan.faults.truncate(half));
        add(&|plan| {
            plan.faults.drain(..half);
        });
    }
    for index in 0..plan.faults.len() {
        add(&|plan| {
            plan.faults.remove(index);
        });
    }
    if plan.pages > 64 {
        add(&|plan| plan.pages = (plan.pages / 128).max(1) * 64);
        add(&|plan| plan.pages -= 64);
    }
    if plan.lanes > 1 {
        add(&|plan| plan.lanes -= 1);
    }
    if plan.time_limit_ns > 100 * MS {
        add(&|plan| plan.time_limit_ns /= 2);
    }
    if plan.record_limit.is_some() {
        add(&|plan| plan.record_limit = None);
    }
    if plan.slow_disk {
        add(&|plan| plan.slow_disk = false);
    }
    if plan.paced {
        add(&|plan| plan.paced = false);
    }
    if plan.paused {
        add(&|plan| plan.paused = false);
    }
    if plan.first_attempt > 1 {
        add(&|plan| plan.first_attempt = 1);
    }
    if plan.burst > 1 {
        add(&|plan| plan.burst /= 2);
    }
    for index in 0..plan.faults.len() {
        for course in 1..=COURSES {
            add(&|plan| {
                plan.faults.remove(index);
                plan.seed = plan.seed.wrapping_add(course << 32);
            });
        }
    }
    all
}
