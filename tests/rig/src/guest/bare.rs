//! The guest without an operating system, as an image.

use std::path::Path;

use super::{Boot, Workload};

/// Assembled by the build script from guest/bare.S.
const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/bare.elf"));

/// The marker in the image that precedes the guest's parameters.
const MARK: &[u8] = b"Dunlin rig guest";

/// The guest-physical address of the first page.
const FIRST: u64 = 0x40_0000;

pub(super) fn image(workload: &Workload) -> Vec<u8> {
    let end = FIRST + workload.pages * 4096;
    assert!(
        end <= u64::from(workload.memory_mib) << 20,
        "the pages do not fit into the memory: {workload:?}"
    );
    let mut image = IMAGE.to_vec();
    let mark = image
        .windows(MARK.len())
        .position(|bytes| bytes == MARK)
        .expect("the assembled guest contains the marker");
    let parameters = [
        FIRST,
        workload.pages,
        workload.hot,
        workload.stride(),
        workload.content_number(),
        workload.rate.unwrap_or(0),
        workload.seed,
    ];
    let place = &mut image[mark + MARK.len()..];
    for (place, parameter) in place.chunks_exact_mut(8).zip(parameters) {
        place.copy_from_slice(&parameter.to_le_bytes());
    }
    image
}

pub(super) fn boot(workload: &Workload, folder: &Path) -> Boot {
    let path = folder.join("bare.elf");
    let options = [
        "-machine",
        // The guest calibrates its clock with the timer chip, unless the hypervisor reports the
        // frequency. It does not use the real-time clock.
        "microvm,pit=on,pic=on,rtc=off",
        "-bios",
        "qboot.rom",
        "-kernel",
        &path.to_string_lossy(),
    ]
    .map(str::to_owned);
    Boot {
        files: vec![(path, image(workload))],
        options: options.into(),
    }
}
