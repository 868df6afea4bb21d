//! `dunlin explain`: cause and remedy of an error code. The text is also a page of docs/.

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};

use crate::code::DONE;
use crate::line::print_json;

/// All entries. Each one begins with `## CODE`.
const TEXT: &str = include_str!("explain.md");

#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// A fault code, such as lane-lost, or an exit code [default: list all codes].
    code: Option<String>,
    /// Print one JSON object for each code, with its cause and its remedy.
    #[arg(long)]
    json: bool,
}

impl Explain {
    pub(crate) fn run(&self) -> Result<i32> {
        let wanted = self.code.as_deref();
        let mut found = entries().filter(|(code, _)| wanted.is_none_or(|wanted| *code == wanted));
        let Some(first) = found.next() else {
            let wanted = wanted.unwrap_or_default();
            bail!("unknown error code {wanted:?}: `dunlin explain` lists all codes");
        };
        for (code, text) in std::iter::once(first).chain(found) {
            match wanted {
                _ if self.json => print_json(&object(code, text)),
                Some(_) => println!("{text}"),
                None => println!("{code}"),
            }
        }
        Ok(DONE)
    }
}

/// An entry, without the line breaks of its source.
fn object(code: &str, text: &str) -> Value {
    let (cause, remedy) = text.split_once("\n\n").unwrap_or((text, ""));
    let part = |text: &str, name| text.trim_start_matches(name).replace('\n', " ");
    json!({ "code": code, "cause": part(cause, "Cause: "), "remedy": part(remedy, "Remedy: ") })
}

/// Codes, each with its cause and remedy.
fn entries() -> impl Iterator<Item = (&'static str, &'static str)> {
    let entries = TEXT.split("\n## ").skip(1);
    let entries = entries.filter_map(|entry| entry.split_once('\n'));
    entries.map(|(code, text)| (code, text.trim()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use dunlin_proto::fault::FaultCode;

    use super::*;
    use crate::code::{CANCELLED, FAILED, IN_DOUBT, SIGNAL, USAGE};

    #[test]
    fn each_code_has_an_entry_and_each_entry_a_code() {
        let faults = FaultCode::ALL.iter().map(|code| code.name().to_owned());
        let exits = [DONE, FAILED, USAGE, IN_DOUBT, CANCELLED, SIGNAL].map(|code| code.to_string());
        let mut codes: BTreeSet<_> = faults.chain(exits).collect();
        // In JSON output, `usage` is the code of a failure without a fault code.
        codes.insert("usage".to_owned());
        for (code, text) in entries() {
            assert!(codes.remove(code), "{code}");
            let (cause, remedy) = text.split_once("\n\n").unwrap_or_default();
            assert!(cause.starts_with("Cause: "), "{code}: {text}");
            assert!(remedy.starts_with("Remedy: "), "{code}: {text}");
            assert!(!remedy.contains("\n\n"), "{code}: {text}");
        }
        assert_eq!(codes, BTreeSet::new());
    }
}
