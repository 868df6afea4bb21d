//! With kernel TLS at one or both ends, lanes carry data and report closes, alerts and key updates.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::lane::data::{
    BATCH_BYTES, Counters, DataReceiver, DataSender, PAGE_BYTES, ReceiveError, STALL_LIMIT,
    SendError,
};
use dunlin::lane::handshake::{self, HandshakeError, Records, Secured};
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::kernel::{Refused, abilities, choose};
use dunlin::lane::offload::Offload;
use dunlin::lane::peers::Peers;
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{CipherSuite, Crypto};
use dunlin::lane::record::{Alert, CONTENT_BYTES, LateMessage, OpenError};
use dunlin_kernel_tests::refusing::forbid;
use dunlin_kernel_tests::tls::renews_keys;
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{self, Direction};
use dunlin_linux::socket::wait_readable;
use vm_memory::VolatileSlice;

const PAGES: usize = 1024;
/// Payload sizes that are multiples of neither a page nor a record.
const ODD: [usize; 6] = [
    1,
    4095,
    CONTENT_BYTES - 1,
    CONTENT_BYTES + 1,
    3 * CONTENT_BYTES + 5,
    BATCH_BYTES - 7,
];

fn main() -> ExitCode {
    let needs = Needs {
        dunlin: true,
        limit_seconds: 120,
        ..Needs::NOTHING
    };
    run(&needs, |guest| {
        // Load the module, because the counters exist only after that.
        guest.command("modprobe", &["tls"]);
        for words in [
            &["init", "ca"][..],
            &["issue", "--ca", "ca", "--name", "a.test", "a"],
            &["issue", "--ca", "ca", "--name", "b.test", "b"],
        ] {
            guest.command("dunlin", &[&["pki"], words].concat());
        }
        k11_auto_chooses_a_fast_kernel_and_names_its_driver(guest);
        i3_guest_memory_arrives_through_every_pairing(guest);
        i6_no_guest_memory_leaves_in_the_clear();
        k07_an_end_without_a_close_is_truncation();
        k07_a_close_ends_a_read_of_one_byte();
        a_peer_that_hangs_inside_a_record_is_stalled_and_not_idle();
        an_alert_reaches_the_sender();
        k05_a_key_update_ends_a_lane_with_an_error_of_its_own();
        i7_a_changed_byte_is_not_delivered();
        // Run this test last, because the result of its probe is cached.
        k02_a_key_refused_after_a_good_probe_ends_only_that_connection();
    })
}

fn k11_auto_chooses_a_fast_kernel_and_names_its_driver(guest: &Guest) {
    // The implementation of the cipher with the processor's instructions is in a module. An
    // installed system loads this module when it starts, but this machine has possibly not loaded
    // it yet. Without this module, some kernels use a slower implementation.
    let suite = CipherSuite::Aes128Gcm;
    let slow = choose(Offload::Auto, suite).expect("auto always chooses");
    let driver = abilities(suite).ok().and_then(|abilities| abilities.driver);
    if driver.expect("the kernel has a driver").priority < 300 {
        assert!(!slow.is_kernel);
        assert!(slow.reason.contains("aesni-intel"), "{}", slow.reason);
    }
    guest.command("modprobe", &["aesni-intel"]);
    for suite in CipherSuite::ALL {
        let choice = choose(Offload::Kernel, suite).expect("this kernel has TLS");
        println!("{suite}: {}", choice.reason);
        let abilities = abilities(suite).expect("the kernel has the suite");
        assert_eq!(abilities.renews_keys, renews_keys(guest));
        assert!(abilities.driver.is_some(), "{suite} has no driver");
    }
    let auto = choose(Offload::Auto, CipherSuite::Aes256Gcm).expect("auto always chooses");
    assert!(auto.is_kernel, "{}", auto.reason);
}

fn i3_guest_memory_arrives_through_every_pairing(guest: &Guest) {
    use Offload::{Kernel, Process};
    for suite in CipherSuite::ALL {
        for (near, far) in [(Kernel, Kernel), (Kernel, Process), (Process, Kernel)] {
            let before = Stat::of(guest);
            let (near, far) = pair(suite, near, far);
            let kernels = [&near, &far].iter().filter(|end| is_kernel(end)).count() as u64;
            let after = Stat::of(guest);
            assert_eq!(after.sealing - before.sealing, kernels, "{suite}");
            assert_eq!(after.opening - before.opening, kernels, "{suite}");
            carry(near, far);
            let ended = Stat::of(guest);
            assert_eq!(ended.errors, before.errors);
            assert_eq!(ended.padded, 0);
        }
    }
}

/// Sends frames with pages and with odd sizes, then closes the lane, and checks what the other end
/// receives.
fn carry(near: Secured, far: Secured) {
    let mut memory = content(PAGES * PAGE_BYTES);
    let expected = memory.clone();
    let sender = thread::spawn(move || {
        let mut sender =
            DataSender::tls(near, STALL_LIMIT).expect("the socket accepts its options");
        let whole = VolatileSlice::from(&mut memory[..]);
        let mut page = 0;
        while page < PAGES {
            let mut frame = sender.frame();
            while frame.payload_bytes() < BATCH_BYTES && page < PAGES {
                let at = whole.subslice(page * PAGE_BYTES, PAGE_BYTES);
                let kept = frame.guest_page(&at.expect("the range is inside the memory"));
                assert_eq!(kept, Ok(true));
                page += 1;
            }
            let bytes = frame.payload_bytes() as u32;
            frame
                .finish(&bytes.to_be_bytes())
                .expect("the data is sent");
        }
        for bytes in ODD {
            let mut payload = content(bytes);
            sender
                .send_with(&(bytes as u32).to_be_bytes(), &mut payload)
                .expect("the data is sent");
        }
        sender.send(&0_u32.to_be_bytes()).expect("the data is sent");
        sender.finish().expect("the lane is closed")
    });
    let mut receiver = DataReceiver::tls(far, STALL_LIMIT).expect("the socket accepts its options");
    let mut header = [0; 4];
    let mut arrived = vec![0; expected.len()];
    let whole = VolatileSlice::from(&mut arrived[..]);
    let mut filled = 0;
    let next = |receiver: &mut DataReceiver, header: &mut [u8; 4]| {
        assert!(receiver.next(header, None).expect("a frame arrives"));
        u32::from_be_bytes(*header) as usize
    };
    while filled < expected.len() {
        let bytes = next(&mut receiver, &mut header);
        let pages = (filled..filled + bytes).step_by(PAGE_BYTES);
        let targets = pages.map(|at| {
            whole
                .subslice(at, PAGE_BYTES)
                .expect("the range is inside the memory")
        });
        receiver.payload_into(targets).expect("its pages arrive");
        filled += bytes;
    }
    for bytes in ODD {
        assert_eq!(next(&mut receiver, &mut header), bytes);
        let mut odd = vec![0; bytes];
        receiver.read_exact(&mut odd).expect("its bytes arrive");
        assert!(odd == content(bytes), "{bytes} bytes differ");
    }
    assert_eq!(next(&mut receiver, &mut header), 0);
    assert!(
        !receiver
            .next(&mut header, None)
            .expect("the lane was closed")
    );
    let received = receiver.close().expect("the close is answered");
    let sent: Counters = sender.join().expect("the sender does not panic");
    assert_eq!(sent.content_bytes, received.content_bytes);
    assert!(arrived == expected, "pages differ");
}

/// A proxy between the two ends records the traffic.
fn i6_no_guest_memory_leaves_in_the_clear() {
    let (client, server) = settings(CipherSuite::Aes256Gcm, Offload::Kernel, Offload::Kernel);
    let (near, mut wire_near) = connected();
    let (mut wire_far, far) = connected();
    let mut back = (
        wire_far.try_clone().expect("the socket is open"),
        wire_near.try_clone().expect("the socket is open"),
    );
    let there = thread::spawn(move || copy_and_keep(&mut wire_near, &mut wire_far));
    let back = thread::spawn(move || copy_and_keep(&mut back.0, &mut back.1));
    let accepting = thread::spawn(move || handshake::server(far, &server, soon()));
    let near = handshake::client(near, &client, soon()).expect("the identities match");
    let far = accepting.join().expect("the thread does not panic");
    let far = far.expect("the identities match");
    assert!(is_kernel(&near) && is_kernel(&far));
    carry(near, far);
    let kept = [there.join(), back.join()].map(|kept| kept.expect("the thread does not panic"));
    assert!(kept[0].len() > PAGES * PAGE_BYTES);
    let memory = content(PAGES * PAGE_BYTES);
    for kept in kept {
        for page in [0, 1, PAGES / 2, PAGES - 1] {
            let part = &memory[page * PAGE_BYTES + 64..][..32];
            let is_there = kept.windows(part.len()).any(|window| window == part);
            assert!(!is_there, "page {page} was seen");
        }
        // The last record is the alert that closes the lane. Its content type is application data,
        // so the alert is not sent in the clear.
        let mut rest = &kept[..];
        let mut last = 0;
        while let Some((header, body)) = rest.split_first_chunk::<5>() {
            last = header[0];
            rest = &body[usize::from(u16::from_be_bytes([header[3], header[4]]))..];
        }
        assert_eq!(last, 23);
    }
}

fn k07_an_end_without_a_close_is_truncation() {
    let (near, far) = pair(CipherSuite::Aes256Gcm, Offload::Kernel, Offload::Kernel);
    let mut receiver = DataReceiver::tls(far, STALL_LIMIT).expect("the socket accepts its options");
    drop(near.stream);
    let error = receiver
        .next(&mut [0; 4], None)
        .expect_err("the connection was cut");
    assert!(matches!(error, ReceiveError::Truncated), "{error}");
}

/// The alert that closes the lane has two bytes, but the buffer of the read has room for only one
/// byte.
fn k07_a_close_ends_a_read_of_one_byte() {
    let (near, far) = pair(CipherSuite::Aes256Gcm, Offload::Kernel, Offload::Kernel);
    let sender = DataSender::tls(near, STALL_LIMIT).expect("the socket accepts its options");
    let mut receiver = DataReceiver::tls(far, STALL_LIMIT).expect("the socket accepts its options");
    sender.finish().expect("the lane is closed");
    assert!(!receiver.next(&mut [0], None).expect("the lane was closed"));
    receiver.close().expect("the close is answered");
}

fn a_peer_that_hangs_inside_a_record_is_stalled_and_not_idle() {
    let (near, far) = pair(CipherSuite::Aes256Gcm, Offload::Process, Offload::Kernel);
    let limit = Duration::from_millis(300);
    let mut receiver = DataReceiver::tls(far, limit).expect("the socket accepts its options");
    let error = receiver
        .next(&mut [0; 4], Some(limit))
        .expect_err("no record arrives");
    assert!(matches!(error, ReceiveError::Idle { .. }), "{error}");
    (&near.stream)
        .write_all(&[23, 3, 3, 1, 0, 7])
        .expect("the data is sent");
    let error = receiver
        .next(&mut [0; 4], None)
        .expect_err("the rest does not arrive");
    assert!(matches!(error, ReceiveError::Stalled { .. }), "{error}");
}

fn an_alert_reaches_the_sender() {
    let (near, far) = pair(CipherSuite::Aes256Gcm, Offload::Kernel, Offload::Kernel);
    let mut sender = DataSender::tls(near, STALL_LIMIT).expect("the socket accepts its options");
    ktls::send_record(&far.stream, 21, &[2, 44]).expect("an alert is sent");
    // Wait for the alert, because a reset would discard an alert that has not arrived yet.
    assert!(wait_readable(sender.socket(), soon()).expect("the socket can be polled"));
    drop(far);
    let until = soon();
    let error = loop {
        assert!(Instant::now() < until, "the lane still accepts bytes");
        match sender.send(&[1; 1000]) {
            Ok(()) => thread::sleep(Duration::from_millis(5)),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, SendError::PeerAlert(Alert(44))), "{error}");
}

fn k05_a_key_update_ends_a_lane_with_an_error_of_its_own() {
    let (client, server) = settings(CipherSuite::Aes256Gcm, Offload::Process, Offload::Kernel);
    let (mut near, far) = connected();
    let accepting = thread::spawn(move || handshake::server(far, &server, soon()));
    // This peer renews its key. Dunlin never does this on a lane.
    let name = "b.test".try_into().expect("the text is a name");
    let mut peer = rustls::ClientConnection::new(client.config().clone(), name)
        .expect("the settings are valid");
    while peer.is_handshaking() {
        peer.complete_io(&mut near)
            .expect("the handshake continues");
    }
    let far = accepting.join().expect("the thread does not panic");
    let mut receiver = DataReceiver::tls(far.expect("the identities match"), STALL_LIMIT)
        .expect("the socket accepts its options");
    peer.writer()
        .write_all(b"before")
        .expect("the data is queued");
    peer.refresh_traffic_keys()
        .expect("the keys can be renewed");
    peer.writer()
        .write_all(b"behind")
        .expect("the data is queued");
    while peer.wants_write() {
        peer.write_tls(&mut near).expect("the data is sent");
    }
    let mut bytes = [0; 6];
    assert!(receiver.next(&mut bytes, None).expect("data arrives"));
    assert_eq!(&bytes, b"before");
    let error = receiver
        .next(&mut bytes, None)
        .expect_err("a KeyUpdate ends the lane");
    let update = OpenError::Handshake {
        message: LateMessage::KeyUpdate,
    };
    assert!(
        matches!(&error, ReceiveError::Record(record) if *record == update),
        "{error}"
    );
}

fn i7_a_changed_byte_is_not_delivered() {
    let suite = CipherSuite::Aes256Gcm;
    let (near, far) = pair(suite, Offload::Process, Offload::Kernel);
    let Records::Process { mut seal, .. } = near.records else {
        panic!("the keys are in the kernel");
    };
    let mut record = vec![7; PAGE_BYTES];
    seal.seal(&mut record).expect("the record can be sealed");
    record[2000] ^= 4;
    (&near.stream).write_all(&record).expect("the data is sent");
    let mut receiver = DataReceiver::tls(far, STALL_LIMIT).expect("the socket accepts its options");
    let error = receiver.payload(10, |_| panic!("unauthenticated bytes were delivered"));
    let error = error.expect_err("the record is not authentic");
    assert!(
        matches!(error, ReceiveError::Record(OpenError::Authentication)),
        "{error}"
    );
}

/// The kernel accepted the keys of the probe but refuses later keys, as if a limit had been reached
/// in the meantime.
fn k02_a_key_refused_after_a_good_probe_ends_only_that_connection() {
    let suite = CipherSuite::Aes256Gcm;
    let (client, server) = settings(suite, Offload::Auto, Offload::Process);
    assert!(choose(Offload::Auto, suite).is_ok_and(|choice| choice.is_kernel));
    let refused = thread::spawn(move || {
        forbid(Direction::Sending);
        let connect = || {
            let (near, far) = connected();
            let server = server.clone();
            let accepting = thread::spawn(move || handshake::server(far, &server, soon()));
            let near = handshake::client(near, &client, soon());
            (near, accepting.join().expect("the thread does not panic"))
        };
        let (near, far) = connect();
        let error = near.expect_err("the kernel refuses the sending key");
        assert!(
            matches!(&error, HandshakeError::Offload(refused) if is_of_sending(refused)),
            "{error}"
        );
        let mut receiver = DataReceiver::tls(far.expect("the identities match"), STALL_LIMIT)
            .expect("the socket accepts its options");
        // The peer gets no alert, because the alert would be sent in the clear.
        let error = receiver
            .next(&mut [0; 4], None)
            .expect_err("the connection was cut");
        assert!(matches!(error, ReceiveError::Truncated), "{error}");
        let (near, far) = connect();
        let near = near.expect("the process has the keys");
        assert!(!is_kernel(&near));
        carry(near, far.expect("the identities match"));
    });
    refused.join().expect("the thread does not panic");
    let choice = choose(Offload::Auto, suite).expect("auto always chooses");
    assert!(!choice.is_kernel);
    let refused = choose(Offload::Kernel, suite).expect_err("the refusal is remembered");
    assert!(is_of_sending(&refused), "{refused}");
    assert!(
        choice.reason.contains(&refused.to_string()),
        "{}",
        choice.reason
    );
}

fn is_of_sending(refused: &Refused) -> bool {
    let direction = Direction::Sending;
    matches!(refused, Refused::Direction { direction: of, .. } if *of == direction)
}

struct Stat {
    sealing: u64,
    opening: u64,
    errors: u64,
    padded: u64,
}

impl Stat {
    fn of(guest: &Guest) -> Self {
        let value = |name| guest.counter("/proc/net/tls_stat", name);
        Self {
            sealing: value("TlsTxSw"),
            opening: value("TlsRxSw"),
            errors: value("TlsDecryptError"),
            padded: value("TlsRxNoPadViolation"),
        }
    }
}

fn is_kernel(end: &Secured) -> bool {
    matches!(end.records, Records::Kernel(_))
}

/// Returns both ends of a lane, secured with the given suite and with an offload setting for each
/// end.
fn pair(suite: CipherSuite, near: Offload, far: Offload) -> (Secured, Secured) {
    let (client, server) = settings(suite, near, far);
    let (near, far) = connected();
    let accepting = thread::spawn(move || handshake::server(far, &server, soon()));
    let near = handshake::client(near, &client, soon()).expect("the identities match");
    let far = accepting.join().expect("the thread does not panic");
    (near, far.expect("the identities match"))
}

fn settings(suite: CipherSuite, near: Offload, far: Offload) -> (ClientTls, ServerTls) {
    let crypto = |offload| Crypto {
        suites: vec![suite],
        offload,
        ..Crypto::auto()
    };
    let load = |name: &str| {
        let loaded = Identity::load(name.as_ref(), LoadOptions::default());
        loaded.expect("`dunlin pki` created it").0
    };
    let peers = |name: &str| -> Peers {
        [name.parse().expect("the text is a name")]
            .into_iter()
            .collect()
    };
    let client = load("a").client(&crypto(near), peers("b.test"));
    let server = load("b").server(&crypto(far), peers("a.test"));
    (
        client.expect("the settings are valid"),
        server.expect("the settings are valid"),
    )
}

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let address = listener.local_addr().expect("the listener is bound");
    let near = TcpStream::connect(address).expect("the listener is open");
    (near, listener.accept().expect("a connection is pending").0)
}

fn copy_and_keep(from: &mut TcpStream, to: &mut TcpStream) -> Vec<u8> {
    use std::io::Read;
    let mut kept = Vec::new();
    let mut part = vec![0; 64 << 10];
    loop {
        match from.read(&mut part) {
            Ok(0) | Err(_) => break,
            Ok(count) => {
                kept.extend_from_slice(&part[..count]);
                if to.write_all(&part[..count]).is_err() {
                    break;
                }
            }
        }
    }
    // Ignore an error: the peer has possibly closed its connection.
    let _ = to.shutdown(std::net::Shutdown::Write);
    kept
}

/// Returns bytes in which all pages differ from each other.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ bytes as u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8 | 1
    };
    (0..bytes).map(|_| next()).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}
