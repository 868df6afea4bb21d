//! A limit on the CPU time of a guest that spins.
//!
//! The bare guest spins until its next write is due, because not every KVM delivers the interrupt
//! that would wake it from a halt. On a host with two CPUs it would take one of them from the
//! migration. The benchmarks therefore limit the thread of its virtual CPU at the source to a share
//! in which the writes still fit. A guest that halts would use less, and would not wait for the next
//! period before it writes.
//!
//! There is no limit at the destination, where the guest runs only at the end of a measurement. With
//! one, set before the migration, the guest reported nothing after it; the cause was not found.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use dunlin_rig::cloud_hypervisor::CloudHypervisor;
use dunlin_rig::guest::Workload;
use dunlin_rig::machine::{Accelerator, Machine, Setup};
use serde_json::{Value, json};

/// The time within a period in which the virtual CPU may run. With this limit in QEMU, and without
/// a migration, a guest that is to write to 20 000 pages per second wrote to 19 500.
const RUNTIME_NS: u32 = 1_000_000;
/// The length of a period.
const PERIOD_NS: u32 = 5_000_000;

/// Checks before a benchmark begins that this process may limit threads.
pub(super) fn check() -> Result<()> {
    chrt(&["0", "true"])
}

/// Limits the virtual CPUs of QEMU if its guest spins. Without KVM, the writes need the whole CPU.
pub(super) fn limit_qemu(machine: &mut Machine, setup: &Setup) -> Result<()> {
    if !spins(&setup.workload) || setup.accelerator != Accelerator::Kvm {
        return Ok(());
    }
    let cpus = machine.execute("query-cpus-fast", json!({}))?;
    let cpus = cpus.as_array().context("QEMU lists no CPUs")?;
    ensure!(!cpus.is_empty(), "QEMU lists no CPUs");
    for cpu in cpus {
        let thread = cpu.get("thread-id").and_then(Value::as_u64);
        limit(thread.context("QEMU does not report the thread of a CPU")?)?;
    }
    Ok(())
}

/// Limits the virtual CPU of a Cloud Hypervisor with one, if its guest spins.
pub(super) fn limit_cloud_hypervisor(vmm: &CloudHypervisor, workload: &Workload) -> Result<()> {
    if !spins(workload) {
        return Ok(());
    }
    let folder = format!("/proc/{}/task", vmm.process());
    for thread in fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))? {
        let thread = thread?;
        // A thread that has ended in the meantime has no name.
        let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if name.trim_end() == "vcpu0" {
            let id = thread.file_name();
            return limit(id.to_string_lossy().parse()?);
        }
    }
    bail!("Cloud Hypervisor has no thread named vcpu0")
}

fn spins(workload: &Workload) -> bool {
    workload.pages > 0
}

/// Gives a thread the scheduling class for deadlines, in which the kernel enforces the runtime.
fn limit(thread: u64) -> Result<()> {
    chrt(&["--pid", "0", &thread.to_string()])
}

/// Runs chrt with the limit. `target` is the end of its command line: the priority, which is 0 in
/// this class, and a thread or a command.
fn chrt(target: &[&str]) -> Result<()> {
    let mut command = Command::new("chrt");
    command
        .args(["--deadline", "--sched-runtime", &RUNTIME_NS.to_string()])
        .args(["--sched-deadline", &PERIOD_NS.to_string()])
        .args(["--sched-period", &PERIOD_NS.to_string()])
        .args(target);
    let output = command
        .output()
        .context("cannot run chrt, from the package util-linux")?;
    ensure!(
        output.status.success(),
        "cannot limit the CPU time of the guests; run the benchmark as root, on all CPUs, or leave \
         the hypervisors out: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(())
}
