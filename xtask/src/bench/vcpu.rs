//! The share of a CPU that a guest's virtual CPU may use.
//!
//! The bare guest spins until its next write is due, because not every KVM delivers the interrupt
//! that would wake it from a halt. On a host with two CPUs it would take one of them from the
//! migration, which a guest that halts does not. The benchmarks therefore limit the thread of its
//! virtual CPU at the source to a share in which the writes still fit.
//!
//! A measurement ends when the guest runs at the destination, so there is no limit there. With one,
//! set before the migration, the guest reported nothing after it; the cause was not found.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use dunlin_rig::cloud_hypervisor::CloudHypervisor;
use dunlin_rig::machine::Machine;
use serde_json::{Value, json};

/// The time within a period in which the virtual CPU may run. A guest that is to write to 20 000
/// pages per second wrote to 19 500 with this limit.
const RUNTIME_NS: u32 = 1_000_000;
/// The length of a period.
const PERIOD_NS: u32 = 5_000_000;

/// Limits the virtual CPUs of QEMU.
pub(super) fn limit_qemu(machine: &mut Machine) -> Result<()> {
    let cpus = machine.execute("query-cpus-fast", json!({}))?;
    let cpus = cpus.as_array().context("QEMU lists no CPUs")?;
    ensure!(!cpus.is_empty(), "QEMU lists no CPUs");
    for cpu in cpus {
        let thread = cpu.get("thread-id").and_then(Value::as_u64);
        limit(thread.context("QEMU does not report the thread of a CPU")?)?;
    }
    Ok(())
}

/// Limits the virtual CPU of a Cloud Hypervisor with one.
pub(super) fn limit_cloud_hypervisor(vmm: &CloudHypervisor) -> Result<()> {
    let folder = format!("/proc/{}/task", vmm.process());
    for thread in fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))? {
        let thread = thread?;
        let name = fs::read_to_string(thread.path().join("comm"))?;
        if name.trim_end() == "vcpu0" {
            let id = thread.file_name();
            return limit(id.to_string_lossy().parse()?);
        }
    }
    bail!("Cloud Hypervisor has no thread named vcpu0")
}

/// Gives a thread the scheduling class for deadlines, in which the kernel enforces the runtime.
fn limit(thread: u64) -> Result<()> {
    let mut command = Command::new("chrt");
    command
        .args(["--deadline", "--sched-runtime", &RUNTIME_NS.to_string()])
        .args(["--sched-deadline", &PERIOD_NS.to_string()])
        .args(["--sched-period", &PERIOD_NS.to_string()])
        .args(["--pid", "0", &thread.to_string()]);
    let output = command
        .output()
        .context("cannot run chrt, from the package util-linux")?;
    ensure!(
        output.status.success(),
        "cannot limit the CPU time of a guest, which needs root: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(())
}
