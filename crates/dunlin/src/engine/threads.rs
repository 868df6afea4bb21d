//! Threads of a session, and their CPU time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use dunlin_linux::affinity::thread_cpu_time;
use dunlin_proto::fault::FaultCode;

use super::fault::{Fault, OrFault};
use super::host::Host;

/// The total CPU time of a session's ended threads. Each thread adds its own time when it ends.
#[derive(Clone, Default)]
pub(super) struct CpuTime(Arc<AtomicU64>);

impl CpuTime {
    pub(super) fn used(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Starts a thread of a session.
pub(super) fn spawn(
    host: &dyn Host,
    name: impl Into<String>,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Fault> {
    host.spawn(name.into(), Box::new(body))
        .or_fault(FaultCode::Kernel, "cannot start a thread")
}

/// Starts a thread, and adds its CPU time to `cpu` when it ends.
pub(super) fn spawn_counted(
    host: &dyn Host,
    name: impl Into<String>,
    cpu: &CpuTime,
    body: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, Fault> {
    let cpu = cpu.clone();
    spawn(host, name, move || {
        body();
        cpu.0.fetch_add(nanos(thread_cpu_time()), Ordering::Relaxed);
    })
}

/// `duration` in nanoseconds, at most [`u64::MAX`].
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
