//! Silent and slow clients of `dunlin handoff accept`, and slow takers: they delay nobody else, and
//! wake nobody.
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::connect_unix;

use accept::{Accept, Scene, cut, is_here, real_hello};
use support::ReadOnce as _;
use support::process::Process;

const SLOW: usize = 1_000;
/// Those of whom nothing is decided, and what the process has itself.
const FILES: usize = 128 + 32;

/// A client of each kind gets through; how long that takes.
fn both(scene: &Scene, accept: &Accept) -> Duration {
    let began = Instant::now();
    let hello = real_hello(scene, "old.test", "");
    let mut near = accept.connect();
    near.write_all(&hello).unwrap();
    let mut far = scene.client_of_old();
    let mut came = vec![0; hello.len()];
    far.read_exact(&mut came).unwrap();
    assert!(came == hello, "not a byte is changed");
    far.write_all(b"y").unwrap();
    near.read_exact(&mut [0]).unwrap();
    let mut client = scene.client(&accept.address, "own.test", "-tls1_2");
    scene.delivers(accept, &mut client);
    began.elapsed()
}

#[test]
fn i7_a_thousand_slow_clients_disturb_neither_kind() {
    if !is_here("openssl") {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("");
    let before = accept.held();
    let alone = both(&scene, &accept);
    let hello = cut(&real_hello(&scene, "own.test", ""), 20);
    let mut slow: Vec<(TcpStream, usize)> = Vec::new();
    let mut slowest = Duration::ZERO;
    for number in 0..SLOW {
        // One silent, one with half a hello, one that is near its end.
        let mut client = TcpStream::connect(&accept.address).unwrap();
        let part = [0, hello.len() / 2, hello.len() - 40][number % 3];
        let _ = client.write_all(&hello[..part]);
        slow.push((client, part));
        // Those who are there say another byte.
        if number % 100 == 99 {
            for (client, part) in &mut slow {
                // Many have been given up by now.
                let _ = client.write(&hello[*part..=*part]);
                *part += 1;
            }
            slowest = slowest.max(both(&scene, &accept));
            let (files, threads) = accept.held();
            assert!(files <= FILES, "{files} files");
            assert!(threads <= before.1 + 8, "{threads} threads");
        }
    }
    println!("{alone:?} alone, {slowest:?} at most with {SLOW} slow clients");
    assert!(slowest < Duration::from_secs(3), "{slowest:?}");
    drop(slow);
    accept.settles(before);
}

#[test]
fn i7_a_hello_that_has_half_arrived_wakes_nobody() {
    if !is_here("openssl") {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("--timeout 30s");
    let hello = real_hello(&scene, "old.test", "");
    let fine = cut(&hello, 1);
    let mut slow = Vec::new();
    for bytes in [&hello, &fine] {
        for part in [1, 4, 6, bytes.len() / 2, bytes.len() - 1] {
            let mut client = accept.connect();
            client.write_all(&bytes[..part]).unwrap();
            slow.push((client, bytes, part));
        }
    }
    // Everything that has come was looked at.
    thread::sleep(Duration::from_millis(300));
    let before = accept.spent();
    thread::sleep(Duration::from_secs(1));
    let idle = accept.spent().saturating_sub(before);
    assert!(
        idle < Duration::from_millis(20),
        "{idle:?} spent on nothing"
    );
    // The rest byte by byte: whoever woke for each would have looked at the whole each time.
    let count: usize = slow.iter().map(|(_, bytes, part)| bytes.len() - part).sum();
    let before = accept.spent();
    for (client, bytes, part) in &mut slow {
        for byte in &bytes[*part..] {
            client.write_all(&[*byte]).unwrap();
        }
        let mut far = scene.client_of_old();
        let mut came = vec![0; bytes.len()];
        far.read_exact(&mut came).unwrap();
        assert!(came == **bytes);
    }
    let busy = accept.spent().saturating_sub(before);
    println!("{idle:?} idle, {busy:?} for {count} single bytes");
    assert!(busy < Duration::from_millis(40), "{busy:?}");
}

#[test]
fn i7_a_silent_client_of_the_server_behind_gives_its_place_to_the_next() {
    if !is_here("openssl") {
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
    // One of them has said more than a hello.
    let mut busy = connect();
    let mut server = serve();
    busy.write_all(b"more").unwrap();
    server.read_exact(&mut [0; 4]).unwrap();
    let mut silent: Vec<_> = (0..3).map(|_| (connect(), serve())).collect();
    let refused = connect();
    accept.process.wait_for("4 clients are forwarded already");
    drop(refused);
    thread::sleep(Duration::from_millis(1100));
    let next = (connect(), serve());
    accept.process.wait_for("was cut off");
    assert!(silent[0].0.read_once(&mut [0]).is_err());
    server.write_all(b"y").unwrap();
    busy.read_exact(&mut [0]).unwrap();
    drop((silent, next, busy, server));
    accept.settles(before);
}

#[test]
fn i7_clients_that_stop_a_byte_behind_their_hello_give_their_places_to_the_next() {
    if !is_here("openssl") {
        return;
    }
    let scene = Scene::new();
    let accept = scene.start("--forwarded 3");
    let before = accept.held();
    let hello = real_hello(&scene, "old.test", "");
    let connect = || {
        let mut near = accept.connect();
        near.write_all(&hello).unwrap();
        let mut far = scene.client_of_old();
        far.read_exact(&mut vec![0; hello.len()]).unwrap();
        near.write_all(b"+").unwrap();
        far.read_exact(&mut [0]).unwrap();
        (near, far)
    };
    let mut all: Vec<_> = (0..3).map(|_| connect()).collect();
    let mut refused = accept.connect();
    refused.write_all(&hello).unwrap();
    accept.process.wait_for("3 clients are forwarded already");
    thread::sleep(Duration::from_secs(9));
    // What either side says counts.
    all[0].0.write_all(b"x").unwrap();
    all[0].1.read_exact(&mut [0]).unwrap();
    all[1].1.write_all(b"y").unwrap();
    all[1].0.read_exact(&mut [0]).unwrap();
    thread::sleep(Duration::from_millis(1500));
    let next = connect();
    accept.process.wait_for("was cut off");
    assert!(all[2].0.read_once(&mut [0]).is_err());
    for (near, far) in &mut all[..2] {
        near.write_all(b"x").unwrap();
        far.read_exact(&mut [0]).unwrap();
    }
    drop((all, next, refused));
    accept.settles(before);
}

#[test]
fn i7_a_client_that_has_to_go_while_the_server_behind_is_waited_for_goes_at_once() {
    let scene = Scene::new();
    let path = scene.path("server");
    let _server = UnixListener::bind(&path).unwrap();
    let mut queue = Vec::new();
    while let Ok(one) = connect_unix(&path, Instant::now() + Duration::from_millis(50)) {
        queue.push(one);
    }
    let to = format!(
        "--forward-plain --forwarded 1 --else unix:{}",
        path.display()
    );
    let accept = scene.start_alone(&to);
    let mut first = accept.connect();
    first.write_all(b"x").unwrap();
    thread::sleep(Duration::from_millis(1200));
    let began = Instant::now();
    let mut next = accept.connect();
    next.write_all(b"x").unwrap();
    assert!(first.read_once(&mut [0]).is_err());
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    accept.process.wait_for("was cut off");
}

#[test]
fn i7_whoever_does_not_take_the_sockets_of_one_name_keeps_nobody_from_another() {
    if !is_here("openssl") {
        return;
    }
    let scene = Scene::new();
    let path = scene.path("slow");
    let _nobody = UnixListener::bind(&path).unwrap();
    let mut queue = Vec::new();
    while let Ok(one) = connect_unix(&path, Instant::now() + Duration::from_millis(50)) {
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
    // One more than may wait.
    let clients: Vec<_> = (0..17).map(|_| slow()).collect();
    let why = accept.process.wait_for("is refused");
    assert!(why.contains("16 sockets of that name wait"), "{why}");
    let mut client = scene.client(&accept.address, "own.test", "-tls1_2");
    scene.delivers(&accept, &mut client);
    // The one too many was told, and in the end all are.
    for client in &clients {
        client.wait_for("alert internal error");
    }
    drop((client, clients));
    accept.settles(before);
}
