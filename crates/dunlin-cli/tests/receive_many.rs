//! The memory that a process needs, besides that of the VMs, to receive and own many small VMs.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use dunlin_bench::process::peak_bytes;
use support::{Hosts, Process, words};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The memory of a VM.
const GUEST_BYTES: u64 = 8 * MIB;
/// The number of VMs that arrive at the same time.
const AT_ONCE: usize = 5;

/// What a process needs besides its guests' memory.
#[derive(Clone, Copy, Debug)]
struct Cost {
    /// The peak of the resident memory, less the guests' memory, in bytes.
    beside: u64,
    descriptors: usize,
}

/// What a process with this number of guests needs besides their memory. `beside` is the process's
/// peak memory, less the present memory of the guests. The guests' memory has never been larger
/// than now. `beside` therefore lies between the present size and the peak size of all other
/// memory.
fn cost(pid: u32, guests: usize) -> Cost {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut guest = 0;
    let mut is_guest = false;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or("");
        if first.contains('-') && !first.ends_with(':') {
            is_guest = line.contains("memfd:dunlin-guest");
        } else if first == "Rss:" && is_guest {
            let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            guest += kib * KIB;
        }
    }
    let all = guests as u64 * GUEST_BYTES;
    // Half of each VM's memory is never touched.
    assert!((all / 3..=all).contains(&guest), "{guest} of {all}");
    Cost {
        beside: peak_bytes(pid).unwrap() - guest,
        descriptors: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(),
    }
}

/// Moves VMs into one process, some at a time.
fn receive(count: usize) -> Cost {
    let hosts = Hosts::new();
    let to = hosts.receive("b", "to", &format!("--sessions {count} --peer a.test"));
    let numbers: Vec<usize> = (0..count).collect();
    for batch in numbers.chunks(AT_ONCE) {
        let sources: Vec<_> = batch
            .iter()
            .map(|number| {
                let run = words(&format!(
                    "vm run --name vm{number} --guest process --memory {GUEST_BYTES} \
                     --backing memfd --working-set 1M --dirty-rate 100"
                ));
                Process::start(run, &hosts.scratch.join(format!("source{number}")))
            })
            .collect();
        let begin = |(number, source): (&usize, &Process)| {
            source.wait_for("started");
            let mut migrate = words(&format!(
                "vm migrate --name vm{number} --peer b.test --lanes 2 --to {} --identity",
                to.address
            ));
            migrate.arg(hosts.scratch.join("a"));
            migrate.arg("--control").arg(&source.control);
            Process::follow(migrate, &source.control)
        };
        let clients: Vec<_> = batch.iter().zip(&sources).map(begin).collect();
        for client in clients {
            let moved = client.wait_for_any(&["moved", "failed"]);
            assert_eq!(moved["event"], "moved", "{moved}");
        }
    }
    for _ in 0..count {
        to.wait_for("received");
    }
    cost(to.pid(), count)
}

/// The larger of the two numbers of VMs that the test compares. It is lower outside the soak.
fn many() -> usize {
    match std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1") {
        true => 100,
        false => 25,
    }
}

#[test]
fn i8_a_process_with_many_vms_needs_little_beside_their_memory() {
    let (few, many) = (AT_ONCE, many());
    let [first, last] = [few, many].map(receive);
    let further = (many - few) as u64;
    let growth = last.beside.saturating_sub(first.beside);
    println!(
        "{few} VMs: {:.1} MiB beside their memory, {} descriptors; {many} VMs: {:.1} MiB, {} \
         descriptors; {} KiB for each further VM",
        first.beside as f64 / MIB as f64,
        first.descriptors,
        last.beside as f64 / MIB as f64,
        last.descriptors,
        growth / further / KIB
    );
    assert!(last.beside <= 64 * MIB, "{last:?}");
    // Each further VM adds the stacks of its five threads and little else, because nothing of its
    // session is left. The processes can differ by up to 4 MiB in how much of the program's file is
    // resident.
    assert!(
        growth <= 4 * MIB + further * 100 * KIB,
        "{first:?}, {last:?}"
    );
    // By default, a process can open 1,024 descriptors.
    assert!(last.descriptors <= 10 * many, "{last:?}");
}
