//! The configuration of a machine.

use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, PAGE_BYTES};
use thiserror::Error;

/// Guest-physical address of the workload's first page.
pub const WORKLOAD_START: u64 = 0x40_0000;

/// Maximum memory of a machine in bytes. Its page tables must fit below the guest's program.
pub(crate) const MEMORY_LIMIT_BYTES: u64 = 63 << 30;
/// Maximum number of vCPUs.
pub(crate) const VCPU_LIMIT: u8 = 4;
/// Maximum length of a name, in bytes.
pub(crate) const NAME_LIMIT_BYTES: usize = 255;

/// The configuration of a machine. Every field is sent to the destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name for display and logs; at most 255 bytes.
    pub name: String,
    /// Unique identifier of the machine.
    pub uuid: [u8; 16],
    /// The kind of guest.
    pub guest: GuestKind,
    /// Size of the memory: a multiple of 2 MiB, more than 4 MiB, at most 63 GiB.
    pub memory_bytes: u64,
    /// Number of vCPUs, 1 to 4. Each owns an equal share of the working set.
    pub vcpus: u8,
    /// The backing of the memory.
    pub backing: Backing,
    /// Initial content of the workload's pages.
    pub fill: Fill,
    /// The number of bytes, from the start of the workload's pages, that `fill` applies to. Later
    /// pages are zero and unpopulated. `None` means all pages.
    pub fill_bytes: Option<u64>,
    /// The order in which the guest visits its pages.
    pub workload: Workload,
    /// The number of bytes that the guest visits, from the start of the workload's pages. `None`
    /// means all pages.
    pub working_set_bytes: Option<u64>,
    /// Page visits per second, by all vCPUs together; 0 for no limit.
    pub dirty_rate: u64,
    /// Seed from which the memory content is computed.
    pub seed: u64,
    /// Number of page visits, by all vCPUs together, after which the guest powers itself off.
    /// `None` means never.
    pub power_off_after: Option<u64>,
}

impl Default for Config {
    /// A KVM guest with one vCPU and 64 MiB of private, filled memory, visited in order
    /// at full speed.
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

/// Options that each host sets for itself. They are not sent to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    pub(crate) huge_pages: bool,
    pub(crate) digests: bool,
}

impl Default for HostOptions {
    /// The default options: transparent huge pages, and no digests.
    fn default() -> Self {
        Self {
            huge_pages: true,
            digests: false,
        }
    }
}

impl HostOptions {
    /// Sets whether to advise transparent huge pages for the guest's memory. For private
    /// memory, the kernel follows the advice unless its setting `enabled` is `never`. For a memfd,
    /// it follows the advice if its setting `shmem_enabled` is `advise`
    /// (/sys/kernel/mm/transparent_hugepage).
    ///
    /// Drawback: touching a page can populate the 2 MiB around it, so a guest with scattered
    /// content takes up to 512 times as much memory as its pages need. Without huge pages,
    /// populating and moving dense memory takes about twice the CPU time.
    #[must_use]
    pub fn huge_pages(mut self, advised: bool) -> Self {
        self.huge_pages = advised;
        self
    }

    /// Sets whether an arriving machine keeps a digest of each page, for
    /// [`Movable::digests_at_resume`](crate::Movable::digests_at_resume). The digests take CPU time
    /// for each page received, and 8 bytes of memory for each guest page (16 bytes while that
    /// method runs).
    #[must_use]
    pub fn digests(mut self, kept: bool) -> Self {
        self.digests = kept;
        self
    }
}

/// The kind of guest of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestKind {
    /// A virtual machine on KVM, which needs /dev/kvm.
    Kvm,
    /// Threads of this process, one per vCPU, that visit the memory like a KVM guest. Hosts without
    /// /dev/kvm can run a process guest.
    Process,
}

/// Content of a page before its first visit. The guest program and the VM description store the
/// number of a variant, so these numbers must not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeros. The pages are not populated.
    Zero = 0,
    /// Words that do not compress.
    Random = 1,
    /// About half the pages are filled like `Random`, the others like `Zero`, in irregular runs.
    Mixed = 2,
    /// In each 2 MiB, the page in the middle is filled like `Random` and the others like `Zero`.
    /// This is the worst case for huge pages.
    Sparse = 3,
}

/// The order in which each vCPU visits its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// The guest visits no pages and only sends beats.
    Idle,
    /// In the order of addresses.
    Sequential,
    /// In a scattered order that visits each page once per pass.
    Random,
    /// The first eighth of each vCPU's pages gets a share of the visits, and the other pages get
    /// the rest.
    HotSet {
        /// Percentage of the visits that go to the first eighth: 0 to 100.
        share_percent: u8,
    },
}

impl Workload {
    /// Nine of ten visits go to the first eighth of the pages.
    pub const HOT_SET: Self = Self::HotSet { share_percent: 90 };
}

/// An invalid [`Config`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// `name` is too long.
    #[error("name longer than {NAME_LIMIT_BYTES} bytes")]
    Name,
    /// `memory_bytes` is out of range.
    #[error(
        "memory size {0} bytes invalid (must be a multiple of 2 MiB, more than 4 MiB, at most 63 GiB)"
    )]
    Memory(u64),
    /// `vcpus` is out of range.
    #[error("vCPU count {0} out of range (1–{VCPU_LIMIT})")]
    Vcpus(u8),
    /// The working set is larger than the memory after the first 4 MiB, where the workload's pages
    /// start.
    #[error("working set of {set} bytes exceeds the {room} bytes of memory after the first 4 MiB")]
    WorkingSet {
        /// The configured size, in bytes.
        set: u64,
        /// The available size, in bytes.
        room: u64,
    },
    /// The working set has fewer than eight pages per vCPU. Each vCPU has its own pages, and an
    /// eighth of them must be at least one page.
    #[error("working set of {0} bytes below the minimum of eight pages per vCPU")]
    SmallWorkingSet(u64),
    /// The share of the hot set is above 100 %.
    #[error("hot-set share {0} % out of range (0–100)")]
    Share(u8),
}

impl Config {
    /// Checks the configuration.
    ///
    /// # Errors
    /// An error for the first invalid value.
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
    fn values_out_of_range_are_rejected() {
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
