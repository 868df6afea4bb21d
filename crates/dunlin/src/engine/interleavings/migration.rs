//! Whole migrations of a small memory. The engine's work queue and barrier run with lanes on both
//! sides, over [`Connection`]s. The two sessions are short substitutes for those of the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dunlin_proto::bitmap::Run;
use dunlin_proto::control::{Final, Message};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::lanes::{Action, Fence, KeyUsage, Receiving, Sending};
use dunlin_proto::limits::CHUNK_PAGES;
use dunlin_proto::pace::Pace;
use dunlin_proto::schedule::{ChunkPlan, Schedule, Work};
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Mutex;
use shuttle::sync::mpsc::{Receiver, Sender, channel};
use shuttle::thread::{JoinHandle, spawn, yield_now};

use super::super::destination::barrier::IterationBarrier;
use super::super::host::Cancel;
use super::super::source::event::SessionEvent;
use super::super::source::work_queue::WorkQueue;
use super::super::sync::lock;
use super::connection::{Connection, Frame};
use super::work_queue::TIMEOUTS;

const PAGES: usize = CHUNK_PAGES as usize + 2;
const LANES: u16 = 2;
/// Number of iterations while the guest runs.
const ITERATIONS: u32 = 2;
/// Number of writes by the guest.
const WRITES: usize = 3;

/// The guest's memory, as one version per page, and its dirty log.
struct Guest {
    versions: Vec<u32>,
    dirty: BTreeSet<usize>,
}

/// Events of the source's session.
enum AtSource {
    Received(Message),
    Cut(u32),
    LaneEnded(u16, bool),
    Cancelled,
    /// The destination has received everything.
    Complete,
}

/// Events of the destination's session.
enum AtDestination {
    Received(Message),
    Arrived(u16, Arc<Connection>),
    Acks,
    LaneEnded(u16),
}

struct Source {
    work_queue: Arc<WorkQueue>,
    guest: Arc<Mutex<Guest>>,
    /// The lanes' connections, so that a scenario can end them.
    connections: Arc<Mutex<BTreeMap<u16, Arc<Connection>>>>,
    events: Receiver<AtSource>,
    sender: Sender<AtSource>,
    peer: Sender<AtDestination>,
    threads: BTreeMap<u16, JoinHandle<()>>,
}

/// A migration without failures.
pub(super) fn moves() {
    run(|_, _| None);
}

/// A migration during which a lane's connection ends, at any time.
pub(super) fn loses() {
    run(|source, _| {
        let connections = Arc::clone(&source.connections);
        Some(spawn(move || {
            for _ in 0..thread_rng().gen_range(0..40) {
                yield_now();
            }
            let lane = thread_rng().gen_range(1..=LANES);
            if let Some(connection) = connections.lock().unwrap().get(&lane) {
                connection.close();
            }
        }))
    });
}

/// A migration that the operator cancels, at any time.
pub(super) fn cancelled() {
    run(|_, cancel| {
        let cancel = cancel.clone();
        Some(spawn(move || cancel.cancel()))
    });
}

/// Runs a migration while `trouble` interferes from another thread. The moved memory must
/// equal the source's.
fn run(trouble: fn(&Source, &Cancel) -> Option<JoinHandle<()>>) {
    let (sender, events) = channel();
    let (peer, at_destination) = channel();
    let (control, messages) = channel();
    let schedule = Schedule::new([(0, PAGES as u64)]);
    let mut source = Source {
        work_queue: Arc::new(WorkQueue::new(
            Sending::new(schedule, TIMEOUTS),
            Pace::new(None),
        )),
        guest: Arc::new(Mutex::new(Guest {
            versions: vec![1; PAGES],
            dirty: BTreeSet::new(),
        })),
        connections: Arc::default(),
        events,
        sender,
        peer,
        threads: BTreeMap::new(),
    };
    let cancel = Cancel::new();
    let on_cancel = source.sender.clone();
    let listening = cancel.listen(move || drop(on_cancel.send(AtSource::Cancelled)));
    let destination = {
        let sender = source.peer.clone();
        spawn(move || receive(&sender, &at_destination, &control))
    };
    // The thread of the control lane's reader.
    let reader = {
        let (work_queue, events) = (Arc::clone(&source.work_queue), source.sender.clone());
        spawn(move || {
            for message in messages.iter() {
                let event = match message {
                    Some(message) if work_queue.acknowledge(&message).unwrap() => continue,
                    Some(message) => AtSource::Received(message),
                    None => AtSource::Complete,
                };
                // Sending fails only after the session has ended.
                let _ = events.send(event);
            }
        })
    };
    let trouble = trouble(&source, &cancel);
    let moved = source.send();
    drop(listening);
    source.work_queue.stop();
    for thread in std::mem::take(&mut source.threads).into_values() {
        thread.join().unwrap();
    }
    if !moved {
        let _ = source.peer.send(AtDestination::Received(Message::Cancel {
            fault: FaultCode::Cancelled,
            text: String::new(),
        }));
    }
    let memory = destination.join().unwrap();
    reader.join().unwrap();
    if let Some(trouble) = trouble {
        trouble.join().unwrap();
    }
    // A cancellation may arrive after the complete memory has arrived, so the destination may
    // return memory although `moved` is false.
    assert!(memory.is_some() || !moved);
    if let Some(memory) = memory {
        assert_eq!(memory, source.guest.lock().unwrap().versions);
    }
}

impl Source {
    /// Runs the source's session. Returns false if the session was cancelled.
    fn send(&mut self) -> bool {
        lock(&self.work_queue.state).lanes.want(LANES);
        while lock(&self.work_queue.state).lanes.up() == 0 {
            if self.next().is_none() {
                return false;
            }
        }
        let guest = {
            let guest = Arc::clone(&self.guest);
            spawn(move || {
                for _ in 0..WRITES {
                    let page = thread_rng().gen_range(0..PAGES);
                    let mut guest = guest.lock().unwrap();
                    guest.versions[page] += 1;
                    guest.dirty.insert(page);
                }
            })
        };
        let all = Run {
            first: 0,
            count: PAGES as u64,
        };
        lock(&self.work_queue.state)
            .lanes
            .schedule_mut()
            .mark_run(0, all);
        let mut on_time = true;
        for _ in 0..ITERATIONS {
            let (iteration, _) = self.work_queue.begin_iteration(false);
            // Sometimes the time limit expires. The source then does not wait for the end of the
            // iteration.
            let in_time = thread_rng().gen_range(0..4) > 0;
            on_time = on_time && (!in_time || self.until_cut(iteration));
            self.fetch();
        }
        // The guest is paused.
        guest.join().unwrap();
        self.fetch();
        if !on_time {
            return false;
        }
        self.work_queue.begin_iteration(true);
        let mut last = None;
        loop {
            let state = lock(&self.work_queue.state);
            let fenced = state.lanes.fenced_count();
            if state.lanes.complete() && last != Some(fenced) {
                last = Some(fenced);
                let (chunks, pages) = state.lanes.schedule().kept();
                let iteration = state.lanes.schedule().iteration();
                drop(state);
                self.tell_peer(Message::Final(Final {
                    chunks,
                    iteration,
                    sections: 0,
                    pages,
                    fenced,
                    digest: None,
                }));
            } else {
                drop(state);
            }
            match self.next() {
                None => return false,
                Some(AtSource::Complete) => return true,
                Some(_) => {}
            }
        }
    }

    fn until_cut(&mut self, iteration: u32) -> bool {
        loop {
            match self.next() {
                None => return false,
                Some(AtSource::Cut(cut)) if cut == iteration => return true,
                Some(_) => {}
            }
        }
    }

    /// Fetches the dirty log, which clears it.
    fn fetch(&self) {
        let dirty = std::mem::take(&mut self.guest.lock().unwrap().dirty);
        let mut words = vec![0_u64; PAGES.div_ceil(64)];
        for page in dirty {
            words[page / 64] |= 1 << (page % 64);
        }
        let mut state = lock(&self.work_queue.state);
        state.lanes.schedule_mut().mark_dirty(0, &words);
    }

    fn tell_peer(&self, message: Message) {
        // Sending fails if the destination has everything and has ended.
        let _ = self.peer.send(AtDestination::Received(message));
    }

    /// Executes the lane actions and waits for an event; `None` on a cancellation.
    fn next(&mut self) -> Option<AtSource> {
        loop {
            let action = lock(&self.work_queue.state).lanes.poll(0);
            match action {
                None => break,
                Some(Action::Open(lane)) => self.open(lane),
                Some(Action::Cut(lane)) => self.work_queue.cut(lane),
                Some(Action::Fence(lane)) => self.tell_peer(Message::Fence { lane }),
                Some(Action::GiveUp) => panic!("no limit expires in this test"),
            }
        }
        let event = self.events.recv().unwrap();
        match &event {
            AtSource::Received(Message::LaneUp { lane }) => {
                let news = self
                    .work_queue
                    .change(|state| state.lanes.lane_up(*lane, 0));
                assert!(news.is_ok());
            }
            AtSource::Received(Message::Fenced { lane, acks }) => {
                let pages = self
                    .work_queue
                    .change(|state| state.lanes.fenced(*lane, acks, 0));
                assert!(pages.is_ok(), "{pages:?}");
            }
            AtSource::Received(message) => panic!("unexpected {message:?}"),
            AtSource::LaneEnded(lane, in_order) => {
                let thread = self.threads.remove(lane).expect("a lane ended twice");
                thread.join().unwrap();
                self.work_queue
                    .change(|state| state.lanes.thread_ended(*lane, *in_order, 0));
            }
            AtSource::Cancelled => return None,
            AtSource::Cut(_) | AtSource::Complete => {}
        }
        Some(event)
    }

    fn open(&mut self, number: u16) {
        self.work_queue.expect(number);
        let connection = Connection::new();
        self.connections
            .lock()
            .unwrap()
            .insert(number, Arc::clone(&connection));
        let (work_queue, guest) = (Arc::clone(&self.work_queue), Arc::clone(&self.guest));
        let (events, peer) = (self.sender.clone(), self.peer.clone());
        let thread = spawn(move || {
            let in_order = send_all(number, &work_queue, &guest, &connection, &events, &peer);
            connection.close();
            let _ = events.send(AtSource::LaneEnded(number, in_order));
        });
        self.threads.insert(number, thread);
    }
}

/// Runs a lane's thread at the source. Returns whether the lane ended cleanly.
fn send_all(
    number: u16,
    work_queue: &WorkQueue,
    guest: &Mutex<Guest>,
    connection: &Arc<Connection>,
    events: &Sender<AtSource>,
    peer: &Sender<AtDestination>,
) -> bool {
    let end = Arc::clone(connection);
    if work_queue
        .interrupted_by(number, Box::new(move || end.close()))
        .is_err()
    {
        return false;
    }
    if peer
        .send(AtDestination::Arrived(number, Arc::clone(connection)))
        .is_err()
    {
        return false;
    }
    let mut plan = ChunkPlan::default();
    loop {
        let report = |event| {
            if let SessionEvent::Cut { iteration } = event {
                let _ = events.send(AtSource::Cut(iteration));
            }
        };
        let work = work_queue.next(number, KeyUsage::Fresh, &mut plan, report, || false);
        let frame = match work {
            Ok(Work::Chunk) => {
                let mut pages = Vec::new();
                for range in &plan.ranges {
                    let guest = guest.lock().unwrap();
                    for page in range.run.first..range.run.first + range.run.count {
                        let page = page as usize;
                        pages.push((page, guest.versions[page]));
                    }
                }
                if work_queue.await_rate(number, 1).is_err() {
                    return false;
                }
                Frame::Chunk(plan.number, plan.iteration, pages)
            }
            Ok(Work::Mark(iteration)) => Frame::Mark(iteration),
            Ok(Work::End { chunks }) => return connection.send(Frame::End(chunks)),
            Ok(Work::Wait) => continue,
            Ok(Work::Stop) | Err(_) => return false,
        };
        if !connection.send(frame) {
            return false;
        }
    }
}

/// The destination's session; returns the received memory, or `None` if the source has
/// cancelled.
fn receive(
    sender: &Sender<AtDestination>,
    events: &Receiver<AtDestination>,
    control: &Sender<Option<Message>>,
) -> Option<Vec<u32>> {
    let barrier = Arc::new(IterationBarrier::new(2 * LANES));
    // The iteration and version of each received page.
    let memory = Arc::new(Mutex::new(vec![(0, 0); PAGES]));
    let mut threads: BTreeMap<u16, JoinHandle<()>> = BTreeMap::new();
    let send = |message| control.send(Some(message)).unwrap();
    let acknowledge = || {
        let (sets, reached) = barrier.lanes(Receiving::take_reports);
        if !sets.is_empty() || !reached.is_empty() {
            send(Message::Ack { sets, reached });
        }
    };
    let fenced = |lane| {
        acknowledge();
        let acks = Vec::new();
        send(Message::Fenced { lane, acks });
    };
    loop {
        if threads.is_empty() && barrier.lanes(Receiving::is_complete).unwrap() {
            acknowledge();
            control.send(None).unwrap();
            let memory = memory.lock().unwrap();
            return Some(memory.iter().map(|&(_, version)| version).collect());
        }
        match events.recv().unwrap() {
            AtDestination::Arrived(lane, connection) => {
                if barrier.admit(lane, connection.interrupt()).is_err() {
                    continue;
                }
                let (barrier, memory) = (Arc::clone(&barrier), Arc::clone(&memory));
                let events = sender.clone();
                let thread = spawn(move || {
                    let in_order = receive_all(lane, &barrier, &memory, &connection, &events);
                    if !in_order {
                        connection.interrupt()();
                    }
                    barrier.forget(lane);
                    let _ = events.send(AtDestination::LaneEnded(lane));
                });
                threads.insert(lane, thread);
                send(Message::LaneUp { lane });
            }
            AtDestination::Acks => acknowledge(),
            AtDestination::LaneEnded(lane) => {
                let thread = threads.remove(&lane).expect("a lane ended twice");
                thread.join().unwrap();
                if barrier.lanes(|lanes| lanes.gone(lane)) {
                    fenced(lane);
                }
            }
            AtDestination::Received(Message::Fence { lane }) => {
                match barrier.lanes(|lanes| lanes.fence(lane)) {
                    Fence::Close => barrier.cut(lane),
                    Fence::Answer => fenced(lane),
                }
            }
            AtDestination::Received(Message::Final(last)) => {
                barrier.lanes(|lanes| lanes.finish(last));
            }
            AtDestination::Received(Message::Cancel { .. }) => {
                barrier.stop();
                for thread in threads.into_values() {
                    thread.join().unwrap();
                }
                return None;
            }
            AtDestination::Received(message) => panic!("unexpected {message:?}"),
        }
    }
}

/// Runs a lane's thread at the destination. Returns whether the lane ended cleanly.
fn receive_all(
    lane: u16,
    barrier: &IterationBarrier,
    memory: &Mutex<Vec<(u32, u32)>>,
    connection: &Connection,
    events: &Sender<AtDestination>,
) -> bool {
    // Sending fails only after the session has ended.
    let notify = || drop(events.send(AtDestination::Acks));
    loop {
        match connection.receive() {
            None => return false,
            Some(Frame::Chunk(number, iteration, pages)) => {
                let checked = barrier.check_chunk(lane, number, iteration);
                assert_eq!(checked, Ok(()));
                for half in pages.chunks(pages.len().div_ceil(2)) {
                    let mut memory = memory.lock().unwrap();
                    for &(page, version) in half {
                        // Lane A may read a page for an iteration after lane B has read it for the
                        // next iteration. In that case B's chunk has the older version. No write is
                        // lost: the page was written between the two reads, so it is sent again.
                        let (last, was) = memory[page];
                        assert!(
                            last < iteration || last == iteration && was <= version,
                            "page {page} reverts from {was} of iteration {last} to {version} of \
                             iteration {iteration}"
                        );
                        memory[page] = (iteration, version);
                    }
                }
                let count = pages.len() as u64;
                let written = barrier.report(|lanes| lanes.written(lane, number, count), notify);
                assert_eq!(written, Ok(()));
            }
            Some(Frame::Mark(iteration)) => match barrier.pass(lane, iteration, notify) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => panic!("{error}"),
            },
            Some(Frame::End(chunks)) => {
                let ended = barrier.report(|lanes| lanes.ended(lane, chunks), notify);
                assert_eq!(ended, Ok(()));
                return true;
            }
        }
    }
}
