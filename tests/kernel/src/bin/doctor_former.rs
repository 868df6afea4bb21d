//! `dunlin doctor` reports what bookworm's kernel lacks, as the table of expected verdicts says.

use std::process::ExitCode;

use dunlin_kernel_tests::{Needs, Under, doctor, run};

const NEEDS: Needs = Needs {
    packages: &["iproute2", "nftables"],
    dunlin: true,
    limit_seconds: 120,
    under: Under::Former,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        doctor::check(guest);
    })
}
