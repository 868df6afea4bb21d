#![allow(clippy::unwrap_used)]

use super::*;

/// A hello with these extensions, as one handshake message.
pub(crate) fn message(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([1, 9]);
    body.extend([0, 4, 0x13, 1, 0xc0, 0x30, 1, 0]);
    let mut list = Vec::new();
    for (kind, content) in extensions {
        list.extend(kind.to_be_bytes());
        list.extend(short(content));
    }
    body.extend(short(&list));
    whole(&body)
}

fn short(content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap().to_be_bytes();
    [&length, content].concat()
}

fn whole(body: &[u8]) -> Vec<u8> {
    let [_, high, middle, low] = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[CLIENT_HELLO, high, middle, low], body].concat()
}

/// The extension `server_name`.
pub(crate) fn names(name: &[u8]) -> (u16, Vec<u8>) {
    let entry = [&[HOST_NAME][..], &short(name)].concat();
    (0, short(&entry))
}

/// Splits a message into records of `size` bytes.
pub(crate) fn cut(message: &[u8], size: usize) -> Vec<u8> {
    let records = message
        .chunks(size)
        .map(|part| [&[HANDSHAKE, 3, 1][..], &short(part)].concat());
    records.collect::<Vec<_>>().concat()
}

fn hello(name: &str) -> Result<Look, NoHello> {
    let server_name = Some(name.to_owned());
    Ok(Look::Hello(Hello { server_name }))
}

fn malformed(bytes: &[u8]) {
    let found = look(bytes);
    assert!(matches!(found, Err(NoHello::Malformed(_))), "{found:?}");
}

/// A hello with a post-quantum key share and other extensions before the name.
pub(crate) fn large() -> Vec<u8> {
    message(&[
        (0xfe0d, vec![1; 300]),
        (51, vec![2; 1220]),
        (16, short(b"\x02h2")),
        names(b"Host-A.example"),
        (21, vec![0; 200]),
    ])
}

/// Simulates a socket: waits each time for exactly as many bytes as `look`
/// asked for. Returns the result and the number of looks.
fn looks(bytes: &[u8]) -> (Result<Look, NoHello>, usize) {
    let mut there = 0;
    for times in 1.. {
        match look(&bytes[..there]) {
            Ok(Look::Needs(least)) => {
                assert!(least > there, "no further bytes are requested at {there}");
                assert!(
                    least <= bytes.len(),
                    "more bytes are requested than the hello has"
                );
                there = least;
            }
            found => return (found, times),
        }
    }
    unreachable!()
}

#[test]
fn the_name_is_found_in_few_looks_for_any_record_size() {
    let message = large();
    for size in [1, 2, 3, 4, 5, 7, 64, 1000, message.len(), 16384] {
        let bytes = cut(&message, size);
        let (found, times) = looks(&bytes);
        assert_eq!(found, hello("host-a.example"), "in records of {size}");
        assert!(times <= 53, "{times} looks at records of {size}");
        // Looks at every prefix, also at lengths that `look` did not request.
        for there in 0..bytes.len() {
            let found = look(&bytes[..there]);
            let Ok(Look::Needs(least)) = found else {
                panic!("{found:?} of {there} bytes in records of {size}");
            };
            assert!(there < least && least <= bytes.len());
        }
    }
}

#[test]
fn a_hello_without_a_name_is_valid() {
    let none = Ok(Look::Hello(Hello { server_name: None }));
    assert_eq!(look(&cut(&message(&[]), 16384)), none);
    assert_eq!(look(&cut(&message(&[(16, short(b"\x02h2"))]), 100)), none);
    // A valid hello that has no extensions.
    let mut body = vec![3, 1];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0, 47, 1, 0]);
    assert_eq!(body.len(), LEAST_BODY_BYTES);
    assert_eq!(look(&cut(&whole(&body), 16384)), none);
}

#[test]
fn bytes_after_the_hello_are_ignored() {
    let mut bytes = cut(&message(&[names(b"pool")]), 16384);
    bytes.extend([23, 3, 3, 0, 1, 0, 99]);
    assert_eq!(look(&bytes), hello("pool"));
}

#[test]
fn other_protocols_are_rejected_at_their_first_byte() {
    assert_eq!(look(b"G"), Err(NoHello::NotTls(b'G')));
    assert_eq!(look(b"\x16G"), Err(NoHello::NotTls(22)));
    // An SSL 2 hello.
    assert_eq!(look(b"\x80\x2e\x01\x03\x01"), Err(NoHello::NotTls(0x80)));
    assert_eq!(look(b""), Ok(Look::Needs(1)));
}

#[test]
fn i7_hostile_names_are_rejected() {
    for name in [
        &b""[..],
        b"a\0b",
        b"host a",
        b"h\xc3\xb6st",
        b"\x7f",
        &[b'a'; 256],
    ] {
        malformed(&cut(&message(&[names(name)]), 16384));
    }
    let longest = "a".repeat(255);
    let bytes = cut(&message(&[names(longest.as_bytes())]), 100);
    assert_eq!(look(&bytes), hello(&longest));
    // An unknown name type.
    malformed(&cut(&message(&[(0, short(b"\x01\x00\x01a"))]), 16384));
    // Invalid: two names in one list, or two lists.
    let two = [&[0][..], &short(b"a"), &[0], &short(b"b")].concat();
    malformed(&cut(&message(&[(0, short(&two))]), 16384));
    malformed(&cut(&message(&[names(b"a"), names(b"a")]), 16384));
    // Invalid: an empty list, an empty extension, or bytes after the list.
    malformed(&cut(&message(&[(0, short(b""))]), 16384));
    malformed(&cut(&message(&[(0, Vec::new())]), 16384));
    let mut behind = names(b"a");
    behind.1.push(0);
    malformed(&cut(&message(&[behind]), 16384));
}

#[test]
fn i7_hostile_lengths_are_rejected_before_waiting_for_bytes() {
    // The message's length, in its second to fourth byte, is over the limit.
    let long = [HANDSHAKE, 3, 1, 0, 200, CLIENT_HELLO, 0xff, 0xff, 0xff];
    assert_eq!(look(&long), Err(NoHello::TooLong));
    let most = u32::try_from(MAX_CLIENT_HELLO_BYTES - 4).unwrap();
    let [_, high, middle, low] = most.to_be_bytes();
    let longest = [HANDSHAKE, 3, 1, 0x40, 0, CLIENT_HELLO, high, middle, low];
    assert_eq!(look(&longest), Ok(Look::Needs(MAX_CLIENT_HELLO_BYTES + 5)));
    // Invalid: a message that is too short, an empty record, or an oversized record.
    malformed(&[HANDSHAKE, 3, 1, 0, 200, CLIENT_HELLO, 0, 0, 40]);
    malformed(&[HANDSHAKE, 3, 1, 0, 0]);
    malformed(&[HANDSHAKE, 3, 1, 0x40, 1]);
    // Invalid: another type of message, or a record of another type between the hello's records.
    malformed(&[HANDSHAKE, 3, 1, 0, 200, 2]);
    let mut alert = cut(&large(), 100);
    alert[105] = 21;
    malformed(&alert);
    // An endless series of one-byte records.
    let mut fine = cut(&vec![0; MAX_CLIENT_HELLO_BYTES], 1);
    for (at, byte) in [CLIENT_HELLO, 0, 0x3f, 0xfc].into_iter().enumerate() {
        fine[at * 6 + 5] = byte;
    }
    let refused = (0..MAX_CLIENT_FLIGHT_BYTES).find_map(|there| look(&fine[..there]).err());
    assert_eq!(refused, Some(NoHello::TooLong));
}

#[test]
fn i7_every_length_in_a_hello_is_checked_against_the_bytes() {
    let good = message(&[(10, vec![0; 6]), names(b"pool"), (16, short(b"\x02h2"))]);
    assert_eq!(look(&cut(&good, 16384)), hello("pool"));
    // With one changed byte, the hello is still complete, or it is rejected. `look` requests no
    // more bytes.
    for at in 4..good.len() {
        for wrong in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bad = good.clone();
            bad[at] = wrong;
            for size in [1, 16384] {
                let found = look(&cut(&bad, size));
                assert!(!matches!(found, Ok(Look::Needs(_))), "{wrong} at {at}");
            }
        }
    }
    // The total length of the extensions, too large by one and too small by one.
    let at = 4 + 2 + 32 + 2 + 6 + 2;
    for wrong in [1_u8, 255] {
        let mut bad = good.clone();
        bad[at + 1] = bad[at + 1].wrapping_add(wrong);
        malformed(&cut(&bad, 16384));
    }
    let mut session = good;
    session[38] = 33;
    malformed(&cut(&session, 16384));
}
