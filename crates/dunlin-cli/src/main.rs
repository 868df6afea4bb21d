//! The `dunlin` command: parses the command line, runs the subcommand, prints errors.
//!
//! [`code`] lists the exit codes.
#![forbid(unsafe_code)]

mod bench;
mod code;
mod confine;
mod control;
mod demo;
mod display;
mod doctor;
mod evacuate;
mod explain;
mod fault;
mod file;
mod handoff;
mod identity;
mod init;
mod ipsec;
mod libvirt;
mod line;
mod log;
mod options;
mod output;
#[cfg(test)]
mod pages;
mod pki;
mod process;
mod progress;
mod published;
mod redirect;
mod service;
mod sessions;
mod state;
mod text;
mod timeline;
mod top;
mod tunnel;
mod vm;
mod watch;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::line::{FailedLine, Line};

/// Live migration of virtual machines over many encrypted lanes in parallel.
#[derive(Debug, Parser)]
#[command(
    name = "dunlin",
    version,
    after_help = "Exit codes: 0 success; 1 failed, the VM is at the source; 2 usage error; \
                  3 in doubt, or the VM is at the destination and does not run: check there; \
                  4 cancelled, the VM is at the source."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Move a running VM between two local processes, with throw-away certificates.
    Demo(demo::Demo),
    /// The reference VMM: run, receive and migrate VMs.
    #[command(subcommand)]
    Vm(vm::Command),
    /// List this host's migration sessions (under way or unresolved) and its tunnels.
    Status(sessions::Status),
    /// Show sessions and tunnels on the terminal, with keys to cancel migrations and limit rates.
    Top(top::Top),
    /// Serve metrics and a status page over HTTP.
    ServeStatus(watch::ServeStatus),
    /// Decide where a VM runs after its destination did not answer.
    Resolve(sessions::Resolve),
    /// Cancel a migration that is under way; the VM keeps running at the source.
    Cancel(sessions::Cancel),
    /// Print the cause and the remedy of an error code, or list all codes.
    Explain(explain::Explain),
    /// Examine what this host can do for migrations; changes nothing.
    Doctor(doctor::Doctor),
    /// Measure lanes and migrations on this host.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Carry other hypervisors' migration connections over encrypted lanes, transparently.
    #[command(subcommand)]
    Tunnel(tunnel::Command),
    /// Lead a toolstack's migrations into the tunnel, by rules of the packet filter.
    #[command(subcommand)]
    Redirect(redirect::Command),
    /// Pass sockets with kernel TLS to programs that do not implement TLS.
    #[command(subcommand)]
    Handoff(handoff::Command),
    /// Protect other programs' connections with IPsec, with one SA per CPU or connection.
    #[command(subcommand)]
    Ipsec(ipsec::Command),
    /// Let libvirt's migrations go through a tunnel, without changes to their command lines.
    #[command(subcommand)]
    Libvirt(libvirt::Command),
    /// Empty a host: move all of its VMs to other hosts, through libvirt.
    Evacuate(evacuate::Evacuate),
    /// Create identities and configurations for hosts, with the commands that install them.
    Init(init::Init),
    /// A small certificate authority for trials.
    #[command(subcommand)]
    Pki(pki::Command),
}

fn main() -> ExitCode {
    let helper = handoff::helper(std::env::args_os().collect());
    // A toolstack runs the helper, `dunlin handoff connect`, and expects only descriptions of
    // sockets on standard output. After a failure, the helper therefore prints nothing there, even
    // with `--json`.
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
        log::fail(&failed);
        let code = failed.code;
        if json {
            Line::Failed(failed).print();
        }
        code
    });
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The parsed command line, and whether `--json` was given.
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
        Command::Top(top) => top.run(),
        Command::ServeStatus(serve) => serve.run(),
        Command::Resolve(resolve) => resolve.run(),
        Command::Cancel(cancel) => cancel.run(),
        Command::Explain(explain) => explain.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Bench(command) => bench::run(&command),
        Command::Tunnel(command) => tunnel::run(&command),
        Command::Redirect(command) => redirect::run(&command),
        Command::Handoff(command) => handoff::run(&command),
        Command::Ipsec(command) => ipsec::run(&command),
        Command::Libvirt(command) => libvirt::run(&command),
        Command::Evacuate(evacuate) => evacuate.run(),
        Command::Init(init) => init.run(),
        Command::Pki(command) => pki::run(&command).map(|()| 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands that have neither `--json` nor a log, and the reason.
    const WITHOUT: [(&str, &str); 2] = [
        (
            "dunlin top",
            "draws a screen; `dunlin status --json` has the same content",
        ),
        (
            "dunlin tunnel stdio",
            "its output is that of the other host's program",
        ),
    ];

    /// The commands without subcommands at or below `command`, each with its full name.
    fn leaves(path: &str, command: &clap::Command) -> Vec<(String, clap::Command)> {
        let path = format!("{path}{}", command.get_name());
        if !command.has_subcommands() {
            return vec![(path, command.clone())];
        }
        let below = command.get_subcommands();
        let of = |one| leaves(&format!("{path} "), one);
        below.flat_map(of).collect()
    }

    #[test]
    fn each_command_prints_json_or_writes_a_log_or_has_a_reason_for_neither() {
        let lacking = |command: &clap::Command| {
            let has = |name| {
                command
                    .get_arguments()
                    .any(|flag| flag.get_long() == Some(name))
            };
            !has("json") && !has("log")
        };
        let found = leaves("", &Cli::command());
        assert!(found.len() > 30, "{}", found.len());
        let found = found.iter().filter(|(_, command)| lacking(command));
        let mut found: Vec<&str> = found.map(|(path, _)| path.as_str()).collect();
        found.sort_unstable();
        assert_eq!(found, WITHOUT.map(|(path, _)| path));
    }
}
