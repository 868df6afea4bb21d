//! `dunlin vm receive`: waits for a VM or several, then owns them.
//!
//! Each VM has its own thread, [`ControlService`], control socket and status socket. Several VMs
//! arrive through one listener, at which one thread accepts connections for all of them.

use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::Incoming;
use dunlin::engine::destination::{DestinationEvent, Options, Received};
use dunlin::engine::vmm::{Builder, DestinationVm, FaultCode, Offered, Refusal};
use dunlin::engine::{Cancel, MigrateError, Observer, VmIs, fault_behind};
use dunlin::lane::security::SealedLanes;
use dunlin_ipsec as ipsec;
use dunlin_lane::sync::lock;
use dunlin_linux::heap;
use dunlin_linux::signals::{EndSignal, EndSignals, HangUps};
use dunlin_microvm::{MachineBuilder, Movable, VmState};

use super::control_service::ControlService;
use super::owner::Own;
use super::story;
use crate::code::{CANCELLED, DONE};
use crate::confine;
use crate::control::{self, Socket};
use crate::identity::{Accepting, Common};
use crate::line::{FailedLine, Line, millis};
use crate::options::{ControlPath, LANES_QUIET, ipsec_lanes, parse_limit, parse_rate};
use crate::progress::Waiting;
use crate::published::history::{self, Finished};
use crate::service::{cannot_listen, on_own_thread, start};
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
    /// not count. Until then it takes up one of the `--sessions`.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = parse_limit)]
    idle_limit: Duration,
    /// Number of VMs to wait for, 1 to 128. They may arrive at the same time. The process owns all
    /// of them, and ends after the last VM has ended or moved away.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=128))]
    sessions: u16,
    /// Rate limit of all arriving VMs together, such as 500M (bytes per second). Each VM gets an
    /// equal part. What a VM does not use is divided among the others.
    #[arg(long, value_name = "BYTES_PER_S", value_parser = parse_rate)]
    rate: Option<u64>,
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
        let several = self.sessions > 1;
        if several {
            heap::share();
        }
        let services = self.own.services(self.sessions)?;
        let first = Arc::clone(&services[0]);
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
        let published = self.own.status_sockets(self.sessions);
        // Confine the process before it starts threads, because existing threads would keep their
        // privileges and their access to files.
        let beside = self.own.control.socket("vm")?;
        let confined = self.own.confine(&beside, Some(&self.common.identity))?;
        for (published, service) in published.iter().zip(&services) {
            let (own, held) = (Arc::clone(service), Arc::clone(&accepting));
            published.serve(move || own.report(held.expiry()))?;
        }
        ControlService::watch(services.clone(), signals)?;
        reload_at(hang_ups, self.own.json, &accepting)?;
        self.say(&Line::Listening {
            address: address.clone(),
        });
        let options = self.options(&first)?;
        self.own.watch_parent()?;
        start("kvm-query", dunlin_microvm::query_host)?;
        let waiting = Waits {
            receive: &self,
            accepting,
            confined,
            missing: AtomicUsize::new(services.len()),
        };
        let ended = if several {
            waiting.for_several(&services, listener, &address, options)?
        } else {
            vec![waiting.for_one(&first, listener, &address, &options)?]
        };
        Ok(self.code(&first, ended))
    }

    fn options(&self, service: &Arc<ControlService>) -> Result<Options> {
        let ipsec = match self.own.ipsec_ports() {
            Some(ports) => {
                let mut options = ipsec::Options::new(
                    ipsec::Mode::Connection,
                    ports,
                    service.ipsec_records.clone(),
                );
                options.quiet_wait = LANES_QUIET;
                let warned = Arc::clone(service);
                Some(ipsec_lanes(options, move |text| warned.warn(&text))?)
            }
            None => None,
        };
        Ok(Options::builder()
            .ipsec(ipsec.map(|lanes| Arc::new(lanes) as Arc<dyn SealedLanes>))
            .allow_plain(self.allow_plain)
            .idle_limit(self.idle_limit)
            .rate(self.rate)
            .journal(service.journal.clone())
            .build()?)
    }

    /// The exit code of this process. If a signal ended the wait before any VM arrived, also
    /// reports that.
    fn code(&self, service: &ControlService, ended: Vec<Ended>) -> i32 {
        let mut codes = Vec::new();
        let mut cancelled = Vec::new();
        for one in ended {
            match one {
                Ended::With(code) => codes.push(code),
                Ended::Cancelled(text) => cancelled.push(text),
            }
        }
        let arrival = cancelled.iter_mut().find_map(Option::take);
        if codes.is_empty() || arrival.is_some() {
            codes.push(self.cancelled(service, arrival));
        }
        control::drain();
        codes.into_iter().find(|code| *code != DONE).unwrap_or(DONE)
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

    fn say(&self, line: &Line) {
        line.say(self.own.json);
    }
}

/// How the wait for a VM, or the VM itself, ended.
enum Ended {
    /// The VM, or the wait for it, ended with this exit code.
    With(i32),
    /// A signal ended the wait before a VM arrived. The text is the outcome of the arrival that the
    /// signal cancelled, if one was under way.
    Cancelled(Option<String>),
}

/// Receives one VM, or fails.
type Attempt<'a> = dyn FnMut(
        &mut VmBuilder<'_>,
        &dyn Observer<DestinationEvent>,
        &Cancel,
    ) -> Result<Result<Received, MigrateError>>
    + 'a;

/// The VMs that this process waits for.
struct Waits<'a> {
    receive: &'a Receive,
    accepting: Arc<Accepting>,
    confined: Line,
    /// The number of VMs for which this process still waits.
    missing: AtomicUsize,
}

impl Waits<'_> {
    fn for_one(
        &self,
        service: &Arc<ControlService>,
        listener: TcpListener,
        address: &str,
        options: &Options,
    ) -> Result<Ended> {
        let mut listener = Some(listener);
        self.wait(service, &mut |builder, observer, cancel| {
            let again = listener.as_ref().map(TcpListener::try_clone);
            let again = again.context("the listener is closed")?;
            let again = again.with_context(|| {
                format!(
                    "cannot keep listening on {address} (at fault: this side; if descriptors ran \
                     out, raise the limit of open files: `ulimit -n`)"
                )
            })?;
            let received = Incoming::builder(again, &self.accepting.tls)
                .options(options.clone())
                .observer(observer)
                .cancel(cancel)
                .run(builder);
            if received.is_ok() {
                listener = None;
            }
            Ok(received)
        })
    }

    /// Waits for one VM for each of `services`, each on its own thread.
    fn for_several(
        &self,
        services: &[Arc<ControlService>],
        listener: TcpListener,
        address: &str,
        options: Options,
    ) -> Result<Vec<Ended>> {
        let shared = Incoming::builder(listener, &self.accepting.tls)
            .options(options)
            .share()
            .with_context(|| format!("cannot accept connections on {address}"))?;
        let mut listeners: Vec<_> = (1..services.len()).map(|_| shared.clone()).collect();
        listeners.push(shared);
        thread::scope(|scope| {
            let begun = services.iter().zip(listeners).map(|(service, listener)| {
                let body = move || {
                    let mut listener = Some(listener);
                    self.wait(service, &mut |builder, observer, cancel| {
                        let own = listener.as_mut().context("the listener is closed")?;
                        // Give the session its own thread. Otherwise its stack and heap would stay
                        // allocated for as long as the VM lives.
                        let received = on_own_thread(|| own.receive(builder, observer, cancel))?;
                        heap::give_back();
                        if received.is_ok() {
                            listener = None;
                        }
                        Ok(received)
                    })
                };
                thread::Builder::new()
                    .name("dunlin-receive".into())
                    .spawn_scoped(scope, body)
                    .context("cannot start a thread")
            });
            let threads: Vec<_> = begun.collect();
            let ended = threads.into_iter().map(|thread| match thread?.join() {
                Ok(ended) => ended,
                Err(_) => bail!("the thread of a VM panicked"),
            });
            let ended: Vec<_> = ended.collect();
            ended.into_iter().collect()
        })
    }

    /// Repeats `attempt` until it has received a VM, and then owns the VM until it ends or moves away.
    fn wait(&self, service: &Arc<ControlService>, attempt: &mut Attempt<'_>) -> Result<Ended> {
        let receive = self.receive;
        let mut builder = VmBuilder {
            machines: MachineBuilder::new(receive.own.memory().digests(receive.digests)),
            control: &receive.own.control,
            service,
            socket: None,
        };
        let arriving = Mutex::new(None);
        let said = Said::new(receive);
        let observe = |event: &DestinationEvent| {
            if let DestinationEvent::Offered(offered) = event {
                let what = format!("VM {} arrives", offered.vm.name);
                let several = receive.sessions > 1;
                *lock(&arriving) = Some(Waiting::new(receive.own.json || several, &what));
            }
            service.observe(event);
            story::at_destination(event);
            said.observe(event);
        };
        let mut cancelled = None;
        let received = loop {
            let Some(cancel) = service.next_attempt() else {
                control::drain();
                return Ok(Ended::Cancelled(cancelled));
            };
            for text in self.accepting.expiring() {
                receive.say(&Line::Warning { text });
            }
            let attempt = attempt(&mut builder, &observe, &cancel)?;
            drop(lock(&arriving).take());
            // Whether no source has connected and this process still waits for one.
            let waits = !service.is_arriving() && service.ending().is_none();
            match attempt {
                Ok(received) => break received,
                // The VM is at the source, which may try again. But a local failure that occurs
                // before any source has connected would occur again, so it ends this process.
                Err(error) if error.vm == VmIs::AtSource && !(waits && is_local_fault(&error)) => {
                    let failed: FailedLine = (&error).into();
                    add_to_history(service, Err(&failed));
                    let text = failed.text;
                    if service.ending().is_none() {
                        said.say(&Line::Rejected { text });
                    } else if service.is_arriving() {
                        cancelled = Some(text);
                    }
                    // Drop the VM of the failed attempt, and its control socket.
                    drop(builder.take());
                }
                Err(error) => {
                    let failed: FailedLine = (&error).into();
                    let code = failed.code;
                    add_to_history(service, Err(&failed));
                    said.say(&Line::Failed(failed));
                    // The VM may have run here for a moment, but never will again: the source keeps
                    // its copy until an operator decides.
                    drop(builder.take());
                    if receive.sessions > 1 {
                        self.waits_no_more(service);
                    }
                    return Ok(Ended::With(code));
                }
            }
            said.end();
        };
        self.waits_no_more(service);
        let taken = builder.take();
        let (vm, socket) = taken.context(
            "internal error: the engine reported that a VM was received, but none was built",
        )?;
        Ok(Ended::With(self.own(service, received, &vm, &socket)?))
    }

    /// Forbids new local sockets if the process waits for no more VMs.
    fn waits_no_more(&self, service: &ControlService) {
        if self.missing.fetch_sub(1, Ordering::SeqCst) > 1 {
            return;
        }
        let ipsec = self.receive.own.ipsec_ports().is_some();
        if let Err(error) = confine::make_no_more_sockets(&self.confined, ipsec) {
            // Only warn, because this process has a VM, and a failure to confine the process must
            // not end the VM.
            service.warn(&format!(
                "cannot prevent this process from creating local sockets: {}",
                chained(&error)
            ));
        }
    }

    /// Owns a VM that has arrived until it ends or moves away; returns the exit code.
    fn own(
        &self,
        service: &Arc<ControlService>,
        received: Received,
        vm: &Arc<Movable>,
        socket: &Socket,
    ) -> Result<i32> {
        let digests = if self.receive.digests {
            // `digests_at_resume` must precede the VM's next migration, which cannot begin before
            // `hold`.
            vm.digests_at_resume().unwrap_or_else(|error| {
                service.warn(&format!("cannot digest the memory: {error}"));
                Vec::new()
            })
        } else {
            Vec::new()
        };
        add_to_history(service, Ok(received.guest_downtime));
        // Take the VM before the line *received* is printed, because a client that has read the
        // line may send requests for the VM.
        service.hold(vm);
        let name = received.offered.vm.name.clone();
        // `answering` answers a source that missed the confirmation and queries this process.
        let answering = received.answering;
        self.receive.say(&Line::Received {
            name,
            pid: std::process::id(),
            control: socket.path.display().to_string(),
            runs: received.runs,
            downtime_ms: received.guest_downtime.map(millis),
            cpu_s: received.cpu.as_secs_f64(),
            digests,
        });
        let code = service.keep(vm);
        if let Some(answering) = answering {
            if vm.vm().state() == VmState::Moved {
                answering.moved_on()?;
            } else {
                answering.stop();
            }
        }
        if self.receive.sessions > 1 {
            service.release();
        }
        code
    }
}

/// The lines about the arrival of one VM. If the process waits for several, they name the VM.
struct Said<'a> {
    receive: &'a Receive,
    arrival: Mutex<Arrival>,
}

#[derive(Default)]
struct Arrival {
    /// The name of the source between its connection and its offer of a VM.
    peer: Option<String>,
    /// The VM's name.
    name: Option<String>,
}

impl<'a> Said<'a> {
    fn new(receive: &'a Receive) -> Self {
        let arrival = Mutex::default();
        Self { receive, arrival }
    }

    fn observe(&self, event: &DestinationEvent) {
        let several = self.receive.sessions > 1;
        self.say(&match event {
            DestinationEvent::Rejected { reason } => {
                // If several VMs arrive, the connection can belong to another session, so do not name
                // this session's VM.
                return self.receive.say(&Line::Rejected {
                    text: clean(reason),
                });
            }
            DestinationEvent::Warning(text) => Line::Warning { text: text.clone() },
            DestinationEvent::Connected { peer } if several => {
                lock(&self.arrival).peer = Some(peer.clone());
                return;
            }
            DestinationEvent::Offered(offered) if several => {
                let mut arrival = lock(&self.arrival);
                arrival.name = Some(offered.vm.name.clone());
                let peer = arrival.peer.take().unwrap_or_default();
                Line::Accepted { peer }
            }
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

    /// Prints a line about the VM that is arriving.
    fn say(&self, line: &Line) {
        let name = lock(&self.arrival).name.clone();
        line.say_of(name.as_deref(), self.receive.own.json);
    }

    /// Ends the arrival: later lines are about the next attempt, which can be for another VM.
    fn end(&self) {
        *lock(&self.arrival) = Arrival::default();
    }
}

/// Adds an ended arrival to the history, with the downtime as the guest saw it, or with the
/// failure. An attempt that offered no VM is not added.
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
                        "cannot reload the identity; this process keeps the earlier one: {}",
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

/// Builds VMs, each with its control socket. If the socket cannot be created, the VM is refused
/// while it still runs at the source.
struct VmBuilder<'a> {
    machines: MachineBuilder,
    control: &'a ControlPath,
    service: &'a Arc<ControlService>,
    socket: Option<Socket>,
}

impl VmBuilder<'_> {
    /// The VM built last, and its socket.
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
        // Remove the socket of a failed attempt first, because the new socket may have the same
        // path.
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
