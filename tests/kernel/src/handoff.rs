//! A stunnel that is configured like xapi's, and calls of `dunlin handoff connect` like those that
//! xapi makes.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::fdpass;
use nix::libc::MSG_MORE;
use nix::sys::socket::{MsgFlags, send};
use serde_json::Value;

use crate::Guest;

/// The cipher list that xenopsd requests.
pub const CIPHERS: &str = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256";
/// The key exchange group that xenopsd requests.
pub const CURVE: &str = "secp384r1";

/// The time limit of most waits.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program that is killed on drop.
#[derive(Debug)]
pub struct Background(pub Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A stunnel that decrypts the connections of clients and connects to a listener of the test.
#[derive(Debug)]
pub struct Stunnel {
    /// The port on which the stunnel listens.
    pub port: u16,
    /// The listener that the stunnel connects to.
    pub target: TcpListener,
    _process: Background,
}

/// Creates `NAME.pem` and `NAME.key` like the certificates that xapi creates for a pool: RSA,
/// self-signed, and without a name that can be verified.
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

/// Starts a stunnel that presents `pool.pem` to clients that request the name "pool", and
/// `other.pem` to all other clients. `more` is additional configuration.
///
/// # Panics
/// The stunnel does not start.
#[must_use]
pub fn stunnel(guest: &Guest, port: u16, more: &str) -> Stunnel {
    let target = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let to = target.local_addr().expect("the listener is bound");
    Stunnel {
        port,
        target,
        _process: stunnel_to(guest, port, to, more),
    }
}

/// Like [`stunnel`], but the stunnel connects to an existing server.
///
/// # Panics
/// The stunnel does not start.
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
    fs::write(&file, text).expect("the folder is writable");
    let process = Command::new("stunnel4")
        .arg(&file)
        .stdin(Stdio::null())
        .spawn()
        .expect("stunnel starts");
    let process = Background(process);
    wait_for_listener(port);
    process
}

/// Waits until a socket listens on the port. Reads the socket table, because a connection would
/// disturb the listener.
///
/// # Panics
/// No listener appears within half a minute.
pub fn wait_for_listener(port: u16) {
    let until = Instant::now() + Duration::from_secs(30);
    let words = format!(":{port:04X} 00000000:0000 0A");
    while !fs::read_to_string("/proc/net/tcp").is_ok_and(|table| table.contains(&words)) {
        assert!(Instant::now() < until, "no listener on port {port}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// The result of a command: its exit code, its output, and the sockets that it passed.
#[derive(Debug)]
pub struct Called {
    /// The exit code, or `None` after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// The sockets that the command passed.
    pub sockets: Vec<OwnedFd>,
}

/// Calls `dunlin handoff connect` to a local port.
///
/// # Panics
/// The command does not start.
#[must_use]
pub fn connect(port: u16, more: &[&str]) -> Called {
    connect_as(0, port, more)
}

/// Like [`connect`], but runs the command as the given user.
///
/// # Panics
/// The command does not start.
#[must_use]
pub fn connect_as(user: u32, port: u16, more: &[&str]) -> Called {
    call(connect_command(user, port, more))
}

/// Adds the option `--send-fd` to a `handoff connect` command, runs the command, and receives the
/// sockets that it passes.
///
/// # Panics
/// The command does not start.
#[must_use]
pub fn call(command: Command) -> Called {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let mut called = call_for(theirs, command);
    let received = fdpass::receive(&ours, &mut [0; 16]).expect("the socket pair is open");
    called.sockets = received.descriptors;
    called
}

/// Like [`connect`], but closes the receiving end of `--send-fd` first, so that the command cannot
/// pass a socket.
///
/// # Panics
/// The command does not start.
#[must_use]
pub fn connect_without_receiver(port: u16, more: &[&str]) -> Called {
    let (_, theirs) = UnixStream::pair().expect("a socket pair");
    call_for(theirs, connect_command(0, port, more))
}

fn connect_command(user: u32, port: u16, more: &[&str]) -> Command {
    let mut command = Command::new("dunlin");
    command
        .args(["handoff", "connect", "--host", "127.0.0.1", "--sni", "pool"])
        .args(["--port", &port.to_string()])
        .args(["--ciphers", CIPHERS, "--curves", CURVE])
        .args(more)
        .uid(user);
    command
}

fn call_for(socket: UnixStream, mut command: Command) -> Called {
    command
        .args(["--send-fd", "0"])
        .stdin(OwnedFd::from(socket));
    let done = command.output().expect("dunlin is in the path");
    Called {
        code: done.status.code(),
        out: String::from_utf8_lossy(&done.stdout).into_owned(),
        err: String::from_utf8_lossy(&done.stderr).into_owned(),
        sockets: Vec::new(),
    }
}

/// Calls [`connect`] and expects one socket. Returns that socket and the socket of the stunnel's
/// target for the same connection.
///
/// # Panics
/// The command fails.
#[must_use]
pub fn connected(stunnel: &Stunnel, more: &[&str]) -> (TcpStream, TcpStream) {
    let mut called = connect(stunnel.port, more);
    assert_eq!(called.code, Some(0), "{called:?}");
    // OpenSSL makes the pool's certificate an authority, and the command warns about that. It does
    // not warn with `--peer`, which verifies only a name, and with `--no-verify`, which verifies
    // nothing.
    let warns = !more.contains(&"--no-verify") && !more.contains(&"--peer");
    let is_warning = |line: &str| line.starts_with("dunlin: warning: ");
    assert!(called.err.lines().all(is_warning), "{called:?}");
    assert_eq!(called.err.lines().count(), usize::from(warns), "{called:?}");
    let socket = called.sockets.pop().expect("one socket arrived");
    assert!(called.sockets.is_empty());
    let (far, _) = stunnel.target.accept().expect("stunnel connects");
    (socket.into(), far)
}

/// A running `dunlin handoff accept` for the server name "own". It passes sockets to the unix
/// socket `consumer` in the test's folder and logs to `accept.log` in that folder.
#[derive(Debug)]
pub struct Accept {
    /// The port on which the command listens.
    pub port: u16,
    process: Background,
}

impl Accept {
    /// Starts the command with the certificate `other.pem`. Clients that request other server names
    /// are forwarded to port 4443.
    ///
    /// # Panics
    /// The command does not start.
    #[must_use]
    pub fn start(guest: &Guest, tls: &str, more: &[&str]) -> Self {
        let own = ["--else", "tcp:127.0.0.1:4443", "--tls", tls];
        let certificate = ["--cert", "other.pem", "--key", "other.key"];
        Self::start_alone(guest, &[&own[..], &certificate, more].concat())
    }

    /// Starts the command without a certificate and without a server for other names. The arguments
    /// `more` may add both.
    ///
    /// # Panics
    /// The command does not start.
    #[must_use]
    pub fn start_alone(guest: &Guest, more: &[&str]) -> Self {
        Self::begin(Self::command(guest, more))
    }

    /// Starts a complete command, such as a result of [`Accept::command_of`].
    ///
    /// # Panics
    /// The command does not start.
    #[must_use]
    pub fn begin(mut command: Command) -> Self {
        let log = File::create("accept.log").expect("the folder is writable");
        let process = command.stdout(Stdio::piped()).stderr(log).spawn();
        let mut process = Background(process.expect("dunlin is in the path"));
        let out = process.0.stdout.take().expect("the stream is piped");
        let mut line = String::new();
        let read = BufReader::new(out).read_line(&mut line);
        read.expect("the command prints its address");
        let port = line
            .trim()
            .rsplit(':')
            .next()
            .and_then(|port| port.parse().ok());
        Self {
            port: port.unwrap_or_else(|| panic!("no port: {line}")),
            process,
        }
    }

    /// Returns the command that [`Accept::start_alone`] starts.
    #[must_use]
    pub fn command(guest: &Guest, more: &[&str]) -> Command {
        Self::command_of("dunlin", guest, more)
    }

    /// Like [`Accept::command`], but runs the program `dunlin`, for instance another version of the
    /// command.
    #[must_use]
    pub fn command_of(dunlin: &str, guest: &Guest, more: &[&str]) -> Command {
        let to = format!("unix:{}", guest.folder().join("consumer").display());
        let mut command = Command::new(dunlin);
        command
            .args(["handoff", "accept", "--listen", "127.0.0.1:0"])
            .args(["--sni", "own", "--to", &to])
            .args(more)
            .stdin(Stdio::null());
        command
    }

    /// Returns the number of open descriptors and the number of threads of the process.
    ///
    /// # Panics
    /// The process has ended.
    #[must_use]
    pub fn held(&self) -> [usize; 2] {
        ["fd", "task"].map(|what| {
            let path = format!("/proc/{}/{what}", self.process.0.id());
            fs::read_dir(path).expect("the process runs").count()
        })
    }

    /// Waits until the numbers of descriptors and threads equal `before` again.
    ///
    /// # Panics
    /// The numbers still differ when the time limit expires.
    pub fn settles(&self, before: [usize; 2]) {
        let until = Instant::now() + TIMEOUT;
        while self.held() != before {
            let held = self.held();
            assert!(
                Instant::now() < until,
                "{held:?} descriptors and threads, expected {before:?}"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the log contains `words`, and returns the line that contains them.
    ///
    /// # Panics
    /// The words do not appear.
    #[must_use]
    pub fn says(&self, words: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        loop {
            let log = fs::read_to_string("accept.log").expect("the log exists");
            if let Some(line) = log.lines().find(|line| line.contains(words)) {
                return line.to_owned();
            }
            assert!(Instant::now() < until, "no {words:?} in {log}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Receives the socket of the next client, and the JSON description that is sent with the socket.
///
/// # Panics
/// No socket arrives.
#[must_use]
pub fn take(consumer: &UnixListener) -> (TcpStream, Value) {
    let from = consumer.accept().expect("the listener is open").0;
    let mut line = Vec::new();
    let mut sockets: Vec<OwnedFd> = Vec::new();
    loop {
        let mut part = [0; 4096];
        let received = fdpass::receive(&from, &mut part).expect("the connection is open");
        sockets.extend(received.descriptors);
        line.extend_from_slice(&part[..received.bytes]);
        if received.bytes == 0 {
            break;
        }
    }
    let socket = sockets.pop().expect("a socket arrives with the line");
    let line = serde_json::from_slice(&line).expect("the line is JSON");
    println!("{line}");
    (socket.into(), line)
}

/// Starts OpenSSL's client, which sends its standard input and prints what it receives. With
/// `-quiet`, the client does not interpret letters of its input as commands, and does not stop at
/// the end of its input.
///
/// # Panics
/// The client does not start.
#[must_use]
pub fn client(port: u16, name: &str, version: &str) -> Background {
    client_with(port, name, &[version])
}

/// Like [`client`], but with other arguments.
///
/// # Panics
/// The client does not start.
#[must_use]
pub fn client_with(port: u16, name: &str, more: &[&str]) -> Background {
    let to = format!("127.0.0.1:{port}");
    let child = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", &to])
        .args(["-servername", name])
        .args(more)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    Background(child.expect("openssl starts"))
}

/// Returns a port, and forwards one connection from that port to the port `to`. Sends the end of
/// stream of the side `from` in the same segment as the last handshake message of that side.
///
/// # Panics
/// A step fails. The panic occurs on this function's background thread.
#[must_use]
pub fn end_with_handshake(from: Side, to: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let port = listener.local_addr().expect("the listener is bound").port();
    thread::spawn(move || {
        let (client, _) = listener.accept().expect("the listener is open");
        drop(listener);
        let server = TcpStream::connect(("127.0.0.1", to)).expect("the listener is open");
        let (mut sender, mut receiver) = match from {
            Side::Client => (client, server),
            Side::Server => (server, client),
        };
        let mut back = (
            receiver.try_clone().expect("descriptors are left"),
            sender.try_clone().expect("descriptors are left"),
        );
        // The result is ignored: copying fails if a peer has reported an error and closed its
        // connection.
        thread::spawn(move || io::copy(&mut back.0, &mut back.1));
        let mut last = Vec::new();
        while !last.starts_with(&[CHANGE_CIPHER_SPEC]) {
            last = record(&mut sender);
            if !last.starts_with(&[CHANGE_CIPHER_SPEC]) {
                receiver
                    .write_all(&last)
                    .expect("the receiver is connected");
            }
        }
        last.extend(record(&mut sender));
        // MSG_MORE delays the segment until more data or the end of the stream follows.
        let more = MsgFlags::from_bits_retain(MSG_MORE);
        let sent = send(receiver.as_raw_fd(), &last, more);
        assert_eq!(sent, Ok(last.len()));
        receiver
            .shutdown(Shutdown::Write)
            .expect("the receiver is connected");
        // Keep the connections open until the side `from` has ended its stream.
        let _ = io::copy(&mut sender, &mut io::sink());
    });
    port
}

/// A side of a connection.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// The connecting side.
    Client,
    /// The listening side.
    Server,
}

/// The content type of the last unencrypted record of a side in TLS 1.2 (RFC 5246, section 7.1).
const CHANGE_CIPHER_SPEC: u8 = 20;

/// Reads the next record of a connection.
///
/// # Panics
/// No record arrives.
#[must_use]
pub fn record(from: &mut TcpStream) -> Vec<u8> {
    let mut record = vec![0; 5];
    from.read_exact(&mut record)
        .expect("another record arrives");
    let length = u16::from_be_bytes([record[3], record[4]]);
    record.resize(5 + usize::from(length), 0);
    from.read_exact(&mut record[5..])
        .expect("another record arrives");
    record
}

/// Sends `there` from `near` to `far` and then `back` in the other direction, and compares the
/// received bytes.
///
/// # Panics
/// The received bytes differ.
pub fn exchange(near: &TcpStream, far: &TcpStream, there: &[u8], back: &[u8]) {
    for end in [near, far] {
        // Without a timeout, one side would wait forever if the other side fails.
        end.set_read_timeout(Some(TIMEOUT))
            .expect("the descriptor is a socket");
    }
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut near = near;
            near.write_all(there).expect("the data is sent");
            let mut received = vec![0; back.len()];
            near.read_exact(&mut received).expect("the peer answers");
            assert!(received == back, "the answer differs");
        });
        let mut far = far;
        let mut received = vec![0; there.len()];
        far.read_exact(&mut received).expect("the data arrives");
        assert!(received == there, "the received data differs");
        far.write_all(back).expect("the data is sent");
    });
}
