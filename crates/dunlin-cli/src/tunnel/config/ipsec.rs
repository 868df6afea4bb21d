//! Lanes over IPsec in the configuration.

use std::time::Duration;

use dunlin_ipsec::lanes::BLOCK_PORTS;
use dunlin_ipsec::{Mode, PortRange};
use serde::Deserialize;
use toml::Spanned;

use super::table::{Found, RouteTable};
use crate::confine::LANE_PORTS;
use crate::options::{Cpus, parse_limit};

/// Default age at which keys are renewed, the same as that of `dunlin ipsec`.
const REKEY_AFTER: Duration = Duration::from_secs(60 * 60);

/// IPsec settings for the routes that ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ipsec {
    /// Source ports of the lanes of both sides.
    pub(crate) ports: PortRange,
    pub(crate) mode: Mode,
    /// CPUs of this side's lanes; by default those on which the process may run.
    pub(crate) cpus: Option<Cpus>,
    /// Age at which the keys for sending are renewed.
    pub(crate) rekey_after: Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IpsecTable {
    ports: Option<Spanned<String>>,
    mode: Option<Spanned<String>>,
    cpus: Option<Spanned<String>>,
    rekey_after: Option<Spanned<String>>,
}

pub(super) fn check(table: &IpsecTable, found: &mut Found<'_>) -> Option<Ipsec> {
    let range = |text: &str| text.parse::<PortRange>();
    let ports = match &table.ports {
        Some(ports) => found.parsed(ports, |text| {
            let ports = range(text).map_err(|error| error.to_string())?;
            match ports.parts(BLOCK_PORTS).next() {
                Some(_) => Ok(ports),
                None => Err(format!(
                    "ports {ports} contain no block of {BLOCK_PORTS} that begins at a multiple of \
                     {BLOCK_PORTS}: extend the range, for example to {LANE_PORTS}"
                )),
            }
        }),
        None => range(LANE_PORTS).ok(),
    };
    let mode = found.or(&table.mode, Mode::Cpu, |text| match text {
        "cpu" => Ok(Mode::Cpu),
        "connection" => Ok(Mode::Connection),
        other => Err(format!(
            "unknown IPsec mode {other:?}: write \"cpu\", or \"connection\" for kernels without \
             per-CPU SAs"
        )),
    });
    let cpus = found.or(&table.cpus, None, |text| text.parse::<Cpus>().map(Some));
    let rekey_after = found.or(&table.rekey_after, REKEY_AFTER, parse_limit);
    Some(Ipsec {
        ports: ports?,
        mode,
        cpus,
        rekey_after,
    })
}

/// Whether the route's `security` selects IPsec.
pub(super) fn is_asked_for(
    name: &str,
    table: &RouteTable,
    is_relay: bool,
    is_prepared: bool,
    found: &mut Found<'_>,
) -> bool {
    let Some(security) = &table.security else {
        return false;
    };
    let over_ipsec = found.parsed(security, |text| match text.as_str() {
        "tls" => Ok(false),
        "ipsec" if is_relay => Err(format!(
            "route {name} is a relay, which uses TLS: remove `mode` or `security`"
        )),
        "ipsec" if table.to.is_none() => Err(format!(
            "`security` of route {name} has no effect, because only the side that connects to the \
             peer selects it: remove `security` here; [ipsec] alone admits lanes over IPsec"
        )),
        "ipsec" if !is_prepared => Err(format!(
            "route {name} uses IPsec: add [ipsec] on both hosts"
        )),
        "ipsec" => Ok(true),
        "plain" => Err(format!(
            "security \"plain\" of route {name} is not supported, because it would send memory in \
             the clear: write \"tls\", or remove `security`"
        )),
        other => Err(format!(
            "unknown security {other:?}: write \"tls\" or \"ipsec\", or remove `security`"
        )),
    });
    over_ipsec.unwrap_or(false)
}
