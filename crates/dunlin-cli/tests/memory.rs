//! Memory, wire bytes and CPU time of a migration, measured from outside two separate processes.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use dunlin_bench::process::peak_bytes;
use dunlin_test_base::huge_pages;
use dunlin_test_base::kvm;
use serde_json::Value;
use support::{Hosts, finish};

const MIB: u64 = 1 << 20;

/// A process's resident memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Resident {
    all: u64,
    /// Resident memory outside the guest's mappings.
    outside: u64,
    /// Resident memory in the guest's mappings.
    guest: u64,
}

/// Reads smaps. A mapping counts as guest memory if it is one of Dunlin's memfds, or is at least as
/// large as the guest's smallest mapping.
fn resident(pid: u32, guest_bytes: u64) -> Option<Resident> {
    // A guest of more than 3 GiB has two mappings. In these tests the smaller one has 3 GiB.
    let least = guest_bytes.min(3 << 30);
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    let mut found = Resident::default();
    let mut guests = false;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or("");
        if let Some((from, to)) = first.split_once('-').filter(|_| !first.ends_with(':')) {
            let parse = |text: &str| u64::from_str_radix(text, 16).unwrap();
            guests = parse(to) - parse(from) >= least || line.contains("memfd:dunlin-guest");
        } else if first == "Rss:" {
            let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            found.all += kib * 1024;
            *(if guests {
                &mut found.guest
            } else {
                &mut found.outside
            }) += kib * 1024;
        }
    }
    Some(found)
}

/// Bytes that the process's memfds of guest memory occupy, mapped or not.
fn memfd_bytes(pid: u32) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter(|entry| {
            fs::read_link(entry.path())
                .is_ok_and(|to| to.to_string_lossy().contains("memfd:dunlin-guest"))
        })
        .map(|entry| fs::metadata(entry.path()).unwrap().blocks() * 512)
        .sum()
}

/// Samples the memory of both processes until the work is done. Returns the result of the work, and
/// each process's peak of resident memory outside its guest's mappings.
fn peaks_while<T>(pids: [u32; 2], guest_bytes: u64, work: impl FnOnce() -> T) -> (T, [u64; 2]) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut peaks = [0; 2];
            let mut samples = [0; 2];
            while !done.load(Ordering::SeqCst) {
                for ((peak, samples), pid) in peaks.iter_mut().zip(&mut samples).zip(pids) {
                    if let Some(now) = resident(pid, guest_bytes) {
                        *peak = now.outside.max(*peak);
                        *samples += 1;
                    }
                }
                thread::sleep(Duration::from_millis(1));
            }
            // A lane keeps its buffers from its first chunk to its last, so three samples show the
            // peak even of a small migration, which takes about 20 ms.
            assert!(
                samples.iter().all(|count| *count >= 3),
                "{samples:?} samples"
            );
            peaks
        });
        let result = work();
        done.store(true, Ordering::SeqCst);
        (result, sampler.join().unwrap())
    })
}

#[test]
fn i8_either_side_needs_at_most_64_mib_beside_the_guest_with_eight_lanes() {
    let Some(_turn) = kvm() else { return };
    for backing in ["private", "memfd"] {
        let hosts = Hosts::new();
        let source = hosts.run(
            "1",
            &format!("--memory 512M --backing {backing} --vcpus 2 --dirty-rate 20000"),
        );
        let destination = hosts.receive("b", "2", "");
        let pids = [source.pid(), destination.pid()];
        let command = hosts.migrate(&source, &destination, "a", "--json --lanes 8 --peer b.test");
        let (done, peaks) = peaks_while(pids, 512 * MIB, || finish(command));
        let moved = done.expect(0).last();
        assert_eq!(moved["lanes"].as_array().unwrap().len(), 8);
        let here = resident(destination.pid(), 512 * MIB).unwrap();
        assert!(
            here.guest > 500 * MIB,
            "guest mapping not recognised: {here:?}"
        );
        println!(
            "{backing}, 8 lanes: at most {:.1} MiB at the source and {:.1} MiB at the destination \
             beside the guest",
            peaks[0] as f64 / MIB as f64,
            peaks[1] as f64 / MIB as f64
        );
        assert!(peaks.iter().all(|peak| *peak <= 64 * MIB), "{peaks:?}");
    }
}

/// The cost of a migration: bytes on the wire, CPU-seconds, the growth of both processes' memory,
/// and the bytes in the source's and the destination's memfds of guest memory.
struct Cost {
    wire_bytes: u64,
    cpu_s: f64,
    source_growth: u64,
    destination_growth: u64,
    memfd: [u64; 2],
}

fn cost(memory: &str, fill: &str, backing: &str) -> Cost {
    let hosts = Hosts::new();
    let source = hosts.run(
        "1",
        &format!("--memory {memory} --fill-size {fill} --workload idle --backing {backing}"),
    );
    let destination = hosts.receive("b", "2", "");
    let before =
        [&source, &destination].map(|process| resident(process.pid(), 1 << 62).unwrap().all);
    let source_memfd = memfd_bytes(source.pid());
    let watched = source.pid();
    let done = AtomicBool::new(false);
    let (moved, source_peak): (Value, u64) = thread::scope(|scope| {
        // The source's process ends with the migration, so read its high-water mark before that.
        let sampler = scope.spawn(|| {
            let mut highest = 0;
            while !done.load(Ordering::SeqCst) {
                highest = peak_bytes(watched).unwrap_or(0).max(highest);
                thread::sleep(Duration::from_millis(2));
            }
            assert!(highest > 0, "no sample of the source");
            highest
        });
        let flags = "--json --lanes 2 --peer b.test";
        let moved = finish(hosts.migrate(&source, &destination, "a", flags));
        done.store(true, Ordering::SeqCst);
        (moved.expect(0).last(), sampler.join().unwrap())
    });
    destination.wait_for("received");
    let wire_bytes = moved["wire_bytes"].as_u64().unwrap();
    let per_gib = moved["source_cpu_s_per_gib"].as_f64().unwrap()
        + moved["destination_cpu_s_per_gib"].as_f64().unwrap();
    Cost {
        wire_bytes,
        cpu_s: per_gib * wire_bytes as f64 / (1_u64 << 30) as f64,
        source_growth: source_peak.saturating_sub(before[0]),
        destination_growth: peak_bytes(destination.pid())
            .unwrap()
            .saturating_sub(before[1]),
        memfd: [source_memfd, memfd_bytes(destination.pid())],
    }
}

/// Cost of moving a guest with one non-zero page in each 2 MiB.
#[derive(Debug)]
struct Scattered {
    raw_pages: u64,
    wire_bytes: u64,
    /// Resident bytes of the guest's memory at the source and at the destination.
    guest: [u64; 2],
    outside: [u64; 2],
}

fn scattered(guest: &str, bytes: u64, flag: &str) -> Scattered {
    let hosts = Hosts::new();
    let flags =
        format!("--guest {guest} --memory {bytes} --fill sparse --workload idle --backing private");
    let source = hosts.run("1", &format!("{flags} {flag}"));
    let destination = hosts.receive("b", "2", flag);
    let at_source = resident(source.pid(), bytes).unwrap();
    let command = hosts.migrate(&source, &destination, "a", "--json --peer b.test");
    let pids = [source.pid(), destination.pid()];
    let (done, outside) = peaks_while(pids, bytes, || finish(command));
    let moved = done.expect(0).last();
    destination.wait_for("received");
    let at_destination = resident(destination.pid(), bytes).unwrap();
    Scattered {
        raw_pages: moved["raw_pages"].as_u64().unwrap(),
        wire_bytes: moved["wire_bytes"].as_u64().unwrap(),
        guest: [at_source.guest, at_destination.guest],
        outside,
    }
}

#[test]
fn scattered_content_costs_the_same_on_the_wire_and_whole_huge_pages_in_memory() {
    let soaks = std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1");
    let bytes = if soaks { 2048 * MIB } else { 512 * MIB };
    let Some(policy) = huge_pages::transparent() else {
        return;
    };
    let turn = kvm();
    let mut guests = vec!["process"];
    guests.extend(turn.is_some().then_some("kvm"));
    // The first 4 MiB hold the guest's program and tables and are not filled.
    let pages = bytes / (2 * MIB) - 2;
    for guest in guests {
        let [huge, small] = ["", "--no-huge-pages"].map(|flag| scattered(guest, bytes, flag));
        for (what, cost) in [("huge", &huge), ("small", &small)] {
            println!(
                "{guest}, {} MiB, one page in each 2 MiB, {what} pages: {:.2} MiB on the wire, {} \
                 pages; guest memory {:.1} MiB at the source, {:.1} MiB at the destination; beside \
                 it {:.1} and {:.1} MiB",
                bytes / MIB,
                cost.wire_bytes as f64 / MIB as f64,
                cost.raw_pages,
                cost.guest[0] as f64 / MIB as f64,
                cost.guest[1] as f64 / MIB as f64,
                cost.outside[0] as f64 / MIB as f64,
                cost.outside[1] as f64 / MIB as f64,
            );
            // A guest on KVM has some more non-zero pages, and writes a few pages during the
            // migration.
            let own = if guest == "kvm" { 64 } else { 0 };
            assert!(
                (pages..=pages + own).contains(&cost.raw_pages),
                "{guest}, {what}: {cost:?}, {pages} pages"
            );
            let (payload, own) = (pages * 4096, own * 4096);
            assert!(
                cost.wire_bytes <= payload * 103 / 100 + own + 16 * 1024,
                "{guest}, {what}: {cost:?}, {payload} bytes"
            );
            assert!(cost.outside.iter().all(|bytes| *bytes <= 64 * MIB));
        }
        // On both sides, each non-zero page makes a whole huge page of 2 MiB resident.
        for resident in huge.guest {
            assert!(resident > bytes * 9 / 10, "{guest}: {huge:?}");
            assert!(resident <= bytes, "{guest}: {huge:?}");
        }
        if policy == "madvise" {
            for resident in small.guest {
                assert!(resident <= pages * 4096 + 2 * MIB, "{guest}: {small:?}");
            }
        }
    }
}

#[test]
fn a_mostly_zero_guest_costs_its_non_zero_pages() {
    let Some(_turn) = kvm() else { return };
    // Fill everything after the first 4 MiB, which hold the guest's program and tables. Compare
    // only guests with the same backing: private memory has huge pages, a memfd does not.
    for backing in ["private", "memfd"] {
        let dense = (0..3)
            .map(|_| cost("260M", "256M", backing).cpu_s)
            .fold(f64::MAX, f64::min);
        let costs = [cost("10G", "256M", backing), cost("10G", "256M", backing)];
        for sparse in &costs {
            let mib = |bytes: u64| bytes as f64 / MIB as f64;
            println!(
                "10 GiB of which 256 MiB are not zero, {backing}: {:.1} MiB on the wire, source \
                 grew by {:.1} MiB, destination by {:.1} MiB, memfds {:.1} and {:.1} MiB, CPU \
                 {:.3} s (256 MiB alone: {dense:.3} s)",
                mib(sparse.wire_bytes),
                mib(sparse.source_growth),
                mib(sparse.destination_growth),
                mib(sparse.memfd[0]),
                mib(sparse.memfd[1]),
                sparse.cpu_s,
            );
            assert!(sparse.wire_bytes >= 256 * MIB);
            assert!(sparse.wire_bytes * 100 <= 102 * 256 * MIB);
            assert!(sparse.source_growth <= 64 * MIB);
            assert!(sparse.destination_growth <= (256 + 64) * MIB);
            // The growth of the processes does not include pages of the memfds that are not mapped,
            // so check the memfds themselves.
            assert!(sparse.memfd[0] <= (256 + 8) * MIB);
            assert!(sparse.memfd[1] <= (256 + 8) * MIB);
        }
        let least = costs
            .iter()
            .map(|sparse| sparse.cpu_s)
            .fold(f64::MAX, f64::min);
        // The sparse guest may cost up to three times as much CPU time, because its 10 GiB are
        // scanned for holes.
        assert!(least <= 3.0 * dense, "{least} s against {dense} s");
    }
}
