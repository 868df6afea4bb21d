//! Assembles the loops that calibrate instruction counts, and compiles the hand-off client, which
//! is written in C.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The names of the loops and their numbers of iterations. An iteration has two instructions. See
/// src/counting.rs.
const LOOPS: [(&str, u32); 2] = [("short", 5_000_000), ("long", 30_000_000)];

fn main() {
    let source = Path::new("guest/loop.S");
    println!("cargo::rerun-if-changed={}", source.display());
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (name, rounds) in LOOPS {
        if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
            // The crate must compile on other architectures, but it never runs there.
            fs::write(out.join(name), "").expect("OUT_DIR can be written");
            continue;
        }
        let object = out.join(format!("{name}.o"));
        run(Command::new("as")
            .args(["--64", "--defsym", &format!("ROUNDS={rounds}"), "-o"])
            .arg(&object)
            .arg(source));
        run(Command::new("ld")
            .args(["-m", "elf_x86_64", "-e", "start", "-o"])
            .arg(out.join(name))
            .arg(&object));
    }
    client(&out);
}

/// Compiles the client. It is linked statically, because the guest's C library can be another
/// version than the host's.
fn client(out: &Path) {
    let sources = ["ktls_copy.c", "ktls_client.c", "ktls_client.h"];
    let sources = sources.map(|name| Path::new("../../clients").join(name));
    for source in &sources {
        println!("cargo::rerun-if-changed={}", source.display());
    }
    let program = out.join("ktls_copy");
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        fs::write(program, "").expect("OUT_DIR can be written");
        return;
    }
    run(Command::new("cc")
        .args(["-std=gnu11", "-O1", "-static", "-o"])
        .arg(program)
        .args(&sources[..2]));
}

fn run(command: &mut Command) {
    let program = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("`{program}` failed: {status}"),
        Err(error) => panic!(
            "cannot start `{program}`: {error}. The calibrating loop needs GNU binutils, and a \
             client needs a C compiler; install both (Debian: apt install build-essential)"
        ),
    }
}
