//! `cargo xtask`: development tasks for which cargo has no command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    xtask::main()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    eprintln!("cargo xtask needs x86-64: its kernels and QEMU are built for x86-64");
    ExitCode::FAILURE
}
