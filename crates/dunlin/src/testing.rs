//! Conformance tests for the authors of VMMs: they check whether a VMM keeps the contracts of the
//! traits in [`vmm`](crate::engine::vmm). Call them from a test.
//!
//! A VMM that breaks a contract may corrupt a VM, or run it twice, in only one migration out of
//! many. Each check does what a migration does, many times where necessary. On failure it returns
//! one sentence that names the method and its contract.
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
//! | check | covers |
//! | --- | --- |
//! | [`check_vmm`] | everything that a VMM implements: the next five checks |
//! | [`check_control`] | [`SourceVm`]: pause, resume, throttle, describe, run state |
//! | [`check_memory`] | [`GuestMemory`] |
//! | [`check_dirty_logs`], [`check_dirty_log`] | [`DirtyLog`] |
//! | [`check_state`] | [`SourceVm::save`], [`DestinationVm::load`] |
//! | [`check_arrival`] | [`Builder`], [`DestinationVm`], [`SourceVm::destroy`] |
//! | [`check_host`] | [`Host`](crate::engine::Host) |
//!
//! [`check_control`], [`check_memory`] and [`check_dirty_logs`] need only a source, so they can
//! test a VMM that cannot receive a VM yet.
//!
//! Two things cannot be tested from outside: [`SourceVm::hold`], which may take any time, and
//! whether the devices that a VMM releases are free.
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
mod vmm;

pub use arrival::check_arrival;
pub use control::check_control;
pub use dirty::{Seen, Writer, check_dirty_log, check_dirty_logs};
pub use host::check_host;
pub use memory::check_memory;
pub use state::check_state;
pub use vmm::{Conformance, check_vmm};

/// A VMM under test.
pub trait Vmm {
    /// Starts a new VM with a running guest. The guest must write to all parts of its
    /// memory: to some pages often, and also to pages that were never touched before.
    ///
    /// # Errors
    /// No VM could be started; the test ends.
    fn start(&mut self) -> Result<Arc<dyn SourceVm>, VmmError>;

    /// The builder of VMs, as passed to
    /// [`Incoming::run`](crate::engine::destination::Incoming::run).
    fn builder(&mut self) -> &mut dyn Builder;

    /// The VM that the builder built last, as a source: a VMM that has received a VM can
    /// migrate it again.
    fn built(&mut self) -> Option<Arc<dyn SourceVm>>;
}

/// How thorough a test is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Effort {
    /// The number of times that the guest is paused and its memory compared, each time that a dirty
    /// log is started, and in [`check_control`].
    pub pauses: u32,
    /// The number of times that the log is fetched before each pause, while the guest runs.
    pub fetches: u32,
    /// How long the guest runs between two fetches.
    pub between: Duration,
}

impl Default for Effort {
    /// Five pauses, and before each one eight fetches, two milliseconds apart.
    fn default() -> Self {
        Self {
            pauses: 5,
            fetches: 8,
            between: Duration::from_millis(2),
        }
    }
}

/// A broken contract, or the reason why it could not be tested.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A write was reported neither by a fetch that ran at the time of the write nor by the first
    /// fetch that began after the write. A migration would have left the page stale.
    #[error(
        "DirtyLog::fetch promises to report every earlier write; pages written and not reported: \
         {pages}, the first is page {page} of region {region}"
    )]
    Missed {
        /// The region's position in the table.
        region: usize,
        /// The first page that was not reported, counted in 4 KiB from the region's start.
        page: u64,
        /// The number of pages that were not reported.
        pages: u64,
    },
    /// A newly started log is not empty.
    #[error(
        "DirtyLog::start promises an empty log; it reports page {page} of region {region} although \
         nothing was written"
    )]
    NotEmpty {
        /// The region's position in the table.
        region: usize,
        /// The page's number in the region.
        page: u64,
    },
    /// A fetched page is reported again.
    #[error(
        "DirtyLog::fetch promises that it clears the log; page {page} of region {region} is \
         reported again although nothing was written"
    )]
    NotCleared {
        /// The region's position in the table.
        region: usize,
        /// The page's number in the region.
        page: u64,
    },
    /// A region or page that does not exist is reported.
    #[error(
        "DirtyLog::fetch promises to report only pages in the region table; it reported page {page} \
         of region {region}, which does not exist"
    )]
    Outside {
        /// The region's position, as reported.
        region: usize,
        /// The page, as reported.
        page: u64,
    },
    /// Any other broken contract.
    #[error("{method} promises that {promise}; {what}")]
    Broken {
        /// The method, such as `SourceVm::pause`.
        method: &'static str,
        /// The contract.
        promise: &'static str,
        /// The observation.
        what: String,
    },
    /// A method failed that should have succeeded.
    #[error("{method} failed, so later steps cannot be tested")]
    Failed {
        /// The method, such as `SourceVm::pause`.
        method: &'static str,
        /// The method's error.
        #[source]
        source: VmmError,
    },
    /// The guest wrote nothing during the test.
    #[error(
        "the guest wrote nothing while it should have run, so the test proves nothing: give it a \
         workload"
    )]
    NothingWritten,
    /// An operation of the test itself failed, such as reading guest memory.
    #[error("the test itself failed, for example when it read guest memory")]
    Test(#[from] io::Error),
}

fn broken(method: &'static str, promise: &'static str, what: impl Into<String>) -> Violation {
    Violation::Broken {
        method,
        promise,
        what: what.into(),
    }
}

fn failed<E: Into<VmmError>>(method: &'static str) -> impl Fn(E) -> Violation {
    move |source| Violation::Failed {
        method,
        source: source.into(),
    }
}
