//! A toolstack's side of the hand-off: a pool's certificates, a stunnel configured like xapi's, and
//! a caller that receives sockets.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use dunlin_linux::fdpass;
use dunlin_test_base::sockets::TIMEOUT;

use crate::support::process::Process;
use crate::support::{Done, Scratch, dunlin, finish_with};

/// The ciphers that xenopsd asks for.
pub const CIPHERS: &str = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256";
pub const CURVES: &str = "secp384r1";

/// A directory with certificates.
pub struct Pool {
    pub scratch: Scratch,
}

impl Pool {
    /// Creates self-signed certificates of two hosts, `pool.pem` and `other.pem`. They contain no
    /// name that a client checks.
    pub fn new() -> Self {
        let pool = Self {
            scratch: Scratch::new(),
        };
        pool.self_signed("pool", &[], "openssl");
        pool.self_signed("other", &[], "openssl");
        pool
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// Creates a self-signed certificate in `NAME.pem`, and its key in `NAME.key`. `openssl` is the
    /// program to run, with a wrapper in front of it if necessary.
    pub fn self_signed(&self, name: &str, more: &[&str], openssl: &str) {
        let mut words = openssl.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .args("req -x509 -newkey rsa:2048 -nodes -batch -days 30".split(' '))
            .args(["-subj", &format!("/CN=0b5d2c1e-{name}")])
            .args(more)
            .arg("-keyout")
            .arg(self.path(&format!("{name}.key")))
            .arg("-out")
            .arg(self.path(&format!("{name}.pem")));
        run(command);
    }

    /// Creates a certificate in `NAME.pem` that the authority in `AUTHORITY.pem` has signed, and
    /// its key in `NAME.key`.
    pub fn issued(&self, name: &str, authority: &str) {
        let request = self.path(&format!("{name}.csr"));
        let mut command = Command::new("openssl");
        command
            .args("req -new -newkey rsa:2048 -nodes -batch".split(' '))
            .args(["-subj", &format!("/CN={name}")])
            .arg("-keyout")
            .arg(self.path(&format!("{name}.key")))
            .arg("-out")
            .arg(&request);
        run(command);
        // Without an extension OpenSSL would issue a certificate of version 1.
        let extensions = self.path("issued.cnf");
        fs::write(&extensions, "basicConstraints = CA:FALSE\n").unwrap();
        let mut command = Command::new("openssl");
        command
            .args("x509 -req -days 30 -CAcreateserial -in".split(' '))
            .arg(&request)
            .arg("-extfile")
            .arg(&extensions)
            .arg("-CA")
            .arg(self.path(&format!("{authority}.pem")))
            .arg("-CAkey")
            .arg(self.path(&format!("{authority}.key")))
            .arg("-out")
            .arg(self.path(&format!("{name}.pem")));
        run(command);
    }

    /// A stunnel configured like xapi's. On its one port, clients select the target by SNI. Clients
    /// that send "pool" get the certificate that `certificate` names.
    pub fn stunnel(&self, certificate: &str, more: &str) -> Stunnel {
        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let of = |name: &str| self.path(name).display().to_string();
        let text = format!(
            "foreground = yes\npid =\ndebug = info\nsslVersion = TLSv1.2\nciphers = {CIPHERS}\n\
             curve = {CURVES}\n{more}\n[xapi]\naccept = 127.0.0.1:0\nconnect = {to}\n\
             cert = {outer_cert}\nkey = {outer_key}\n[pool]\nsni = xapi:pool\nconnect = {to}\n\
             cert = {cert}\nkey = {key}\n",
            to = target.local_addr().unwrap(),
            outer_cert = of("other.pem"),
            outer_key = of("other.key"),
            cert = of(&format!("{certificate}.pem")),
            key = of(&format!("{certificate}.key")),
        );
        // stunnel reads the file before it reports its port, so the next call may overwrite the
        // file.
        let file = self.path("stunnel.conf");
        fs::write(&file, text).unwrap();
        let (process, port) = Process::stunnel(&file);
        Stunnel {
            process,
            port,
            target,
        }
    }

    /// The command `dunlin handoff connect` to a port, without `--send-fd`.
    pub fn connect(&self, port: u16, trust: &str) -> Command {
        let mut command = dunlin(["handoff", "connect", "--host", "127.0.0.1"]);
        command
            .args(["--port", &port.to_string(), "--sni", "pool"])
            .args(["--ciphers", CIPHERS, "--curves", CURVES])
            .arg("--cert-bundle-file")
            .arg(self.path(&format!("{trust}.pem")));
        command
    }
}

pub fn run(mut command: Command) {
    let done = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {said}");
}

pub struct Stunnel {
    pub process: Process,
    pub port: u16,
    pub target: TcpListener,
}

/// Runs `dunlin handoff connect`; returns its output and the received sockets.
pub fn call(mut command: Command) -> (Done, Vec<OwnedFd>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // Any descriptor number works, standard input included.
    command.args(["--send-fd", "0"]);
    let done = finish_with(command, theirs);
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    // If the command sends no message, `receive` returns at the end of file. The end of file
    // arrives only when no process has the other end open.
    let received = fdpass::receive(&ours, &mut [0; 16]).unwrap();
    assert_eq!(
        received.bytes,
        usize::from(!received.descriptors.is_empty())
    );
    (done, received.descriptors)
}
