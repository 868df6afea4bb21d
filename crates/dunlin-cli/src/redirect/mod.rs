//! `dunlin redirect`: the packet filter's rules for redirects of a tunnel's configuration.
//!
//! ```text
//!  Config ─▶ peers: addresses ─▶ rules: text, digest ─▶ nft ─▶ kernel
//!                                                        │
//!                          table, state ◀── rules in force
//! ```
//!
//! The tunnel has no part in this: the rules stay when it ends, so that connections of the
//! toolstack fail instead of leaving the host in the clear.

mod apply;
mod connections;
mod files;
mod nft;
mod peers;
mod rules;
mod show;
mod source;
mod state;
mod table;

use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Install the rules of a configuration, in place of those in force.
    Apply(apply::Apply),
    /// Compare the rules in force with the configuration, and show their counters.
    Show(show::Show),
    /// Delete all rules: the toolstack's connections then leave in the clear.
    Remove(apply::Remove),
    /// Compare the rules continuously, and write the result to a file for the tunnel.
    Watch(show::Watch),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Apply(apply) => apply.run(),
        Command::Show(show) => show.run(),
        Command::Remove(remove) => remove.run(),
        Command::Watch(watch) => watch.run(),
    }
}
