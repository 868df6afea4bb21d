//! Arguments that several commands share, and the syntax of their values.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, FromArgMatches, ValueEnum};
use dunlin::engine::source::{AtTimeLimit, LaneSecurity, Options, OptionsBuilder};
use dunlin::lane::fastest;
use dunlin_ipsec as ipsec;
use dunlin_ipsec::lanes::IpsecLanes;
use dunlin_ipsec::xfrm::esp_offload;
use dunlin_ipsec::{Event, Observer, PortRange};
use dunlin_linux::affinity::allowed;
use dunlin_microvm::GuestKind;
use serde::{Deserialize, Serialize};

use crate::confine::LANE_PORTS;
use crate::ipsec::ModeName;
use crate::ipsec::advice::event_text;

/// Subdirectories of the control directory, for the sockets of tunnels and of keying sessions.
pub(crate) const TUNNELS: &str = "tunnels";
pub(crate) const IPSEC: &str = "ipsec";

/// Location of the control sockets of VMs, tunnels and keying sessions.
#[derive(Clone, Debug, Args)]
pub(crate) struct ControlPath {
    /// Directory of control sockets, or one socket [default: $RUNTIME_DIRECTORY or /run/dunlin].
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}

impl ControlPath {
    /// The control socket of the tunnel with this name.
    pub(crate) fn tunnel(&self, name: &str) -> PathBuf {
        self.socket_in(TUNNELS, name)
    }

    /// The control socket of the keying session with the peer `name`, or of `ipsec serve` if `name`
    /// is `serve`.
    pub(crate) fn ipsec(&self, name: &str) -> Result<PathBuf> {
        let file = name.replace(['/', '\0', ':', '[', ']'], "_");
        if file.is_empty() || file.starts_with('.') {
            bail!("invalid session name {name:?}: it must be non-empty, without leading dot");
        }
        Ok(self.socket_in(IPSEC, &file))
    }

    fn socket_in(&self, directory: &str, name: &str) -> PathBuf {
        let path = self.path();
        if is_socket(&path) {
            return path;
        }
        path.join(directory).join(format!("{name}.sock"))
    }

    /// All control sockets in one of the subdirectories, including those of dead processes. If the
    /// flag names a socket, only that socket.
    pub(crate) fn sockets_in(&self, directory: &str) -> Vec<PathBuf> {
        let path = self.path();
        if is_socket(&path) {
            return vec![path];
        }
        let entries = std::fs::read_dir(path.join(directory));
        let paths = entries.into_iter().flatten().flatten();
        let mut sockets: Vec<PathBuf> = paths.map(|entry| entry.path()).collect();
        sockets.retain(|path| is_socket(path));
        sockets.sort();
        sockets
    }

    fn path(&self) -> PathBuf {
        self.control.clone().unwrap_or_else(|| {
            std::env::var_os("RUNTIME_DIRECTORY")
                .map_or_else(|| PathBuf::from("/run/dunlin"), PathBuf::from)
        })
    }

    /// The directory of control sockets; `None` if the option names one socket.
    pub(crate) fn directory(&self) -> Option<PathBuf> {
        Some(self.path()).filter(|path| !is_socket(path))
    }

    /// The control socket of the VM with this name.
    ///
    /// A source may have sent the name, so the name must not lead out of the directory (I7).
    pub(crate) fn socket(&self, name: &str) -> Result<PathBuf> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
            bail!(
                "invalid VM name {name:?}: it must be non-empty, without slash, NUL or leading dot"
            );
        }
        Ok(self.socket_in("", name))
    }
}

/// Whether the path has the extension of a control socket.
fn is_socket(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "sock")
}

#[derive(Clone, Copy, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SecurityName {
    #[default]
    Tls,
    Plain,
    Ipsec,
}

impl From<SecurityName> for LaneSecurity {
    fn from(name: SecurityName) -> Self {
        match name {
            SecurityName::Tls => Self::Tls,
            SecurityName::Plain => Self::Plain,
            SecurityName::Ipsec => Self::Ipsec,
        }
    }
}

/// A parser for a flag that accepts the names in `table`.
pub(crate) fn named<T: Copy + Send + Sync + 'static>(
    table: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(table.iter().map(|(name, _)| *name)).map(|name| {
        let found = table.iter().find(|(known, _)| *known == name);
        found.expect("clap accepts only names of the table").1
    })
}

/// Kinds of guest.
pub(crate) const GUESTS: &[(&str, GuestKind)] =
    &[("kvm", GuestKind::Kvm), ("process", GuestKind::Process)];

/// Parameters of a migration: the flags of `dunlin vm migrate`, also sent over the control socket.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
pub(crate) struct MigrateFlags {
    /// The destination's host and port.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) to: String,
    /// Number of data lanes, 1 to 128; `auto` takes one for each CPU, from 2 to 8, but no more than
    /// `--rate` needs.
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    pub(crate) lanes: LaneCount,
    /// Security of the data lanes; `plain` needs `--allow-plain` at the destination, `ipsec` needs
    /// `--ipsec` for the VM's process on both hosts.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) security: SecurityName,
    #[command(flatten)]
    #[serde(default)]
    pub(crate) ipsec: IpsecFlags,
    /// Longest acceptable downtime, such as 300ms.
    #[arg(long, value_name = "DURATION", default_value = "300ms", value_parser = parse_limit)]
    pub(crate) downtime_limit: Duration,
    /// Longest time for pre-copy, such as 10m [default: no limit].
    #[arg(long, value_name = "DURATION", value_parser = parse_limit)]
    pub(crate) time_limit: Option<Duration>,
    /// Action at the time limit: `cancel` keeps the VM at the source, `stop` pauses and moves it,
    /// however long the downtime [default: cancel].
    #[arg(long, value_enum, requires = "time_limit")]
    pub(crate) at_time_limit: Option<AtTimeLimitName>,
    /// After commit, how long to query a destination that does not answer; after that, an operator
    /// decides with `dunlin resolve`.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_limit)]
    pub(crate) doubt_limit: Duration,
    /// Compare both memories before commit, while the guest is paused; lengthens the downtime.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Digest the source's memory after the destination has the VM, for a parent process that
    /// compares the digests.
    #[arg(long, hide = true)]
    #[serde(default)]
    pub(crate) digests: bool,
    /// Whether to slow the guest down, in steps, when it dirties memory faster than the lanes carry
    /// it.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) throttle: ThrottleName,
    /// Rate limit for all data lanes together, such as 500M (bytes per second); `dunlin vm set
    /// --rate` changes it during the migration.
    #[arg(long, value_name = "BYTES_PER_S", value_parser = parse_rate)]
    pub(crate) rate: Option<u64>,
    /// Rate limit for all data lanes during the last pass, while the guest is paused [default: no
    /// limit].
    #[arg(long, value_name = "BYTES_PER_S", value_parser = parse_rate)]
    pub(crate) last_pass_rate: Option<u64>,
    /// Rate limit for each data lane, enforced by the kernel.
    #[arg(long, value_name = "BYTES_PER_S", value_parser = parse_rate)]
    pub(crate) lane_rate: Option<u64>,
}

impl MigrateFlags {
    /// A migration to `to` with every other flag at its default.
    pub(crate) fn new(to: String) -> Self {
        let command = Self::augment_args(clap::Command::new("migrate").no_binary_name(true));
        let flags = Self::from_arg_matches(&command.get_matches_from(["--to", &to]));
        flags.expect("every flag but --to has a default or is optional")
    }

    pub(crate) fn options(&self) -> OptionsBuilder {
        Options::builder()
            .lanes(self.lanes.resolve(self.rate))
            .security(self.security.into())
            .downtime_limit(self.downtime_limit)
            .time_limit(self.time_limit)
            .at_time_limit(match self.at_time_limit {
                Some(AtTimeLimitName::Stop) => AtTimeLimit::Stop,
                Some(AtTimeLimitName::Cancel) | None => AtTimeLimit::Cancel,
            })
            .doubt_limit(self.doubt_limit)
            .verify(self.verify)
            .throttle(matches!(self.throttle, ThrottleName::Auto))
            .rate(self.rate)
            .last_pass_rate(self.last_pass_rate)
            .lane_rate(self.lane_rate)
    }
}

/// Flags for lanes over IPsec.
#[derive(Clone, Debug, Args, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct IpsecFlags {
    /// With IPsec: one SA per CPU or one per lane.
    #[arg(long, value_enum, default_value_t)]
    ipsec_mode: ModeName,
    /// With IPsec: source ports of the lanes; the destination's `--ipsec-ports` must include them.
    #[arg(long, value_name = "A-B", value_parser = text_of::<PortRange>, default_value = LANE_PORTS)]
    ipsec_ports: String,
    /// With IPsec and one SA per CPU: the lanes' CPUs, such as 0,2-3 [default: the CPUs on which
    /// the VM's process may run].
    #[arg(long, value_name = "LIST", value_parser = text_of::<Cpus>)]
    cpus: Option<String>,
}

impl Default for IpsecFlags {
    fn default() -> Self {
        Self {
            ipsec_mode: ModeName::default(),
            ipsec_ports: LANE_PORTS.to_owned(),
            cpus: None,
        }
    }
}

impl IpsecFlags {
    /// Options for the lanes of this process; `records` is the directory for records of the
    /// installed SAs and policies.
    pub(crate) fn options(&self, records: PathBuf) -> Result<ipsec::Options> {
        let cpus = self.cpus.as_deref().map(str::parse).transpose();
        let ports = self.ipsec_ports.parse()?;
        let mut options = ipsec::Options::new(self.ipsec_mode.into(), ports, records);
        options.cpus = ipsec_cpus(cpus.map_err(anyhow::Error::msg)?.as_ref())?;
        options.quiet_wait = LANES_QUIET;
        Ok(options)
    }
}

/// How long to wait at the end of a session until no lane is open. A short time suffices, because
/// both sides close their lanes.
pub(crate) const LANES_QUIET: Duration = Duration::from_secs(5);

/// Checks that a text parses as a `T` and returns the text, because requests carry it
/// unparsed.
pub(crate) fn text_of<T: FromStr<Err: Display>>(text: &str) -> Result<String, String> {
    match text.parse::<T>() {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Creates a dialer and acceptor of lanes over IPsec. Events that an operator should see go to
/// `warn`.
///
/// # Errors
/// The kernel lacks a feature, or this process lacks a privilege; the error names it.
pub(crate) fn ipsec_lanes(
    options: ipsec::Options,
    warn: impl Fn(String) + Send + Sync + 'static,
) -> Result<IpsecLanes> {
    if let Some(text) = offload_advice() {
        warn(text);
    }
    let observer: Observer = Arc::new(move |event: &Event| match event {
        Event::Up(_) | Event::Over { why: None, .. } | Event::Cleaned { .. } => {}
        event => warn(event_text(event)),
    });
    Ok(IpsecLanes::new(options, observer)?)
}

/// Advice to load the ESP offload module early: it affects only SAs that are added after it is
/// loaded.
pub(crate) fn offload_advice() -> Option<String> {
    let command = esp_offload().how_to_load()?;
    Some(format!(
        "IPsec is slower without ESP segmentation offload, because TCP then passes packets of one \
         segment each to IPsec; run `{command}` before this process starts"
    ))
}

/// The CPUs given by the flag, or else those on which this process may run.
pub(crate) fn ipsec_cpus(given: Option<&Cpus>) -> Result<Vec<u32>> {
    let cpus = match given {
        Some(Cpus(cpus)) => cpus.clone(),
        None => allowed()?,
    };
    let cpus = cpus.into_iter().map(u32::try_from);
    Ok(cpus.collect::<Result<_, _>>()?)
}

#[derive(Clone, Copy, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ThrottleName {
    #[default]
    Auto,
    Never,
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AtTimeLimitName {
    Cancel,
    Stop,
}

/// A list of CPUs in the syntax of cpuset(7) and taskset(1): `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cpus(pub(crate) Vec<usize>);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// Capacity of glibc's `cpu_set_t` (sched_setaffinity(2)).
        const MOST: usize = 1024;
        let wrong = || format!("invalid CPU list {text:?}: write 0,2-3, with numbers up to 1023");
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
            let (first, last) = (number(first)?, number(last)?);
            if first > last || last >= MOST {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

/// A parser for a lane count in the engine's range.
pub(crate) fn parse_lanes() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=128)
}

/// A number of lanes in the engine's range; `None` for as many as suit the host and the rate.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LaneCount(Option<u16>);

impl LaneCount {
    /// The number for a migration with this rate limit, in bytes per second.
    pub(crate) fn resolve(self, rate: Option<u64>) -> u16 {
        self.0.unwrap_or_else(|| fastest::lanes(rate))
    }
}

impl From<u16> for LaneCount {
    fn from(lanes: u16) -> Self {
        Self(Some(lanes))
    }
}

impl FromStr for LaneCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(lanes @ 1..=128) => Ok(Self(Some(lanes))),
            _ if text == "auto" => Ok(Self(None)),
            _ => Err(format!("invalid lane count {text}: give 1 to 128, or auto")),
        }
    }
}

/// Parses a limit in bytes per second; 0 is rejected, because no byte would ever arrive.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("rate 0 out of range (1 or more)".into()),
        rate => Ok(rate),
    }
}

/// Parses a time limit; 0 is rejected, because every operation would exceed it.
pub(crate) fn parse_limit(text: &str) -> Result<Duration, String> {
    match parse_duration(text)? {
        Duration::ZERO => Err("limit 0 out of range (1ms or more)".into()),
        limit => Ok(limit),
    }
}

/// Parses a whole number with a unit: ms, s, m or h. A number without a unit is rejected, because
/// other tools read it as milliseconds for one limit and as seconds for another.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_ms = match &text[digits.len()..] {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60 * 1000),
        "h" => Some(60 * 60 * 1000),
        _ => None,
    };
    product(digits, unit_ms)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("invalid duration {text:?}: write 300ms, 10s, 2m or 1h"))
}

fn product(digits: &str, unit: Option<u64>) -> Option<u64> {
    digits.parse::<u64>().ok()?.checked_mul(unit?)
}

/// Parses bytes with an optional suffix K, M, G or T (powers of 1024).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim_end_matches("iB").trim_end_matches('B');
    let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &trimmed[digits.len()..] {
        "" => Some(1),
        "K" | "k" => Some(1 << 10),
        "M" | "m" => Some(1 << 20),
        "G" | "g" => Some(1 << 30),
        "T" | "t" => Some(1 << 40),
        _ => None,
    };
    product(digits, unit)
        .ok_or_else(|| format!("invalid size {text:?}: write 512M, 2G or a number of bytes"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_name_stays_in_its_directory() {
        let control = ControlPath {
            control: Some("/run/x".into()),
        };
        assert_eq!(
            control.socket("a b").unwrap(),
            PathBuf::from("/run/x/a b.sock")
        );
        for bad in ["", ".", "..", "../x", "a/b", "/etc/x", "a\0b", ".hidden"] {
            assert!(control.socket(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("1h"), Ok(Duration::from_secs(3600)));
        for bad in [
            "",
            "300",
            "s",
            "1.5s",
            "-1s",
            "1 s",
            "1d",
            "1sec",
            "99999999999999999h",
        ] {
            let error = parse_duration(bad).unwrap_err();
            assert!(error.contains("300ms, 10s, 2m or 1h"), "{bad}: {error}");
        }
        assert!(parse_limit("0s").is_err());
    }

    #[test]
    fn a_list_of_cpus_has_numbers_and_ranges() {
        assert_eq!("0".parse(), Ok(Cpus(vec![0])));
        assert_eq!("0,2-4,7".parse(), Ok(Cpus(vec![0, 2, 3, 4, 7])));
        for bad in [
            "",
            ",",
            "a",
            "1-",
            "-1",
            "3-2",
            "0,,1",
            "0-9999999999",
            "1024",
        ] {
            let error = bad.parse::<Cpus>().unwrap_err();
            assert!(error.contains("write 0,2-3"), "{bad}: {error}");
        }
    }

    #[test]
    fn without_flags_the_options_are_the_library_defaults() {
        let flags = MigrateFlags::new("host:1".into());
        assert_eq!(
            format!("{:?}", flags.options().build().unwrap()),
            format!("{:?}", Options::default())
        );
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("64M"), Ok(64 << 20));
        assert_eq!(parse_bytes("2GiB"), Ok(2 << 30));
        assert!(parse_bytes("").is_err());
        assert!(parse_bytes("two").is_err());
        assert!(parse_bytes("99999999999T").is_err());
    }
}
