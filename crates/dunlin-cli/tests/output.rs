//! The output of a VM's process. A closed or stalled reader neither ends nor delays the process,
//! and the process's answers cannot control an operator's terminal.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use dunlin_proto::text::is_harmful;
use serde_json::{Value, json};
use support::{Done, Hosts, Process, Scratch, finish, words};

const GUEST: &str = "--guest process --memory 64M --fill-size 8M --workload idle";

/// A process that is killed when its test ends.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `dunlin vm receive`, and reads its output up to the line that contains `"127.0.0.1:"`.
/// Returns the process, the unread rest of its output, and its address.
fn waiting(hosts: &Hosts, flags: &str) -> (Ends, BufReader<ChildStdout>, String) {
    let mut command = words(&format!("vm receive --listen 127.0.0.1:0 {flags}"));
    command
        .arg("--identity")
        .arg(hosts.scratch.join("b"))
        .arg("--control")
        .arg(hosts.scratch.join("to"))
        .arg("--state-dir")
        .arg(hosts.scratch.join("state-of-b"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = Ends(command.spawn().unwrap());
    let mut out = BufReader::new(child.0.stdout.take().unwrap());
    loop {
        let mut line = String::new();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "the process ended");
        if let Some((_, port)) = line.split_once("127.0.0.1:") {
            let port: String = port.chars().take_while(char::is_ascii_digit).collect();
            return (child, out, format!("127.0.0.1:{port}"));
        }
    }
}

/// Connects without speaking TLS, and waits until the process has refused the connection.
fn stranger(address: &str) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    // The process ends its direction, or resets the connection.
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Migrates a VM to `address`, and checks that the VM runs in the process there.
fn arrives(hosts: &Hosts, address: &str) {
    let source = hosts.run("from", GUEST);
    let mut command = words("vm migrate --json --name vm --peer b.test --to");
    command
        .arg(address)
        .arg("--identity")
        .arg(hosts.scratch.join("a"))
        .arg("--control")
        .arg(&source.control);
    let done = finish(command).expect(0);
    assert_eq!(done.last()["runs"], true);
    let status = status_at(&hosts.scratch.join("to"), "--json").expect(0);
    assert_eq!(status.last()["state"], "running");
}

fn status_at(control: &Path, flags: &str) -> Done {
    let mut command = words(&format!("vm status --name vm {flags} --control"));
    command.arg(control);
    finish(command)
}

/// A program such as `head` has read the first lines and has exited, so writing a later line fails.
/// This must not end the process, which has a VM.
///
/// Claim N16 of docs/security.
#[test]
fn i2_a_vm_arrives_and_stays_although_the_reader_of_the_output_has_exited() {
    for flags in ["", "--json"] {
        let hosts = Hosts::new();
        let (mut to, out, address) = waiting(&hosts, flags);
        drop(out);
        stranger(&address);
        arrives(&hosts, &address);
        assert!(to.0.try_wait().unwrap().is_none(), "{flags}");
    }
}

/// Starts a process that waits for a VM, and fills the pipe of its output. Each connection of a
/// stranger causes a line of more than 100 bytes, and a pipe has space for 64 KiB.
fn flooded(hosts: &Hosts) -> (Ends, BufReader<ChildStdout>, String) {
    let (to, out, address) = waiting(hosts, "--json");
    for _ in 0..1000 {
        stranger(&address);
    }
    (to, out, address)
}

/// The number of `rejected` lines before a line with the event `until`, and that line.
fn rejected_before(out: &mut BufReader<ChildStdout>, until: &str) -> (usize, Value) {
    let mut rejected = 0;
    loop {
        let mut line = String::new();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "the process ended");
        let line: Value = serde_json::from_str(&line).unwrap();
        if line["event"] == until {
            return (rejected, line);
        }
        rejected += usize::from(line["event"] == "rejected");
    }
}

/// Claim N16 of docs/security.
#[test]
fn i7_strangers_do_not_stop_a_migration_by_output_that_no_process_reads() {
    let hosts = Hosts::new();
    let (_to, mut out, address) = flooded(&hosts);
    arrives(&hosts, &address);
    let (rejected, received) = rejected_before(&mut out, "received");
    assert!((1..1000).contains(&rejected), "{rejected}");
    assert_eq!(received["runs"], true);
}

#[test]
fn lines_that_were_lost_are_counted_when_a_process_reads_again() {
    let hosts = Hosts::new();
    let (_to, mut out, address) = flooded(&hosts);
    let is_over = AtomicBool::new(false);
    let (rejected, warning) = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                stranger(&address);
            }
        });
        let found = rejected_before(&mut out, "warning");
        is_over.store(true, Ordering::SeqCst);
        found
    });
    let text = warning["text"].as_str().unwrap();
    let lost: usize = text.split(' ').next().unwrap().parse().unwrap();
    assert!(lost > 100, "{rejected}, {text}");
}

/// Answers every request at a VM's control socket with these lines.
fn answering(scratch: &Scratch, lines: &[Value]) {
    let listener = UnixListener::bind(scratch.join("vm.sock")).unwrap();
    let lines: Vec<_> = lines.iter().map(Value::to_string).collect();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            BufReader::new(&stream)
                .read_line(&mut String::new())
                .unwrap();
            for line in &lines {
                // The command may have ended.
                let _ = writeln!(stream, "{line}");
            }
        }
    });
}

/// Claim H21 of docs/security.
#[test]
fn i7_an_answer_of_a_compromised_process_controls_no_terminal() {
    let forged = "\u{1b}]0;x\u{7}\u{9b}2J\r\nforged: \u{202e}";
    let status = json!({
        "event": "status", "name": forged, "uuid": forged, "pid": 1, "state": forged,
        "memory_bytes": 1, "pages_checked": 1, "beats": 1, "full_passes": 1,
        "downtime_ms": null, "largest_gap_ms": 1.0,
        "migration": {
            "role": forged, "peer": forged, "phase": forged, "seconds": 1.0, "rate": null,
            "throttle": 0, "progress": null,
        },
    });
    let downtime = json!({
        "guest_ms": null, "total_ms": 1.0, "pause_ms": 1.0, "last_pages_ms": 1.0, "state_ms": 1.0,
        "ready_ms": 1.0, "resume_ms": 1.0,
    });
    let followed = [
        json!({"event": "listening", "address": forged}),
        json!({"event": "started", "name": forged, "pid": 1, "control": forged}),
        json!({"event": "confined", "by": [forged], "lacks": [forged]}),
        json!({"event": "records", "by": forged, "text": forged}),
        json!({"event": "identity-read", "valid_until": forged}),
        json!({"event": "accepted", "peer": forged}),
        json!({"event": "lane-lost", "lane": 1, "text": forged}),
        json!({"event": "in-doubt", "text": forged}),
        json!({"event": "warning", "text": forged}),
        json!({"event": "rejected", "text": forged}),
        json!({
            "event": "moved", "iterations": [], "raw_pages": 0, "zero_pages": 0,
            "header_bytes": 0, "wire_bytes": 0, "lanes": [], "security": forged, "total_s": 1.0,
            "gib_per_s": 1.0, "source_cpu_s_per_gib": 1.0, "destination_cpu_s_per_gib": 1.0,
            "downtime": downtime, "digests_equal": null, "runs": true,
        }),
    ];
    for (line, lines) in [("vm status", &[status][..]), ("vm watch", &followed)] {
        for flags in ["", "--json"] {
            let scratch = Scratch::new();
            answering(&scratch, lines);
            let mut command = words(&format!("{line} --name vm {flags} --control"));
            command.arg(scratch.join(""));
            let done = finish(command).expect(0);
            for text in [&done.out, &done.err] {
                let harmful = |one: char| one != '\n' && is_harmful(one);
                assert!(!text.contains(harmful), "{line}: {text:?}");
                let begins = |line: &str| line.starts_with("forged");
                // The text of *rejected* can have several lines. All but the first are indented, so
                // none of them begins like a line of the command.
                assert!(!text.lines().any(begins), "{line}: {text:?}");
            }
        }
    }
}

/// Claim H21 of docs/security.
#[test]
fn i8_an_answer_without_end_takes_a_limited_amount_of_memory() {
    const MOST: usize = 96 << 20;
    let scratch = Scratch::new();
    let listener = UnixListener::bind(scratch.join("vm.sock")).unwrap();
    let (sender, sent) = channel();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let part = [b'a'; 1 << 16];
        let mut bytes = 0;
        while bytes < MOST && stream.write_all(&part).is_ok() {
            bytes += part.len();
        }
        sender.send(bytes).unwrap();
    });
    status_at(&scratch.join(""), "").expect(1);
    assert!(sent.recv().unwrap() < MOST);
}

/// Runs a command with a umask that permits everything to every user.
fn permissive(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "umask 0; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args())
        .env_remove("RUNTIME_DIRECTORY");
    shell
}

/// Claim H1 of docs/security.
#[test]
fn no_other_user_may_write_to_a_directory_of_a_process_whatever_the_umask() {
    use std::os::unix::fs::MetadataExt;
    let hosts = Hosts::new();
    let scratch = &hosts.scratch;
    let mode = |path: &str| fs::metadata(scratch.join(path)).unwrap().mode() & 0o7777;
    let mut issue = words("pki issue --name c.test --ca");
    issue.arg(scratch.join("ca")).arg(scratch.join("c/d"));
    finish(permissive(&issue)).expect(0);
    assert_eq!([mode("c"), mode("c/d")], [0o755, 0o755]);
    assert_eq!(mode("c/d/key.pem"), 0o600);
    let mut receive = words("vm receive --listen 127.0.0.1:0 --identity");
    receive.arg(scratch.join("b"));
    for (name, event, command) in [
        (
            "run",
            "started",
            words(&format!("vm run --name vm {GUEST}")),
        ),
        ("receive", "listening", receive),
    ] {
        let path = |end: &str| scratch.join(format!("{name}/{end}"));
        let mut command = permissive(&command);
        command
            .arg("--control")
            .arg(path("control/of"))
            .arg("--state-dir")
            .arg(path("state/of"));
        let process = Process::follow(command, &path("control/of"));
        process.wait_for(event);
        for (directory, expected) in [
            ("control", 0o755),
            ("control/of", 0o755),
            ("state", 0o700),
            ("state/of", 0o700),
        ] {
            assert_eq!(
                mode(&format!("{name}/{directory}")),
                expected,
                "{name} {directory}"
            );
        }
    }
    assert_eq!(mode("run/control/of/vm.sock"), 0o600);
}
