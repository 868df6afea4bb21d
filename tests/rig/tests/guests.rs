//! The guests run their workloads and detect changes of their memory.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::process::Command;
use std::time::{Duration, Instant};

use dunlin_rig::guest::{Content, Guest, Line, Workload};
use dunlin_rig::machine::{Accelerator, Machine, MachineError, Setup};
use dunlin_rig::need;
use serde_json::json;

const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 8_000,
    hot: 3_000,
    rate: None,
    content: Content::Random,
    seed: 7,
};

fn start(workload: Workload, accelerator: Accelerator) -> Option<Machine> {
    let qemu = need::qemu()?;
    if accelerator == Accelerator::Kvm && !need::kvm() {
        return None;
    }
    let setup = Setup::new(&qemu, Guest::Bare, workload, accelerator);
    Some(Machine::start(&setup, None).unwrap())
}

#[test]
fn the_bare_guest_fills_and_checks_its_pages_with_any_content() {
    let _turn = need::turn();
    for content in [
        Content::Zero,
        Content::Random,
        Content::Mixed,
        Content::Text,
    ] {
        let workload = Workload {
            content,
            ..WORKLOAD
        };
        let Some(mut machine) = start(workload, Accelerator::Kvm) else {
            return;
        };
        let ready = machine.wait_ready().unwrap();
        let Line::Ready { pages, hot, .. } = ready else {
            panic!("{ready:?}");
        };
        assert_eq!((pages, hot), (workload.pages, workload.hot));
        while machine.next_beat().unwrap().1 < 2 {}
        assert_eq!(
            machine.check_pages().unwrap(),
            workload.pages,
            "{content:?}"
        );
    }
}

#[test]
fn a_failed_command_names_the_state_of_qemu() {
    let _turn = need::turn();
    let Some(mut machine) = start(WORKLOAD, Accelerator::Tcg) else {
        return;
    };
    let state = |failed| match failed {
        Err(MachineError::Command { state, .. }) => state,
        other => panic!("{other:?}"),
    };
    let refused = state(machine.execute("no-such-command", json!({})));
    let main = format!("{} (", machine.process());
    assert!(
        refused.lines().any(|line| line.starts_with(&main)),
        "{refused}"
    );
    let mut signal = Command::new("kill");
    signal.args(["-SEGV", &machine.process().to_string()]);
    assert!(signal.status().unwrap().success());
    let ended = state(machine.execute("query-status", json!({})));
    assert!(ended.contains("signal: 11"), "{ended}");
}

#[test]
fn the_bare_guest_keeps_its_rate_on_kvm_and_under_emulation() {
    let _turn = need::turn();
    for accelerator in [Accelerator::Kvm, Accelerator::Tcg] {
        let rate = 4_000;
        let workload = Workload {
            rate: Some(rate),
            ..WORKLOAD
        };
        let Some(mut machine) = start(workload, accelerator) else {
            continue;
        };
        machine.wait_ready().unwrap();
        let start = Instant::now();
        let (before, _) = machine.next_beat().unwrap();
        let mut now = before;
        while start.elapsed() < Duration::from_secs(1) {
            (now, _) = machine.next_beat().unwrap();
        }
        let most = rate as f64 * start.elapsed().as_secs_f64() * 1.2;
        println!(
            "{accelerator:?}: {} visits, at most {most:.0}",
            now - before
        );
        // On a busy machine the guest may fall below its rate, but it never exceeds the rate.
        assert!(now > before);
        assert!(((now - before) as f64) < most, "{} visits", now - before);
        machine.check_pages().unwrap();
    }
}
