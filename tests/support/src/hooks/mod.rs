//! A VM with three regions: one with a hole, one on huge pages, and one for device state that is
//! too large for sections. The VM records the order of the engine's calls on both sides.

use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::destination::{self, Received};
use dunlin::engine::memory::{MappedMemory, OwnWrites};
use dunlin::engine::source;
use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, FaultCode, GuestMemory, Offered, Refusal, Region, RegionKind,
    RunState, Section, SourceVm, VmDescription, VmmError,
};
use dunlin::engine::{Cancel, Event, MigrateError, Report};
use dunlin::{Incoming, Migration};
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_linux::mapping::{Backing, TrackedMemory, allocate};
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

pub const MIB: u64 = 1 << 20;
/// The size of the first region. The part [`HOLE`] of this region is never written.
pub const LOW_BYTES: u64 = 32 * MIB;
pub const HOLE: Range<u64> = 4 * MIB..28 * MIB;
pub const HUGE_BYTES: u64 = 32 * MIB;
/// The size of a section's header in the stream. A header has name, number, version and length.
const HEADER_BYTES: u64 = 32;
pub const SECTION_BYTES: u64 = MIB;

/// All calls on both sides, in the order in which they were made.
#[derive(Clone, Default)]
pub struct Calls(Arc<Mutex<Vec<&'static str>>>);

impl Calls {
    /// The calls on one side, without the side's name.
    pub fn of(&self, side: &str) -> Vec<&'static str> {
        let all = self.0.lock().unwrap();
        all.iter()
            .filter_map(|call| call.strip_prefix(side)?.strip_prefix(' '))
            .collect()
    }

    pub fn all(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }

    fn push(&self, call: &'static str) {
        self.0.lock().unwrap().push(call);
    }
}

/// Several memories as one region table.
pub struct Combined {
    parts: Vec<(Arc<TrackedMemory>, MappedMemory)>,
    regions: Vec<Region>,
}

impl Combined {
    fn new(state_bytes: u64, huge: bool) -> Self {
        let mut parts = Vec::new();
        let mut regions = Vec::new();
        for (id, name, kind, bytes, backing) in [
            (3, "low", RegionKind::Ram, LOW_BYTES, Backing::Memfd),
            (
                7,
                "huge",
                RegionKind::Ram,
                HUGE_BYTES,
                if huge { Backing::Huge } else { Backing::Memfd },
            ),
            (
                200,
                "state",
                RegionKind::StateStream,
                state_bytes,
                Backing::Memfd,
            ),
        ] {
            let memory = Arc::new(allocate(bytes, backing).unwrap());
            parts.push((Arc::clone(&memory), MappedMemory::new(memory, 4096)));
            regions.push(Region {
                id,
                kind,
                flags: 0,
                backing_page_bytes: if backing == Backing::Huge {
                    2 << 20
                } else {
                    4096
                },
                length: bytes,
                guest_physical: u64::from(id) << 32,
                name: name.into(),
            });
        }
        Self { parts, regions }
    }

    pub fn write(&self, region: usize, offset: u64, bytes: &[u8]) {
        let memory = &self.parts[region].0;
        memory.write_slice(bytes, GuestAddress(offset)).unwrap();
    }

    pub fn read(&self, region: usize, offset: u64, bytes: &mut [u8]) {
        let memory = &self.parts[region].0;
        memory.read_slice(bytes, GuestAddress(offset)).unwrap();
    }
}

impl GuestMemory for Combined {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>> {
        let part = self.parts.get(index).ok_or(io::ErrorKind::InvalidInput)?;
        part.1.slice(0, offset, length)
    }

    fn ranges_to_send(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
        let part = self.parts.get(index).ok_or(io::ErrorKind::InvalidInput)?;
        part.1.ranges_to_send(0, found)
    }
}

/// The dirty log of one of the memories. It reports pages with the index of that memory in the
/// region table.
struct PartLog {
    index: usize,
    log: OwnWrites,
    vm: Arc<Vm>,
}

impl DirtyLog for PartLog {
    fn start(&mut self) -> io::Result<()> {
        if self.index == 0 {
            self.vm.call("source start").map_err(io::Error::other)?;
        }
        self.log.start()
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        if self.index == 0 && self.vm.fails("source fetch") {
            return Err(io::Error::other("planted: source fetch"));
        }
        let index = self.index;
        self.log.fetch(&mut |_, words| found(index, words))
    }

    fn stop(&mut self) -> io::Result<()> {
        if self.index == 0 {
            self.vm.call("source stop").map_err(io::Error::other)?;
        }
        self.log.stop()
    }
}

/// A function that is called at each step of the VM. The step is also recorded in [`Calls`].
type Hook = Box<dyn Fn(&str) + Send + Sync>;

/// A VM, at the source or at the destination.
pub struct Vm {
    pub memory: Arc<Combined>,
    pub calls: Calls,
    /// Steps that fail.
    pub fail: Vec<&'static str>,
    pub hook: Option<Hook>,
    /// The guest's run state, and the number of steps in which it has written words
    /// ([`Self::step`]).
    guest: Mutex<(RunState, u64)>,
    /// The number of sections of [`SECTION_BYTES`] in the stream of device state.
    sections: u32,
    itself: std::sync::Weak<Vm>,
}

impl Vm {
    pub fn new(sections: u32, huge: bool, calls: &Calls, fail: &[&'static str]) -> Arc<Self> {
        Self::with_hook(sections, huge, calls, fail, None)
    }

    pub fn with_hook(
        sections: u32,
        huge: bool,
        calls: &Calls,
        fail: &[&'static str],
        hook: Option<Hook>,
    ) -> Arc<Self> {
        let state_bytes = u64::from(sections) * (HEADER_BYTES + SECTION_BYTES);
        let state_bytes = state_bytes.next_multiple_of(2 * MIB);
        let memory = Arc::new(Combined::new(state_bytes, huge));
        let vm = Arc::new_cyclic(|itself| Self {
            memory,
            calls: calls.clone(),
            fail: fail.to_vec(),
            hook,
            guest: Mutex::new((RunState::Paused, 0)),
            sections,
            itself: itself.clone(),
        });
        let guest = Arc::downgrade(&vm);
        thread::spawn(move || {
            while let Some(vm) = guest.upgrade() {
                vm.step();
                drop(vm);
                thread::sleep(Duration::from_micros(200));
            }
        });
        vm
    }

    fn guest(&self) -> MutexGuard<'_, (RunState, u64)> {
        self.guest.lock().unwrap()
    }

    /// Writes a word to the low region and a word to the huge region. Successive calls cycle
    /// through 16 pages of the low region and through 5 places of the huge region.
    fn step(&self) {
        let (state, number) = &mut *self.guest();
        if *state == RunState::Running {
            let word = number.to_le_bytes();
            self.memory.write(0, *number % 16 * 4096, &word);
            self.memory.write(1, *number % 5 * 4 * MIB + 8, &word);
            *number += 1;
        }
    }

    /// Writes the initial content of memory and runs the guest.
    pub fn start(&self) {
        let mut page = vec![0; 4096];
        for (region, range) in [
            (0, 0..HOLE.start),
            (0, HOLE.end..LOW_BYTES),
            (1, 0..HUGE_BYTES),
        ] {
            for offset in range.step_by(4096) {
                page.fill((offset / 4096 % 251) as u8 + 1);
                self.memory.write(region, offset, &page);
            }
        }
        self.guest().0 = RunState::Running;
    }

    pub fn state(&self) -> RunState {
        self.guest().0.clone()
    }

    /// Whether the guest runs and writes.
    pub fn goes_on(&self) -> bool {
        if self.state() != RunState::Running {
            return false;
        }
        let before = self.guest().1;
        let until = Instant::now() + Duration::from_secs(10);
        while self.guest().1 == before && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        self.guest().1 > before
    }

    fn fails(&self, step: &str) -> bool {
        self.fail.contains(&step)
    }

    fn call(&self, step: &'static str) -> Result<(), VmmError> {
        self.calls.push(step);
        if let Some(hook) = &self.hook {
            hook(step);
        }
        if self.fails(step) {
            return Err(format!("planted: {step}").into());
        }
        Ok(())
    }

    /// The version of a section in the stream, and its bytes.
    fn content(number: u32) -> (u32, Vec<u8>) {
        let bytes = (0..SECTION_BYTES / 8)
            .flat_map(|word| (word.wrapping_mul(0x9e37_79b9) ^ u64::from(number)).to_le_bytes())
            .collect();
        (1 + number % 2, bytes)
    }

    fn header(number: u32) -> [u8; HEADER_BYTES as usize] {
        let mut header = [0; HEADER_BYTES as usize];
        header[..4].copy_from_slice(b"ring");
        header[4..8].copy_from_slice(&number.to_le_bytes());
        header[8..12].copy_from_slice(&(1 + number % 2).to_le_bytes());
        header[16..24].copy_from_slice(&SECTION_BYTES.to_le_bytes());
        header
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        self.call("source describe")?;
        Ok(VmDescription {
            uuid: [9; 16],
            name: "everything".into(),
            description: b"three regions".to_vec(),
        })
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        let log = |(index, part): (usize, &(Arc<TrackedMemory>, MappedMemory))| {
            Box::new(PartLog {
                index,
                log: OwnWrites::new(Arc::clone(&part.0)),
                vm: self.itself.upgrade().unwrap(),
            }) as Box<dyn DirtyLog>
        };
        self.memory.parts.iter().enumerate().map(log).collect()
    }

    fn run_state(&self) -> RunState {
        self.state()
    }

    fn pause(&self) -> Result<(), VmmError> {
        self.guest().0 = RunState::Paused;
        self.call("source pause")?;
        // Write the large device state when the guest is paused. The dirty log of its region then
        // reports these pages.
        let mut offset = 0;
        for number in 0..self.sections {
            self.memory.write(2, offset, &Self::header(number));
            let (_, bytes) = Self::content(number);
            self.memory.write(2, offset + HEADER_BYTES, &bytes);
            offset += HEADER_BYTES + SECTION_BYTES;
        }
        Ok(())
    }

    fn resume(&self) -> Result<(), VmmError> {
        self.call("source resume")?;
        self.guest().0 = RunState::Running;
        Ok(())
    }

    fn throttle(&self, _: u8) -> Result<bool, VmmError> {
        Ok(false)
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        self.call("source save")?;
        let section = |name: &str, version, bytes: &[u8]| Section {
            name: name.into(),
            instance: 0,
            version,
            required: true,
            bytes: bytes.to_vec(),
        };
        Ok(vec![
            section("guest", 1, &self.guest().1.to_le_bytes()),
            section("stream", 2, &self.sections.to_le_bytes()),
        ])
    }

    fn deactivate(&self) -> Result<(), VmmError> {
        self.call("source deactivate")
    }

    fn reactivate(&self) -> Result<(), VmmError> {
        self.call("source reactivate")
    }

    fn hold(&self) -> Result<(), VmmError> {
        self.call("source hold")
    }

    fn destroy(&self) {
        self.calls.push("source destroy");
        self.guest().0 = RunState::Stopped("moved".into());
    }
}

impl DestinationVm for Vm {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.memory) as _
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        self.call("destination load")?;
        let (mut header, mut bytes) = ([0; HEADER_BYTES as usize], vec![0; SECTION_BYTES as usize]);
        for section in sections {
            match (section.name.as_str(), section.version) {
                ("guest", 1) => {
                    self.guest().1 = u64::from_le_bytes(section.bytes.as_slice().try_into()?);
                }
                ("stream", 2) => {
                    let count = u32::from_le_bytes(section.bytes.as_slice().try_into()?);
                    for number in 0..count {
                        let offset = u64::from(number) * (HEADER_BYTES + SECTION_BYTES);
                        self.memory.read(2, offset, &mut header);
                        self.memory.read(2, offset + HEADER_BYTES, &mut bytes);
                        if header != Self::header(number) || bytes != Self::content(number).1 {
                            return Err(format!("section {number} of the stream differs").into());
                        }
                    }
                }
                (name, version) => return Err(format!("{name} {version} is unknown").into()),
            }
        }
        Ok(())
    }

    fn acquire(&self) -> Result<(), VmmError> {
        self.call("destination acquire")
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        self.call("destination resume")?;
        self.guest().0 = RunState::Running;
        Ok(None)
    }

    fn announce(&self) {
        self.calls.push("destination announce");
    }

    fn discard(&self) {
        self.calls.push("destination discard");
    }
}

/// Builds [`Vm`]s at the destination, or refuses to build them.
pub struct Machines {
    pub sections: u32,
    pub huge: bool,
    pub calls: Calls,
    pub fail: Vec<&'static str>,
    pub built: Option<Arc<Vm>>,
}

impl Builder for Machines {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        self.calls.push("destination build");
        assert_eq!(offered.regions[2].kind, RegionKind::StateStream);
        if self.fail.contains(&"destination build") {
            return Err(Refusal {
                fault: FaultCode::NoMemory,
                text: "16 huge pages are missing".into(),
            });
        }
        // With the fault `destination memory`, the destination's region of device state differs in
        // length from the source's. The engine must detect the difference.
        let other = u32::from(self.fail.contains(&"destination memory")) * 2;
        let vm = Vm::new(self.sections + other, self.huge, &self.calls, &self.fail);
        self.built = Some(Arc::clone(&vm));
        Ok(vm)
    }
}

/// One migration attempt, with both sides on threads of this process.
pub fn attempt(
    vm: &Arc<Vm>,
    machines: &mut Machines,
    tls: &(ClientTls, ServerTls),
    options: &source::Options,
    observer: &(dyn Fn(&Event) + Send + Sync),
) -> (Result<Report, MigrateError>, Result<Received, MigrateError>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let give_up = Cancel::new();
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            let accepts = destination::Options::default();
            let seen = |_: &_| ();
            Incoming::builder(listener, &tls.1)
                .options(accepts.clone())
                .observer(&seen)
                .cancel(&give_up)
                .run(machines)
        });
        let source: Arc<dyn SourceVm> = Arc::clone(vm) as _;
        let cancel = Cancel::new();
        let observer = |event: &Event| observer(event);
        let here = Migration::builder(Arc::clone(&source), &to, &tls.0)
            .options(options.clone())
            .observer(&observer)
            .cancel(&cancel)
            .run();
        if here.is_err() {
            // If the source failed before it reached the destination, the destination waits until
            // this cancellation.
            give_up.cancel();
        }
        (here, there.join().unwrap())
    })
}
