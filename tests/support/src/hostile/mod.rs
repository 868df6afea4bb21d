//! A peer that speaks the protocol and lies. After each lie, the tests check that the session has
//! ended and has left nothing behind, that the VM is on exactly one side, and that an honest
//! migration succeeds.

pub mod destination;

use std::fs;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::AtFault;
use dunlin::engine::vmm::{FaultCode, RunState};
use dunlin::engine::{Cancel, MigrateError, VmIs, source};
use dunlin_lane::data::DataSender;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_proto::control::{Accept, Final, Message};
use dunlin_proto::frame::Frame;

use crate::engine::peer::{Peer, SESSION, frame, lane_open, open_lane};
use crate::engine::{Receiving, TestBuilder, TestVm, impatient, send, tls, verified};

/// The maximum memory that a session may use in addition to the guest's memory (I8).
const PEAK_LIMIT_BYTES: u64 = 64 << 20;
/// How long a session may last after a lie. Sessions that end only at a silence limit last longer;
/// `hostile_silence.rs` tests the lies that lead to these sessions.
pub const END_LIMIT: Duration = Duration::from_secs(5);

/// Returns a guard that allows one lie at a time, because the costs of a lie are measured for the
/// whole process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The targets of the open file descriptors.
fn files() -> Vec<std::path::PathBuf> {
    let open = fs::read_dir("/proc/self/fd").unwrap();
    open.filter_map(|file| fs::read_link(file.unwrap().path()).ok())
        .collect()
}

/// The number of threads of this process.
pub fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// The number of the engine's threads.
pub fn engine_threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter(|task| {
            let comm = task.as_ref().unwrap().path().join("comm");
            // The thread may end before its name is read.
            fs::read_to_string(comm).is_ok_and(|name| name.starts_with("dunlin-"))
        })
        .count()
}

fn status_bytes(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// The resources that the process used before the peer lied.
pub struct Before {
    pub files: usize,
    pub threads: usize,
    pub resident_bytes: u64,
    pub began: Instant,
}

impl Before {
    pub fn now() -> Self {
        // Resets the peak of resident memory (proc_pid_clear_refs(5)).
        fs::write("/proc/self/clear_refs", "5").unwrap();
        Self {
            files: open_files(),
            threads: engine_threads(),
            resident_bytes: status_bytes("VmRSS:"),
            began: Instant::now(),
        }
    }

    /// How far the peak of resident memory exceeds its size before the lie.
    pub fn peak_bytes(&self) -> u64 {
        status_bytes("VmHWM:").saturating_sub(self.resident_bytes)
    }

    /// Asserts that the lie left no file descriptors or threads and that memory stayed within its
    /// limit. Prints the costs of the lie as a row of a table.
    pub fn settled(&self, row: &str) {
        let took = self.began.elapsed();
        let peak = self.peak_bytes();
        println!(
            "| {row} | {} ms | {:.1} MiB |",
            took.as_millis(),
            peak as f64 / f64::from(1 << 20)
        );
        assert!(
            peak < PEAK_LIMIT_BYTES,
            "{row}: the session used {peak} bytes (limit {PEAK_LIMIT_BYTES})"
        );
        let until = Instant::now() + Duration::from_secs(2);
        while open_files() > self.files || engine_threads() > self.threads {
            assert!(
                Instant::now() < until,
                "{row}: {} open files before, {:?} now; {} threads before, {} now",
                self.files,
                files(),
                self.threads,
                engine_threads()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Migrates a new VM between honest peers. Afterwards the VM runs at the destination behind
/// `listener`.
pub fn good_migration(listener: TcpListener, tls: (&ClientTls, &ServerTls)) {
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(64, Duration::from_micros(100));
    good_migration_of(&vm, listener, tls);
}

pub fn good_migration_of(
    vm: &std::sync::Arc<TestVm>,
    listener: TcpListener,
    (client, server): (&ClientTls, &ServerTls),
) {
    let options = impatient();
    let receiving = Receiving::on(listener, server, &options, TestBuilder::default());
    let to = receiving.address.to_string();
    let (report, _) = send(vm, &to, client, &verified(2), &Cancel::new());
    assert_eq!(report.unwrap().digests_equal, Some(true));
    let (received, builder, _) = receiving.finish(false);
    assert!(received.unwrap().runs);
    let there = builder.built.unwrap();
    assert_eq!(*there.state.lock().unwrap(), RunState::Running);
    assert_eq!(*vm.state.lock().unwrap(), RunState::Stopped("moved".into()));
}

/// How many times the engine has run this VM at the destination.
pub fn runs(vm: &TestVm) -> usize {
    vm.calls().iter().filter(|call| **call == "resume").count()
}

/// The error and its causes in one text.
pub fn with_causes(error: &MigrateError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// The destination to which a lying source connects.
pub struct Victim<'a> {
    pub to: SocketAddr,
    pub tls: &'a ClientTls,
}

impl Victim<'_> {
    /// A source that the destination has accepted, with one established lane.
    pub fn liar(&self) -> Liar<'_> {
        let (mut peer, accept) = Peer::accepted(self.to, self.tls);
        let lane = open_lane(
            self.to,
            Some(self.tls),
            &lane_open(SESSION, &accept.secret, 1),
        );
        assert_eq!(peer.receive(), Some(Message::LaneUp { lane: 1 }));
        Liar {
            peer,
            accept,
            lane: Some(lane),
            to: self.to,
            tls: self.tls,
        }
    }
}

/// A lying source that has established its first lane.
pub struct Liar<'a> {
    pub peer: Peer,
    pub accept: Accept,
    pub lane: Option<DataSender>,
    pub to: SocketAddr,
    pub tls: &'a ClientTls,
}

/// Connections that a liar keeps open until it has received the reply to its lie. If the liar
/// closed the lane earlier, the destination could report the lost lane instead of the lie.
pub struct Held {
    pub peer: Peer,
    pub lane: Option<DataSender>,
}

impl From<Peer> for Held {
    fn from(peer: Peer) -> Self {
        Self { peer, lane: None }
    }
}

impl From<Liar<'_>> for Held {
    fn from(liar: Liar<'_>) -> Self {
        Self {
            peer: liar.peer,
            lane: liar.lane,
        }
    }
}

impl Liar<'_> {
    /// Sends `bytes` on the lane. Returns false if the destination has closed the lane already.
    pub fn frame(&mut self, bytes: &[u8]) -> bool {
        self.lane
            .as_mut()
            .is_some_and(|lane| lane.send(bytes).is_ok())
    }

    pub fn end_lane(&mut self, chunks: u64) {
        self.frame(&frame(Frame::End { chunks }));
        if let Some(lane) = self.lane.take() {
            let _ = lane.finish();
        }
    }

    /// Ends the lane and sends *final*. Both messages contain the count `chunks`, and *final* also
    /// `pages`. Wrong counts make them lies.
    pub fn conclude(&mut self, chunks: u64, pages: u64) {
        self.end_lane(chunks);
        self.peer.send(&last(chunks, pages, 0));
    }

    /// Waits for *ready*.
    pub fn await_ready(&mut self) {
        let ready = self
            .peer
            .await_message(|message| !matches!(message, Message::Ack { .. }));
        assert_eq!(ready, Some(Message::Ready { digest: None }));
    }
}

pub fn last(chunks: u64, pages: u64, sections: u32) -> Message {
    Message::Final(Final {
        chunks,
        iteration: 1,
        sections,
        pages,
        fenced: 0,
        digest: None,
    })
}

/// The result of a lie to the destination: whether the VM runs there, and the builder.
pub type Outcome = (Result<bool, MigrateError>, TestBuilder);

/// Runs `lie` against a destination, and then an honest migration to the same listener. Returns how
/// the session with the lie ended.
pub fn lie_to_destination(row: &str, lie: impl FnOnce(&Victim<'_>)) -> Outcome {
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let again = listener.try_clone().unwrap();
    let before = Before::now();
    let options = impatient();
    let receiving = Receiving::on(listener, &server, &options, TestBuilder::default());
    let to = receiving.address;
    lie(&Victim { to, tls: &client });
    let lied = Instant::now();
    let (result, builder, _) = receiving.finish(false);
    assert!(
        lied.elapsed() < END_LIMIT,
        "{row}: the session did not end in time"
    );
    let result = result.map(|received| {
        // If the source has not released the VM, the destination answers inquiries as long as the
        // VM exists.
        if let Some(answering) = received.answering {
            answering.stop();
        }
        received.runs
    });
    before.settled(row);
    good_migration(again, (&client, &server));
    (result, builder)
}

/// Runs `lie` against a destination. The session must fail with `fault` and an error that contains
/// `text`. A VM that was built must be discarded without having run. The liar must receive a
/// *cancel* with `fault`, unless `fault` is the loss of a data lane or of the control lane.
pub fn refused_by_destination(
    row: &str,
    fault: FaultCode,
    text: &str,
    lie: impl FnOnce(&Victim<'_>) -> Held,
) {
    let _alone = alone();
    let mut reply = None;
    let (result, builder) = lie_to_destination(row, |victim| {
        let mut held = lie(victim);
        let socket = held.peer.stream.socket().try_clone().unwrap();
        let (done, waiting) = channel::<()>();
        // Close the connection at the limit, because a session that accepted the lie would never
        // end.
        let watch = thread::spawn(move || {
            if waiting.recv_timeout(END_LIMIT) == Err(RecvTimeoutError::Timeout) {
                let _ = socket.shutdown(Shutdown::Both);
            }
        });
        reply = held
            .peer
            .await_message(|message| matches!(message, Message::Cancel { .. }));
        drop(done);
        watch.join().unwrap();
    });
    let Err(error) = result else {
        panic!("{row}: the lie was accepted")
    };
    let said = with_causes(&error);
    assert_eq!((error.code(), error.vm), (fault, VmIs::AtSource), "{said}");
    assert!(said.contains(text), "{row}: {said}");
    assert!(
        ["the source", "the peer", "lane "]
            .iter()
            .any(|who| said.contains(who)),
        "{row}: the party at fault is not named: {said}"
    );
    if fault == FaultCode::Malformed {
        assert_eq!(error.at_fault(), AtFault::Peer, "{said}");
    }
    if let Some(vm) = builder.built {
        assert_eq!(
            vm.calls().last(),
            Some(&"discard"),
            "{row}: {:?}",
            vm.calls()
        );
        assert_eq!(runs(&vm), 0, "{row}");
    }
    if let Some(Message::Cancel { fault: code, .. }) = reply {
        assert_eq!(code, fault, "{row}");
    } else {
        assert!(
            matches!(fault, FaultCode::LaneLost | FaultCode::ControlLost),
            "{row}: the source received no answer"
        );
    }
}

/// Migrates a running VM to a lying destination, which executes `lie`. The source must fail with
/// `fault` and an error that contains `text`, and report that the VM is at `at`. A VM that is still
/// at the source keeps running, and its next migration, to an honest destination, succeeds.
pub fn refused_by_source(
    row: &str,
    (fault, at, text): (FaultCode, VmIs, &str),
    options: &source::Options,
    lie: impl FnOnce(&TcpListener, &ServerTls) + Send,
) {
    let _alone = alone();
    let (client, server) = tls();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let before = Before::now();
    let vm = TestVm::new(4 << 20);
    vm.fill(1 << 20);
    vm.start(64, Duration::from_micros(100));
    let error = thread::scope(|scope| {
        let liar = scope.spawn(|| lie(&listener, &server));
        let cancel = Cancel::new();
        let (done, waiting) = channel::<()>();
        let also = cancel.clone();
        // Cancel the migration at the limit, because a session that accepted the lie would never
        // end.
        scope.spawn(move || {
            if waiting.recv_timeout(END_LIMIT) == Err(RecvTimeoutError::Timeout) {
                also.cancel();
            }
        });
        let error = send(&vm, &to, &client, options, &cancel).0.unwrap_err();
        drop(done);
        assert!(
            before.began.elapsed() < END_LIMIT,
            "{row}: the session did not end in time"
        );
        liar.join().unwrap();
        error
    });
    let said = with_causes(&error);
    assert_eq!((error.code(), error.vm), (fault, at), "{said}");
    assert!(said.contains(text), "{row}: {said}");
    assert!(
        ["the destination", "the peer", "lane "].iter().any(|who| said.contains(who))
            || error.at_fault() == AtFault::Peer
            // Two faults need not name the peer. A failed verification does not show which side's
            // memory is wrong. For `GuestPoweredOff` the tests let the peer send the error's text.
            || matches!(
                fault,
                FaultCode::VerificationFailed | FaultCode::GuestPoweredOff
            ),
        "{row}: the party at fault is not named: {said}"
    );
    if fault == FaultCode::Malformed {
        assert_eq!(error.at_fault(), AtFault::Peer, "{said}");
    }
    assert!(
        !vm.calls().contains(&"destroy"),
        "{row}: the source destroyed its copy"
    );
    if at == VmIs::AtSource {
        assert!(vm.goes_on(), "{row}: the guest does not run");
        before.settled(row);
        good_migration_of(&vm, listener, (&client, &server));
    } else {
        // The VM possibly runs at the destination, so it stays paused at the source.
        assert_eq!(*vm.state.lock().unwrap(), RunState::Paused, "{row}");
        before.settled(row);
        good_migration(listener, (&client, &server));
    }
}
