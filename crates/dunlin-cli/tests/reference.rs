//! Compares the reference pages of docs/ with the command: flags, and keys of the tunnel's
//! configuration.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use dunlin_test_base::Scratch;

/// The page of flags, regenerated if `DUNLIN_BLESS` is set.
#[test]
fn the_page_of_flags_is_the_output_of_help() {
    let mut page =
        "# Flags\n\nThis page is for operators and authors of scripts. It lists the flags of \
                    every command, as `dunlin COMMAND --help` prints them.\n"
            .to_owned();
    add_command(&mut Vec::new(), &mut page);
    let path = reference("flags.md");
    if std::env::var_os("DUNLIN_BLESS").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap();
    let differs = page
        .lines()
        .zip(written.lines())
        .find(|(now, then)| now != then);
    assert!(
        page == written,
        "docs/reference/flags.md is not the output of --help; write it anew with DUNLIN_BLESS=1: \
         {differs:?}"
    );
    assert!(
        page.contains("\n- `--downtime-limit <DURATION>`: "),
        "{page}"
    );
}

/// Adds a command to the page if it has no subcommands; otherwise adds each subcommand.
fn add_command(words: &mut Vec<String>, page: &mut String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dunlin"));
    let done = command.args(&*words).arg("-h").output().unwrap();
    let help = String::from_utf8(done.stdout).unwrap();
    let (about, rest) = help.split_once("\n\nUsage: ").unwrap();
    let (usage, rest) = rest.split_once('\n').unwrap();
    let mut commands = Vec::new();
    let mut flags = String::new();
    let mut section = "";
    for line in rest.lines() {
        if !line.starts_with(' ') {
            section = line;
        } else if let Some((name, text)) = line.trim().split_once("  ") {
            match section {
                "Commands:" if name != "help" => commands.push(name.to_owned()),
                "Options:" | "Arguments:" if name != "-h, --help" => {
                    writeln!(flags, "- `{name}`: {}", text.trim()).unwrap();
                }
                _ => {}
            }
        }
    }
    if commands.is_empty() {
        let name = words.join(" ");
        write!(
            page,
            "\n## `dunlin {name}`\n\n{about}.\n\n```text\n{usage}\n```\n\n{flags}"
        )
        .unwrap();
    }
    for name in commands {
        words.push(name);
        add_command(words, page);
        words.pop();
    }
}

#[test]
fn the_page_of_the_configuration_has_every_key() {
    let page = fs::read_to_string(reference("config.md")).unwrap();
    let route = "listen = \"127.0.0.1:0\"\nidentity = \"x\"\n[route.ram]\n";
    let limits = route.replace("route.ram", "limits");
    let ipsec = route.replace("route.ram", "ipsec");
    let peer = route.replace("route.ram", "peer.b");
    let redirect = route.replace("route.ram", "redirect.vm");
    for (heading, table, more) in [
        (
            "The file",
            "",
            &["limits", "ipsec", "peer", "redirect", "route"][..],
        ),
        ("`[limits]`", &*limits, &[]),
        ("`[route.NAME]`", route, &[]),
        ("`[peer.NAME]`", &*peer, &[]),
        ("`[redirect.NAME]`", &*redirect, &[]),
        ("`[ipsec]`", &*ipsec, &[]),
    ] {
        let mut written = keys(&page, heading);
        written.extend(more.iter().map(|&key| key.to_owned()));
        assert_eq!(written, possible(table), "{heading}");
    }
}

/// The keys in the first cells of a section's tables.
fn keys(page: &str, heading: &str) -> BTreeSet<String> {
    let sections = page.split("\n## ");
    let mut sections = sections.filter(|section| section.lines().next() == Some(heading));
    let section = sections.next().unwrap();
    let cells = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once(" |"));
    cells
        .flat_map(|(cell, _)| quoted(&format!("`{cell}")))
        .collect()
}

/// The keys that are valid in `table`, the last table of a configuration. The error for an unknown
/// key lists them.
fn possible(table: &str) -> BTreeSet<String> {
    let scratch = Scratch::new();
    let file = scratch.join("tunnel.toml");
    fs::write(&file, format!("{table}unknown = 1\n")).unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_dunlin"));
    let done = check
        .args(["tunnel", "check", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    let error = String::from_utf8(done.stderr).unwrap();
    let (_, keys) = error
        .split_once("unknown field `unknown`, expected ")
        .unwrap();
    quoted(keys).into_iter().collect()
}

/// The words in backquotes.
fn quoted(text: &str) -> Vec<String> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

fn reference(page: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs/reference")
        .join(page)
}
