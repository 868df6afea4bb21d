//! The checks of the invariants.

use std::any::Any;
use std::fmt;

use dunlin_proto::control::Verdict;
use dunlin_proto::journal::{DestinationRecord, SourceRecord};
use dunlin_proto::switchover::{Destination, Source};

use crate::network::Packet;
use crate::plan::MS;
use crate::tally::{End, Passage};
use crate::world::World;

/// A violation of an invariant.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The violated invariant, or the kind of another failure.
    ///
    /// - Of a migration: I1 to I5, *liveness*.
    /// - Of a tunnel: I8, *liveness*, *order*, *stream*, *abort*, *lanes*.
    /// - Of both: *accused* (an honest peer was accused), *machine* (a state machine did not accept
    ///   an event), *panic*, *sim* (an error of the simulator itself).
    pub invariant: &'static str,
    /// What happened.
    pub text: String,
    /// Virtual time in nanoseconds.
    pub at_ns: u64,
}

impl Violation {
    pub(crate) fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Self {
            invariant: "panic",
            text: text.unwrap_or_default(),
            at_ns: 0,
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.at_ns as f64 / MS as f64;
        write!(formatter, "{} at {ms:.3} ms: {}", self.invariant, self.text)
    }
}

/// What the checks record between steps.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// The last migration attempt in which the VM was run at the destination.
    pub(crate) ran: Option<u32>,
    /// Whether the source had to inquire before it released the VM.
    pub(crate) doubted: bool,
    /// For each page: the iteration in which this attempt last put the page into a chunk, and how
    /// many times the dirty log had been read by then.
    pub(crate) cuts: Vec<(u32, u32)>,
}

impl World<'_> {
    pub(crate) fn violate(&mut self, invariant: &'static str, text: String) {
        self.say(|| format!("VIOLATION of {invariant}: {text}"));
        let at_ns = self.now_ns;
        self.failure.get_or_insert(Violation {
            invariant,
            text,
            at_ns,
        });
    }

    /// Checks the invariants that hold between any two steps.
    pub(crate) fn check_step(&mut self) {
        let here = self.source.guest.as_ref();
        let runs_here = here.is_some_and(|guest| guest.running);
        let session = self.destination.session.as_ref();
        let there = session.and_then(|session| session.copy.as_ref());
        let runs_there = there.is_some_and(|copy| copy.running);
        let lives_there = there.is_some_and(|copy| copy.lives);
        if runs_here && runs_there {
            self.violate("I1", "the VM runs on both sides".into());
            return;
        }
        let recorded = self.destination.journal.durable;
        if let Some(session) = session
            && runs_there
            && session.machine != Destination::Released
            && recorded != Some((session.attempt, DestinationRecord::Running))
        {
            let text =
                format!("the VM runs at the destination, but the journal there says {recorded:?}");
            self.violate("I2", text);
            return;
        }
        let died = self.destination.died.is_some();
        match here {
            None if !self.source.killed && !lives_there && !died && !self.given_up() => {
                self.violate("I2", "neither side has the VM".into());
            }
            Some(guest) if !guest.running && !guest.paused_by_owner => {
                let record = self.source.journal.durable.map(|(_, record)| record);
                let resolvable = matches!(
                    record,
                    Some(
                        SourceRecord::Committing
                            | SourceRecord::RanThenDied
                            | SourceRecord::RunHere
                            | SourceRecord::GivenUp
                            | SourceRecord::Released
                    )
                );
                if !resolvable {
                    let text =
                        format!("the guest is paused, but the source's journal says {record:?}");
                    self.violate("I2", text);
                }
            }
            _ => {}
        }
    }

    fn given_up(&self) -> bool {
        let record = self.source.journal.durable.map(|(_, record)| record);
        record == Some(SourceRecord::GivenUp)
    }

    /// Checks pages that have been put into a chunk of a lane.
    ///
    /// A page may be assigned to chunks twice in an iteration if a lost lane's pages are resent,
    /// but the dirty log must not be read in between. That reading would clear the page's dirty
    /// bit, and no mark would order the two versions of the page.
    pub(crate) fn check_cut(&mut self, iteration: u32, readings: u32, pages: &[u32]) {
        for &page in pages {
            let cut = (iteration, readings);
            let before = std::mem::replace(&mut self.marks.cuts[page as usize], cut);
            if before.0 == iteration && before.1 != readings {
                let text = format!(
                    "page {page} is cut twice in iteration {iteration}, and the dirty log was \
                     read in between"
                );
                self.violate("I4", text);
                return;
            }
        }
    }

    /// Checks a write of a page, just before a lane's thread executes it.
    ///
    /// Two chunks may contain the same page. If the dirty log was read after the first chunk was
    /// built and before the second chunk was built, the second chunk must be written last: that
    /// reading cleared the page's dirty bit, so nothing else would send the newer version. If the
    /// log was not read in between, the chunks may be written in any order: a page that the guest
    /// has written in between is still in the log and will be sent again. A lane may therefore read
    /// its pages late, and a lost lane's pages may be sent twice in an iteration.
    pub(crate) fn check_write(&mut self, lane: u16, page: u32, readings: u32) {
        let Some(session) = &self.destination.session else {
            return;
        };
        let there = session
            .copy
            .as_ref()
            .map_or(0, |copy| copy.writers[page as usize]);
        if session.fenced.contains(&lane) {
            self.violate(
                "I4",
                format!("lane {lane} writes page {page} after its fence"),
            );
        } else if there > readings {
            let text = format!(
                "lane {lane} writes page {page} as of reading {readings} of the dirty log over \
                 the page as of reading {there}"
            );
            self.violate("I4", text);
        } else if matches!(
            session.machine,
            Destination::Loading
                | Destination::Prepared
                | Destination::Acquiring { .. }
                | Destination::Recording { .. }
                | Destination::Starting
                | Destination::Running
                | Destination::Released
        ) {
            let text = format!("lane {lane} writes page {page} after everything had arrived");
            self.violate("I4", text);
        }
    }

    /// Counts a chunk that has arrived after its lane's fence.
    pub(crate) fn late_chunk(&mut self, lane: u16) {
        let session = self.destination.session.as_ref();
        if session.is_some_and(|session| session.fenced.contains(&lane)) {
            self.pass(Passage::HeldBeyondFence);
        }
    }

    /// Checks that the destination's memory equals the memory of the paused guest at the source,
    /// just before *ready* is sent.
    pub(crate) fn check_ready(&mut self) {
        let Some(session) = &self.destination.session else {
            return;
        };
        let differs = match (&self.source.paused, &session.copy) {
            (Some((attempt, paused)), Some(copy)) if *attempt == session.attempt => {
                let mut pages = paused.iter().zip(&copy.pages);
                let page = pages.position(|(here, there)| here != there);
                page.map(|page| format!("page {page} differs when *ready* is sent"))
            }
            _ => Some("*ready* is sent without a copy of the paused memory".into()),
        };
        if let Some(how) = differs {
            self.violate("I3", how);
        }
    }

    /// Checks the outcome of the attempt, just before the destination reports it.
    pub(crate) fn check_tell(&mut self, verdict: Verdict) {
        let recorded = self.destination.journal.durable;
        let Some(session) = &self.destination.session else {
            return;
        };
        let wanted = match verdict {
            Verdict::Running | Verdict::RanThenDied => DestinationRecord::Running,
            Verdict::Aborted => DestinationRecord::Aborted,
            Verdict::NoRecord => return,
        };
        let lives = session.copy.as_ref().is_some_and(|copy| copy.lives);
        let forgotten = session.machine == Destination::Released;
        if recorded != Some((session.attempt, wanted)) && !forgotten {
            let text =
                format!("the destination reports {verdict:?}, but its journal says {recorded:?}");
            self.violate("I2", text);
        } else if verdict == Verdict::Aborted && self.destination.holds {
            let text = "the destination reports *aborted* and still holds disks".into();
            self.violate("I1", text);
        } else if verdict == Verdict::Running && !lives {
            self.violate(
                "I2",
                "the destination reports *running* for a dead VM".into(),
            );
        }
    }

    /// Checks that the guest may run at the source, just before it is resumed there.
    pub(crate) fn check_resume(&mut self) {
        let attempt = self.source.attempt.as_ref();
        let number = attempt.map(|attempt| attempt.number);
        let record = self.source.journal.durable.map(|(_, record)| record);
        if self.destination.holds {
            let text = "the guest is resumed while the destination holds its disks".into();
            self.violate("I1", text);
        } else if number.is_some()
            && self.marks.ran == number
            && record != Some(SourceRecord::RunHere)
        {
            let text =
                "the guest ran at the destination, and no operator decided to resume it".into();
            self.violate("I1", text);
        }
    }

    /// Checks that another copy lives or has lived, or that the operator has given up the VM, just
    /// before the source destroys its copy.
    pub(crate) fn check_destroy(&mut self) {
        let Some(attempt) = &self.source.attempt else {
            return;
        };
        let (number, machine) = (attempt.number, attempt.machine);
        let session = self.destination.session.as_ref();
        let lives = session.is_some_and(|session| {
            session.attempt == number && session.copy.as_ref().is_some_and(|copy| copy.lives)
        });
        // It is allowed that the VM ran and died at the destination. The destination's report
        // *running* was true when the destination sent it.
        let died = self.destination.died == Some(number);
        if machine == Source::Released && !lives && !died && !self.given_up() {
            let text = "the copy at the source is destroyed, and no other copy lives".into();
            self.violate("I2", text);
        }
    }

    /// Checks the source's record, just before the source asks the destination to forget the
    /// session.
    pub(crate) fn check_release(&mut self) {
        let record = self.source.journal.durable.map(|(_, record)| record);
        if record != Some(SourceRecord::Released) {
            let text = format!(
                "the destination may forget the session, but the source's journal says {record:?}"
            );
            self.violate("I2", text);
        }
    }

    /// Checks where the VM is at the end of the run, and records the outcome.
    pub(crate) fn conclude(&mut self) {
        if self.failure.is_some() || self.ends.last() == Some(&End::GivenUp) {
            return;
        }
        let session = self.destination.session.as_ref();
        let there = session.and_then(|session| session.copy.as_ref());
        let lives = there.filter(|copy| copy.lives).map(|copy| copy.running);
        let died = self.destination.died.is_some();
        if self.source.guest.is_some() {
            if self.ends.last() != Some(&End::TakenBack) {
                self.violate(
                    "liveness",
                    "the run has ended, and the VM is still at the source".into(),
                );
            }
        } else if let Some(running) = lives {
            if running == self.plan.paused {
                let text =
                    "the guest arrives running, but its owner paused it, or the reverse".into();
                self.violate("I2", text);
            }
            self.ends.push(if self.marks.doubted {
                End::MovedAfterDoubt
            } else {
                End::Moved
            });
        } else if died {
            self.ends.push(End::DiedAtDestination);
        } else if self.source.killed {
            self.ends.push(End::DiedAtSource);
        } else {
            self.violate("I2", "the VM is lost".into());
        }
    }

    /// A packet on a control lane has arrived at `to`.
    pub(crate) fn control_packet(
        &mut self,
        connection: usize,
        to: crate::network::Side,
        packet: Packet,
    ) {
        match to {
            crate::network::Side::Source => self.source_reads(connection, packet),
            crate::network::Side::Destination => self.destination_reads(connection, packet),
        }
    }
}
