//! `dunlin resolve`: an operator decides where a VM runs when the destination did not answer.
//!
//! A session is in doubt if its source has begun to send *commit* and has no answer as to whether
//! the destination runs the VM. A destination is never in doubt. With an identity, the command
//! queries the destination once more. An answer settles the session, except the answer that the VM
//! ran there and died. If no answer settles the session, the operator decides. If the process that
//! has the paused copy is alive, it records the decision and carries it out. If that process has
//! died, the copy is lost too, and only the record remains to be settled.

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::engine::journal::{Entry, Record, SourceRecord, State};
use dunlin::engine::source::{self, VmLocation};
use dunlin::engine::{Host, StandardHost};

use super::status::ago;
use crate::code::{DONE, FAILED, USAGE};
use crate::identity::{Common, Reading, client_tls};
use crate::line::Line;
use crate::options::parse_limit;
use crate::progress::Waiting;
use crate::state::{StatePath, hex, parse_session};
use crate::text::clean;
use crate::vm::request::{ANSWER_LIMIT, Decision, Request, inquiry_options};

#[derive(Debug, Args)]
pub(crate) struct Resolve {
    /// The session's identifier, as `dunlin status` shows it, or a unique prefix of the identifier.
    #[arg(value_parser = parse_session)]
    session: String,
    /// Run the VM here. You vouch that it does not run at the destination and never will; what it
    /// did there is lost.
    #[arg(long, conflicts_with = "destroy")]
    run_here: bool,
    /// Destroy the copy here. You vouch that the VM runs at the destination or is no longer needed.
    #[arg(long)]
    destroy: bool,
    /// Query the destination once more before deciding, with the identity in this directory.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// A name that the destination's certificate must contain; repeatable [default: the host to
    /// which the VM was moved].
    #[arg(long = "peer", value_name = "NAME", requires = "identity")]
    peers: Vec<String>,
    #[command(flatten)]
    reading: Reading,
    /// How long to query a destination that does not answer.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_limit, requires = "identity")]
    doubt_limit: Duration,
    #[command(flatten)]
    state: StatePath,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Resolve {
    pub(crate) fn run(&self) -> Result<i32> {
        let (entry, record) = self.state.find(&self.session)?;
        let mut doubt = doubt(&entry, &record)?;
        if let Some(identity) = &self.identity
            && record.state == State::Source(SourceRecord::Committing)
        {
            let waiting = Waiting::new(self.json, &format!("querying {}", record.peer));
            let answered = self.ask_destination(&entry, &record, identity)?;
            drop(waiting);
            match self.take(&answered, &entry, &record)? {
                Some(question) => doubt = question,
                None => return Ok(DONE),
            }
        }
        let decision = match (self.run_here, self.destroy) {
            (true, _) => Decision::RunHere,
            (_, true) => Decision::Destroy,
            _ if !std::io::stdin().is_terminal() => {
                eprintln!("{doubt}\nGive --run-here or --destroy.");
                return Ok(USAGE);
            }
            _ => {
                let Some(decision) = ask(&doubt, entry.lives)? else {
                    println!("nothing has been decided");
                    return Ok(FAILED);
                };
                decision
            }
        };
        if entry.lives {
            self.send_to_owner(&entry, &record, decision)
        } else {
            self.settle(&entry, decision)
        }
    }

    /// Queries the destination and acts on its answer; returns the answer.
    fn ask_destination(&self, entry: &Entry, record: &Record, identity: &Path) -> Result<Line> {
        let identity = std::path::absolute(identity)?;
        let common = Common::new(&identity, self.peers.clone(), &self.reading);
        if entry.lives {
            if record.owner.is_empty() {
                bail!(
                    "cannot reach the VM's process, because it has no control socket; wait: the \
                     process queries the destination by itself"
                );
            }
            let request = Request::AskDestination {
                session: entry.session,
                common,
                doubt_limit: self.doubt_limit,
            };
            let limit = self.doubt_limit + ANSWER_LIMIT;
            let mut client = request.ask_within(Path::new(&record.owner), Some(limit))?;
            return client.next()?.context(
                "the VM's process closed the connection without an answer: it may have ended",
            );
        }
        let (tls, _) = client_tls(&common, &record.peer)?;
        let mut doubt = source::Doubt::taken_over(&self.state.open()?, entry.session, false)?;
        let host: Arc<dyn Host> = Arc::new(StandardHost);
        // The paused copy died with its process, so there is no VM that the answer could resume.
        let location = doubt.ask(None, &tls, &inquiry_options(self.doubt_limit), &host)?;
        if matches!(location, VmLocation::AtSource | VmLocation::AtDestination) {
            doubt.forget()?;
        }
        Ok((&location).into())
    }

    /// Shows the destination's answer if it settles the session. Otherwise returns the question
    /// that the operator still has to decide.
    fn take(&self, answered: &Line, entry: &Entry, record: &Record) -> Result<Option<String>> {
        let (vm, why) = match answered {
            Line::Answered { vm, text } => (&**vm, text),
            Line::Failed(failed) => bail!("{}", clean(&failed.text)),
            _ => bail!("unexpected answer from the VM's process: it probably runs another release"),
        };
        let name = clean(&record.vm_name);
        let settled = match (vm, entry.lives) {
            ("at-destination", _) => format!("settled: VM {name} runs at the destination"),
            ("at-source", true) => {
                format!("settled: VM {name} never ran at the destination, and stays here")
            }
            ("at-source", false) => format!(
                "settled: VM {name} never ran at the destination, and died here with its process"
            ),
            ("ran-then-died", _) => {
                let (entry, record) = self.state.find(&self.session)?;
                return doubt(&entry, &record).map(Some);
            }
            _ => {
                let asked = format!("The destination was asked again: {}.", clean(why));
                return Ok(Some(format!("{asked} {}", doubt(entry, record)?)));
            }
        };
        if self.json {
            answered.print();
        } else {
            println!("{settled}");
        }
        Ok(None)
    }

    fn send_to_owner(&self, entry: &Entry, record: &Record, decision: Decision) -> Result<i32> {
        if record.owner.is_empty() {
            bail!(
                "the VM's process has no control socket: answer its question in the terminal where \
                 it runs"
            );
        }
        let request = Request::Resolve {
            session: entry.session,
            decision,
        };
        let code = request.ask(Path::new(&record.owner))?.done(self.json)?;
        if !self.json {
            println!(
                "{}",
                match decision {
                    Decision::RunHere => "the VM stays here",
                    Decision::Destroy => "the copy here is destroyed",
                }
            );
        }
        Ok(code)
    }

    /// Settles the record of a session after the process that held the copy has died.
    fn settle(&self, entry: &Entry, decision: Decision) -> Result<i32> {
        if decision == Decision::RunHere {
            bail!(
                "cannot run the VM here: the paused copy died with the process that held it. If \
                 the VM does not run at the destination either, start it anew; --destroy settles \
                 this session"
            );
        }
        let mut doubt = source::Doubt::taken_over(&self.state.open()?, entry.session, false)?;
        doubt.give_up()?;
        // The record is not needed any more, because no peer queries a source that has given up its
        // copy.
        doubt.forget()?;
        if self.json {
            Line::Done.print();
        } else {
            println!("settled: no copy of the VM is left here");
        }
        Ok(DONE)
    }
}

/// Returns the question for the operator, or an error if nothing is in doubt.
fn doubt(entry: &Entry, record: &Record) -> Result<String> {
    let (vm, peer) = (clean(&record.vm_name), clean(&record.peer));
    let since = ago(record.written_ms);
    let what = match record.state {
        State::Source(SourceRecord::Committing) => format!(
            "The source began to send the destination {peer} the command to run VM {vm} ({}) {since} \
             ago, and the destination never answered: the control lane was lost, or the \
             destination's process or host died. Does the VM run there?",
            hex(&record.vm_uuid)
        ),
        State::Source(SourceRecord::RanThenDied) => format!(
            "The destination {peer} ran VM {vm} ({}) and reported {since} ago that it has died \
             there. Run it here, from where it was paused for the migration? What it did since \
             then is lost.",
            hex(&record.vm_uuid)
        ),
        State::Source(SourceRecord::Migrating) if entry.lives => bail!(
            "nothing is in doubt: VM {vm} is still here and is being migrated; `dunlin cancel` stops \
             the migration"
        ),
        State::Source(SourceRecord::Migrating) => {
            bail!("nothing is in doubt: VM {vm} died here with its process, before commit")
        }
        State::Source(SourceRecord::Kept | SourceRecord::RunHere) => {
            bail!("nothing is in doubt: VM {vm} is here")
        }
        State::Source(SourceRecord::Released) => {
            bail!("nothing is in doubt: {peer} confirmed that it has VM {vm}")
        }
        State::Source(SourceRecord::GivenUp) => {
            bail!("nothing is in doubt: this host has given up its copy of VM {vm}")
        }
        State::Destination(_) => bail!(
            "nothing is in doubt here: this host is the destination of VM {vm}, and its record says \
             {}; if the source is in doubt, run `dunlin resolve` there ({peer})",
            record.state
        ),
    };
    let rest = if entry.lives {
        "A paused copy is here."
    } else {
        "The paused copy here died with its process."
    };
    Ok(format!("{what} {rest}"))
}

/// Asks the operator at the terminal.
fn ask(doubt: &str, lives: bool) -> Result<Option<Decision>> {
    println!("{doubt}");
    if lives {
        println!("  run here   the VM does not run at the destination, and never will");
    }
    println!("  destroy    the VM runs at the destination, or is no longer needed");
    print!("Any other answer decides nothing: ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut answer)
        .context("cannot read the answer")?;
    Ok(match answer.trim() {
        "run here" if lives => Some(Decision::RunHere),
        "destroy" => Some(Decision::Destroy),
        _ => None,
    })
}
