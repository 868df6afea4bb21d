//! Writes the manual's pages and the completions of shells from the definition of the command line.
//! `cargo xtask package` runs the test `written` with the directory in DUNLIN_PAGES. Because this
//! module is a test, neither its code nor the crates that it uses are a part of the command.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::CommandFactory;
use clap_complete::aot::{Shell, generate_to};
use dunlin_test_base::Scratch;

use crate::Cli;

/// Writes `man/*.1` and `completions/*` into `directory`.
fn write(directory: &Path) {
    let [man, completions] = ["man", "completions"].map(|name| directory.join(name));
    for folder in [&man, &completions] {
        fs::create_dir_all(folder).unwrap();
    }
    clap_mangen::generate_to(Cli::command(), &man).unwrap();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Cli::command(), "dunlin", &completions).unwrap();
    }
}

/// The names of the pages: one for each command, such as `dunlin-tunnel-run`.
fn expected(command: &clap::Command, name: &str, names: &mut BTreeSet<String>) {
    names.insert(format!("{name}.1"));
    for one in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        expected(one, &format!("{name}-{}", one.get_name()), names);
    }
}

#[test]
fn written() {
    let scratch = Scratch::new();
    let directory = match std::env::var_os("DUNLIN_PAGES") {
        Some(directory) => PathBuf::from(directory),
        None => scratch.join("pages"),
    };
    write(&directory);
    let mut names = BTreeSet::new();
    expected(&Cli::command(), "dunlin", &mut names);
    let found: BTreeSet<String> = fs::read_dir(directory.join("man"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found, names);
    let page = fs::read_to_string(directory.join("man/dunlin-init.1")).unwrap();
    assert!(page.contains("\\-\\-libvirt"), "{page}");
}

#[test]
fn bash_completes_subcommands_and_flags() {
    let scratch = Scratch::new();
    write(scratch.path());
    let script = scratch.join("completions/dunlin.bash");
    let complete = |words: &str, last: &str| {
        let count = words.split_whitespace().count();
        let script = format!(
            "source {}; COMP_WORDS=({words} {last}); COMP_CWORD={count}; _dunlin dunlin {last:?} \
             ''; echo ${{COMPREPLY[@]}}",
            script.display()
        );
        let done = Command::new("bash").args(["-c", &script]).output().unwrap();
        String::from_utf8(done.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(complete("dunlin", "tun"), "tunnel");
    assert_eq!(complete("dunlin libvirt", "en"), "enable");
    assert_eq!(complete("dunlin init", "--libv"), "--libvirt");
}
