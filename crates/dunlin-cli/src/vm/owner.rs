//! The process that owns a VM: serves its control socket until the VM ends
//! here.
//!
//! A request is one JSON line, the answer any number of [`Line`]s; the last
//! one is `done`, `moved` or `failed`, after which the connection is closed.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::engine::source::migrate;
use dunlin::engine::vmm::SourceVm;
use dunlin::engine::{Cancel, Event, Host, StandardHost};
use dunlin::lane::provider::Crypto;
use dunlin_microvm::{Movable, Vm, VmState};
use serde::{Deserialize, Serialize};

use crate::line::{FailedLine, Line, StatusLine, millis};
use crate::options::{MigrateFlags, load_identity, peer_names};

/// A request line is at most this long.
const REQUEST_LIMIT_BYTES: u64 = 64 * 1024;

/// What can be asked of a VM's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub(crate) enum Request {
    Status,
    Pause,
    Resume,
    PowerOff,
    Migrate {
        identity: PathBuf,
        peers: Vec<String>,
        flags: MigrateFlags,
    },
}

/// Serves the control socket until the VM has ended or moved away; returns the
/// exit code.
pub(crate) fn serve(vm: Arc<Movable>, socket: Socket, json: bool) -> Result<i32> {
    // One migration at a time.
    let migrating = Arc::new(Mutex::new(()));
    {
        let (vm, migrating) = (Arc::clone(&vm), Arc::clone(&migrating));
        let listener = socket.listener.try_clone()?;
        std::thread::Builder::new()
            .name("control-socket".into())
            .spawn(move || accept(&listener, &vm, &migrating))?;
    }
    let state = loop {
        let state = vm.vm().wait_until_ended(Duration::from_secs(3600));
        if state.has_ended() {
            break state;
        }
    };
    // A migration that is under way learns of the end by itself, tells the
    // destination and whoever asked for it.
    drop(migrating.lock().unwrap_or_else(PoisonError::into_inner));
    let code = match state {
        VmState::Moved | VmState::PoweredOff => 0,
        _ => 1,
    };
    let state = state.to_string();
    if json {
        Line::Ended {
            state: state.clone(),
            code,
        }
        .print();
    } else {
        println!("{}: {state}", vm.vm().config().name);
    }
    Ok(code)
}

/// For a parent that must not leave a VM or its scratch directory behind.
#[derive(Clone, Debug, Args)]
pub(crate) struct Parent {
    /// End when standard input ends, and remove this directory.
    #[arg(long, value_name = "DIR", hide = true)]
    until_stdin_closes: Option<PathBuf>,
}

impl Parent {
    /// Ends this process once its standard input has ended, if that is wanted: a
    /// parent that dies, however it dies, closes its end of the pipe.
    pub(crate) fn watch(&self) -> Result<()> {
        let Some(directory) = self.until_stdin_closes.clone() else {
            return Ok(());
        };
        std::thread::Builder::new()
            .name("stdin-watch".into())
            .spawn(move || {
                // Whether it ends or fails, nobody is at its other end.
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                // A sibling may have removed it.
                let _ = fs::remove_dir_all(directory);
                std::process::exit(1);
            })?;
        Ok(())
    }
}

/// The control socket, removed when its owner ends.
pub(crate) struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Takes the path, unless a VM that runs has it.
    pub(crate) fn bind(path: &Path) -> Result<Self> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
        }
        if UnixStream::connect(path).is_ok() {
            bail!(
                "{} belongs to a VM that runs: choose another name or --control",
                path.display()
            );
        }
        // Nobody answers: the socket of a process that has died, or none.
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            let _ = fs::remove_file(path);
        }
        let listener = UnixListener::bind(path)
            .with_context(|| format!("cannot bind the control socket {}", path.display()))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Somebody may have removed it before.
        let _ = fs::remove_file(&self.path);
    }
}

fn accept(listener: &UnixListener, vm: &Arc<Movable>, migrating: &Arc<Mutex<()>>) {
    for connection in listener.incoming() {
        let Ok(connection) = connection else { return };
        let (vm, migrating) = (Arc::clone(vm), Arc::clone(migrating));
        let spawned = std::thread::Builder::new()
            .name("control-request".into())
            .spawn(move || {
                if let Err(error) = answer(&connection, &vm, &migrating) {
                    // Whoever asked may have gone.
                    let _ = send(
                        &connection,
                        &Line::Failed(FailedLine {
                            fault: "usage".into(),
                            at_fault: "configuration".into(),
                            vm: "at-source".into(),
                            text: format!("{error:#}"),
                            code: 1,
                        }),
                    );
                }
            });
        if let Err(error) = spawned {
            eprintln!("warning: a request cannot be served: {error}");
        }
    }
}

fn answer(connection: &UnixStream, vm: &Arc<Movable>, migrating: &Mutex<()>) -> Result<()> {
    let mut request = String::new();
    let limited = std::io::Read::take(connection, REQUEST_LIMIT_BYTES);
    BufReader::new(limited).read_line(&mut request)?;
    let request: Request = serde_json::from_str(&request).context("that is no request")?;
    match request {
        Request::Status => send(connection, &Line::Status(status(vm.vm())))?,
        Request::Pause | Request::Resume => {
            // Whoever resumed it between *commit* and *running* would have it
            // run twice (I1).
            let Ok(_one) = migrating.try_lock() else {
                bail!("the VM is being migrated: wait until that is over");
            };
            match request {
                Request::Pause => vm.vm().pause()?,
                _ => vm.vm().resume()?,
            }
        }
        Request::PowerOff => vm.vm().ask_power_off(),
        Request::Migrate {
            identity,
            peers,
            flags,
        } => {
            let Ok(_one) = migrating.try_lock() else {
                bail!("the VM is being migrated already");
            };
            return move_away(connection, vm, &identity, &peers, &flags);
        }
    }
    send(connection, &Line::Done)
}

fn move_away(
    connection: &UnixStream,
    vm: &Arc<Movable>,
    identity: &Path,
    peers: &[String],
    flags: &MigrateFlags,
) -> Result<()> {
    let identity = load_identity(identity)?;
    let peers = if peers.is_empty() {
        // Whoever connects to a host expects that host.
        let host = flags
            .to
            .rsplit_once(':')
            .map_or(&*flags.to, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        peer_names(&[host.to_owned()])?
    } else {
        peer_names(peers)?
    };
    let tls = identity.client(&Crypto::auto(), peers)?;
    let host: Arc<dyn Host> = Arc::new(StandardHost);
    let out = Mutex::new(connection);
    let observe = |event: &Event| {
        let out = out.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever asked may have gone; the migration goes on.
        let _ = send(&out, &Line::from(event));
    };
    let source: Arc<dyn SourceVm> = Arc::clone(vm) as _;
    let result = migrate(
        &source,
        &flags.to,
        &tls,
        &flags.options(),
        &host,
        &observe,
        &Cancel::new(),
    );
    match result {
        Ok(report) => {
            let _ = send(connection, &Line::Moved(Box::new((&report).into())));
        }
        Err(error) => {
            let _ = send(connection, &Line::Failed((&error).into()));
        }
    }
    Ok(())
}

fn send(mut connection: &UnixStream, line: &Line) -> Result<()> {
    Ok(writeln!(connection, "{}", line.to_json())?)
}

/// How a VM of this process is.
pub(crate) fn status(vm: &Vm) -> StatusLine {
    let stats = vm.stats();
    StatusLine {
        name: vm.config().name.clone(),
        pid: std::process::id(),
        state: vm.state().to_string(),
        memory_bytes: vm.config().memory_bytes,
        pages_checked: stats.pages_checked,
        beats: stats.beats,
        full_passes: vm.full_passes(),
        downtime_ms: stats.downtime.map(millis),
        largest_gap_ms: millis(stats.largest_gap),
    }
}
