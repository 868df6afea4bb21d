//! IPsec: ESP, per-CPU SAs, and segmentation offload. The probes run in a new network namespace, so
//! the host's tables do not change.

use std::io::{self, ErrorKind};

use dunlin_ipsec::xfrm::{Error, EspOffload, Xfrm, esp_offload};
use dunlin_linux::namespace::in_new_network;

use super::verdict::{AS_ROOT, Verdict};

const NO_IPSEC: &str = "dunlin ipsec and lanes over IPsec do not work";

/// The results of the probes in the new network namespace.
struct Probed {
    esp: Result<(), Error>,
    /// Whether the kernel supports per-CPU SAs: it reported the CPU that was requested for an SA.
    per_cpu: Result<bool, Error>,
}

pub(super) fn examine() -> Vec<Verdict> {
    let probed = in_new_network(|| {
        let xfrm = Xfrm::open()?;
        Ok(Probed {
            esp: xfrm.esp(),
            per_cpu: xfrm.probe().map(|held| held.cpu.is_some()),
        })
    });
    let mut all = probes(probed);
    all.push(segmentation(esp_offload()));
    all
}

fn probes(probed: io::Result<Result<Probed, Error>>) -> Vec<Verdict> {
    let checks = ["ipsec.esp", "ipsec.per-cpu"];
    match probed {
        Ok(Ok(probed)) => vec![esp(&probed.esp), per_cpu(&probed)],
        Ok(Err(Error::Absent)) => checks
            .map(|check| {
                Verdict::warn(
                    check,
                    "no",
                    NO_IPSEC,
                    "modprobe xfrm_user, or use another kernel",
                )
            })
            .into(),
        Ok(Err(error)) => checks
            .map(|check| Verdict::unknown(check, error.to_string(), AS_ROOT))
            .into(),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => checks
            .map(|check| Verdict::unknown(check, "the probe needs a network namespace", AS_ROOT))
            .into(),
        Err(error) => checks
            .map(|check| Verdict::unknown(check, error.to_string(), "try again"))
            .into(),
    }
}

fn esp(found: &Result<(), Error>) -> Verdict {
    let check = "ipsec.esp";
    match found {
        Ok(()) => Verdict::ok(check, "yes", "the kernel has ESP with AES-256-GCM"),
        Err(Error::NoEsp(_)) => Verdict::warn(
            check,
            "no",
            NO_IPSEC,
            "modprobe --all esp4 esp6 seqiv gcm, or use another kernel",
        ),
        Err(error) => Verdict::unknown(check, error.to_string(), AS_ROOT),
    }
}

fn per_cpu(probed: &Probed) -> Verdict {
    let check = "ipsec.per-cpu";
    match (&probed.esp, &probed.per_cpu) {
        (Ok(()), Ok(true)) => Verdict::ok(check, "yes", "the kernel supports per-CPU SAs"),
        (Ok(()), Ok(false)) => Verdict::warn(
            check,
            "no",
            "sessions with an SA for each CPU are refused",
            "use --mode connection, or Linux 6.13 or newer",
        ),
        (Err(_), _) => Verdict::warn(check, "no", "ESP does not work", "see ipsec.esp"),
        (_, Err(error)) => Verdict::unknown(check, error.to_string(), AS_ROOT),
    }
}

fn segmentation(found: EspOffload) -> Verdict {
    let check = "ipsec.segmentation";
    let value = match (found.ipv4, found.ipv6) {
        (true, true) => "yes",
        (true, false) => "IPv4 only",
        (false, true) => "IPv6 only",
        (false, false) => "no",
    };
    match found.how_to_load() {
        None => Verdict::ok(check, value, "TCP passes large segments to ESP"),
        Some(command) => Verdict::warn(
            check,
            value,
            "IPsec is slower: TCP passes single packets to ESP",
            format!("{command}, before a session starts"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    /// The states of `ipsec.esp` and `ipsec.per-cpu`.
    fn states(probed: io::Result<Result<Probed, Error>>) -> Vec<State> {
        probes(probed).iter().map(|one| one.state).collect()
    }

    #[test]
    fn each_answer_of_the_kernel_has_its_verdicts() {
        let found = |esp, per_cpu| Ok(Ok(Probed { esp, per_cpu }));
        assert_eq!(states(found(Ok(()), Ok(true))), [State::Ok, State::Ok]);
        assert_eq!(states(found(Ok(()), Ok(false))), [State::Ok, State::Warn]);
        let no_esp = || Err(Error::NoEsp(None));
        assert_eq!(states(found(no_esp(), Ok(true))), [State::Warn; 2]);
        assert_eq!(states(Ok(Err(Error::Absent))), [State::Warn; 2]);
        let refused = Error::NotPermitted { doing: "" };
        assert_eq!(states(Ok(Err(refused))), [State::Unknown; 2]);
        let denied = Err(ErrorKind::PermissionDenied.into());
        let denied = probes(denied);
        assert!(denied.iter().all(|one| one.fix == AS_ROOT), "{denied:?}");
    }

    #[test]
    fn missing_offload_names_its_module() {
        let of = |ipv4, ipv6| segmentation(EspOffload { ipv4, ipv6 });
        assert_eq!(of(true, true).state, State::Ok);
        let partly = of(true, false);
        assert_eq!((partly.state, &*partly.value), (State::Warn, "IPv4 only"));
        assert!(partly.fix.contains("esp6_offload"), "{partly:?}");
    }
}
