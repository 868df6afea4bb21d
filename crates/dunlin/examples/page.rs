//! A VMM with its own dirty bitmap: a guest with memory and registers moves between
//! two hosts that pin each other's certificate and keep a journal.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use dunlin::engine::journal::Journal;
use dunlin::engine::memory::{MappedMemory, digest};
use dunlin::engine::vmm::*;
use dunlin::engine::{Cancel, destination, source};
use dunlin::lane::{Crypto, Identity, LoadOptions, Peer, Peers, Pin};
use dunlin::vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use dunlin::{Incoming, Migration};

const PAGES: u64 = 2048;

/// What the guest changes while it runs.
struct Guest {
    run: RunState,
    steps: u64,
    random: u64,
    /// One bit for each page that was written since the last fetch.
    dirty: Vec<u64>,
}

fn lock(guest: &Mutex<Guest>) -> MutexGuard<'_, Guest> {
    guest.lock().expect("no holder panics")
}

struct Vm {
    memory: Arc<GuestMemoryMmap>,
    guest: Arc<Mutex<Guest>>,
    changed: Condvar,
}

impl Vm {
    /// A paused VM of 8 MiB.
    fn new() -> Result<Arc<Self>, VmmError> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), PAGES as usize * 4096)])?;
        let dirty = vec![0; PAGES as usize / 64];
        let guest = Guest {
            run: RunState::Paused,
            steps: 0,
            random: 1,
            dirty,
        };
        let (memory, guest) = (Arc::new(memory), Arc::new(Mutex::new(guest)));
        Ok(Arc::new(Self {
            memory,
            guest,
            changed: Condvar::new(),
        }))
    }

    fn guest(&self) -> MutexGuard<'_, Guest> {
        lock(&self.guest)
    }

    fn mapped(&self) -> Arc<dyn GuestMemory> {
        Arc::new(MappedMemory::new(self.memory.clone(), 4096))
    }

    /// Writes one page. The caller holds the guest's lock, so that the log is not
    /// fetched between the write to the page and the change of the page's bit.
    fn step(&self, guest: &mut Guest) {
        guest.random = guest
            .random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1);
        guest.steps += 1;
        let page = (guest.random >> 33) % PAGES;
        self.memory
            .write_obj(guest.random, GuestAddress(page * 4096))
            .expect("the page exists");
        guest.dirty[page as usize / 64] |= 1 << (page % 64);
    }

    /// The guest's thread: one page every 50 microseconds, until the VM is stopped.
    fn run(&self) {
        let mut guest = self.guest();
        loop {
            match guest.run {
                RunState::Running => {
                    self.step(&mut guest);
                    self.changed.notify_all();
                    drop(guest);
                    thread::sleep(Duration::from_micros(50));
                    guest = self.guest();
                }
                RunState::Paused => guest = self.changed.wait(guest).expect("no holder panics"),
                RunState::PoweredOff | RunState::Stopped(_) => return,
            }
        }
    }

    fn set(&self, run: RunState) {
        self.guest().run = run;
        self.changed.notify_all();
    }

    /// Waits until the guest has done `steps` steps.
    fn reach(&self, steps: u64) {
        let guest = self.guest();
        drop(self.changed.wait_while(guest, |guest| guest.steps < steps));
    }
}

/// The VM's dirty bitmap, as the engine reads it.
struct Bitmap(Arc<Mutex<Guest>>);

impl DirtyLog for Bitmap {
    fn start(&mut self) -> io::Result<()> {
        lock(&self.0).dirty.fill(0);
        Ok(())
    }

    fn fetch(&mut self, found: &mut dyn FnMut(usize, &[u64])) -> io::Result<()> {
        let mut guest = lock(&self.0);
        found(0, &guest.dirty);
        guest.dirty.fill(0);
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> Result<VmDescription, VmmError> {
        let mut described = VmDescription::new(*b"dunlin page vm 1", "page");
        described.description = PAGES.to_le_bytes().to_vec();
        Ok(described)
    }

    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.mapped()
    }

    fn dirty_logs(&self) -> Vec<Box<dyn DirtyLog>> {
        vec![Box::new(Bitmap(self.guest.clone()))]
    }

    fn run_state(&self) -> RunState {
        self.guest().run.clone()
    }

    fn pause(&self) -> Result<(), VmmError> {
        self.set(RunState::Paused);
        Ok(())
    }

    fn resume(&self) -> Result<(), VmmError> {
        self.set(RunState::Running);
        Ok(())
    }

    fn save(&self) -> Result<Vec<Section>, VmmError> {
        let guest = self.guest();
        let registers = [guest.steps.to_le_bytes(), guest.random.to_le_bytes()].concat();
        Ok(vec![Section::required("registers", 1, registers)])
    }

    fn destroy(&self) {
        self.set(RunState::Stopped("it runs at the destination".into()));
    }
}

impl DestinationVm for Vm {
    fn memory(&self) -> Arc<dyn GuestMemory> {
        self.mapped()
    }

    fn load(&self, sections: &[Section]) -> Result<(), VmmError> {
        let [registers] = known_sections(sections, [("registers", 1)])?;
        let (steps, random) = registers.split_at_checked(8).ok_or("too few registers")?;
        let mut guest = self.guest();
        guest.steps = u64::from_le_bytes(steps.try_into()?);
        guest.random = u64::from_le_bytes(random.try_into()?);
        Ok(())
    }

    fn resume(&self) -> Result<Option<Duration>, VmmError> {
        self.set(RunState::Running);
        Ok(None)
    }

    fn discard(&self) {
        self.set(RunState::Stopped("it was not moved here".into()));
    }
}

/// Creates a host's identity in `directory`: a self-signed certificate, its key and its pin.
fn identity(directory: &Path, name: &str) -> Result<(Identity, Peers), VmmError> {
    fs::create_dir_all(directory)?;
    let made = rcgen::generate_simple_self_signed([name.to_owned()])?;
    fs::write(directory.join("cert.pem"), made.cert.pem())?;
    let mut private = OpenOptions::new();
    private.write(true).create_new(true).mode(0o600);
    let key = made.signing_key.serialize_pem();
    private
        .open(directory.join("key.pem"))?
        .write_all(key.as_bytes())?;
    let (identity, _) = Identity::load(directory, LoadOptions::default())?;
    let pin = Pin::of_certificate(made.cert.der());
    Ok((identity, Peers::OneOf(vec![Peer::Pin(pin)])))
}

/// Moves a VM from one host to the other, and returns the line to print.
fn run(directory: &Path) -> Result<String, VmmError> {
    let (a, b) = (directory.join("a"), directory.join("b"));
    let ((identity_a, only_a), (identity_b, only_b)) = (
        identity(&a, "host-a.example")?,
        identity(&b, "host-b.example")?,
    );
    let client = identity_a.client(&Crypto::auto(), only_b)?;
    let server = identity_b.server(&Crypto::auto(), only_a)?;
    let at_source = source::Options::builder()
        .verify(true)
        .journal(Journal::open(&a.join("journal"))?)
        .build()?;
    let at_destination = destination::Options::builder()
        .journal(Journal::open(&b.join("journal"))?)
        .build()?;

    let (here, there) = (Vm::new()?, Vm::new()?);
    let threads = [here.clone(), there.clone()].map(|vm| thread::spawn(move || vm.run()));
    here.set(RunState::Running);
    here.reach(1000);

    let mut builder = |offered: &Offered| -> Built {
        if offered.vm.description != PAGES.to_le_bytes() {
            let text = "this host builds only VMs of 8 MiB".into();
            return Err(Refusal {
                fault: FaultCode::DescriptionRefused,
                text,
            });
        }
        Ok(there.clone())
    };
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let to = listener.local_addr()?.to_string();
    let stop = Cancel::new();
    let incoming = Incoming::builder(listener, &server)
        .options(at_destination)
        .cancel(&stop);
    let (report, received) = thread::scope(|hosts| {
        let destination = hosts.spawn(|| incoming.run(&mut builder));
        let report = Migration::builder(here.clone(), to, &client)
            .options(at_source)
            .run()
            .inspect_err(|_| stop.cancel());
        (
            report,
            destination.join().expect("the destination does not panic"),
        )
    });
    let (report, received) = (report?, received?);

    // The guest's thread at the source ends when `destroy` stops the VM.
    let [guest_here, guest_there] = threads;
    guest_here.join().expect("the guest does not panic");
    let moved_at = here.guest().steps;
    there.reach(moved_at + 1000);
    there.set(RunState::PoweredOff);
    guest_there.join().expect("the guest does not panic");

    // The registers determine the content of memory, so a new guest that makes the
    // same number of steps must write the same content.
    let again = Vm::new()?;
    let mut guest = again.guest();
    while guest.steps < there.guest().steps {
        again.step(&mut guest);
    }
    let memory_is_equal = digest(&*again.mapped(), 1)? == digest(&*there.mapped(), 1)?;
    Ok(format!(
        "it runs there only: {}, digests equal: {:?}, registers equal: {}, memory equal: {}",
        received.runs && report.runs && here.guest().steps == moved_at,
        report.digests_equal,
        guest.random == there.guest().random,
        memory_is_equal
    ))
}

fn main() -> Result<(), VmmError> {
    let directory = std::env::temp_dir().join(format!("dunlin-page-{}", std::process::id()));
    let line = run(&directory);
    fs::remove_dir_all(&directory)?;
    println!("{}", line?);
    Ok(())
}
