//! Compares the verdicts of two hosts.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use super::report::{SCHEMA, VerdictLine};
use super::verdict::{State, Verdict};
use crate::code::{DONE, FAILED};
use crate::text::plain;
use crate::text::{clean, count};

/// Speeds that differ by at most this factor count as equal, because repeated measurements on one
/// host differ by as much.
const SPEED_FACTOR: f64 = 1.5;
/// Maximum length of a file. The output of `doctor` is far shorter.
const MOST_BYTES: u64 = 1 << 20;

/// A check with different results on two hosts.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Difference {
    check: String,
    /// The result in the first file; `None` if the file lacks the check.
    a: Option<Found>,
    b: Option<Found>,
    means: &'static str,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Found {
    state: State,
    value: String,
}

type Verdicts = BTreeMap<(String, Option<String>), Verdict>;

/// Prints the differences between two files. Like diff(1), it returns exit code 1 if there are any.
pub(super) fn run(one: &Path, other: &Path, json: bool) -> Result<i32> {
    let ((a, first), (b, second)) = (read(one)?, read(other)?);
    let found = differences(&first, &second);
    if !json {
        println!("a: {}, {}", clean(&a), one.display());
        println!("b: {}, {}", clean(&b), other.display());
    }
    for one in &found {
        if json {
            println!("{}", plain(serde_json::to_string(one)?));
            continue;
        }
        println!("\n{}", clean(&one.check));
        for (name, side) in [("a", &one.a), ("b", &one.b)] {
            let text = side.as_ref().map_or_else(
                || "not examined".to_owned(),
                |found| format!("{:<8}{}", found.state.name(), clean(&found.value)),
            );
            println!("  {name}  {text}");
        }
        println!("  {}", one.means);
    }
    if !json {
        println!("\n{}", count(found.len() as u64, "difference"));
    }
    Ok(if found.is_empty() { DONE } else { FAILED })
}

/// The host's name and verdicts in a file.
fn read(path: &Path) -> Result<(String, Verdicts)> {
    let what = || format!("cannot read {}", path.display());
    let length = fs::metadata(path).with_context(what)?.len();
    ensure!(
        length <= MOST_BYTES,
        "{} is longer than {MOST_BYTES} bytes: give the output of `dunlin doctor --json`",
        path.display()
    );
    let text = fs::read_to_string(path).with_context(what)?;
    let (mut host, mut verdicts) = (String::new(), Verdicts::new());
    for (number, line) in text.lines().enumerate() {
        let at = || format!("{}:{}", path.display(), number + 1);
        let line: VerdictLine = serde_json::from_str(line)
            .with_context(|| format!("{} is not a line of `dunlin doctor --json`", at()))?;
        ensure!(
            line.schema == SCHEMA,
            "{} has schema {}, and this dunlin reads {SCHEMA}: use the same version on both hosts",
            at(),
            line.schema
        );
        host = line.host;
        let key = (line.verdict.check.clone(), line.verdict.peer.clone());
        verdicts.insert(key, line.verdict);
    }
    ensure!(
        !verdicts.is_empty(),
        "{} has no verdicts: give the output of `dunlin doctor --json`",
        path.display()
    );
    Ok((host, verdicts))
}

fn differences(a: &Verdicts, b: &Verdicts) -> Vec<Difference> {
    // Checks of peers are not compared: each host has its own peers.
    let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
    let mut keys: Vec<_> = keys.filter(|(_, peer)| peer.is_none()).collect();
    keys.sort_unstable();
    let found = |all: &Verdicts, key: &(String, Option<String>)| {
        all.get(key).map(|one| Found {
            state: one.state,
            value: one.value.clone(),
        })
    };
    let of = |key: &(String, Option<String>)| {
        let (a, b) = (found(a, key), found(b, key));
        let means = means(&key.0)?;
        let is_equal = match (&a, &b) {
            (Some(a), Some(b)) => a.state == b.state && same(&key.0, &a.value, &b.value),
            _ => false,
        };
        (!is_equal).then(|| Difference {
            check: key.0.clone(),
            a,
            b,
            means,
        })
    };
    keys.into_iter().filter_map(of).collect()
}

/// Whether two values of a check count as equal.
fn same(check: &str, a: &str, b: &str) -> bool {
    let number = |text: &str| text.split(' ').next()?.parse::<f64>().ok();
    match (check.starts_with("cipher."), number(a), number(b)) {
        (true, Some(a), Some(b)) => a.max(b) <= a.min(b) * SPEED_FACTOR,
        _ => a == b,
    }
}

/// What a difference in a check means for a migration between the hosts. `None` for the
/// certificates, which differ between any two hosts.
fn means(check: &str) -> Option<&'static str> {
    Some(match check {
        "identity.certificate" => return None,
        "host.kernel" => "the checks that differ below show what the kernels do not have in common",
        "auto.library" | "auto.records" | "auto.relay" => {
            "each host chooses for itself: lanes between them work, and cost one host more"
        }
        "tls.aes-256-gcm" | "tls.aes-128-gcm" | "tls.chacha20-poly1305" | "tls.module" => {
            "lanes work with kernel TLS on one host only; the hand-off works on that host only"
        }
        "tls.rekey" | "tls.driver" => {
            "with auto, one host probably seals records in the process, and the other in the kernel"
        }
        "cipher.aws-lc-rs" | "cipher.ring" | "cipher.kernel" => {
            "the slower host limits the rate of a lane; more lanes help if it has free cores"
        }
        "ipsec.esp" => "lanes over IPsec between these hosts are refused",
        "ipsec.per-cpu" => "sessions between these hosts need --mode connection",
        "ipsec.segmentation" => "IPsec costs more processor time on the host without it",
        "nic.tls" | "nic.esp" => "the cards' offloads differ, and with them the processor time",
        "net.buffers" => "the smaller buffers limit a lane between these hosts",
        "net.mtu" => {
            "different MTUs on one network lose large packets: connections open and then hang"
        }
        "kvm.usable" => "VMs that use KVM cannot migrate to the host without it",
        "kvm.dirty-ring" => {
            "a VM started with dirty-ring-size does not start on the host without it"
        }
        "userfaultfd.write-protect" => {
            "guests that rely on it as a dirty log migrate away from one host only"
        }
        "userfaultfd.post-copy" => "post-copy works towards one host only",
        "memory.transparent" | "memory.shmem" => {
            "a VM may be faster, and its migration cheaper, on one host"
        }
        "memory.reserved" => "a VM with reserved huge pages can fail to start on one host",
        "tunnel.config" => "the tunnel probably runs on one host only",
        "redirect.nft" | "redirect.rules" => {
            "migrations in one direction leave in the clear or are refused"
        }
        "libvirt.migration" => "both hosts need the same ports for migrations",
        "libvirt.ports" => "migrations to one host may find a port in use",
        _ => {
            "this version of dunlin does not describe the check: use the same version on both hosts"
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(list: &[(&str, &str)]) -> Verdicts {
        let of = |(check, value): &(&str, &str)| {
            let verdict = Verdict::ok(check, *value, "");
            ((verdict.check.clone(), None), verdict)
        };
        list.iter().map(of).collect()
    }

    #[test]
    fn speeds_are_equal_unless_they_differ_clearly() {
        assert!(same("cipher.ring", "2.00 GiB/s", "2.90 GiB/s"));
        assert!(!same("cipher.ring", "2.00 GiB/s", "3.10 GiB/s"));
        assert!(!same("net.mtu", "1500", "1499"));
        assert!(!same("cipher.ring", "2.00 GiB/s", ""));
    }

    #[test]
    fn checks_that_differ_or_are_missing_are_listed() {
        let a = verdicts(&[
            ("net.mtu", "a 1"),
            ("kvm.usable", "yes"),
            ("ipsec.esp", "yes"),
        ]);
        let b = verdicts(&[("net.mtu", "a 2"), ("kvm.usable", "yes"), ("new.one", "")]);
        let found = differences(&a, &b);
        let checks: Vec<_> = found.iter().map(|one| &*one.check).collect();
        assert_eq!(checks, ["ipsec.esp", "net.mtu", "new.one"]);
        let sides: Vec<_> = found
            .iter()
            .map(|one| (one.a.is_some(), one.b.is_some()))
            .collect();
        assert_eq!(sides, [(true, false), (true, true), (false, true)]);
        let mut peer = Verdict::ok("peer.clock", "1 ms", "");
        peer.peer = Some("b.example".to_owned());
        let own = Verdicts::from([((peer.check.clone(), peer.peer.clone()), peer)]);
        assert_eq!(differences(&own, &Verdicts::new()), []);
        let certificates = ["a", "b"].map(|one| verdicts(&[("identity.certificate", one)]));
        assert_eq!(differences(&certificates[0], &certificates[1]), []);
    }
}
