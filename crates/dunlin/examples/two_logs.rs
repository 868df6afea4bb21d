//! Two regions and two dirty logs. The guest's writes bypass the VMM and appear in
//! the hypervisor's log. A device of the VMM also writes. Its writes appear only in
//! the VMM's log. The engine uses the union of both logs.
//!
//! `cargo run --example two_logs`

mod certificates;

use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use dunlin::engine::memory::{MappedMemory, OwnWrites};
use dunlin::engine::vmm::*;
use dunlin::engine::{Event, MigrateError};
use dunlin::{Incoming, Migration};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Address and length in bytes of the two regions: ordinary memory, and a window above 4 GiB.
const RANGES: [(GuestAddress, usize); 2] =
    [(GuestAddress(0), 8 << 20), (GuestAddress(1 << 32), 4 << 20)];
const PAGES: [u64; 2] = [(8 << 20) / 4096, (4 << 20) / 4096];
/// The device writes at this offset in a page. The guest writes at the start of a page.
const DEVICE_OFFSET: u64 = 2048;

/// A VM on either host.
pub(crate) struct Vm {
    memory: Arc<GuestMemoryMmap<AtomicBitmap>>,
    /// A second view of `memory` for the guest's writes. These writes make no entry
    /// in vm-memory's bitmap.
    mapped: Arc<MappedMemory>,
    hypervisor: Arc<HypervisorLog>,
    /// Locked while the guest or the device writes.
    machine: Mutex<Machine>,
}

struct Machine {
    state: RunState,
    /// Number of writes by the guest, to the pages of both regions in ascending order.
    guest: u64,
    /// Number of writes by the device, to the pages in descending order.
    device: u64,
    throttle: u8,
}

/// A log like the one that KVM keeps for a VM: one bit per page that the guest has written.
pub(crate) struct HypervisorLog(Vec<Vec<AtomicU64>>);

impl HypervisorLog {
    fn new() -> Self {
        let words = |pages: u64| (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self(PAGES.into_iter().map(words).collect())
    }

    fn mark(&self, region: usize, page: u64) {
        self.0[region][(page / 64) as usize].fetch_or(1 << (page % 64), SeqCst);
    }
}

/// The hypervisor's log, as read by the engine.
struct GuestWrites(Arc<HypervisorLog>);

impl DirtyLog for GuestWrites {
    fn start(&mut self) -> io::Result<()> {
        self.fetch(&mut |_, _| ())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        for (index, words) in self.0.0.iter().enumerate() {
            // Reads and clears in one step, so that no write is lost in between.
            let taken: Vec<u64> = words.iter().map(|word| word.swap(0, SeqCst)).collect();
            found(index, &taken);
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Converts the number of a page, counted over both regions, to a region and a page
/// in that region.
fn page_at(number: u64) -> (usize, u64) {
    let number = number % (PAGES[0] + PAGES[1]);
    if number < PAGES[0] {
        (0, number)
    } else {
        (1, number - PAGES[0])
    }
}

impl Vm {
    /// A paused VM. One thread acts as guest and device, and ends with the VM.
    pub(crate) fn new() -> Result<Arc<Self>, VmmError> {
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&RANGES)?);
        let vm = Arc::new(Self {
            mapped: Arc::new(MappedMemory::new(Arc::clone(&memory), 4096)),
            memory,
            hypervisor: Arc::new(HypervisorLog::new()),
            machine: Mutex::new(Machine {
                state: RunState::Paused,
                guest: 0,
                device: 0,
                throttle: 0,
            }),
        });
        let both = Arc::downgrade(&vm);
        thread::spawn(move || {
            while let Some(vm) = both.upgrade() {
                let throttle = vm.step();
                drop(vm);
                thread::sleep(Duration::from_micros(100) * 100 / (100 - u32::from(throttle)));
            }
        });
        Ok(vm)
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine
            .lock()
            .expect("no thread panics while holding it")
    }

    /// One write by the guest and one by the device; returns the throttle in percent.
    fn step(&self) -> u8 {
        let mut machine = self.machine();
        if machine.state == RunState::Running {
            let (region, page) = page_at(machine.guest);
            let bytes = machine.guest.to_le_bytes();
            let slice = self.mapped.slice(region, page * 4096, bytes.len());
            slice.expect("the page exists").copy_from(&bytes);
            self.hypervisor.mark(region, page);
            machine.guest += 1;

            let (region, page) = page_at(u64::MAX - machine.device);
            let address = RANGES[region].0.0 + page * 4096 + DEVICE_OFFSET;
            let written = self.memory.write_obj(machine.device, GuestAddress(address));
            written.expect("the page exists");
            machine.device += 1;
        }
        machine.throttle
    }

    /// Whether each page holds what the guest and the device have last written to it.
    pub(crate) fn is_whole(&self) -> bool {
        let machine = self.machine();
        let all = PAGES[0] + PAGES[1];
        let holds = |(region, page): (usize, u64), offset, number| {
            let address = GuestAddress(RANGES[region].0.0 + page * 4096 + offset);
            self.memory.read_obj(address).ok() == Some(number)
        };
        let last = |count: u64| count.saturating_sub(all)..count;
        last(machine.guest).all(|number| holds(page_at(number), 0, number))
            && last(machine.device)
                .all(|number| holds(page_at(u64::MAX - number), DEVICE_OFFSET, number))
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        Ok(VmDescription {
            uuid: *b"two logs example",
            name: "two-logs".into(),
            description: b"two logs".to_vec(),
        })
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.mapped) as _
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        vec![
            Box::new(GuestWrites(Arc::clone(&self.hypervisor))),
            Box::new(OwnWrites::new(Arc::clone(&self.memory))),
        ]
    }

    fn run_state(&self) -> RunState {
        self.machine().state.clone()
    }

    fn pause(&self) -> Result<(), VmmError> {
        // The device stops too, because nothing may write to memory while the VM is
        // paused.
        self.machine().state = RunState::Paused;
        Ok(())
    }

    fn resume(&self) -> Result<(), VmmError> {
        self.machine().state = RunState::Running;
        Ok(())
    }

    fn throttle(&self, percent: u8) -> Result<bool, VmmError> {
        self.machine().throttle = percent.min(99);
        Ok(true)
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        let machine = self.machine();
        let section = |name: &str, number: u64| Section {
            name: name.into(),
            instance: 0,
            version: 1,
            required: true,
            bytes: number.to_le_bytes().to_vec(),
        };
        Ok(vec![
            section("guest", machine.guest),
            section("device", machine.device),
        ])
    }

    fn destroy(&self) {
        self.machine().state = RunState::Stopped("it runs at the destination".into());
    }
}

impl DestinationVm for Vm {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::clone(&self.mapped) as _
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        let mut machine = self.machine();
        for section in sections {
            let number = match (section.name.as_str(), section.version) {
                ("guest", 1) => &mut machine.guest,
                ("device", 1) => &mut machine.device,
                (name, version) if section.required => {
                    return Err(format!("section {name} version {version} is not supported").into());
                }
                _ => continue,
            };
            *number = u64::from_le_bytes(section.bytes.as_slice().try_into()?);
        }
        Ok(())
    }

    fn acquire(&self) -> Result<(), VmmError> {
        Ok(())
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        SourceVm::resume(self).map(|()| None)
    }

    fn announce(&self) {}

    fn discard(&self) {}
}

/// Builds the VMs that sources describe; keeps the last one.
#[derive(Default)]
pub(crate) struct Machines(pub(crate) Option<Arc<Vm>>);

impl Builder for Machines {
    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        let refuse = |fault, text: String| Refusal { fault, text };
        let lengths = offered.regions.iter().map(|region| region.length / 4096);
        if !lengths.eq(PAGES) {
            let text = "only VMs with two regions of 8 MiB and 4 MiB are accepted".to_owned();
            return Err(refuse(FaultCode::DescriptionRefused, text));
        }
        let vm = Vm::new().map_err(|error| refuse(FaultCode::NoMemory, error.to_string()))?;
        self.0 = Some(Arc::clone(&vm));
        Ok(vm)
    }
}

fn main() -> Result<(), VmmError> {
    let (client, server) = certificates::two_hosts()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let to = listener.local_addr()?.to_string();
    let destination = thread::spawn(move || {
        let mut machines = Machines::default();
        Incoming::builder(listener, &server).run(&mut machines)?;
        Ok::<_, MigrateError>(machines.0)
    });

    let vm = Vm::new()?;
    SourceVm::resume(&*vm)?;
    thread::sleep(Duration::from_millis(300));
    let observer = |event: &Event| {
        if let Event::Iterated(iteration) = event {
            println!(
                "pass {}: {} pages, {} written during it",
                iteration.number, iteration.pages, iteration.dirtied_pages
            );
        }
    };
    Migration::builder(vm, to, &client)
        .observer(&observer)
        .run()?;
    let moved = destination.join().expect("the thread does not panic")?;
    let moved = moved.ok_or("no VM was built")?;
    println!("it runs there: {}", moved.run_state() == RunState::Running);
    println!("memory is whole: {}", moved.is_whole());
    Ok(())
}
