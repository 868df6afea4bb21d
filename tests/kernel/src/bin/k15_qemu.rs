//! QEMU migrates a guest over a kernel-TLS socket (`getfd`) to a QEMU that uses its own TLS.
//! The guest writes to its memory during the migration.

use std::fs;
use std::os::fd::AsFd;
use std::process::ExitCode;

use dunlin_kernel_tests::{Needs, handoff, run};
use dunlin_rig::debian::Qemu;
use dunlin_rig::guest::{Content, Guest, Workload};
use dunlin_rig::machine::{Accelerator, Machine, Setup, finish};
use serde_json::{Value, json};

const NEEDS: Needs = Needs {
    packages: &["qemu-system-x86", "openssl"],
    dunlin: true,
    limit_seconds: 300,
    ..Needs::NOTHING
};
const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 4_000,
    hot: 400,
    rate: Some(200),
    content: Content::Mixed,
    seed: 0x4a11,
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificates(guest);
        let mut setup = Setup::new(&Qemu::installed(), Guest::Bare, WORKLOAD, Accelerator::Tcg);
        setup.options = ["-cpu", "max"].map(str::to_owned).into();
        let mut source = Machine::start(&setup, None).expect("QEMU starts");
        let mut destination = Machine::start_incoming(&setup, None).expect("QEMU starts");
        source.wait_ready().expect("the guest fills its pages");

        let folder = guest.folder();
        let own = json!({"qom-type": "tls-creds-x509", "id": "own", "dir": folder,
                         "endpoint": "server", "verify-peer": true});
        execute(&mut destination, "object-add", own);
        let events = json!({"capabilities": [{"capability": "events", "state": true}]});
        for machine in [&mut source, &mut destination] {
            execute(machine, "migrate-set-capabilities", events.clone());
        }
        let credentials = json!({"tls-creds": "own"});
        execute(&mut destination, "migrate-set-parameters", credentials);
        let uri = json!({"uri": "tcp:127.0.0.1:4450"});
        execute(&mut destination, "migrate-incoming", uri);

        let flags = "--cert-bundle-file ca-cert.pem --identity . --identity-layout qemu \
                     --curves P-256 --ciphers ECDHE-RSA-AES256-GCM-SHA384 --peer localhost";
        let flags: Vec<_> = flags.split_whitespace().collect();
        let called = handoff::connect(4450, &flags);
        assert_eq!(
            (called.code, called.sockets.len()),
            (Some(0), 1),
            "{called:?}"
        );
        let unlimited = json!({"max-bandwidth": 0});
        execute(&mut source, "migrate-set-parameters", unlimited);
        let given = source.qmp().give("handoff", called.sockets[0].as_fd());
        given.expect("QEMU accepts the descriptor");
        drop(called);
        execute(&mut source, "migrate", json!({"uri": "fd:handoff"}));
        finish(&mut source, "source").expect("the migration completes");
        finish(&mut destination, "destination").expect("the migration completes");
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsTxSw"), 1);
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsDecryptError"), 0);

        let differs = source.first_difference(&mut destination);
        assert_eq!(differs.expect("both are paused"), None);
        destination.resume().expect("the guest continues");
        let pages = destination.check_pages().expect("every page is right");
        assert_eq!(pages, WORKLOAD.pages);
    })
}

fn execute(machine: &mut Machine, command: &str, arguments: Value) {
    let done = machine.execute(command, arguments);
    done.unwrap_or_else(|error| panic!("{error}: {error:?}"));
}

/// Creates an authority and certificates for a server and a client, with file names as QEMU expects
/// them.
fn certificates(guest: &dunlin_kernel_tests::Guest) {
    let openssl = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        guest.command("openssl", &words);
    };
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -batch -days 30 -subj /CN=authority \
         -addext keyUsage=keyCertSign -keyout ca-key.pem -out ca-cert.pem",
    );
    // Without this file, QEMU searches for a random prime each time it loads a server's
    // credentials. Under emulation, this takes up to minutes.
    openssl("genpkey -genparam -algorithm DH -pkeyopt group:ffdhe2048 -out dh-params.pem");
    for (role, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let extensions = format!(
            "subjectAltName=DNS:localhost\nkeyUsage=digitalSignature,keyEncipherment\n\
             extendedKeyUsage={usage}\nbasicConstraints=CA:FALSE\n"
        );
        fs::write("extensions", extensions).expect("the folder is writable");
        openssl(&format!(
            "req -new -newkey rsa:2048 -nodes -batch -subj /CN={role} \
             -keyout {role}-key.pem -out {role}.csr"
        ));
        openssl(&format!(
            "x509 -req -days 30 -in {role}.csr -CA ca-cert.pem -CAkey ca-key.pem \
             -CAcreateserial -extfile extensions -out {role}-cert.pem"
        ));
    }
}
