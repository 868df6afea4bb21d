//! The control socket of the process that owns or receives a VM.
//!
//! The last line of an answer ([`crate::control`]) is `done`, `status`, `answered`, `moved` or
//! `failed`. A client that requested a migration may send `cancel` on the same connection. If the
//! client hangs up, the migration continues, because the loss of a terminal must not cancel it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use dunlin::Migration;
use dunlin::engine::vmm::SourceVm;
use dunlin::engine::{Event, fault_behind};
use dunlin::lane::policy::ClientTls;
use dunlin::lane::security::SealedLanes;
use dunlin_ipsec::PortRange;
use dunlin_microvm::HostOptions;
use tracing::Level;

use super::control_service::{Command, ControlService, Output};
use super::moving::Moving;
use super::request::{Request, inquiry_options};
use crate::confine::{self, Confining, LANE_PORTS, Needs};
use crate::control::{Service, read_request, send};
use crate::identity::client_tls;
use crate::line::{FailedLine, Line, MovedLine};
use crate::log::{self, LogFlags};
use crate::options::{ControlPath, MigrateFlags, SecurityName, ipsec_lanes};
use crate::published::StatusSocket;
use crate::published::history::{self, Finished};
use crate::service::start;
use crate::state::StatePath;
use crate::timeline::Timeline;

/// Flags of `vm run` and `vm receive`, the processes that can own a VM.
#[derive(Debug, Args)]
pub(crate) struct Own {
    /// Do not request transparent huge pages for private or memfd guest memory.
    #[arg(long)]
    no_huge_pages: bool,
    #[command(flatten)]
    pub(super) control: ControlPath,
    #[command(flatten)]
    pub(super) state: StatePath,
    #[command(flatten)]
    confining: Confining,
    /// Allow this VM's lanes to use IPsec when the source asks for it. This process then keeps
    /// CAP_NET_ADMIN, so an attacker that takes the process over could change this host's network.
    #[arg(long)]
    ipsec: bool,
    /// Source ports of lanes over IPsec, on either host.
    #[arg(long, value_name = "A-B", default_value = LANE_PORTS)]
    ipsec_ports: PortRange,
    /// Print one JSON object per line.
    #[arg(long)]
    pub(super) json: bool,
    #[command(flatten)]
    log: LogFlags,
    /// End when standard input closes, and remove this directory: for a parent that must not leave
    /// a VM or a directory behind.
    #[arg(long, value_name = "DIR", hide = true)]
    until_stdin_closes: Option<PathBuf>,
}

impl Own {
    /// Creates the control service of each of this process's VMs.
    pub(super) fn services(&self, count: u16) -> Result<Vec<Arc<ControlService>>> {
        let several = count > 1;
        if several && self.control.directory().is_none() {
            bail!(
                "--control names one socket, but each of several VMs needs its own socket (at \
                 fault: configuration): give a directory"
            );
        }
        self.log.start(None);
        let output = Output {
            json: self.json,
            several,
        };
        let records = self.state.ipsec_records()?;
        let history = history::directory(&self.control);
        let journal = self.state.open()?;
        let first = ControlService::new(output, journal, records, history);
        let more = (1..count).map(|_| first.another());
        Ok([Arc::clone(&first)].into_iter().chain(more).collect())
    }

    /// The status socket of each VM, KIND-PID.sock.
    pub(super) fn status_sockets(&self, count: u16) -> Vec<StatusSocket> {
        let kind = |number| match number {
            1 => "vm".into(),
            number => format!("vm-{number}"),
        };
        let bind = |number| StatusSocket::bind(&self.control, &kind(number));
        (1..=count).map(bind).collect()
    }

    pub(super) fn memory(&self) -> HostOptions {
        HostOptions::default().huge_pages(!self.no_huge_pages)
    }

    /// With `--until-stdin-closes`, ends this process when its standard input closes. If the parent
    /// dies, the kernel closes the parent's end of the pipe.
    pub(super) fn watch_parent(&self) -> Result<()> {
        let Some(directory) = self.until_stdin_closes.clone() else {
            return Ok(());
        };
        start("stdin-watch", move || {
            // An error also means that the parent is dead.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            // A sibling process may have removed the directory.
            let _ = fs::remove_dir_all(directory);
            std::process::exit(1);
        })?;
        Ok(())
    }

    /// The ports allowed for lanes over IPsec; `None` without `--ipsec`.
    pub(super) fn ipsec_ports(&self) -> Option<PortRange> {
        self.ipsec.then_some(self.ipsec_ports)
    }

    /// Confines this process, which has its control sockets in the directory of `socket`. If
    /// `identity` is given, the confined process may reload that identity and create a control
    /// socket.
    pub(super) fn confine(&self, socket: &Path, identity: Option<&Path>) -> Result<Line> {
        let confined = self.confining.apply(&Needs {
            control: Needs::directory_of(socket),
            journal: self.state.directory()?,
            history: history::directory(&self.control),
            scratch: self.until_stdin_closes.clone(),
            identity: identity.map(Path::to_owned),
            makes_sockets: identity.is_some(),
            ipsec: self.ipsec_ports(),
        })?;
        confined.say(self.json);
        if let Some(text) = self.confining.warning(identity) {
            Line::Warning { text }.say(self.json);
        }
        Ok(confined)
    }
}

impl Service for ControlService {
    type Request = Request;

    fn handle(
        self: &Arc<Self>,
        request: Request,
        requests: BufReader<UnixStream>,
        connection: &UnixStream,
    ) -> Result<()> {
        match request {
            Request::Status => return send(connection, &Line::Status(Box::new(self.status()?))),
            Request::Pause => self.command(Command::Pause)?,
            Request::Resume => self.command(Command::Resume)?,
            Request::PowerOff => self.command(Command::PowerOff)?,
            Request::Set { rate } => self.moving()?.set_rate(rate)?,
            Request::Cancel => self.cancel()?,
            Request::Resolve { session, decision } => self.resolve(session, decision)?,
            Request::AskDestination {
                session,
                common,
                doubt_limit,
            } => {
                let asking = inquiry_options(doubt_limit);
                let location = self.ask_destination(session, &common, &asking)?;
                return send(connection, &(&location).into());
            }
            Request::Watch => {
                let moving = self.moving()?;
                return moving.follow().show(|line| match line {
                    // The timeline is sent only to the client that requested it.
                    Line::Timeline { .. } => Ok(()),
                    line => send(connection, line),
                });
            }
            Request::Migrate {
                common,
                flags,
                timeline,
            } => {
                let (tls, warnings) = client_tls(&common, &flags.to)?;
                let records = Line::from(&common.records.choice()?);
                let moving = move_away(self, tls, &flags, timeline)?;
                let follower = moving.follow();
                for text in warnings {
                    // The client may be gone; the migration continues.
                    let _ = send(connection, &Line::Warning { text });
                }
                let _ = send(connection, &records);
                let watched = (Arc::clone(self), Arc::clone(&moving));
                start("requester", move || watch(requests, &watched.0, &watched.1))?;
                // The client may be gone; the migration continues.
                let _ = follower.show(|line| send(connection, line));
                return Ok(());
            }
        }
        send(connection, &Line::Done)
    }

    /// Adds the VM's location to the error. If the error has a fault code, also adds the remedy.
    fn refused(&self, error: &anyhow::Error) -> FailedLine {
        let mut failed = FailedLine::from(error);
        failed.vm = self.location().into();
        if let Some(fault) = fault_behind(error.as_ref()) {
            let stays = match &*failed.vm {
                "at-source" => "; the VM stays at the source",
                _ => "",
            };
            failed.text.push_str(&format!(
                " ({fault}, at fault: {}){stays}. {}",
                fault.at_fault(),
                fault.advice()
            ));
        }
        failed
    }

    fn warn(&self, text: &str) {
        self.warn(text);
    }
}

/// Handles further requests of the client that requested the migration, until the client hangs up.
fn watch(mut requests: impl BufRead, service: &ControlService, moving: &Moving) {
    loop {
        match read_request(&mut requests) {
            Ok(Some(Request::Cancel)) => {
                if let Err(error) = moving.ask_to_end() {
                    moving.warn(error.to_string());
                }
            }
            Ok(Some(_)) => moving.warn("request refused: a migration accepts only `cancel`".into()),
            Ok(None) | Err(_) => break,
        }
    }
    if !moving.has_ended() {
        service.warn(
            "the client that requested the migration has disconnected; the migration continues: \
             `dunlin vm watch` follows it, `dunlin cancel` ends it",
        );
    }
}

/// Adds a migration that has ended to the history. `line` is the last line of the answer to the
/// client, which states the result.
fn add_to_history(service: &ControlService, vm: &str, moving: &Moving, line: &Line) {
    let migration = moving.line();
    let finished = Finished::now("source", vm, &migration.peer, migration.seconds);
    let finished = match line {
        Line::Moved(moved) => finished.moved(moved),
        Line::Failed(failed) => finished.failed(failed),
        _ => return,
    };
    history::add(service.history.as_deref(), finished);
}

/// Starts a migration on its own thread.
fn move_away(
    service: &Arc<ControlService>,
    tls: ClientTls,
    flags: &MigrateFlags,
    timeline: bool,
) -> Result<Arc<Moving>> {
    let moving = Moving::new(flags.to.clone(), flags.rate);
    let ipsec = match flags.security {
        SecurityName::Ipsec => {
            confine::allows_ipsec()?;
            let warned = Arc::clone(&moving);
            let options = flags.ipsec.options(service.ipsec_records.clone())?;
            Some(ipsec_lanes(options, move |text| warned.warn(text))?)
        }
        _ => None,
    };
    let options = flags
        .options()
        .ipsec(ipsec.map(|lanes| Arc::new(lanes) as Arc<dyn SealedLanes>))
        .journal(service.journal.clone())
        .owner(service.owner())
        .build()?;
    let vm = service.begin(&moving)?;
    let (to, digests) = (flags.to.clone(), flags.digests);
    let (for_thread, for_service) = (Arc::clone(&moving), Arc::clone(service));
    let spawned = start("migration", move || {
        let observe = |event: &Event| for_thread.observe(event);
        let cancel = &for_thread.cancel;
        let timeline = timeline.then(|| {
            log::install(Level::INFO);
            Timeline::begin()
        });
        let source: Arc<dyn SourceVm> = Arc::clone(&vm) as _;
        let line = match Migration::builder(source, to, &tls)
            .options(options)
            .observer(&observe)
            .cancel(cancel)
            .tune(&for_thread.tune)
            .run()
        {
            Ok(report) => {
                let mut moved = MovedLine::from(&report);
                if digests {
                    // This copy of the VM never runs again, so nothing writes its memory any more.
                    moved.digests = vm.digests().unwrap_or_else(|error| {
                        for_thread.warn(format!("cannot digest the memory: {error}"));
                        Vec::new()
                    });
                }
                Line::Moved(Box::new(moved))
            }
            Err(error) => Line::Failed((&error).into()),
        };
        if let Some(timeline) = timeline {
            for_thread.keep_timeline(timeline.end());
        }
        add_to_history(&for_service, &vm.vm().config().name, &for_thread, &line);
        for_service.finish(&for_thread, line);
    });
    if let Err(error) = spawned {
        let text = format!("cannot start a thread: {error}");
        service.finish(&moving, Line::Warning { text: text.clone() });
        bail!(text);
    }
    Ok(moving)
}
