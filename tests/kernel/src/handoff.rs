//! A stunnel set up as xapi's, and `dunlin handoff connect` as xapi calls its helper.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_sys::fdpass;

use crate::Guest;

/// What xenopsd asks for.
pub const CIPHERS: &str = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256";
/// The same, of the key exchange.
pub const CURVE: &str = "secp384r1";

/// Nothing that is waited for takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that is killed with its owner.
#[derive(Debug)]
pub struct Background(pub Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A stunnel that decrypts for a listener.
#[derive(Debug)]
pub struct Stunnel {
    /// Where it listens.
    pub port: u16,
    /// What it connects to.
    pub target: TcpListener,
    _process: Background,
}

/// Makes `NAME.pem` and `NAME.key` as xapi makes a pool's certificates: RSA, signed with their own
/// key, without a name that could be checked.
///
/// # Panics
/// OpenSSL fails.
pub fn certificate(guest: &Guest, name: &str) {
    let line = format!(
        "req -x509 -newkey rsa:2048 -nodes -batch -days 30 -subj /CN=0b5d2c1e-{name} \
         -keyout {name}.key -out {name}.pem"
    );
    let words: Vec<_> = line.split_whitespace().collect();
    guest.command("openssl", &words);
}

/// Starts a stunnel that shows `pool.pem` to whoever asks for "pool".
///
/// # Panics
/// It does not start.
#[must_use]
pub fn stunnel(guest: &Guest, port: u16, more: &str) -> Stunnel {
    let target = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let to = target.local_addr().expect("it is bound");
    Stunnel {
        port,
        target,
        _process: stunnel_to(guest, port, to, more),
    }
}

/// The same, before a server that is already there.
///
/// # Panics
/// It does not start.
#[must_use]
pub fn stunnel_to(guest: &Guest, port: u16, to: SocketAddr, more: &str) -> Background {
    let log = guest.folder().join(format!("stunnel-{port}.log"));
    let text = format!(
        "foreground = quiet\npid =\ndebug = info\noutput = {log}\nsslVersion = TLSv1.2\n\
         ciphers = {CIPHERS}\ncurve = {CURVE}\n{more}\n\
         [xapi]\naccept = 127.0.0.1:{port}\nconnect = {to}\ncert = other.pem\nkey = other.key\n\
         [pool]\nsni = xapi:pool\nconnect = {to}\ncert = pool.pem\nkey = pool.key\n",
        log = log.display(),
    );
    let file = format!("stunnel-{port}.conf");
    fs::write(&file, text).expect("the folder is ours");
    let process = Command::new("stunnel4")
        .arg(&file)
        .stdin(Stdio::null())
        .spawn()
        .expect("stunnel starts");
    let process = Background(process);
    wait_for_listener(port);
    process
}

/// Waits until somebody listens, by looking and not by connecting.
///
/// # Panics
/// Nobody does within half a minute.
pub fn wait_for_listener(port: u16) {
    let until = Instant::now() + Duration::from_secs(30);
    let words = format!(":{port:04X} 00000000:0000 0A");
    while !fs::read_to_string("/proc/net/tcp").is_ok_and(|table| table.contains(&words)) {
        assert!(Instant::now() < until, "nobody listens on {port}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// How the command ended, what it said, and the sockets that it passed.
#[derive(Debug)]
pub struct Called {
    /// The exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// The sockets.
    pub sockets: Vec<OwnedFd>,
}

/// Calls `dunlin handoff connect` for a port of this machine.
///
/// # Panics
/// It does not start.
#[must_use]
pub fn connect(port: u16, more: &[&str]) -> Called {
    let (ours, theirs) = UnixStream::pair().expect("sockets can be had");
    let mut command = Command::new("dunlin");
    command
        .args(["handoff", "connect", "--host", "127.0.0.1", "--sni", "pool"])
        .args(["--port", &port.to_string(), "--send-fd", "0"])
        .args(["--ciphers", CIPHERS, "--curves", CURVE])
        .args(more)
        .stdin(OwnedFd::from(theirs));
    let done = command.output().expect("dunlin is in the path");
    drop(command);
    let received = fdpass::receive(&ours, &mut [0; 16]).expect("the desk stands");
    Called {
        code: done.status.code(),
        out: String::from_utf8_lossy(&done.stdout).into_owned(),
        err: String::from_utf8_lossy(&done.stderr).into_owned(),
        sockets: received.descriptors,
    }
}

/// Calls it, expects one socket, and takes the other end of it behind the stunnel.
///
/// # Panics
/// It fails.
#[must_use]
pub fn connected(stunnel: &Stunnel, more: &[&str]) -> (TcpStream, TcpStream) {
    let mut called = connect(stunnel.port, more);
    assert_eq!(called.code, Some(0), "{called:?}");
    assert_eq!(called.err, "", "{called:?}");
    let socket = called.sockets.pop().expect("one came");
    assert!(called.sockets.is_empty());
    let (far, _) = stunnel.target.accept().expect("stunnel connects");
    (socket.into(), far)
}

/// Bytes of which no part is like another.
#[must_use]
pub fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Sends `there` and then `back` over a connection, and compares.
///
/// # Panics
/// They differ.
pub fn exchange(near: &TcpStream, far: &TcpStream, there: &[u8], back: &[u8]) {
    for end in [near, far] {
        // Else one that fails would leave the other waiting.
        end.set_read_timeout(Some(PATIENCE))
            .expect("it is a socket");
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut near = near;
            near.write_all(there).expect("it is sent");
            let mut came = vec![0; back.len()];
            near.read_exact(&mut came).expect("it is answered");
            assert!(came == back, "the answer differs");
        });
        let mut far = far;
        let mut came = vec![0; there.len()];
        far.read_exact(&mut came).expect("it arrives");
        assert!(came == there, "what arrives differs");
        far.write_all(back).expect("it is answered");
    });
}
