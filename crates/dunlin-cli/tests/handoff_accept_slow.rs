//! Silent and slow clients of `dunlin handoff accept`, and slow receivers. None of them delays
//! other clients, and single bytes wake the process only a few times.
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use accept::{Accept, Scene, cut, real_hello};
use dunlin_linux::poll::waker;
use dunlin_linux::socket::connect_unix;
use dunlin_test_base::need::are_here;
use dunlin_test_base::sockets::ReadOnce as _;
use support::process::Process;

const SLOW: usize = 1_000;
/// The maximum number of descriptors: 128 for pending clients, and 32 for the process itself.
const FILES: usize = 128 + 32;

/// Asserts that the acceptor serves a client that it forwards and a client that it hands over.
fn both(scene: &Scene, accept: &Accept) {
    let hello = real_hello(scene, "old.test", "");
    let mut near = accept.connect();
    near.write_all(&hello).unwrap();
    let mut far = scene.client_of_old();
    let mut came = vec![0; hello.len()];
    far.read_exact(&mut came).unwrap();
    assert!(came == hello, "the bytes are changed");
    far.write_all(b"y").unwrap();
    near.read_exact(&mut [0]).unwrap();
    let mut client = scene.client(&accept.address, "own.test", "-tls1_2");
    scene.delivers(accept, &mut client);
}

/// Claim F6 of docs/security.
#[test]
fn i7_a_thousand_slow_clients_delay_no_other_client() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    // The timeout is longer than the test, so the timeout of a slow client cannot be the reason
    // that another client is served.
    let accept = scene.start("--timeout 10m");
    let before = accept.held();
    both(&scene, &accept);
    let hello = cut(&real_hello(&scene, "own.test", ""), 20);
    let mut slow: Vec<(TcpStream, usize)> = Vec::new();
    for number in 0..SLOW {
        // A third of the clients sends nothing, a third sends half a hello, and a third sends
        // almost a whole hello.
        let mut client = TcpStream::connect(&accept.address).unwrap();
        let part = [0, hello.len() / 2, hello.len() - 40][number % 3];
        let _ = client.write_all(&hello[..part]);
        slow.push((client, part));
        // After every hundred clients, each client sends another byte.
        if number % 100 == 99 {
            for (client, part) in &mut slow {
                // The write may fail, because many clients have been evicted by now.
                let _ = client.write(&hello[*part..=*part]);
                *part += 1;
            }
            both(&scene, &accept);
            let (files, threads) = accept.held();
            assert!(files <= FILES, "{files} files");
            assert!(threads <= before.1 + 8, "{threads} threads");
        }
    }
    drop(slow);
    accept.settles(before);
}

/// A thread of the process, by its name.
struct Task(PathBuf);

impl Task {
    fn of(accept: &Accept, thread: &str) -> Self {
        let tasks = fs::read_dir(format!("/proc/{}/task", accept.process.child.id())).unwrap();
        let mut tasks = tasks.map(|task| task.unwrap().path());
        let is_it =
            |task: &PathBuf| fs::read_to_string(task.join("comm")).unwrap().trim() == thread;
        Self(tasks.find(is_it).unwrap())
    }

    /// The value of a field of proc_pid_status(5).
    fn field(&self, name: &str) -> String {
        let status = fs::read_to_string(self.0.join("status")).unwrap();
        let mut lines = status.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.unwrap().trim().to_owned()
    }

    /// The number of times that the thread has waited.
    fn waits(&self) -> u64 {
        self.field("voluntary_ctxt_switches").parse().unwrap()
    }

    /// Returns when the thread waits for events. A byte that woke the thread before is handled by
    /// that time.
    fn settles(&self) {
        while !self.field("State").starts_with('S') {
            thread::yield_now();
        }
    }
}

/// Returns when `bytes` bytes wait in the socket at the other end of `near` (proc_net_tcp(5)). A
/// busy kernel may deliver bytes only after the call that sends them has returned.
fn arrive(near: &TcpStream, bytes: usize) {
    let port = format!(":{:04X}", near.local_addr().unwrap().port());
    let unread = || {
        let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
        let queues = sockets.lines().find_map(|line| {
            let mut fields = line.split_whitespace().skip(2);
            let is_it = fields.next()?.ends_with(&port);
            is_it.then(|| fields.nth(1))?.map(str::to_owned)
        });
        let unread = queues.as_deref().and_then(|queues| queues.split_once(':'));
        unread.map_or(0, |(_, unread)| usize::from_str_radix(unread, 16).unwrap())
    };
    let began = Instant::now();
    while unread() < bytes {
        assert!(began.elapsed() < Duration::from_secs(20), "{bytes} bytes");
        thread::yield_now();
    }
}

/// Counts how often the accepting thread of a real process wakes. A unit test of `accept::client`
/// checks that the kernel does not wake the process for each byte of an incomplete hello.
///
/// Claim F6 of docs/security.
#[test]
fn i7_a_hello_that_arrives_byte_by_byte_wakes_the_process_a_few_times() {
    if !are_here(&["openssl"]) {
        return;
    }
    // For each client, the process waits up to 50 times for bytes, and up to 50 times for
    // connections and threads to end.
    const WAITS_A_CLIENT: u64 = 2 * 50;
    // The number of bytes that arrive one by one. If each woke the process, the process would wait
    // more often than permitted.
    const ALONE: usize = 3 * WAITS_A_CLIENT as usize;
    let scene = Scene::new();
    let accept = scene.start("--timeout 10m");
    let hello = real_hello(&scene, "old.test", "");
    let fine = cut(&hello, 1);
    // The accepting thread sets its name when it starts. After it has served a client, the name is
    // set.
    let mut first = accept.connect();
    first.write_all(&hello).unwrap();
    drop(scene.client_of_old());
    drop(first);
    let task = Task::of(&accept, "dunlin-accept");
    let before = task.waits();
    let mut count = 0;
    for bytes in [&hello, &fine] {
        let mut near = accept.connect();
        // The first bytes must arrive alone.
        near.set_nodelay(true).unwrap();
        for (sent, byte) in (1..).zip(bytes) {
            near.write_all(&[*byte]).unwrap();
            // Count only the first bytes. Later bytes can fill the socket's buffer, and a full
            // buffer wakes the process before the bytes that it needs have arrived.
            if sent <= ALONE {
                arrive(&near, sent);
                task.settles();
            }
        }
        let mut far = scene.client_of_old();
        let mut came = vec![0; bytes.len()];
        far.read_exact(&mut came).unwrap();
        assert!(came == *bytes);
        count += bytes.len() as u64;
    }
    let waits = task.waits() - before;
    println!("{waits} waits for {count} single bytes");
    assert!(2 * 2 * WAITS_A_CLIENT < count, "{count} bytes are too few");
    assert!(waits <= 2 * WAITS_A_CLIENT, "{waits}");
}

/// Checks only that an idle client makes room for the next one. Unit tests of `accept::forward`
/// check which client is evicted, and after how long.
#[test]
fn i7_an_idle_forwarded_client_is_evicted_for_the_next() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("--forwarded 4");
    let before = accept.held();
    let hello = real_hello(&scene, "old.test", "");
    let connect = || {
        let mut near = accept.connect();
        near.write_all(&hello).unwrap();
        near
    };
    let serve = || {
        let mut far = scene.client_of_old();
        far.read_exact(&mut vec![0; hello.len()]).unwrap();
        far
    };
    // This client has sent more than a hello. The acceptor therefore evicts it only after a longer
    // idle time than the others.
    let mut busy = connect();
    let mut server = serve();
    busy.write_all(b"more").unwrap();
    server.read_exact(&mut [0; 4]).unwrap();
    let mut silent: Vec<_> = (0..3).map(|_| (connect(), serve())).collect();
    // The acceptor refuses the next client until the first silent client is past its grace period.
    let next = loop {
        let next = connect();
        let from = format!("client {} ", next.local_addr().unwrap());
        let becomes = accept.process.wait_for(&from);
        if !becomes.contains(" fault=") {
            break next;
        }
        assert!(becomes.contains(" fault=lane-limit "), "{becomes}");
        thread::sleep(Duration::from_millis(20));
    };
    let next = (next, serve());
    assert!(silent[0].0.read_once(&mut [0]).is_err());
    server.write_all(b"y").unwrap();
    busy.read_exact(&mut [0]).unwrap();
    drop((silent, next, busy, server));
    accept.settles(before);
}

#[test]
fn i7_a_receiver_that_does_not_accept_delays_no_other_name() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = Scene::new();
    let path = scene.path("slow");
    let _receiver = UnixListener::bind(&path).unwrap();
    let mut queue = Vec::new();
    let (_waker, stop) = waker().unwrap();
    while let Ok(one) = connect_unix(&path, Instant::now() + Duration::from_millis(50), &stop) {
        queue.push(one);
    }
    let more = format!("--sni slow.test --to unix:{}", path.display());
    let accept = scene.start(&more);
    let before = accept.held();
    let slow = || {
        let mut command = Command::new("openssl");
        command
            .args("s_client -quiet -tls1_2 -servername slow.test -connect".split(' '))
            .arg(&accept.address);
        Process::start(command)
    };
    // Start one client more than the limit of 32.
    let clients: Vec<_> = (0..33).map(|_| slow()).collect();
    let why = accept.process.wait_for("fault=target-unreachable");
    assert!(why.contains("(32)"), "{why}");
    let mut client = scene.client(&accept.address, "own.test", "-tls1_2");
    scene.delivers(&accept, &mut client);
    // The client over the limit has received an alert, and later each of the other clients receives
    // one.
    for client in &clients {
        client.wait_for("alert internal error");
    }
    drop((client, clients));
    accept.settles(before);
}
