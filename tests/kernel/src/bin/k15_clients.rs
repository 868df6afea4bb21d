//! The clients of `clients/` work with kernel TLS: all data arrives, and both directions end
//! cleanly.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use dunlin_kernel_tests::handoff::{Stunnel, certificate, stunnel};
use dunlin_kernel_tests::{Needs, run};
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl", "python3-minimal"],
    dunlin: true,
    limit_seconds: 240,
    ..Needs::NOTHING
};

const PYTHON: &str = include_str!("../../../../clients/ktls_client.py");
const C: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ktls_copy"));

/// The size of a block, in bytes. It is not a multiple of a record's size.
const BLOCK: usize = (1 << 20) + 777;
/// The number of blocks: in a normal run, and in the soak test.
const BLOCKS: [usize; 2] = [64, 1024];
const ANSWER: usize = (1 << 20) + 33;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let dunlin = guest.output("which", &["dunlin"]);
        symlink(dunlin.trim(), "ktls-helper").expect("the folder is writable");
        fs::write("ktls_client.py", PYTHON).expect("the folder is writable");
        fs::write("ktls_copy", C).expect("the folder is writable");
        fs::set_permissions("ktls_copy", fs::Permissions::from_mode(0o755))
            .expect("the file is ours");
        let helper = guest.folder().join("ktls-helper");
        let stunnel = stunnel(guest, 4443, "");
        let blocks = BLOCKS[usize::from(guest.is_soak())];
        for (number, client) in [&["./ktls_copy"][..], &["python3", "ktls_client.py"]]
            .into_iter()
            .enumerate()
        {
            let mut command = Command::new(client[0]);
            command
                .args(&client[1..])
                .arg(&helper)
                .args(["127.0.0.1", "4443", "pool.pem"]);
            all_data_arrives_in_both_directions(&stunnel, command, blocks);
            assert_eq!(
                guest.counter("/proc/net/tls_stat", "TlsTxSw"),
                number as u64 + 1
            );
        }
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsDecryptError"), 0);
    })
}

fn all_data_arrives_in_both_directions(stunnel: &Stunnel, mut client: Command, blocks: usize) {
    let answer = pattern(ANSWER, 9);
    let content = pattern(BLOCK, 7);
    // Each block starts with its number.
    let block = |number: usize| {
        let mut block = content.clone();
        block[..8].copy_from_slice(&number.to_be_bytes());
        block
    };
    let mut child = client
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("the stream is piped");
    let done = thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..blocks {
                let sent = input.write_all(&block(number));
                sent.expect("the client reads its input");
            }
        });
        scope.spawn(|| {
            let (mut far, _) = stunnel.target.accept().expect("stunnel connects");
            let mut received = vec![0; BLOCK];
            for number in 0..blocks {
                far.read_exact(&mut received).expect("the data arrives");
                assert!(
                    received == block(number),
                    "block {number} of {blocks} differs"
                );
            }
            assert_eq!(
                far.read(&mut [0]).expect("the stream ends without a reset"),
                0
            );
            far.write_all(&answer).expect("stunnel accepts the data");
        });
        child.wait_with_output().expect("the process ends")
    });
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{client:?}: {}\n{said}", done.status);
    let received = done.stdout.len();
    assert!(
        done.stdout == answer,
        "{client:?}: {received} bytes of {ANSWER}\n{said}"
    );
}
