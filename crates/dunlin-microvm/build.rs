//! Assembles the guest's program into a flat binary, which the crate includes.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let source = Path::new("guest/workload.S");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        // The crate is empty on other architectures, so there is no program to assemble.
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let object = out.join("workload.o");
    let image = out.join("workload.bin");
    run(Command::new("as")
        .arg("--64")
        .arg("-o")
        .arg(&object)
        .arg(source));
    // Link a program without relocations at the address `CODE` of layout.rs.
    run(Command::new("ld")
        .args(["-m", "elf_x86_64", "-Ttext=0x60000", "-e", "start"])
        .args(["--oformat", "binary", "-o"])
        .arg(&image)
        .arg(&object));
}

fn run(command: &mut Command) {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("`{program}` failed on the guest's program: {status}"),
        Err(error) => panic!(
            "cannot start `{program}`: {error}. The guest's program is assembled with GNU \
             binutils; install them (Debian: apt install binutils)"
        ),
    }
}
