//! The clients in `clients/` with helpers that pass no socket, one socket, several sockets, or a
//! socket late. A client that gets no socket logs the line that xenopsd logs. `k15_clients` in
//! `tests/kernel` tests the clients with sockets that use kernel TLS.
#![allow(clippy::unwrap_used)]

#[path = "support/pool.rs"]
mod pool;
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use dunlin_test_base::need::are_here;
use dunlin_test_base::sockets::ClosedPort;
use pool::{Pool, run};
use support::{feed, kernel_has_tls, kill};

/// The path of a file in `clients/`.
fn client(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../clients")
        .join(name)
}

type Start = Box<dyn Fn() -> Command>;

/// Compiles the C program `main` with the client.
fn compiled(pool: &Pool, main: &Path) -> PathBuf {
    let program = pool.path("compiled");
    let mut compiler = Command::new("cc");
    compiler
        .args("-std=gnu11 -O1 -Wall -Wextra -Werror -I".split(' '))
        .arg(client(""))
        .arg("-o")
        .arg(&program)
        .arg(main)
        .arg(client("ktls_client.c"));
    run(compiler);
    program
}

/// The commands of the clients, by name.
fn clients(pool: &Pool) -> Vec<(&'static str, Start)> {
    let program = compiled(pool, &client("ktls_copy.c"));
    vec![
        ("C", Box::new(move || Command::new(&program))),
        (
            "Python",
            Box::new(|| {
                let mut command = Command::new("python3");
                command.arg(client("ktls_client.py"));
                command
            }),
        ),
    ]
}

/// Adds the arguments HELPER HOST PORT BUNDLE; the helper is `dunlin` under another name.
fn arguments(pool: &Pool, mut command: Command, port: u16, trusted: &str) -> Command {
    let helper = pool.path("ktls-helper");
    if !helper.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_dunlin"), &helper).unwrap();
    }
    command
        .arg(helper)
        .args(["127.0.0.1", &port.to_string()])
        .arg(pool.path(trusted));
    command
}

#[test]
fn clients_that_get_no_socket_log_the_reason() {
    if !are_here(&["stunnel4", "openssl", "cc", "python3"]) || kernel_has_tls() {
        return;
    }
    let pool = Pool::new();
    let stunnel = pool.stunnel("pool", "");
    let closed = ClosedPort::new();
    for (name, start) in clients(&pool) {
        for (port, trusted, reason) in [
            (stunnel.port, "pool.pem", "[kernel]"),
            (stunnel.port, "other.pem", "[unauthorised]"),
            (closed.number(), "pool.pem", "[control-lost]"),
        ] {
            let done = feed(arguments(&pool, start(), port, trusted), Vec::new());
            assert_eq!(done.code, 1, "{name}: {done:?}");
            assert_eq!(done.out, "", "{name}: {done:?}");
            let begin = format!("migration-tls=ktls connect failed for 127.0.0.1:{port} (dunlin: ");
            let end = "); falling back to stunnel for this connection\n";
            assert!(done.err.starts_with(&begin), "{name}: {done:?}");
            assert!(done.err.ends_with(end), "{name}: {done:?}");
            assert!(done.err.contains(reason), "{name}: {done:?}");
            assert_eq!(done.err.lines().count(), 1, "{name}: {done:?}");
        }
        // The helper is missing.
        let mut command = start();
        command.args(["/nowhere/helper", "127.0.0.1", "1", "pool.pem"]);
        let done = feed(command, Vec::new());
        assert_eq!(done.code, 1, "{name}: {done:?}");
        assert!(
            done.err.contains("/nowhere/helper: No such file"),
            "{name}: {done:?}"
        );
        assert_eq!(done.err.lines().count(), 1, "{name}: {done:?}");
    }
}

/// A helper that passes COUNT sockets.
const HELPER: &str = "#!/usr/bin/env python3\n\
    import socket, sys\n\
    caller = socket.socket(fileno=int(sys.argv[sys.argv.index('--send-fd') + 1]))\n\
    socket.send_fds(caller, [b'+'], [caller.fileno()] * COUNT)\n";

#[test]
fn k13_a_helper_that_does_not_pass_one_socket_has_failed() {
    if !are_here(&["openssl", "cc", "python3"]) {
        return;
    }
    let pool = Pool::new();
    let clients = clients(&pool);
    for count in ["0", "2"] {
        let helper = script(&pool, &HELPER.replace("COUNT", count));
        for (name, start) in &clients {
            let mut command = start();
            command.arg(&helper).args(["127.0.0.1", "1", "pool.pem"]);
            let done = feed(command, Vec::new());
            assert_eq!(done.code, 1, "{name}: {done:?}");
            assert!(
                done.err.contains("did not pass one socket"),
                "{name}: {done:?}"
            );
        }
    }
}

#[test]
fn k13_later_programs_do_not_inherit_the_python_clients_socket() {
    if !are_here(&["openssl", "python3"]) {
        return;
    }
    let pool = Pool::new();
    let mut command = Command::new("python3");
    command
        .args([
            "-c",
            "import sys, ktls_client\n\
            print(ktls_client.connect('host', 1, helper=sys.argv[1]).get_inheritable())",
        ])
        .arg(script(&pool, &HELPER.replace("COUNT", "1")))
        .env("PYTHONPATH", client(""))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let done = feed(command, Vec::new());
    assert_eq!((done.code, done.out.as_str()), (0, "False\n"), "{done:?}");
}

/// Writes a script that replaces the helper.
fn script(pool: &Pool, text: &str) -> PathBuf {
    let helper = pool.path("helper");
    fs::write(&helper, text).unwrap();
    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
    helper
}

/// A helper that succeeds without passing a socket. It leaves behind a child process, which keeps
/// the helper's end of the caller's socket open.
const LEAVES_ONE: &str = "#!/bin/sh\n\
    sleep 600 </dev/null >/dev/null 2>&1 &\n\
    echo $! > \"$(dirname \"$0\")/left\"\n";

#[test]
fn k13_clients_do_not_wait_for_a_helpers_children() {
    if !are_here(&["openssl", "cc", "python3"]) {
        return;
    }
    let pool = Pool::new();
    let helper = script(&pool, LEAVES_ONE);
    for (name, start) in &clients(&pool) {
        let mut command = start();
        command.arg(&helper).args(["127.0.0.1", "1", "pool.pem"]);
        let done = feed(command, Vec::new());
        let left = fs::read_to_string(pool.path("left")).unwrap();
        assert!(kill(left.trim().parse().unwrap(), "KILL"), "no process");
        assert_eq!(done.code, 1, "{name}: {done:?}");
        assert!(
            done.err.contains("did not pass one socket"),
            "{name}: {done:?}"
        );
    }
}

/// A helper that passes a socket late. It closes its standard error after BEFORE seconds, and
/// passes the socket after a further BEHIND seconds.
const SLOW: &str = "#!/usr/bin/env python3\n\
    import os, socket, sys, time\n\
    caller = socket.socket(fileno=int(sys.argv[sys.argv.index('--send-fd') + 1]))\n\
    time.sleep(BEFORE)\n\
    os.close(2)\n\
    time.sleep(BEHIND)\n\
    socket.send_fds(caller, [b'+'], [caller.fileno()])\n";

#[test]
fn k12_k13_signals_neither_end_the_c_client_s_waits_nor_make_them_longer() {
    if !are_here(&["openssl", "cc", "python3"]) {
        return;
    }
    let pool = Pool::new();
    let main = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/interrupted.c");
    let program = compiled(&pool, &main);
    let taken = |before: &str, behind: &str, more: &[&str]| {
        let text = SLOW.replace("BEFORE", before).replace("BEHIND", behind);
        let mut command = Command::new(&program);
        command.arg(script(&pool, &text)).args(more);
        let done = feed(command, Vec::new());
        assert_eq!(done.code, 0, "{done:?}");
        println!("{}", done.out);
        let (said, signals) = done.out.split_once("; ").unwrap();
        let signals: u32 = signals.split(' ').next().unwrap().parse().unwrap();
        (said.to_owned(), signals)
    };
    // The first time, signals arrive while the client waits for the helper's line; the second time,
    // while it waits for the helper's end.
    for (before, behind) in [("0.3", "0"), ("0", "0.3")] {
        let (said, signals) = taken(before, behind, &["60000"]);
        assert_eq!(said, "a socket");
        assert!(signals > 1, "the wait was not interrupted");
    }
    let (said, _) = taken("600", "0", &["700"]);
    assert_eq!(said, "the helper did not answer in time");
    // This timeout is longer than the helper takes to start on a busy machine.
    let (said, _) = taken("0", "600", &["3000"]);
    assert!(said.contains("did not end in time"), "{said}");
    // With SIGCHLD ignored, the client cannot get the helper's exit code.
    let (said, _) = taken("0", "0.3", &["60000", "ignoring"]);
    assert!(said.contains("SIGCHLD is ignored"), "{said}");
}
