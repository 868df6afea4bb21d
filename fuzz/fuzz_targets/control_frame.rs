//! Any control message: what decodes encodes again to the same meaning.
#![no_main]

use dunlin_proto::control::{CONTROL_HEADER_BYTES, Header, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((header, body)) = bytes.split_first_chunk::<CONTROL_HEADER_BYTES>() else {
        return;
    };
    let Ok(header) = Header::decode(header) else {
        return;
    };
    let Ok(Some(message)) = Message::decode(&header, body) else {
        return;
    };
    let mut encoded = Vec::new();
    message
        .encode(&header.envelope(), &mut encoded)
        .expect("what decodes is within every limit");
    let (header, body) = encoded
        .split_first_chunk::<CONTROL_HEADER_BYTES>()
        .expect("a message starts with its header");
    let again = Header::decode(header).and_then(|header| Message::decode(&header, body));
    assert_eq!(again, Ok(Some(message)));
});
