//! `dunlin demo`: moves a real VM between two processes of this host.
//!
//! The two processes are `dunlin vm run` and `dunlin vm receive`, as on two hosts, with
//! certificates made for this run. The guest checks every page that it visits, before and after the
//! move. Both processes digest their memory outside the downtime, and the demo compares the digests
//! (docs/decisions/0017-the-demos-check.md). Without KVM the guest consists of threads of a
//! process, and the demo reports that.

mod evacuate;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use dunlin::engine::source::LaneSecurity;
use dunlin::engine::vmm::FaultCode;
use dunlin_microvm::GuestKind;

use crate::code::FAILED;
use crate::display::Display;
use crate::line::{FailedLine, Line, MovedLine};
use crate::options::{GUESTS, LaneCount, MigrateFlags, SecurityName, named, parse_bytes};
use crate::process::{Pair, Scratch};
use crate::progress::Waiting;
use crate::vm::request::ANSWER_LIMIT;
use crate::vm::status;

/// Run time of the guest at the source before the move, and at the destination afterwards.
const RUNS_FOR: Duration = Duration::from_millis(1500);

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Kind of guest [default: kvm, or process if /dev/kvm is missing].
    #[arg(long, value_parser = named(GUESTS))]
    guest: Option<GuestKind>,
    /// The guest's memory [default: 1G, or 256M for each guest with --evacuate].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Move N guests at once, 1 to 16, as if a host were emptied: all of them arrive in one process.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    evacuate: Option<u16>,
    /// Number of data lanes, 1 to 128; `auto` takes one for each CPU, from 2 to 8.
    #[arg(long, value_name = "N|auto", default_value = "auto")]
    lanes: LaneCount,
    /// Security of the data lanes.
    #[arg(long, value_enum, default_value_t)]
    security: SecurityName,
    /// Pages that the guest writes per second.
    #[arg(long, value_name = "PAGES_PER_S", default_value_t = 20_000)]
    dirty_rate: u64,
    /// Print one JSON object per line; the last one is the demo's result.
    #[arg(long)]
    json: bool,
}

impl Demo {
    pub(crate) fn run(&self) -> Result<i32> {
        if let SecurityName::Ipsec = self.security {
            bail!(
                "the demo moves a guest within this host, and packets from a host to itself bypass IPsec \
                 (at fault: configuration): use tls or plain"
            );
        }
        let mut display = Display::new(self.json);
        let (guest, notice) = choose(self.guest, kvm())?;
        if let Some(text) = notice {
            display.show(&Line::Warning { text });
        }
        let scratch = Scratch::with_identities("demo")?;
        if let Some(count) = self.evacuate {
            return self.evacuate(count, guest, &scratch);
        }
        if !self.json {
            let what = match guest {
                GuestKind::Kvm => "on KVM",
                GuestKind::Process => "(threads of a process)",
            };
            display.say(&format!(
                "a guest of {} MiB {what} writes a hot set of its pages, {} per second; it moves \
                 over {} {} lanes",
                self.memory() >> 20,
                self.dirty_rate,
                self.lanes.resolve(None),
                LaneSecurity::from(self.security),
            ));
        }
        let waiting = Waiting::new(
            self.json,
            "the guest starts, and runs at the source for a while",
        );
        let mut pair = self.start(guest, &scratch)?;
        std::thread::sleep(RUNS_FOR);
        drop(waiting);
        let flags = MigrateFlags {
            lanes: self.lanes,
            security: self.security,
            digests: true,
            ..pair.flags()
        };
        let mut show = |line: &Line| match line {
            // Omit the digests, because the demo's result states whether they are equal.
            Line::Moved(moved) => display.show(&Line::Moved(Box::new(MovedLine {
                digests: Vec::new(),
                ..(**moved).clone()
            }))),
            line => display.show(line),
        };
        let moved = match pair.migrate(&flags, &mut show)? {
            Ok(moved) => moved,
            Err(failed) => return Ok(failed.code),
        };
        let waiting = Waiting::new(self.json, "comparing the memories; the guest runs on");
        let (control, digests) = pair.destination.wait_for(|line| match line {
            Line::Received {
                control, digests, ..
            } => Some((PathBuf::from(control), digests)),
            _ => None,
        })?;
        compare(&moved.digests, &digests)?;
        let arrived = status(&control, ANSWER_LIMIT)?;
        std::thread::sleep(RUNS_FOR);
        let later = status(&control, ANSWER_LIMIT)?;
        drop(waiting);
        if later.state != "running" || later.pages_checked <= arrived.pages_checked {
            bail!(
                "the guest does not run at the destination: it is {}, and has checked {} pages \
                 ({} at its arrival)",
                later.state,
                later.pages_checked,
                arrived.pages_checked
            );
        }
        let downtime_ms = moved
            .downtime
            .guest_ms
            .context("the guest did not measure its downtime")?;
        if self.json {
            println!(
                "{}",
                serde_json::json!({
                    "guest": name_of(guest),
                    "memory_bytes": later.memory_bytes,
                    "lanes": self.lanes.resolve(None),
                    "security": LaneSecurity::from(self.security).to_string(),
                    "iterations": moved.iterations.len(),
                    "source_pid": pair.source.id(),
                    "destination_pid": pair.destination.id(),
                    "downtime_ms": downtime_ms,
                    "pages_checked_by_guest": later.pages_checked,
                    "digests_equal": true,
                })
            );
        } else {
            display.say(&format!(
                "Digests of both memories are equal: {} blocks of 2 MiB.",
                digests.len()
            ));
            display.say(&format!(
                "The guest runs at the destination: it has checked {} pages, {} of them since it \
                 arrived, and found every one correct.",
                later.pages_checked,
                later.pages_checked - arrived.pages_checked
            ));
        }
        Ok(0)
    }

    fn start(&self, guest: GuestKind, scratch: &Scratch) -> Result<Pair> {
        let run = self.run_flags(guest);
        let run: Vec<&str> = run.iter().map(String::as_str).collect();
        Pair::start(scratch, &run, &self.receive_flags())
    }

    /// The memory of a guest.
    fn memory(&self) -> u64 {
        let of_several = self.evacuate.map(|_| 256 << 20);
        self.memory.or(of_several).unwrap_or(1 << 30)
    }

    /// Flags of `vm run`.
    fn run_flags(&self, guest: GuestKind) -> Vec<String> {
        let (memory, rate) = (self.memory().to_string(), self.dirty_rate.to_string());
        let run = ["--workload", "hot-set", "--guest", name_of(guest)];
        let sizes = ["--memory", &memory, "--dirty-rate", &rate];
        run.into_iter().chain(sizes).map(str::to_owned).collect()
    }

    /// Flags of `vm receive`.
    fn receive_flags(&self) -> Vec<&'static str> {
        match self.security {
            SecurityName::Plain => vec!["--digests", "--allow-plain"],
            _ => vec!["--digests"],
        }
    }
}

fn name_of(guest: GuestKind) -> &'static str {
    match guest {
        GuestKind::Kvm => "kvm",
        GuestKind::Process => "process",
    }
}

/// Compares digests of both memories, one for each 2 MiB.
///
/// # Errors
/// The digests differ, or are missing.
fn compare(source: &[u64], destination: &[u64]) -> Result<()> {
    let blocks = source.len();
    let differ: Vec<usize> = (0..blocks)
        .filter(|&block| source.get(block) != destination.get(block))
        .collect();
    let text = match differ.first() {
        _ if blocks == 0 || blocks != destination.len() => {
            "the memories were not compared, because a process could not digest its memory".into()
        }
        None => return Ok(()),
        Some(first) => format!(
            "the memory at the destination differs from the source's in {} of {blocks} blocks of 2 \
             MiB; the first is block {first}, counted from 0 without the hole below 4 GiB",
            differ.len()
        ),
    };
    Err(FailedLine::new(FaultCode::VerificationFailed, "", text, FAILED).into())
}

/// Checks that this process may use KVM.
fn kvm() -> io::Result<()> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(drop)
}

/// The kind of guest to run, and a notice if no kind was requested and KVM is not available.
fn choose(asked: Option<GuestKind>, kvm: io::Result<()>) -> Result<(GuestKind, Option<String>)> {
    match (asked, kvm) {
        (Some(GuestKind::Process), _) => Ok((GuestKind::Process, None)),
        (_, Ok(())) => Ok((GuestKind::Kvm, None)),
        (Some(GuestKind::Kvm), Err(error)) => Err(error).context(
            "cannot use /dev/kvm, which a KVM guest needs: load the kvm module, and run as root or \
             in the group kvm; or omit --guest",
        ),
        (None, Err(error)) => {
            let text = format!(
                "cannot open /dev/kvm ({error}): the guest is not a VM but threads that write the \
                 memory of a process"
            );
            Ok((GuestKind::Process, Some(text)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i3_the_demo_fails_unless_all_blocks_are_equal() {
        let fault = |source: &[u64], destination: &[u64]| {
            let error = compare(source, destination).unwrap_err();
            let failed: FailedLine = (&error).into();
            (failed.fault, failed.code)
        };
        let verification_failed = (FaultCode::VerificationFailed.to_string(), FAILED);
        compare(&[1, 2, 3], &[1, 2, 3]).unwrap();
        for (source, destination) in [
            (&[1, 2, 3][..], &[1, 2, 4][..]),
            (&[1, 2], &[1, 2, 3]),
            (&[1, 2], &[]),
            (&[], &[1]),
            (&[], &[]),
        ] {
            assert_eq!(fault(source, destination), verification_failed);
        }
    }

    #[test]
    fn the_demo_uses_kvm_if_available_and_says_otherwise() {
        let no = || Err(io::Error::from(io::ErrorKind::NotFound));
        let kvm = (GuestKind::Kvm, None);
        assert_eq!(choose(None, Ok(())).unwrap(), kvm);
        assert_eq!(choose(Some(GuestKind::Kvm), Ok(())).unwrap(), kvm);
        for found in [Ok(()), no()] {
            let chosen = choose(Some(GuestKind::Process), found).unwrap();
            assert_eq!(chosen, (GuestKind::Process, None));
        }
        let (guest, said) = choose(None, no()).unwrap();
        assert_eq!(guest, GuestKind::Process);
        assert!(said.unwrap().contains("cannot open /dev/kvm"));
        let refused = choose(Some(GuestKind::Kvm), no()).unwrap_err();
        assert!(refused.to_string().contains("load the kvm module"));
    }
}
