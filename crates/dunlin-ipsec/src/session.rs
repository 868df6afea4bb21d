//! The owner's handle to a session and its threads.

use dunlin_lane::sync::lock;
use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender as Channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::object::Policy;
use dunlin_proto::ipsec::plan::SessionParameters;
use dunlin_proto::ipsec::ports::PortBlock;
use dunlin_proto::text::chain;

use super::error::IpsecError;
use super::record::{Record, RecordDirectory};
use super::tables::{AssociationStatus, Tables, still_used};
use super::xfrm::Xfrm;
use super::{Event, Observer, Options};

mod begin;
mod driver;
mod reader;
mod shared;
mod state;
mod system;

pub(super) use shared::Beginning;
use shared::{Command, SharedStatus};
use state::Driver;
pub(super) use system::{ends, random};

/// A session between two hosts. Dropping it ends the session, and waits until it has ended.
#[derive(Debug)]
pub struct Session {
    commands: Channel<Command>,
    shared: Arc<Mutex<SharedStatus>>,
    xfrm: Arc<Xfrm>,
    thread: Option<JoinHandle<Result<(), IpsecError>>>,
}

/// The status of a session.
#[derive(Clone, Debug)]
pub struct Status {
    /// The addresses, the ports and the mode.
    pub parameters: SessionParameters,
    /// Whether the traffic in both directions is protected.
    pub up: bool,
    /// The session's SAs.
    pub associations: Vec<AssociationStatus>,
}

impl Session {
    /// Starts a session on its own threads. The session uses the tables of the calling thread's
    /// network namespace. The returned channel receives one message, when the traffic in both
    /// directions is protected.
    pub(super) fn begin(beginning: Beginning) -> Result<(Self, Receiver<()>), IpsecError> {
        let (commands, received) = mpsc::channel();
        let (tell_up, up) = mpsc::channel();
        let shared = Arc::<Mutex<SharedStatus>>::default();
        let driver = Driver::new(beginning, Arc::clone(&shared), tell_up)?;
        let xfrm = Arc::clone(&driver.tables.xfrm);
        let reader = commands.clone();
        let body = move || driver.run(&received, reader);
        let thread = thread::Builder::new()
            .name("dunlin-ipsec".to_owned())
            .spawn(body)
            .map_err(IpsecError::resources("a thread"))?;
        let session = Self {
            commands,
            shared,
            xfrm,
            thread: Some(thread),
        };
        Ok((session, up))
    }

    /// Returns the status; `None` until both sides have agreed on terms.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn status(&self) -> Result<Option<Status>, IpsecError> {
        let shared = lock(&self.shared);
        let Some(parameters) = shared.parameters else {
            return Ok(None);
        };
        let up = shared.up;
        let mut steps = parameters.inbound(shared.inbound.0, &shared.inbound.1);
        let (epoch, grants) = &shared.outbound;
        steps.extend(parameters.outbound(*epoch, grants, false, &[]));
        drop(shared);
        let associations = steps.iter().filter_map(|step| step.added()?.association());
        let associations = Tables::of(Arc::clone(&self.xfrm)).statuses(associations)?;
        Ok(Some(Status {
            parameters,
            up,
            associations,
        }))
    }

    /// Requests an SA for one more CPU of this host, unless the CPU has one.
    pub fn want_cpu(&self, cpu: u32) {
        self.tell(Command::Want(Sender::Cpu(cpu)));
    }

    /// Returns whether the kernel has an SA for the packets of `sender` on this host.
    pub(super) fn has(&self, sender: Sender) -> bool {
        let shared = lock(&self.shared);
        let mut held = shared.outbound.1.iter();
        held.any(|grant| grant.slot.sender == sender)
    }

    /// Returns whether the session protects a connection between these addresses, as this host sees
    /// them. Returns `None` if the two sides have not agreed on the terms yet, or if the session
    /// covers the connection but is not up yet.
    pub(super) fn covers(&self, local: SocketAddr, peer: SocketAddr) -> Option<bool> {
        let shared = lock(&self.shared);
        let parameters = shared.parameters?;
        let covered = parameters.local == local.ip().to_canonical()
            && parameters.peer == peer.ip().to_canonical()
            && parameters.covers(local.port(), peer.port());
        // After the session is up, both hosts pass the connection's packets only through an SA.
        (!covered || shared.up).then_some(covered)
    }

    /// Renews the keys for the packets that this side sends.
    pub fn rekey(&self) {
        self.tell(Command::Rekey);
    }

    /// Asks the session to end; see [`Session::wait`].
    pub fn end(&self) {
        self.tell(Command::End);
    }

    /// Returns whether the session has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the session has ended and its SAs are removed. The ports of the session may stay
    /// blocked ([`Event::Left`]).
    ///
    /// # Errors
    /// The reason why the session ended, unless this side ended it.
    pub fn wait(mut self) -> Result<(), IpsecError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            // The panic hook has printed the panic.
            Some(Err(_)) => Err(IpsecError::Ended),
            None => Ok(()),
        }
    }

    fn tell(&self, what: Command) {
        // This fails only if the session has already ended.
        let _ = self.commands.send(what);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.tell(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Removes the policies and SAs that dead processes left in this network namespace. Policies that
/// block previously protected ports stay until a new session takes the ports over. If the owner of
/// a dead session had requested the session's end, the session's ports are freed when no connection
/// uses them. The observer is notified of policies and SAs that cannot be removed.
///
/// # Errors
/// The directory of records is not usable, another process holds its lock for too long, or the
/// kernel's tables cannot be opened.
pub(super) fn clean_up_dead(options: &Options, observer: &Observer) -> Result<(), IpsecError> {
    clean_up_records(options, observer, &Record::is_free).map(drop)
}

/// Like [`clean_up_dead`], but also frees the ports in `options`, which belong to Dunlin's own
/// lanes. These ports need not stay blocked until a new session takes them over, because no other
/// program sends from them, and a lane sends only while its session is open.
///
/// # Errors
/// Same as [`clean_up_dead`].
pub(super) fn clean_up_lanes(options: &Options, observer: &Observer) -> Result<(), IpsecError> {
    let is_lanes = |block: PortBlock| {
        let last = block.port | !block.mask;
        block.mask > 0 && options.ports.contains(block.port) && options.ports.contains(last)
    };
    let of_lanes = |policy: &Policy| {
        is_lanes(policy.selector.source_ports) || is_lanes(policy.selector.destination_ports)
    };
    let frees = |record: &Record| record.is_free() || record.policies().all(of_lanes);
    clean_up_records(options, observer, &frees).map(drop)
}

/// Like [`clean_up_dead`]. `frees` decides for each record whether its ports are freed when no
/// connection uses them. Returns the first failure after all records have been handled.
fn clean_up_records(
    options: &Options,
    observer: &Observer,
    frees: &dyn Fn(&Record) -> bool,
) -> Result<Option<IpsecError>, IpsecError> {
    let records = RecordDirectory::open(&options.records)?;
    let left = {
        // While this lock is held, every other process has locked the records that it has created,
        // so `left` takes over no record of a running session.
        let _lock = records.lock(options.timeout)?;
        records.left()?
    };
    let mut first = None;
    if left.is_empty() {
        return Ok(first);
    }
    let mut tables = Tables::open(options.before_change.clone())?;
    for record in left {
        let done = record.and_then(|record| {
            let frees = frees(&record);
            clean(&mut tables, record, frees, observer)
        });
        if let Err(error) = done {
            let why = chain(&error);
            observer.event(&Event::NotCleaned { why });
            first.get_or_insert(error);
        }
    }
    Ok(first)
}

fn clean(
    tables: &mut Tables,
    mut record: Record,
    frees: bool,
    observer: &Observer,
) -> Result<(), IpsecError> {
    let objects = record.objects().len();
    let undo = tables.remove_recorded(&mut record)?;
    let path = record.path().to_owned();
    if !frees {
        observer.event(&Event::StaysBlocked { record: path });
    } else if tables.finish(&undo.when_quiet, &mut record)? {
        record.forget()?;
        observer.event(&Event::Cleaned {
            record: path,
            objects,
        });
    } else {
        let connections = still_used(&undo.when_quiet)?;
        observer.event(&Event::Left {
            record: path,
            connections,
        });
    }
    Ok(())
}

/// Removes the policies and SAs that dead processes left in this network namespace, and frees their
/// ports unless connections use them.
///
/// # Errors
/// The directory of records is not usable, another process holds its lock for too long, or the
/// kernel's tables cannot be opened. If a record cannot be read, or its policies and SAs cannot be
/// removed, all other records are handled first.
pub fn clean_up(options: &Options, observer: &Observer) -> Result<(), IpsecError> {
    clean_up_records(options, observer, &|_| true)?.map_or(Ok(()), Err)
}
