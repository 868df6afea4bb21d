//! `cargo xtask`: development tasks for which cargo has no command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    xtask::main()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    eprintln!("the kernels and QEMU that the chores need are those of x86-64");
    ExitCode::FAILURE
}
