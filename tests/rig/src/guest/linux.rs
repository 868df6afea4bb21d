//! Linux with the writer as its only process.

use std::path::Path;

use super::{Boot, Initramfs, Workload};
use crate::debian::Kernel;

/// Built by the build script from src/bin/rig-writer.rs, statically linked.
const WRITER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rig-writer"));

pub(super) fn boot(kernel: &Kernel, workload: &Workload, folder: &Path) -> Boot {
    let mut initramfs = Initramfs::default();
    initramfs.folder("dev");
    // The kernel opens the console for the first process.
    initramfs.character_device("dev/console", 5, 1);
    initramfs.file("init", 0o755, WRITER);
    let path = folder.join("linux.cpio");
    // The kernel passes everything after the two dashes to the first process.
    let line = format!(
        "console=ttyS0 loglevel=4 panic=-1 -- {} {} {} {} {} {}",
        workload.pages,
        workload.hot,
        workload.stride(),
        workload.content_number(),
        workload.rate.unwrap_or(0),
        workload.seed,
    );
    let options = [
        "-machine",
        "pc",
        "-no-reboot",
        "-kernel",
        &kernel.image.to_string_lossy(),
        "-initrd",
        &path.to_string_lossy(),
        "-append",
        &line,
    ]
    .map(str::to_owned);
    Boot {
        files: vec![(path, initramfs.finish())],
        options: options.into(),
    }
}
