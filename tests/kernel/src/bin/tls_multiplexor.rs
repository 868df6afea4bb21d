//! KCM takes a socket with keys in the kernel, and cuts its records wrongly unless each holds whole messages of one size.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_kernel_tests::tls::{Keys, connected, install};
use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::socket::wait_readable;
use dunlin_rig::linux::bpf::{Instruction, Kind, length_prefix, load, of_one_size};
use dunlin_rig::linux::kcm::Messages;
use nix::sys::socket::{MsgFlags, recv, send};

/// Of the messages of one size.
const SIZE: usize = 1000;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |_| {
        without_keys_messages_go_to_two_threads();
        without_keys_two_that_come_at_once_are_cut_wrongly();
        a_message_of_two_segments_or_records(When::Never);
        for when in [When::Before, When::After] {
            a_length_is_looked_for_in_front_of_the_content(when);
            messages_of_one_size_go_to_two_threads(when);
            a_message_of_two_segments_or_records(when);
            what_is_sent_is_sealed(when);
        }
    })
}

/// When a connection gets its keys.
#[derive(Clone, Copy, Debug)]
enum When {
    Never,
    /// It becomes the multiplexor's.
    Before,
    After,
}

/// A multiplexor of two sockets with one connection, and the connection's other end.
fn multiplexor(when: When, program: &[Instruction]) -> ([Messages; 2], TcpStream) {
    let (near, far) = connected();
    let keys = || {
        install(&near, &Keys::new(1), &Keys::new(2));
        install(&far, &Keys::new(2), &Keys::new(1));
    };
    let program = load(Kind::Filter, program).expect("it is a program");
    let one = Messages::new().expect("the kernel has KCM");
    let other = one.another().expect("the multiplexor is there");
    if let When::Before = when {
        keys();
    }
    // Nothing refuses it: a socket of TCP that is connected will do.
    one.attach(&near, &program).expect("it is taken");
    if let When::After = when {
        keys();
    }
    ([one, other], far)
}

/// A message that comes, or `None` if none does.
fn receive(socket: &Messages) -> Option<Vec<u8>> {
    let deadline = Instant::now() + Duration::from_secs(2);
    if !wait_readable(socket, deadline).expect("it is a socket") {
        return None;
    }
    let mut buffer = vec![0; 1 << 16];
    let bytes = recv(
        socket.as_fd().as_raw_fd(),
        &mut buffer,
        MsgFlags::MSG_DONTWAIT,
    )
    .ok()?;
    buffer.truncate(bytes);
    Some(buffer)
}

fn prefixed(content: &[u8]) -> Vec<u8> {
    let mut message = (content.len() as u32).to_be_bytes().to_vec();
    message.extend(content);
    message
}

/// Writes the messages one by one, receives them in two threads, and says what came, in their order.
fn by_two_threads(sockets: [Messages; 2], far: &mut TcpStream, sent: &[Vec<u8>]) -> Vec<Vec<u8>> {
    for message in sent {
        far.write_all(message).expect("it is sent");
        // What a busy machine takes in together goes to one of them.
        thread::sleep(Duration::from_millis(50));
    }
    let threads = sockets.map(|socket| {
        thread::spawn(move || {
            let mut got = Vec::new();
            while let Some(message) = receive(&socket) {
                got.push(message);
            }
            got
        })
    });
    let shares = threads.map(|thread| thread.join().expect("it receives"));
    let counts = shares.each_ref().map(Vec::len);
    assert!(!counts.contains(&0), "each has its share: {counts:?}");
    let mut got = shares.concat();
    got.sort();
    got
}

fn without_keys_messages_go_to_two_threads() {
    let (sockets, mut far) = multiplexor(When::Never, &length_prefix());
    far.set_nodelay(true).expect("it can be set");
    let sent: Vec<_> = (1..=4)
        .map(|length| prefixed(&vec![7; length * 100]))
        .collect();
    assert_eq!(by_two_threads(sockets, &mut far, &sent), sent);
}

/// The program is run on the buffer from its beginning (`kcm_parse_func_strparser`), not from where
/// the message begins in it.
fn without_keys_two_that_come_at_once_are_cut_wrongly() {
    let ([one, _other], mut far) = multiplexor(When::Never, &length_prefix());
    let (first, second) = (prefixed(&[1; 100]), prefixed(&[2; 200]));
    let both = [first.clone(), second.clone()].concat();
    far.write_all(&both).expect("it is sent");
    assert_eq!(receive(&one), Some(first));
    let cut = receive(&one).expect("something comes");
    assert_eq!(cut, second[..104], "it has the length of the first");
}

/// There lie the bytes of a record's header, or none at all.
fn a_length_is_looked_for_in_front_of_the_content(when: When) {
    let (sockets, mut far) = multiplexor(when, &length_prefix());
    let message = prefixed(&[1; 100]);
    far.write_all(&message).expect("it is sent");
    for socket in &sockets {
        assert_ne!(receive(socket).as_ref(), Some(&message), "{when:?}");
    }
}

fn messages_of_one_size_go_to_two_threads(when: When) {
    let (sockets, mut far) = multiplexor(when, &of_one_size(SIZE as i32));
    // In records of three messages each.
    let records: Vec<Vec<u8>> = (0..4_u8)
        .map(|record| (0..3).flat_map(|at| [record * 3 + at; SIZE]).collect())
        .collect();
    let got = by_two_threads(sockets, &mut far, &records);
    let expected: Vec<Vec<u8>> = records.concat().chunks(SIZE).map(<[u8]>::to_vec).collect();
    assert!(got == expected, "{when:?}: {} messages", got.len());
}

/// Behind a record's content its type and its tag lie in the buffer, and become part of a message
/// that goes on in the next (`__strp_recv` appends whole buffers).
fn a_message_of_two_segments_or_records(when: When) {
    let ([one, other], mut far) = multiplexor(when, &of_one_size(SIZE as i32));
    for _ in 0..2 {
        far.write_all(&[1; SIZE / 2]).expect("it is sent");
    }
    let got = receive(&one).or_else(|| receive(&other));
    let got = got.expect("as many bytes as were sent are a message");
    assert_eq!(got.len(), SIZE);
    let is_whole = got == [1; SIZE];
    assert_eq!(is_whole, matches!(when, When::Never), "{when:?}");
}

fn what_is_sent_is_sealed(when: When) {
    let ([one, _other], mut far) = multiplexor(when, &length_prefix());
    let message = prefixed(b"an answer");
    let sent = send(one.as_fd().as_raw_fd(), &message, MsgFlags::empty());
    assert_eq!(sent, Ok(message.len()));
    let mut got = vec![0; message.len()];
    far.read_exact(&mut got).expect("it opens");
    assert_eq!(got, message);
}
