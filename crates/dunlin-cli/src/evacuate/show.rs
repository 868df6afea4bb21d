//! What an evacuation prints: events as lines or JSON, a bar for each VM on a terminal, and the
//! report.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use super::job::Job;
use super::plan::{Destination, Plan};
use super::record::{Entry, Outcome};
use super::table::{mib, table};
use crate::line::print_json;
use crate::output::put;
use crate::text::{clean, count};

/// Time between two lines about a VM, for people and for programs.
const LINES: Duration = Duration::from_secs(5);
const OBJECTS: Duration = Duration::from_secs(1);

const MIB: f64 = (1 << 20) as f64;

pub(super) struct Show {
    json: bool,
    /// The bars of the VMs, if standard error is a terminal.
    bars: Option<MultiProgress>,
    moving: BTreeMap<usize, Progress>,
}

struct Progress {
    bar: Option<ProgressBar>,
    shown: Instant,
}

impl Show {
    pub(super) fn new(json: bool) -> Self {
        let is_terminal = !json && stderr().is_terminal();
        Self {
            json,
            bars: is_terminal.then(MultiProgress::new),
            moving: BTreeMap::new(),
        }
    }

    /// Prints an event. `text` must already be safe for a terminal.
    pub(super) fn event(&self, object: &Value, text: &str) {
        if self.json {
            print_json(object);
            return;
        }
        match &self.bars {
            Some(bars) => bars.suspend(|| put(text)),
            None => put(text),
        }
    }

    pub(super) fn warn(&self, code: &str, text: &str) {
        let object = json!({ "event": "warning", "code": code, "text": text });
        self.event(&object, &format!("warning: {}", clean(text)));
    }

    pub(super) fn plan(&self, plan: &Plan, destinations: &[Destination]) {
        let moves = plan.moves.iter().map(|one| {
            json!({
                "vm": one.vm.name,
                "uuid": one.vm.uuid,
                "memory_bytes": one.vm.memory,
                "to": destinations[one.to].uri,
                "under_way": one.vm.bound.is_some(),
            })
        });
        let stays = plan.stays.iter().map(|(vm, reason)| {
            json!({
                "vm": vm.name,
                "uuid": vm.uuid,
                "memory_bytes": vm.memory,
                "reason": reason,
            })
        });
        let hosts = destinations
            .iter()
            .map(|one| json!({ "uri": one.uri, "free_bytes": one.free }));
        let object = json!({
            "event": "plan",
            "moves": moves.collect::<Vec<_>>(),
            "stays": stays.collect::<Vec<_>>(),
            "destinations": hosts.collect::<Vec<_>>(),
        });
        let mut rows = vec![["", "VM", "MEMORY", "TO"].map(str::to_owned).to_vec()];
        for (at, one) in plan.moves.iter().enumerate() {
            let mut to = clean(&destinations[one.to].uri);
            if one.vm.bound.is_some() {
                to.push_str(", already under way");
            }
            let place = (at + 1).to_string();
            rows.push(vec![place, clean(&one.vm.name), mib(one.vm.memory), to]);
        }
        for (vm, reason) in &plan.stays {
            let stays = format!("stays: {}", clean(reason));
            rows.push(vec!["-".into(), clean(&vm.name), mib(vm.memory), stays]);
        }
        let hosts = destinations.iter().map(|one| {
            let room = mib(one.free);
            format!("\n{}: {room} for VMs", clean(&one.uri))
        });
        self.event(&object, &(table(&rows) + &hosts.collect::<String>()));
    }

    pub(super) fn started(&mut self, at: usize, entry: &Entry, is_adopted: bool) {
        let object = json!({
            "event": "started",
            "vm": entry.name,
            "uuid": entry.uuid,
            "to": entry.to,
            "under_way": is_adopted,
        });
        let (name, to) = (clean(&entry.name), clean(&entry.to));
        let how = match is_adopted {
            true => "is already moving",
            false => "moves",
        };
        self.event(&object, &format!("{name} {how} to {to}"));
        let bar = self.bars.as_ref().map(|bars| bars.add(bar(&name)));
        let shown = Instant::now();
        self.moving.insert(at, Progress { bar, shown });
    }

    pub(super) fn progress(&mut self, at: usize, name: &str, uuid: &str, job: &Job) {
        let Some(progress) = self.moving.get_mut(&at) else {
            return;
        };
        let of = |field| job.number(field).unwrap_or(0);
        let (total, left) = (of("data_total"), of("data_remaining"));
        // libvirt has no figures before the first pass.
        if total == 0 {
            return;
        }
        let text = format!(
            "pass {}, {:.0} MiB/s, {} left",
            of("memory_iteration").max(1),
            of("memory_bps") as f64 / MIB,
            mib(left)
        );
        if let Some(bar) = &progress.bar {
            bar.set_length(total);
            bar.set_position(total.saturating_sub(left));
            bar.set_message(text);
            return;
        }
        let between = if self.json { OBJECTS } else { LINES };
        if progress.shown.elapsed() < between {
            return;
        }
        progress.shown = Instant::now();
        let object = json!({
            "event": "progress",
            "vm": name,
            "uuid": uuid,
            "total_bytes": total,
            "remaining_bytes": left,
            "sent_bytes": job.bytes(),
            "bytes_per_s": of("memory_bps"),
            "iteration": of("memory_iteration").max(1),
            "dirty_pages_per_s": of("memory_dirty_rate"),
        });
        self.event(&object, &format!("{}: {text}", clean(name)));
    }

    pub(super) fn switchover(&self, name: &str, uuid: &str) {
        let object = json!({ "event": "switchover", "vm": name, "uuid": uuid });
        self.event(&object, &format!("{}: switchover", clean(name)));
    }

    /// Prints the result of a VM. `at` is the VM's number, if its migration was started.
    pub(super) fn ended(&mut self, at: Option<usize>, entry: &Entry) {
        let progress = at.and_then(|at| self.moving.remove(&at));
        if let Some(Progress { bar: Some(bar), .. }) = progress {
            bar.finish_and_clear();
        }
        let mut object = object(entry);
        object["event"] = "ended".into();
        let mut text = format!("{}: {}", clean(&entry.name), name(entry.result));
        if !entry.reason.is_empty() {
            text.push_str(&format!(": {}", clean(&entry.reason)));
        }
        self.event(&object, &text);
    }

    pub(super) fn report(&self, entries: &[Entry], total: Duration) {
        let number = |outcome| entries.iter().filter(|one| one.result == outcome).count();
        let [moved, doubt, off] = [Outcome::Moved, Outcome::Doubt, Outcome::Off].map(number);
        let report = json!({
            "event": "report",
            "vms": entries.len(),
            "moved": moved,
            "failed": entries.len() - moved - doubt - off,
            "doubt": doubt,
            "total_s": total.as_secs_f64(),
            "downtime_ms_max": entries.iter().filter_map(|one| one.downtime_ms).max(),
            "results": entries.iter().map(object).collect::<Vec<_>>(),
        });
        let heading = ["VM", "RESULT", "TIME", "SENT", "DOWNTIME", "TO"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        let mut reasons = String::new();
        for one in entries {
            let figure = |text: Option<String>| text.unwrap_or_else(|| "-".into());
            let result = match one.earlier {
                true => format!("{} earlier", name(one.result)),
                false => name(one.result).to_owned(),
            };
            rows.push(vec![
                clean(&one.name),
                result,
                figure(one.duration_s.map(|seconds| format!("{seconds:.1} s"))),
                figure(one.bytes.map(mib)),
                figure(one.downtime_ms.map(|ms| format!("{ms} ms"))),
                clean(&one.to),
            ]);
            if !one.reason.is_empty() {
                reasons.push_str(&format!("\n{}: {}", clean(&one.name), clean(&one.reason)));
            }
        }
        let mut text = format!(
            "\n{}\n\n{moved} of {} moved",
            table(&rows),
            count(entries.len() as u64, "VM")
        );
        text.push_str(&reasons);
        if doubt > 0 {
            text.push_str(
                "\nA VM in doubt needs an operator: look on both hosts (virsh domstate --reason), and \
                 leave at most one copy running",
            );
        }
        self.event(&report, &text);
    }
}

fn bar(name: &str) -> ProgressBar {
    const TEMPLATE: &str = "{prefix:16!} {bar:24} {msg}";
    let style = ProgressStyle::with_template(TEMPLATE);
    let bar = ProgressBar::new(0).with_prefix(name.to_owned());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Moving => "moving",
        Outcome::Moved => "moved",
        Outcome::Stayed => "stayed",
        Outcome::Cancelled => "cancelled",
        Outcome::NoRoom => "no room",
        Outcome::NotStarted => "not started",
        Outcome::Off => "off",
        Outcome::Doubt => "in doubt",
    }
}

fn object(entry: &Entry) -> Value {
    json!({
        "vm": entry.name,
        "uuid": entry.uuid,
        "to": entry.to,
        "result": entry.result,
        "reason": entry.reason,
        "duration_s": entry.duration_s,
        "sent_bytes": entry.bytes,
        "downtime_ms": entry.downtime_ms,
        "earlier": entry.earlier,
    })
}
