//! What both kinds of guest have in common: their memory, who may run, their beats and their pace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dunlin_linux::mapping::TrackedMemory;

use crate::config::{Config, Workload};
use crate::control::Control;
use crate::heart::Heart;
use crate::pace::{Pace, Pacer};

/// What the threads of a guest share with the rest of the machine.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) memory: Arc<TrackedMemory>,
    pub(crate) control: Control,
    pub(crate) heart: Heart,
    /// The guest is told to power off once all its vCPUs together have made so many visits.
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

    /// Notes a beat of a vCPU at `tsc` by the guest's clock, and returns the visits that it may
    /// make, when it may make them; none if it is to power off. `visits` counts those of all vCPUs.
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
