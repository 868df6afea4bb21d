//! The tunnel's configuration, and this host's certificates.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Error, Result};
use dunlin_lane::identity::{Dated, IdentityError, IdentityErrorKind, Role};

use super::verdict::{AS_ROOT, Verdict};
use crate::identity::{Reading, load_identity};
use crate::libvirt::IDENTITIES;
use crate::text::{chained, count};
use crate::tunnel::Config;

/// The configuration of the unit dunlin-tunnel.service.
const USUAL: &str = "/etc/dunlin/tunnel.toml";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Certificates that expire within this time cause a warning, as in other commands.
const SOON: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The configuration with its path, and the verdict on it. Without `given`, the path is [`USUAL`],
/// if that file exists.
pub(super) fn config(given: Option<&Path>) -> (Option<(PathBuf, Config)>, Verdict) {
    let check = "tunnel.config";
    let path = given.unwrap_or(Path::new(USUAL));
    if given.is_none() && !path.exists() {
        let verdict = Verdict::ok(check, "none", format!("there is no {USUAL}"));
        return (None, verdict);
    }
    let read = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the configuration {}", path.display()))
        .and_then(|text| Config::parse(path, &text));
    match read {
        Ok(config) => {
            let means = format!("{} has no mistake", path.display());
            let verdict = Verdict::ok(check, "valid", means);
            (Some((path.to_owned(), config)), verdict)
        }
        Err(error) if is_denied(&error) => {
            (None, Verdict::unknown(check, chained(&error), AS_ROOT))
        }
        Err(error) => {
            let verdict = Verdict::fail(
                check,
                "invalid",
                chained(&error),
                "correct the file; dunlin tunnel check --config FILE checks it",
            );
            (None, verdict)
        }
    }
}

/// The certificates in `given`, or in the first usual directory that has some.
pub(super) fn certificates(given: Option<&Path>, reading: &Reading) -> Verdict {
    let directories = match given {
        Some(path) => vec![path.to_owned()],
        None => IDENTITIES.map(PathBuf::from).to_vec(),
    };
    let mut denied = None;
    for directory in &directories {
        match loaded(directory, reading) {
            Ok((names, dates)) => return judge(&names, &dates, SystemTime::now()),
            Err(error) if is_denied(&error) => denied = Some(error),
            Err(error) if given.is_none() && is_missing(&error) => {}
            Err(error) => {
                let fix = "correct or replace the files; dunlin pki show DIR checks them";
                return Verdict::fail(CHECK, "unusable", chained(&error), fix);
            }
        }
    }
    if let Some(error) = denied {
        return Verdict::unknown(CHECK, chained(&error), AS_ROOT);
    }
    let means = format!("no certificates in {}", IDENTITIES.join(", "));
    Verdict::warn(
        CHECK,
        "none",
        means,
        "give --identity DIR, or create certificates (dunlin pki)",
    )
}

const CHECK: &str = "identity.certificate";

/// The names in this host's certificate, and the validity periods of the certificates and
/// revocation lists in its identity.
fn loaded(directory: &Path, reading: &Reading) -> Result<(String, Vec<Dated>)> {
    let load = |role| load_identity(directory, role, reading);
    let (identity, _) = load(Role::Source).or_else(|_| load(Role::Destination))?;
    let names = identity.summary()?.names;
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    Ok((names.join(" "), identity.dates().to_vec()))
}

fn judge(names: &str, dates: &[Dated], now: SystemTime) -> Verdict {
    let left = |one: &Dated| one.not_after.duration_since(now).unwrap_or_default();
    let Some(first) = dates.iter().min_by_key(|one| left(one)) else {
        return Verdict::unknown(CHECK, "the certificate has no dates", "replace it");
    };
    let days = left(first).as_secs() / DAY.as_secs();
    let value = format!("{names}, {}", count(days, "day"));
    let means = format!("the {} is valid until {}", first.item, first.until);
    let fix = "renew it on this host, and let the services reload it";
    if let Some(early) = dates.iter().find(|one| one.not_before > now) {
        return Verdict::fail(
            CHECK,
            format!("{names}, not yet valid"),
            format!(
                "the {} is not valid yet: peers refuse this host",
                early.item
            ),
            "correct this host's clock, or wait",
        );
    }
    if first.not_after <= now {
        let means = format!("the {} expired: peers refuse this host", first.item);
        return Verdict::fail(CHECK, format!("{names}, expired"), means, fix);
    }
    match left(first) < SOON {
        true => Verdict::warn(CHECK, value, means, fix),
        false => Verdict::ok(CHECK, value, means),
    }
}

fn is_denied(error: &Error) -> bool {
    let is = |source: &std::io::Error| source.kind() == ErrorKind::PermissionDenied;
    error.chain().any(|cause| match cause.downcast_ref() {
        Some(identity) => kind_of(identity).is_some_and(is),
        None => cause.downcast_ref().is_some_and(is),
    })
}

fn is_missing(error: &Error) -> bool {
    let identity = error.downcast_ref::<IdentityError>();
    identity.is_some_and(|error| match error.kind() {
        IdentityErrorKind::NoLayout { .. } => true,
        _ => kind_of(error).is_some_and(|source| source.kind() == ErrorKind::NotFound),
    })
}

/// The operating system's error, if a file could not be read.
fn kind_of(error: &IdentityError) -> Option<&std::io::Error> {
    match error.kind() {
        IdentityErrorKind::Unreadable { source, .. } => Some(source),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;
    use dunlin_lane::identity::Item;

    #[test]
    fn what_expires_first_decides() {
        let now = SystemTime::now();
        let dated = |item, begins: i64, days: u64| Dated {
            item,
            path: PathBuf::new(),
            position: 0,
            not_before: match u64::try_from(begins) {
                Ok(days) => now + DAY * u32::try_from(days).unwrap_or(0),
                Err(_) => now - DAY,
            },
            not_after: now - DAY + DAY * u32::try_from(days + 1).unwrap_or(0) + DAY / 2,
            until: String::new(),
        };
        let of = |own: u64, authority: u64| {
            let dates = [
                dated(Item::Certificate, -1, own),
                dated(Item::Authority, -1, authority),
            ];
            let found = judge("a.example", &dates, now);
            (found.state, found.value)
        };
        assert_eq!(of(100, 400), (State::Ok, "a.example, 100 days".to_owned()));
        assert_eq!(of(400, 29), (State::Warn, "a.example, 29 days".to_owned()));
        let early = judge("a.example", &[dated(Item::Certificate, 2, 90)], now);
        assert_eq!(early.state, State::Fail, "{early:?}");
        let expired = Dated {
            not_after: now,
            ..dated(Item::Certificate, -1, 0)
        };
        let expired = judge("a.example", &[expired], now);
        assert_eq!(expired.state, State::Fail, "{expired:?}");
    }
}
