//! The flags of `dunlin evacuate`, and the flags for virsh that follow from them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use super::plan::{Order, Vm};
use super::schedule::{OnLimit, Rules};
use super::shares::Budgets;
use crate::options::{parse_bytes, parse_limit, parse_rate};
use crate::state::StatePath;

#[derive(Debug, Args)]
pub(crate) struct Evacuate {
    /// The libvirt of the host to empty, such as qemu:///system or qemu+ssh://HOST/system.
    #[arg(long, value_name = "URI")]
    pub(super) from: String,
    /// The libvirt of a host to which VMs move, by a URI that works on the emptied host;
    /// repeatable.
    #[arg(long, value_name = "URI", required = true, value_parser = parse_destination)]
    pub(super) to: Vec<String>,
    /// Which VM moves first; the busiest is the one that writes the most memory.
    #[arg(
        long,
        value_name = "ORDER",
        value_enum,
        default_value = "smallest",
        conflicts_with = "order_file"
    )]
    pub(super) order: OrderName,
    /// A file with names or UUIDs of VMs, one on each line, in the order in which they move. The
    /// other VMs follow, the smallest first.
    #[arg(long, value_name = "FILE")]
    pub(super) order_file: Option<PathBuf>,
    /// Number of VMs that copy at the same time. The next VM starts when an earlier one is in
    /// switchover.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) parallel: u16,
    /// Bytes per second that leave the emptied host, such as 500M [default: no limit].
    #[arg(long, value_name = "RATE", value_parser = parse_budget)]
    pub(super) outbound: Option<u64>,
    /// Bytes per second that arrive at each destination [default: no limit].
    #[arg(long, value_name = "RATE", value_parser = parse_budget)]
    pub(super) inbound: Option<u64>,
    /// Longest downtime that libvirt may plan for a VM [default: as libvirt is set].
    #[arg(long, value_name = "DURATION", value_parser = parse_limit)]
    pub(super) downtime_limit: Option<Duration>,
    /// Time limit for the migration of each VM [default: no limit].
    #[arg(long, value_name = "DURATION", value_parser = parse_limit)]
    pub(super) time_limit: Option<Duration>,
    /// What happens to a VM that exceeds --time-limit: with `cancel`, it stays; with `postcopy`, it
    /// continues at the destination and fetches its pages; with `pause`, its guest stops until it
    /// has moved.
    #[arg(
        long,
        value_name = "ACTION",
        value_enum,
        default_value = "cancel",
        requires = "time_limit"
    )]
    pub(super) on_time_limit: OnLimitName,
    /// Memory that stays free at each destination.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_bytes)]
    pub(super) reserve: u64,
    /// On the emptied host, keep the definitions of VMs that have moved. By default the definitions
    /// move too, because the host would otherwise start VMs with autostart again when it boots.
    #[arg(long)]
    pub(super) keep_defined: bool,
    /// Show the plan, and move nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// The tunnel's configuration, to find out whether a redirect protects the migrations.
    #[arg(long, value_name = "FILE", default_value = "/etc/dunlin/tunnel.toml")]
    pub(super) config: PathBuf,
    #[command(flatten)]
    pub(super) state: StatePath,
    /// Print one JSON object per line.
    #[arg(long)]
    pub(super) json: bool,
    /// More flags of `virsh migrate`, such as --parallel.
    #[arg(last = true, value_name = "VIRSH_FLAG")]
    pub(super) flags: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum OrderName {
    Smallest,
    Busiest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum OnLimitName {
    Cancel,
    Postcopy,
    Pause,
}

const MIB: u64 = 1 << 20;

/// Parses a rate, and returns it in MiB/s, the unit of virsh.
fn parse_budget(text: &str) -> Result<u64, String> {
    match parse_rate(text)? / MIB {
        0 => Err("rate out of range (1M or more): virsh takes whole MiB/s".into()),
        rate => Ok(rate),
    }
}

/// The source's libvirt connects to the destination, so a URI without a host would name the source.
fn parse_destination(text: &str) -> Result<String, String> {
    let is_local = text
        .split_once("://")
        .is_none_or(|(_, rest)| rest.starts_with('/') && !rest.contains('?'));
    match is_local {
        true => Err(format!(
            "{text:?} names no host: give the URI by which the emptied host reaches the destination, \
             such as qemu+ssh://HOST/system"
        )),
        false => Ok(text.to_owned()),
    }
}

/// Flags of `virsh migrate` that an operator cannot give: this command sets them, or they fit one
/// VM only.
const OWN: [&str; 19] = [
    "--live",
    "--p2p",
    "--direct",
    "--offline",
    "--suspend",
    "--persistent",
    "--undefinesource",
    "--bandwidth",
    "--postcopy-bandwidth",
    "--postcopy-resume",
    "--timeout",
    "--timeout-suspend",
    "--timeout-postcopy",
    "--domain",
    "--desturi",
    "--dname",
    "--xml",
    "--persistent-xml",
    "--verbose",
];

impl Evacuate {
    pub(super) fn check(&self) -> Result<()> {
        for flag in &self.flags {
            let name = flag.split('=').next().unwrap_or_default();
            ensure!(
                !OWN.contains(&name),
                "{name} cannot be given after --: `dunlin evacuate` sets it, or it fits one VM only"
            );
        }
        Ok(())
    }

    pub(super) fn has_flag(&self, name: &str) -> bool {
        self.flags.iter().any(|flag| flag == name)
    }

    pub(super) fn rules(&self) -> Rules {
        Rules {
            parallel: usize::from(self.parallel),
            budgets: Budgets {
                outbound: self.outbound,
                inbound: self.inbound,
            },
            time: self.time_limit,
            on_limit: match self.on_time_limit {
                OnLimitName::Cancel => OnLimit::Cancel,
                OnLimitName::Postcopy => OnLimit::Postcopy,
                OnLimitName::Pause => OnLimit::Pause,
            },
        }
    }

    pub(super) fn wanted_order(&self) -> Result<Order> {
        let Some(path) = &self.order_file else {
            return Ok(match self.order {
                OrderName::Smallest => Order::Smallest,
                OrderName::Busiest => Order::Busiest,
            });
        };
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let lines = text.lines().map(str::trim);
        let listed = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Ok(Order::Listed(listed.map(str::to_owned).collect()))
    }

    /// The flags of `virsh migrate` for a VM.
    pub(super) fn flags_of(&self, vm: &Vm) -> Vec<String> {
        let mut flags = self.flags.clone();
        if vm.is_persistent {
            flags.push("--persistent".into());
            if !self.keep_defined {
                flags.push("--undefinesource".into());
            }
        }
        let is_postcopy = self.time_limit.is_some() && self.on_time_limit == OnLimitName::Postcopy;
        if is_postcopy && !self.has_flag("--postcopy") {
            flags.push("--postcopy".into());
        }
        flags
    }

    /// Whether the flags for virsh make libvirt or QEMU encrypt the migration.
    pub(super) fn is_encrypted(&self) -> bool {
        let is_safe = |uri: &String| {
            ["qemu+ssh://", "qemu+tls://"]
                .iter()
                .any(|s| uri.starts_with(s))
        };
        self.has_flag("--tls") || self.has_flag("--tunnelled") && self.to.iter().all(is_safe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_names_a_host_or_a_socket() {
        for uri in ["qemu:///system", "qemu+unix:///system", "b.example"] {
            assert!(parse_destination(uri).is_err(), "{uri}");
        }
        for uri in ["qemu+ssh://b/system", "qemu+unix:///system?socket=/run/b"] {
            assert!(parse_destination(uri).is_ok(), "{uri}");
        }
    }

    #[test]
    fn budgets_are_whole_mebibytes_per_second() {
        assert_eq!(parse_budget("500M"), Ok(500));
        assert!(parse_budget("1000K").is_err());
    }
}
