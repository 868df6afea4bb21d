//! Memory of a memfd gets transparent huge pages if the process requests them with madvise(2).
//! In addition, the kernel's setting for shared memory must allow this (`advise`).

use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use dunlin_kernel_tests::{Needs, run};
use dunlin_linux::mapping::{Backing, HUGE_PAGE_BYTES, advise_huge_pages, allocate};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// The unit of `st_blocks` (stat(3type)).
const BLOCK_BYTES: u64 = 512;

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        for (setting, advised, expected) in [
            ("never", true, 4096),
            ("advise", false, 4096),
            ("advise", true, HUGE_PAGE_BYTES),
        ] {
            let _chosen = guest.set(SETTING, setting);
            let memory = allocate(4 * HUGE_PAGE_BYTES, Backing::Memfd).expect("there is memory");
            if advised {
                advise_huge_pages(&memory);
            }
            memory
                .write_slice(&[1], GuestAddress(0))
                .expect("the memory is writable");
            let region = memory.iter().next().expect("the memory has a region");
            let file = region.file_offset().expect("the memory is a memfd").file();
            let populated = file.metadata().expect("the memfd is open").blocks() * BLOCK_BYTES;
            assert_eq!(populated, expected, "{setting}, advised: {advised}");
        }
    })
}
