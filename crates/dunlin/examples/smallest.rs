//! The smallest VMM that Dunlin can migrate: memory, a guest that writes to it, one
//! section of device state. Both hosts are threads of this program; the sockets, the
//! certificates and the migration are real.
//!
//! `cargo run --example smallest`

pub(crate) mod certificates;

use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use dunlin::engine::MigrateError;
use dunlin::engine::memory::{MappedMemory, OwnWrites};
use dunlin::engine::vmm::*;
use dunlin::{Incoming, Migration};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

const BYTES: usize = 16 << 20;
const PAGES: u64 = BYTES as u64 / 4096;
const DESCRIPTION: &[u8] = b"16 MiB and one register";

/// A VM on either host. Its guest writes the numbers from 0 on, one to each page in
/// turn. So its only register, the next number, determines the content of memory.
pub(crate) struct Vm {
    memory: Arc<GuestMemoryMmap<AtomicBitmap>>,
    /// The guest's run state and next number; locked while it writes.
    guest: Mutex<(RunState, u64)>,
}

impl Vm {
    /// A paused VM. Its guest is a thread that ends with the VM.
    pub(crate) fn new() -> Result<Arc<Self>, VmmError> {
        let vm = Arc::new(Self {
            memory: Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), BYTES)])?),
            guest: Mutex::new((RunState::Paused, 0)),
        });
        let guest = Arc::downgrade(&vm);
        thread::spawn(move || {
            while let Some(vm) = guest.upgrade() {
                vm.step();
                drop(vm);
                thread::sleep(Duration::from_micros(100));
            }
        });
        Ok(vm)
    }

    fn guest(&self) -> MutexGuard<'_, (RunState, u64)> {
        self.guest.lock().expect("no holder panics")
    }

    fn step(&self) {
        let (state, next) = &mut *self.guest();
        if *state == RunState::Running {
            let page = GuestAddress(*next % PAGES * 4096);
            self.memory.write_obj(*next, page).expect("it exists");
            *next += 1;
        }
    }

    /// Whether memory holds every number that the guest has written.
    pub(crate) fn is_whole(&self) -> bool {
        let guest = self.guest();
        let address = |number| GuestAddress(number % PAGES * 4096);
        let holds = |number| self.memory.read_obj(address(number)).ok() == Some(number);
        (guest.1.saturating_sub(PAGES)..guest.1).all(holds)
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        Ok(VmDescription {
            uuid: *b"smallest example",
            name: "smallest".into(),
            description: DESCRIPTION.to_vec(),
        })
    }
    fn memory(&self) -> Arc<dyn GuestMemory> {
        Arc::new(MappedMemory::new(self.memory.clone(), 4096))
    }
    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        vec![Box::new(OwnWrites::new(self.memory.clone()))]
    }
    fn run_state(&self) -> RunState {
        self.guest().0.clone()
    }
    fn pause(&self) -> Result<(), VmmError> {
        self.guest().0 = RunState::Paused;
        Ok(())
    }
    fn resume(&self) -> Result<(), VmmError> {
        self.guest().0 = RunState::Running;
        Ok(())
    }
    fn throttle(&self, _percent: u8) -> Result<bool, VmmError> {
        Ok(false)
    }
    fn save(&self) -> Result<Vec<Section>, VmmError> {
        Ok(vec![Section {
            name: "next".into(),
            instance: 0,
            version: 1,
            required: true,
            bytes: self.guest().1.to_le_bytes().to_vec(),
        }])
    }
    // This VM has no disks to release and no toolstack to wait for.
    fn deactivate(&self) -> Result<(), VmmError> {
        Ok(())
    }
    fn reactivate(&self) -> Result<(), VmmError> {
        Ok(())
    }
    fn hold(&self) -> Result<(), VmmError> {
        Ok(())
    }
    fn destroy(&self) {
        self.guest().0 = RunState::Stopped("it runs at the destination".into());
    }
}

impl DestinationVm for Vm {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        SourceVm::memory(self)
    }
    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        for section in sections.iter().filter(|section| section.required) {
            if (section.name.as_str(), section.version) != ("next", 1) {
                return Err(format!("section {} is not supported", section.name).into());
            }
            self.guest().1 = u64::from_le_bytes(section.bytes.as_slice().try_into()?);
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
        let refuse = |error: VmmError| Refusal {
            fault: FaultCode::DescriptionRefused,
            text: error.to_string(),
        };
        if offered.vm.description != DESCRIPTION {
            return Err(refuse("only VMs of this example are accepted".into()));
        }
        let vm = Vm::new().map_err(refuse)?;
        self.0 = Some(vm.clone());
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
    thread::sleep(Duration::from_millis(100));
    let report = Migration::builder(vm, to, &client).run()?;
    let moved = destination.join().expect("the thread does not panic")?;
    let moved = moved.ok_or("no VM was built")?;
    println!("moved in {:?}", report.total);
    println!("it runs there: {}", moved.run_state() == RunState::Running);
    println!("memory is whole: {}", moved.is_whole());
    Ok(())
}
