//! A `dunlin handoff accept` with its clients, its receiver and its server.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::fdpass;
use dunlin_test_base::sockets::{TIMEOUT, accepted, with_timeout};
use serde_json::Value;

use super::support::process::Process;
use super::support::{Hosts, kernel_has_tls, words};

/// The identity `own` of `dunlin handoff accept`, further identities for clients and servers, a
/// receiver of the sockets for `own.test`, and a server for all other names.
pub struct Scene {
    pub hosts: Hosts,
    pub taker: UnixListener,
    pub old: TcpListener,
}

/// A delivered socket, and the line of JSON that describes it.
pub struct Handed {
    pub line: Value,
    pub socket: TcpStream,
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

    /// Starts `dunlin handoff accept` with a server for other names.
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

    /// The next connection to the server for other names.
    pub fn client_of_old(&self) -> TcpStream {
        accepted(&self.old)
    }

    /// The next delivered socket.
    pub fn take(&self) -> Handed {
        let (line, socket) = self.taken();
        let line = line.strip_suffix(b"\n").expect("the line is incomplete");
        let socket = TcpStream::from(socket.expect("no socket came with the line"));
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        Handed {
            line: serde_json::from_slice(line).unwrap(),
            socket,
        }
    }

    /// Returns the bytes of the next connection to the receiver, and the socket attached to them,
    /// if there is one.
    fn taken(&self) -> (Vec<u8>, Option<OwnedFd>) {
        let from = accepted(&self.taker);
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

    /// Checks that a client of `own.test` completes its handshake, and that its socket is delivered
    /// and carries a line each way; returns the socket's description. On a kernel without TLS,
    /// checks instead that the client gets an alert after its handshake, that the log states the
    /// reason, and that the receiver gets nothing. `tests/kernel` tests the delivery in any case.
    pub fn delivers(&self, accept: &Accept, client: &mut Process) -> Option<Value> {
        if !kernel_has_tls() {
            let why = accept.process.wait_for("fault=kernel name=own.test");
            assert!(why.contains("modprobe tls"), "{why}");
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

    /// OpenSSL's client, with a server name.
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

/// A running `dunlin handoff accept`, and its address.
pub struct Accept {
    pub process: Process,
    pub address: String,
}

impl Accept {
    pub fn connect(&self) -> TcpStream {
        with_timeout(TcpStream::connect(&self.address).unwrap())
    }

    /// The numbers of open descriptors and of threads.
    pub fn held(&self) -> (usize, usize) {
        let of = |what: &str| {
            let pid = self.process.child.id();
            fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count()
        };
        (of("fd"), of("task"))
    }

    /// Waits until the process has as many descriptors and threads as `before`.
    pub fn settles(&self, before: (usize, usize)) {
        let until = Instant::now() + TIMEOUT;
        while self.held() != before {
            let held = self.held();
            assert!(
                Instant::now() < until,
                "{held:?} held instead of {before:?}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The CPU time of the process's current threads.
    pub fn spent(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.child.id())).unwrap();
        let of = |task: std::io::Result<fs::DirEntry>| -> Option<u64> {
            // A thread may end during the loop.
            let text = fs::read_to_string(task.unwrap().path().join("schedstat")).ok()?;
            Some(text.split_whitespace().next()?.parse().unwrap())
        };
        Duration::from_nanos(tasks.filter_map(of).sum())
    }
}

/// The record of OpenSSL's ClientHello for a name.
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

/// Splits the message in `hello` into records of `size` bytes.
pub fn cut(hello: &[u8], size: usize) -> Vec<u8> {
    let mut records = Vec::new();
    for part in hello[5..].chunks(size) {
        records.extend_from_slice(&hello[..3]);
        records.extend((part.len() as u16).to_be_bytes());
        records.extend_from_slice(part);
    }
    records
}
