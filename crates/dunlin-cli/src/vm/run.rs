//! `dunlin vm run`: a new VM.

use std::io;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use dunlin::lane::provider::Crypto;
use dunlin_linux::random;
use dunlin_linux::signals::EndSignals;
use dunlin_microvm::{Backing, Config, CreateError, Fill, GuestKind, Movable, Vm, Workload};

use super::control_service::ControlService;
use super::owner::Own;
use crate::code::{DONE, USAGE};
use crate::control::{self, Socket};
use crate::line::Line;
use crate::options::{GUESTS, named, parse_bytes};
use crate::progress::Waiting;
use crate::service::start;
use crate::sessions::left_behind;

const BACKINGS: &[(&str, Backing)] = &[
    ("private", Backing::Private),
    ("memfd", Backing::Memfd),
    ("huge", Backing::Huge),
];
const FILLS: &[(&str, Fill)] = &[
    ("random", Fill::Random),
    ("zero", Fill::Zero),
    ("mixed", Fill::Mixed),
    ("sparse", Fill::Sparse),
];
const WORKLOADS: &[(&str, Workload)] = &[
    ("idle", Workload::Idle),
    ("sequential", Workload::Sequential),
    ("random", Workload::Random),
    ("hot-set", Workload::HOT_SET),
];

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Name of the VM and of its control socket.
    #[arg(long)]
    name: String,
    /// Number of VMs, 1 to 128. If there are several, their names are NAME-1, NAME-2 and so on. The
    /// process owns all of them, and ends after the last has ended or moved away.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=128))]
    vms: u16,
    /// What runs in the VM: `kvm`, a guest on KVM; `process`, threads of this process that write
    /// ordinary memory, on any machine.
    #[arg(long, value_parser = named(GUESTS), default_value = "kvm")]
    guest: GuestKind,
    /// Memory size, such as 1G: a multiple of 2 MiB, more than 4 MiB, at most 63 GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "1G")]
    memory: u64,
    /// Number of vCPUs, 1 to 4.
    #[arg(long, value_name = "N", default_value_t = 1)]
    vcpus: u8,
    /// Backing of the guest's memory.
    #[arg(long, value_parser = named(BACKINGS), default_value = "private")]
    backing: Backing,
    /// Initial content of the memory; `sparse` is one non-zero page in each 2 MiB.
    #[arg(long, value_parser = named(FILLS), default_value = "random")]
    fill: Fill,
    /// Fill only this much memory; the remaining memory stays untouched.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    fill_size: Option<u64>,
    /// Order in which the guest writes its pages.
    #[arg(long, value_parser = named(WORKLOADS), default_value = "hot-set")]
    workload: Workload,
    /// The guest writes only this much memory, from the start of the memory that its workload may
    /// use.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    working_set: Option<u64>,
    /// Pages that the guest writes per second; 0 means no limit.
    #[arg(long, value_name = "PAGES_PER_S", default_value_t = 10_000)]
    dirty_rate: u64,
    #[command(flatten)]
    own: Own,
}

impl Run {
    fn config(&self, name: String) -> Result<Config> {
        let mut uuid = [0; 16];
        random::fill(&mut uuid).context("the random number source failed")?;
        // RFC 9562, section 5.4: version 4, variant 10 (binary).
        uuid[6] = uuid[6] & 0x0f | 0x40;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        Ok(Config {
            name,
            uuid,
            guest: self.guest,
            memory_bytes: self.memory,
            vcpus: self.vcpus,
            backing: self.backing,
            fill: self.fill,
            fill_bytes: self.fill_size,
            workload: self.workload,
            working_set_bytes: self.working_set,
            dirty_rate: self.dirty_rate,
            seed: u64::from_le_bytes(uuid[..8].try_into()?),
            power_off_after: None,
        })
    }

    pub(crate) fn run(self) -> Result<i32> {
        let several = self.vms > 1;
        let name = |number| match several {
            true => format!("{}-{number}", self.name),
            false => self.name.clone(),
        };
        let configs: Result<Vec<_>> = (1..=self.vms).map(|one| self.config(name(one))).collect();
        let configs = configs?;
        for config in &configs {
            if let Err(error) = config.validate() {
                eprintln!("error: {error}");
                return Ok(USAGE);
            }
        }
        let services = self.own.services(self.vms)?;
        let mut sockets = Vec::new();
        let signals = EndSignals::block()?;
        for (config, service) in configs.iter().zip(&services) {
            for left in left_behind(&self.own.state, &config.name)? {
                service.warn(&left);
            }
            let path = self.own.control.socket(&config.name)?;
            sockets.push(Socket::bind(&path, "a VM")?);
        }
        let published = self.own.status_sockets(self.vms);
        // Confine the process before it starts threads, because existing threads would keep their
        // privileges and their access to files.
        self.own.confine(&sockets[0].path, None)?;
        ControlService::watch(services.clone(), signals)?;
        self.own.watch_parent()?;
        let mut vms = Vec::new();
        for ((config, service), socket) in configs.into_iter().zip(&services).zip(&sockets) {
            vms.push(self.begin(config, service, socket)?);
        }
        // Measure the crypto libraries and seed their random generator now, so that the first
        // migration does not wait for this.
        start("crypto", || drop(Crypto::auto()))?;
        for (published, service) in published.iter().zip(&services) {
            let own = Arc::clone(service);
            published.serve(move || own.report(Vec::new()))?;
        }
        let ended: Result<Vec<_>> = thread::scope(|scope| {
            let keep = |(vm, service): (Arc<Movable>, Arc<ControlService>)| {
                let body = move || {
                    let code = service.keep(&vm);
                    // The VM has ended or moved away. Free its memory for the other VMs.
                    drop(vm);
                    service.release();
                    code
                };
                let named = thread::Builder::new().name("dunlin-keep".into());
                named.spawn_scoped(scope, body)
            };
            let threads: Vec<_> = vms.into_iter().zip(services).map(keep).collect();
            let join = |thread: io::Result<thread::ScopedJoinHandle<'_, Result<i32>>>| {
                let ended = thread.context("cannot start a thread")?.join();
                ended.map_err(|_| anyhow!("the thread of a VM panicked"))?
            };
            let ended: Vec<_> = threads.into_iter().map(join).collect();
            ended.into_iter().collect()
        });
        control::drain();
        Ok(ended?
            .into_iter()
            .find(|code| *code != DONE)
            .unwrap_or(DONE))
    }

    /// Makes a VM and starts it.
    fn begin(
        &self,
        config: Config,
        service: &Arc<ControlService>,
        socket: &Socket,
    ) -> Result<Arc<Movable>> {
        let name = config.name.clone();
        let vm = Vm::with_options(config, self.own.memory()).map_err(|error| {
            let what = match error {
                CreateError::NoKvm(_) => "cannot create the VM (`--guest process` needs no KVM)",
                _ => "cannot create the VM",
            };
            anyhow::Error::new(error).context(what)
        })?;
        let waiting = Waiting::new(self.own.json, "filling the VM's memory");
        vm.fill().context("cannot fill the VM's memory")?;
        drop(waiting);
        vm.start().context("cannot start the VM")?;
        let vm = Movable::new(Arc::new(vm));
        // Pass the VM to the service before the line *started* is printed, because a client that
        // has read the line may send requests for the VM.
        service.hold(&vm);
        let control = socket.path.display().to_string();
        let pid = std::process::id();
        Line::Started { name, pid, control }.say(self.own.json);
        service.serve(socket)?;
        Ok(vm)
    }
}
