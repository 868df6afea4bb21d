//! `dunlin serve-status`, and the status sockets and the history that it reads.
#![allow(clippy::unwrap_used)]

#[path = "support/status.rs"]
mod status;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dunlin_bench::process::peak_bytes;
use dunlin_test_base::sockets::with_timeout;
use serde_json::{Value, json};
use status::{Fakes, Page, answer, migrating, request};
use support::process::Process;
use support::{Done, Hosts, Scratch, finish, kill, words};
use tunnel::{Scene, control};

const GUEST: &str = "--guest process --memory 64M --fill-size 32M";

/// The only status socket in a control directory.
fn status_socket(control: &Path) -> PathBuf {
    let sockets = fs::read_dir(control.join("status")).unwrap();
    let [socket] = &sockets.collect::<Vec<_>>()[..] else {
        panic!("not one socket in {}", control.display());
    };
    socket.as_ref().unwrap().path()
}

/// The text that a status socket writes to a client that sends `bytes`.
fn read_socket(socket: &Path, bytes: &[u8]) -> String {
    let mut stream = with_timeout(UnixStream::connect(socket).unwrap());
    // The process may close the connection before it has received the bytes.
    let _ = stream.write_all(bytes);
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8(text).unwrap()
}

#[test]
fn a_migration_is_shown_on_both_hosts_and_then_in_their_histories() {
    let hosts = Hosts::new();
    let source = hosts.run("from", GUEST);
    let destination = hosts.receive("b", "to", "");
    let (near, far) = (
        Page::start(&source.control),
        Page::start(&destination.control),
    );
    assert_eq!(near.status()["sessions"], json!([]));
    assert!(
        near.get("/metrics")
            .contains("dunlin_migrations_active{role=\"source\"} 0\n")
    );

    let migration = hosts.begin(&source, &destination, "a", "--peer b.test --rate 4M");
    let status = near.wait_for("progress", |status| {
        status["sessions"][0]["live"]["migration"]["progress"]["lanes"][0].is_array()
    });
    let session = &status["sessions"][0];
    assert_eq!(session["role"], "source");
    assert_eq!(session["vm"], "vm");
    assert_eq!(session["live"]["migration"]["rate"], 4 << 20);
    let arriving = far.wait_for("the arrival", |status| status["sessions"][0]["vm"] == "vm");
    assert_eq!(arriving["sessions"][0]["role"], "destination");
    let metrics = near.get("/metrics");
    assert!(
        metrics.contains("dunlin_migrations_active{role=\"source\"} 1\n"),
        "{metrics}"
    );
    assert!(
        metrics.contains("dunlin_migration_lane_bytes_total{vm=\"vm\""),
        "{metrics}"
    );

    let mut set = words("vm set --name vm --rate none --control");
    set.arg(&source.control);
    support::succeed(set);
    let moved = migration.wait_for("moved");
    let status = near.wait_for("the history", |status| status["history"][0].is_object());
    let entry = &status["history"][0];
    assert_eq!(entry["role"], "source");
    assert_eq!(entry["result"], "moved");
    assert_eq!(entry["downtime"], moved["downtime"]);
    assert_eq!(entry["wire_bytes"], moved["wire_bytes"]);
    let arrived = far.wait_for("the history", |status| status["history"][0].is_object());
    assert_eq!(arrived["history"][0]["role"], "destination");
    assert_eq!(
        arrived["history"][0]["guest_downtime_ms"],
        moved["downtime"]["guest_ms"]
    );
    let metrics = near.get("/metrics");
    for sample in [
        "dunlin_migrations_total{role=\"source\",result=\"moved\"} 1\n",
        "dunlin_migration_downtime_seconds_count 1\n",
        "dunlin_migration_downtime_part_seconds_count{part=\"last-pages\"} 1\n",
    ] {
        assert!(metrics.contains(sample), "{sample}: {metrics}");
    }
    assert_eq!(status["history"].as_array().unwrap().len(), 1);
    let mut entry = entry.clone();
    entry["event"] = "history".into();
    assert_eq!(
        history(&source.control, "--json").expect(0).lines(),
        [entry]
    );
    let text = history(&source.control, "").expect(0).out;
    assert!(
        text.starts_with("vm to ") && text.contains(": moved, downtime "),
        "{text}"
    );
    let text = history(&destination.control, "").expect(0).out;
    assert!(text.starts_with("vm from "), "{text}");
}

/// The output of `dunlin status --history`.
fn history(control: &Path, flags: &str) -> Done {
    let mut command = words(&format!("status --history {flags} --control"));
    command.arg(control);
    finish(command)
}

/// Processes that may be compromised write the history, so its texts are escaped for a terminal.
#[test]
fn i7_the_history_is_listed_from_the_oldest_on_and_escaped() {
    let scratch = Scratch::new();
    let directory = scratch.join("history");
    assert_eq!(history(scratch.path(), "--json").expect(0).out, "");
    assert_eq!(history(scratch.path(), "").expect(0).out.lines().count(), 1);
    fs::create_dir(&directory).unwrap();
    for ended_ms in [7, 5, 6] {
        let entry = json!({"ended_ms": ended_ms, "role": "destination", "vm": "\u{1b}[2J\n", "peer": "b",
            "result": "failed", "fault": "lane-lost", "at_fault": "network", "text": "\u{9b}2J",
            "total_s": 1.0});
        let name = format!("{ended_ms:015}-1.json");
        fs::write(directory.join(name), entry.to_string()).unwrap();
    }
    let listed = history(scratch.path(), "--json").expect(0);
    let ends: Vec<_> = listed
        .lines()
        .iter()
        .map(|one| one["ended_ms"].clone())
        .collect();
    assert_eq!(ends, [5, 6, 7]);
    let people = history(scratch.path(), "").expect(0);
    assert_eq!(people.out.lines().count(), 3, "{people:?}");
    assert!(
        people.out.contains("failed: ") && people.out.contains("[lane-lost]"),
        "{people:?}"
    );
    for text in [&listed.out, &people.out] {
        assert!(!text.contains(['\u{1b}', '\u{9b}']), "{text:?}");
    }
    // The counters do not include migrations that ended before `serve-status` was started.
    let page = Page::start(scratch.path());
    assert_eq!(page.status()["history"].as_array().unwrap().len(), 3);
    let metrics = page.get("/metrics");
    assert!(!metrics.contains("dunlin_migrations_total{"), "{metrics}");
}

#[test]
fn a_failed_migration_is_in_the_history_with_its_fault() {
    let hosts = Hosts::new();
    let source = hosts.run("from", GUEST);
    let destination = hosts.receive("b", "to", "");
    let page = Page::start(&source.control);
    let migration = hosts.begin(&source, &destination, "a", "--peer b.test --rate 2M");
    migration.wait_for("progress");
    hosts.cancel(&source).expect(0);
    assert_eq!(migration.code(), 4);
    let status = page.wait_for("the history", |status| status["history"][0].is_object());
    assert_eq!(status["history"][0]["result"], "cancelled");
    assert_eq!(status["history"][0]["fault"], "cancelled");
    let metrics = page.get("/metrics");
    let sample = "dunlin_migrations_total{role=\"source\",result=\"cancelled\"} 1\n";
    assert!(metrics.contains(sample), "{metrics}");
}

/// A VM migrates although its history cannot be written.
#[test]
fn i2_a_migration_does_not_depend_on_the_history() {
    let hosts = Hosts::new();
    let source = hosts.run("from", GUEST);
    let destination = hosts.receive("b", "to", "");
    for control in [&source.control, &destination.control] {
        fs::remove_dir(control.join("history")).unwrap();
    }
    let migration = hosts.begin(&source, &destination, "a", "--peer b.test");
    migration.wait_for("moved");
    hosts.assert_runs(&destination);
}

/// Claim H16 of docs/security.
#[test]
fn a_status_socket_takes_no_requests() {
    let hosts = Hosts::new();
    // Run without confinement: the code of the status socket itself must ignore the requests.
    let source = hosts.run("from", &format!("{GUEST} --confine no"));
    let destination = hosts.receive("b", "to", "");
    let migration = hosts.begin(&source, &destination, "a", "--peer b.test --rate 2M");
    migration.wait_for("progress");
    let socket = status_socket(&source.control);
    for request in [
        r#"{"do":"cancel"}"#,
        r#"{"do":"pause"}"#,
        r#"{"do":"power-off"}"#,
        r#"{"do":"set","rate":1}"#,
    ] {
        let text = read_socket(&socket, format!("{request}\n").as_bytes());
        let line: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["event"], "status", "{request}");
    }
    let status = hosts.status(&source);
    assert_eq!(status["state"], "running", "{status}");
    assert_eq!(status["migration"]["rate"], 2 << 20, "{status}");

    // A tunnel's status socket takes no requests either.
    let scene = Scene::new();
    let own = format!("tunnel-{}.sock", scene.near.child.id());
    let socket = control(&scene.hosts).join("status").join(own);
    let close = read_socket(
        &socket,
        b"{\"do\":\"set\",\"route\":\"ram\",\"bytes_per_s\":65536}\n",
    );
    let line: Value = serde_json::from_str(&close).unwrap();
    assert_eq!(line["event"], "tunnel");
    let again: Value = serde_json::from_str(&read_socket(&socket, b"")).unwrap();
    assert_eq!(
        again["routes"][0]["limit_bytes_per_s"],
        Value::Null,
        "{again}"
    );
    migration.signal("INT");
}

/// Claim H17 of docs/security.
#[test]
fn only_the_group_of_the_directory_may_read_a_status_socket() {
    if dunlin_test_base::need::or_skip("root", is_root()).is_none() {
        return;
    }
    let hosts = Hosts::new();
    let own = hosts.run("own", GUEST);
    assert_eq!(
        mode(&own.control.join("status")) & 0o027,
        0,
        "others have access"
    );
    assert_eq!(
        mode(&own.control.join("history")) & 0o027,
        0,
        "others have access"
    );
    let group = 65_531;
    let control = hosts.scratch.join("shared");
    let directory = control.join("status");
    fs::create_dir_all(&directory).unwrap();
    std::os::unix::fs::chown(&directory, None, Some(group)).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o2770)).unwrap();
    let _shared = hosts.run("shared", GUEST);
    let socket = status_socket(&control);
    assert_eq!(fs::metadata(&socket).unwrap().gid(), group);
    assert_eq!(mode(&socket), 0o660);
    // Only the owner may use the control socket.
    assert_eq!(mode(&control.join("vm.sock")), 0o600);
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

fn is_root() -> Result<(), &'static str> {
    match fs::metadata("/proc/self").unwrap().uid() {
        0 => Ok(()),
        _ => Err("not root"),
    }
}

#[test]
fn a_tunnel_is_shown_with_its_lanes_and_certificates() {
    let scene = Scene::new();
    let page = Page::start(&control(&scene.hosts));
    let (mut near, mut far) = scene.channel();
    near.write_all(&[7; 4096]).unwrap();
    far.read_exact(&mut [0; 4096]).unwrap();
    let of = |status: &Value, name: &str| {
        let tunnels = status["tunnels"].as_array().unwrap().clone();
        tunnels.into_iter().find(|tunnel| tunnel["name"] == name)
    };
    let status = page.wait_for("bytes of a lane", |status| {
        of(status, "near").is_some_and(|near| {
            let lanes = near["peers"][0]["by_lane"].as_array();
            let sends =
                |lane: &&Value| lane["direction"] == "sent" && lane["bytes"].as_u64() > Some(4096);
            lanes.is_some_and(|lanes| lanes.iter().any(|lane| sends(&lane)))
        })
    });
    let tunnel = of(&status, "near").unwrap();
    assert_eq!(tunnel["routes"][0]["read_bytes"], 4096);
    assert_eq!(tunnel["certificates"][0]["item"], "certificate");
    let metrics = page.get("/metrics");
    let sample =
        "dunlin_tunnel_route_bytes_total{tunnel=\"near\",route=\"ram\",direction=\"sent\"} 4096\n";
    assert!(metrics.contains(sample), "{metrics}");
    let expiry = metrics.lines().find(|line| {
        let name = "dunlin_certificate_expiry_timestamp_seconds";
        line.starts_with(&format!(
            "{name}{{kind=\"tunnel\",name=\"near\",item=\"cert"
        ))
    });
    let seconds: f64 = expiry.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap();
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let left = seconds - now.as_secs_f64();
    // The certificates of these tests are valid for a day.
    assert!((80_000.0..90_000.0).contains(&left), "{left}");

    // A tunnel that has lost its peer counts the lost lanes.
    drop((near, far));
    kill(scene.far.child.id(), "KILL");
    page.wait_for("lost lanes", |status| {
        of(status, "near").is_some_and(|near| near["lanes_lost"].as_u64() > Some(0))
    });
}

/// Claim H18 of docs/security.
#[test]
fn the_process_that_serves_the_page_is_confined() {
    let scratch = Scratch::new();
    let history = scratch.join("history");
    fs::create_dir(&history).unwrap();
    let page = Page::start(scratch.path());
    for part in ["no privileges", "Landlock", "seccomp"] {
        assert!(page.confined.contains(part), "{}", page.confined);
    }
    let proc = format!("/proc/{}/status", page.process.child.id());
    let status = fs::read_to_string(proc).unwrap();
    for line in ["CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.lines().any(|one| one == line), "{status}");
    }
    page.get("/");
    // The first link leads to a file outside the control directory. Only the confinement keeps the
    // process from reading that file.
    let elsewhere = Scratch::new();
    let entry = json!({"ended_ms": 1, "role": "source", "vm": "a", "peer": "b", "result": "moved",
        "total_s": 1.0});
    for (directory, count) in [(&elsewhere, 0), (&scratch, 1)] {
        let file = directory.join("entry");
        fs::write(&file, entry.to_string()).unwrap();
        let link = history.join("000000000000001-1.json");
        // In the first round there is no link yet.
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(file, link).unwrap();
        page.wait_for("the history", |status| {
            status["history"].as_array().unwrap().len() == count
        });
    }
}

#[test]
fn i7_a_thousand_sessions_are_shown_in_bounded_time_and_memory() {
    let scratch = Scratch::new();
    let _fakes = Fakes::start(scratch.path(), 1000, migrating);
    let page = Page::start(scratch.path());
    let began = Instant::now();
    let status = page.get("/status.json");
    assert!(
        began.elapsed() < Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    assert!(!status.contains(['\u{1b}', '\u{202e}']));
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["sessions"].as_array().unwrap().len(), 1000);
    let metrics = page.get("/metrics");
    assert!(metrics.contains("dunlin_migrations_active{role=\"source\"} 1000\n"));
    let memory = peak_bytes(page.process.child.id()).unwrap();
    assert!(memory < 100 << 20, "{memory} bytes");
}

#[test]
fn i7_a_process_that_never_answers_delays_no_other_and_is_named() {
    let scratch = Scratch::new();
    let _fakes = Fakes::start(scratch.path(), 3, migrating);
    let directory = scratch.join("status");
    let silent = |number: u32| UnixListener::bind(directory.join(format!("tunnel-{number}.sock")));
    let _silent = [1, 2, 3, 4].map(|number| silent(number).unwrap());
    // The socket file of a process that was killed, and a file that is not a socket.
    drop(UnixListener::bind(directory.join("vm-99.sock")).unwrap());
    fs::write(directory.join("vm-98.sock"), b"").unwrap();
    let page = Page::start(scratch.path());
    let began = Instant::now();
    let status = page.status();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
    assert_eq!(status["sessions"].as_array().unwrap().len(), 3);
    let silent = status["silent"].as_array().unwrap();
    assert_eq!(silent.len(), 4, "{silent:?}");
    assert_eq!(silent[0]["kind"], "tunnel");
    assert!(
        page.get("/metrics")
            .contains("dunlin_processes_silent{kind=\"tunnel\"} 4\n")
    );
}

#[test]
fn i7_an_endless_or_malformed_status_is_not_shown() {
    let scratch = Scratch::new();
    let texts = [
        "{",
        "",
        "[1]",
        r#"{"event":"done"}"#,
        r#"{"event":"tunnel"}"#,
    ];
    // Without the spaces, this text would be valid.
    let long = migrating(0) + &" ".repeat(9 << 20);
    let _fakes = Fakes::start(scratch.path(), texts.len() + 1, |number| {
        texts
            .get(number)
            .map_or(long.clone(), |text| (*text).to_owned())
    });
    let page = Page::start(scratch.path());
    let status = page.status();
    assert_eq!(status["sessions"], json!([]));
    assert_eq!(status["silent"].as_array().unwrap().len(), texts.len() + 1);
}

#[test]
fn all_clients_share_one_sample_per_second_and_none_is_taken_unasked() {
    let scratch = Scratch::new();
    let fakes = Fakes::start(scratch.path(), 1, migrating);
    let page = Page::start(scratch.path());
    page.get("/");
    assert_eq!(fakes.asked.load(Ordering::Relaxed), 0);
    let began = Instant::now();
    for _ in 0..20 {
        page.get("/status.json");
        page.get("/metrics");
    }
    let most = 1 + began.elapsed().as_secs() as usize;
    let asked = fakes.asked.load(Ordering::Relaxed);
    assert!(
        (1..=most + 1).contains(&asked),
        "{asked} in {:?}",
        began.elapsed()
    );
}

/// Claim H19 of docs/security.
#[test]
fn i7_hostile_clients_get_an_error_and_stop_no_other_client() {
    let scratch = Scratch::new();
    let _fakes = Fakes::start(scratch.path(), 1, migrating);
    let page = Page::start(scratch.path());
    let get = |path: &str, host: &str| page.send(request("GET", path, host).as_bytes()).0;
    assert_eq!(get("/", "localhost:18380"), 200);
    assert_eq!(get("/other", "localhost"), 404);
    assert_eq!(get("/../etc/passwd", "localhost"), 404);
    for host in ["evil.example", "localhost.evil.example", "192.0.2.1", ""] {
        assert_eq!(get("/status.json", host), 421, "{host}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "get"] {
        let (code, _) = page.send(request(method, "/", "localhost").as_bytes());
        assert_eq!(code, 405, "{method}");
    }
    let (code, body) = page.send(request("HEAD", "/status.json", "localhost").as_bytes());
    assert_eq!((code, &*body), (200, ""));
    let length = "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello";
    assert_eq!(page.send(length.as_bytes()).0, 400);
    for rubbish in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..],
        b"\0\0\r\n",
        b"\r\n\r\nx\r\n\r\n",
    ] {
        assert_eq!(page.send(rubbish).0, 400, "{rubbish:?}");
    }
    let giant = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\nA: {}\r\n\r\n",
        "x".repeat(1 << 20)
    );
    assert!([0, 431].contains(&page.send(giant.as_bytes()).0));
    // A header without end.
    let began = Instant::now();
    let endless = &giant[..40_000];
    assert!([0, 431].contains(&page.send(endless.as_bytes()).0));
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    let lines = format!(
        "GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n",
        "A: b\r\n".repeat(900)
    );
    assert_eq!(page.send(lines.as_bytes()).0, 431);

    // A request without an end is refused as soon as it exceeds the maximum length, before its time
    // limit.
    let endless = format!("GET / HTTP/1.1\r\nA: {}", "x".repeat(64 << 10));
    assert!([0, 431].contains(&page.send(endless.as_bytes()).0));

    // More clients than the process serves at a time. They send at most one byte, and do not read.
    let mut idle: Vec<UnixStream> = (0..64).map(|_| page.connect()).collect();
    for stream in &mut idle[..40] {
        // The process may have refused the client and closed the connection.
        let _ = stream.write_all(b"G");
    }
    let began = Instant::now();
    let refused = get("/", "localhost");
    assert!([0, 503].contains(&refused), "{refused}");
    while get("/", "localhost") != 200 {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "no place for {:?}",
            began.elapsed()
        );
    }
    drop(idle);
    // Clients that connect and close at once.
    for _ in 0..500 {
        drop(page.connect());
    }
    let never_read: Vec<UnixStream> = (0..8)
        .map(|_| {
            let mut stream = page.connect();
            stream
                .write_all(request("GET", "/metrics", "localhost").as_bytes())
                .unwrap();
            stream
        })
        .collect();
    let began = Instant::now();
    while get("/status.json", "localhost") != 200 {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{:?}",
            began.elapsed()
        );
    }
    drop(never_read);
}

/// Claim H20 of docs/security.
#[test]
fn a_name_of_another_site_gets_no_answer_over_tcp() {
    let scratch = Scratch::new();
    let mut command =
        words("serve-status --cpu-limit 100 --listen 127.0.0.1:0 --host status.example --control");
    command.arg(scratch.path());
    let process = Process::start(command);
    let line = process.wait_for("listening on http://");
    let address = line
        .trim_start_matches("listening on http://")
        .trim_end_matches('/')
        .to_owned();
    let code = |host: &str| {
        let stream = TcpStream::connect(&*address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        answer(stream, request("GET", "/status.json", host).as_bytes()).0
    };
    for own in [
        &*address,
        "localhost",
        "status.example",
        "STATUS.example:80",
    ] {
        assert_eq!(code(own), 200, "{own}");
    }
    for other in ["evil.example", "192.0.2.1", "status.example.evil.example"] {
        assert_eq!(code(other), 421, "{other}");
    }
}
