//! `dunlin demo`: moves a real VM between two processes of this host.
//!
//! The two processes are `dunlin vm run` and `dunlin vm receive`, as on two hosts, with
//! certificates made for this run. The guest checks every page that it visits, before and after the
//! move. Both processes digest their memory outside the downtime, and the demo compares the digests
//! (docs/decisions/0017-the-demos-check.md). Without KVM the guest consists of threads of a
//! process, and the demo reports that.

mod evacuate;
mod flags;

use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use dunlin::engine::source::LaneSecurity;
use dunlin_microvm::GuestKind;

pub(crate) use self::flags::Demo;
use self::flags::{RUNS_FOR, compare, name_of};
use crate::display::Display;
use crate::line::{Line, MovedLine};
use crate::options::{MigrateFlags, SecurityName};
use crate::process::{Pair, Scratch};
use crate::progress::Waiting;
use crate::vm::request::ANSWER_LIMIT;
use crate::vm::status;

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
