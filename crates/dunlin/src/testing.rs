//! Whether a VMM keeps what the traits of [`vmm`](crate::engine::vmm) promise,
//! for the authors of VMMs: call it from a test.
//!
//! A promise that is broken is a VM that is damaged in one migration of many,
//! or one that runs twice. Each check does what a migration does, many times
//! over where it matters, and ends with one sentence that names the method and
//! what it promises.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use dunlin::engine::vmm::{Builder, SourceVm, VmmError};
//! # use dunlin::testing::{Effort, Violation, Vmm, check_vmm};
//! # struct MyVmm;
//! # impl Vmm for MyVmm {
//! #     fn start(&mut self) -> Result<Arc<dyn SourceVm>, VmmError> { unreachable!() }
//! #     fn builder(&mut self) -> &mut dyn Builder { unreachable!() }
//! #     fn built(&mut self) -> Option<Arc<dyn SourceVm>> { unreachable!() }
//! # }
//! let seen = check_vmm(&mut MyVmm, &Effort::default())?;
//! assert!(seen.dirty.pages > 1000, "the guest should write more: {seen:?}");
//! # Ok::<(), Violation>(())
//! ```
//!
//! | check | of |
//! | --- | --- |
//! | [`check_vmm`] | all that a VMM implements: the next five |
//! | [`check_memory`] | [`GuestMemory`] |
//! | [`check_control`] | [`SourceVm`]: pause, resume, throttle, describe, run state |
//! | [`check_dirty_logs`], [`check_dirty_log`] | [`DirtyLog`] |
//! | [`check_state`] | [`SourceVm::save`], [`DestinationVm::load`] |
//! | [`check_arrival`] | [`Builder`], [`DestinationVm`], [`SourceVm::destroy`] |
//! | [`check_host`] | [`Host`](crate::engine::Host) |
//! | [`check_disk`] | [`Disk`](crate::engine::journal::Disk) |
//!
//! What cannot be tested from outside: [`SourceVm::hold`], which may take as
//! long as it wants, and whether what a VMM relinquishes is free.
//!
//! [`GuestMemory`]: crate::engine::vmm::GuestMemory
//! [`SourceVm`]: crate::engine::vmm::SourceVm
//! [`SourceVm::save`]: crate::engine::vmm::SourceVm::save
//! [`SourceVm::hold`]: crate::engine::vmm::SourceVm::hold
//! [`SourceVm::destroy`]: crate::engine::vmm::SourceVm::destroy
//! [`DirtyLog`]: crate::engine::vmm::DirtyLog
//! [`DestinationVm`]: crate::engine::vmm::DestinationVm
//! [`DestinationVm::load`]: crate::engine::vmm::DestinationVm::load

use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::engine::vmm::{Builder, SourceVm, VmmError};

mod arrival;
mod control;
mod dirty;
mod host;
mod memory;
mod state;

pub use arrival::check_arrival;
pub use control::check_control;
pub use dirty::{Seen, Writer, check_dirty_log, check_dirty_logs};
pub use host::{check_disk, check_host};
pub use memory::check_memory;
pub use state::check_state;

/// A VMM under test.
pub trait Vmm {
    /// A new VM whose guest runs, and writes all over its memory: to some pages
    /// often, and to pages that were never touched before.
    ///
    /// # Errors
    /// There is none; the test ends.
    fn start(&mut self) -> Result<Arc<dyn SourceVm>, VmmError>;

    /// What builds VMs here, as [`receive`](crate::engine::destination::receive)
    /// is given it.
    fn builder(&mut self) -> &mut dyn Builder;

    /// The VM that the builder has built last, as the source that it will be
    /// once it has come: whoever takes VMs in can move them on.
    fn built(&mut self) -> Option<Arc<dyn SourceVm>>;
}

/// How thorough a test is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Effort {
    /// How often the guest is paused and memory compared, in each recording of
    /// a dirty log, and in the test of the pause.
    pub pauses: u32,
    /// How often the log is read before each pause, while the guest runs.
    pub fetches: u32,
    /// How long the guest runs between two fetches.
    pub between: Duration,
}

impl Default for Effort {
    /// Five pauses, eight fetches before each, two milliseconds apart.
    fn default() -> Self {
        Self {
            pauses: 5,
            fetches: 8,
            between: Duration::from_millis(2),
        }
    }
}

/// What was seen of a VMM that keeps its promises.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Conformance {
    /// What its dirty logs reported.
    pub dirty: Seen,
    /// Whether it throttles its guest.
    pub throttles: bool,
    /// Names of the sections whose content changes while the guest is paused, or
    /// is another after each load: clocks and timers. Of these it could not be
    /// seen whether they are loaded as they were saved: there should be few.
    pub unsteady: Vec<String>,
}

/// What is wrong, or why it could not be tested.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A write was reported neither by the fetch after it nor by an earlier one:
    /// a migration would have left the page as it was.
    #[error(
        "DirtyLog::fetch promises that every write before it has been reported; {pages} pages were \
         written and not reported, the first is page {page} of region {region}"
    )]
    Missed {
        /// The region's place in the table.
        region: usize,
        /// The first such page, in 4 KiB from the region's start.
        page: u64,
        /// How many.
        pages: u64,
    },
    /// A log that has just been started holds something.
    #[error(
        "DirtyLog::start promises an empty log; it holds page {page} of region {region} though \
         nobody wrote"
    )]
    NotEmpty {
        /// The region's place in the table.
        region: usize,
        /// The page in it.
        page: u64,
    },
    /// What was fetched is reported again.
    #[error(
        "DirtyLog::fetch promises that it clears the log; page {page} of region {region} is \
         reported again though nobody wrote"
    )]
    NotCleared {
        /// The region's place in the table.
        region: usize,
        /// The page in it.
        page: u64,
    },
    /// A region or a page that does not exist is reported.
    #[error(
        "DirtyLog::fetch promises pages of the region table; it reports page {page} of region \
         {region}, which does not exist"
    )]
    Outside {
        /// The region's place, as reported.
        region: usize,
        /// The page, as reported.
        page: u64,
    },
    /// Any other promise is broken.
    #[error("{method} promises that {promise}; {what}")]
    Broken {
        /// The method, as `SourceVm::pause`.
        method: &'static str,
        /// What it promises.
        promise: &'static str,
        /// What was seen instead.
        what: String,
    },
    /// A method failed though nothing was wrong.
    #[error("{method} fails, and what comes after it cannot be tested")]
    Failed {
        /// The method, as `SourceVm::pause`.
        method: &'static str,
        /// Its reason.
        #[source]
        source: VmmError,
    },
    /// Nothing was written all the while.
    #[error(
        "the guest wrote nothing while it was to run, so that the test proves nothing: give it a \
         workload"
    )]
    NothingWritten,
    /// The log failed.
    #[error("the dirty log cannot {step}")]
    Log {
        /// What was asked of it.
        step: &'static str,
        /// Its reason.
        #[source]
        source: io::Error,
    },
    /// The writer could not be paused or resumed.
    #[error("the writer cannot be paused or resumed")]
    Writer(#[source] VmmError),
    /// Guest memory could not be read, or something that the test needs.
    #[error("the test cannot go on")]
    Test(#[from] io::Error),
}

/// Tests all that a VMM implements. Needs as much memory as four of its VMs.
///
/// # Errors
/// The first [`Violation`].
pub fn check_vmm(vmm: &mut dyn Vmm, effort: &Effort) -> Result<Conformance, Violation> {
    let vm = vmm.start().map_err(failed("Vmm::start"))?;
    // The pause first: every other check relies on it.
    let throttles = check_control(&*vm, effort)?;
    check_memory(&*vm.memory())?;
    let dirty = check_dirty_logs(&*vm, effort)?;
    drop(vm);
    let unsteady = check_state(vmm, effort)?;
    check_arrival(vmm, effort)?;
    Ok(Conformance {
        dirty,
        throttles,
        unsteady,
    })
}

fn broken(method: &'static str, promise: &'static str, what: impl Into<String>) -> Violation {
    Violation::Broken {
        method,
        promise,
        what: what.into(),
    }
}

fn failed(method: &'static str) -> impl Fn(VmmError) -> Violation {
    move |source| Violation::Failed { method, source }
}
