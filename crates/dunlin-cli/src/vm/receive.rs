//! `dunlin vm receive`: waits for a VM, then owns it.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use dunlin::Incoming;
use dunlin::engine::destination::{DestinationEvent, Options};
use dunlin::engine::vmm::{Builder, DestinationVm, FaultCode, Offered, Refusal};
use dunlin::engine::{MigrateError, VmIs, fault_behind};
use dunlin::lane::security::SealedLanes;
use dunlin_ipsec as ipsec;
use dunlin_lane::sync::lock;
use dunlin_linux::signals::{EndSignal, EndSignals, HangUps};
use dunlin_microvm::{MachineBuilder, Movable, VmState};

use super::control_service::ControlService;
use super::owner::Own;
use super::story;
use crate::code::CANCELLED;
use crate::confine;
use crate::control::{self, Socket};
use crate::identity::{Accepting, Common};
use crate::line::{FailedLine, Line, millis};
use crate::options::{ControlPath, LANES_QUIET, ipsec_lanes, parse_limit};
use crate::progress::Waiting;
use crate::published::StatusSocket;
use crate::published::history::{self, Finished};
use crate::service::{cannot_listen, start};
use crate::text::{chained, clean};

#[derive(Debug, Args)]
pub(crate) struct Receive {
    /// Address to listen on, such as 0.0.0.0:4444; port 0 selects a free port.
    #[arg(long, value_name = "ADDR")]
    listen: String,
    /// Allow data lanes without security if the source requests them.
    #[arg(long)]
    allow_plain: bool,
    /// Longest time without progress from a source before its migration is aborted; keep-alives do
    /// not count. No other VM can arrive during that time.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_limit)]
    idle_limit: Duration,
    /// Digest the memory as it was when the guest resumed, for a parent process that compares the
    /// digests.
    #[arg(long, hide = true)]
    digests: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    own: Own,
}

impl Receive {
    pub(crate) fn run(self) -> Result<i32> {
        let service = self.own.service()?;
        let hang_ups = HangUps::block()?;
        let signals = EndSignals::block()?;
        let (accepting, warnings) = Accepting::load(&self.common)?;
        let accepting = Arc::new(accepting);
        for text in warnings {
            self.say(&Line::Warning { text });
        }
        self.say(&Line::from(&self.common.records.choice()?));
        let listener = TcpListener::bind(&self.listen)
            .map_err(|error| cannot_listen(&self.listen, "--listen", &error))?;
        let address = listener.local_addr()?.to_string();
        let published = StatusSocket::bind(&self.own.control, "vm");
        // Confine the process before it starts threads, because existing threads would keep their
        // privileges and their access to files.
        let beside = self.own.control.socket("vm")?;
        let confined = self.own.confine(&beside, Some(&self.common.identity))?;
        let own = Arc::clone(&service);
        published.serve(move || own.report())?;
        service.watch(signals)?;
        reload_at(hang_ups, self.own.json, &accepting)?;
        self.say(&Line::Listening {
            address: address.clone(),
        });
        let ipsec = match self.own.ipsec_ports() {
            Some(ports) => {
                let mut options = ipsec::Options::new(
                    ipsec::Mode::Connection,
                    ports,
                    service.ipsec_records.clone(),
                );
                options.quiet_wait = LANES_QUIET;
                let warned = Arc::clone(&service);
                Some(ipsec_lanes(options, move |text| warned.warn(&text))?)
            }
            None => None,
        };
        let options = Options::builder()
            .ipsec(ipsec.map(|lanes| Arc::new(lanes) as Arc<dyn SealedLanes>))
            .allow_plain(self.allow_plain)
            .idle_limit(self.idle_limit)
            .journal(service.journal.clone())
            .build()?;
        self.own.watch_parent()?;
        let mut builder = VmBuilder {
            machines: MachineBuilder::new(self.own.memory().digests(self.digests)),
            control: &self.own.control,
            service: &service,
            socket: None,
        };
        let arriving = Mutex::new(None);
        let observe = |event: &DestinationEvent| {
            if let DestinationEvent::Offered(offered) = event {
                let what = format!("VM {} arrives", offered.vm.name);
                *lock(&arriving) = Some(Waiting::new(self.own.json, &what));
            }
            service.observe(event);
            story::at_destination(event);
            self.observe(event);
        };
        let mut cancelled = None;
        let received = loop {
            let Some(cancel) = service.next_attempt() else {
                control::drain();
                return Ok(self.cancelled(&service, cancelled));
            };
            for text in accepting.expiring() {
                self.say(&Line::Warning { text });
            }
            let again = listener.try_clone().with_context(|| {
                format!(
                    "cannot keep listening on {address} (at fault: this side; if descriptors ran \
                     out, raise the limit of open files: `ulimit -n`)"
                )
            })?;
            let attempt = Incoming::builder(again, &accepting.tls)
                .options(options.clone())
                .observer(&observe)
                .cancel(&cancel)
                .run(&mut builder);
            drop(lock(&arriving).take());
            // Whether no source has connected and this process still waits for one.
            let waits = !service.is_arriving() && service.ending().is_none();
            match attempt {
                Ok(received) => break received,
                // The VM is at the source, which may try again. But a local failure that occurs
                // before any source has connected would occur again, so it ends this process.
                Err(error) if error.vm == VmIs::AtSource && !(waits && is_local_fault(&error)) => {
                    let failed: FailedLine = (&error).into();
                    add_to_history(&service, Err(&failed));
                    let text = failed.text;
                    if service.ending().is_none() {
                        self.say(&Line::Rejected { text });
                    } else if service.is_arriving() {
                        cancelled = Some(text);
                    }
                    // Drop the VM of the failed attempt, and its control socket.
                    drop(builder.take());
                }
                Err(error) => {
                    let failed: FailedLine = (&error).into();
                    let code = failed.code;
                    add_to_history(&service, Err(&failed));
                    self.say(&Line::Failed(failed));
                    // The VM may have run here for a moment, but never will again: the source keeps
                    // its copy until an operator decides.
                    drop(builder.take());
                    return Ok(code);
                }
            }
        };
        drop(listener);
        let (vm, socket) = builder
            .take()
            .context("the engine received a VM that was not built")?;
        if let Err(error) =
            confine::make_no_more_sockets(&confined, self.own.ipsec_ports().is_some())
        {
            // Only warn, because this process has the VM, and a failure to confine the process must
            // not end the VM.
            service.warn(&format!(
                "cannot forbid new local sockets: {}",
                chained(&error)
            ));
        }
        let digests = if self.digests {
            // `digests_at_resume` must precede the VM's next migration, which cannot begin before
            // `hold`.
            vm.digests_at_resume().unwrap_or_else(|error| {
                service.warn(&format!("cannot digest the memory: {error}"));
                Vec::new()
            })
        } else {
            Vec::new()
        };
        add_to_history(&service, Ok(received.guest_downtime));
        // Do this before the line below is printed, because a client that has read it may send
        // requests for the VM.
        service.hold(&vm);
        let name = received.offered.vm.name.clone();
        // `answering` answers a source that missed the confirmation and queries this process.
        let answering = received.answering;
        self.say(&Line::Received {
            name,
            pid: std::process::id(),
            control: socket.path.display().to_string(),
            runs: received.runs,
            downtime_ms: received.guest_downtime.map(millis),
            cpu_s: received.cpu.as_secs_f64(),
            digests,
        });
        let code = service.keep(&vm);
        if let Some(answering) = answering {
            if vm.vm().state() == VmState::Moved {
                answering.moved_on()?;
            } else {
                answering.stop();
            }
        }
        code
    }

    /// Reports the signal, and the outcome of an arrival that it cancelled.
    fn cancelled(&self, service: &ControlService, cancelled: Option<String>) -> i32 {
        let signal = service.ending().map_or("a signal", EndSignal::name);
        let vm = if cancelled.is_some() {
            "at-source"
        } else {
            "none"
        };
        let text = cancelled.unwrap_or_else(|| format!("{signal} before a VM arrived"));
        let failed = FailedLine::new(FaultCode::Cancelled, vm, text, CANCELLED);
        self.say(&Line::Failed(failed));
        CANCELLED
    }

    fn observe(&self, event: &DestinationEvent) {
        self.say(&match event {
            DestinationEvent::Rejected { reason } => Line::Rejected {
                text: clean(reason),
            },
            DestinationEvent::Warning(text) => Line::Warning { text: text.clone() },
            DestinationEvent::Connected { peer } => Line::Accepted { peer: peer.clone() },
            DestinationEvent::LaneUp { lane } => Line::LaneUp { lane: *lane },
            DestinationEvent::LaneLost { lane, why } => Line::LaneLost {
                lane: *lane,
                text: why.clone(),
            },
            DestinationEvent::ControlLost { why } => Line::ControlLost { text: why.clone() },
            DestinationEvent::ControlResumed => Line::ControlResumed,
            _ => return,
        });
    }

    fn say(&self, line: &Line) {
        line.say(self.own.json);
    }
}

/// Adds the arrival that has ended to the history: with the downtime as the guest saw it, or with
/// the failure. An attempt that offered no VM is not added.
fn add_to_history(service: &ControlService, how: Result<Option<Duration>, &FailedLine>) {
    let Ok(status) = service.status() else {
        return;
    };
    let Some(migration) = status.migration.filter(|_| !status.name.is_empty()) else {
        return;
    };
    let (vm, peer) = (&status.name, &migration.peer);
    let mut finished = Finished::now("destination", vm, peer, migration.seconds);
    match how {
        Ok(downtime) => finished.guest_downtime_ms = downtime.map(millis),
        Err(failed) => finished = finished.failed(failed),
    }
    history::add(service.history.as_deref(), finished);
}

/// Reloads the identity at each SIGHUP. A session under way keeps the identity that it started
/// with.
fn reload_at(hang_ups: HangUps, json: bool, accepting: &Arc<Accepting>) -> Result<()> {
    let accepting = Arc::clone(accepting);
    start("reload", move || {
        while hang_ups.wait().is_ok() {
            let warnings = match accepting.reload() {
                Ok((valid_until, warnings)) => {
                    Line::IdentityRead { valid_until }.say(json);
                    warnings
                }
                Err(error) => {
                    vec![format!(
                        "cannot reload the identity, which stays as it was: {}",
                        chained(&error)
                    )]
                }
            };
            for text in warnings {
                Line::Warning { text }.say(json);
            }
        }
    })?;
    Ok(())
}

/// Whether the failure is a lack of resources or kernel support on this host.
fn is_local_fault(error: &MigrateError) -> bool {
    matches!(
        error.code(),
        FaultCode::DescriptorLimit | FaultCode::NoMemory | FaultCode::Kernel
    )
}

/// Builds machines, each with its control socket. If the socket cannot be created, the VM is
/// refused while it still runs at the source.
struct VmBuilder<'a> {
    machines: MachineBuilder,
    control: &'a ControlPath,
    service: &'a Arc<ControlService>,
    socket: Option<Socket>,
}

impl VmBuilder<'_> {
    /// The machine built last, and its socket.
    fn take(&mut self) -> Option<(Arc<Movable>, Socket)> {
        let socket = self.socket.take();
        self.machines.take().zip(socket)
    }
}

impl Builder for VmBuilder<'_> {
    fn owner(&self, offered: &Offered) -> String {
        let socket = self.control.socket(&offered.vm.name);
        // If the name is invalid, the path does not matter, because `build` refuses the VM.
        socket.map_or_else(|_| String::new(), |path| path.display().to_string())
    }

    fn build(&mut self, offered: &Offered) -> Result<Arc<dyn DestinationVm>, Refusal> {
        // Remove the socket of a failed attempt first, because it may have the same path.
        self.socket = None;
        let socket = self
            .control
            .socket(&offered.vm.name)
            .and_then(|path| Socket::bind(&path, "a VM"))
            .and_then(|socket| self.service.serve(&socket).map(|()| socket))
            .map_err(|error| Refusal {
                fault: fault_behind(error.as_ref()).unwrap_or(FaultCode::DescriptionRefused),
                text: chained(&error),
            })?;
        self.socket = Some(socket);
        self.machines.build(offered)
    }
}
