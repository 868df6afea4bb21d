//! Test: key material is wiped from memory when an identity is dropped.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use dunlin_test_base::Scratch;

use super::*;
use crate::internals::peers::Peers;
use crate::internals::provider::Crypto;

/// Counts occurrences of bytes in the writable memory of this process. The bytes are given as
/// hexadecimal digits so that the argument itself does not match.
fn found(digits: &str) -> usize {
    let digit = |at: usize| (digits.as_bytes()[at] as char).to_digit(16).unwrap() as u8;
    let length = digits.len() / 2;
    let matches = |window: &[u8]| {
        let mut bytes = window.iter().enumerate();
        bytes.all(|(at, byte)| *byte == digit(2 * at) << 4 | digit(2 * at + 1))
    };
    let memory = File::open("/proc/self/mem").unwrap();
    let mut part = vec![0; 1 << 20];
    // The read buffer holds copies of earlier matches, so skip it.
    let own = part.as_ptr().addr() as u64;
    let own = own..own + part.len() as u64;
    let mut count = 0;
    for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        let (mut at, end) = (number(start), number(end));
        while rest.starts_with("rw") && at + length as u64 <= end {
            let bytes = (end - at).min(part.len() as u64) as usize;
            // Another thread may have unmapped this memory in the meantime.
            if memory.read_exact_at(&mut part[..bytes], at).is_err() {
                break;
            }
            let windows = (at..).zip(part[..bytes].windows(length));
            count += windows
                .filter(|(address, window)| !own.contains(address) && matches(window))
                .count();
            // Consecutive parts overlap, so that matches across their boundary are found.
            at += (bytes - length + 1) as u64;
        }
    }
    count
}

/// Runs a shell script in `directory` and returns its output.
fn shell(directory: &Path, script: &str) -> String {
    let mut shell = Command::new("sh");
    let done = shell.args(["-ec", script]).current_dir(directory).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// Claim H5 of docs/security.
#[test]
fn key_material_is_wiped_when_its_identity_is_dropped() {
    let scratch = Scratch::new();
    let directory = scratch.path();
    // OpenSSL generates the key, so this process has the key only because it loaded the file.
    shell(
        directory,
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 \
         -subj /CN=a.test -addext subjectAltName=DNS:a.test -keyout key.pem -out cert.pem 2>&1
         cp cert.pem ca-cert.pem",
    );
    fs::set_permissions(directory.join("key.pem"), PermissionsExt::from_mode(0o600)).unwrap();
    let digits = |from: &str| {
        let script = format!("{from} | od -An -v -tx1 | tr -d ' \\n'");
        shell(directory, &script)
    };
    // A decoder may keep copies of single lines, so search for text across a line break.
    let text = digits("head -c 110 key.pem | tail -c 40");
    // Search for the private scalar with its ASN.1 prefix. The crypto library may keep a copy of
    // the scalar without the prefix, and this search must not find that copy.
    let content =
        digits("openssl pkcs8 -topk8 -nocrypt -in key.pem -outform DER | head -c 68 | tail -c 37");
    assert!(content.starts_with("020101"), "{} digits", content.len());

    let options = LoadOptions {
        role: Some(Role::Source),
        ..LoadOptions::default()
    };
    let (identity, _) = Identity::load(directory, options).unwrap();
    assert_eq!(
        found(&content),
        1,
        "memory does not hold exactly one copy of the key"
    );
    let tls = identity
        .client(&Crypto::auto(), Peers::AnyFromAuthority)
        .unwrap();
    drop((identity, tls));
    assert_eq!(found(&text), 0, "the file's text remains in memory");
    assert_eq!(found(&content), 0, "the key remains in memory");
}
