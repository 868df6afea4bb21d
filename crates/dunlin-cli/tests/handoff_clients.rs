//! The clients in `clients/`: both take the socket of `dunlin handoff connect`, use it with plain
//! reads and writes, and say what xenopsd would when there is none.
#![allow(clippy::unwrap_used)]

mod handoff_support;
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use handoff_support::{Pool, are_here, feed, free_port, kernel_has_tls, pattern, run};

/// The way to a program or a module of ours.
fn client(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../clients")
        .join(name)
}

type Start = Box<dyn Fn() -> Command>;

/// How each client is started, by its name.
fn clients(pool: &Pool) -> Vec<(&'static str, Start)> {
    let program = pool.path("ktls_copy");
    let mut compiler = Command::new("cc");
    compiler
        .args("-std=gnu11 -O1 -Wall -Wextra -Werror -o".split(' '))
        .arg(&program)
        .arg(client("ktls_copy.c"))
        .arg(client("ktls_client.c"));
    run(compiler);
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

/// HELPER HOST PORT BUNDLE, where the helper is `dunlin` under another name.
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
fn k15_programs_that_know_no_tls_send_to_a_stunnel() {
    if !are_here(&["stunnel4", "openssl", "cc", "python3"]) || kernel_has_tls() {
        return;
    }
    let is_soak = std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1");
    let megabytes = if is_soak { 1024 } else { 64 };
    let pool = Pool::new();
    let stunnel = pool.stunnel("pool", "");
    let bytes = pattern(megabytes << 20, 21);
    for (name, start) in clients(&pool) {
        let taken = stunnel.take_all();
        let mut command = arguments(&pool, start(), stunnel.port, "pool.pem");
        command.args(["--fallback", "process"]);
        let done = feed(command, bytes.clone());
        assert_eq!(done.code, 0, "{name}: {done:?}");
        assert!(taken.join().unwrap() == bytes, "{name}");
        assert_eq!(done.out, format!("{} bytes", bytes.len()), "{name}");
    }
}

#[test]
fn without_a_socket_they_say_the_one_line_and_why() {
    if !are_here(&["stunnel4", "openssl", "cc", "python3"]) || kernel_has_tls() {
        return;
    }
    let pool = Pool::new();
    let stunnel = pool.stunnel("pool", "");
    let nobody = free_port();
    for (name, start) in clients(&pool) {
        for (port, trusted, reason) in [
            (stunnel.port, "pool.pem", "this kernel has no TLS"),
            (stunnel.port, "other.pem", "not among the trusted ones"),
            (nobody, "pool.pem", "cannot be reached"),
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
        // There is no helper.
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

/// Passes so many sockets.
const HELPER: &str = "#!/usr/bin/env python3\n\
    import socket, sys\n\
    desk = socket.socket(fileno=int(sys.argv[sys.argv.index('--send-fd') + 1]))\n\
    socket.send_fds(desk, [b'+'], [desk.fileno()] * COUNT)\n";

#[test]
fn k13_a_helper_that_does_not_pass_one_socket_has_failed() {
    if !are_here(&["openssl", "cc", "python3"]) {
        return;
    }
    let pool = Pool::new();
    let clients = clients(&pool);
    for count in ["0", "2"] {
        let helper = pool.path("helper");
        fs::write(&helper, HELPER.replace("COUNT", count)).unwrap();
        fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
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
