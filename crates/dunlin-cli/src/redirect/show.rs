//! `dunlin redirect show` and `watch`.

use std::thread;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use tracing::{info, warn};

use super::files::RunPath;
use super::peers::{Unresolved, addressed};
use super::rules::rules;
use super::source::Source;
use super::state::{State, Wanted};
use super::table::Table;
use crate::code::{DONE, FAILED};
use crate::log::{Format, LogFlags, say};
use crate::options::parse_limit;
use crate::text::{chained, clean, plain};

#[derive(Debug, Args)]
pub(crate) struct Show {
    #[command(flatten)]
    source: Source,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunPath,
}

#[derive(Debug, Args)]
pub(crate) struct Watch {
    #[command(flatten)]
    source: Source,
    /// Time between two comparisons. The tunnel ignores results older than 30 s.
    #[arg(long, value_name = "DURATION", value_parser = parse_limit, default_value = "10s", hide = true)]
    interval: Duration,
    #[command(flatten)]
    run: RunPath,
    #[command(flatten)]
    log: LogFlags,
}

impl Show {
    pub(super) fn run(&self) -> Result<i32> {
        let wanted = wanted(&self.source);
        let state = state(&self.run, &wanted)?;
        if self.json {
            println!("{}", plain(serde_json::to_string(&state)?));
        } else {
            self.print(&state);
        }
        if let Wanted::Unresolved(text) = &wanted {
            say(text);
        }
        Ok(if state.is_applied() { DONE } else { FAILED })
    }

    fn print(&self, state: &State) {
        println!("{}", clean(&state.text()));
        for (name, counters) in &state.counters {
            println!(
                "redirect {}: {} redirected; rejected: {} of other local users, {} routed, {} from \
                 the wire",
                clean(name),
                counters.redirected,
                counters.rejected_output,
                counters.rejected_forward,
                counters.rejected_input
            );
            for (address, accepted) in &counters.plain {
                println!("  {accepted} in the clear from {}", clean(address));
            }
        }
    }
}

impl Watch {
    pub(super) fn run(&self) -> Result<i32> {
        self.log.start(Some(Format::Text));
        let mut last = String::new();
        loop {
            // Look names up before the comparison, so that the comparison's result is fresh when it
            // is written.
            let wanted = wanted(&self.source);
            let state = state(&self.run, &wanted)?;
            self.run.write_state(&state)?;
            let mut text = state.text();
            if let Wanted::Unresolved(why) = &wanted {
                text = format!("{text}; the configuration was not compared: {why}");
            }
            if text != last {
                match (state.is_applied(), &wanted) {
                    (true, Wanted::Digest(_)) => info!("{text}"),
                    _ => warn!("{text}"),
                }
                last = text;
            }
            thread::sleep(self.interval);
        }
    }
}

/// What the configuration asks for now.
fn wanted(source: &Source) -> Wanted {
    let rules = source.read().and_then(|read| {
        let redirects = addressed(read.redirects, read.port)?;
        Ok(rules(&redirects, &read.user))
    });
    match rules {
        Ok(rules) => Wanted::Digest(rules.digest),
        Err(error) if error.is::<Unresolved>() => Wanted::Unresolved(chained(&error)),
        Err(error) => Wanted::Invalid(chained(&error)),
    }
}

/// The rules in force, compared with the configuration and the last `apply`.
pub(super) fn compared(source: &Source, run: &RunPath) -> Result<State> {
    state(run, &wanted(source))
}

fn state(run: &RunPath, wanted: &Wanted) -> Result<State> {
    let table = Table::live()?;
    Ok(State::of(table.as_ref(), run.record()?.as_ref(), wanted))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    /// The systemd units give no interval, so they use this default.
    ///
    /// Claim H14 of docs/security.
    #[test]
    fn the_rules_are_compared_every_ten_seconds() {
        let flags = Watch::augment_args(clap::Command::new("watch"));
        let flags = flags
            .try_get_matches_from(["watch", "--config", "x"])
            .unwrap();
        let watch = Watch::from_arg_matches(&flags).unwrap();
        assert_eq!(watch.interval, Duration::from_secs(10));
    }
}
