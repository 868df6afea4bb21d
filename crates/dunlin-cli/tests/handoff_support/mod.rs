//! Shared by the hand-off's tests: a pool's certificates, a stunnel configured like xapi's, and
//! callers that receive sockets.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use dunlin_linux::fdpass;

use crate::support::process::Process;
use crate::support::{Done, Scratch, dunlin};

/// Longer than anything that a test waits for.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// The ciphers that xenopsd asks for.
pub const CIPHERS: &str = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256";
pub const CURVES: &str = "secp384r1";

/// Whether the programs are installed; in CI they must be.
pub fn are_here(programs: &[&str]) -> bool {
    programs.iter().all(|program| {
        let found = Command::new(program)
            .arg("--version")
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
    })
}

/// Whether this host's kernel supports TLS on sockets; some tests cover its absence.
pub fn kernel_has_tls() -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let has = dunlin_linux::ktls::attach(&stream).is_ok();
    if has {
        println!("this kernel has TLS; without: see `cargo xtask kernel --suite tls`");
    }
    has
}

/// A directory with certificates.
pub struct Pool {
    pub scratch: Scratch,
}

impl Pool {
    /// `pool.pem` is a host's own self-signed certificate, without a name to check; `other.pem` is
    /// another host's.
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

    /// Creates `NAME.pem` and `NAME.key`.
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

    /// Creates them, signed by the authority in `CA.pem`.
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
        // Without an extension the certificate would have version 1.
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

    /// A stunnel configured like xapi's: clients select the target on its one port by SNI, and
    /// those with "pool" get the pool's certificate.
    pub fn stunnel(&self, certificate: &str, more: &str) -> Stunnel {
        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free_port();
        let of = |name: &str| self.path(name).display().to_string();
        let text = format!(
            "foreground = yes\npid =\ndebug = info\nsslVersion = TLSv1.2\nciphers = {CIPHERS}\n\
             curve = {CURVES}\n{more}\n[xapi]\naccept = 127.0.0.1:{port}\nconnect = {to}\n\
             cert = {outer_cert}\nkey = {outer_key}\n[pool]\nsni = xapi:pool\nconnect = {to}\n\
             cert = {cert}\nkey = {key}\n",
            to = target.local_addr().unwrap(),
            outer_cert = of("other.pem"),
            outer_key = of("other.key"),
            cert = of(&format!("{certificate}.pem")),
            key = of(&format!("{certificate}.key")),
        );
        let file = self.path(&format!("stunnel-{port}.conf"));
        fs::write(&file, text).unwrap();
        let mut command = Command::new("stunnel4");
        command.arg(&file);
        let process = Process::start(command);
        process.wait_for("Configuration successful");
        Stunnel {
            process,
            port,
            target,
        }
    }

    /// `connect` to a port, without --send-fd's socket.
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

/// An unused port.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// The output of `connect`, and the received sockets.
pub fn call(mut command: Command) -> (Done, Vec<OwnedFd>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // Any descriptor number works, standard input included.
    command.args(["--send-fd", "0"]);
    let done = finish_with(command, theirs);
    ours.set_read_timeout(Some(TIMEOUT)).unwrap();
    // Other holders of the far end would delay the end of file.
    let received = fdpass::receive(&ours, &mut [0; 16]).unwrap();
    assert_eq!(
        received.bytes,
        usize::from(!received.descriptors.is_empty())
    );
    (done, received.descriptors)
}

fn finish_with(mut command: Command, stdin: UnixStream) -> Done {
    let done = command.stdin(OwnedFd::from(stdin)).output().unwrap();
    // The command owns the other end of the socket.
    drop(command);
    Done {
        code: done.status.code().unwrap(),
        out: String::from_utf8(done.stdout).unwrap(),
        err: String::from_utf8(done.stderr).unwrap(),
    }
}

/// As [`finish`], for a client that reads `input`.
pub fn feed(mut command: Command, input: Vec<u8>) -> Done {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feeder = thread::spawn(move || {
        use std::io::Write;
        // A client that fails does not read it.
        let _ = stdin.write_all(&input);
    });
    let done = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    Done {
        code: done.status.code().unwrap(),
        out: String::from_utf8(done.stdout).unwrap(),
        err: String::from_utf8(done.stderr).unwrap(),
    }
}
