//! Shared by the command's tests: certificates, and processes that end with their test.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod process;

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

pub use dunlin_test_base::Scratch;
use rcgen::{CertificateParams, Issuer, KeyPair};
use serde_json::Value;
use time::OffsetDateTime;

/// Longer than anything that a test waits for.
const LIMIT: Duration = Duration::from_secs(60);

thread_local! {
    /// The command under test, if it is not the current build.
    static BINARY: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// While `make` runs, commands that this thread creates run `binary`.
pub fn with_binary<R>(binary: &Path, make: impl FnOnce() -> R) -> R {
    let before = BINARY.replace(Some(binary.to_owned()));
    let made = make();
    BINARY.set(before);
    made
}

pub fn dunlin<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let binary = BINARY.with_borrow(Clone::clone);
    let mut command = Command::new(binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_dunlin").into()));
    command.args(args).env_remove("RUNTIME_DIRECTORY");
    command
}

/// A command from the words of a command line. Add a path, which may contain spaces, with
/// [`Command::arg`].
pub fn words(line: &str) -> Command {
    dunlin(line.split_whitespace())
}

/// The exit code and output of a command.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Done {
    /// Every line of standard output as an object.
    pub fn lines(&self) -> Vec<Value> {
        self.out.lines().map(parse).collect()
    }

    /// The last line of standard output as an object.
    pub fn last(&self) -> Value {
        self.lines()
            .pop()
            .unwrap_or_else(|| panic!("no line: {self:?}"))
    }

    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}\n{}", self.out, self.err);
        self
    }

    /// The fault code at the end of standard error; empty if the error has none.
    pub fn fault(&self) -> &str {
        fault_in(&self.err)
    }
}

/// The fault code at the end of an error; empty if the error has none.
pub fn fault_in(error: &str) -> &str {
    let end = error.trim_end().strip_suffix(']').unwrap_or("");
    end.rsplit_once(" [").map_or("", |(_, code)| code)
}

fn parse(line: &str) -> Value {
    let value: Value =
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line:?}"));
    assert!(value.is_object(), "{line}");
    value
}

/// Asserts that a migration failed with this fault code and party at fault, and that the VM is at
/// the source.
pub fn assert_at_source(failed: &Value, fault: &str, at_fault: &str) {
    let fields = ["event", "fault", "at_fault", "vm"].map(|field| &failed[field]);
    assert_eq!(fields, ["failed", fault, at_fault, "at-source"], "{failed}");
}

/// Runs a command to its end.
pub fn finish(mut command: Command) -> Done {
    let mut child = Guard(
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let reader = |mut from: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut text = String::new();
            from.read_to_string(&mut text).unwrap();
            text
        })
    };
    let out = reader(Box::new(child.0.stdout.take().unwrap()));
    let err = reader(Box::new(child.0.stderr.take().unwrap()));
    let code = child.wait();
    Done {
        code,
        out: out.join().unwrap(),
        err: err.join().unwrap(),
    }
}

/// Runs a command with this standard input.
pub fn finish_with(mut command: Command, stdin: UnixStream) -> Done {
    let done = command.stdin(OwnedFd::from(stdin)).output().unwrap();
    // Drop the command, because it owns the other end of the socket and would keep it open.
    drop(command);
    Done {
        code: done.status.code().unwrap(),
        out: String::from_utf8(done.stdout).unwrap(),
        err: String::from_utf8(done.stderr).unwrap(),
    }
}

/// Runs a command that reads `input`.
pub fn feed(command: Command, input: Vec<u8>) -> Done {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let feeder = thread::spawn(move || {
        // A command that fails may end without reading its input.
        let _ = ours.write_all(&input);
    });
    let done = finish_with(command, theirs);
    feeder.join().unwrap();
    done
}

/// Whether this host's kernel supports TLS on sockets. Some tests need a kernel without it.
pub fn kernel_has_tls() -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let has = dunlin_linux::ktls::attach(&stream).is_ok();
    if has {
        println!("this kernel has TLS; `cargo xtask kernel --suite tls` tests a kernel without it");
    }
    has
}

/// Runs a command that must succeed; returns its output.
pub fn succeed(command: Command) -> String {
    finish(command).expect(0).out
}

/// A child that is killed on drop.
struct Guard(Child);

impl Guard {
    /// Waits until the command ends; returns the exit code.
    fn wait(&mut self) -> i32 {
        process::exit_code(&mut self.0).unwrap_or(-1)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that runs alongside the test and prints JSON lines.
pub struct Process {
    child: Guard,
    lines: Receiver<String>,
    /// The process's listen address, if any.
    pub address: String,
    /// The process's control directory.
    pub control: PathBuf,
}

impl Process {
    pub fn start(mut command: Command, control: &Path) -> Self {
        command
            .arg("--control")
            .arg(control)
            .arg("--state-dir")
            .arg(control.parent().unwrap().join("state"));
        Self::follow(command, control)
    }

    /// Starts a command that already names its control directory.
    pub fn follow(mut command: Command, control: &Path) -> Self {
        let mut child = command
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child: Guard(child),
            lines,
            address: String::new(),
            control: control.to_owned(),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Waits for an event; skips those before it.
    pub fn wait_for(&self, event: &str) -> Value {
        self.wait_for_any(&[event])
    }

    /// Waits until one of several events occurs.
    pub fn wait_for_any(&self, events: &[&str]) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    let line = parse(&line);
                    if events.iter().any(|event| line["event"] == *event) {
                        return line;
                    }
                    assert_ne!(
                        line["event"], "ended",
                        "while waiting for {events:?}: {line}"
                    );
                }
                Err(RecvTimeoutError::Timeout) => panic!("no {events:?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the process ended before {events:?}")
                }
            }
        }
    }

    /// Sends a signal to the process, such as `INT`.
    pub fn signal(&self, name: &str) {
        assert!(kill(self.pid(), name), "cannot send SIG{name}");
    }

    /// Waits for the process to end by itself; returns its exit code and last line.
    pub fn ended(mut self) -> (i32, Value) {
        let code = self.child.wait();
        let last = self.lines.iter().map(|line| parse(&line)).last();
        (code, last.expect("the process printed no line"))
    }

    /// Waits for the process to end; returns its exit code.
    pub fn code(mut self) -> i32 {
        self.child.wait()
    }

    pub fn kill(mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }
}

/// Two hosts, `a.test` and `b.test`, with certificates from one authority. One directory has the
/// files of both.
pub struct Hosts {
    pub scratch: Scratch,
}

impl Hosts {
    pub fn new() -> Self {
        let scratch = Scratch::new();
        let hosts = Self { scratch };
        hosts.authority("ca");
        hosts.issue("ca", "a", "a.test", 1);
        hosts.issue("ca", "b", "b.test", 1);
        hosts
    }

    pub fn authority(&self, name: &str) {
        let mut command = words("pki init");
        command.arg(self.scratch.join(name));
        succeed(command);
    }

    pub fn issue(&self, authority: &str, directory: &str, name: &str, days: u32) {
        let mut command = words("pki issue --ca");
        command
            .arg(self.scratch.join(authority))
            .args(["--name", name, "--days", &days.to_string()])
            .arg(self.scratch.join(directory));
        succeed(command);
    }

    /// Issues an identity that expires after `valid`, with a precision of one second. The authority
    /// `ca` signs it. Returns a time at which the identity has certainly expired.
    pub fn issue_for(&self, directory: &str, name: &str, valid: Duration) -> Instant {
        let expired = Instant::now() + valid + Duration::from_secs(1);
        self.issue_until(directory, name, OffsetDateTime::now_utc() + valid);
        expired
    }

    /// Issues an identity that has already expired. The authority `ca` signs it.
    pub fn issue_expired(&self, directory: &str, name: &str) {
        let expired = OffsetDateTime::now_utc() - Duration::from_secs(10);
        self.issue_until(directory, name, expired);
    }

    fn issue_until(&self, directory: &str, name: &str, not_after: OffsetDateTime) {
        let (ca, host) = (self.scratch.join("ca"), self.scratch.join(directory));
        let authority = fs::read_to_string(ca.join("ca-cert.pem")).unwrap();
        let key = fs::read_to_string(ca.join("ca-key.pem")).unwrap();
        let issuer =
            Issuer::from_ca_cert_pem(&authority, KeyPair::from_pem(&key).unwrap()).unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = not_after - Duration::from_secs(600);
        params.not_after = not_after;
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        fs::create_dir(&host).unwrap();
        fs::write(host.join("ca-cert.pem"), authority).unwrap();
        fs::write(host.join("cert.pem"), certificate.pem()).unwrap();
        fs::write(host.join("key.pem"), key.serialize_pem()).unwrap();
        fs::set_permissions(host.join("key.pem"), PermissionsExt::from_mode(0o600)).unwrap();
    }

    /// A running VM named `vm`, with further flags.
    pub fn run(&self, control: &str, flags: &str) -> Process {
        let command = words(&format!("vm run --name vm {flags}"));
        let process = Process::start(command, &self.scratch.join(control));
        process.wait_for("started");
        process
    }

    /// A process that waits for a VM, with the given identity and further flags.
    pub fn receive(&self, identity: &str, control: &str, flags: &str) -> Process {
        let mut command = words(&format!("vm receive --listen 127.0.0.1:0 {flags}"));
        command.arg("--identity").arg(self.scratch.join(identity));
        let mut process = Process::start(command, &self.scratch.join(control));
        let listening = process.wait_for("listening");
        process.address = listening["address"].as_str().unwrap().to_owned();
        process
    }

    /// `dunlin vm migrate`, not started.
    pub fn migrate(&self, from: &Process, to: &Process, identity: &str, flags: &str) -> Command {
        let mut command = words(&format!("vm migrate --name vm {flags}"));
        command
            .args(["--to", &to.address])
            .arg("--identity")
            .arg(self.scratch.join(identity))
            .arg("--control")
            .arg(&from.control);
        command
    }

    pub fn status(&self, of: &Process) -> Value {
        let mut command = words("vm status --name vm --json --control");
        command.arg(&of.control);
        parse(succeed(command).trim())
    }

    /// `dunlin vm migrate`, started.
    pub fn begin(&self, from: &Process, to: &Process, identity: &str, flags: &str) -> Process {
        let migrate = self.migrate(from, to, identity, flags);
        Process::follow(migrate, &from.control)
    }

    /// `dunlin cancel` for the VM of a process.
    pub fn cancel(&self, of: &Process) -> Done {
        let mut command = words("cancel --vm");
        command.arg(of.control.join("vm.sock"));
        finish(command)
    }

    pub fn ask(&self, of: &Process, what: &str) -> Done {
        let mut command = words(&format!("vm ask --name vm {what} --control"));
        command.arg(&of.control);
        finish(command)
    }

    /// Asserts that the guest runs and makes progress.
    pub fn assert_runs(&self, at: &Process) {
        let before = self.status(at);
        assert_eq!(before["state"], "running", "{before}");
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = self.status(at);
            assert_eq!(now["state"], "running", "{now}");
            if now["pages_checked"].as_u64() > before["pages_checked"].as_u64() {
                return;
            }
            assert!(Instant::now() < deadline, "the guest makes no progress");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whether a process exists and has a thread that has not ended.
pub fn lives(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let state = stat.rsplit(')').next().unwrap_or("").trim_start();
    // A zombie with other live threads still holds the process's descriptors.
    let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    !state.starts_with('Z') || threads > 1
}

/// The children of `pid`.
pub fn children(pid: u32) -> Vec<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .map(|child| child.parse().unwrap())
        .collect()
}

/// Sends a signal with the shell's own `kill`, because a minimal Debian has no program `kill`;
/// returns whether the process existed.
pub fn kill(pid: u32, signal: &str) -> bool {
    let line = format!("kill -s {signal} {pid}");
    let mut shell = Command::new("sh");
    shell.args(["-c", &line]).status().unwrap().success()
}

/// Processes that end by themselves if the test passes. If the test fails, they are killed when it
/// ends.
pub struct Orphans(pub Vec<u32>);

impl Drop for Orphans {
    fn drop(&mut self) {
        for pid in self.0.iter().filter(|pid| lives(**pid)) {
            kill(*pid, "KILL");
        }
    }
}
