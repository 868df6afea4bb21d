//! The events of migrations and tunnels as JSON lines, one object per line. Commands print them
//! with `--json`, and processes send them over their control sockets.

use std::collections::BTreeMap;
use std::time::Duration;

use dunlin::engine::source::VmLocation;
use dunlin::engine::{Downtime, Event, Iteration, MigrateError, Progress, Report, VmIs};
use dunlin::lane::kernel::{Choice, Driver};
use dunlin_proto::fault::{AtFault, FaultCode};
use dunlin_proto::text::harmless;
use serde::{Deserialize, Serialize};

use crate::code::{CANCELLED, FAILED, IN_DOUBT};
use crate::fault::fault_of;
use crate::output::{offer, put};
use crate::progress;
use crate::published::CertificateLine;
use crate::text::{chained, clean, clean_lines, plain};
use crate::tunnel::line::{CheckedLine, ListenerLine, TunnelLine};

impl From<&Choice> for Line {
    fn from(choice: &Choice) -> Self {
        let by = if choice.is_kernel {
            "kernel"
        } else {
            "process"
        };
        Self::Records {
            by: by.into(),
            driver: choice.driver.as_ref().map(DriverLine::from),
            text: choice.reason.clone(),
        }
    }
}

/// The kernel's cipher driver for TLS records.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DriverLine {
    name: String,
    priority: u32,
    asynchronous: bool,
}

impl From<&Driver> for DriverLine {
    fn from(driver: &Driver) -> Self {
        Self {
            name: driver.name.clone(),
            priority: driver.priority,
            asynchronous: driver.is_async,
        }
    }
}

impl From<&VmLocation> for Line {
    fn from(location: &VmLocation) -> Self {
        let (vm, text) = match location {
            VmLocation::AtSource => ("at-source", ""),
            VmLocation::AtDestination => ("at-destination", ""),
            VmLocation::RanThenDied => ("ran-then-died", ""),
            VmLocation::InDoubt(why) => ("in-doubt", &**why),
        };
        Self::Answered {
            vm: vm.into(),
            text: text.into(),
        }
    }
}

/// One event.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(crate) enum Line {
    Listening {
        address: String,
    },
    Started {
        name: String,
        pid: u32,
        control: String,
    },
    /// `by`: the parts of the confinement that are in force in this process. `lacks`: the parts
    /// that are not in force, each with the reason.
    Confined {
        by: Vec<String>,
        lacks: Vec<String>,
    },
    /// Whether the kernel or the process seals and opens TLS records, and why.
    Records {
        by: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        driver: Option<DriverLine>,
        text: String,
    },
    /// A signal made the process reload its certificates.
    IdentityRead {
        valid_until: String,
    },
    Accepted {
        peer: String,
    },
    LaneUp {
        lane: u16,
    },
    LaneLost {
        lane: u16,
        text: String,
    },
    ControlLost {
        text: String,
    },
    ControlResumed,
    Progress(ProgressLine),
    Iterated(IterationLine),
    Throttled {
        percent: u8,
    },
    /// A record with this state has been written to the journal.
    Recorded {
        state: String,
    },
    Paused,
    Committing,
    Committed,
    InDoubt {
        text: String,
    },
    Running,
    Warning {
        text: String,
    },
    /// The timeline that `dunlin vm migrate` asked for, as trace events.
    Timeline {
        events: Vec<serde_json::Value>,
    },
    Moved(Box<MovedLine>),
    Failed(FailedLine),
    /// The destination received a VM.
    Received {
        name: String,
        pid: u32,
        control: String,
        runs: bool,
        downtime_ms: Option<f64>,
        cpu_s: f64,
        /// A digest for each 2 MiB of memory as it was when the guest resumed; empty unless
        /// requested.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        digests: Vec<u64>,
    },
    /// The destination rejected a connection or a VM, or a migration to it failed.
    Rejected {
        text: String,
    },
    /// The process ends, because its VM has ended or because of a signal. `state` names the cause.
    Ended {
        state: String,
        code: i32,
    },
    Status(Box<StatusLine>),
    /// The destination's answer about a VM in doubt; see [`VmLocation`].
    Answered {
        vm: String,
        text: String,
    },
    /// Status of `dunlin handoff accept`.
    Handoff(HandoffLine),
    /// A session in the journal.
    Session(serde_json::Value),
    Tunnel(Box<TunnelLine>),
    /// An on-demand listener of a tunnel.
    Listener(ListenerLine),
    /// The path to a peer's tunnel works.
    Checked(CheckedLine),
    Done,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ProgressLine {
    pub(crate) iteration: u32,
    pub(crate) bytes_per_s: u64,
    pub(crate) remaining_bytes: u64,
    pub(crate) dirty_pages_per_s: u64,
    pub(crate) predicted_downtime_ms: f64,
    pub(crate) lanes: Vec<(u16, u64)>,
    /// TCP segments sent again, by lane.
    #[serde(default)]
    pub(crate) retransmits: Vec<(u16, u32)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct IterationLine {
    pub(crate) iteration: u32,
    pub(crate) duration_ms: f64,
    pub(crate) pages: u64,
    pub(crate) dirtied_pages: u64,
    pub(crate) wire_bytes: u64,
    pub(crate) predicted_downtime_ms: f64,
    pub(crate) throttle: u8,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MovedLine {
    pub(crate) iterations: Vec<IterationLine>,
    pub(crate) raw_pages: u64,
    pub(crate) zero_pages: u64,
    pub(crate) header_bytes: u64,
    pub(crate) wire_bytes: u64,
    pub(crate) lanes: Vec<(u16, u64)>,
    pub(crate) security: String,
    pub(crate) total_s: f64,
    pub(crate) gib_per_s: f64,
    pub(crate) source_cpu_s_per_gib: f64,
    pub(crate) destination_cpu_s_per_gib: f64,
    pub(crate) downtime: DowntimeLine,
    pub(crate) digests_equal: Option<bool>,
    pub(crate) runs: bool,
    /// A digest for each 2 MiB of the source's memory, if the request asked for digests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) digests: Vec<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DowntimeLine {
    pub(crate) guest_ms: Option<f64>,
    pub(crate) total_ms: f64,
    pub(crate) pause_ms: f64,
    pub(crate) last_pages_ms: f64,
    pub(crate) state_ms: f64,
    pub(crate) ready_ms: f64,
    pub(crate) resume_ms: f64,
}

impl DowntimeLine {
    /// The name of each part of the downtime, and its length in milliseconds. The parts
    /// *last-pages* and *state* overlap.
    pub(crate) fn parts(&self) -> [(&'static str, f64); 5] {
        [
            ("pause", self.pause_ms),
            ("last-pages", self.last_pages_ms),
            ("state", self.state_ms),
            ("ready", self.ready_ms),
            ("resume", self.resume_ms),
        ]
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FailedLine {
    pub(crate) fault: String,
    pub(crate) at_fault: String,
    /// Where the VM is; empty if the failure does not concern a VM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) vm: String,
    pub(crate) text: String,
    /// The exit code for this failure.
    pub(crate) code: i32,
}

impl FailedLine {
    /// A failure with this fault code; `vm` is where the VM is.
    pub(crate) fn new(fault: FaultCode, vm: &str, text: impl Into<String>, code: i32) -> Self {
        Self {
            fault: fault.to_string(),
            at_fault: fault.at_fault().to_string(),
            vm: vm.into(),
            text: text.into(),
            code,
        }
    }

    /// The text, followed by the fault code in brackets, for `dunlin explain`. A failure without a
    /// fault code has the fault `usage`, and gets no brackets.
    pub(crate) fn for_people(&self) -> String {
        let text = clean_lines(&self.text);
        match self.fault.as_str() {
            "usage" => text,
            fault => format!("{text} [{}]", clean(fault)),
        }
    }
}

/// An error of this process, or a failure that another process sent.
impl std::error::Error for FailedLine {}

impl std::fmt::Display for FailedLine {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl From<&anyhow::Error> for FailedLine {
    fn from(error: &anyhow::Error) -> Self {
        if let Some(failed) = error.downcast_ref::<Self>() {
            return failed.clone();
        }
        let (fault, at_fault) = match fault_of(error) {
            Some((fault, at_fault)) => (fault.name(), at_fault),
            None => ("usage", AtFault::Configuration),
        };
        Self {
            fault: fault.into(),
            at_fault: at_fault.to_string(),
            vm: String::new(),
            text: chained(error),
            code: FAILED,
        }
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StatusLine {
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) pid: u32,
    pub(crate) state: String,
    pub(crate) memory_bytes: u64,
    pub(crate) pages_checked: u64,
    pub(crate) beats: u64,
    pub(crate) full_passes: u64,
    pub(crate) downtime_ms: Option<f64>,
    pub(crate) largest_gap_ms: f64,
    pub(crate) migration: Option<MigrationLine>,
    /// When the certificates and revocation lists of the process's identity expire.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) certificates: Vec<CertificateLine>,
}

/// A migration under way, as seen by one side's process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MigrationLine {
    pub(crate) role: String,
    pub(crate) peer: String,
    pub(crate) phase: String,
    pub(crate) seconds: f64,
    pub(crate) rate: Option<u64>,
    pub(crate) throttle: u8,
    pub(crate) progress: Option<ProgressLine>,
    #[serde(default)]
    pub(crate) lanes_lost: u32,
    /// The newest iterations that have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) iterations: Vec<IterationLine>,
}

/// What `dunlin handoff accept` has done with its clients since it started.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct HandoffLine {
    pub(crate) pid: u32,
    /// The address to which clients connect.
    pub(crate) address: String,
    /// For each server name, the number of connections that were handed over.
    pub(crate) handed_over: BTreeMap<String, u64>,
    pub(crate) forwarded: u64,
    /// For each fault code, the number of refused clients and of failed client connections.
    pub(crate) refused: BTreeMap<String, u64>,
    pub(crate) certificates: Vec<CertificateLine>,
}

impl Line {
    /// Prints the line on standard output.
    pub(crate) fn print(&self) {
        put(&self.to_json());
    }

    /// Prints the line as JSON or as text for people. A line that peers can cause at any time is
    /// lost if no process reads standard output.
    pub(crate) fn say(&self, json: bool) {
        self.say_of(None, json);
    }

    /// Like [`Line::say`]. If `vm` is given, the line names this VM, because it concerns one of
    /// several VMs of this process.
    pub(crate) fn say_of(&self, vm: Option<&str>, json: bool) {
        let Some(line) = self.shown(vm, json) else {
            return;
        };
        if !json {
            progress::clear();
        }
        if self.is_frequent() {
            let warning = |text| Self::Warning { text }.shown(None, json).unwrap_or_default();
            offer(&line, warning);
        } else {
            put(&line);
        }
    }

    fn shown(&self, vm: Option<&str>, json: bool) -> Option<String> {
        let Some(vm) = vm else {
            return if json {
                Some(self.to_json())
            } else {
                self.text()
            };
        };
        if !json {
            return Some(format!("{}: {}", clean(vm), self.text()?));
        }
        let mut object = serde_json::to_value(self).ok()?;
        object["name"] = vm.into();
        Some(plain(object.to_string()))
    }

    /// Whether peers can cause the line any number of times.
    fn is_frequent(&self) -> bool {
        matches!(
            self,
            Self::Rejected { .. }
                | Self::Accepted { .. }
                | Self::LaneUp { .. }
                | Self::LaneLost { .. }
                | Self::ControlLost { .. }
                | Self::ControlResumed
                | Self::Warning { .. }
        )
    }

    /// The text for people, if there is one.
    pub(crate) fn text(&self) -> Option<String> {
        Some(match self {
            Self::Listening { address } => format!("waiting for a VM on {}", clean(address)),
            Self::Started { name, control, .. } => {
                format!("{} runs; control socket {}", clean(name), clean(control))
            }
            Self::Accepted { peer } => format!("{} connected", clean(peer)),
            Self::Rejected { text } => format!("rejected: {}", clean_lines(text)),
            Self::Warning { text } => format!("warning: {}", clean(text)),
            Self::Records { text, .. } => clean(text),
            Self::IdentityRead { valid_until } => {
                let until = clean(valid_until);
                format!("identity reloaded; its certificate is valid until {until}")
            }
            Self::Confined { by, lacks } => {
                let (by, lacks) = (clean(&by.join(", ")), clean(&lacks.join(", ")));
                match (by.is_empty(), lacks.is_empty()) {
                    (true, true) => "not confined".into(),
                    (true, false) => format!("not confined: {lacks}"),
                    (false, true) => format!("confined: {by}"),
                    (false, false) => {
                        format!("confined: {by}\nwarning: this host lacks {lacks}")
                    }
                }
            }
            Self::Checked(line) => line.text(),
            Self::LaneLost { lane, text } => format!("lane {lane} lost: {}", clean(text)),
            Self::ControlLost { text } => format!("control lane lost: {}", clean(text)),
            Self::ControlResumed => "control lane replaced".into(),
            Self::Failed(failed) => failed.for_people(),
            Self::Received {
                name,
                control,
                runs,
                downtime_ms,
                ..
            } => {
                let how = if *runs {
                    "runs here"
                } else {
                    "is here, paused"
                };
                let downtime = downtime_ms.map_or(String::new(), |ms| {
                    format!(", downtime {ms:.1} ms as the guest saw it")
                });
                format!(
                    "{} {how}{downtime}; control socket {}",
                    clean(name),
                    clean(control)
                )
            }
            _ => return None,
        })
    }

    pub(crate) fn to_json(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_else(|error| {
            // Unreachable: serialization fails only for a map with non-string keys or a failing
            // `Serialize`, and a `Line` has neither.
            format!(r#"{{"event":"warning","text":"cannot write JSON: {error}"}}"#)
        });
        plain(json)
    }
}

/// Prints an object that is not a [`Line`].
pub(crate) fn print_json(object: &serde_json::Value) {
    put(&plain(object.to_string()));
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

impl From<&Event> for Line {
    fn from(event: &Event) -> Self {
        match event {
            Event::Accepted { peer } => Self::Accepted { peer: peer.clone() },
            Event::LaneUp { lane } => Self::LaneUp { lane: *lane },
            Event::LaneLost { lane, why } => Self::LaneLost {
                lane: *lane,
                text: why.clone(),
            },
            Event::ControlLost { why } => Self::ControlLost { text: why.clone() },
            Event::ControlResumed => Self::ControlResumed,
            Event::Progress(progress) => Self::Progress(progress.into()),
            Event::Iterated(iteration) => Self::Iterated(iteration.into()),
            Event::Throttled { percent } => Self::Throttled { percent: *percent },
            Event::Paused => Self::Paused,
            Event::Recorded(record) => Self::Recorded {
                state: record.to_string(),
            },
            Event::Committing => Self::Committing,
            Event::Committed => Self::Committed,
            Event::InDoubt { why } => Self::InDoubt { text: why.clone() },
            Event::Running => Self::Running,
            Event::Warning(text) => Self::Warning { text: text.clone() },
            // The library may define events that this command does not handle yet.
            event => Self::Warning {
                text: format!("{event:?}"),
            },
        }
    }
}

impl From<&Progress> for ProgressLine {
    fn from(progress: &Progress) -> Self {
        Self {
            iteration: progress.iteration,
            bytes_per_s: progress.bytes_per_s,
            remaining_bytes: progress.remaining_bytes,
            dirty_pages_per_s: progress.dirty_pages_per_s,
            predicted_downtime_ms: millis(progress.predicted_downtime),
            lanes: progress.lanes.clone(),
            retransmits: progress.retransmits.clone(),
        }
    }
}

impl From<&Iteration> for IterationLine {
    fn from(iteration: &Iteration) -> Self {
        Self {
            iteration: iteration.number,
            duration_ms: millis(iteration.duration),
            pages: iteration.pages,
            dirtied_pages: iteration.dirtied_pages,
            wire_bytes: iteration.wire_bytes,
            predicted_downtime_ms: millis(iteration.predicted_downtime),
            throttle: iteration.throttle,
        }
    }
}

impl From<&Downtime> for DowntimeLine {
    fn from(downtime: &Downtime) -> Self {
        Self {
            guest_ms: downtime.guest.map(millis),
            total_ms: millis(downtime.total),
            pause_ms: millis(downtime.pause),
            last_pages_ms: millis(downtime.last_pages),
            state_ms: millis(downtime.state),
            ready_ms: millis(downtime.ready),
            resume_ms: millis(downtime.resume),
        }
    }
}

impl From<&Report> for MovedLine {
    fn from(report: &Report) -> Self {
        const GIB: f64 = (1_u64 << 30) as f64;
        let gib = report.traffic.wire_bytes as f64 / GIB;
        let per_gib = |time: Duration| time.as_secs_f64() / gib.max(f64::MIN_POSITIVE);
        Self {
            iterations: report.iterations.iter().map(Into::into).collect(),
            raw_pages: report.traffic.raw_pages,
            zero_pages: report.traffic.zero_pages,
            header_bytes: report.traffic.header_bytes,
            wire_bytes: report.traffic.wire_bytes,
            lanes: report.lanes.clone(),
            security: report.security.to_string(),
            total_s: report.total.as_secs_f64(),
            gib_per_s: gib / report.total.as_secs_f64(),
            source_cpu_s_per_gib: per_gib(report.source_cpu),
            destination_cpu_s_per_gib: per_gib(report.destination_cpu),
            downtime: (&report.downtime).into(),
            digests_equal: report.digests_equal,
            runs: report.runs,
            digests: Vec::new(),
        }
    }
}

/// An error and its causes, each on its own line. A peer may have sent the texts, so their line
/// breaks and other control characters are escaped.
fn escaped(error: &dyn std::error::Error) -> String {
    let mut text = harmless(&error.to_string());
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str("\n  because ");
        text.push_str(&harmless(&cause.to_string()));
        next = cause.source();
    }
    text
}

impl From<&MigrateError> for FailedLine {
    fn from(error: &MigrateError) -> Self {
        let (vm, code) = match error.vm {
            VmIs::AtSource if error.code() == FaultCode::Cancelled => ("at-source", CANCELLED),
            VmIs::AtSource => ("at-source", FAILED),
            VmIs::StuckAtSource => ("stuck-at-source", FAILED),
            VmIs::InDoubt => ("in-doubt", IN_DOUBT),
            VmIs::RanThenDied => ("ran-then-died", IN_DOUBT),
            VmIs::Gone => ("gone", FAILED),
        };
        let mut text = escaped(error);
        if let VmIs::InDoubt | VmIs::RanThenDied = error.vm {
            text.push_str("\n  `dunlin resolve` queries the destination and settles the session");
        }
        Self {
            at_fault: error.at_fault().to_string(),
            ..Self::new(error.code(), vm, text, code)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use dunlin_proto::text::is_harmful;

    use super::*;

    #[test]
    fn i7_a_peers_text_neither_controls_a_terminal_nor_breaks_a_line() {
        let text = "\u{1b}]0;x\u{7}\u{9b}2J\r\n{\"event\":\"moved\"}\u{202e}\u{2028}\u{7f}\"\\";
        let line = Line::Rejected { text: text.into() };
        let json = line.to_json();
        assert!(!json.contains(is_harmful), "{json:?}");
        assert_eq!(json.lines().count(), 1);
        let back: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(back["text"], text);

        let error = anyhow::Error::msg(text).context(text);
        let failed = escaped(error.as_ref());
        let [first, because] = failed.lines().collect::<Vec<_>>()[..] else {
            panic!("{failed}")
        };
        for line in [first, because] {
            assert!(line.contains(r"\u{1b}]0;x\u{7}\u{9b}2J\r\n{"), "{line}");
            assert!(!line.contains(is_harmful), "{line:?}");
        }
    }
}
