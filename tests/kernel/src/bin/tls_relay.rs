//! The tests of relays pass with kernel TLS and spliced bytes.

use std::process::ExitCode;

use dunlin_kernel_tests::tls::renews_keys;
use dunlin_kernel_tests::{Needs, run};

fn main() -> ExitCode {
    let needs = Needs {
        library_tests: &["tunnel_relay"],
        limit_seconds: 240,
        ..Needs::NOTHING
    };
    run(&needs, |guest| {
        guest.command("modprobe", &["aesni-intel"]);
        let skipped: &[&str] = if renews_keys(guest) {
            &[]
        } else {
            // This kernel cannot renew keys, so skip the test of key renewal.
            &["keys_are_renewed"]
        };
        let _ = guest.library_tests("tunnel_relay", skipped);
        let sealed = guest.counter("/proc/net/tls_stat", "TlsTxSw");
        assert!(sealed >= 40, "the kernel sealed {sealed} connections");
    })
}
