//! A proxy between the two sides: it records traffic and injects network faults.
//!
//! Each connection has its own thread, which owns both sockets and sleeps until a socket is ready
//! or the test has a request. A test injects a fault immediately ([`Proxy::strike`]), or in advance
//! for a point in the stream to the destination ([`Proxy::strike_at`]). The proxy finds points
//! inside TLS by the lengths of records, which are not encrypted.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dunlin_linux::poll::{Interest, Waker, Wakeup, poll, waker};
use dunlin_linux::socket::set_reset_on_close;
use dunlin_proto::frame::FRAME_HEADER_BYTES;
use dunlin_proto::negotiate::{LaneDirection, LaneOpen, VERSIONS};

/// The number of bytes by which the body of a TLS 1.3 record exceeds its content: one byte for the
/// inner content type, and 16 for the tag.
const RECORD_OVERHEAD: usize = 17;
const RECORD_HEADER_BYTES: usize = 5;
/// The number of buffered bytes at which the proxy stops reading from the near side of a held
/// connection.
const HELD_BYTES: usize = 32 << 20;
/// The time limit of every wait, longer than any wait in a test that passes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A fault to inject into a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Both sides read the end of the stream, after the bytes that were already forwarded.
    Cut,
    /// Both sides receive a reset.
    Reset,
    /// The bytes of both sides are read and discarded; the TCP connections stay open.
    Swallow,
    /// Nothing is forwarded in either direction, but the bytes are kept until [`Proxy::release`].
    Hold,
}

pub const FAULTS: [Fault; 4] = [Fault::Cut, Fault::Reset, Fault::Swallow, Fault::Hold];

/// A point in the stream to the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// After this number of bytes.
    Bytes(u64),
    /// Before this TLS record, counted from 0.
    Record(u64),
    /// This number of bytes after a data lane's opening.
    Opened(u64),
    /// Before this *mark* or *end* frame, counted from 1.
    Mark(u64),
    /// After this *mark* or *end* frame, counted from 1.
    Marked(u64),
}

/// Forwards connections; the first one is the control lane.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stop: bool,
    refuse: bool,
    record: bool,
    recorded: Vec<u8>,
    plans: BTreeMap<usize, (At, Fault)>,
    links: Vec<Link>,
    threads: Vec<JoinHandle<()>>,
}

/// The progress of a connection, and the requests to its thread.
struct Link {
    waker: Waker,
    now: Option<Fault>,
    release: bool,
    at_close: Option<Fault>,
    progress: Progress,
}

/// The progress of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Bytes that were forwarded to the destination.
    pub forwarded: u64,
    /// The injected fault, if there is one.
    pub struck: Option<Fault>,
    /// The number of TLS record headers received after a data lane's opening. A frame can take
    /// several records.
    pub records: u64,
    /// Whether the source has ended its half of the connection.
    pub closed: bool,
    /// Whether the connection has ended and no longer carries data.
    pub ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl Proxy {
    pub fn start(to: SocketAddr) -> Self {
        Self::start_on(TcpListener::bind(("127.0.0.1", 0)).unwrap(), to)
    }

    /// Starts a proxy on an existing listener.
    pub fn start_on(listener: TcpListener, to: SocketAddr) -> Self {
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            for near in listener.incoming() {
                let mut state = own.lock();
                if state.stop {
                    return;
                }
                let near = near.unwrap();
                if state.refuse {
                    continue;
                }
                let Ok(far) = TcpStream::connect(to) else {
                    continue;
                };
                let number = state.links.len();
                let (waker, wakeup) = waker().unwrap();
                state.links.push(Link {
                    waker,
                    now: None,
                    release: false,
                    at_close: None,
                    progress: Progress::default(),
                });
                let shared = Arc::clone(&own);
                state.threads.push(thread::spawn(move || {
                    let mut relay = Relay::new(&shared, number, near, far);
                    // Ignore an error: it means that a peer has closed its connection.
                    let _ = relay.run(&wakeup);
                    relay.end();
                }));
                drop(state);
                own.changed.notify_all();
            }
        });
        Self {
            address,
            shared,
            thread: Some(thread),
        }
    }

    /// Records the bytes that are forwarded to the destination from now on.
    pub fn record(&self) {
        self.shared.lock().record = true;
    }

    pub fn recorded(&self) -> Vec<u8> {
        self.shared.lock().recorded.clone()
    }

    /// Plans `fault` for a point that `connection` has not reached yet. The connection need not
    /// exist yet.
    pub fn strike_at(&self, connection: usize, at: At, fault: Fault) {
        self.shared.lock().plans.insert(connection, (at, fault));
    }

    /// Injects `fault` immediately.
    pub fn strike(&self, connection: usize, fault: Fault) {
        self.ask(connection, |link| link.now = Some(fault));
    }

    /// Injects `fault` when the source ends its half of the connection.
    pub fn strike_at_close(&self, connection: usize, fault: Fault) {
        self.ask(connection, |link| link.at_close = Some(fault));
    }

    /// Continues a held connection; if `until` is given, only as far as that point.
    pub fn release(&self, connection: usize, until: Option<At>) {
        {
            let mut state = self.shared.lock();
            state.plans.remove(&connection);
            if let Some(at) = until {
                state.plans.insert(connection, (at, Fault::Hold));
            }
        }
        self.ask(connection, |link| link.release = true);
    }

    /// Forwards the first `bytes` bytes of a connection to the destination, then holds the
    /// connection.
    pub fn hold(&self, connection: usize, bytes: u64) {
        self.strike_at(connection, At::Bytes(bytes), Fault::Hold);
    }

    /// Closes each further connection on arrival.
    pub fn refuse(&self) {
        self.shared.lock().refuse = true;
    }

    /// Accepts connections again.
    pub fn accept(&self) {
        self.shared.lock().refuse = false;
    }

    /// Ends a connection on both sides.
    pub fn cut(&self, connection: usize) {
        self.strike(connection, Fault::Cut);
    }

    pub fn connections(&self) -> usize {
        self.shared.lock().links.len()
    }

    pub fn progress(&self, connection: usize) -> Progress {
        self.shared
            .lock()
            .links
            .get(connection)
            .map_or_else(Progress::default, |link| link.progress)
    }

    /// The connections that have not ended and have no fault.
    pub fn alive(&self) -> Vec<usize> {
        let state = self.shared.lock();
        let alive = |link: &Link| {
            !link.progress.ended && link.progress.struck.is_none() && link.now.is_none()
        };
        let links = state.links.iter().enumerate();
        links
            .filter(|(_, link)| alive(link))
            .map(|(n, _)| n)
            .collect()
    }

    /// Waits until at least `count` connections have been forwarded.
    pub fn await_connections(&self, count: usize) {
        self.wait(|state| state.links.len() >= count);
    }

    /// Waits until the progress of a connection satisfies `found`.
    pub fn await_progress(&self, connection: usize, found: impl Fn(&Progress) -> bool) {
        self.wait(|state| {
            let link = state.links.get(connection);
            link.is_some_and(|link| found(&link.progress))
        });
    }

    fn wait(&self, found: impl Fn(&State) -> bool) {
        let until = Instant::now() + TIMEOUT;
        let mut state = self.shared.lock();
        while !found(&state) {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the awaited event did not occur in time");
            state = self.shared.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    fn ask(&self, connection: usize, what: impl FnOnce(&mut Link)) {
        let mut state = self.shared.lock();
        let link = &mut state.links[connection];
        what(link);
        link.waker.wake();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.stop = true;
            for link in &state.links {
                link.waker.wake();
            }
        }
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let threads = std::mem::take(&mut self.shared.lock().threads);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// One connection through the proxy: from the source (`near`) to the destination (`far`).
struct Relay<'a> {
    shared: &'a Shared,
    number: usize,
    near: TcpStream,
    far: TcpStream,
    there: Flow,
    back: Flow,
    records: Records,
    /// The position of the planned fault in the stream to the destination. `None` if no fault is
    /// planned, or if the records scanned so far do not determine the position.
    strike: Option<(u64, Fault)>,
    struck: Option<Fault>,
}

/// Bytes on their way in one direction.
#[derive(Default)]
struct Flow {
    waiting: Vec<u8>,
    taken: u64,
    ended: bool,
    passed_end: bool,
}

impl<'a> Relay<'a> {
    fn new(shared: &'a Shared, number: usize, near: TcpStream, far: TcpStream) -> Self {
        for stream in [&near, &far] {
            stream.set_nonblocking(true).unwrap();
            stream.set_nodelay(true).unwrap();
        }
        Self {
            shared,
            number,
            near,
            far,
            there: Flow::default(),
            back: Flow::default(),
            records: Records::default(),
            strike: None,
            struck: None,
        }
    }

    fn run(&mut self, wakeup: &Wakeup) -> io::Result<()> {
        loop {
            self.plan();
            if !self.heed() {
                return Ok(());
            }
            self.move_bytes()?;
            if !self.heed() {
                return Ok(());
            }
            self.report(false);
            if self.there.passed_end && self.back.passed_end {
                return Ok(());
            }
            let silent = matches!(self.struck, Some(Fault::Swallow | Fault::Hold));
            let near = Interest {
                fd: self.near.as_fd(),
                read: !self.there.ended && self.there.waiting.len() < self.room(),
                write: !silent && !self.back.waiting.is_empty(),
            };
            let far = Interest {
                fd: self.far.as_fd(),
                read: !self.back.ended
                    && self.struck != Some(Fault::Hold)
                    && self.back.waiting.is_empty(),
                write: !silent && self.passable() > 0,
            };
            let woken = Interest {
                fd: wakeup.as_fd(),
                read: true,
                write: false,
            };
            // poll(2) reports hangups and errors even for a socket with no requested events, so
            // leave such sockets out.
            let asked = [near, far].into_iter().filter(|one| one.read || one.write);
            let interests: Vec<Interest<'_>> = [woken].into_iter().chain(asked).collect();
            poll(&interests, None)?;
            wakeup.clear();
        }
    }

    /// Determines the position of the planned fault, if the scanned records contain it.
    fn plan(&mut self) {
        if self.strike.is_some() || self.struck.is_some() {
            return;
        }
        let plan = self.shared.lock().plans.get(&self.number).copied();
        if let Some((at, fault)) = plan
            && let Some(position) = self.records.position(at)
        {
            self.strike = Some((position, fault));
        }
    }

    /// Injects the faults that are due. Returns false if the connection has ended.
    fn heed(&mut self) -> bool {
        let mut state = self.shared.lock();
        if state.stop {
            return false;
        }
        let link = &mut state.links[self.number];
        let mut due = link.now.take();
        if self.there.ended {
            due = due.or(link.at_close.take());
        }
        if due.is_some() {
            link.progress.struck = due;
        }
        if std::mem::take(&mut link.release) {
            self.struck = None;
            self.strike = None;
            drop(state);
            self.plan();
        } else {
            drop(state);
        }
        let forwarded = self.forwarded();
        let planned = self.strike.take_if(|(at, _)| *at <= forwarded);
        let Some(fault) = due.or(planned.map(|(_, fault)| fault)) else {
            return true;
        };
        self.struck = Some(fault);
        match fault {
            Fault::Swallow | Fault::Hold => true,
            Fault::Cut => {
                let _ = self.near.shutdown(Shutdown::Both);
                let _ = self.far.shutdown(Shutdown::Both);
                false
            }
            Fault::Reset => {
                let _ = set_reset_on_close(&self.near);
                let _ = set_reset_on_close(&self.far);
                false
            }
        }
    }

    fn move_bytes(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        while !self.there.ended && self.there.waiting.len() < self.room() {
            let Some(count) = heard(self.struck, read(&mut self.near, &mut buffer))? else {
                break;
            };
            self.there.ended = count == 0;
            self.records.scan(&buffer[..count], self.there.taken);
            self.there.taken += count as u64;
            if self.struck != Some(Fault::Swallow) {
                self.there.waiting.extend_from_slice(&buffer[..count]);
            }
            self.plan();
        }
        while !self.back.ended && self.struck != Some(Fault::Hold) && self.back.waiting.is_empty() {
            let Some(count) = heard(self.struck, read(&mut self.far, &mut buffer))? else {
                break;
            };
            self.back.ended = count == 0;
            if self.struck != Some(Fault::Swallow) {
                self.back.waiting.extend_from_slice(&buffer[..count]);
                write(&mut self.near, &mut self.back.waiting, usize::MAX)?;
            }
        }
        if matches!(self.struck, Some(Fault::Swallow | Fault::Hold)) {
            if self.struck == Some(Fault::Swallow) {
                self.there.waiting.clear();
                self.back.waiting.clear();
            }
            return Ok(());
        }
        write(&mut self.near, &mut self.back.waiting, usize::MAX)?;
        let passable = self.passable();
        let sent = write(&mut self.far, &mut self.there.waiting, passable)?;
        let mut state = self.shared.lock();
        if state.record {
            state.recorded.extend_from_slice(&sent);
        }
        drop(state);
        if self.back.ended && self.back.waiting.is_empty() && !self.back.passed_end {
            self.near.shutdown(Shutdown::Write)?;
            self.back.passed_end = true;
        }
        if self.there.ended && self.there.waiting.is_empty() && !self.there.passed_end {
            self.far.shutdown(Shutdown::Write)?;
            self.there.passed_end = true;
        }
        Ok(())
    }

    /// How many of the waiting bytes may be forwarded now.
    fn passable(&self) -> usize {
        let forwarded = self.forwarded();
        let until_strike = self
            .strike
            .map_or(usize::MAX, |(at, _)| at.saturating_sub(forwarded) as usize);
        let whole = if self.there.ended {
            self.there.waiting.len()
        } else {
            // Do not forward an incomplete record header: a fault may be planned for the start of
            // its record.
            self.there
                .waiting
                .len()
                .saturating_sub(self.records.partial())
        };
        whole.min(until_strike)
    }

    fn forwarded(&self) -> u64 {
        self.there.taken - self.there.waiting.len() as u64
    }

    fn room(&self) -> usize {
        match self.struck {
            Some(Fault::Swallow | Fault::Hold) => HELD_BYTES,
            _ => 64 << 10,
        }
    }

    fn report(&self, ended: bool) {
        let mut state = self.shared.lock();
        let progress = &mut state.links[self.number].progress;
        if self.struck.is_none() {
            progress.forwarded = self.forwarded();
        }
        progress.records = self.records.after_opening;
        progress.struck = self.struck;
        progress.closed = self.there.ended;
        progress.ended = ended;
        drop(state);
        self.shared.changed.notify_all();
    }

    fn end(&self) {
        self.report(true);
    }
}

/// With `Swallow` and `Hold`, a read error is treated as the end of that direction. Otherwise the
/// error would end the relay, and the relay would close the other side's connection.
fn heard(struck: Option<Fault>, read: io::Result<Option<usize>>) -> io::Result<Option<usize>> {
    match (read, struck) {
        (Err(_), Some(Fault::Swallow | Fault::Hold)) => Ok(Some(0)),
        (read, _) => read,
    }
}

/// Reads the available bytes; `None` if there are none yet, 0 at the end of the stream.
fn read(from: &mut TcpStream, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match from.read(buffer) {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes up to `most` of the waiting bytes; returns the bytes that were written.
fn write(to: &mut TcpStream, waiting: &mut Vec<u8>, most: usize) -> io::Result<Vec<u8>> {
    let mut gone = 0;
    let most = most.min(waiting.len());
    while gone < most {
        match to.write(&waiting[gone..most]) {
            Ok(count) => gone += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(waiting.drain(..gone).collect())
}

/// Finds the TLS records of one direction by their headers.
struct Records {
    header: Vec<u8>,
    body_left: u64,
    plain: bool,
    count: u64,
    starts: Vec<u64>,
    opened: Option<u64>,
    after_opening: u64,
    /// The positions at which each *mark* or *end* frame begins and ends.
    marks: Vec<(u64, u64)>,
    opening_bytes: usize,
}

impl Default for Records {
    fn default() -> Self {
        let mut opening = Vec::new();
        LaneOpen::unproved(VERSIONS.max, [0; 16], 1, LaneDirection::FromDialer)
            .encode(&mut opening)
            .unwrap();
        Self {
            header: Vec::new(),
            body_left: 0,
            plain: false,
            count: 0,
            starts: Vec::new(),
            opened: None,
            after_opening: 0,
            marks: Vec::new(),
            opening_bytes: opening.len(),
        }
    }
}

impl Records {
    fn scan(&mut self, bytes: &[u8], begins: u64) {
        if begins == 0 && bytes.first().is_some_and(|first| *first != 22) {
            self.plain = true;
        }
        if self.plain {
            return;
        }
        let mut at = 0;
        while at < bytes.len() {
            if self.body_left > 0 {
                let step = (bytes.len() - at).min(self.body_left as usize);
                self.body_left -= step as u64;
                at += step;
                continue;
            }
            self.header.push(bytes[at]);
            at += 1;
            if self.header.len() == RECORD_HEADER_BYTES {
                let header = std::mem::take(&mut self.header);
                let body = usize::from(header[3]) << 8 | usize::from(header[4]);
                self.begun(header[0], body, begins + at as u64);
            }
        }
    }

    /// Handles a record that begins. Its header ends at `at`.
    fn begun(&mut self, kind: u8, body: usize, at: u64) {
        let begins = at - RECORD_HEADER_BYTES as u64;
        let ends = at + body as u64;
        self.body_left = body as u64;
        self.count += 1;
        if self.starts.len() < 8 {
            self.starts.push(begins);
        }
        if self.opened.is_some() {
            self.after_opening += 1;
            if body == FRAME_HEADER_BYTES + RECORD_OVERHEAD {
                self.marks.push((begins, ends));
            }
        } else if kind == 23 && body == self.opening_bytes + RECORD_OVERHEAD {
            self.opened = Some(ends);
        }
    }

    /// The number of bytes received of an incomplete record header.
    fn partial(&self) -> usize {
        self.header.len()
    }

    fn position(&self, at: At) -> Option<u64> {
        match at {
            At::Bytes(bytes) => Some(bytes),
            At::Record(number) => self.starts.get(number as usize).copied(),
            At::Opened(bytes) => self.opened.map(|opened| opened + bytes),
            At::Mark(number) => self.marks.get(number as usize - 1).map(|mark| mark.0),
            At::Marked(number) => self.marks.get(number as usize - 1).map(|mark| mark.1),
        }
    }
}
