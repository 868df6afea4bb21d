//! State that KVM guests and process guests share: memory, control, beats and pace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dunlin_linux::mapping::TrackedMemory;

use crate::config::{Config, Workload};
use crate::control::Control;
use crate::heart::Heart;
use crate::pace::{Pace, Pacer};

/// State shared by the threads of a guest and the rest of the machine. A *beat* is the message that
/// each vCPU sends to the VMM about every millisecond.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) memory: Arc<TrackedMemory>,
    pub(crate) control: Control,
    pub(crate) heart: Heart,
    /// Total number of page visits by all vCPUs after which the guest must power off.
    pub(crate) power_off_at: AtomicU64,
    pub(crate) pace: Pace,
}

impl Common {
    pub(crate) fn new(memory: Arc<TrackedMemory>, config: &Config, tsc_khz: u32) -> Self {
        Self {
            memory,
            control: Control::new(config.vcpus),
            heart: Heart::new(config.vcpus, tsc_khz),
            power_off_at: AtomicU64::new(config.power_off_after.unwrap_or(u64::MAX)),
            pace: pace(config),
        }
    }

    /// Records a beat of a vCPU at time `tsc` of the guest's clock, and waits until the vCPU's next
    /// turn. Returns the number of pages that the vCPU may visit in that turn. It is 0 if the turn
    /// is only for the next beat, or if the vCPU must leave the guest. Returns `None`, without
    /// waiting, if the guest must power off. The function `visits` returns the number of visits
    /// that all vCPUs have made so far.
    pub(crate) fn beat(
        &self,
        vcpu: u8,
        tsc: u64,
        visits: impl FnOnce() -> u64,
        pacer: &mut Pacer,
    ) -> Option<u32> {
        self.heart.beat(vcpu, tsc);
        let power_off_at = self.power_off_at.load(Ordering::Relaxed);
        if power_off_at != u64::MAX && visits() >= power_off_at {
            return None;
        }
        let turn = pacer.turn(Instant::now(), self.control.throttle_percent());
        if !self.control.wait_until(turn.due) {
            return Some(0);
        }
        pacer.begin(Instant::now());
        Some(turn.visits)
    }
}

fn pace(config: &Config) -> Pace {
    match (config.workload, config.dirty_rate) {
        (Workload::Idle, _) => Pace::Idle,
        (_, 0) => Pace::Unpaced,
        (_, rate) => Pace::Rate(rate as f64 / f64::from(config.vcpus)),
    }
}
