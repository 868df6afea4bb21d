//! The smallest VMM that Dunlin can migrate: memory, a guest that writes to it, and one
//! section of device state. Both hosts are threads of this program; the sockets, the
//! certificates and the migration are real.

pub(crate) mod certificates;

use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use dunlin::engine::memory::{MappedMemory, OwnWrites};
use dunlin::engine::vmm::*;
use dunlin::{Incoming, Migration, engine::Cancel};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, bitmap::AtomicBitmap};

const PAGES: u64 = 4096;

/// A VM on either host. Its guest writes the numbers from 0 on, one to each page in
/// turn. So its only register, the next number, determines the content of memory.
pub(crate) struct Vm {
    memory: Arc<GuestMemoryMmap<AtomicBitmap>>,
    /// The guest's run state and next number; locked while the guest writes.
    guest: Mutex<(RunState, u64)>,
}

impl Vm {
    /// A paused VM of 16 MiB. Its guest is a thread that ends with the VM.
    pub(crate) fn new() -> Result<Arc<Self>, VmmError> {
        let regions = [(GuestAddress(0), PAGES as usize * 4096)];
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&regions)?);
        let guest = Mutex::new((RunState::Paused, 0));
        let vm = Arc::new(Self { memory, guest });
        let alive = Arc::downgrade(&vm);
        thread::spawn(move || {
            while let Some(vm) = alive.upgrade() {
                if let (RunState::Running, next) = &mut *vm.guest() {
                    let page = GuestAddress(*next % PAGES * 4096);
                    vm.memory.write_obj(*next, page).expect("the page exists");
                    *next += 1;
                }
                thread::sleep(Duration::from_micros(100));
            }
        });
        Ok(vm)
    }
    fn guest(&self) -> MutexGuard<'_, (RunState, u64)> {
        self.guest.lock().expect("no holder panics")
    }
    /// Whether each page holds the last number that the guest has written to it.
    pub(crate) fn is_whole(&self) -> bool {
        let next = self.guest().1;
        let read = |page| self.memory.read_obj(GuestAddress(page * 4096)).ok();
        (next.saturating_sub(PAGES)..next).all(|number| read(number % PAGES) == Some(number))
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        Ok(VmDescription::new(*b"smallest example", "smallest"))
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
    fn save(&self) -> Result<Vec<Section>, VmmError> {
        let register = self.guest().1.to_le_bytes();
        Ok(vec![Section::required("next", 1, register.to_vec())])
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
        let [register] = known_sections(sections, [("next", 1)])?;
        self.guest().1 = u64::from_le_bytes(register.try_into()?);
        Ok(())
    }
    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        SourceVm::resume(self).map(|()| None)
    }
}

fn main() -> Result<(), VmmError> {
    let (source, destination) = certificates::two_hosts()?;
    let (here, there) = (Vm::new()?, Vm::new()?);
    SourceVm::resume(&*here)?;
    thread::sleep(Duration::from_millis(100));
    let (cancel, listener) = (Cancel::new(), TcpListener::bind("127.0.0.1:0")?);
    let to = listener.local_addr()?.to_string();
    let incoming = Incoming::builder(listener, &destination).cancel(&cancel);
    let report = thread::scope(|hosts| {
        hosts.spawn(|| incoming.run(&mut |_: &Offered| -> Built { Ok(there.clone()) }));
        let result = Migration::builder(here, to, &source).run();
        result.inspect_err(|_| cancel.cancel())
    })?;
    println!("moved in {:?}", report.total);
    println!("it runs there: {}", there.run_state() == RunState::Running);
    println!("memory is whole: {}", there.is_whole());
    Ok(())
}
