//! QEMU migrates by getfd over a kernel-TLS socket, to a QEMU that has its own TLS.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_kernel_tests::handoff::{Background, pattern};
use dunlin_kernel_tests::{Needs, handoff, run};
use dunlin_linux::fdpass;
use serde_json::{Value, json};

const NEEDS: Needs = Needs {
    packages: &["qemu-system-x86", "openssl"],
    dunlin: true,
    limit_seconds: 300,
    ..Needs::NOTHING
};
const PATIENCE: Duration = Duration::from_secs(120);
/// Where the content is put in the guest's memory, above what the firmware uses.
const AT: u64 = 16 << 20;
const BYTES: usize = 16 << 20;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificates(guest);
        fs::write("content", pattern(BYTES, 77)).expect("the folder is ours");
        let loader = format!("loader,file=content,addr={AT:#x},force-raw=on");
        let mut source = Qemu::start("source", &["-device", &loader]);
        let mut destination = Qemu::start("destination", &["-incoming", "defer"]);

        let own = json!({"qom-type": "tls-creds-x509", "id": "own", "dir": ".",
                         "endpoint": "server", "verify-peer": true});
        destination.execute("object-add", &own);
        destination.execute("migrate-set-parameters", &json!({"tls-creds": "own"}));
        let uri = json!({"uri": "tcp:127.0.0.1:4450"});
        destination.execute("migrate-incoming", &uri);

        let flags = "--cert-bundle-file ca-cert.pem --identity . --identity-layout qemu \
                     --curves P-256 --ciphers ECDHE-RSA-AES256-GCM-SHA384 --peer localhost";
        let flags: Vec<_> = flags.split_whitespace().collect();
        let called = handoff::connect(4450, &flags);
        assert_eq!(
            (called.code, called.sockets.len()),
            (Some(0), 1),
            "{called:?}"
        );
        source.give("handoff", called.sockets[0].as_fd());
        drop(called);
        source.execute("migrate", &json!({"uri": "fd:handoff"}));
        source.wait_completed();
        destination.wait_completed();
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsTxSw"), 1);
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsDecryptError"), 0);

        let file = guest.folder().join("arrived");
        let save = json!({"val": AT, "size": BYTES, "filename": file});
        destination.execute("pmemsave", &save);
        let arrived = fs::read(&file).expect("QEMU has written it");
        fs::remove_file(&file).expect("nobody else has it");
        assert!(arrived == pattern(BYTES, 77), "the memory differs");
    })
}

/// An authority, and what it has issued to a server and a client, in QEMU's layout.
fn certificates(guest: &dunlin_kernel_tests::Guest) {
    let openssl = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        guest.command("openssl", &words);
    };
    openssl(
        "req -x509 -newkey rsa:2048 -nodes -batch -days 30 -subj /CN=authority \
         -addext keyUsage=keyCertSign -keyout ca-key.pem -out ca-cert.pem",
    );
    for (role, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let extensions = format!(
            "subjectAltName=DNS:localhost\nkeyUsage=digitalSignature,keyEncipherment\n\
             extendedKeyUsage={usage}\nbasicConstraints=CA:FALSE\n"
        );
        fs::write("extensions", extensions).expect("the folder is ours");
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

/// A QEMU whose guest does not run, and its control socket.
struct Qemu {
    stream: BufReader<UnixStream>,
    _process: Background,
}

impl Qemu {
    fn start(name: &str, more: &[&str]) -> Self {
        let socket = format!("{name}.qmp");
        let process = Command::new("qemu-system-x86_64")
            .args("-accel tcg -machine pc -m 64 -nographic -nodefaults -S".split(' '))
            .args(["-qmp", &format!("unix:{socket},server=on,wait=off")])
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .expect("QEMU starts");
        let process = Background(process);
        let until = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < until, "{name}: {error}"),
            }
            thread::sleep(Duration::from_millis(50));
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut qemu = Self {
            stream: BufReader::new(stream),
            _process: process,
        };
        qemu.read();
        qemu.execute("qmp_capabilities", &json!({}));
        qemu
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("it answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn answer(&mut self) -> Value {
        loop {
            let mut said = self.read();
            assert!(said.get("error").is_none(), "{said}");
            if said.get("return").is_some() {
                return said["return"].take();
            }
        }
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> Value {
        let line = json!({"execute": command, "arguments": arguments});
        writeln!(self.stream.get_mut(), "{line}").expect("it reads");
        self.answer()
    }

    fn give(&mut self, name: &str, descriptor: BorrowedFd<'_>) {
        let line = json!({"execute": "getfd", "arguments": {"fdname": name}});
        let line = format!("{line}\n");
        fdpass::send(self.stream.get_ref(), line.as_bytes(), &[descriptor]).expect("it reads");
        self.answer();
    }

    fn wait_completed(&mut self) {
        let until = Instant::now() + PATIENCE;
        loop {
            let state = self.execute("query-migrate", &json!({}));
            match state["status"].as_str() {
                Some("completed") => return,
                Some("failed" | "cancelled") => panic!("{state}"),
                _ => assert!(Instant::now() < until, "{state}"),
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}
