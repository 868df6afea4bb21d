//! `dunlin redirect apply` and `remove`.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use anyhow::{Context, Error, Result, bail, ensure};
use clap::Args;
use dunlin_ipsec::connections;
use dunlin_ipsec::sock_diag::{TcpConnection, destroy};
use dunlin_linux::accounts::user_id;
use serde_json::json;

use super::connections::{established, redirected, unprotected};
use super::files::{self, RunPath};
use super::nft;
use super::peers::{Addressed, addressed};
use super::rules::{Rules, TABLE, rules};
use super::source::Source;
use super::state::{State, Wanted};
use super::table::Table;
use crate::code::DONE;
use crate::file::replace;
use crate::line::print_json;
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
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunPath,
    #[command(flatten)]
    state: StatePath,
}

#[derive(Debug, Args)]
pub(crate) struct Remove {
    /// Remove the rules although redirected connections are under way, and cut these connections.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunPath,
    #[command(flatten)]
    state: StatePath,
}

/// The file with the rules of the last successful `apply`. They are installed if `apply` fails
/// while no rules are in force, as after a boot.
fn saved(state: &StatePath) -> Result<PathBuf> {
    Ok(state.directory()?.join("redirect.nft"))
}

impl Apply {
    pub(super) fn run(&self) -> Result<i32> {
        if self.dry_run {
            let read = self.source.read()?;
            log::warn(unknown_users(&read.redirects, Some(&read.user))?);
            let redirects = addressed(read.redirects, read.port)?;
            let rules = rules(&redirects, &read.user);
            match self.json {
                true => print_json(&json!({ "digest": rules.digest, "rules": rules.text })),
                false => print!("{}", rules.text),
            }
            return Ok(DONE);
        }
        match self.apply() {
            Ok(rules) => {
                match self.json {
                    true => print_json(&json!({ "digest": rules.digest })),
                    false => println!("rules applied, digest {}", rules.digest),
                }
                Ok(DONE)
            }
            Err(error) => Err(self.restore(error)),
        }
    }

    fn apply(&self) -> Result<Rules> {
        let read = self.source.read()?;
        log::warn(read.redirects.iter().filter_map(past));
        let unknown = unknown_users(&read.redirects, Some(&read.user))?;
        ensure!(unknown.is_empty(), unknown.join("\n"));
        let redirects = addressed(read.redirects, read.port)?;
        if !self.force {
            refuse_unprotected(&redirects)?;
        }
        let rules = rules(&redirects, &read.user);
        self.load(&rules.text, Wanted::Digest(rules.digest.clone()))?;
        let saved = saved(&self.state)?;
        if let Some(directory) = saved.parent() {
            files::make(directory, 0o700)?;
        }
        replace(&saved, &rules.text, 0o600)?;
        Ok(rules)
    }

    /// Loads rules, records the table that they should yield, and compares this table with the
    /// table in force.
    fn load(&self, text: &str, wanted: Wanted) -> Result<()> {
        let expected = Table::expected(text)?.record();
        nft::load(text)?;
        self.run.write_record(&expected)?;
        let table = Table::live()?;
        self.run
            .write_state(&State::of(table.as_ref(), Some(&expected), &wanted))?;
        let live = table.as_ref().map(Table::record);
        let difference = match &live {
            Some(live) => expected.difference(live),
            None => Some("the table is missing".to_owned()),
        };
        if let Some(difference) = difference {
            bail!(
                "another program on this host changed the loaded rules: {difference}; find the \
                 program with `nft monitor` (at fault: this side)"
            );
        }
        Ok(())
    }

    /// If `apply` fails while no rules are in force, as after a boot, installs the rules of the
    /// last successful `apply`. Without rules, the toolstack's connections would leave in the
    /// clear.
    fn restore(&self, error: Error) -> Error {
        let restored = || -> Result<bool> {
            if nft::list(TABLE)?.is_some() {
                return Ok(false);
            }
            let Some(text) = files::read(&saved(&self.state)?)? else {
                return Ok(false);
            };
            self.load(&text, Wanted::Invalid(chained(&error)))?;
            Ok(true)
        };
        match restored() {
            Ok(true) => error.context(
                "the configuration cannot be applied, so the rules of the last successful `apply` \
                 are in force",
            ),
            Ok(false) | Err(_) => error,
        }
    }
}

/// Returns a text for each user that does not exist on this host, because nft rejects rules with
/// such a user.
pub(crate) fn unknown_users(redirects: &[Redirect], owner: Option<&str>) -> Result<Vec<String>> {
    let mut unknown = Vec::new();
    let users = redirects.iter().flat_map(|one| &one.users);
    for user in users.map(String::as_str).chain(owner) {
        let is_number = user.parse::<u32>().is_ok();
        let found = || user_id(user).with_context(|| format!("cannot look up user {user}"));
        if !is_number && found()?.is_none() {
            unknown.push(format!(
                "user {user} does not exist on this host (at fault: configuration): install the \
                 toolstack first, or remove the user from users or redirect_user"
            ));
        }
    }
    Ok(unknown)
}

/// A warning if the permission for connections in the clear has ended.
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
        "the rules cannot protect {} already under way in the clear, possibly of migrations (at \
         fault: this side): {}; wait until they end, or use --force, which lets them continue in \
         the clear",
        count(found.len() as u64, "connection"),
        list.join(", ")
    )
}

impl Remove {
    pub(super) fn run(&self) -> Result<i32> {
        let ports = Table::live()?.map(|table| table.redirect_ports());
        if let Some(ports) = &ports
            && self.force
        {
            end_redirected(ports)?;
        } else if let Some(ports) = &ports {
            let under_way = redirected(&established()?, Some(ports)).len();
            if under_way > 0 {
                bail!(
                    "removing the rules would cut {} to the tunnel (at fault: this side): wait \
                     until they end, or use --force",
                    count(under_way as u64, "connection")
                );
            }
        }
        let had = nft::delete()?;
        files::delete(&saved(&self.state)?)?;
        self.run.clear()?;
        match had {
            _ if self.json => print_json(&json!({ "removed": had })),
            true => println!("rules removed"),
            false => println!("no rules in force"),
        }
        Ok(DONE)
    }
}

/// Ends the redirected connections. Without the rules, the kernel would no longer translate their
/// addresses, and what the toolstack still sends would leave in the clear.
fn end_redirected(ports: &BTreeSet<u16>) -> Result<()> {
    let all = connections()?;
    let clients = redirected(&all, Some(ports));
    for one in all.iter().filter(|one| clients.contains(&one.local)) {
        match destroy(one) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => bail!(
                "cannot end the redirected connection from {} to {}, which would continue in the clear \
                 (at fault: this side): {error}; end the migration first",
                one.local,
                one.peer
            ),
            _ => {}
        }
    }
    Ok(())
}
