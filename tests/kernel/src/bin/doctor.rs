//! `dunlin doctor` reports what this kernel has, as the table of expected verdicts says.
//! Without the module tls, it reports that kernel TLS is absent, and that `auto` seals records in
//! the process.

use std::process::ExitCode;

use dunlin_kernel_tests::{Needs, Under, doctor, run};

const NEEDS: Needs = Needs {
    packages: &["iproute2", "nftables"],
    dunlin: true,
    limit_seconds: 120,
    under: Under::Both,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        doctor::check(guest);
        doctor::without_tls(guest);
    })
}
