//! QEMU migrates over a socket that was passed to it: it writes plain bytes, and the QEMU at the
//! destination takes them with its own TLS.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod handoff_support;
mod support;

use std::os::fd::AsFd;

use dunlin_rig::guest::{Content, Workload};
use dunlin_rig::machine::{Credentials, Machine, finish};
use dunlin_rig::need;
use handoff_support::{call, free_port, kernel_has_tls};
use serde_json::json;
use support::dunlin;

/// 128 MiB, of which 16 MiB are written to now and then.
const WORKLOAD: Workload = Workload {
    memory_mib: 128,
    pages: 24_000,
    hot: 4_000,
    rate: Some(4_000),
    content: Content::Mixed,
    seed: 0x4a11,
};

#[test]
fn a_guest_arrives_that_was_sent_by_getfd() {
    let Some(setup) = need::bare_guest(WORKLOAD) else {
        return;
    };
    if kernel_has_tls() {
        println!("the kernel carries it here");
    }
    let _turn = need::turn();
    let credentials = Credentials::new("destination.example", "source.example").unwrap();
    let folder = credentials.folder();
    let mut source = Machine::start(&setup, None).unwrap();
    let mut destination = Machine::start_incoming(&setup, None).unwrap();
    source.wait_ready().unwrap();

    let port = free_port();
    let qmp = destination.qmp();
    let own = json!({
        "qom-type": "tls-creds-x509", "id": "own", "dir": folder,
        "endpoint": "server", "verify-peer": true,
    });
    qmp.execute("object-add", own).unwrap();
    let events = json!({"capabilities": [{"capability": "events", "state": true}]});
    qmp.execute("migrate-set-capabilities", events.clone())
        .unwrap();
    qmp.execute("migrate-set-parameters", json!({"tls-creds": "own"}))
        .unwrap();
    let listen = json!({"uri": format!("tcp:127.0.0.1:{port}")});
    qmp.execute("migrate-incoming", listen).unwrap();

    let mut command = dunlin(["handoff", "connect", "--host", "127.0.0.1"]);
    command
        .args(["--port", &port.to_string(), "--curves", "P-256:X25519"])
        .args(["--ciphers", "ECDHE-ECDSA-AES256-GCM-SHA384"])
        .arg("--cert-bundle-file")
        .arg(folder.join("ca-cert.pem"))
        .args(["--peer", "destination.example", "--identity-layout", "qemu"])
        .arg("--identity")
        .arg(&folder)
        .args(["--fallback", "process"]);
    let (done, sockets) = call(command);
    assert_eq!((done.code, sockets.len()), (0, 1), "{done:?}");

    let qmp = source.qmp();
    qmp.execute("migrate-set-capabilities", events).unwrap();
    let unlimited = json!({"max-bandwidth": 0});
    qmp.execute("migrate-set-parameters", unlimited).unwrap();
    qmp.give("handoff", sockets[0].as_fd()).unwrap();
    drop(sockets);
    qmp.execute("migrate", json!({"uri": "fd:handoff"}))
        .unwrap();
    finish(&mut source, "source").unwrap();
    finish(&mut destination, "destination").unwrap();

    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
    destination.resume().unwrap();
    assert_eq!(destination.check_pages().unwrap(), setup.workload.pages);
}
