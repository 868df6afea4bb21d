//! Hosts and the links between them behave as documented, and leave nothing behind.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::control::{self, ControlError};
use dunlin_lane::data::{DataSender, ReceiveError, SendError};
use dunlin_lane::provider::Crypto;
use dunlin_lane::{DataReceiver, PlainConsent};
use dunlin_linux::socket::{Liveness, set_liveness};
use dunlin_rig::hosts::{self, Direction, Family, Host, Link, LinkOptions};
use dunlin_rig::need;
use dunlin_test_base::Scratch;
use dunlin_test_support::lane::{Authority, DESTINATION, SOURCE, names, soon};
use rustix::net::sockopt::socket_recv_buffer_size;

const PORT: u16 = 4444;

/// Two hosts and a link; `None` if the machine cannot create hosts.
fn pair(options: &LinkOptions) -> Option<(Host, Host, Link)> {
    if !need::hosts() {
        return None;
    }
    let near = Host::new("near").unwrap();
    let far = Host::new("far").unwrap();
    let link = Link::new(&near, &far, options).unwrap();
    Some((near, far, link))
}

/// Connects `near` to `far`. Returns the near end and the far end of the connection.
fn connect(near: &Host, far: &Host, address: IpAddr) -> (TcpStream, TcpStream) {
    let listener = far
        .run(|| TcpListener::bind((address, PORT)))
        .unwrap()
        .unwrap();
    let stream = near
        .run(|| TcpStream::connect_timeout(&(address, PORT).into(), Duration::from_secs(10)))
        .unwrap()
        .unwrap();
    let (accepted, _) = listener.accept().unwrap();
    for end in [&stream, &accepted] {
        end.set_nodelay(true).unwrap();
        end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    (stream, accepted)
}

/// The durations of `count` round trips of one byte, sorted.
fn round_trips(mut near: TcpStream, mut far: TcpStream, count: usize) -> Vec<Duration> {
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut byte = [0];
            while far.read_exact(&mut byte).is_ok() {
                far.write_all(&byte).unwrap();
            }
        });
        let mut times: Vec<Duration> = (0..count)
            .map(|_| {
                let start = Instant::now();
                near.write_all(&[1]).unwrap();
                near.read_exact(&mut [0]).unwrap();
                start.elapsed()
            })
            .collect();
        times.sort();
        drop(near);
        times
    })
}

/// Sends bytes and checks that they arrive in order. Returns the duration.
fn transfer(mut from: TcpStream, mut to: TcpStream, bytes: usize) -> Duration {
    let content: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
    let start = Instant::now();
    let received = thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut received = Vec::new();
            to.read_to_end(&mut received).unwrap();
            received
        });
        from.write_all(&content).unwrap();
        drop(from);
        reader.join().unwrap()
    });
    assert!(
        received == content,
        "the received bytes differ from the sent bytes"
    );
    start.elapsed()
}

#[test]
fn both_families_reach_across_and_a_third_host_does_not() {
    let Some((near, far, link)) = pair(&LinkOptions::default()) else {
        return;
    };
    let other = Host::new("other").unwrap();
    for family in [Family::V4, Family::V6] {
        let address = link.address(&far, family);
        let (stream, accepted) = connect(&near, &far, address);
        transfer(stream, accepted, 8 << 20);
        let error = other
            .run(|| TcpStream::connect((address, PORT)))
            .unwrap()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NetworkUnreachable, "{error}");
    }
    let shown = near
        .command("ip")
        .args(["-brief", "address"])
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains(link.interface(&near)), "{shown}");
}

#[test]
fn a_delay_is_seen_as_a_round_trip_and_carries_large_packets() {
    let delay = Duration::from_millis(20);
    let options = LinkOptions {
        delay: Some(delay),
        ..LinkOptions::default()
    };
    let Some((near, far, link)) = pair(&options) else {
        return;
    };
    for family in [Family::V4, Family::V6] {
        let address = link.address(&far, family);
        let (stream, accepted) = connect(&near, &far, address);
        let times = round_trips(stream, accepted, 9);
        println!("round trips of a line of 2 x 20 ms: {times:?}");
        assert!(times[0] >= 2 * delay, "{times:?}");
        // Check only the fastest round trip, because the machine may be busy.
        assert!(
            times[0] < 2 * delay + Duration::from_millis(40),
            "{times:?}"
        );
        let (stream, accepted) = connect(&near, &far, address);
        let time = transfer(stream, accepted, 32 << 20);
        println!("32 MiB over this line: {time:?}");
    }
}

#[test]
fn the_receive_window_of_a_lane_may_grow_at_once_on_a_long_link_only() {
    for delay in [None, Some(Duration::from_millis(20))] {
        let options = LinkOptions {
            delay,
            ..LinkOptions::default()
        };
        let Some((near, far, link)) = pair(&options) else {
            return;
        };
        let may_grow = || {
            let (_stream, accepted) = connect(&near, &far, link.address(&far, Family::V4));
            let socket = accepted.try_clone().unwrap();
            let consent = PlainConsent::both(true, true).unwrap();
            let before = socket_recv_buffer_size(&socket).unwrap();
            let _lane = DataReceiver::plain(accepted, consent, Duration::from_secs(1)).unwrap();
            socket_recv_buffer_size(&socket).unwrap() > before
        };
        match delay {
            Some(_) => assert!(may_grow()),
            // A busy machine can delay a handshake, so try several times.
            None => assert!((0..10).any(|_| !may_grow())),
        }
    }
}

#[test]
fn a_limit_holds_and_is_lifted() {
    let options = LinkOptions {
        rate_bits: Some(80_000_000),
        ..LinkOptions::default()
    };
    let Some((near, far, link)) = pair(&options) else {
        return;
    };
    let address = link.address(&far, Family::V6);
    let (stream, accepted) = connect(&near, &far, address);
    let slow = transfer(stream, accepted, 8 << 20);
    link.set_rate(None).unwrap();
    let (stream, accepted) = connect(&near, &far, address);
    let fast = transfer(stream, accepted, 8 << 20);
    println!("8 MiB at 10 MB/s: {slow:?}; without a limit: {fast:?}");
    // The transfer takes 0.84 s, minus the time for the bytes in the socket buffers and in the
    // first burst.
    assert!(slow > Duration::from_millis(600), "{slow:?}");
    assert!(fast < slow / 2, "{fast:?}");
}

#[test]
fn a_line_is_cut_and_restored_under_a_connection() {
    for delay in [None, Some(Duration::from_millis(2))] {
        let options = LinkOptions {
            delay,
            ..LinkOptions::default()
        };
        let Some((near, far, link)) = pair(&options) else {
            return;
        };
        for family in [Family::V4, Family::V6] {
            let address = link.address(&far, family);
            let (mut stream, mut accepted) = connect(&near, &far, address);
            link.cut().unwrap();
            let refused = near
                .run(|| TcpStream::connect_timeout(&(address, PORT).into(), Duration::from_secs(5)))
                .unwrap()
                .unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::NetworkUnreachable, "{refused}");
            stream.write_all(b"late").unwrap();
            link.restore().unwrap();
            let mut received = [0; 4];
            accepted.read_exact(&mut received).unwrap();
            assert_eq!(&received, b"late");
        }
    }
}

#[test]
fn a_direction_swallows_packets_without_a_word() {
    for delay in [None, Some(Duration::from_millis(2))] {
        let options = LinkOptions {
            delay,
            ..LinkOptions::default()
        };
        let Some((near, far, link)) = pair(&options) else {
            return;
        };
        let (mut stream, mut accepted) = connect(&near, &far, link.address(&far, Family::V4));
        link.swallow(Direction::There).unwrap();
        // The other direction still works.
        accepted.write_all(b"back").unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        stream.write_all(b"lost").unwrap();
        accepted
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        let error = accepted.read_exact(&mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        link.restore().unwrap();
        accepted
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut received = [0; 4];
        accepted.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"lost");
    }
}

/// The kernel ends a connection if the peer's host does not answer. The lane's error must then say
/// so, and must not blame a stall in a message or a frame.
#[test]
fn lanes_report_a_host_that_does_not_answer() {
    let liveness = Liveness {
        keepalive_idle: Duration::from_secs(1),
        keepalive_interval: Duration::from_secs(1),
        keepalive_probes: 1,
        user_timeout: Duration::from_secs(1),
    };
    let stall_limit = Duration::from_secs(20);
    let Some((near, far, link)) = pair(&LinkOptions::default()) else {
        return;
    };
    let address = link.address(&far, Family::V4);

    let (stream, accepted) = connect(&near, &far, address);
    let authority = Authority::new();
    let crypto = Crypto::auto();
    let client = authority.identity(&[SOURCE]);
    let client = client.client(&crypto, names(&[DESTINATION])).unwrap();
    let server = authority.identity(&[DESTINATION]);
    let server = server.server(&crypto, names(&[SOURCE])).unwrap();
    let accept = thread::spawn(move || control::server(accepted, &server, soon()).unwrap());
    let control = control::client(stream, &client, soon()).unwrap();
    let _far_control = accept.join().unwrap();
    set_liveness(control.socket(), &liveness).unwrap();

    let (_stream, accepted) = connect(&near, &far, address);
    set_liveness(&accepted, &liveness).unwrap();
    let consent = || PlainConsent::both(true, true).unwrap();
    let mut idle = DataReceiver::plain(accepted, consent(), stall_limit).unwrap();

    let (stream, _accepted) = connect(&near, &far, address);
    let mut sending = DataSender::plain(stream, consent(), stall_limit).unwrap();

    link.swallow(Direction::Both).unwrap();
    let error = control.receive(&mut [0; 1], Instant::now() + stall_limit);
    assert!(matches!(error, Err(ControlError::Unanswered)), "{error:?}");
    let error = idle.next(&mut [0; 1], None);
    assert!(matches!(error, Err(ReceiveError::Unanswered)), "{error:?}");
    set_liveness(sending.socket(), &liveness).unwrap();
    let mut payload = vec![7; 32 << 10];
    let error = (0..4096).find_map(|_| sending.send_with(&[1], &mut payload).err());
    assert!(matches!(error, Some(SendError::Unanswered)), "{error:?}");
}

#[test]
fn a_capture_holds_what_was_sent() {
    let Some((near, far, link)) = pair(&LinkOptions::default()) else {
        return;
    };
    let scratch = Scratch::new();
    let file = scratch.join("packets.pcap");
    let capture = link.capture(&far, &file).unwrap();
    let address = link.address(&far, Family::V6);
    let (stream, accepted) = connect(&near, &far, address);
    transfer(stream, accepted, 1 << 20);
    let (mut stream, mut accepted) = connect(&near, &far, address);
    stream.write_all(b"who flies with the flock").unwrap();
    accepted.read_exact(&mut [0; 24]).unwrap();
    capture.stop().unwrap();
    let packets = fs::read(&file).unwrap();
    let found = packets
        .windows(24)
        .any(|bytes| bytes == b"who flies with the flock");
    assert!(
        found,
        "text not found in {} bytes of packets",
        packets.len()
    );
}

#[test]
fn a_host_takes_its_processes_with_it() {
    if !need::hosts() {
        return;
    }
    let host = Host::new("short").unwrap();
    let mut child = sleeper(&host);
    let namespace = namespace_file(host.namespace());
    drop(host);
    assert!(!namespace.exists());
    assert!(!child.wait().unwrap().success());
}

#[test]
fn hosts_of_a_killed_process_are_swept_and_no_others() {
    if !need::hosts() {
        return;
    }
    let own = Host::new("own").unwrap();
    let mut maker = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "makes_a_host_and_waits",
            "--ignored",
            "--nocapture",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said: Vec<String> = BufReader::new(maker.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap)
        .filter_map(|line| line.split_once("made ").map(|(_, rest)| rest.to_owned()))
        .take(1)
        .collect();
    let (namespace, process) = said[0].split_once(' ').unwrap();
    let process = Path::new("/proc").join(process);

    hosts::sweep();
    assert!(
        namespace_file(namespace).exists(),
        "removed although its maker lives"
    );
    maker.kill().unwrap();
    maker.wait().unwrap();
    assert!(namespace_file(namespace).exists(), "removed before a sweep");
    hosts::sweep();
    assert!(!namespace_file(namespace).exists());
    assert!(namespace_file(own.namespace()).exists());
    // A zombie has ended: only the system's first process reaps an orphan, which can take a while.
    let runs = || fs::read_to_string(process.join("stat")).is_ok_and(|stat| !stat.contains(") Z "));
    let deadline = Instant::now() + Duration::from_secs(10);
    while runs() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    assert!(!runs(), "the process on the removed host still runs");
}

/// `hosts_of_a_killed_process_are_swept_and_no_others` runs this test as a separate process.
#[test]
#[ignore = "run by another test"]
fn makes_a_host_and_waits() {
    let host = Host::new("orphan").unwrap();
    let mut child = sleeper(&host);
    println!("made {} {}", host.namespace(), child.id());
    let _ = child.wait();
}

/// A process on a host. The process runs longer than any test.
fn sleeper(host: &Host) -> Child {
    host.command("sleep")
        .arg("60")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn namespace_file(name: &str) -> PathBuf {
    Path::new("/run/netns").join(name)
}

/// In both directions and at both ends of a link, payload is counted under the listener's port, and
/// a word is found at any offset.
#[test]
fn a_count_finds_payload_by_port_and_by_content() {
    const WORD: u64 = 0x0123_4567_89ab_cdef;
    const HIGH: u16 = 61_000;
    let Some((near, far, link)) = pair(&LinkOptions::default()) else {
        return;
    };
    for family in [Family::V4, Family::V6] {
        let wire = link.count(&near, [WORD].into()).unwrap();
        let idle = link.count(&far, [WORD].into()).unwrap();
        let address = link.address(&far, family);
        let listener = far.run(|| TcpListener::bind((address, HIGH)));
        let listener = listener.unwrap().unwrap();
        let mut stream = near
            .run(|| TcpStream::connect((address, HIGH)))
            .unwrap()
            .unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        let mut content = vec![0; 1003];
        content.extend(WORD.to_le_bytes());
        accepted.write_all(&content).unwrap();
        stream.read_exact(&mut vec![0; content.len()]).unwrap();
        stream.write_all(&[1]).unwrap();
        accepted.read_exact(&mut [0]).unwrap();
        for wire in [wire, idle] {
            let traffic = wire.stop().unwrap();
            assert_eq!(traffic.bytes, [(HIGH, 1012)].into(), "{traffic:?}");
            assert_eq!(traffic.found, [(HIGH, 1)].into(), "{traffic:?}");
            assert_eq!(traffic.tried, [(HIGH, 1)].into(), "{traffic:?}");
            assert_eq!(traffic.others, 0, "{traffic:?}");
        }
    }
}
