//! Tests that the engine calls every hook of a VMM in the documented order, on success and on each
//! failure.
#![allow(clippy::unwrap_used)]

use dunlin::engine::VmIs;
use dunlin_test_support::engine::{tls, verified};
use dunlin_test_support::hooks::{Calls, Machines, Vm, attempt};

/// The calls at the source in a migration that succeeds. [`ARRIVED`] has those at the destination.
const MOVED: [&str; 8] = [
    "describe",
    "start",
    "pause",
    "deactivate",
    "save",
    "hold",
    "stop",
    "destroy",
];
const ARRIVED: [&str; 5] = ["build", "load", "acquire", "resume", "announce"];

/// The failing steps; the calls at the source and at the destination; and where the VM is
/// afterwards.
type Row = (
    &'static [&'static str],
    &'static str,
    &'static str,
    Option<VmIs>,
);

/// A migration that succeeds, a failure at each step, and failures of a step and of its rollback.
const TABLE: [Row; 15] = [
    (
        &[],
        "describe start pause deactivate save hold stop destroy",
        "build load acquire resume announce",
        None,
    ),
    (&["source describe"], "describe", "", Some(VmIs::AtSource)),
    (
        &["destination build"],
        "describe",
        "build",
        Some(VmIs::AtSource),
    ),
    (
        &["destination memory"],
        "describe",
        "build discard",
        Some(VmIs::AtSource),
    ),
    (
        &["source start"],
        "describe start stop",
        "build discard",
        Some(VmIs::AtSource),
    ),
    (
        &["source fetch"],
        "describe start stop",
        "build discard",
        Some(VmIs::AtSource),
    ),
    (
        &["source pause"],
        "describe start pause resume stop",
        "build discard",
        Some(VmIs::AtSource),
    ),
    (
        &["source deactivate"],
        "describe start pause deactivate reactivate resume stop",
        "build discard",
        Some(VmIs::AtSource),
    ),
    (
        &["source save"],
        "describe start pause deactivate save reactivate resume stop",
        "build discard",
        Some(VmIs::AtSource),
    ),
    (
        &["destination load"],
        "describe start pause deactivate save reactivate resume stop",
        "build load discard",
        Some(VmIs::AtSource),
    ),
    (
        &["source hold"],
        "describe start pause deactivate save hold reactivate resume stop",
        "build load discard",
        Some(VmIs::AtSource),
    ),
    (
        &["destination acquire"],
        "describe start pause deactivate save hold reactivate resume stop",
        "build load acquire discard",
        Some(VmIs::AtSource),
    ),
    (
        &["destination resume"],
        "describe start pause deactivate save hold stop",
        "build load acquire resume discard",
        Some(VmIs::RanThenDied),
    ),
    (
        &["source hold", "source reactivate"],
        "describe start pause deactivate save hold reactivate stop",
        "build load discard",
        Some(VmIs::StuckAtSource),
    ),
    (
        &["source hold", "source resume"],
        "describe start pause deactivate save hold reactivate resume stop",
        "build load discard",
        Some(VmIs::StuckAtSource),
    ),
];

#[test]
fn i1_i2_every_hook_is_called_in_its_order_whatever_fails() {
    let tls = tls();
    for (fail, here, there, vm_is) in TABLE {
        let calls = Calls::default();
        let vm = Vm::new(2, false, &calls, fail);
        vm.start();
        let mut machines = Machines {
            sections: 2,
            huge: false,
            calls: calls.clone(),
            fail: fail.to_vec(),
            built: None,
        };
        let (moved, arrived) = attempt(&vm, &mut machines, &tls, &verified(2), &|_| ());
        assert_eq!(
            moved.as_ref().err().map(|e| e.vm),
            vm_is,
            "{fail:?}: {moved:?}"
        );
        assert_eq!(calls.of("source").join(" "), here, "{fail:?}");
        assert_eq!(calls.of("destination").join(" "), there, "{fail:?}");
        assert_eq!(arrived.is_ok(), vm_is.is_none(), "{fail:?}");
        let built = machines.built.as_ref();
        let runs_there = built.is_some_and(|built| built.goes_on());
        assert_eq!(runs_there, vm_is.is_none(), "{fail:?}");
        assert_eq!(vm.goes_on(), vm_is == Some(VmIs::AtSource), "{fail:?}");
    }
}

#[test]
fn i1_nothing_is_taken_before_it_was_let_go_and_nothing_runs_before_the_hold_is_over() {
    let tls = tls();
    let calls = Calls::default();
    let vm = Vm::new(2, false, &calls, &[]);
    vm.start();
    let mut machines = Machines {
        sections: 2,
        huge: false,
        calls: calls.clone(),
        fail: Vec::new(),
        built: None,
    };
    attempt(&vm, &mut machines, &tls, &verified(2), &|_| ())
        .0
        .unwrap();
    assert_eq!(calls.of("source"), MOVED);
    assert_eq!(calls.of("destination"), ARRIVED);
    // The order of calls across both hosts, for pairs of calls that have a fixed order.
    let all = calls.all();
    let at = |call: &str| all.iter().position(|one| *one == call).unwrap();
    for (first, then) in [
        ("source describe", "destination build"),
        ("destination build", "source start"),
        ("source deactivate", "destination load"),
        ("source save", "destination load"),
        ("destination load", "source hold"),
        ("source hold", "destination acquire"),
        ("destination acquire", "destination resume"),
        ("destination resume", "destination announce"),
        ("destination resume", "source destroy"),
    ] {
        assert!(at(first) < at(then), "{first}, {then}: {all:?}");
    }
}
