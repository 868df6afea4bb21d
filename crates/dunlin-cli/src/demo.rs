//! `dunlin demo`: a real VM moves between two processes of this host.
//!
//! The two are the same `dunlin vm run` and `dunlin vm receive` that two hosts
//! would use, with certificates made for the occasion. The guest checks every
//! page that it visits, before and after. Without KVM the guest is one of
//! threads of a process, and the demo says so.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::display::Display;
use crate::identity::{Common, Reading, Records};
use crate::line::{Line, MovedLine, StatusLine};
use crate::options::{GuestName, MigrateFlags, SecurityName, parse_bytes, parse_lanes};
use crate::pki;
use crate::process::{Process, Scratch};
use crate::vm::{Ended, follow, status};

/// How long the guest runs at the source before it moves, and at the
/// destination before the demo ends.
const RUNS_FOR: Duration = Duration::from_millis(1500);

#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// What moves [default: kvm, or process where there is no /dev/kvm].
    #[arg(long, value_enum)]
    guest: Option<GuestName>,
    /// The guest's memory.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "1G")]
    memory: u64,
    /// Data lanes, 1 to 128.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = parse_lanes())]
    lanes: u16,
    /// How the data lanes are secured.
    #[arg(long, value_enum, default_value_t)]
    security: SecurityName,
    /// Pages that the guest writes per second.
    #[arg(long, value_name = "PAGES_PER_S", default_value_t = 20_000)]
    dirty_rate: u64,
    /// One JSON object a line; the last one is the demo's result.
    #[arg(long)]
    json: bool,
}

impl Demo {
    pub(crate) fn run(&self) -> Result<i32> {
        if let SecurityName::Ipsec = self.security {
            bail!(
                "the demo moves a guest within this host, and what a host sends to itself passes no \
                 IPsec (at fault: configuration): use tls or plain"
            );
        }
        let mut display = Display::new(self.json);
        let (guest, notice) = choose(self.guest, kvm())?;
        if let Some(text) = notice {
            display.show(&Line::Warning { text });
        }
        let scratch = Scratch::new("demo")?;
        let (ca, here, there) = (scratch.join("ca"), scratch.join("a"), scratch.join("b"));
        pki::init(&ca, 1)?;
        pki::issue(&ca, &["source.demo".into()], 1, &here)?;
        pki::issue(&ca, &["destination.demo".into()], 1, &there)?;

        if !self.json {
            let what = match guest {
                GuestName::Kvm => "on KVM",
                GuestName::Process => "(threads of a process)",
            };
            display.say(&format!(
                "a guest of {} MiB {what} goes over a hot set of its pages, {} a second; it moves \
                 over {} {} lanes",
                self.memory >> 20,
                self.dirty_rate,
                self.lanes,
                self.security_name(),
            ));
        }
        let mut destination = self.start_destination(&scratch, &there)?;
        let address = destination.wait_for(|line| match line {
            Line::Listening { address } => Some(address),
            _ => None,
        })?;
        let source_control = scratch.join("a-control");
        let mut source = self.start_source(guest, &scratch)?;
        source.wait_for(|line| matches!(line, Line::Started { .. }).then_some(()))?;
        std::thread::sleep(RUNS_FOR);

        let flags = MigrateFlags {
            lanes: self.lanes,
            security: self.security,
            verify: true,
            ..MigrateFlags::new(address)
        };
        let ended = follow(
            &source_control.join("demo.sock"),
            &Common {
                identity: here,
                peers: vec!["destination.demo".into()],
                reading: Reading::default(),
                records: Records::default(),
            },
            &flags,
            None,
            &mut display,
        )?;
        let moved = match ended {
            Ended::Moved(moved) => moved,
            Ended::Failed(failed) => return Ok(failed.code),
        };
        destination.wait_for(|line| matches!(line, Line::Received { .. }).then_some(()))?;
        let arrived = status(&scratch.join("b-control").join("demo.sock"))?;
        std::thread::sleep(RUNS_FOR);
        let later = status(&scratch.join("b-control").join("demo.sock"))?;
        self.conclude(
            &mut display,
            guest,
            &moved,
            [&source, &destination],
            &arrived,
            &later,
        )
    }

    /// Shows that the guest runs on, or fails.
    fn conclude(
        &self,
        display: &mut Display,
        guest: GuestName,
        moved: &MovedLine,
        [source, destination]: [&Process; 2],
        arrived: &StatusLine,
        later: &StatusLine,
    ) -> Result<i32> {
        if later.state != "running" || later.pages_checked <= arrived.pages_checked {
            bail!(
                "the guest does not run at the destination: it is {}, and has checked {} pages, {} \
                 at its arrival",
                later.state,
                later.pages_checked,
                arrived.pages_checked
            );
        }
        if moved.digests_equal != Some(true) {
            bail!("the two memories were not compared");
        }
        let downtime_ms = moved
            .downtime
            .guest_ms
            .context("the guest did not see its downtime")?;
        if self.json {
            println!(
                "{}",
                serde_json::json!({
                    "guest": guest.name(),
                    "memory_bytes": later.memory_bytes,
                    "lanes": self.lanes,
                    "security": self.security_name(),
                    "iterations": moved.iterations.len(),
                    "source_pid": source.id(),
                    "destination_pid": destination.id(),
                    "downtime_ms": downtime_ms,
                    "pages_checked_by_guest": later.pages_checked,
                    "digests_equal": true,
                })
            );
        } else {
            display.say(&format!(
                "The guest runs on at the destination: it has checked {} pages, {} of them since it \
                 arrived, and found every one right.",
                later.pages_checked,
                later.pages_checked - arrived.pages_checked
            ));
        }
        Ok(0)
    }

    fn start_source(&self, guest: GuestName, scratch: &Scratch) -> Result<Process> {
        let mut command = Process::command()?;
        command
            .args([
                "vm",
                "run",
                "--name",
                "demo",
                "--json",
                "--workload",
                "hot-set",
            ])
            .args(["--guest", guest.name()])
            .args(["--memory", &self.memory.to_string()])
            .args(["--dirty-rate", &self.dirty_rate.to_string()])
            .arg("--control")
            .arg(scratch.join("a-control"));
        Process::start_owner(command, scratch)
    }

    fn start_destination(&self, scratch: &Scratch, identity: &Path) -> Result<Process> {
        let mut command = Process::command()?;
        command
            .args(["vm", "receive", "--listen", "127.0.0.1:0", "--json"])
            .args(["--peer", "source.demo", "--identity"])
            .arg(identity)
            .arg("--control")
            .arg(scratch.join("b-control"));
        if matches!(self.security, SecurityName::Plain) {
            command.arg("--allow-plain");
        }
        Process::start_owner(command, scratch)
    }

    fn security_name(&self) -> &'static str {
        match self.security {
            SecurityName::Tls => "tls",
            SecurityName::Plain => "plain",
            SecurityName::Ipsec => "ipsec",
        }
    }
}

/// Whether this process may use KVM.
fn kvm() -> io::Result<()> {
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(drop)
}

/// The guest to show, and what to say where it is not the one that was to be
/// expected.
fn choose(asked: Option<GuestName>, kvm: io::Result<()>) -> Result<(GuestName, Option<String>)> {
    match (asked, kvm) {
        (Some(GuestName::Process), _) => Ok((GuestName::Process, None)),
        (_, Ok(())) => Ok((GuestName::Kvm, None)),
        (Some(GuestName::Kvm), Err(error)) => Err(error).context(
            "a KVM guest needs /dev/kvm: load the kvm module, and run as root or in the group kvm; \
             or leave --guest out",
        ),
        (None, Err(error)) => {
            let text = format!(
                "/dev/kvm cannot be opened ({error}), so the guest is no VM but threads that write \
                 to the memory of a process"
            );
            Ok((GuestName::Process, Some(text)))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_shows_kvm_where_it_can_and_says_where_it_cannot() {
        let no = || Err(io::Error::from(io::ErrorKind::NotFound));
        let kvm = (GuestName::Kvm, None);
        assert_eq!(choose(None, Ok(())).unwrap(), kvm);
        assert_eq!(choose(Some(GuestName::Kvm), Ok(())).unwrap(), kvm);
        for found in [Ok(()), no()] {
            let chosen = choose(Some(GuestName::Process), found).unwrap();
            assert_eq!(chosen, (GuestName::Process, None));
        }
        let (guest, said) = choose(None, no()).unwrap();
        assert_eq!(guest, GuestName::Process);
        assert!(said.unwrap().contains("/dev/kvm cannot be opened"));
        let refused = choose(Some(GuestName::Kvm), no()).unwrap_err();
        assert!(refused.to_string().contains("load the kvm module"));
    }
}
