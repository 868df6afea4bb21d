//! `dunlin vm run`: a new VM.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use dunlin_linux::signals::EndSignals;
use dunlin_microvm::{Config, CreateError, Movable, Vm, Workload};

use super::control_service::ControlService;
use super::owner::Parent;
use crate::code::USAGE;
use crate::confine::{self, Confining, KeepingIpsec, Needs};
use crate::control::Socket;
use crate::line::Line;
use crate::options::{
    BackingName, ControlPath, FillName, GuestName, MemoryFlags, WorkloadName, parse_bytes,
};
use crate::sessions::left_behind;
use crate::state::StatePath;

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The VM's name, and its control socket's.
    #[arg(long)]
    name: String,
    /// What runs in it.
    #[arg(long, value_enum, default_value = "kvm")]
    guest: GuestName,
    /// Memory, such as 1G: a multiple of 2 MiB, more than 4 MiB, at most 63 GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "1G")]
    memory: u64,
    /// vCPUs, 1 to 4.
    #[arg(long, value_name = "N", default_value_t = 1)]
    vcpus: u8,
    /// What the guest's memory is made of.
    #[arg(long, value_enum, default_value = "private")]
    backing: BackingName,
    #[command(flatten)]
    memory_flags: MemoryFlags,
    /// What is in it at first.
    #[arg(long, value_enum, default_value = "random")]
    fill: FillName,
    /// Fill only so much of it; the rest stays untouched.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    fill_size: Option<u64>,
    /// In which order the guest goes over its pages.
    #[arg(long, value_enum, default_value = "hot-set")]
    workload: WorkloadName,
    /// How much memory the guest goes over, from the start.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    working_set: Option<u64>,
    /// Pages that the guest writes per second; 0 is as fast as it can.
    #[arg(long, value_name = "PAGES_PER_S", default_value_t = 10_000)]
    dirty_rate: u64,
    #[command(flatten)]
    control: ControlPath,
    #[command(flatten)]
    state: StatePath,
    #[command(flatten)]
    confining: Confining,
    #[command(flatten)]
    keeping: KeepingIpsec,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    parent: Parent,
}

impl Run {
    pub(crate) fn run(self) -> Result<i32> {
        let mut uuid = [0; 16];
        std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut uuid)
            .context("the random number source failed")?;
        // RFC 9562, section 5.4: version 4, variant 10.
        uuid[6] = uuid[6] & 0x0f | 0x40;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        let workload: Workload = self.workload.into();
        let config = Config {
            name: self.name.clone(),
            uuid,
            guest: self.guest.into(),
            memory_bytes: self.memory,
            vcpus: self.vcpus,
            backing: self.backing.into(),
            fill: self.fill.into(),
            fill_bytes: self.fill_size,
            workload,
            working_set_bytes: self.working_set,
            dirty_rate: self.dirty_rate,
            seed: u64::from_le_bytes(uuid[..8].try_into()?),
            power_off_after: None,
        };
        if let Err(error) = config.validate() {
            eprintln!("error: {error}");
            return Ok(USAGE);
        }
        let service = ControlService::new(self.json, self.state.open()?, self.state.directory()?);
        for left in left_behind(&self.state, &self.name)? {
            service.warn(&left);
        }
        let signals = EndSignals::block()?;
        let socket = Socket::bind(&self.control.socket(&self.name)?, "a VM")?;
        // Before there are other threads, which would stay as they are.
        self.confine(&socket)?;
        service.watch(signals)?;
        self.parent.watch()?;
        let vm = Vm::with_options(config, self.memory_flags.options()).map_err(|error| {
            let what = match error {
                CreateError::NoKvm(_) => "the VM cannot be made (`--guest process` needs no KVM)",
                _ => "the VM cannot be made",
            };
            anyhow::Error::new(error).context(what)
        })?;
        vm.fill().context("the VM's memory cannot be filled")?;
        vm.start().context("the VM cannot be started")?;
        let control = socket.path().display().to_string();
        if self.json {
            Line::Started {
                name: self.name.clone(),
                pid: std::process::id(),
                control,
            }
            .print();
        } else {
            println!("{} runs; control socket {control}", self.name);
        }
        service.serve(&socket)?;
        service.keep(&Movable::new(Arc::new(vm)))
    }
    fn confine(&self, socket: &Socket) -> Result<()> {
        let confined = self.confining.apply(&Needs {
            control: Needs::directory_of(socket.path()),
            journal: self.state.directory()?,
            scratch: self.parent.scratch(),
            identity: None,
            makes_sockets: false,
            ipsec: self.keeping.ports(),
        })?;
        confine::say(&confined, self.json);
        Ok(())
    }
}
