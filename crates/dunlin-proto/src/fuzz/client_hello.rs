//! The first bytes of an unauthenticated client.

use crate::client_hello::{Look, look};
use crate::limits::{MAX_CLIENT_FLIGHT_BYTES, MAX_SERVER_NAME_BYTES};

/// Looks at arbitrary first bytes, both unchanged and as the content of records of several sizes.
/// Checks that each look asks for more bytes than have arrived, but not for more bytes than the
/// hello needs or than the limit allows. Also checks that an error is final, and that the name does
/// not depend on the record size.
pub fn fuzz_client_hello(bytes: &[u8]) {
    grows(bytes);
    let Some((&size, message)) = bytes.split_first() else {
        return;
    };
    let message = &message[..message.len().min(4096)];
    let whole = look(&cut(message, 16384));
    let pieces = cut(message, usize::from(size % 16) + 1);
    grows(&pieces);
    if pieces.len() <= MAX_CLIENT_FLIGHT_BYTES {
        let pieces = look(&pieces);
        match (&whole, &pieces) {
            // The numbers of needed bytes include the headers of the records, so they depend on the
            // size of the records. The two errors may differ too.
            (Ok(Look::Needs(_)), Ok(Look::Needs(_))) | (Err(_), Err(_)) => {}
            _ => assert_eq!(whole, pieces),
        }
    }
}

fn cut(message: &[u8], size: usize) -> Vec<u8> {
    let mut records = Vec::new();
    for part in message.chunks(size) {
        let length = u16::try_from(part.len()).expect("a part is short");
        records.extend([22, 3, 1]);
        records.extend(length.to_be_bytes());
        records.extend(part);
    }
    records
}

fn grows(bytes: &[u8]) {
    let mut there = 0;
    let last = look(bytes);
    loop {
        let found = look(&bytes[..there]);
        match &found {
            Ok(Look::Needs(least)) => {
                assert!(there < *least && *least <= MAX_CLIENT_FLIGHT_BYTES);
                if *least > bytes.len() {
                    assert!(matches!(last, Ok(Look::Needs(_)) | Err(_)));
                    return;
                }
                there = *least;
            }
            Ok(Look::Hello(hello)) => {
                let name = hello.server_name.as_deref().unwrap_or("a");
                assert!((1..=MAX_SERVER_NAME_BYTES).contains(&name.len()));
                assert!(name.bytes().all(|byte| byte.is_ascii_graphic()));
                assert!(!name.bytes().any(|byte| byte.is_ascii_uppercase()));
                assert_eq!(found, last);
                // The last look asked for no more bytes than needed: with one byte less, the hello
                // is incomplete.
                assert!(there == 0 || !matches!(look(&bytes[..there - 1]), Ok(Look::Hello(_))));
                return;
            }
            Err(_) => {
                assert!(last.is_err() || there > MAX_CLIENT_FLIGHT_BYTES);
                return;
            }
        }
    }
}

/// Complete hellos, messages prefixed by a record size, and a message of another protocol.
#[cfg(test)]
pub(super) fn seeds() -> Vec<super::driver::Seed> {
    use crate::client_hello::tests::{cut, large, message, names};

    let pool = message(&[(10, vec![0, 2, 0, 24]), names(b"pool")]);
    let seed = |name: &str, bytes| (name.to_owned(), bytes);
    vec![
        seed("pool", cut(&pool, 16384)),
        seed("in-records-of-3", cut(&pool, 3)),
        seed("post-quantum", cut(&large(), 1000)),
        seed("message", [&[6][..], &pool].concat()),
        seed("nameless", [&[6][..], &message(&[])].concat()),
        seed("http", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
    ]
}
