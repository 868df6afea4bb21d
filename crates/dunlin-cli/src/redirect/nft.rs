//! The program nft(8), which installs and lists rules. Rules are text because operators read them,
//! and because the kernel's own form (netlink) would need a translation of our own.

use std::env;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow};
use dunlin_linux::privileges::{Capability, has};
use serde_json::Value;

use super::rules::TABLE;
use crate::text::clean_lines;

/// Directories that are often missing from the PATH of unprivileged users.
const SBIN: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Runs a transaction.
pub(super) fn load(text: &str) -> Result<()> {
    run(&["-f", "-"], text)?.map_err(|said| explained(&said))?;
    Ok(())
}

/// Deletes the table; returns whether there was one.
pub(super) fn delete() -> Result<bool> {
    if list(TABLE)?.is_none() {
        return Ok(false);
    }
    load(&format!("table {TABLE}\ndelete table {TABLE}\n"))?;
    Ok(true)
}

/// Returns the table `table` (family and name) in nft's JSON format; `None` if it does not exist.
pub(super) fn list(table: &str) -> Result<Option<Value>> {
    if !exists(table)? {
        return Ok(None);
    }
    let mut arguments = vec!["-j", "list", "table"];
    arguments.extend(table.split(' '));
    match run(&arguments, "")? {
        Ok(out) => parse(&out).map(Some),
        // The table was deleted in the meantime.
        Err(_) if !exists(table)? => Ok(None),
        Err(said) => Err(explained(&said)),
    }
}

fn exists(table: &str) -> Result<bool> {
    let out = run(&["-j", "list", "tables"], "")?.map_err(|said| explained(&said))?;
    let listed = parse(&out)?;
    let tables = listed["nftables"].as_array().into_iter().flatten();
    let mut names = tables.map(|one| (&one["table"]["family"], &one["table"]["name"]));
    let wanted = table.split_once(' ').unwrap_or_default();
    Ok(names.any(|(family, name)| *family == wanted.0 && *name == wanted.1))
}

fn parse(out: &str) -> Result<Value> {
    // nft 1.0 prints nothing if there are no tables.
    if out.trim().is_empty() {
        return Ok(Value::Null);
    }
    let parsed = serde_json::from_str(out);
    parsed.context("nft printed no JSON (at fault: this side): update the package nftables")
}

/// Runs nft with an input; returns its output, or its messages if it failed.
fn run(arguments: &[&str], input: &str) -> Result<Result<String, String>> {
    let mut child = Command::new(program()?)
        .args(arguments)
        // With these variables, neither the locale nor the time zone changes what nft prints.
        .env("LC_ALL", "C")
        .env("TZ", "UTC")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start nft")?;
    if let Some(mut stdin) = child.stdin.take() {
        // This does not block, because nft reads all of its input before it prints. If nft fails
        // earlier, its messages say why, so ignore the error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let done = child.wait_with_output().context("cannot run nft")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(match done.status.success() {
        true => Ok(text(&done.stdout)),
        false => Err(text(&done.stderr)),
    })
}

pub(super) fn program() -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(SBIN.map(PathBuf::from));
    let mut programs = directories.map(|directory| directory.join("nft"));
    programs
        .find(|program| program.is_absolute() && program.is_file())
        .ok_or_else(|| {
            anyhow!(
                "program nft not found in PATH, {} (at fault: this side): install the package \
                 nftables",
                SBIN.join(", ")
            )
        })
}

/// nft's messages with the cause and the remedy. Runs nft again to tell the causes apart, because
/// nft has one exit code for almost all of them, and its messages differ between versions.
fn explained(said: &str) -> anyhow::Error {
    let works = |words: &[&str]| run(words, "").is_ok_and(|done| done.is_ok());
    let advice = if !has(Capability::Network).unwrap_or(true) {
        "nft needs root or CAP_NET_ADMIN (at fault: this side)"
    } else if !works(&["list", "tables"]) {
        "the kernel has no nf_tables (at fault: kernel): load the module nf_tables, or use a \
         kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET"
    } else if !works(&["-j", "list", "tables"]) {
        "this nft has no JSON (at fault: this side): install one with JSON support"
    } else {
        "nft or the kernel rejected the rules (at fault: kernel): they need Linux 5.4 and the \
         modules nft_chain_nat, nft_redir, nft_fib_inet and nft_reject_inet"
    };
    // The first message and its rule. Later messages repeat the first one for other rules.
    let first: Vec<&str> = said.trim().lines().take(2).collect();
    anyhow!("{advice}; nft: {}", clean_lines(&first.join("\n")))
}
