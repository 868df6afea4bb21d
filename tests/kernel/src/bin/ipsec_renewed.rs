//! Under load, a session renews its keys, ends and starts again; no connection breaks.
//! The session's process delays each change to the kernel's tables, so that each intermediate state
//! lasts for a while. No data is sent in the clear.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use dunlin::lane::dial::DialCancel;
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::peers::Peer;
use dunlin::lane::provider::Crypto;
use dunlin_ipsec::{Mode, Observer, Options, PortRange, Session, up};
use dunlin_kernel_tests::ipsec::tap::Tap;
use dunlin_kernel_tests::sessions::{
    AT, LIMIT, NAME, PORTS, Process, SERVER, associations, connect, connect_to, credentials, empty,
    inside, netns, nothing_left, status, until,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_linux::affinity::pin_to;
use dunlin_linux::socket::set_reset_on_close;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2"],
    dunlin: true,
    limit_seconds: 300,
    under: Under::Newest,
    ..Needs::NOTHING
};

/// The argument with which this program acts as the process of the session.
const SLOWLY: &str = "--slowly";
/// How long each intermediate state lasts.
const STEP: Duration = Duration::from_millis(50);
const CONNECTIONS: usize = 4;
/// The size in bytes of a piece that is written and read. Each byte of a piece is the number of the
/// piece.
const PIECE: usize = 4096;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, word, mode] = &arguments[..]
        && word == SLOWLY
    {
        return slowly(mode);
    }
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        let tap = Tap::begin();
        let serve = Process::serve_with(&["--quiet-wait", "1s"]);
        i6_nothing_is_in_the_clear_and_no_connection_breaks(guest, "connection");
        if guest.is_soak() {
            i6_nothing_is_in_the_clear_and_no_connection_breaks(guest, "cpu");
        }
        serve.end(guest);
        let left = tap.end();
        assert!(left.is_sealed(&(4444..=4447)), "{left:?}");
        assert!(left.sealed.values().sum::<u64>() > 1000, "{left:?}");
    })
}

fn i6_nothing_is_in_the_clear_and_no_connection_breaks(guest: &Guest, mode: &str) {
    let mut session = Slow::begin(mode);
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let connections: Vec<_> = (0..CONNECTIONS)
        .map(|cpu| {
            let near = inside("a", || {
                pin_to(cpu).expect("the machine has four CPUs");
                connect_to(AT)
            });
            (
                near.expect("a connects"),
                listener.accept().expect("b accepts").0,
            )
        })
        .collect();
    let load = Load::default();
    thread::scope(|scope| {
        for (near, far) in &connections {
            // Without a reset on close, unsent bytes could keep the ports blocked for minutes.
            set_reset_on_close(near).expect("the socket is connected");
            set_reset_on_close(far).expect("the socket is connected");
            scope.spawn(|| load.write(near));
            scope.spawn(|| load.read(far));
        }
        let _ending = Ending(&load, &connections);
        load.continues();
        for epoch in 2..4 {
            session.command("rekey");
            guest.command("dunlin", &status("b", &["--rekey"]));
            load.continues();
            // The SAs of host b include its inbound SAs, so they show the epochs of both
            // directions.
            until("new keys", || {
                let all = associations(guest, "b");
                all.iter().all(|one| one["epoch"] == epoch)
            });
            load.continues();
        }
        // The end of the session begins with changes to the kernel's tables that block the ports.
        // The connections then stall and wait.
        session.command("end");
        until("no data arrives", || {
            let before = load.read.load(Ordering::SeqCst);
            // Ten changes take this long. If nothing arrives in this time, the connections stall.
            thread::sleep(Duration::from_millis(500));
            load.read.load(Ordering::SeqCst) == before
        });
        session.await_line("ended");
        println!("{} changes", session.changes);
        session.over();
        // The next session adopts the blocked ports, and the connections continue.
        let mut session = Slow::begin(mode);
        load.continues();
        session.command("end");
        session.await_line("ended");
        assert_eq!(
            load.broken.load(Ordering::SeqCst),
            0,
            "connections broke instead of waiting"
        );
        session.over();
    });
    println!("{} pieces", load.read.load(Ordering::SeqCst));
    drop((connections, listener));
    until("the ports are free", || {
        for host in ["a", "b"] {
            let folder = format!("state-{host}");
            let clean = ["dunlin", "ipsec", "clean", "--state-dir", &folder];
            guest.command("ip", &netns(host, &clean));
        }
        empty(guest, "a") && empty(guest, "b")
    });
    nothing_left(guest);
}

/// The state of the load, for all connections together.
#[derive(Default)]
struct Load {
    done: AtomicBool,
    read: AtomicU64,
    broken: AtomicUsize,
}

impl Load {
    fn write(&self, mut near: &TcpStream) {
        for number in 0_u64.. {
            if self.done.load(Ordering::SeqCst) {
                return;
            }
            if let Err(error) = near.write_all(&[number as u8; PIECE]) {
                self.ended(&error.to_string());
                return;
            }
        }
    }

    fn read(&self, mut far: &TcpStream) {
        let mut piece = [0; PIECE];
        for number in 0_u64.. {
            if let Err(error) = far.read_exact(&mut piece) {
                self.ended(&error.to_string());
                return;
            }
            assert!(piece == [number as u8; PIECE], "the received data differs");
            self.read.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn ended(&self, why: &str) {
        if !self.done.load(Ordering::SeqCst) {
            println!("a connection broke: {why}");
            self.broken.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits until many additional pieces have arrived.
    fn continues(&self) {
        let before = self.read.load(Ordering::SeqCst);
        until("the load continues", || {
            assert_eq!(self.broken.load(Ordering::SeqCst), 0);
            self.read.load(Ordering::SeqCst) > before + 100
        });
    }
}

/// Ends the load when the test ends, even if the test panics.
struct Ending<'a>(&'a Load, &'a [(TcpStream, TcpStream)]);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::SeqCst);
        for (near, far) in self.1 {
            let _ = near.shutdown(std::net::Shutdown::Both);
            let _ = far.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The process of the session, which runs on host a.
struct Slow {
    child: Child,
    commands: ChildStdin,
    output: BufReader<ChildStdout>,
    changes: usize,
}

impl Slow {
    fn begin(mode: &str) -> Self {
        let mut child = Command::new("ip")
            .args(netns("a", &[]))
            .arg(std::env::current_exe().expect("proc is mounted"))
            .args([SLOWLY, mode])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ip starts");
        let commands = child.stdin.take().expect("the stream is piped");
        let output = BufReader::new(child.stdout.take().expect("the stream is piped"));
        let mut slow = Self {
            child,
            commands,
            output,
            changes: 0,
        };
        slow.await_line("up");
        slow
    }

    fn command(&mut self, what: &str) {
        writeln!(self.commands, "{what}").expect("the process reads its commands");
    }

    /// Reads lines up to the line `words`. Every other line reports a change to the kernel's
    /// tables.
    fn await_line(&mut self, words: &str) {
        loop {
            let mut line = String::new();
            let read = self
                .output
                .read_line(&mut line)
                .expect("the output is text");
            assert!(read > 0, "the process ended before the line {words:?}");
            if line.trim_end() == words {
                return;
            }
            self.changes += 1;
        }
    }

    fn over(mut self) {
        drop(self.commands);
        assert!(self.child.wait().expect("the process ends").success());
    }
}

/// The main function of the session's process. The process delays each change to the kernel's
/// tables, and is controlled by commands.
fn slowly(mode: &str) -> ExitCode {
    let load = Identity::load(Path::new("host-a"), LoadOptions::default());
    let (identity, _) = load.expect("`dunlin pki` created it");
    let peers = [NAME.parse::<Peer>().expect("a name")]
        .into_iter()
        .collect();
    let tls = identity
        .client(&Crypto::auto(), peers)
        .expect("the settings are valid");
    let ports: PortRange = PORTS.parse().expect("ports");
    let mode = match mode {
        "cpu" => Mode::Cpu,
        _ => Mode::Connection,
    };
    let mut options = Options::new(mode, ports, Path::new("state-a").join("ipsec"));
    options.cpus = (0..4).collect();
    options.timeout = LIMIT;
    options.quiet_wait = Duration::from_secs(1);
    options.before_change = Some(Arc::new(|change| {
        println!("{change:?}");
        thread::sleep(STEP);
    }));
    let observer: Observer = Arc::new(|event: &dunlin_ipsec::Event| eprintln!("{event}"));
    let never = DialCancel::new().expect("an eventfd");
    let session: Session =
        up(SERVER, &tls, &options, &observer, &never).expect("the session comes up");
    println!("up");
    for line in std::io::stdin().lines() {
        match line.expect("the input is text").as_str() {
            "rekey" => session.rekey(),
            "end" => {
                session.end();
                break;
            }
            other => panic!("unknown command {other:?}"),
        }
    }
    session.wait().expect("the session ends without an error");
    println!("ended");
    ExitCode::SUCCESS
}
