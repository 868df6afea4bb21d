//! Assembles the bare guest, which has no operating system. Builds the program that writes to
//! memory in the Linux guest.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for source in [
        "build.rs",
        "guest/bare.S",
        "guest/bare.ld",
        "src/bin/rig-writer.rs",
    ] {
        println!("cargo::rerun-if-changed={source}");
    }
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        // On other architectures the crate is empty.
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    assemble(&out);
    build_writer(&out);
}

fn assemble(out: &Path) {
    let object = out.join("bare.o");
    run(Command::new("as")
        .args(["--64", "-o"])
        .arg(&object)
        .arg("guest/bare.S"));
    run(Command::new("ld")
        .args(["-m", "elf_x86_64", "-T", "guest/bare.ld"])
        .args(["-z", "noexecstack", "--no-warn-rwx-segments", "-o"])
        .arg(out.join("bare.elf"))
        .arg(&object));
}

/// Builds the writer statically, so the guest needs no libraries. Cargo cannot set this for a
/// single program.
fn build_writer(out: &Path) {
    let rustc = env::var_os("RUSTC").expect("cargo sets RUSTC");
    run(Command::new(rustc)
        .args(["--edition", "2024", "--crate-name", "rig_writer"])
        .args([
            "-C",
            "opt-level=2",
            "-C",
            "panic=abort",
            "-C",
            "strip=symbols",
        ])
        .args(["-C", "target-feature=+crt-static", "--target"])
        .arg(env::var_os("TARGET").expect("cargo sets TARGET"))
        .arg("-o")
        .arg(out.join("rig-writer"))
        .arg("src/bin/rig-writer.rs"));
}

fn run(command: &mut Command) {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("`{program}` failed on a guest's program: {status}"),
        Err(error) => panic!(
            "cannot start `{program}`: {error}. The guests are made with GNU binutils and a C \
             library (Debian: apt install build-essential)"
        ),
    }
}
