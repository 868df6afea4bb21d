//! `dunlin redirect apply` and `remove`.

use std::path::PathBuf;

use anyhow::{Error, Result, bail};
use clap::Args;
use dunlin_ipsec::sock_diag::TcpConnection;

use super::connections::{established, redirected, unprotected};
use super::files::{self, RunPath};
use super::nft;
use super::peers::{Addressed, addressed};
use super::rules::{Rules, rules};
use super::source::Source;
use super::state::{State, Wanted};
use super::table::Table;
use crate::code::DONE;
use crate::log;
use crate::state::StatePath;
use crate::text::{chained, count};
use crate::tunnel::{Redirect, today};

#[derive(Debug, Args)]
pub(crate) struct Apply {
    #[command(flatten)]
    source: Source,
    /// Print the rules and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Apply although connections in the clear are under way; they continue.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    run: RunPath,
    #[command(flatten)]
    state: StatePath,
}

#[derive(Debug, Args)]
pub(crate) struct Remove {
    /// Remove the rules although redirected connections are under way, which this cuts.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    run: RunPath,
    #[command(flatten)]
    state: StatePath,
}

/// The rules of the last `apply`, for a boot after which `apply` fails.
fn saved(state: &StatePath) -> Result<PathBuf> {
    Ok(state.directory()?.join("redirect.nft"))
}

impl Apply {
    pub(super) fn run(&self) -> Result<i32> {
        if self.dry_run {
            print!("{}", self.rules()?.text);
            return Ok(DONE);
        }
        match self.apply() {
            Ok(rules) => {
                println!("rules applied, digest {}", rules.digest);
                Ok(DONE)
            }
            Err(error) => Err(self.restore(error)),
        }
    }

    fn rules(&self) -> Result<Rules> {
        let read = self.source.read()?;
        Ok(rules(&addressed(read.redirects, read.port)?, &read.user))
    }

    fn apply(&self) -> Result<Rules> {
        let read = self.source.read()?;
        log::warn(read.redirects.iter().filter_map(past));
        let redirects = addressed(read.redirects, read.port)?;
        if !self.force {
            refuse_unprotected(&redirects)?;
        }
        let rules = rules(&redirects, &read.user);
        nft::load(&rules.text)?;
        self.record(Wanted::Digest(rules.digest.clone()))?;
        let saved = saved(&self.state)?;
        if let Some(directory) = saved.parent() {
            files::make(directory, 0o700)?;
        }
        files::write(&saved, &rules.text, 0o600)?;
        Ok(rules)
    }

    /// Records the table in force as the expected one.
    fn record(&self, wanted: Wanted) -> Result<()> {
        let table = Table::live()?;
        let record = table.as_ref().map(Table::record);
        if let Some(record) = &record {
            self.run.write_record(record)?;
        }
        let state = State::of(table.as_ref(), record.as_ref(), &wanted);
        self.run.write_state(&state)
    }

    /// After a failure without rules in force (the host has booted), installs the rules of the last
    /// successful `apply`: without them, the toolstack's connections would leave in the clear.
    fn restore(&self, error: Error) -> Error {
        let restored = || -> Result<bool> {
            if nft::list()?.is_some() {
                return Ok(false);
            }
            let Some(text) = files::read(&saved(&self.state)?)? else {
                return Ok(false);
            };
            nft::load(&text)?;
            self.record(Wanted::Invalid(chained(&error)))?;
            Ok(true)
        };
        match restored() {
            Ok(true) => error.context("the rules of the last successful apply are in force"),
            Ok(false) | Err(_) => error,
        }
    }
}

/// A warning about permission for plain connections that has ended.
fn past(redirect: &Redirect) -> Option<String> {
    let plain = redirect.plain.as_ref()?;
    plain.is_over(today()).then(|| {
        format!(
            "redirect {}: plain_until {} has passed, so connections from plain_from are rejected: \
             remove both keys",
            redirect.name, plain.until
        )
    })
}

fn refuse_unprotected(redirects: &[Addressed]) -> Result<()> {
    let found = unprotected(&established()?, redirects);
    if found.is_empty() {
        return Ok(());
    }
    let ends = |one: &TcpConnection| format!("{} to {}", one.local, one.peer);
    let list: Vec<String> = found.iter().map(ends).collect();
    bail!(
        "{} in the clear under way, such as of a migration (at fault: this side): {}; wait until \
         they end, or use --force, which lets them continue in the clear",
        count(found.len() as u64, "connection"),
        list.join(", ")
    )
}

impl Remove {
    pub(super) fn run(&self) -> Result<i32> {
        if let Some(table) = Table::live()?
            && !self.force
        {
            let ports = table.redirect_ports();
            let under_way = redirected(&established()?, Some(&ports)).len();
            if under_way > 0 {
                bail!(
                    "{} redirected to the tunnel under way (at fault: this side), which this \
                     would cut: wait until they end, or use --force",
                    count(under_way as u64, "connection")
                );
            }
        }
        let had = nft::delete()?;
        files::delete(&saved(&self.state)?)?;
        self.run.clear()?;
        println!(
            "{}",
            if had {
                "rules removed"
            } else {
                "no rules in force"
            }
        );
        Ok(DONE)
    }
}
