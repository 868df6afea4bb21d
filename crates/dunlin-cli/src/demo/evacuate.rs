//! `dunlin demo --evacuate N`: several guests leave one host for another at once.
//!
//! At the source, one process `dunlin vm run` owns all guests. At the destination, one process
//! `dunlin vm receive` receives them through one listener, and then owns them. The checks are those
//! of a demo with one guest.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use dunlin_lane::sync::lock;
use dunlin_microvm::GuestKind;
use serde_json::json;

use super::flags::{Demo, RUNS_FOR, compare};
use crate::code::{DONE, FAILED};
use crate::display::{MIB, pace};
use crate::line::{FailedLine, Line, MovedLine, print_json};
use crate::options::MigrateFlags;
use crate::output::put;
use crate::process::{Process, Scratch};
use crate::progress::Waiting;
use crate::vm::request::ANSWER_LIMIT;
use crate::vm::{Ended, follow, status};

/// Minimum time between two progress lines of a guest, in the output for people.
const PROGRESS_PAUSE: Duration = Duration::from_secs(1);

/// A guest at the source.
struct Guest {
    name: String,
    control: PathBuf,
}

/// A guest that has arrived.
struct Arrived {
    control: PathBuf,
    digests: Vec<u64>,
}

impl Demo {
    pub(super) fn evacuate(&self, count: u16, guest: GuestKind, scratch: &Scratch) -> Result<i32> {
        if !self.json {
            put(&format!(
                "{count} guests of {} MiB, each of which writes {} pages per second, move from one \
                 host to another at the same time",
                self.memory() >> 20,
                self.dirty_rate
            ));
        }
        let waiting = Waiting::new(self.json, "the guests start, and run for a while");
        let sessions = count.to_string();
        let receive = [&self.receive_flags()[..], &["--sessions", &sessions]].concat();
        let (mut destination, address) = Process::receiving(scratch, &scratch.join("b"), &receive)?;
        let (_source, guests) = self.start_all(count, guest, scratch)?;
        thread::sleep(RUNS_FOR);
        drop(waiting);
        let began = Instant::now();
        let ended = self.move_all(&guests, &address, scratch);
        let total = began.elapsed();
        let (mut moved, mut failed) = (BTreeMap::new(), 0);
        for (guest, ended) in guests.iter().zip(ended) {
            match ended {
                Ok(line) => drop(moved.insert(guest.name.clone(), line)),
                Err(line) => {
                    failed += 1;
                    self.show(&guest.name, &Line::Failed(line));
                }
            }
        }
        let waiting = Waiting::new(self.json, "comparing the memories; the guests run on");
        let arrived = arrivals(&mut destination, moved.len())?;
        let (equal, checked) = self.check(&moved, &arrived)?;
        drop(waiting);
        self.report(&moved, failed, total, equal, checked)
    }

    /// Starts the source, and waits until all guests run.
    fn start_all(
        &self,
        count: u16,
        kind: GuestKind,
        scratch: &Scratch,
    ) -> Result<(Process, Vec<Guest>)> {
        let mut flags = self.run_flags(kind);
        flags.extend(["--vms".to_owned(), count.to_string()]);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let control = scratch.join("a");
        let mut source = Process::running(scratch, &control, "demo", &flags)?;
        for _ in 1..count {
            source.wait_for(|line| matches!(line, Line::Started { .. }).then_some(()))?;
        }
        let guest = |number| {
            let name = format!("demo-{number}");
            let control = control.join(format!("{name}.sock"));
            Guest { name, control }
        };
        Ok((source, (1..=count).map(guest).collect()))
    }

    /// Moves all guests at once; returns how each move ended.
    fn move_all(&self, guests: &[Guest], address: &str, scratch: &Scratch) -> Vec<Ended> {
        let flags = MigrateFlags {
            lanes: self.lanes,
            security: self.security,
            digests: true,
            ..MigrateFlags::new(address.to_owned())
        };
        let common = scratch.source();
        let begin = |guest: &Guest| -> Result<Ended> {
            let last = Mutex::new(None);
            let mut show = |line: &Line| {
                if !matches!(line, Line::Progress(_)) || self.json || is_due(&last) {
                    self.show(&guest.name, line);
                }
            };
            follow(&guest.control, &common, &flags, None, None, &mut show)
        };
        let begin = &begin;
        thread::scope(|scope| {
            let threads: Vec<_> = guests
                .iter()
                .map(|guest| scope.spawn(move || begin(guest)))
                .collect();
            let ended = threads.into_iter().map(|thread| match thread.join() {
                Ok(Ok(ended)) => ended,
                Ok(Err(error)) => Err(FailedLine::from(&error)),
                Err(_) => Err(FailedLine::from(&anyhow!("the thread of a guest panicked"))),
            });
            ended.collect()
        })
    }

    /// Shows a line about one guest.
    fn show(&self, name: &str, line: &Line) {
        if self.json {
            let shown = match line {
                // Omit the digests, because the result states whether they are equal.
                Line::Moved(moved) => Line::Moved(Box::new(MovedLine {
                    digests: Vec::new(),
                    ..(**moved).clone()
                })),
                line => line.clone(),
            };
            return shown.say_of(Some(name), true);
        }
        put(&match line {
            Line::Progress(progress) => format!("{name}: {}", pace(progress, "  ")),
            Line::Iterated(one) => format!(
                "{name}: iteration {}: {:.1} MiB in {:.0} ms",
                one.iteration,
                one.wire_bytes as f64 / MIB,
                one.duration_ms
            ),
            Line::Moved(moved) => format!(
                "{name}: moved in {:.2} s, downtime {:.1} ms",
                moved.total_s, moved.downtime.total_ms
            ),
            line => return line.say_of(Some(name), false),
        });
    }

    /// For each guest that moved, compares its memory at the source with its memory at the
    /// destination, and checks that the guest runs on. Returns whether the memories of every guest
    /// are equal, and the number of pages that the guests have checked.
    fn check(
        &self,
        moved: &BTreeMap<String, Box<MovedLine>>,
        arrived: &BTreeMap<String, Arrived>,
    ) -> Result<(bool, u64)> {
        let mut equal = true;
        let mut before = BTreeMap::new();
        for (name, guest) in arrived {
            let digests = moved.get(name).map_or(&[][..], |line| &line.digests);
            if let Err(error) = compare(digests, &guest.digests) {
                equal = false;
                self.show(name, &Line::Failed((&error).into()));
            }
            before.insert(name, status(&guest.control, ANSWER_LIMIT)?.pages_checked);
        }
        thread::sleep(RUNS_FOR);
        let mut checked = 0;
        for (name, guest) in arrived {
            let later = status(&guest.control, ANSWER_LIMIT)?;
            if later.state != "running" || before.get(name) >= Some(&later.pages_checked) {
                return Err(anyhow!(
                    "{name} does not run at the destination: it is {}, and has checked {} pages",
                    later.state,
                    later.pages_checked
                ));
            }
            checked += later.pages_checked;
        }
        Ok((equal, checked))
    }

    fn report(
        &self,
        moved: &BTreeMap<String, Box<MovedLine>>,
        failed: usize,
        total: Duration,
        equal: bool,
        checked: u64,
    ) -> Result<i32> {
        let downtimes = moved.values().map(|line| {
            let downtime = &line.downtime;
            downtime.guest_ms.unwrap_or(downtime.total_ms)
        });
        let longest = downtimes.fold(0.0, f64::max);
        let total_s = total.as_secs_f64();
        if self.json {
            print_json(&json!({
                "vms": moved.len() + failed,
                "moved": moved.len(),
                "failed": failed,
                "total_s": total_s,
                "downtime_ms_max": longest,
                "digests_equal": equal,
                "pages_checked_by_guests": checked,
            }));
        } else {
            put(&format!(
                "{} of {} guests moved in {total_s:.2} s; the longest downtime was {longest:.1} ms.",
                moved.len(),
                moved.len() + failed
            ));
            if equal {
                put(&format!(
                    "The guests run at the destination, and the digests of their memories are equal. \
                     The guests have checked {checked} pages, and found every one correct."
                ));
            }
        }
        Ok(if equal && failed == 0 { DONE } else { FAILED })
    }
}

/// Whether a line of progress is due. `last` is the time of the last line that was due.
fn is_due(last: &Mutex<Option<Instant>>) -> bool {
    let mut last = lock(last);
    let due = last.is_none_or(|last| last.elapsed() >= PROGRESS_PAUSE);
    if due {
        *last = Some(Instant::now());
    }
    due
}

/// Waits until `count` guests have arrived.
fn arrivals(destination: &mut Process, count: usize) -> Result<BTreeMap<String, Arrived>> {
    let mut arrived = BTreeMap::new();
    while arrived.len() < count {
        let (name, guest) = destination.wait_for(|line| match line {
            Line::Received {
                name,
                control,
                digests,
                ..
            } => {
                let control = PathBuf::from(control);
                Some((name, Arrived { control, digests }))
            }
            _ => None,
        })?;
        arrived.insert(name, guest);
    }
    Ok(arrived)
}
