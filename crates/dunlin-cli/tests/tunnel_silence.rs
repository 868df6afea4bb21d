//! Thousands of silent connections to a tunnel: 10,000 in the soak test, 2,000 otherwise.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::collections::VecDeque;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tunnel::Scene;

const SILENT: usize = 2_000;
const SILENT_IN_SOAK: usize = 10_000;
/// The number of silent connections that are opened before each further channel.
const EACH: usize = 250;
/// Descriptors of this process besides the connections.
const OWN_FILES: u64 = 200;
/// The maximum number of the tunnel's open files, not counting one for each channel. With a trunk
/// and its lanes, a tunnel has about 40 files. Unauthenticated connections add up to 64.
const FILES: usize = 150;
const GROWTH_BYTES: u64 = 32 << 20;

/// Open files of a process, and its resident bytes (proc_pid_status(5)).
fn held(process: u32) -> (usize, u64) {
    let files = fs::read_dir(format!("/proc/{process}/fd")).unwrap().count();
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    (files, kib << 10)
}

/// Silent connections delay no channel: channels of an allowed peer open within a second, and
/// existing channels continue.
#[test]
fn i7_thousands_of_silent_connections_keep_no_channel_waiting() {
    let soaks = std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1");
    let count = if soaks { SILENT_IN_SOAK } else { SILENT };
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let most = usize::try_from(hard.saturating_sub(OWN_FILES)).unwrap();
    let scene = Scene::new();
    let far = scene.far.child.id();
    let (_, before) = held(far);
    let mut silent = VecDeque::new();
    // Open a channel, and with it the trunk, before the silent connections fill the backlog. The
    // kernel retries a connection to a full backlog only a second later.
    let mut channels = vec![scene.channel()];
    let (mut slowest, mut files) = (Duration::ZERO, 0);
    for number in 1..=count {
        // If this process has reached its limit of descriptors, close the oldest connection.
        if silent.len() == most {
            silent.pop_front();
        }
        silent.push_back(TcpStream::connect(&scene.far.address).unwrap());
        if number % EACH != 0 {
            continue;
        }
        let began = Instant::now();
        channels.push(scene.channel());
        for (near, far) in &mut channels {
            near.write_all(b"x").unwrap();
            far.read_exact(&mut [0]).unwrap();
            far.write_all(b"y").unwrap();
            near.read_exact(&mut [0]).unwrap();
        }
        slowest = slowest.max(began.elapsed());
        files = files.max(held(far).0);
    }
    let (_, after) = held(far);
    let grown = after.saturating_sub(before);
    println!(
        "{} held, slowest channel {slowest:?}, {files} files, {grown} bytes more",
        silent.len()
    );
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(files - channels.len() <= FILES, "{files}");
    assert!(grown <= GROWTH_BYTES, "{grown}");
}
