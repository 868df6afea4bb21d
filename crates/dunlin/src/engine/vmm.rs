//! What a VMM implements so that its VMs can move.
//!
//! ```text
//!   source: SourceVm                          destination: Builder, DestinationVm
//!   describe ─────────────────────────────────▶ build (or refuse, with a reason)
//!   dirty logs start, memory is read ─────────▶ memory is written
//!   pause, save, deactivate ──────────────────▶ load
//!   (hold) ── commit ─────────────────────────▶ acquire, resume, announce
//!   destroy ◀───────────────────────── running
//! ```
//!
//! Methods take `&self`, since lanes read memory while the control thread
//! asks for other things. None of them is called from two threads at the same
//! time except [`GuestMemory`]'s.
//!
//! [`crate::testing`] tells whether a VMM keeps what is promised here.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use dunlin_proto::control::{Region, RegionKind};
pub use dunlin_proto::fault::FaultCode;
use vm_memory::VolatileSlice;

/// A step that the VMM could not take, in its own words, with its cause.
pub type VmmError = Box<dyn std::error::Error + Send + Sync>;

/// Guest memory as a table of regions, read and written in place.
///
/// [`crate::engine::memory::MappedMemory`] implements it over
/// `vm_memory::GuestMemoryMmap`.
pub trait GuestMemory: Send + Sync {
    /// The regions, by ascending identifier, the order in which they are sent.
    /// The table must not change during a session: memory hot-plug has to be
    /// refused meanwhile.
    ///
    /// Device state too large for sections goes into a region of its own
    /// ([`RegionKind::StateStream`]), which is moved like memory. What belongs
    /// there is written by [`SourceVm::pause`] at the latest, and a dirty log
    /// reports it.
    fn regions(&self) -> &[Region];

    /// `length` bytes at `offset` of the region at place `index` in
    /// [`GuestMemory::regions`].
    ///
    /// # Errors
    /// The bytes do not lie within the region.
    fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>>;

    /// Calls `found` with each range of bytes of a region that is worth
    /// sending, in ascending order. What is left out must read as zeros at
    /// the destination as well: never-populated memory, or memory that the
    /// guest has given back (a balloon, free page hints).
    ///
    /// # Errors
    /// Where it cannot be found out; everything is sent then.
    fn ranges_to_send(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()>;
}

/// One source of the knowledge which pages have been written: KVM's bitmap or
/// ring, userfaultfd, the VMM's own writes, vhost. The engine works on the
/// union of all that [`SourceVm::dirty_logs`] returns.
///
/// Reading clears (I5): what [`DirtyLog::fetch`] has reported belongs to the
/// engine, which sends it, or puts it back into its own set of pending pages
/// when a lane is lost, or sends everything in the next attempt. So a log
/// needs no way to take pages back.
pub trait DirtyLog: Send {
    /// Begins to record, with an empty log.
    ///
    /// # Errors
    /// The kernel or the VMM refuses; the migration then fails at once.
    fn start(&mut self) -> io::Result<()>;

    /// Calls `found` with the place of a region in the table and its bitmap,
    /// 64 pages of 4 KiB in each word, bit 0 first; and clears the log. Every
    /// write that happened before the call is reported by it or by an earlier
    /// one.
    ///
    /// # Errors
    /// The log is lost; the migration fails.
    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()>;

    /// Ends recording. Called on every way out of a migration.
    ///
    /// # Errors
    /// Reported as a warning: the guest runs slower until it succeeds.
    fn stop(&mut self) -> io::Result<()>;
}

/// Where a guest stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// Its vCPUs run.
    Running,
    /// Its owner has paused it.
    Paused,
    /// It switched itself off.
    PoweredOff,
    /// It reset, crashed or was stopped by a failure; with the reason.
    Stopped(String),
}

/// A named piece of device state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// What it is, such as `vcpu`; at most 255 bytes.
    pub name: String,
    /// Which one of its kind.
    pub instance: u32,
    /// Version of the content's layout.
    pub version: u32,
    /// Whether a destination that does not know it must refuse.
    pub required: bool,
    /// The content, opaque to the engine.
    pub bytes: Vec<u8>,
}

/// What the destination needs to know before anything is moved.
#[derive(Clone, Debug)]
pub struct VmDescription {
    /// The VM's UUID.
    pub uuid: [u8; 16],
    /// Its name, at most 255 bytes.
    pub name: String,
    /// Whatever the destination's VMM needs to build it; at most 256 KiB,
    /// opaque to the engine.
    pub description: Vec<u8>,
}

/// A VM that can be moved away.
pub trait SourceVm: Send + Sync {
    /// What the destination has to build. The same each time, since several
    /// attempts may be needed.
    ///
    /// # Errors
    /// The VM cannot be described; the migration does not begin.
    fn describe(&self) -> Result<VmDescription, VmmError>;

    /// Its memory.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// Every log that together sees every write to guest memory.
    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>>;

    /// Where the guest stands. Asked after each iteration and after the pause.
    fn run_state(&self) -> RunState;

    /// Stops the guest. On return nothing writes guest memory: no vCPU, no
    /// back end, no I/O in flight. Pausing a paused guest does nothing.
    ///
    /// # Errors
    /// The guest may still run; the migration ends and it goes on.
    fn pause(&self) -> Result<(), VmmError>;

    /// Lets the guest go on at the source, where the migration failed at the
    /// pause or after it. A pause that failed may have stopped a part of the
    /// guest; resuming one that runs does nothing. Not called for a guest that
    /// its owner had paused.
    ///
    /// # Errors
    /// The guest stays paused; the caller is told so.
    fn resume(&self) -> Result<(), VmmError>;

    /// Slows the guest so that it dirties memory at about (100 − `percent`) %
    /// of the speed it would have; 0 is full speed. Returns whether the VMM
    /// can do that at all.
    ///
    /// # Errors
    /// Treated as a VMM that cannot.
    fn throttle(&self, percent: u8) -> Result<bool, VmmError>;

    /// The state of CPUs and devices of the paused guest: at most 4096 sections
    /// of just under 1 MiB, and 32 MiB together. Writes no guest memory, whose
    /// last pages are being sent meanwhile.
    ///
    /// # Errors
    /// The migration fails and the guest resumes.
    fn save(&self) -> Result<Vec<Section>, VmmError>;

    /// Lets go of what only one host may hold: disk locks, devices. Called on
    /// the paused guest, before the destination may run it. Writes no guest
    /// memory either.
    ///
    /// # Errors
    /// The migration fails; [`SourceVm::reactivate`] follows.
    fn deactivate(&self) -> Result<(), VmmError>;

    /// Takes back what [`SourceVm::deactivate`] gave up, before the guest
    /// resumes at the source.
    ///
    /// # Errors
    /// The guest stays paused; the caller is told so.
    fn reactivate(&self) -> Result<(), VmmError>;

    /// Called last before *commit*, the point of no return, with the guest
    /// paused: a toolstack may hold the migration here until it has moved
    /// storage or network. An error means that it shall not go on.
    ///
    /// # Errors
    /// The migration fails and the guest resumes.
    fn hold(&self) -> Result<(), VmmError>;

    /// The destination runs the VM: destroys the copy here.
    fn destroy(&self);
}

/// Builds the VM that the source describes, without starting it.
pub trait Builder: Send {
    /// Builds it, or refuses. Its memory must read as zeros.
    ///
    /// # Errors
    /// A [`Refusal`] that the source's operator can act on. Nothing has been
    /// moved by then.
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal>;

    /// The control socket at which this process can be asked about the VM, for
    /// the journal: where somebody who finds the record can cancel. At most 107
    /// bytes; empty where there is none. Called before [`Builder::build`].
    fn owner(&self, offered: &Offered) -> String {
        let _ = offered;
        String::new()
    }
}

/// What the source wants to move here, from *describe*.
#[derive(Clone, Debug)]
pub struct Offered {
    /// Identity and the VMM's own description.
    pub vm: VmDescription,
    /// The region table.
    pub regions: Vec<Region>,
    /// Whether the guest was paused by its owner and will stay so.
    pub paused: bool,
}

/// Why a VM is not taken in.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The kind of reason.
    pub fault: FaultCode,
    /// What exactly, for the source's operator; at most 1024 bytes are sent.
    pub text: String,
}

/// A VM that has been built and waits for its memory and state.
pub trait DestinationVm: Send + Sync {
    /// Its memory. The region table must be the one that was offered.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// Takes in state of CPUs and devices. Nothing may run yet. A required
    /// section that this VMM does not know, or not in that version, has to be
    /// refused; one that is not required and not known is skipped.
    ///
    /// # Errors
    /// The migration fails and the guest resumes at the source.
    fn load(&self, sections: &[Section]) -> Result<(), VmmError>;

    /// Takes hold of disks and devices: the source has committed.
    ///
    /// # Errors
    /// Nothing has run here: [`DestinationVm::discard`] follows, and the guest
    /// goes on at the source.
    fn acquire(&self) -> Result<(), VmmError>;

    /// Starts the guest. Says how long it stood still as it saw it itself,
    /// where the VMM can tell within some milliseconds.
    ///
    /// # Errors
    /// Some of it may have run: [`DestinationVm::discard`] follows, and the
    /// source keeps its copy, paused, until an operator decides.
    fn resume(&self) -> Result<Option<Duration>, VmmError>;

    /// Tells the network where the guest lives now (gratuitous ARP and the
    /// like). The guest runs already.
    fn announce(&self);

    /// The VM does not live here: lets go of whatever
    /// [`DestinationVm::acquire`] took, even of a part, and drops this copy.
    fn discard(&self);
}
