//! What a machine is like.

use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, PAGE_BYTES};
use thiserror::Error;

/// Guest-physical address of the workload's first page.
pub const WORKLOAD_START: u64 = 0x40_0000;

/// The most memory a machine can have: what its page tables have room for, without the hole.
pub(crate) const MEMORY_LIMIT_BYTES: u64 = 63 << 30;
/// The most vCPUs.
pub(crate) const VCPU_LIMIT: u8 = 4;
/// The longest name, in bytes.
pub(crate) const NAME_LIMIT_BYTES: usize = 255;

/// What a machine is like. Every field travels to the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// For people and logs; at most 255 bytes.
    pub name: String,
    /// The machine's identity.
    pub uuid: [u8; 16],
    /// What runs in it.
    pub guest: GuestKind,
    /// A multiple of 2 MiB, more than 4 MiB, at most 63 GiB.
    pub memory_bytes: u64,
    /// 1 to 4. Each owns an equal share of the working set.
    pub vcpus: u8,
    /// What stands behind the memory.
    pub backing: Backing,
    /// What the first pages of the workload hold at first.
    pub fill: Fill,
    /// How far `fill` reaches; the pages behind are zero and unpopulated. None: to the end.
    pub fill_bytes: Option<u64>,
    /// How the guest goes about its pages.
    pub workload: Workload,
    /// The bytes that the guest visits, counted from the start of the workload's pages. None: all.
    pub working_set_bytes: Option<u64>,
    /// Page visits a second of the whole machine; 0: as fast as it can.
    pub dirty_rate: u64,
    /// Makes the content of one machine differ from another's.
    pub seed: u64,
    /// The guest powers itself off once it has made so many visits.
    pub power_off_after: Option<u64>,
}

impl Default for Config {
    /// A KVM guest: one vCPU, 64 MiB of private memory, filled, visited in order as fast as it goes.
    fn default() -> Self {
        Self {
            name: "microvm".into(),
            uuid: [0; 16],
            guest: GuestKind::Kvm,
            memory_bytes: 64 << 20,
            vcpus: 1,
            backing: Backing::Private,
            fill: Fill::Random,
            fill_bytes: None,
            workload: Workload::Sequential,
            working_set_bytes: None,
            dirty_rate: 0,
            seed: 1,
            power_off_after: None,
        }
    }
}

/// What a host decides for itself about a machine. It does not travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    pub(crate) huge_pages: bool,
}

impl Default for HostOptions {
    /// Transparent huge pages are advised for private memory.
    fn default() -> Self {
        Self { huge_pages: true }
    }
}

impl HostOptions {
    /// Whether transparent huge pages are advised for the guest's memory, if that is private
    /// ([`Backing::Private`]). Best effort: a kernel without them changes nothing.
    ///
    /// Drawback: a page that is touched populates the 2 MiB around it, so that a guest of scattered
    /// content takes up to 512 times the memory of its pages. Alternative: none, at twice the CPU
    /// time for populating and moving memory that is dense.
    #[must_use]
    pub fn huge_pages(mut self, advised: bool) -> Self {
        self.huge_pages = advised;
        self
    }
}

/// What runs in a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestKind {
    /// A guest on KVM.
    Kvm,
    /// No guest of a hypervisor, but threads of this process, one for each vCPU, that go over the
    /// memory in the same way: for hosts without /dev/kvm.
    Process,
}

/// What a page holds before its first visit. The guest and descriptions have it by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing but zeros, and never populated.
    Zero = 0,
    /// Words that do not compress.
    Random = 1,
    /// About half the pages like `Random`, the others like `Zero`, in irregular runs.
    Mixed = 2,
    /// One page like `Random` in the middle of each 2 MiB, the others like `Zero`: what costs most
    /// on huge pages.
    Sparse = 3,
}

/// How each vCPU goes about its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Visits none: beats only.
    Idle,
    /// In order.
    Sequential,
    /// In a scattered order that visits each page once in every pass.
    Random,
    /// The first eighth of the pages gets a share of the visits, the others get the rest.
    HotSet {
        /// Visits in a hundred that go to the first eighth: 0 to 100.
        share_percent: u8,
    },
}

impl Workload {
    /// Nine visits in ten to the first eighth.
    pub const HOT_SET: Self = Self::HotSet { share_percent: 90 };
}

/// What is wrong with a [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// `name` is too long.
    #[error("the name is longer than {NAME_LIMIT_BYTES} bytes")]
    Name,
    /// `memory_bytes` is out of bounds.
    #[error(
        "memory must be a multiple of 2 MiB, more than 4 MiB and at most 63 GiB, not {0} bytes"
    )]
    Memory(u64),
    /// `vcpus` is out of bounds.
    #[error("a machine has 1 to {VCPU_LIMIT} vCPUs, not {0}")]
    Vcpus(u8),
    /// The working set is larger than the memory behind the first 4 MiB.
    #[error("a working set of {set} bytes does not fit into the {room} that the workload has")]
    WorkingSet {
        /// What was asked for, in bytes.
        set: u64,
        /// What there is, in bytes.
        room: u64,
    },
    /// Each vCPU needs pages of its own, and eight of them to have a hot eighth.
    #[error("a working set of {0} bytes is less than eight pages for each vCPU")]
    SmallWorkingSet(u64),
    /// A percentage above a hundred.
    #[error("a share of {0} visits in a hundred is impossible")]
    Share(u8),
}

impl Config {
    /// Whether a machine can be like this.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.name.len() > NAME_LIMIT_BYTES {
            return Err(ConfigError::Name);
        }
        let memory = self.memory_bytes;
        if !memory.is_multiple_of(HUGE_PAGE_BYTES)
            || memory <= WORKLOAD_START
            || memory > MEMORY_LIMIT_BYTES
        {
            return Err(ConfigError::Memory(memory));
        }
        if !(1..=VCPU_LIMIT).contains(&self.vcpus) {
            return Err(ConfigError::Vcpus(self.vcpus));
        }
        let room = memory - WORKLOAD_START;
        let set = self.working_set_bytes.unwrap_or(room);
        if set > room {
            return Err(ConfigError::WorkingSet { set, room });
        }
        if set / PAGE_BYTES < 8 * u64::from(self.vcpus) {
            return Err(ConfigError::SmallWorkingSet(set));
        }
        match self.workload {
            Workload::HotSet { share_percent } if share_percent > 100 => {
                Err(ConfigError::Share(share_percent))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_refuses_what_lies_beyond_it() {
        let good = Config::default();
        assert_eq!(good.validate(), Ok(()));
        let bad = |change: fn(&mut Config)| {
            let mut config = good.clone();
            change(&mut config);
            config.validate()
        };
        assert_eq!(bad(|c| c.name = "x".repeat(256)), Err(ConfigError::Name));
        assert_eq!(
            bad(|c| c.memory_bytes = 4 << 20),
            Err(ConfigError::Memory(4 << 20))
        );
        assert_eq!(
            bad(|c| c.memory_bytes = 64 << 30),
            Err(ConfigError::Memory(64 << 30))
        );
        assert_eq!(
            bad(|c| c.memory_bytes += 1),
            Err(ConfigError::Memory((64 << 20) + 1))
        );
        assert_eq!(bad(|c| c.vcpus = 0), Err(ConfigError::Vcpus(0)));
        assert_eq!(bad(|c| c.vcpus = 5), Err(ConfigError::Vcpus(5)));
        assert!(matches!(
            bad(|c| c.working_set_bytes = Some(61 << 20)),
            Err(ConfigError::WorkingSet { .. })
        ));
        assert!(matches!(
            bad(|c| c.working_set_bytes = Some(7 * 4096)),
            Err(ConfigError::SmallWorkingSet(_))
        ));
        assert_eq!(
            bad(|c| c.workload = Workload::HotSet { share_percent: 101 }),
            Err(ConfigError::Share(101))
        );
    }
}
