//! The `dunlin` command runs in the guest, and creates a certificate that OpenSSL accepts.

use std::process::ExitCode;

use dunlin_kernel_tests::{Needs, run};

const NEEDS: Needs = Needs {
    packages: &["openssl"],
    dunlin: true,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        guest.command("dunlin", &["pki", "init", "ca"]);
        let issue = [
            "pki",
            "issue",
            "--ca",
            "ca",
            "--name",
            "host-a.example",
            "host-a",
        ];
        guest.command("dunlin", &issue);
        let verified = guest.output(
            "openssl",
            &["verify", "-CAfile", "ca/ca-cert.pem", "host-a/cert.pem"],
        );
        assert!(verified.ends_with("OK\n"), "{verified}");
    })
}
