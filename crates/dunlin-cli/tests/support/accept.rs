//! A `dunlin handoff accept`, and who stands before it and behind it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::fdpass;
use serde_json::Value;

use super::support::process::Process;
use super::support::{Hosts, words};

/// Nothing that a test waits for takes longer.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Identities `a` and `b`, a socket at which `own.test` is taken, and a server for all others.
pub struct Scene {
    pub hosts: Hosts,
    pub taker: UnixListener,
    pub old: TcpListener,
}

/// A delivered socket, and the line that came with it.
pub struct Handed {
    pub line: Value,
    pub socket: TcpStream,
}

/// Whether sockets of this host can have TLS from the kernel.
pub fn kernel_has_tls() -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    dunlin_linux::ktls::attach(&stream).is_ok()
}

impl Scene {
    pub fn new() -> Self {
        let hosts = Hosts::new();
        hosts.issue("ca", "own", "own.test", 1);
        hosts.issue("ca", "old", "old.test", 1);
        Self {
            taker: UnixListener::bind(hosts.scratch.join("taker")).unwrap(),
            old: TcpListener::bind("127.0.0.1:0").unwrap(),
            hosts,
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.hosts.scratch.join(name)
    }

    pub fn command(&self, listen: &str, more: &str) -> Command {
        let mut command = words("handoff accept --sni own.test --listen");
        command
            .arg(listen)
            .arg("--to")
            .arg(format!("unix:{}", self.path("taker").display()))
            .arg("--identity")
            .arg(self.path("own"))
            .args(more.split_whitespace());
        command
    }

    /// With the server behind it.
    pub fn start(&self, more: &str) -> Accept {
        let old = self.old.local_addr().unwrap();
        self.start_alone(&format!("--else tcp:{old} {more}"))
    }

    pub fn start_alone(&self, more: &str) -> Accept {
        let process = Process::start(self.command("127.0.0.1:0", more));
        let line = process.wait_for("listening on ");
        let address = line.strip_prefix("listening on ").unwrap().to_owned();
        Accept { process, address }
    }

    /// The next client of the server behind.
    pub fn client_of_old(&self) -> TcpStream {
        accepted(&self.old)
    }

    /// The next socket that is delivered.
    pub fn take(&self) -> Handed {
        let (line, socket) = self.taken();
        let line = line.strip_suffix(b"\n").expect("a whole line");
        let socket = TcpStream::from(socket.expect("a socket comes with the line"));
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Handed {
            line: serde_json::from_slice(line).unwrap(),
            socket,
        }
    }

    /// The bytes of the next connection to the taker, and the socket that comes with them, if any.
    fn taken(&self) -> (Vec<u8>, Option<OwnedFd>) {
        self.taker.set_nonblocking(true).unwrap();
        let from = until(|| self.taker.accept()).0;
        from.set_nonblocking(false).unwrap();
        from.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut line = Vec::new();
        let mut sockets: Vec<OwnedFd> = Vec::new();
        loop {
            let mut part = [0; 4096];
            let came = fdpass::receive(&from, &mut part).unwrap();
            sockets.extend(came.descriptors);
            line.extend_from_slice(&part[..came.bytes]);
            if came.bytes == 0 {
                break;
            }
        }
        assert!(sockets.len() <= 1);
        (line, sockets.pop())
    }

    /// A client of `own.test` completes its handshake: its socket is delivered, carries a line each
    /// way, and what was said of it is returned. Without kernel TLS the handshake is completed and
    /// checked all the same; then the client gets an alert, the log the reason, and the taker nothing.
    /// The delivery is tested in `tests/kernel` then.
    pub fn delivers(&self, accept: &Accept, client: &mut Process) -> Option<Value> {
        if !kernel_has_tls() {
            let why = accept.process.wait_for("for own.test is refused");
            assert!(why.contains("this kernel has no TLS"), "{why}");
            client.wait_for("alert internal error");
            let (line, socket) = self.taken();
            assert!(line.is_empty() && socket.is_none(), "{line:?}");
            return None;
        }
        let mut handed = self.take();
        client.say("to a program without TLS\n");
        let mut came = [0; 25];
        handed.socket.read_exact(&mut came).unwrap();
        assert_eq!(&came, b"to a program without TLS\n");
        handed.socket.write_all(b"and back\n").unwrap();
        client.wait_for("and back");
        Some(handed.line)
    }

    /// OpenSSL's client, with a name that it wants.
    pub fn client(&self, port: &str, name: &str, more: &str) -> Process {
        let mut command = Command::new("openssl");
        command
            .args(["s_client", "-quiet", "-no_ign_eof", "-connect", port])
            .args(more.split_whitespace())
            .arg("-CAfile")
            .arg(self.path("own").join("ca-cert.pem"))
            .args(["-verify_return_error"]);
        match name {
            "" => command.arg("-noservername"),
            name => command.args(["-servername", name, "-verify_hostname", name]),
        };
        Process::start(command)
    }
}

/// The process, and where it listens.
pub struct Accept {
    pub process: Process,
    pub address: String,
}

impl Accept {
    pub fn connect(&self) -> TcpStream {
        patient(TcpStream::connect(&self.address).unwrap())
    }

    /// Descriptors and threads.
    pub fn held(&self) -> (usize, usize) {
        let of = |what: &str| {
            let pid = self.process.child.id();
            fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count()
        };
        (of("fd"), of("task"))
    }

    /// Waits until it holds what it held.
    pub fn settles(&self, before: (usize, usize)) {
        let until = Instant::now() + PATIENCE;
        while self.held() != before {
            let held = self.held();
            assert!(
                Instant::now() < until,
                "{held:?} are held and not {before:?}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The time that its threads have spent on a processor, without those that have ended.
    pub fn spent(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.child.id())).unwrap();
        let of = |task: std::io::Result<fs::DirEntry>| -> Option<u64> {
            // A thread may end while the others are asked.
            let text = fs::read_to_string(task.unwrap().path().join("schedstat")).ok()?;
            Some(text.split_whitespace().next()?.parse().unwrap())
        };
        Duration::from_nanos(tasks.filter_map(of).sum())
    }
}

pub fn patient(stream: TcpStream) -> TcpStream {
    stream.set_nonblocking(false).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The next who connects.
pub fn accepted(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    patient(until(|| listener.accept()).0)
}

pub fn until<T>(mut accept: impl FnMut() -> std::io::Result<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        match accept() {
            Ok(came) => return came,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < until, "nobody comes");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a program is there; in CI it must be.
pub fn is_here(program: &str) -> bool {
    let found = Command::new(program)
        .arg("version")
        .stdin(Stdio::null())
        .output();
    match found {
        Ok(_) => true,
        Err(error) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => {
            panic!("CI must have {program}: {error}")
        }
        Err(error) => {
            println!("not tested, no {program}: {error}");
            false
        }
    }
}

/// The records of a ClientHello that OpenSSL sends for a name.
pub fn real_hello(scene: &Scene, name: &str, more: &str) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().to_string();
    let _client = scene.client(&port, name, more);
    let mut stream = accepted(&listener);
    let mut header = [0; 5];
    stream.read_exact(&mut header).unwrap();
    let mut bytes = header.to_vec();
    bytes.resize(
        5 + usize::from(u16::from_be_bytes([header[3], header[4]])),
        0,
    );
    stream.read_exact(&mut bytes[5..]).unwrap();
    bytes
}

/// The same message in records of so many bytes.
pub fn cut(hello: &[u8], size: usize) -> Vec<u8> {
    let mut records = Vec::new();
    for part in hello[5..].chunks(size) {
        records.extend_from_slice(&hello[..3]);
        records.extend((part.len() as u16).to_be_bytes());
        records.extend_from_slice(part);
    }
    records
}
