//! The traits that a VMM implements to make its VMs migratable.
//!
//! ```text
//!   source: SourceVm                          destination: Builder, DestinationVm
//!   describe ─────────────────────────────────▶ build (or refuse, with a reason)
//!   dirty logs start, memory is read ─────────▶ memory is written
//!   pause, deactivate, save ──────────────────▶ load
//!   (hold) ── commit ─────────────────────────▶ acquire, resume, announce
//!   destroy ◀───────────────────────── running
//! ```
//!
//! The methods of [`SourceVm`] and [`DestinationVm`] take `&self`, because lane threads access
//! memory while the session's thread calls other methods. Except for [`GuestMemory`], no trait is
//! called from two threads at the same time.
//!
//! [`crate::testing`] checks whether a VMM keeps these contracts.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use dunlin_proto::control::{Region, RegionKind, Section};
pub use dunlin_proto::fault::FaultCode;
pub use dunlin_proto::negotiate::Refusal;
use vm_memory::VolatileSlice;

/// An error of the VMM from a method that it implements.
pub type VmmError = Box<dyn std::error::Error + Send + Sync>;

/// Guest memory as a table of regions, read and written in place.
///
/// [`crate::engine::memory::MappedMemory`] implements it over
/// `vm_memory::GuestMemoryMmap`.
pub trait GuestMemory: Send + Sync {
    /// Regions in ascending order of identifier. The table must not change during a session: refuse
    /// memory hot-plug until the session ends.
    ///
    /// Device state too large for sections goes into its own region
    /// ([`RegionKind::StateStream`]) and is moved like memory. The VMM writes it no
    /// later than in [`SourceVm::pause`], and a dirty log reports the writes.
    fn regions(&self) -> &[Region];

    /// `length` bytes at `offset` of the region at position `index` in
    /// [`GuestMemory::regions`].
    ///
    /// # Errors
    /// The bytes are not within the region.
    fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>>;

    /// Calls `found` for each byte range of a region to send, in ascending order. The method may
    /// omit only bytes that read as zeros, because omitted bytes read as zeros at the destination.
    /// Examples are memory that was never populated, and memory that the guest has returned
    /// (balloon, free page hints).
    ///
    /// # Errors
    /// The ranges cannot be determined. The engine then sends the whole region.
    fn ranges_to_send(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()>;

    /// Called at the destination by a lane's thread when it has written these bytes (whole pages)
    /// and has not acknowledged them yet. Zero pages are reported only if they replace other
    /// content. The default does nothing.
    #[cfg(feature = "unstable-internals")]
    fn received(&self, index: usize, range: Range<u64>) {
        let _ = (index, range);
    }
}

/// A log of the pages written since it was last read: KVM's bitmap or ring,
/// userfaultfd, the VMM's own writes, vhost. The engine uses the union of all logs that
/// [`SourceVm::dirty_logs`] returns.
///
/// The first pass sends all that [`GuestMemory::ranges_to_send`] reports, whatever the logs
/// contain, so a log starts empty.
///
/// Reading clears the log. The engine owns the pages that [`DirtyLog::fetch`] has
/// reported: it sends them, adds them to its own pending set when a lane is lost, or
/// sends all pages in the next attempt. A log therefore needs no way to take pages
/// back.
pub trait DirtyLog: Send {
    /// Starts recording with an empty log.
    ///
    /// # Errors
    /// The kernel or the VMM refuses. The migration fails immediately.
    fn start(&mut self) -> io::Result<()>;

    /// Calls `found` with a region's position in the table and its bitmap, and clears the log. Each
    /// word has the bits of 64 pages of 4 KiB; bit 0 is the first page.
    ///
    /// This call or an earlier one must report every write that happened before this call. So
    /// record a page after the write, not before it, because the engine may read the page as soon
    /// as it is reported. To ensure this, hold one lock during the write and its recording, and
    /// take the same lock in this method.
    ///
    /// # Errors
    /// The log is lost. The migration fails.
    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()>;

    /// Stops recording. At the end of a migration, failed or not, the engine calls this method on
    /// every log that [`SourceVm::dirty_logs`] has returned.
    ///
    /// # Errors
    /// Reported as a warning. The guest may run slower until a later call succeeds.
    fn stop(&mut self) -> io::Result<()>;
}

/// Run state of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// The guest's vCPUs run.
    Running,
    /// The guest is paused.
    Paused,
    /// The guest powered itself off.
    PoweredOff,
    /// The guest was reset, has crashed, or was stopped by a failure. The text is the reason.
    Stopped(String),
}

/// What the destination needs before any memory is sent.
#[derive(Clone, Debug)]
pub struct VmDescription {
    /// The VM's UUID.
    pub uuid: [u8; 16],
    /// The VM's name, at most 255 bytes.
    pub name: String,
    /// The VMM's own description of the VM, used to build it; at most 256 KiB, opaque
    /// to the engine.
    pub description: Vec<u8>,
}

impl VmDescription {
    /// A description in which the VMM's own part is empty.
    #[must_use]
    pub fn new(uuid: [u8; 16], name: &str) -> Self {
        Self {
            uuid,
            name: name.to_owned(),
            description: Vec::new(),
        }
    }
}

/// A VM that can be migrated to another host.
pub trait SourceVm: Send + Sync {
    /// Describes the VM that the destination must build. Must return the same description every
    /// time, because a failed migration can be started again.
    ///
    /// # Errors
    /// The VM cannot be described. The migration does not start.
    fn describe(&self) -> Result<VmDescription, VmmError>;

    /// The VM's memory.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// The dirty logs. Together they must record every write to guest memory.
    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>>;

    /// The guest's run state. Called at the start, during and after each iteration, immediately
    /// before and after the pause, before *commit*, and after a failure. [`RunState::Paused`]
    /// before the pause means that the VM's owner paused the guest; after the pause, the engine
    /// treats `Paused` and `Running` alike.
    fn run_state(&self) -> RunState;

    /// Pauses the guest. When this returns, nothing writes guest memory: no vCPU, no
    /// back end, no I/O in flight. Pausing a paused guest has no effect.
    ///
    /// # Errors
    /// The guest may still run. The migration fails and the guest is resumed.
    fn pause(&self) -> Result<(), VmmError>;

    /// Resumes the guest at the source after the migration failed at or after the
    /// pause. A failed [`SourceVm::pause`] may have stopped part of the guest, so
    /// resuming a running guest must have no effect. Not called if the VM's owner had
    /// paused the guest.
    ///
    /// # Errors
    /// The guest stays paused. A migration reports the error as a warning and ends with
    /// [`VmIs::StuckAtSource`](crate::engine::VmIs::StuckAtSource). A
    /// [`Doubt`](crate::engine::source::Doubt) returns the error.
    fn resume(&self) -> Result<(), VmmError>;

    /// Slows the guest so that it dirties memory at about (100 − `percent`) % of its normal rate; 0
    /// is full speed. Returns whether the VMM supports throttling; by default it does not. Without
    /// throttling, a guest that writes faster than the link carries its memory cannot be moved
    /// within the downtime limit.
    ///
    /// # Errors
    /// Reported as a warning, and otherwise handled as if the VMM did not support throttling.
    fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
        let _ = percent;
        Ok(false)
    }

    /// Saves the CPU and device state of the paused guest: at most 4096 sections of
    /// just under 1 MiB each, and 32 MiB in total. Must not write guest memory, because
    /// the engine sends the last pages of this memory at the same time.
    ///
    /// # Errors
    /// The migration fails and the guest resumes.
    fn save(&self) -> Result<Vec<Section>, VmmError>;

    /// Releases what only one host may hold: disk locks, devices. Called while the guest is paused,
    /// before the destination may run it. Must not write guest memory. The default does nothing,
    /// for a VM that holds nothing of this kind.
    ///
    /// # Errors
    /// The migration fails. The engine calls [`SourceVm::reactivate`].
    fn deactivate(&self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Takes back what [`SourceVm::deactivate`] released, before the guest resumes at
    /// the source.
    ///
    /// # Errors
    /// The guest stays paused. The engine reports the error like one of [`SourceVm::resume`].
    fn reactivate(&self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Called on the paused guest immediately before *commit*, the point of no return. A
    /// toolstack may block in this call until it has moved storage or network. Return an
    /// error to abort the migration.
    ///
    /// # Errors
    /// The migration fails and the guest resumes.
    fn hold(&self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Destroys the copy at the source, because the destination has the VM or an operator has decided
    /// so ([`Doubt::resolve`](crate::engine::source::Doubt::resolve)). Until this call the paused
    /// copy must be kept, because the engine may still resume it.
    fn destroy(&self);
}

/// The VM that was built, or the reason why it was not built.
pub type Built = Result<Arc<dyn DestinationVm>, Refusal>;

/// Builds the VM that the source describes, without starting it. A closure that takes [`Offered`]
/// implements this trait.
pub trait Builder: Send {
    /// Builds the VM, or refuses. The VM's memory must read as zeros.
    ///
    /// # Errors
    /// A [`Refusal`] with a reason for the source's operator. Nothing has been moved
    /// yet. Use [`FaultCode::DescriptionRefused`] for a VM that this host cannot build, and
    /// [`FaultCode::NoMemory`] if only memory is lacking.
    fn build(&mut self, offered: &Offered) -> Built;

    /// Path of the control socket of this process, stored in the journal: an operator
    /// who finds the record can cancel there. At most 107 bytes; empty if there is
    /// none. Called before [`Builder::build`].
    fn owner(&self, offered: &Offered) -> String {
        let _ = offered;
        String::new()
    }
}

impl<F> Builder for F
where
    F: FnMut(&Offered) -> Built + Send,
{
    fn build(&mut self, offered: &Offered) -> Built {
        self(offered)
    }
}

/// The VM that the source offers in the message *describe*.
#[derive(Clone, Debug)]
pub struct Offered {
    /// The VM's identity and the VMM's own description.
    pub vm: VmDescription,
    /// The region table.
    pub regions: Vec<Region>,
    /// Whether the VM's owner had paused the guest when the source described it. A guest that is
    /// still paused at the switchover stays paused at the destination.
    pub paused: bool,
}

/// A VM that has been built and waits for its memory and state.
pub trait DestinationVm: Send + Sync {
    /// The VM's memory. The region table must equal the offered one.
    fn memory(&self) -> Arc<dyn GuestMemory>;

    /// Loads CPU and device state. Nothing may run yet. Refuse a required section if this
    /// VMM does not support it or its version; skip an unsupported section that is not
    /// required.
    ///
    /// # Errors
    /// The migration fails and the guest resumes at the source.
    fn load(&self, sections: &[Section]) -> Result<(), VmmError>;

    /// Acquires disks and devices. Called after the source has committed.
    ///
    /// # Errors
    /// Nothing has run here. The engine calls [`DestinationVm::discard`], and the guest
    /// resumes at the source.
    fn acquire(&self) -> Result<(), VmmError> {
        Ok(())
    }

    /// Starts the guest. Returns the downtime as the guest saw it, if the VMM can
    /// measure it to within a few milliseconds.
    ///
    /// # Errors
    /// Part of the guest may have run. The engine calls [`DestinationVm::discard`]; the
    /// source keeps its paused copy until an operator decides.
    fn resume(&self) -> Result<Option<Duration>, VmmError>;

    /// Announces the guest's new location to the network (gratuitous ARP and the like).
    /// The guest already runs.
    fn announce(&self) {}

    /// Drops this copy of the VM, which must not run here. Releases everything that
    /// [`DestinationVm::acquire`] took, even if `acquire` failed halfway. The engine then drops its
    /// references to the VM.
    fn discard(&self) {}
}

/// Returns the contents of the sections that `supported` lists by name and version, in the order of
/// that list. This is all that [`DestinationVm::load`] needs if no device has several instances.
/// Skips other sections that are not required.
///
/// ```
/// # use dunlin::engine::vmm::{Section, known_sections};
/// let saved = [Section::required("timer", 2, vec![7]), Section::required("cpu", 1, vec![1, 2])];
/// let [cpu, timer] = known_sections(&saved, [("cpu", 1), ("timer", 2)])?;
/// assert_eq!((cpu, timer), (&[1, 2][..], &[7][..]));
/// assert!(known_sections(&saved, [("cpu", 1)]).is_err(), "timer is required");
/// # Ok::<(), dunlin::engine::vmm::VmmError>(())
/// ```
///
/// # Errors
/// A supported section is missing, or a required one is not supported.
pub fn known_sections<'a, const N: usize>(
    sections: &'a [Section],
    supported: [(&str, u32); N],
) -> Result<[&'a [u8]; N], VmmError> {
    let known = |section: &Section| {
        section.instance == 0 && supported.contains(&(section.name.as_str(), section.version))
    };
    if let Some(other) = sections.iter().find(|one| one.required && !known(one)) {
        let (name, instance, version) = (&other.name, other.instance, other.version);
        return Err(format!(
            "section {name}, instance {instance}, version {version}: not supported"
        )
        .into());
    }
    let mut contents = [&[][..]; N];
    for (content, (name, version)) in contents.iter_mut().zip(supported) {
        let found = sections
            .iter()
            .find(|one| (&*one.name, one.instance, one.version) == (name, 0, version))
            .ok_or_else(|| format!("section {name} version {version} is missing"))?;
        *content = &found.bytes;
    }
    Ok(contents)
}
