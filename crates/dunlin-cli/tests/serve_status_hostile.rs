//! Clients of `dunlin serve-status` and of status sockets. The clients read nothing, send nothing,
//! or ask all the time. One test has a directory with thousands of status sockets.
#![allow(clippy::unwrap_used)]

#[path = "support/status.rs"]
mod status;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_bench::process::{cpu_s, peak_bytes};
use dunlin_linux::affinity::allowed;
use dunlin_test_base::sockets::with_timeout;
use status::{Fakes, Page, answer, migrating, request};
use support::{Hosts, Scratch};

/// The number of clients that the process serves at a time.
const PLACES: usize = 32;
/// How long a client may take to read an answer, and to send a request.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const REQUEST_LIMIT: Duration = Duration::from_secs(3);
/// The additional time that a busy host can need.
const MARGIN: Duration = Duration::from_secs(10);

/// A client that asks for a long answer, of which it never reads more than the first byte.
fn stuck(page: &Page) -> UnixStream {
    let mut stream = page.connect();
    stream
        .write_all(request("GET", "/status.json", "localhost").as_bytes())
        .unwrap();
    stream.read_exact(&mut [0]).unwrap();
    stream
}

/// Claim H19 of docs/security.
#[test]
fn i7_clients_that_never_read_lose_their_places_after_a_time() {
    let scratch = Scratch::new();
    // An answer that is much longer than the buffers of a socket.
    let _fakes = Fakes::start(scratch.path(), 1000, migrating);
    let page = Page::start(scratch.path());
    let whole = page.get("/status.json").len();
    assert!(whole > 500_000, "{whole} bytes");
    let began = Instant::now();
    let mut never_read: Vec<_> = (0..PLACES).map(|_| stuck(&page)).collect();
    let get = |path: &str| page.send(request("GET", path, "localhost").as_bytes()).0;
    // All places are taken, so a further client gets the answer 503 at once.
    let asked = Instant::now();
    assert_eq!(get("/"), 503);
    assert!(asked.elapsed() < ANSWER_LIMIT / 2, "{:?}", asked.elapsed());
    while get("/") != 200 {
        let took = began.elapsed();
        assert!(took < ANSWER_LIMIT + MARGIN, "no place after {took:?}");
        thread::sleep(Duration::from_millis(200));
    }
    assert!(began.elapsed() > ANSWER_LIMIT / 2, "{:?}", began.elapsed());
    // The first client that never read has lost its connection before the end of its answer.
    let mut rest = Vec::new();
    let _ = never_read[0].read_to_end(&mut rest);
    assert!(rest.len() < whole, "{} of {whole}", rest.len());
    // The clients have shared one copy of the answer, so the process needed little memory.
    let memory = peak_bytes(page.process.child.id()).unwrap();
    assert!(memory < 100 << 20, "{memory} bytes");
}

/// Claim H19 of docs/security.
#[test]
fn i7_a_client_that_sends_its_request_slowly_gets_no_more_time_for_each_byte() {
    let scratch = Scratch::new();
    let page = Page::start(scratch.path());
    let mut stream = page.connect();
    let mut sends = stream.try_clone().unwrap();
    let began = Instant::now();
    let sender = thread::spawn(move || {
        // Writing fails after the server has closed the connection.
        while sends.write_all(b"G").is_ok() && began.elapsed() < ANSWER_LIMIT + MARGIN {
            thread::sleep(Duration::from_millis(200));
        }
    });
    let (code, _) = answer(stream.try_clone().unwrap(), b"");
    let took = began.elapsed();
    assert_eq!(code, 408);
    assert!(
        took > REQUEST_LIMIT / 2 && took < REQUEST_LIMIT + MARGIN,
        "{took:?}"
    );
    sender.join().unwrap();
    assert!(!matches!(stream.read(&mut [0]), Ok(1..)));
}

/// Claim H19 of docs/security.
#[test]
fn i8_a_flood_takes_no_more_than_the_limit_of_cpu_time() {
    let scratch = Scratch::new();
    let _fakes = Fakes::start(scratch.path(), 100, migrating);
    let page = Page::limited(scratch.path(), 1);
    let pid = page.process.child.id();
    let started = cpu(pid);
    let socket = page.socket.clone();
    let ask = move || {
        let stream = UnixStream::connect(&socket).unwrap();
        answer(with_timeout(stream), b"rubbish\r\n\r\n").0
    };
    let allowed = |time: Duration| time.mul_f64(0.01 * allowed().unwrap().len() as f64);
    // The process saves unused CPU time for the requests that a browser sends when it opens the
    // page. The clients of this test use up this reserve first.
    let kept = allowed(Duration::from_secs(10));
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    let (took, used, served) = thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(ask(), 400);
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let began = Instant::now();
        while cpu(pid) < started + kept && began.elapsed() < MARGIN * 6 {
            thread::sleep(Duration::from_millis(20));
        }
        let (began, before) = (Instant::now(), cpu(pid));
        let served = answers.load(Ordering::Relaxed);
        thread::sleep(Duration::from_secs(4));
        let (took, used) = (began.elapsed(), cpu(pid) - before);
        let served = answers.load(Ordering::Relaxed) - served;
        let began = Instant::now();
        let code = ask();
        let waited = began.elapsed();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(code, 400);
        assert!(waited < MARGIN, "{waited:?}");
        (took, used, served)
    });
    println!("{used:?} of {:?}; {served} answers", allowed(took));
    assert!(cpu(pid) > started + kept, "saved CPU time remains");
    // Allow twice the limit, because the kernel counts CPU time in steps of 10 ms, and the process can
    // serve eight clients at a time.
    assert!(used < allowed(took) * 2, "{used:?} in {took:?}");
    assert!(served > 0);
    assert_eq!(ask(), 400);
}

/// The CPU time of a process.
fn cpu(pid: u32) -> Duration {
    Duration::from_secs_f64(cpu_s(pid).unwrap())
}

/// The CPU time that a process's thread of this name has used.
fn spent(pid: u32, name: &str) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |task: std::io::Result<fs::DirEntry>| -> Option<u64> {
        let task = task.unwrap().path();
        // A thread may end during the loop.
        let own = fs::read_to_string(task.join("comm")).ok()?;
        let text = fs::read_to_string(task.join("schedstat")).ok()?;
        (own.trim() == name).then(|| text.split_whitespace().next().unwrap().parse().unwrap())
    };
    Duration::from_nanos(tasks.filter_map(of).sum())
}

/// Members of the group read the status all the time, or connect and never read it. They take a
/// limited number of answers from a process, and its migration goes on.
///
/// Claim H16 of docs/security.
#[test]
fn i8_a_flooded_status_socket_costs_its_process_little_and_delays_no_migration() {
    let hosts = Hosts::new();
    let source = hosts.run("from", "--guest process --memory 64M --fill-size 32M");
    let destination = hosts.receive("b", "to", "");
    let directory = source.control.join("status");
    let socket = fs::read_dir(&directory)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let _never_read: Vec<_> = (0..50)
        .map(|_| UnixStream::connect(&socket).unwrap())
        .collect();
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut text = Vec::new();
                    // After the migration the process ends.
                    let Ok(stream) = UnixStream::connect(&socket) else {
                        return;
                    };
                    if with_timeout(stream).read_to_end(&mut text).is_err() || text.is_empty() {
                        return;
                    }
                    assert!(text.ends_with(b"}"), "{}", String::from_utf8_lossy(&text));
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (began, before) = (Instant::now(), spent(source.pid(), "status-socket"));
        let migration = hosts.begin(&source, &destination, "a", "--peer b.test --rate 16M");
        let progress = migration.wait_for("progress");
        assert!(progress["bytes_per_s"].as_u64() > Some(0), "{progress}");
        while began.elapsed() < Duration::from_secs(2) {
            thread::sleep(Duration::from_millis(50));
        }
        let took = began.elapsed();
        let share = (spent(source.pid(), "status-socket") - before).as_secs_f64();
        let share = share / took.as_secs_f64();
        let count = answers.load(Ordering::Relaxed);
        println!(
            "{count} answers in {took:?}, {:.2} % of a CPU",
            share * 100.0
        );
        // At most one answer per 20 ms, and the answers to clients that were already waiting.
        let most = took.as_millis() as u64 / 20 + 20;
        assert!((20..=most).contains(&count), "{count} in {took:?}");
        // The limit is high, because this build is not optimised.
        assert!(share < 0.2, "{share}");
        migration.wait_for("moved");
        stop.store(true, Ordering::Relaxed);
    });
}

/// A member of the group may create any number of status sockets.
#[test]
fn i8_only_so_many_processes_are_asked() {
    let scratch = Scratch::new();
    let fakes = Fakes::start(scratch.path(), 1, migrating);
    let directory = scratch.join("status");
    for number in 1..5000 {
        fs::hard_link(
            directory.join("vm-0.sock"),
            directory.join(format!("vm-{number}.sock")),
        )
        .unwrap();
    }
    // Other files are ignored.
    fs::write(directory.join("vm-x.sock"), b"").unwrap();
    let page = Page::start(scratch.path());
    let status = page.status();
    assert_eq!(fakes.asked.load(Ordering::Relaxed), 4096);
    assert_eq!(status["sessions"].as_array().unwrap().len(), 4096);
    assert_eq!(status["silent"].as_array().unwrap().len(), 0);
}
