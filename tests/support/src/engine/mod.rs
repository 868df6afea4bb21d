//! A VM for the engine's tests: ordinary memory, a writer thread in place of vCPUs, and a dirty log
//! of the writes through vm-memory. The real engine migrates it over real sockets and real TLS.

pub mod doubt;
pub mod peer;
pub mod proxy;
pub mod scene;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dunlin::engine::destination::{self, DestinationEvent, Listener, Received};
use dunlin::engine::memory::{MappedMemory, OwnWrites};
use dunlin::engine::source;
use dunlin::engine::vmm::{
    Builder, DestinationVm, DirtyLog, GuestMemory, Offered, Refusal, Region, RunState, Section,
    SourceVm, VmDescription, VmmError,
};
use dunlin::engine::{Cancel, Event, MigrateError, Observer, Report};
use dunlin::{Incoming, Migration};
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::provider::{Crypto, Provider};
use dunlin_linux::mapping::{Backing, allocate};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    VolatileSlice,
};

use crate::lane::{Authority, DESTINATION, SOURCE, load, names};

/// Guest memory for the tests, with a bitmap of the pages written through it.
pub type Memory = GuestMemoryMmap<AtomicBitmap>;

/// A function that is called before each fallible step of the VM, with the step's name.
pub type Hook = Box<dyn FnMut(&str) + Send>;
/// A function that is called with each VM that a [`TestBuilder`] has built.
pub type Plant = Box<dyn Fn(&Arc<TestVm>) + Send>;

/// A function that finds the ranges to send in a region of the source's memory.
pub type Scan = fn(&MappedMemory, usize, &mut dyn FnMut(Range<u64>)) -> io::Result<()>;

/// Memory in which a [`Scan`] replaces [`GuestMemory::ranges_to_send`].
struct Scanned(MappedMemory, Scan);

impl GuestMemory for Scanned {
    fn regions(&self) -> &[Region] {
        self.0.regions()
    }

    fn slice(&self, index: usize, offset: u64, length: usize) -> io::Result<VolatileSlice<'_>> {
        self.0.slice(index, offset, length)
    }

    fn ranges_to_send(&self, index: usize, found: &mut dyn FnMut(Range<u64>)) -> io::Result<()> {
        self.1(&self.0, index, found)
    }
}

/// A test VM, at the source or at the destination.
pub struct TestVm {
    pub memory: Arc<Memory>,
    pub state: Mutex<RunState>,
    /// The VM's UUID. All VMs have the same one, unless a test sets it.
    pub uuid: Mutex<[u8; 16]>,
    /// The step that fails, if a test plants a fault.
    pub fail: Mutex<Option<&'static str>>,
    /// Replaces the search for the pages to send, if a test plants a wrong search.
    pub scan: Mutex<Option<Scan>>,
    /// Called with the name of a step that can fail, before the step is executed.
    pub hook: Mutex<Option<Hook>>,
    /// The engine's calls, in order.
    pub calls: Mutex<Vec<&'static str>>,
    pub loaded: Mutex<Vec<Section>>,
    running: Arc<AtomicBool>,
    pub writes: Arc<AtomicU64>,
    pub throttle: Arc<AtomicU64>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl TestVm {
    /// A paused VM with `bytes` of memory, in two regions if that is more than 8 MiB.
    pub fn new(bytes: usize) -> Arc<Self> {
        let ranges = if bytes > 8 << 20 {
            let low = bytes / 4096 / 2 * 4096;
            vec![(GuestAddress(0), low), (GuestAddress(1 << 32), bytes - low)]
        } else {
            vec![(GuestAddress(0), bytes)]
        };
        Self::with_ranges(&ranges)
    }

    /// A paused VM with these regions, each with its address and size.
    pub fn with_ranges(ranges: &[(GuestAddress, usize)]) -> Arc<Self> {
        Self::with_memory(GuestMemoryMmap::from_ranges(ranges).unwrap())
    }

    /// A paused VM with two regions of these sizes in one memfd, at the offsets 0 and 1 MiB.
    pub fn in_one_file(bytes: [usize; 2]) -> Arc<Self> {
        const SECOND: u64 = 1 << 20;
        assert!(bytes[0] <= SECOND as usize);
        let whole = allocate(
            (SECOND + bytes[1] as u64).next_multiple_of(2 << 20),
            Backing::Memfd,
        );
        let region = whole.unwrap().iter().next().unwrap().file_offset().cloned();
        let file = |start| FileOffset::from_arc(Arc::clone(region.as_ref().unwrap().arc()), start);
        let regions = [
            (GuestAddress(0), bytes[0], Some(file(0))),
            (GuestAddress(1 << 32), bytes[1], Some(file(SECOND))),
        ];
        Self::with_memory(GuestMemoryMmap::from_ranges_with_files(&regions).unwrap())
    }

    fn with_memory(memory: Memory) -> Arc<Self> {
        Arc::new(Self {
            memory: Arc::new(memory),
            state: Mutex::new(RunState::Paused),
            uuid: Mutex::new([7; 16]),
            fail: Mutex::default(),
            scan: Mutex::default(),
            hook: Mutex::default(),
            calls: Mutex::default(),
            loaded: Mutex::default(),
            running: Arc::default(),
            writes: Arc::default(),
            throttle: Arc::default(),
            writer: Mutex::default(),
        })
    }

    /// Fills the first `bytes` bytes of each region with pseudo-random numbers.
    pub fn fill(&self, bytes: usize) {
        for region in self.memory.iter() {
            let end = (region.len() as usize).min(bytes);
            let mut page = [0_u8; 4096];
            let mut number = region.start_addr().0 | 1;
            for offset in (0..end).step_by(4096) {
                for word in page.chunks_exact_mut(8) {
                    number = number
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    word.copy_from_slice(&number.to_le_bytes());
                }
                let address = GuestAddress(region.start_addr().0 + offset as u64);
                self.memory.write_slice(&page, address).unwrap();
            }
        }
    }

    /// Runs the guest: a thread writes to the first `pages` pages in turn, with `delay` after each
    /// write.
    pub fn start(&self, pages: u64, delay: Duration) {
        *self.state.lock().unwrap() = RunState::Running;
        self.running.store(true, Ordering::SeqCst);
        let (memory, running) = (Arc::clone(&self.memory), Arc::clone(&self.running));
        let writes = Arc::clone(&self.writes);
        let throttle = Arc::clone(&self.throttle);
        *self.writer.lock().unwrap() = Some(std::thread::spawn(move || {
            let mut number = 0_u64;
            while running.load(Ordering::SeqCst) {
                let address = GuestAddress(number % pages * 4096 + 8 * (number % 512));
                memory.write_obj(number, address).unwrap();
                writes.fetch_add(1, Ordering::SeqCst);
                number += 1;
                let throttle = throttle.load(Ordering::SeqCst) as u32;
                let throttled = delay * throttle / (100 - throttle);
                if !delay.is_zero() {
                    std::thread::sleep(delay + throttled);
                }
            }
        }));
    }

    pub fn stop_writer(&self) {
        self.running.store(false, Ordering::SeqCst);
        if let Some(writer) = self.writer.lock().unwrap().take() {
            writer.join().unwrap();
        }
    }

    fn call(&self, name: &'static str) -> Result<(), VmmError> {
        self.calls.lock().unwrap().push(name);
        if let Some(hook) = &mut *self.hook.lock().unwrap() {
            hook(name);
        }
        if *self.fail.lock().unwrap() == Some(name) {
            return Err(format!("planted: {name} fails").into());
        }
        Ok(())
    }

    pub fn calls(&self) -> Vec<&'static str> {
        self.calls.lock().unwrap().clone()
    }

    /// Whether the guest runs and writes.
    pub fn goes_on(&self) -> bool {
        let before = self.writes.load(Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(2);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
            if self.writes.load(Ordering::SeqCst) > before {
                return *self.state.lock().unwrap() == RunState::Running;
            }
        }
        false
    }

    pub fn digest(&self) -> [u8; 16] {
        let mapped = MappedMemory::new(Arc::clone(&self.memory), 4096);
        dunlin::engine::memory::digest(&mapped, 2).unwrap()
    }
}

impl Drop for TestVm {
    fn drop(&mut self) {
        self.stop_writer();
    }
}

/// The device state that a test VM saves.
pub fn state() -> Vec<Section> {
    (0..3)
        .map(|instance| Section {
            name: "vcpu".into(),
            instance,
            version: 1,
            required: true,
            bytes: vec![instance as u8; 1000],
        })
        .collect()
}

impl SourceVm for TestVm {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        self.call("describe")?;
        Ok(VmDescription {
            uuid: *self.uuid.lock().unwrap(),
            name: "test".into(),
            description: b"a test VM".to_vec(),
        })
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        let mapped = MappedMemory::new(Arc::clone(&self.memory), 4096);
        match *self.scan.lock().unwrap() {
            Some(scan) => Arc::new(Scanned(mapped, scan)),
            None => Arc::new(mapped),
        }
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        vec![Box::new(OwnWrites::new(Arc::clone(&self.memory)))]
    }

    fn run_state(&self) -> RunState {
        self.state.lock().unwrap().clone()
    }

    fn pause(&self) -> Result<(), VmmError> {
        self.call("pause")?;
        self.stop_writer();
        let mut state = self.state.lock().unwrap();
        if *state == RunState::Running {
            *state = RunState::Paused;
        }
        Ok(())
    }

    fn resume(&self) -> Result<(), VmmError> {
        self.call("resume")?;
        self.start(64, Duration::from_micros(100));
        Ok(())
    }

    fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
        self.throttle.store(u64::from(percent), Ordering::SeqCst);
        Ok(true)
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        self.call("save")?;
        Ok(state())
    }

    fn deactivate(&self) -> Result<(), VmmError> {
        self.call("deactivate")
    }

    fn reactivate(&self) -> Result<(), VmmError> {
        self.call("reactivate")
    }

    fn hold(&self) -> Result<(), VmmError> {
        self.call("hold")
    }

    fn destroy(&self) {
        self.calls.lock().unwrap().push("destroy");
        *self.state.lock().unwrap() = RunState::Stopped("moved".into());
    }
}

impl DestinationVm for TestVm {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::new(MappedMemory::new(Arc::clone(&self.memory), 4096))
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        self.call("load")?;
        *self.loaded.lock().unwrap() = sections.to_vec();
        Ok(())
    }

    fn acquire(&self) -> Result<(), VmmError> {
        self.call("acquire")
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        self.call("resume")?;
        *self.state.lock().unwrap() = RunState::Running;
        Ok(None)
    }

    fn announce(&self) {
        self.calls.lock().unwrap().push("announce");
    }

    fn discard(&self) {
        self.calls.lock().unwrap().push("discard");
    }
}

/// Builds a [`TestVm`] with the offered regions, and keeps it for the test.
#[derive(Default)]
pub struct TestBuilder {
    pub built: Option<Arc<TestVm>>,
    pub refuse: Option<Refusal>,
    pub fail: Option<&'static str>,
    /// Called with each VM that has been built.
    pub planted: Option<Plant>,
}

impl Builder for TestBuilder {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        if let Some(refusal) = self.refuse.clone() {
            return Err(refusal);
        }
        let ranges: Vec<_> = offered
            .regions
            .iter()
            .map(|region| (GuestAddress(region.guest_physical), region.length as usize))
            .collect();
        let vm = TestVm::with_ranges(&ranges);
        *vm.fail.lock().unwrap() = self.fail;
        if let Some(planted) = &self.planted {
            planted(&vm);
        }
        self.built = Some(Arc::clone(&vm));
        Ok(vm)
    }
}

/// The results of both sides of a migration.
pub struct Moved {
    pub source: Result<Report, MigrateError>,
    pub destination: Result<Received, MigrateError>,
    pub builder: TestBuilder,
    pub source_events: Vec<Event>,
    pub destination_events: Vec<DestinationEvent>,
}

/// Runs a migration of `vm` between two threads over loopback.
pub fn run(
    vm: &Arc<TestVm>,
    tls: (&ClientTls, &ServerTls),
    source_options: &source::Options,
    destination_options: &destination::Options,
    builder: TestBuilder,
    cancel: &Cancel,
) -> Moved {
    let receiving = Receiving::start(tls.1, destination_options, builder);
    let to = receiving.address.to_string();
    let (source, source_events) = send(vm, &to, tls.0, source_options, cancel);
    let (destination, builder, destination_events) = receiving.finish(source.is_err());
    Moved {
        source,
        destination,
        builder,
        source_events,
        destination_events,
    }
}

/// Runs the source of a migration on this thread.
pub fn send(
    vm: &Arc<TestVm>,
    to: &str,
    client: &ClientTls,
    options: &source::Options,
    cancel: &Cancel,
) -> (Result<Report, MigrateError>, Vec<Event>) {
    let events = Mutex::new(Vec::new());
    let observe = |event: &Event| events.lock().unwrap().push(event.clone());
    let result = send_observed(vm, to, client, options, &observe, cancel);
    (result, events.into_inner().unwrap())
}

/// Like [`send`], but also passes each event to `observe` when it occurs.
pub fn send_observed(
    vm: &Arc<TestVm>,
    to: &str,
    client: &ClientTls,
    options: &source::Options,
    observe: &dyn Observer<Event>,
    cancel: &Cancel,
) -> Result<Report, MigrateError> {
    let as_source: Arc<dyn SourceVm> = Arc::clone(vm) as _;
    Migration::builder(as_source, to, client)
        .options(options.clone())
        .observer(observe)
        .cancel(cancel)
        .run()
}

type Taken = (Result<Received, MigrateError>, TestBuilder);

/// A destination on its own thread.
pub struct Receiving {
    pub address: SocketAddr,
    pub cancel: Cancel,
    pub events: Arc<Mutex<Vec<DestinationEvent>>>,
    thread: JoinHandle<Taken>,
}

impl Receiving {
    pub fn start(server: &ServerTls, options: &destination::Options, builder: TestBuilder) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        Self::on(listener, server, options, builder)
    }

    pub fn on(
        listener: TcpListener,
        server: &ServerTls,
        options: &destination::Options,
        mut builder: TestBuilder,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let events = Arc::<Mutex<Vec<DestinationEvent>>>::default();
        let cancel = Cancel::new();
        let (seen, cancelled) = (Arc::clone(&events), cancel.clone());
        let (server, options) = (server.clone(), options.clone());
        let thread = std::thread::spawn(move || {
            let observe = |event: &DestinationEvent| seen.lock().unwrap().push(event.clone());
            let result = Incoming::builder(listener, &server)
                .options(options)
                .observer(&observe)
                .cancel(&cancelled)
                .run(&mut builder);
            (result, builder)
        });
        Self {
            address,
            cancel,
            events,
            thread,
        }
    }

    fn shared(address: SocketAddr, mut listener: Listener, mut builder: TestBuilder) -> Self {
        let events = Arc::<Mutex<Vec<DestinationEvent>>>::default();
        let cancel = Cancel::new();
        let (seen, cancelled) = (Arc::clone(&events), cancel.clone());
        let thread = std::thread::spawn(move || {
            let observe = |event: &DestinationEvent| seen.lock().unwrap().push(event.clone());
            let result = listener.receive(&mut builder, &observe, &cancelled);
            (result, builder)
        });
        Self {
            address,
            cancel,
            events,
            thread,
        }
    }

    /// Waits until the destination has ended. A destination that has no session never ends on its
    /// own; for such a destination, `cancel` must be true, which cancels it first.
    pub fn finish(
        self,
        cancel: bool,
    ) -> (
        Result<Received, MigrateError>,
        TestBuilder,
        Vec<DestinationEvent>,
    ) {
        if cancel {
            std::thread::sleep(Duration::from_millis(50));
            self.cancel.cancel();
        }
        let (result, builder) = self.thread.join().unwrap();
        let events = self.events.lock().unwrap().clone();
        (result, builder, events)
    }

    /// Waits until the destination has reported an event that satisfies `found`.
    pub fn await_event(&self, found: impl Fn(&DestinationEvent) -> bool) {
        let until = Instant::now() + Duration::from_secs(5);
        while !self.events.lock().unwrap().iter().any(&found) {
            assert!(Instant::now() < until, "{:?}", self.events.lock().unwrap());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the destination has rejected a connection for a reason that contains `text`.
    pub fn await_rejection(&self, text: &str) {
        self.await_event(
            |event| matches!(event, DestinationEvent::Rejected { reason } if reason.contains(text)),
        );
    }
}

/// A listener for several sessions, each on its own thread.
pub struct Sessions {
    pub address: SocketAddr,
    pub each: Vec<Receiving>,
}

impl Sessions {
    /// Starts one session for each builder. The first offer gets the session of the first builder,
    /// the second offer that of the second builder, and so on.
    pub fn start(
        server: &ServerTls,
        options: &destination::Options,
        builders: impl IntoIterator<Item = TestBuilder>,
    ) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let incoming = Incoming::builder(listener, server).options(options.clone());
        let shared = incoming.share().unwrap();
        let builders: Vec<_> = builders.into_iter().collect();
        let mut listeners: Vec<_> = (1..builders.len()).map(|_| shared.clone()).collect();
        listeners.insert(0, shared);
        let each = listeners.into_iter().zip(builders);
        let each = each.map(|(listener, builder)| Receiving::shared(address, listener, builder));
        let each = each.collect();
        Self { address, each }
    }
}

/// The TLS configurations of both sides, with certificates from one authority.
pub fn tls() -> (ClientTls, ServerTls) {
    let authority = Authority::new();
    (client_of(&authority, SOURCE), server_of(&authority))
}

pub fn client_of(authority: &Authority, name: &str) -> ClientTls {
    let crypto = Crypto::with(Provider::built_in()[0]);
    authority
        .identity(&[name])
        .client(&crypto, names(&[DESTINATION]))
        .unwrap()
}

/// A client and a server with certificates from `authority`. Both also trust `other`.
pub fn trusting(authority: &Authority, other: &Authority) -> (ClientTls, ServerTls) {
    let crypto = Crypto::with(Provider::built_in()[0]);
    let host = |name| load(&authority.host_trusting(&[name], &[other]));
    let client = host(SOURCE).client(&crypto, names(&[DESTINATION]));
    let server = host(DESTINATION).server(&crypto, names(&[SOURCE]));
    (client.unwrap(), server.unwrap())
}

pub fn server_of(authority: &Authority) -> ServerTls {
    let crypto = Crypto::with(Provider::built_in()[0]);
    authority
        .identity(&[DESTINATION])
        .server(&crypto, names(&[SOURCE]))
        .unwrap()
}

/// Options of a destination that waits only briefly for a new control lane.
pub fn impatient() -> destination::Options {
    destination::Options::builder()
        .control_limit(Duration::from_millis(300))
        .build()
        .unwrap()
}

/// Options of a source that has `lanes` lanes and compares digests at the end.
pub fn verified(lanes: u16) -> source::Options {
    source::Options::builder()
        .lanes(lanes)
        .verify(true)
        .build()
        .unwrap()
}
