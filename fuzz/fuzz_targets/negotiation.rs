//! Any opening message, and the answer to any offer: what a destination
//! selects is always within the offer.
#![no_main]

use dunlin_proto::negotiate::{
    Features, Opening, PRELUDE_BYTES, Prelude, Supported, VERSIONS, select,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((prelude, body)) = bytes.split_first_chunk::<PRELUDE_BYTES>() else {
        return;
    };
    let Ok(prelude) = Prelude::decode(prelude) else {
        return;
    };
    let Ok(opening) = Opening::decode(&prelude, body) else {
        return;
    };
    let mut encoded = Vec::new();
    opening
        .encode(&mut encoded)
        .expect("what decodes is within every limit");
    if let Opening::Offer(offer) = opening {
        let supported = Supported {
            versions: VERSIONS,
            features: Features::VERIFY,
            required: Features::NONE,
            plain_allowed: body.len() % 2 == 0,
        };
        if let Ok(selection) = select(&offer, &supported) {
            assert_eq!(selection.confirm(&offer), Ok(()));
        }
    }
});
