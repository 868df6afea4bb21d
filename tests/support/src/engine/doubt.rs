//! Two hosts for tests of failures around *commit*. Each has a journal. A relay between them
//! swallows, cuts and redirects connections at events of the engine. The test itself can send
//! inquiries.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use dunlin::engine::destination::{self, DestinationEvent, Received};
use dunlin::engine::journal::{Disk, Journal, StandardDisk, State, decode};
use dunlin::engine::source;
use dunlin::engine::vmm::{FaultCode, RunState, SourceVm};
use dunlin::engine::{Cancel, Event, MigrateError, Report};
use dunlin::{Incoming, Migration};
use dunlin_lane::control;
use dunlin_lane::peers::Principal;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_proto::control::{Envelope, Message, Verdict};
use dunlin_proto::negotiate::{
    Features, LaneSecurity, Offer, Opening, PRELUDE_BYTES, Prelude, VERSIONS,
};
use dunlin_test_base::Scratch;

use super::peer::Peer;
use super::{TestBuilder, TestVm, verified};
use crate::lane::{pair, soon};

/// A directory with the journal of one host.
pub struct JournalDirectory(Scratch);

impl JournalDirectory {
    pub fn new() -> Self {
        Self(Scratch::new())
    }

    pub fn path(&self) -> PathBuf {
        self.0.join("journal")
    }

    pub fn journal(&self) -> Journal {
        self.on(StandardDisk)
    }

    pub fn on(&self, disk: impl Disk + 'static) -> Journal {
        Journal::open_on(&self.path(), Arc::new(disk)).unwrap()
    }

    /// The states in the records of this host.
    pub fn states(&self) -> Vec<State> {
        let entries = self.journal().list().unwrap().into_iter();
        entries
            .filter_map(|entry| entry.record.unwrap().map(|record| record.state))
            .collect()
    }
}

/// A disk that fails to write records with this state. With `None`, it fails every write.
pub struct FailingDisk(pub Option<State>);

impl Disk for FailingDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let fails = match self.0 {
            None => true,
            Some(state) => bytes
                .try_into()
                .is_ok_and(|bytes| decode(bytes).is_ok_and(|(record, _)| record.state == state)),
        };
        if fails {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(bytes, offset)
    }
}

/// A disk that fails to write the record of a session's peer, but writes everything else.
pub struct PeerlessDisk;

impl Disk for PeerlessDisk {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        if bytes.starts_with(b"DUNLPEER") {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all_at(bytes, offset)
    }
}

/// Forwards connections; the first is the control lane.
pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
pub struct Shared {
    /// For each direction: whether bytes of the first connection are read and dropped.
    swallow: [AtomicBool; 2],
    /// Whether the end of the first connection is withheld from the destination.
    mute: AtomicBool,
    refuse: AtomicBool,
    /// The address to which further connections are forwarded, if it has been changed.
    instead: Mutex<Option<SocketAddr>>,
    first: Mutex<Option<(TcpStream, TcpStream)>>,
}

pub const TO_DESTINATION: usize = 0;
pub const TO_SOURCE: usize = 1;

impl Relay {
    pub fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        // The threads need not be joined, because they end with the test's process.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if own.refuse.load(Ordering::SeqCst) {
                    continue;
                }
                let instead = *own.instead.lock().unwrap();
                let Ok(far) = TcpStream::connect(instead.unwrap_or(to)) else {
                    continue;
                };
                let both = || (near.try_clone().unwrap(), far.try_clone().unwrap());
                let first = {
                    let mut first = own.first.lock().unwrap();
                    let is_first = first.is_none();
                    if is_first {
                        *first = Some(both());
                    }
                    is_first
                };
                for direction in [TO_DESTINATION, TO_SOURCE] {
                    let (near, far) = both();
                    let (from, to) = if direction == TO_DESTINATION {
                        (near, far)
                    } else {
                        (far, near)
                    };
                    let own = Arc::clone(&own);
                    std::thread::spawn(move || {
                        pump(from, to, first.then_some((&*own, direction)));
                    });
                }
            }
        });
        Self { address, shared }
    }

    /// Closes each further connection instead of forwarding it.
    pub fn refuse(&self) {
        self.shared.refuse.store(true, Ordering::SeqCst);
    }

    /// Forwards further connections to another host.
    pub fn redirect(&self, to: SocketAddr) {
        *self.shared.instead.lock().unwrap() = Some(to);
    }

    /// From now on, drops the bytes of the first control lane in `direction`.
    pub fn swallow(&self, direction: usize) {
        self.shared.swallow[direction].store(true, Ordering::SeqCst);
    }

    /// Cuts the first control lane. The destination receives the end of the stream only if
    /// `at_destination` is set.
    pub fn cut(&self, at_destination: bool) {
        self.shared.mute.store(!at_destination, Ordering::SeqCst);
        if let Some((near, far)) = &*self.shared.first.lock().unwrap() {
            let _ = near.shutdown(Shutdown::Both);
            if at_destination {
                let _ = far.shutdown(Shutdown::Both);
            }
        }
    }
}

pub fn pump(mut from: TcpStream, mut to: TcpStream, control: Option<(&Shared, usize)>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        // Check the flag after the read, because a test sets it before the bytes are sent.
        let swallowed = control
            .is_some_and(|(shared, direction)| shared.swallow[direction].load(Ordering::SeqCst));
        if !swallowed && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    if control.is_none_or(|(shared, _)| !shared.mute.load(Ordering::SeqCst)) {
        let _ = to.shutdown(Shutdown::Write);
    }
}

/// A function that is called at each event.
pub type At<E> = Box<dyn Fn(&E) + Send + Sync>;

/// Returns the journal for the next VM that arrives.
pub type Journals = Box<dyn Fn() -> Journal + Send>;

/// A host that receives VMs until one has arrived, and answers inquiries during that time.
pub struct Destination {
    pub address: SocketAddr,
    cancel: Cancel,
    thread: JoinHandle<(Vec<Result<Received, MigrateError>>, TestBuilder)>,
}

impl Destination {
    pub fn start(tls: &ServerTls, journal: Journal, builder: TestBuilder) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let journals = Box::new(move || journal.clone());
        Self::on(listener, tls, journals, builder, Box::new(|_| ()))
    }

    pub fn on(
        listener: TcpListener,
        tls: &ServerTls,
        journals: Journals,
        mut builder: TestBuilder,
        at: At<DestinationEvent>,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let cancel = Cancel::new();
        let (tls, cancelled) = (tls.clone(), cancel.clone());
        let thread = std::thread::spawn(move || {
            let mut ended = Vec::new();
            loop {
                let options = destination::Options::builder()
                    .journal(journals())
                    .build()
                    .unwrap();
                let listener = listener.try_clone().unwrap();
                let result = Incoming::builder(listener, &tls)
                    .options(options.clone())
                    .observer(&|event: &DestinationEvent| at(event))
                    .cancel(&cancelled)
                    .run(&mut builder);
                let arrived = result.is_ok();
                if cancelled.is_cancelled() && !arrived {
                    return (ended, builder);
                }
                ended.push(result);
                if arrived {
                    return (ended, builder);
                }
            }
        });
        Self {
            address,
            cancel,
            thread,
        }
    }

    pub fn finish(self) -> (Vec<Result<Received, MigrateError>>, TestBuilder) {
        self.cancel.cancel();
        self.thread.join().unwrap()
    }
}

pub fn running() -> Arc<TestVm> {
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(64, Duration::from_micros(50));
    vm
}

pub fn send(
    vm: &Arc<TestVm>,
    to: SocketAddr,
    client: &ClientTls,
    journal: Journal,
    at: &(dyn Fn(&Event) + Send + Sync),
) -> Result<Report, MigrateError> {
    let options = verified(2)
        .to_builder()
        .journal(journal)
        .doubt_limit(Duration::from_secs(5))
        .build()
        .unwrap();
    send_with(vm, to, client, &options, at)
}

pub fn send_with(
    vm: &Arc<TestVm>,
    to: SocketAddr,
    client: &ClientTls,
    options: &source::Options,
    at: &(dyn Fn(&Event) + Send + Sync),
) -> Result<Report, MigrateError> {
    let vm: Arc<dyn SourceVm> = Arc::clone(vm) as _;
    Migration::builder(vm, to.to_string(), client)
        .options(options.clone())
        .observer(&|event: &Event| at(event))
        .run()
}

pub fn runs(vm: &TestVm) -> bool {
    *vm.state.lock().unwrap() == RunState::Running
}

/// Sends one inquiry about a session; returns `None` if there is no answer.
pub fn ask(to: SocketAddr, client: &ClientTls, session: [u8; 16]) -> Option<Verdict> {
    let mut peer = inquirer(to, client, session).ok()?;
    peer.send(&Message::Inquire { attempt: 1 });
    match peer.receive() {
        Some(Message::Answer {
            attempt: 1,
            verdict,
        }) => Some(verdict),
        // The destination refused, or closed the connection without a message.
        Some(Message::Refuse { .. }) | None => None,
        other => panic!("{other:?}"),
    }
}

/// Opens a control lane for inquiries about a session, or returns the fault with which the
/// destination refused.
pub fn inquirer(to: SocketAddr, client: &ClientTls, session: [u8; 16]) -> Result<Peer, FaultCode> {
    inquirer_of(to, client, session, 1)
}

/// Like [`inquirer`], about one attempt of the session.
pub fn inquirer_of(
    to: SocketAddr,
    client: &ClientTls,
    session: [u8; 16],
    attempt: u32,
) -> Result<Peer, FaultCode> {
    let stream = control::client(TcpStream::connect(to).unwrap(), client, soon()).unwrap();
    let offer = Offer {
        versions: VERSIONS,
        optional: Features::NONE,
        required: Features::NONE,
        security: LaneSecurity::Tls,
        session,
        attempt,
        epoch: 2,
    };
    let mut bytes = Vec::new();
    offer.encode(&mut bytes).unwrap();
    stream.send(&bytes).unwrap();
    let mut prelude = [0; PRELUDE_BYTES];
    stream.receive_exact(&mut prelude, soon()).unwrap();
    let prelude = Prelude::decode(&prelude).unwrap();
    let mut body = vec![0; prelude.body_bytes];
    stream.receive_exact(&mut body, soon()).unwrap();
    if let Opening::Refuse(_, refusal) = Opening::decode(&prelude, &body).unwrap() {
        return Err(refusal.fault);
    }
    let envelope = Envelope {
        session,
        epoch: 2,
        sequence: 0,
    };
    Ok(Peer { stream, envelope })
}

/// The principal that a destination derives from a client's certificate.
pub fn principal_of(tls: &ServerTls, client: &ClientTls) -> Principal {
    let (near, far) = pair();
    let soon = soon();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| control::server(far, tls, soon).unwrap());
        let _near = control::client(near, client, soon).unwrap();
        accepted.join().unwrap().peer().principal()
    })
}
