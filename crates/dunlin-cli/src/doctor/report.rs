//! Prints verdicts.

use serde::{Deserialize, Serialize};

use super::verdict::{State, Verdict, setting};
use crate::text::{clean, clean_lines, count, plain};

/// The version of the JSON lines: raised when a field changes its meaning.
pub(super) const SCHEMA: u32 = 1;
/// The maximum width of the column of values. A longer value shifts the rest of its line.
const WIDEST: usize = 24;

/// A verdict as a JSON line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct VerdictLine {
    pub(super) schema: u32,
    pub(super) host: String,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

pub(super) fn json(verdicts: &[Verdict]) {
    let host = setting("/proc/sys/kernel/hostname").unwrap_or_default();
    for verdict in verdicts {
        let line = VerdictLine {
            schema: SCHEMA,
            host: host.clone(),
            verdict: verdict.clone(),
        };
        // The default is never used: strings and numbers always have a JSON form.
        println!(
            "{}",
            plain(serde_json::to_string(&line).unwrap_or_default())
        );
    }
}

pub(super) fn table(verdicts: &[Verdict]) {
    let mut before = String::new();
    let width = |text: fn(&Verdict) -> &str| {
        let lengths = verdicts.iter().map(|one| text(one).chars().count());
        lengths.max().unwrap_or(0)
    };
    let check = width(|one| &one.check);
    let value = width(|one| &one.value).min(WIDEST);
    for one in verdicts {
        let mut group = title(&one.check).to_owned();
        if let Some(peer) = &one.peer {
            group = format!("{group} {}", clean(peer));
        }
        if group != before {
            println!("{}{group}", if before.is_empty() { "" } else { "\n" });
            before = group;
        }
        println!(
            "  {:<8}{:<check$}  {:<value$}  {}",
            one.state.name(),
            one.check,
            clean(&one.value),
            clean_lines(&one.means)
        );
        if !one.fix.is_empty() {
            println!("          fix: {}", clean(&one.fix));
        }
    }
    let of = |state| verdicts.iter().filter(|one| one.state == state).count() as u64;
    println!(
        "\n{}, {}, {} unknown",
        count(of(State::Fail), "failure"),
        count(of(State::Warn), "warning"),
        of(State::Unknown)
    );
}

/// The heading of a check's group.
fn title(check: &str) -> &'static str {
    match check.split('.').next().unwrap_or_default() {
        "host" => "Host",
        "auto" => "What auto chooses",
        "tls" => "Kernel TLS",
        "cipher" => "AES-GCM",
        "ipsec" => "IPsec",
        "nic" | "net" => "Network",
        "kvm" | "userfaultfd" => "VMs",
        "memory" => "Huge pages",
        "tunnel" | "identity" => "Tunnel",
        "redirect" | "libvirt" => "Toolstack",
        _ => "Peer",
    }
}
