//! A session as its owner has it: a handle to the threads that keep it.

use dunlin_lane::sync::lock;
use std::fmt;
use std::net::SocketAddr;
use std::sync::mpsc::{self, Receiver, Sender as Channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use dunlin_proto::ipsec::Sender;
use dunlin_proto::ipsec::object::Policy;
use dunlin_proto::ipsec::plan::SessionParameters;
use dunlin_proto::ipsec::ports::PortBlock;

use super::error::{IpsecError, in_words};
use super::record::{Record, RecordDirectory};
use super::tables::{AssociationStatus, Tables, still_used};
use super::{Event, Observer, Options};

mod begin;
mod driver;
mod hear;
mod shared;
mod system;

use driver::Driver;
pub(super) use shared::Beginning;
use shared::{SharedStatus, Told};
pub(super) use system::{ends, random};

/// A session between two hosts. When it is dropped, it is ended.
pub struct Session {
    commands: Channel<Told>,
    standing: Arc<Mutex<SharedStatus>>,
    thread: Option<JoinHandle<Result<(), IpsecError>>>,
}

/// How a session stands.
#[derive(Clone, Debug)]
pub struct Status {
    /// Both addresses, the ports, and how traffic is spread.
    pub parameters: SessionParameters,
    /// Whether both sides' traffic is protected.
    pub up: bool,
    /// Its SAs.
    pub associations: Vec<AssociationStatus>,
}

impl Session {
    /// Begins one, on threads of its own. The tables are those of the calling thread's
    /// network namespace.
    pub(super) fn begin(beginning: Beginning) -> Result<(Self, Receiver<()>), IpsecError> {
        let (commands, told) = mpsc::channel();
        let (tell_up, up) = mpsc::channel();
        let standing = Arc::<Mutex<SharedStatus>>::default();
        let driver = Driver::new(beginning, Arc::clone(&standing), tell_up)?;
        let heard = commands.clone();
        let body = move || driver.run(&told, heard);
        let thread = thread::Builder::new()
            .name("dunlin-ipsec".to_owned())
            .spawn(body)
            .map_err(IpsecError::resources("a thread"))?;
        let session = Self {
            commands,
            standing,
            thread: Some(thread),
        };
        Ok((session, up))
    }

    /// How it stands; none before both sides have agreed on terms.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn status(&self) -> Result<Option<Status>, IpsecError> {
        let standing = lock(&self.standing);
        let (Some(parameters), Some(xfrm)) = (standing.parameters, standing.xfrm.clone()) else {
            return Ok(None);
        };
        let up = standing.up;
        let mut steps = parameters.inbound(standing.inbound.0, &standing.inbound.1);
        let (epoch, grants) = &standing.outbound;
        steps.extend(parameters.outbound(*epoch, grants, false, &[]));
        drop(standing);
        let associations = steps.iter().filter_map(|step| step.added()?.association());
        let associations = Tables::of(xfrm).statuses(associations)?;
        Ok(Some(Status {
            parameters,
            up,
            associations,
        }))
    }

    /// Wants an SA for one more CPU of this host, unless it has one.
    pub fn want_cpu(&self, cpu: u32) {
        self.tell(Told::Want(Sender::Cpu(cpu)));
    }

    /// Whether what this host sends for `sender` has an SA of its own in the kernel.
    pub(super) fn has(&self, sender: Sender) -> bool {
        let standing = lock(&self.standing);
        let mut held = standing.outbound.1.iter();
        held.any(|grant| grant.slot.sender == sender)
    }

    /// Whether a connection between these two, as this host has them, is one that it protects;
    /// none where that is not agreed on yet.
    pub(super) fn covers(&self, local: SocketAddr, peer: SocketAddr) -> Option<bool> {
        let standing = lock(&self.standing);
        let parameters = standing.parameters?;
        let covered = parameters.local == local.ip().to_canonical()
            && parameters.peer == peer.ip().to_canonical()
            && parameters.covers(local.port(), peer.port());
        // Both hosts let nothing of it pass but by an SA then.
        (!covered || standing.up).then_some(covered)
    }

    /// Renews the keys of what this side sends.
    pub fn rekey(&self) {
        self.tell(Told::Rekey);
    }

    /// Has it end; see [`Session::wait`].
    pub fn end(&self) {
        self.tell(Told::End);
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it is over and everything is taken back.
    ///
    /// # Errors
    /// Why it is over, unless it was ended here.
    pub fn wait(mut self) -> Result<(), IpsecError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            // A panic has been printed by its hook.
            Some(Err(_)) => Err(IpsecError::Ended),
            None => Ok(()),
        }
    }

    fn tell(&self, what: Told) {
        // It is over where nobody listens.
        let _ = self.commands.send(what);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.tell(Told::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Session").finish_non_exhaustive()
    }
}

/// Takes back what processes that have died left in this network namespace, save what blocks
/// ports that were protected, unless their owner had asked for the end: a session that begins
/// takes it over. What cannot be taken back is told, and the first such error returned when the
/// others are done.
///
/// # Errors
/// The records cannot be looked for, or the kernel not be asked.
pub(super) fn clean_up_dead(
    options: &Options,
    observer: &Observer,
) -> Result<Option<IpsecError>, IpsecError> {
    take_back(options, observer, &Record::is_free)
}

/// As [`clean_up_dead`], and frees the ports in `options` too, which are for Dunlin's own lanes: nothing
/// else sends from them, and a lane only while its session stands, so that they need no heir.
///
/// # Errors
/// As [`clean_up_dead`].
pub(super) fn clean_up_lanes(
    options: &Options,
    observer: &Observer,
) -> Result<Option<IpsecError>, IpsecError> {
    let is_lanes = |block: PortBlock| {
        let last = block.port | !block.mask;
        block.mask > 0 && options.ports.contains(block.port) && options.ports.contains(last)
    };
    let of_lanes = |policy: &Policy| {
        is_lanes(policy.selector.source_ports) || is_lanes(policy.selector.destination_ports)
    };
    let frees = |record: &Record| record.is_free() || record.policies().all(of_lanes);
    take_back(options, observer, &frees)
}

/// Of each record `frees` says whether its ports are to be free when it is quiet.
fn take_back(
    options: &Options,
    observer: &Observer,
    frees: &dyn Fn(&Record) -> bool,
) -> Result<Option<IpsecError>, IpsecError> {
    let records = RecordDirectory::open(&options.records)?;
    let left = {
        // Nobody has made a record and not locked it yet.
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
            let why = in_words(&error);
            observer(&Event::NotCleaned { why });
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
    let undo = tables.take_back(&mut record)?;
    let path = record.path().to_owned();
    if !frees {
        observer(&Event::StaysBlocked { record: path });
    } else if tables.finish(&undo.when_quiet, &mut record)? {
        record.forget()?;
        observer(&Event::Cleaned {
            record: path,
            objects,
        });
    } else {
        let connections = still_used(&undo.when_quiet)?;
        observer(&Event::Left {
            record: path,
            connections,
        });
    }
    Ok(())
}

/// Takes back what processes that have died left in this network namespace.
///
/// # Errors
/// The kernel does not answer, or a record cannot be read; the others are done first.
pub fn clean_up(options: &Options, observer: &Observer) -> Result<(), IpsecError> {
    take_back(options, observer, &|_| true)?.map_or(Ok(()), Err)
}
