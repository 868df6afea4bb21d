//! Runs the fuzz entries as unit tests, on a stable compiler. Each entry runs over its seeds in
//! `fuzz/seeds` and over mutations of these seeds. Each crate with fuzz entries includes this file
//! in its tests.
//!
//! A failure prints the random seed of its round. `DUNLIN_SEED=…` replays only that round.
//! `DUNLIN_WRITE_SEEDS=1` regenerates the seeds after a change of the wire format. To keep an input
//! that libFuzzer has found, put it into the target's folder under a name that begins with `kept-`.
//! The tests then run it too.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The name of an input, and its bytes.
pub(super) type Seed = (String, Vec<u8>);

/// The name that an entry and its seed folder share, and the entry.
pub(super) type Target = (&'static str, fn(&[u8]));

/// How long each target runs on mutated seeds.
const TIME: Duration = Duration::from_millis(900);
/// The maximum length of an input.
const LONGEST: usize = 4096;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs every target over its seeds and over mutations of them. The seeds on disk must equal those
/// that `seeds` generates.
pub(super) fn check(targets: &[Target], seeds: impl Fn(&str) -> Vec<Seed>) {
    let replay = std::env::var("DUNLIN_SEED").ok();
    let replay = replay.map(|seed| seed.parse::<u64>().expect("DUNLIN_SEED is a number"));
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let base = since_epoch.as_nanos() as u64;
    let mut failed = Vec::new();
    for &(name, run) in targets {
        let corpus = corpus(name, seeds(name));
        let mut passes = corpus
            .iter()
            .all(|(seed, bytes)| holds(name, &format!("its seed {seed}"), bytes, run));
        let round = |seed| {
            let bytes = mutate(&corpus, &mut Random(seed));
            holds(name, &format!("DUNLIN_SEED={seed}"), &bytes, run)
        };
        let began = Instant::now();
        let mut rounds = 0;
        match replay {
            Some(seed) => passes &= round(seed),
            None => {
                while passes && (rounds % 64 != 0 || began.elapsed() < TIME) {
                    passes = round(base.wrapping_add(rounds));
                    rounds += 1;
                }
            }
        }
        println!("{name}: {} seeds, {rounds} mutations", corpus.len());
        if !passes {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "{failed:?} failed; see above");
}

/// Runs one input. If it fails, prints how to run it again.
fn holds(name: &str, how: &str, bytes: &[u8], run: fn(&[u8])) -> bool {
    let held = catch_unwind(AssertUnwindSafe(|| run(bytes))).is_ok();
    if !held {
        eprintln!("{name} fails with {how}, on {bytes:02x?}");
    }
    held
}

/// The inputs of a target in `fuzz/seeds`. Except for the kept ones, they must equal `made`.
fn corpus(name: &str, made: Vec<Seed>) -> Vec<Seed> {
    let folder = root().join("fuzz/seeds").join(name);
    if std::env::var_os("DUNLIN_WRITE_SEEDS").is_some() {
        fs::create_dir_all(&folder).unwrap();
        for (seed, bytes) in &made {
            fs::write(folder.join(seed), bytes).unwrap();
        }
    }
    let mut found: Vec<Seed> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("fuzz/seeds/{name}: {error}; DUNLIN_WRITE_SEEDS=1 adds it"))
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect();
    found.sort();
    let kept = |(seed, _): &&Seed| !seed.starts_with("kept-");
    let mut made = made;
    made.sort();
    assert!(
        found.iter().filter(kept).eq(made.iter()),
        "fuzz/seeds/{name} differs from what the encoders write: DUNLIN_WRITE_SEEDS=1 rewrites the \
         seeds; remove those of messages that no longer exist"
    );
    found
}

/// The test vectors in docs/wire/ with names that begin with `prefix`.
pub(super) fn vectors(prefix: &str) -> Vec<Seed> {
    let mut pages: Vec<PathBuf> = fs::read_dir(root().join("docs/wire"))
        .unwrap()
        .map(|page| page.unwrap().path())
        .collect();
    pages.sort();
    let document: String = pages
        .iter()
        .map(|page| fs::read_to_string(page).unwrap())
        .collect();
    let mut seeds = Vec::new();
    for block in document.split("```vector\n").skip(1) {
        let (block, _) = block.split_once("```").unwrap();
        let (name, rows) = block.split_once('\n').unwrap();
        let name = name.strip_prefix("name: ").unwrap();
        if name.starts_with(prefix) {
            let bytes = rows
                .lines()
                .map(|row| row.split('#').next().unwrap())
                .flat_map(str::split_whitespace)
                .map(|byte| u8::from_str_radix(byte, 16).unwrap())
                .collect();
            let file = name.rsplit('/').next().unwrap().replace(' ', "-");
            seeds.push((file, bytes));
        }
    }
    assert!(!seeds.is_empty(), "docs/wire/ has no vector {prefix}");
    seeds
}

/// The part of each seed that begins at the offset returned by `start`.
pub(super) fn within(seeds: &[Seed], start: fn(&[u8]) -> usize) -> Vec<Seed> {
    seeds
        .iter()
        .map(|(name, bytes)| (name.clone(), bytes[start(bytes)..].to_vec()))
        .collect()
}

/// Random bytes, for targets that interpret them as operations.
pub(super) fn noise() -> Vec<Seed> {
    [16, 64, 256]
        .map(|length| {
            let mut random = Random(length as u64);
            let bytes = (0..length).map(|_| random.next() as u8).collect();
            (format!("noise-{length}"), bytes)
        })
        .to_vec()
}

/// SplitMix64 by Steele, Lea and Flood; every seed gives a good sequence.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Returns a seed with one to eight changes.
fn mutate(corpus: &[Seed], random: &mut Random) -> Vec<u8> {
    let mut bytes = corpus[random.below(corpus.len())].1.clone();
    for _ in 0..=random.below(8) {
        let at = random.below(bytes.len() + 1);
        match random.below(9) {
            0 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
            1 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.next() as u8;
                }
            }
            // Overwrite a field with a number at a limit of a type, or with another critical
            // number.
            2 | 3 => {
                let width = [1, 2, 4, 8][random.below(4)];
                let numbers = [
                    0,
                    1,
                    u64::MAX,
                    u64::MAX - 1,
                    u64::MAX / 2,
                    4096,
                    448,
                    1 << 20,
                ];
                let number = numbers[random.below(numbers.len())].to_le_bytes();
                if let Some(field) = bytes.get_mut(at..at + width) {
                    field.copy_from_slice(&number[..width]);
                }
            }
            4 => bytes.truncate(at),
            5 => {
                let end = (at + random.below(32)).min(bytes.len());
                bytes.drain(at..end);
            }
            6 => {
                let more: Vec<u8> = (0..random.below(32)).map(|_| random.next() as u8).collect();
                bytes.splice(at..at, more);
            }
            7 => {
                let end = (at + random.below(64)).min(bytes.len());
                let again = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, again);
            }
            _ => {
                let other = &corpus[random.below(corpus.len())].1;
                let from = random.below(other.len() + 1);
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
    bytes.truncate(LONGEST);
    bytes
}
