use super::*;
use Action::{Cancel, Pause, Postcopy, Rate, Start};

const RULES: Rules = Rules {
    parallel: 1,
    budgets: Budgets {
        outbound: None,
        inbound: None,
    },
    time: None,
    on_limit: OnLimit::Cancel,
};

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn ended(vm: usize) -> Event {
    Event::Ended {
        vm,
        is_doubtful: false,
    }
}

/// A schedule of VMs to the given destinations, after its first tick.
fn begun(rules: Rules, to: &[usize]) -> (Schedule, Vec<Action>) {
    let to = to.iter().map(|to| (*to, false)).collect();
    let mut schedule = Schedule::new(rules, to, false);
    let first = schedule.handle(seconds(0), Event::Tick);
    (schedule, first)
}

#[test]
fn one_vm_moves_and_the_next_starts_when_it_reaches_switchover() {
    let (mut schedule, first) = begun(RULES, &[0, 0, 0]);
    assert_eq!(first, [Start(0, None)]);
    let copying = Event::Seen(0, Phase::Copying);
    assert!(schedule.handle(seconds(1), copying).is_empty());
    let switchover = Event::Seen(0, Phase::Switchover);
    assert_eq!(schedule.handle(seconds(2), switchover), [Start(1, None)]);
    assert!(schedule.handle(seconds(3), switchover).is_empty());
    assert!(schedule.handle(seconds(3), ended(0)).is_empty());
    // A VM that was never seen in switchover frees its place when it ends.
    assert_eq!(schedule.handle(seconds(4), ended(1)), [Start(2, None)]);
    assert!(!schedule.is_over());
    assert!(schedule.handle(seconds(5), ended(2)).is_empty());
    assert!(schedule.is_over());
}

#[test]
fn a_vm_in_post_copy_keeps_its_place() {
    let (mut schedule, _) = begun(RULES, &[0, 0]);
    let postcopy = Event::Seen(0, Phase::Postcopy);
    assert!(schedule.handle(seconds(1), postcopy).is_empty());
    assert_eq!(schedule.handle(seconds(2), ended(0)), [Start(1, None)]);
}

#[test]
fn parallel_vms_share_the_budgets_and_a_share_grows_when_another_vm_ends() {
    let rules = Rules {
        parallel: 2,
        budgets: Budgets {
            outbound: Some(100),
            inbound: Some(80),
        },
        ..RULES
    };
    let (mut schedule, first) = begun(rules, &[0, 1, 0]);
    assert_eq!(first, [Start(0, Some(50)), Start(1, Some(50))]);
    // A third VM starts during a switchover, which takes no share of the budget.
    let switchover = Event::Seen(0, Phase::Switchover);
    assert_eq!(
        schedule.handle(seconds(1), switchover),
        [Start(2, Some(50))]
    );
    assert!(schedule.handle(seconds(2), ended(0)).is_empty());
    // The inbound budget limits the last VM.
    assert_eq!(schedule.handle(seconds(3), ended(1)), [Rate(2, Some(80))]);
}

#[test]
fn rates_fall_before_the_next_vm_starts() {
    let rules = Rules {
        parallel: 2,
        budgets: Budgets {
            outbound: Some(90),
            inbound: None,
        },
        ..RULES
    };
    let (mut schedule, _) = begun(rules, &[0, 0, 0]);
    schedule.handle(seconds(1), Event::Seen(0, Phase::Switchover));
    // The first VM goes back to copying, so three VMs share the budget.
    let actions = schedule.handle(seconds(2), Event::Seen(0, Phase::Copying));
    assert_eq!(actions, [0, 1, 2].map(|vm| Rate(vm, Some(30))));
    let (mut schedule, first) = begun(
        Rules {
            parallel: 1,
            ..rules
        },
        &[0, 0],
    );
    assert_eq!(first, [Start(0, Some(90))]);
    schedule.rules.parallel = 2;
    let actions = schedule.handle(seconds(1), Event::Tick);
    assert_eq!(actions, [Rate(0, Some(45)), Start(1, Some(45))]);
}

#[test]
fn no_more_vms_start_than_the_budget_has_mebibytes_per_second() {
    let rules = Rules {
        parallel: 8,
        budgets: Budgets {
            outbound: Some(3),
            inbound: Some(2),
        },
        ..RULES
    };
    let (_, first) = begun(rules, &[0; 4]);
    assert_eq!(first, [Start(0, Some(1)), Start(1, Some(1))]);
}

#[test]
fn a_vm_over_its_time_is_cancelled_until_it_ends() {
    let rules = Rules {
        time: Some(seconds(60)),
        ..RULES
    };
    let (mut schedule, _) = begun(rules, &[0, 0]);
    assert!(schedule.handle(seconds(59), Event::Tick).is_empty());
    assert_eq!(schedule.handle(seconds(60), Event::Tick), [Cancel(0)]);
    let soon = seconds(60) + AGAIN / 2;
    assert!(schedule.handle(soon, Event::Tick).is_empty());
    assert_eq!(schedule.handle(seconds(61), Event::Tick), [Cancel(0)]);
    assert_eq!(schedule.handle(seconds(62), ended(0)), [Start(1, None)]);
    // The time limit of the second VM counts from that VM's own start.
    assert!(schedule.handle(seconds(100), Event::Tick).is_empty());
}

#[test]
fn a_vm_over_its_time_is_asked_to_pause_or_to_switch_to_post_copy_until_it_does() {
    let with = |on_limit| Rules {
        time: Some(seconds(60)),
        on_limit,
        ..RULES
    };
    let (mut schedule, _) = begun(with(OnLimit::Pause), &[0]);
    assert_eq!(schedule.handle(seconds(60), Event::Tick), [Pause(0)]);
    let soon = seconds(60) + AGAIN / 2;
    assert!(schedule.handle(soon, Event::Tick).is_empty());
    assert_eq!(schedule.handle(seconds(62), Event::Tick), [Pause(0)]);
    let paused = Event::Seen(0, Phase::Paused);
    assert!(schedule.handle(seconds(63), paused).is_empty());
    assert!(schedule.handle(seconds(90), Event::Tick).is_empty());
    let (mut schedule, _) = begun(with(OnLimit::Postcopy), &[0]);
    assert_eq!(schedule.handle(seconds(60), Event::Tick), [Postcopy(0)]);
    assert_eq!(schedule.handle(seconds(62), Event::Tick), [Postcopy(0)]);
    assert!(
        schedule
            .handle(seconds(63), Event::Seen(0, Phase::Postcopy))
            .is_empty()
    );
    assert!(schedule.handle(seconds(90), Event::Tick).is_empty());
}

#[test]
fn an_interrupt_lets_switchovers_finish_cancels_the_others_and_starts_none() {
    let rules = Rules {
        parallel: 2,
        ..RULES
    };
    let (mut schedule, _) = begun(rules, &[0; 4]);
    schedule.handle(seconds(1), Event::Seen(0, Phase::Switchover));
    let actions = schedule.handle(seconds(2), Event::Interrupt);
    assert_eq!(actions, [Cancel(1), Cancel(2)]);
    assert_eq!(schedule.finishing(), [0]);
    assert!(schedule.handle(seconds(2), ended(1)).is_empty());
    assert!(schedule.handle(seconds(2), ended(2)).is_empty());
    assert!(!schedule.is_over());
    // A VM that goes back from switchover to copying is cancelled, too.
    assert_eq!(
        schedule.handle(seconds(3), Event::Seen(0, Phase::Copying)),
        [Cancel(0)]
    );
    assert!(schedule.handle(seconds(4), ended(0)).is_empty());
    assert!(schedule.is_over());
}

#[test]
fn an_interrupt_cancels_a_vm_that_was_paused_for_its_time() {
    let rules = Rules {
        time: Some(seconds(60)),
        on_limit: OnLimit::Pause,
        ..RULES
    };
    let (mut schedule, _) = begun(rules, &[0]);
    assert_eq!(schedule.handle(seconds(60), Event::Tick), [Pause(0)]);
    schedule.handle(seconds(61), Event::Seen(0, Phase::Paused));
    assert!(schedule.finishing().is_empty());
    assert_eq!(schedule.handle(seconds(62), Event::Interrupt), [Cancel(0)]);
}

/// A killed command can leave more migrations under way than the next command may run at the same
/// time.
#[test]
fn migrations_under_way_take_their_places_at_once_even_after_a_doubt() {
    let to = vec![(0, true), (0, true), (0, false)];
    let rules = Rules {
        budgets: Budgets {
            outbound: Some(8),
            inbound: None,
        },
        ..RULES
    };
    for is_halted in [false, true] {
        let mut schedule = Schedule::new(rules, to.clone(), is_halted);
        let first = schedule.handle(seconds(0), Event::Tick);
        assert_eq!(first, [Start(0, Some(4)), Start(1, Some(4))]);
        let rest = schedule.handle(seconds(1), ended(0));
        assert_eq!(rest, [Rate(1, Some(8))]);
        assert!(!schedule.is_over());
        let rest = schedule.handle(seconds(2), ended(1));
        assert_eq!(rest.is_empty(), is_halted);
        assert_eq!(schedule.is_over(), is_halted);
    }
}

#[test]
fn i1_after_a_doubt_nothing_starts_and_what_moves_goes_on() {
    let rules = Rules {
        parallel: 2,
        ..RULES
    };
    let (mut schedule, _) = begun(rules, &[0; 4]);
    let doubt = Event::Ended {
        vm: 0,
        is_doubtful: true,
    };
    assert!(schedule.handle(seconds(1), doubt).is_empty());
    assert!(!schedule.is_over());
    assert!(schedule.handle(seconds(2), ended(1)).is_empty());
    assert!(schedule.is_over());
}
