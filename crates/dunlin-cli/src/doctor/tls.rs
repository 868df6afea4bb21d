//! Kernel TLS, the ciphers' speeds, and what `auto` chooses.

use std::path::Path;

use anyhow::Result;
use dunlin::lane::kernel::{
    Abilities, Choice, Driver, Refused, abilities, choose_for_relay, speed,
};
use dunlin::lane::offload::Offload;
use dunlin::lane::provider::CipherSuite;
use dunlin_lane::fastest::{self, Speed};
use dunlin_linux::ktls::{Direction, Version};

use super::verdict::{Verdict, gib_per_s};
use crate::identity::{chosen, crypto};

/// The suite of a connection between two hosts that allow all suites.
const SUITE: CipherSuite = CipherSuite::Aes256Gcm;
/// A core that seals and opens fewer bytes per second than this can fill a link of at most
/// 2 Gbit/s. The cause is emulation, a processor without AES instructions, or a virtual machine
/// with a CPU model that lacks these instructions.
const LEAST_SPEED: f64 = 256.0 * 1024.0 * 1024.0;
const NO_TLS: &str = "modprobe tls, or use a kernel with CONFIG_TLS";

type Probed = Result<Abilities, Refused>;

/// What `auto` chooses: the crypto library, and the kernel or the process for records.
pub(super) fn auto() -> Vec<Verdict> {
    let library = fastest::auto();
    let records = chosen(&crypto(Offload::Auto));
    let relay = choose_for_relay(Offload::Auto, SUITE, Version::V1_3);
    vec![
        Verdict::ok(
            "auto.library",
            library.provider.to_string(),
            library.to_string(),
        ),
        choice("auto.records", records),
        choice("auto.relay", relay.map_err(Into::into)),
    ]
}

/// The verdict on a choice of `auto`. At present `choice` is never an error, because `auto` falls
/// back to the process if the kernel lacks something.
fn choice(check: &str, choice: Result<Choice>) -> Verdict {
    match choice {
        Ok(choice) => {
            let value = if choice.is_kernel {
                "kernel"
            } else {
                "process"
            };
            Verdict::ok(check, value, choice.reason)
        }
        Err(error) => Verdict::fail(
            check,
            "none",
            error.to_string(),
            "use tls_offload = \"process\"",
        ),
    }
}

/// What the kernel's TLS can do.
pub(super) fn kernel() -> Vec<Verdict> {
    let probed = abilities(SUITE);
    let is_loaded = Path::new("/sys/module/tls").exists();
    let mut all = vec![module(&probed, is_loaded)];
    all.extend(CipherSuite::ALL.map(|suite| cipher(suite, &abilities(suite))));
    all.push(rekey(&probed));
    all.push(driver(Driver::of(SUITE)));
    all
}

/// The speed of each library and of the kernel.
pub(super) fn ciphers() -> Vec<Verdict> {
    let library = fastest::auto();
    let mut all: Vec<_> = library.speeds.iter().map(library_speed).collect();
    all.sort_by(|one, other| one.check.cmp(&other.check));
    let best = library
        .speeds
        .first()
        .map_or(0.0, |best| best.bytes_per_second);
    all.push(kernel_speed(speed(SUITE), best));
    all
}

fn module(probed: &Probed, is_loaded: bool) -> Verdict {
    let check = "tls.module";
    match probed {
        Err(Refused::Absent) => Verdict::warn(
            check,
            "absent",
            "records are sealed in the process; the hand-off, and routes that require the kernel, \
             do not work",
            NO_TLS,
        ),
        Err(Refused::Failed { reason }) => {
            Verdict::unknown(check, reason, "remove the cause, and try again")
        }
        _ => Verdict::ok(
            check,
            if is_loaded { "loaded" } else { "built in" },
            "the kernel has TLS",
        ),
    }
}

fn cipher(suite: CipherSuite, probed: &Probed) -> Verdict {
    let check = format!("tls.{suite}");
    let refused = match probed {
        Ok(_) => {
            return Verdict::ok(
                &check,
                "both",
                "the kernel seals and opens with this cipher",
            );
        }
        Err(refused) => refused,
    };
    let (value, fix) = match refused {
        Refused::Absent => ("neither", NO_TLS),
        Refused::Cipher { .. } => ("neither", "use a kernel that has this cipher in its TLS"),
        Refused::Direction {
            direction: Direction::Sending,
            ..
        } => ("receiving", "use a kernel that has TLS in both directions"),
        Refused::Direction { .. } => ("sending", "use a kernel that has TLS in both directions"),
        _ => return Verdict::unknown(&check, refused.to_string(), "try again"),
    };
    let means = "the process seals and opens records with this cipher";
    Verdict::warn(&check, value, means, fix)
}

fn rekey(probed: &Probed) -> Verdict {
    let check = "tls.rekey";
    let no = |fix| {
        let means = "relays seal records in the process, because their peers can replace keys";
        Verdict::warn(check, "no", means, fix)
    };
    match probed {
        Ok(found) if found.renews_keys => {
            Verdict::ok(check, "yes", "the kernel can replace a connection's keys")
        }
        Ok(_) => no("use Linux 6.14 or newer"),
        Err(Refused::Absent) => no(NO_TLS),
        Err(refused) => Verdict::unknown(check, refused.to_string(), "see tls.module"),
    }
}

fn driver(driver: Option<Driver>) -> Verdict {
    let check = "tls.driver";
    match driver {
        Some(driver) if driver.is_slow() => Verdict::warn(
            check,
            driver.to_string(),
            "the kernel's AES-GCM does not use the processor's AES instructions, so auto does not \
             choose the kernel",
            "modprobe aesni-intel",
        ),
        Some(driver) => Verdict::ok(check, driver.to_string(), "the kernel's AES-GCM is fast"),
        None => Verdict::unknown(
            check,
            "/proc/crypto lists AES-GCM only after its first use",
            NO_TLS,
        ),
    }
}

fn library_speed(speed: &Speed) -> Verdict {
    let check = format!("cipher.{}", speed.provider);
    let value = gib_per_s(speed.bytes_per_second);
    let means = "AES-256-GCM, sealed and opened on one core";
    if speed.bytes_per_second < LEAST_SPEED {
        let fix = "give a virtual machine the host's CPU model, or use more cores and lanes";
        return Verdict::warn(&check, value, format!("{means}: slow"), fix);
    }
    Verdict::ok(&check, value, means)
}

/// `best` is the speed of the fastest library.
fn kernel_speed(measured: Result<Option<f64>, Refused>, best: f64) -> Verdict {
    let check = "cipher.kernel";
    match measured {
        Ok(Some(speed)) => {
            let means = format!(
                "kernel TLS, sealed and opened on one core: {:.1} times the fastest library",
                speed / best.max(1.0)
            );
            Verdict::ok(check, gib_per_s(speed), means)
        }
        Ok(None) => Verdict::unknown(
            check,
            "the cost of kernel TLS was too small to be measured",
            "try again on an idle host",
        ),
        Err(Refused::Absent) => Verdict::unknown(check, "the kernel has no TLS", NO_TLS),
        Err(refused) => Verdict::unknown(check, refused.to_string(), "see tls.module"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    fn able(renews_keys: bool) -> Probed {
        Ok(Abilities {
            driver: None,
            renews_keys,
        })
    }

    fn rejected(direction: Direction) -> Probed {
        let reason = String::new();
        Err(Refused::Direction { direction, reason })
    }

    #[test]
    fn each_refusal_of_the_kernel_has_its_value() {
        let of = |probed: &Probed| {
            let found = cipher(SUITE, probed);
            (found.state, found.value)
        };
        assert_eq!(of(&able(true)), (State::Ok, "both".to_owned()));
        for (probed, value) in [
            (Err(Refused::Absent), "neither"),
            (rejected(Direction::Sending), "receiving"),
            (rejected(Direction::Receiving), "sending"),
        ] {
            assert_eq!(of(&probed), (State::Warn, value.to_owned()));
        }
        assert_eq!(of(&Err(Refused::Gone)).0, State::Unknown);
        assert_eq!(module(&Err(Refused::Absent), false).state, State::Warn);
        assert_eq!(
            module(&rejected(Direction::Sending), false).value,
            "built in"
        );
        let failed = Refused::Failed {
            reason: String::new(),
        };
        assert_eq!(module(&Err(failed), true).state, State::Unknown);
        let keys = [able(true), able(false), Err(Refused::Absent)];
        assert_eq!(keys.map(|one| rekey(&one).value), ["yes", "no", "no"]);
        assert_eq!(rekey(&Err(Refused::Gone)).state, State::Unknown);
    }

    #[test]
    fn a_slow_cipher_is_a_warning() {
        let with = |priority| Driver {
            name: "gcm".to_owned(),
            priority,
            is_async: false,
        };
        let states = [None, Some(with(100)), Some(with(500))].map(|one| driver(one).state);
        assert_eq!(states, [State::Unknown, State::Warn, State::Ok]);
        let provider = fastest::auto().provider;
        let states = [LEAST_SPEED / 2.0, LEAST_SPEED * 2.0].map(|bytes_per_second| {
            library_speed(&Speed {
                provider,
                bytes_per_second,
            })
            .state
        });
        assert_eq!(states, [State::Warn, State::Ok]);
        let found = kernel_speed(Ok(Some(3e9)), 2e9);
        assert!(found.means.contains("1.5 times"), "{found:?}");
        assert_eq!(kernel_speed(Ok(None), 2e9).state, State::Unknown);
    }
}
