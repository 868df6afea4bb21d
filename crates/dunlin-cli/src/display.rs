//! Shows a migration to people, or prints JSON lines. On a terminal, the progress is one line that
//! is rewritten; elsewhere, each step is a new line. A table follows at the end.

use std::io::{IsTerminal, Write};

use crate::line::{IterationLine, Line, MovedLine, ProgressLine};
use crate::output::put;
use crate::text::{clean, count};

pub(crate) const MIB: f64 = (1_u64 << 20) as f64;

/// Output of a migration.
pub(crate) struct Display {
    json: bool,
    terminal: bool,
    /// Whether the last line is progress, which the next line overwrites.
    transient: bool,
}

impl Display {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            terminal: std::io::stdout().is_terminal(),
            transient: false,
        }
    }

    /// Shows one line of a migration.
    pub(crate) fn show(&mut self, line: &Line) {
        if self.json {
            line.print();
            return;
        }
        match line {
            Line::Accepted { peer } => self.say(&format!("destination: {}", clean(peer))),
            Line::Progress(progress) => self.progress(progress),
            Line::Iterated(iteration) => self.say(&iterated(iteration)),
            Line::Throttled { percent: 0 } => self.say("guest no longer throttled"),
            Line::Throttled { percent } => {
                self.say(&format!(
                    "guest dirties memory faster than the link carries it: throttled by {percent} %"
                ));
            }
            Line::Paused => self.say("guest paused"),
            Line::InDoubt { text } => self.say(&format!(
                "in doubt: the guest stays paused here while the destination is queried: {}",
                clean(text)
            )),
            Line::Moved(moved) => self.say(&table(moved)),
            line => {
                if let Some(text) = line.text() {
                    self.say(&text);
                }
            }
        }
    }

    fn progress(&mut self, progress: &ProgressLine) {
        let share: u64 = progress.lanes.iter().map(|(_, bytes)| bytes).sum();
        let lanes: Vec<String> = progress
            .lanes
            .iter()
            .map(|(lane, bytes)| format!("{lane}:{} %", bytes * 100 / share.max(1)))
            .collect();
        let mut text = pace(progress, "  ");
        // Before the end of the first iteration, the dirty rate is unknown.
        if progress.iteration > 1 {
            text.push_str(&format!(
                "  {} pages/s dirtied  predicted downtime {:.0} ms",
                progress.dirty_pages_per_s, progress.predicted_downtime_ms,
            ));
        }
        text.push_str(&format!("  lanes {}", lanes.join(" ")));
        if self.terminal {
            // Wrapping is off for this line, because a wrapped line could not be rewritten. A
            // narrow terminal truncates the line.
            let mut out = std::io::stdout();
            // A closed terminal is not an error.
            let _ = write!(out, "\r\x1b[K\x1b[?7l{text}\x1b[?7h");
            let _ = out.flush();
            self.transient = true;
        } else {
            put(&text);
        }
    }

    pub(crate) fn say(&mut self, text: &str) {
        if self.transient {
            let _ = write!(std::io::stdout(), "\r\x1b[K");
            self.transient = false;
        }
        put(text);
    }
}

/// The iteration, the rate and the remaining bytes, separated by `between`.
pub(crate) fn pace(progress: &ProgressLine, between: &str) -> String {
    format!(
        "iteration {}{between}{:.0} MiB/s{between}{:.0} MiB remain",
        progress.iteration,
        progress.bytes_per_s as f64 / MIB,
        progress.remaining_bytes as f64 / MIB,
    )
}

fn iterated(iteration: &IterationLine) -> String {
    format!(
        "iteration {:>2}: {:>8.1} MiB in {:>7.0} ms, {:>8.1} MiB dirtied meanwhile, predicted \
         downtime {:.0} ms",
        iteration.iteration,
        iteration.wire_bytes as f64 / MIB,
        iteration.duration_ms,
        iteration.dirtied_pages as f64 * 4096.0 / MIB,
        iteration.predicted_downtime_ms,
    )
}

/// The table at the end of a migration.
fn table(moved: &MovedLine) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "  {name:<26}{value}");
    };
    row(
        "iterations",
        format!("{}, the last with the guest paused", moved.iterations.len()),
    );
    row("time", format!("{:.2} s", moved.total_s));
    row(
        "on the wire",
        format!(
            "{:.1} MiB: {:.1} MiB pages, {:.2} MiB headers, {}, {}",
            moved.wire_bytes as f64 / MIB,
            moved.raw_pages as f64 * 4096.0 / MIB,
            moved.header_bytes as f64 / MIB,
            count(moved.lanes.len() as u64, "lane"),
            clean(&moved.security),
        ),
    );
    row(
        "zero pages",
        format!("{} (sent as ranges)", moved.zero_pages),
    );
    for (name, figure, unit) in [
        ("throughput", moved.gib_per_s, "GiB/s"),
        ("CPU, source", moved.source_cpu_s_per_gib, "s/GiB"),
        ("CPU, destination", moved.destination_cpu_s_per_gib, "s/GiB"),
    ] {
        row(name, format!("{figure:.2} {unit}"));
    }
    let downtime = &moved.downtime;
    if let Some(guest) = downtime.guest_ms {
        row("downtime, seen by guest", format!("{guest:.1} ms"));
    }
    let ready = match moved.digests_equal {
        Some(_) => "  ready, with digests",
        None => "  ready",
    };
    for (stage, ms) in [
        ("downtime, seen by source", downtime.total_ms),
        ("  pause", downtime.pause_ms),
        ("  last pages", downtime.last_pages_ms),
        ("  state (meanwhile)", downtime.state_ms),
        (ready, downtime.ready_ms),
        ("  resume", downtime.resume_ms),
    ] {
        row(stage, format!("{ms:.1} ms"));
    }
    match moved.digests_equal {
        Some(true) => row("memory digests", "equal".into()),
        Some(false) => row("memory digests", "DIFFERENT".into()),
        None => {}
    }
    out.truncate(out.trim_end().len());
    format!("moved\n{out}")
}
