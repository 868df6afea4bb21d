//! Tests messages out of turn before *describe*, a repeated *describe*, and a *describe* with false
//! contents.

use dunlin::engine::vmm::FaultCode;
use dunlin_proto::control::{Message, Region, RegionKind, RegionTable};
use dunlin_test_support::engine::peer::*;
use dunlin_test_support::hostile::*;

use crate::{MALFORMED, out_of_turn, selected};

#[test]
fn i7_lies_before_the_vm_is_described_end_it() {
    for message in out_of_turn() {
        let name = message.kind().name();
        let (row, text) = (
            format!("describe: {name} instead"),
            format!("unexpected {name}"),
        );
        refused_by_destination(&row, MALFORMED, &text, |victim| {
            let mut peer = selected(victim);
            peer.send(&message);
            peer.into()
        });
    }
    refused_by_destination(
        "describe: twice",
        MALFORMED,
        "unexpected describe",
        |victim| {
            let (mut peer, _) = Peer::accepted(victim.to, victim.tls);
            peer.send(&describe());
            peer.into()
        },
    );
}

/// A *describe* of two regions for tests to change, and the offset of the region table's count. The
/// regions follow the count. A region without a name takes 30 bytes.
fn two_regions(peer: &mut Peer) -> (Vec<u8>, usize) {
    let Message::Describe(mut described) = describe() else {
        unreachable!()
    };
    let region = |id| Region {
        id,
        kind: RegionKind::Ram,
        flags: 0,
        backing_page_bytes: 4096,
        length: 1 << 20,
        guest_physical: u64::from(id) << 32,
        name: String::new(),
    };
    described.regions = RegionTable::new(vec![region(0), region(1)]).unwrap();
    let bytes = peer.encode(&Message::Describe(described));
    let count_at = bytes.len() - 2 * 30 - 2;
    assert_eq!(bytes[count_at..count_at + 2], [2, 0]);
    (bytes, count_at)
}

#[test]
fn i7_a_vm_that_cannot_be_is_refused() {
    // Offset from the table's count, the bytes to write there, and the expected error.
    let lies: [(&str, usize, &[u8], &str); 7] = [
        ("no region", 0, &[0, 0], "region count"),
        ("65535 regions", 0, &[255, 255], "region count"),
        ("two regions of one number", 2 + 30, &[0, 0], "region id"),
        ("half a page", 2 + 12, &[0, 8, 0, 0], "region length"),
        (
            "a region of 2^63 bytes",
            2 + 12,
            &[0, 0, 0, 0, 0, 0, 0, 128],
            "region length",
        ),
        (
            "regions of 2^52 bytes each",
            2 + 12,
            &[0, 0, 0, 0, 0, 0, 16, 0],
            "memory length",
        ),
        (
            "backing pages of 3 bytes",
            2 + 8,
            &[3, 0, 0, 0],
            "backing page length",
        ),
    ];
    for (lie, at, value, text) in lies {
        refused_by_destination(&format!("describe: {lie}"), MALFORMED, text, |victim| {
            let mut peer = selected(victim);
            let (mut bytes, count_at) = two_regions(&mut peer);
            bytes[count_at + at..][..value.len()].copy_from_slice(value);
            peer.stream.send(&bytes).unwrap();
            peer.into()
        });
    }
    // The decoder reads the second region as an extension field that is unknown and mandatory.
    let missing = FaultCode::FeatureMissing;
    refused_by_destination(
        "describe: fewer regions than follow",
        missing,
        "extension field",
        |victim| {
            let mut peer = selected(victim);
            let (mut bytes, count_at) = two_regions(&mut peer);
            bytes[count_at] = 1;
            peer.stream.send(&bytes).unwrap();
            peer.into()
        },
    );
}
