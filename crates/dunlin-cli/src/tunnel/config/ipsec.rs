//! Lanes over IPsec in the configuration.

use std::time::Duration;

use dunlin_ipsec::lanes::BLOCK_PORTS;
use dunlin_ipsec::{Mode, PortRange};
use serde::Deserialize;
use toml::Spanned;

use super::table::{Found, RouteTable};
use crate::confine::LANE_PORTS;
use crate::options::{Cpus, parse_limit};

/// As `dunlin ipsec` has it.
const REKEY_AFTER: Duration = Duration::from_secs(60 * 60);

/// What is between the hosts where routes ask for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ipsec {
    /// The source ports of lanes, of either side.
    pub(crate) ports: PortRange,
    pub(crate) mode: Mode,
    /// On which this side's lanes are; without, those on which the process may run.
    pub(crate) cpus: Option<Cpus>,
    /// After how long the keys of what this side sends are renewed.
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
                    "ports {ports} hold no block of {BLOCK_PORTS} that begins at a multiple of \
                     {BLOCK_PORTS}: give more, such as {LANE_PORTS}"
                )),
            }
        }),
        None => range(LANE_PORTS).ok(),
    };
    let mode = found.or(&table.mode, Mode::Cpu, |text| match text {
        "cpu" => Ok(Mode::Cpu),
        "connection" => Ok(Mode::Connection),
        other => Err(format!(
            "there is no mode {other:?} of IPsec: write \"cpu\", or \"connection\" for kernels \
             without SAs for CPUs"
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

/// Whether a route's lanes go over IPsec, by what it says of its security.
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
            "route {name} is a relay, which is TLS: leave out mode or security"
        )),
        "ipsec" if table.to.is_none() => Err(format!(
            "route {name} leads nowhere from here, and the side that connects chooses its \
             security: leave it out; [ipsec] is what lets such lanes in"
        )),
        "ipsec" if !is_prepared => Err(format!(
            "route {name} goes over IPsec: add [ipsec], on both hosts"
        )),
        "ipsec" => Ok(true),
        "plain" => Err(format!(
            "route {name} would carry memory in the clear, for which no tunnel is needed: write \
             \"tls\", or leave security out"
        )),
        other => Err(format!(
            "there is no security {other:?} for routes: write \"tls\" or \"ipsec\", or leave it out"
        )),
    });
    over_ipsec.unwrap_or(false)
}
