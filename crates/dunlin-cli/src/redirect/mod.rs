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

use std::path::Path;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use apply::unknown_users;
use files::RunPath;
use source::Source;
use table::Table;

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

/// The rules in force, for `dunlin doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rules {
    /// The rules in force are those of the configuration.
    Applied,
    /// The rules in force are not those of the configuration; the text says what differs, and the
    /// remedy.
    Different(String),
    /// There is a table, but the configuration has no redirect.
    Unexpected,
    /// There is no table, and the configuration has no redirect.
    None,
}

pub(crate) fn has_nft() -> bool {
    nft::program().is_ok()
}

/// Compares the rules in force with a configuration that has redirects, if one is given. Needs
/// CAP_NET_ADMIN.
pub(crate) fn rules_in_force(config: Option<&Path>) -> Result<Rules> {
    let Some(config) = config else {
        return Ok(match Table::live()? {
            Some(_) => Rules::Unexpected,
            None => Rules::None,
        });
    };
    let state = show::compared(&Source::of(config), &RunPath::usual())?;
    Ok(match state.is_applied() {
        true => Rules::Applied,
        false => Rules::Different(state.text()),
    })
}
