//! `dunlin handoff accept` hands over the connections for its own server name.
//! It forwards all other connections to a stunnel, if it has one.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_kernel_tests::handoff::{
    Accept, Background, certificate, client, client_with, record, stunnel_to, take,
};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{self, Cipher, Direction, Version};
use dunlin_linux::poll::waker;
use dunlin_linux::socket::{connect_unix, unread_bytes};
use dunlin_test_base::pattern;
use nix::sys::socket::{Backlog, listen};

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl"],
    dunlin: true,
    limit_seconds: 240,
    ..Needs::NOTHING
};

/// The number of bytes that are exchanged. It is not a multiple of a record's size.
const BYTES: usize = (4 << 20) + 777;
/// The number of bytes that a client sends before the kernel has the keys.
const EARLY: usize = 100 << 10;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let service = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
        let behind = service.local_addr().expect("the listener is bound");
        let _stunnel = stunnel_to(guest, 4443, behind, "");
        let consumer = UnixListener::bind("consumer").expect("the folder is writable");
        // The listener has a short queue, which fills up quickly.
        let few = Backlog::new(1).expect("the number is in range");
        listen(&consumer, few).expect("the socket is a listener");

        let slow = guest.folder().join("slow");
        let unread = UnixListener::bind(&slow).expect("the folder is writable");
        listen(&unread, few).expect("the socket is a listener");
        let to = format!("unix:{}", slow.display());
        let late = guest.folder().join("late");
        let to_late = format!("unix:{}", late.display());
        let late = UnixListener::bind(&late).expect("the folder is writable");
        let more = [
            "--sni", "slow", "--to", &to, "--sni", "late", "--to", &to_late,
        ];
        let accept = Accept::start(guest, "1.2", &more);
        let before = accept.held();
        the_other_name_reaches_the_stunnel(guest, accept.port, &service);
        the_kernel_has_the_keys_of_both_directions(guest, accept.port, &consumer);
        accept.settles(before);
        a_consumer_that_reads_nothing_holds_a_limited_number_of_sockets(&accept, &late);
        accept.settles(before);
        data_that_arrived_before_the_keys_is_read(guest, accept.port, "-tls1_2", &consumer);
        a_fragmented_client_hello_is_accepted(accept.port, &consumer);
        slow_clients_and_slow_consumers_delay_no_other(&accept, &slow, &consumer);
        accept.settles(before);
        a_client_that_ends_before_the_keys_is_refused(guest, &accept, &consumer);
        drop(accept);

        let accept = Accept::start(guest, "1.3", &[]);
        data_that_arrived_before_the_keys_is_read(guest, accept.port, "-tls1_3", &consumer);
        assert_eq!(stat(guest, "TlsDecryptError"), 0);
        drop(accept);

        the_clients_identity_is_sent_with_its_socket(guest, &consumer);
    })
}

/// Whether the socket is in blocking mode (proc_pid_fdinfo(5)).
fn blocks(socket: &impl AsRawFd) -> bool {
    const NONBLOCKING: u32 = 0o4000;
    let path = format!("/proc/self/fdinfo/{}", socket.as_raw_fd());
    let text = fs::read_to_string(path).expect("the socket is open");
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.expect("the descriptor has flags") & NONBLOCKING == 0
}

/// States of a connection in /proc/net/tcp: both ends are open; the peer has closed its end.
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;

/// Waits until `found` returns true for a connection at this port. `found` gets the connection's
/// state and the number of bytes in its receive queue (proc_net_tcp(5)).
fn wait_for_socket(port: u16, found: impl Fn(u8, u64) -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    let local = format!(":{port:04X}");
    loop {
        let table = fs::read_to_string("/proc/net/tcp").expect("the kernel has TCP");
        let is_found = table.lines().skip(1).any(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            let state = u8::from_str_radix(fields[3], 16).expect("a state");
            let (_, waiting) = fields[4].split_once(':').expect("two queues");
            let waiting = u64::from_str_radix(waiting, 16).expect("bytes");
            fields[1].ends_with(&local)
                && [ESTABLISHED, CLOSE_WAIT].contains(&state)
                && found(state, waiting)
        });
        if is_found {
            return;
        }
        assert!(Instant::now() < until, "no such connection in {table}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns a counter of kernel TLS, or zero before the module is loaded.
fn stat(guest: &Guest, name: &str) -> u64 {
    const FILE: &str = "/proc/net/tls_stat";
    match Path::new(FILE).exists() {
        true => guest.counter(FILE, name),
        false => 0,
    }
}

fn the_other_name_reaches_the_stunnel(guest: &Guest, port: u16, service: &TcpListener) {
    // The command probed the kernel when it started, so the counter may be above zero.
    let before = stat(guest, "TlsRxSw");
    let mut client = client(port, "pool", "-tls1_2");
    let mut served = service.accept().expect("the listener is open").0;
    exchange(&mut client.0, &mut served);
    let after = stat(guest, "TlsRxSw");
    assert_eq!(
        after, before,
        "the kernel got keys of a connection for stunnel"
    );
}

fn the_kernel_has_the_keys_of_both_directions(guest: &Guest, port: u16, consumer: &UnixListener) {
    // Names are case-insensitive, so this is the command's own name.
    let mut client = client(port, "OWN", "-tls1_2");
    let (mut socket, line) = take(consumer);
    assert_eq!(line["offload"], "kernel");
    assert_eq!(line["sni"], "own");
    assert_eq!(line["peer"]["verified"], false, "{line}");
    let address = line["peer"]["address"]
        .as_str()
        .expect("the peer has an address");
    assert!(address.starts_with("127.0.0.1:"), "{line}");
    assert_eq!(line["record_limit"], 1 << 24, "{line}");
    assert_eq!(line["version"], "TLSv1.2");
    assert_eq!(line["cipher"], "ECDHE-RSA-AES256-GCM-SHA384");
    assert!(line["driver"]["priority"].as_u64() > Some(100), "{line}");
    assert_eq!(line["acceleration"]["sending"], "software", "{line}");
    assert_eq!(line["acceleration"]["receiving"], "software", "{line}");
    assert_eq!(line["tls_stat"]["TlsDecryptError"], 0, "{line}");
    for direction in [Direction::Sending, Direction::Receiving] {
        let installed = ktls::installed(&socket, direction).expect("the descriptor is a socket");
        let installed = installed.unwrap_or_else(|| panic!("{direction:?} has no key"));
        assert!(
            installed.is(Version::V1_2, Cipher::Aes256Gcm),
            "{installed:?}"
        );
    }
    // The counters include only the passed socket, because the sockets of the probe have been
    // closed.
    let now = |way: &str| stat(guest, &format!("TlsCurr{way}Sw"));
    assert_eq!((now("Tx"), now("Rx")), (1, 1));
    assert!(blocks(&socket), "the passed socket is non-blocking");
    exchange(&mut client.0, &mut socket);
    assert_eq!(stat(guest, "TlsDecryptError"), 0);
}

/// Data of a client is in the socket before the kernel has the keys. The test causes this with a
/// consumer that accepts late, because the command installs the keys only when the consumer
/// accepts.
fn data_that_arrived_before_the_keys_is_read(
    guest: &Guest,
    port: u16,
    version: &str,
    consumer: &UnixListener,
) {
    let before = stat(guest, "TlsRxSw");
    let queue = fill_queue(Path::new("consumer"));
    let mut client = client(port, "own", version);
    let early = pattern(EARLY, 7);
    let mut input = client.0.stdin.take().expect("the stream is piped");
    input.write_all(&early).expect("the data is accepted");
    // If not all data fits into the socket, the client keeps the remaining data.
    wait_for_socket(port, |_, waiting| waiting > EARLY as u64 / 2);
    assert_eq!(
        stat(guest, "TlsRxSw"),
        before,
        "the kernel has a key too early"
    );
    empty_queue(queue, consumer);
    let (mut socket, line) = take(consumer);
    assert_eq!(line["offload"], "kernel");
    let mut received = vec![0; EARLY];
    socket.read_exact(&mut received).expect("the data arrives");
    assert!(received == early);
    client.0.stdin = Some(input);
    exchange(&mut client.0, &mut socket);
}

/// The kernel accepts no keys for a connection if the peer ended the stream before the consumer was
/// ready.
fn a_client_that_ends_before_the_keys_is_refused(
    guest: &Guest,
    accept: &Accept,
    consumer: &UnixListener,
) {
    let before = stat(guest, "TlsRxSw");
    let queue = fill_queue(Path::new("consumer"));
    let mut client = client(accept.port, "own", "-tls1_2");
    let mut input = client.0.stdin.take().expect("the stream is piped");
    input
        .write_all(b"last words")
        .expect("the data is accepted");
    // The client reads its input only after its handshake, so an empty pipe shows that the
    // handshake has ended.
    let until = Instant::now() + Duration::from_secs(60);
    while unread_bytes(&input).expect("the descriptor is a pipe") > 0 {
        assert!(Instant::now() < until, "the handshake does not end");
        thread::sleep(Duration::from_millis(10));
    }
    wait_for_socket(accept.port, |_, waiting| waiting > 0);
    drop((input, client));
    wait_for_socket(accept.port, |state, _| state == CLOSE_WAIT);
    empty_queue(queue, consumer);
    let _ = accept.says("fault=control-lost name=own");
    // `dunlin handoff accept` connected to the consumer and sent nothing.
    let mut passed = Vec::new();
    let mut asked = consumer.accept().expect("the listener is open").0;
    asked.read_to_end(&mut passed).expect("the stream ends");
    assert_eq!(passed, b"");
    assert_eq!(stat(guest, "TlsRxSw"), before, "the kernel got a key");
}

/// A client sends its ClientHello in records of two bytes and segments of three bytes.
fn a_fragmented_client_hello_is_accepted(port: u16, consumer: &UnixListener) {
    let between = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let near = between.local_addr().expect("the listener is bound").port();
    let mut client = client(near, "own", "-tls1_2");
    let (mut from, _) = between.accept().expect("the listener is open");
    let hello = record(&mut from);
    let mut to = TcpStream::connect(("127.0.0.1", port)).expect("accept listens");
    to.set_nodelay(true).expect("the descriptor is a socket");
    let mut pieces = Vec::new();
    for part in hello[5..].chunks(2) {
        pieces.extend_from_slice(&hello[..3]);
        pieces.extend([0, part.len() as u8]);
        pieces.extend_from_slice(part);
    }
    for part in pieces.chunks(3) {
        to.write_all(part).expect("the data is sent");
        thread::sleep(Duration::from_micros(200));
    }
    let mut back = (
        to.try_clone().expect("descriptors are left"),
        from.try_clone().expect("descriptors are left"),
    );
    thread::spawn(move || io::copy(&mut back.0, &mut back.1));
    thread::spawn(move || io::copy(&mut from, &mut to));
    receives(&mut client, &take(consumer).0);
}

/// A consumer has a long queue and reads nothing. At most 32 sockets wait for it, so one of 33
/// clients is refused.
fn a_consumer_that_reads_nothing_holds_a_limited_number_of_sockets(
    accept: &Accept,
    late: &UnixListener,
) {
    let start = || client(accept.port, "late", "-tls1_2");
    let clients: Vec<_> = (0..33).map(|_| start()).collect();
    let line = accept.says("fault=target-unreachable name=late");
    assert!(line.contains("(32)"), "{line}");
    for _ in 1..clients.len() {
        drop(take(late));
    }
    // The consumer has read all lines, so the next client is not refused.
    let mut next = start();
    receives(&mut next, &take(late).0);
}

/// 130 clients send nothing or only a part of a ClientHello. Another client has a consumer that
/// does not accept connections. The client under test is served nevertheless.
fn slow_clients_and_slow_consumers_delay_no_other(
    accept: &Accept,
    slow: &Path,
    consumer: &UnixListener,
) {
    let queue = fill_queue(slow);
    let waiting = client(accept.port, "slow", "-tls1_2");
    let part = [22, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3];
    let clients: Vec<_> = (0..130)
        .map(|number| {
            let mut one =
                TcpStream::connect(("127.0.0.1", accept.port)).expect("the listener is open");
            one.write_all(&part[..number % part.len()])
                .expect("the data is sent");
            one
        })
        .collect();
    let mut own = client(accept.port, "own", "-tls1_2");
    receives(&mut own, &take(consumer).0);
    let line = accept.says("fault=target-unreachable name=slow");
    assert!(line.contains(&slow.display().to_string()), "{line}");
    drop((queue, waiting, clients));
}

/// A client's certificate must have the name in `--peer`. Without a stunnel for other server names,
/// a client that requests a server name other than this process's own gets an alert.
fn the_clients_identity_is_sent_with_its_socket(guest: &Guest, consumer: &UnixListener) {
    guest.command("dunlin", &["pki", "init", "ca"]);
    for (name, folder) in [("own.test", "own"), ("a.test", "a"), ("b.test", "b")] {
        let issue = ["pki", "issue", "--ca", "ca", "--name", name, folder];
        guest.command("dunlin", &issue);
    }
    let accept = Accept::start_alone(guest, &["--identity", "own", "--peer", "a.test"]);
    let with = |name: &str, folder: &str| {
        let of = |file: &str| format!("{folder}/{file}");
        let (certificate, key) = (of("cert.pem"), of("key.pem"));
        let more = ["-tls1_2", "-cert", &certificate, "-key", &key];
        client_with(accept.port, name, &more)
    };
    let mut client = with("own", "a");
    let (socket, line) = take(consumer);
    assert_eq!(line["peer"]["verified"], true, "{line}");
    assert_eq!(line["peer"]["names"][0], "DNS a.test", "{line}");
    let fingerprint = line["peer"]["fingerprint"].as_str();
    assert_eq!(fingerprint.map(str::len), Some(64), "{line}");
    receives(&mut client, &socket);
    let _other = with("own", "b");
    let _ = accept.says("fault=unauthorised name=own");

    let mut other = with("other", "a");
    let mut said = String::new();
    let errors = other.0.stderr.as_mut().expect("the stream is piped");
    errors
        .read_to_string(&mut said)
        .expect("the output is text");
    // This is the number of the alert unrecognized_name.
    assert!(said.contains("alert number 112"), "{said}");
    let _ = accept.says("fault=unknown-route name=other");
}

/// Checks that a client receives data written to its socket.
fn receives(client: &mut Background, mut socket: &TcpStream) {
    socket.write_all(b"hello\n").expect("the data is sent");
    let mut received = [0; 6];
    let out = client.0.stdout.as_mut().expect("the stream is piped");
    out.read_exact(&mut received).expect("the data arrives");
    assert_eq!(&received, b"hello\n");
}

/// Opens connections until the queue is full, so that the next connection has to wait.
fn fill_queue(path: &Path) -> Vec<UnixStream> {
    let soon = || Instant::now() + Duration::from_millis(100);
    let (_waker, stop) = waker().expect("a descriptor is free");
    let mut queue = Vec::new();
    while let Ok(one) = connect_unix(path, soon(), &stop) {
        queue.push(one);
        assert!(queue.len() < 100, "the backlog has no end");
    }
    queue
}

fn empty_queue(queue: Vec<UnixStream>, consumer: &UnixListener) {
    for _ in queue {
        consumer.accept().expect("the listener is open");
    }
}

/// Sends data in both directions simultaneously. Then closes the client's input and output.
fn exchange(client: &mut Child, served: &mut TcpStream) {
    let (there, back) = (pattern(BYTES, 1), pattern(BYTES, 2));
    let mut input = client.stdin.take().expect("the stream is piped");
    let mut output = client.stdout.take().expect("the stream is piped");
    thread::scope(|scope| {
        scope.spawn(|| input.write_all(&there).expect("the data is accepted"));
        let mut writer = served.try_clone().expect("descriptors are left");
        scope.spawn(move || writer.write_all(&back).expect("the data is sent"));
        scope.spawn(|| {
            let mut received = vec![0; BYTES];
            output.read_exact(&mut received).expect("the data arrives");
            assert!(
                received == pattern(BYTES, 2),
                "the data received by the client differs"
            );
        });
        let mut received = vec![0; BYTES];
        served.read_exact(&mut received).expect("the data arrives");
        assert!(
            received == there,
            "the data received from the client differs"
        );
    });
}
