//! The `dunlin` command.
//!
//! Its exit codes are in [`code`].
#![forbid(unsafe_code)]

mod bench;
mod code;
mod confine;
mod control;
mod demo;
mod display;
mod handoff;
mod identity;
mod ipsec;
mod line;
mod log;
mod options;
mod pki;
mod process;
mod service;
mod sessions;
mod state;
mod text;
mod tunnel;
mod vm;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::line::{FailedLine, Line};

/// Live migration of virtual machines over many encrypted lanes at once.
#[derive(Debug, Parser)]
#[command(
    name = "dunlin",
    version,
    after_help = "Exit codes: 0 moved, or done; 1 failed, with the VM at the source; 2 usage; \
                  3 in doubt, or at the destination and not running: ask there; 4 cancelled, with \
                  the VM at the source."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Move a running VM between two processes, with throw-away certificates.
    Demo(demo::Demo),
    /// The reference VMM: run, receive and migrate VMs.
    #[command(subcommand)]
    Vm(vm::Command),
    /// List the sessions of this host: those under way, and those whose end is
    /// not settled; and its tunnels.
    Status(sessions::Status),
    /// Decide where a VM runs whose destination never answered.
    Resolve(sessions::Resolve),
    /// End a migration that is under way; the VM goes on at the source.
    Cancel(sessions::Cancel),
    /// Measure lanes and migrations on this host, one JSON object a line.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Carry other hypervisors' connections over encrypted lanes; they notice nothing of it.
    #[command(subcommand)]
    Tunnel(tunnel::Command),
    /// Sockets whose TLS is the kernel's, for programs that know nothing of TLS.
    #[command(subcommand)]
    Handoff(handoff::Command),
    /// IPsec for other programs' connections, an SA for each CPU or connection.
    #[command(subcommand)]
    Ipsec(ipsec::Command),
    /// A small certificate authority for trying things out.
    #[command(subcommand)]
    Pki(pki::Command),
}

fn main() -> ExitCode {
    let helper = handoff::helper(std::env::args_os().collect());
    // A helper's standard output is its caller's: nothing, or what was handed over.
    let (cli, json) = match helper {
        Some(words) => (
            Cli::try_parse_from(words).map_err(|error| handoff::refused(&error)),
            false,
        ),
        None => parse(),
    };
    let result = cli.and_then(|cli| run(cli.command));
    let code = result.unwrap_or_else(|error| {
        let failed = FailedLine::from(&error);
        eprintln!("dunlin: {}", text::clean_lines(&failed.text));
        let code = failed.code;
        if json {
            Line::Failed(failed).print();
        }
        code
    });
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The command line, and whether the answer is to be JSON.
fn parse() -> (anyhow::Result<Cli>, bool) {
    let matches = Cli::command().get_matches();
    let mut last = &matches;
    while let Some((_, next)) = last.subcommand() {
        last = next;
    }
    // Not every command has the flag.
    let json = matches!(last.try_get_one::<bool>("json"), Ok(Some(true)));
    (Cli::from_arg_matches(&matches).map_err(Into::into), json)
}

fn run(command: Command) -> anyhow::Result<i32> {
    match command {
        Command::Demo(demo) => demo.run(),
        Command::Vm(command) => vm::run(command),
        Command::Status(status) => status.run(),
        Command::Resolve(resolve) => resolve.run(),
        Command::Cancel(cancel) => cancel.run(),
        Command::Bench(command) => bench::run(&command),
        Command::Tunnel(command) => tunnel::run(&command),
        Command::Handoff(command) => handoff::run(&command),
        Command::Ipsec(command) => ipsec::run(&command),
        Command::Pki(command) => pki::run(&command).map(|()| 0),
    }
}
