//! What the source's main thread does while it waits for lanes and answers: it starts iterations,
//! checks deadlines and sends *final*.

use dunlin_proto::control::{Final, Message, Section};
use dunlin_proto::limits::PAGE_BYTES;
use dunlin_proto::precopy::{Decision, Pass};
use dunlin_proto::switchover::{Source, SourceEvent};

use crate::PAGES_EACH;
use crate::network::Side;
use crate::plan::{MS, Moment};
use crate::tally::{End, Passage};
use crate::world::World;

/// The minimum duration of each iteration except the last.
const SHORTEST_PASS_NS: u64 = 15 * MS;
/// How long the effects of a fault can last after its end.
const UNDISTURBED_NS: u64 = 10_000 * MS;
/// The part of the switchover's duration that does not depend on the number of pages.
const FIXED_NS: u64 = 20 * MS;

impl World<'_> {
    /// Starts to send memory, because *accept* has arrived.
    pub(super) fn begin_copying(&mut self) {
        let now_ns = self.now_ns;
        self.moment(Moment::Copying);
        if !self.ends.is_empty() {
            self.moment(Moment::Again);
        }
        self.mark_everything();
        self.marks.cuts = vec![(0, 0); self.plan.pages as usize];
        let lanes = self.plan.lanes;
        let attempt = self.attempt();
        attempt.sending.want(lanes);
        attempt.passes.pass_ns = Some(now_ns);
        attempt.passes.began_ns = now_ns;
    }

    /// The time at which the main thread must wake even without an event.
    pub(super) fn source_due_ns(&self) -> Option<u64> {
        let attempt = self.source.attempt.as_ref()?;
        let lanes = self.copies().then(|| attempt.sending.due_ns()).flatten();
        let pass = (attempt.machine == Source::Live && attempt.link.is_up())
            .then_some(attempt.passes.pass_ns)
            .flatten()
            .map(|began_ns| {
                // While pages are pending, a lane's thread wakes the main thread, and only the time
                // limit needs a timer.
                let shortest_ns = began_ns + SHORTEST_PASS_NS;
                if attempt.sending.schedule().pending_pages() == 0 {
                    shortest_ns
                } else {
                    shortest_ns.max(attempt.passes.began_ns + self.plan.time_limit_ns)
                }
            });
        [
            lanes,
            pass,
            attempt.link.due_ns(),
            attempt.closing,
            attempt.answer_ns,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Checks the deadlines. Called when there is no input to process.
    pub(super) fn source_waits(&mut self) {
        let now_ns = self.now_ns;
        self.link_waits();
        let attempt = self.attempt();
        if attempt
            .answer_ns
            .is_some_and(|answer_ns| now_ns >= answer_ns)
        {
            attempt.answer_ns = None;
            self.source_feeds(SourceEvent::ControlLost);
            return;
        }
        if attempt.closing.is_some_and(|until_ns| now_ns >= until_ns)
            && matches!(attempt.machine, Source::Paused | Source::AwaitingReady)
        {
            attempt.closing = None;
            if now_ns > self.disturbed_until_ns + UNDISTURBED_NS {
                let text = "the last pages do not arrive, although no fault is active".into();
                self.violate("liveness", text);
            }
            self.source_feeds(SourceEvent::Failed);
            return;
        }
        if attempt.machine == Source::Live {
            self.may_end_pass();
        }
    }

    fn may_end_pass(&mut self) {
        let now_ns = self.now_ns;
        let time_limit_ns = self.plan.time_limit_ns;
        let dirtied = |world: &mut Self| {
            let log = world.source.guest.as_mut().map(|guest| guest.fetch());
            let schedule = world.attempt().sending.schedule_mut();
            log.map_or(0, |log| schedule.mark_dirty(0, &log))
        };
        let attempt = self.attempt();
        let Some(pass_ns) = attempt.passes.pass_ns else {
            return;
        };
        let since_start_ns = now_ns - attempt.passes.began_ns;
        let cut = attempt.sending.schedule().pending_pages() == 0;
        let began_ns = attempt.passes.began_ns.max(self.disturbed_until_ns);
        if now_ns > began_ns + time_limit_ns + UNDISTURBED_NS {
            self.violate("liveness", "pre-copy does not end".into());
            return;
        }
        let attempt = self.attempt();
        if !attempt.link.is_up()
            || now_ns < pass_ns + SHORTEST_PASS_NS
            || (!cut && since_start_ns < time_limit_ns)
        {
            return;
        }
        let dirtied_pages = dirtied(self);
        let attempt = self.attempt();
        let schedule = attempt.sending.schedule();
        let remaining = schedule.remaining_pages();
        let bytes = |pages: u64| pages * PAGES_EACH * PAGE_BYTES;
        let per_s = u128::from(bytes(attempt.passes.acked_pages)) * 1_000_000_000;
        let pass = Pass {
            since_start_ns,
            bytes_per_s: (per_s / u128::from(since_start_ns.max(1))) as u64,
            remaining_bytes: bytes(remaining),
            dirtied_pages: dirtied_pages * PAGES_EACH,
            fixed_ns: FIXED_NS,
        };
        let decision = attempt.passes.precopy.after_iteration(&pass);
        self.say(|| format!("source: {remaining} pages remain: {decision:?}"));
        match decision {
            Decision::Iterate { throttle } => {
                let attempt = self.attempt();
                attempt.passes.throttle = throttle;
                attempt.passes.pass_ns = Some(now_ns);
                attempt.passes.begins = true;
                // Lanes may ask for work before the next iteration starts.
                self.wake_lanes();
                self.source_wakes(0);
            }
            Decision::SwitchOver => {
                self.wake_lanes();
                self.source_feeds(SourceEvent::Converged);
            }
            Decision::OutOfReach | Decision::GiveUp => {
                self.attempt().end = End::OutOfTime;
                self.source_feeds(SourceEvent::Failed);
            }
        }
        if self.attempt().machine == Source::Recording {
            self.moment(Moment::Converged);
        }
    }

    /// Starts the iteration that was decided.
    pub(super) fn begin_iteration(&mut self) {
        self.attempt().sending.schedule_mut().begin_iteration();
        self.wake_lanes();
    }

    /// Starts the last iteration, because the guest is paused.
    pub(super) fn last_pages(&mut self) {
        let now_ns = self.now_ns;
        let log = self.source.guest.as_mut().map(|guest| guest.fetch());
        let attempt = self.attempt();
        attempt.closing = Some(now_ns + super::READY_LIMIT_NS);
        let schedule = attempt.sending.schedule_mut();
        if let Some(log) = log {
            schedule.mark_dirty(0, &log);
        }
        schedule.begin_iteration();
        attempt.sending.finish(now_ns);
        self.wake_lanes();
    }

    /// Sends *final* when everything else has been sent. Sends it again if a lane is fenced
    /// afterwards.
    pub(super) fn may_be_final(&mut self) {
        let Some(attempt) = &mut self.source.attempt else {
            return;
        };
        let idle = attempt.doing.is_none() && attempt.todo.is_empty();
        if !matches!(attempt.machine, Source::Paused | Source::AwaitingReady)
            || !idle
            || !attempt.sending.complete()
            || !attempt.link.is_up()
        {
            return;
        }
        let (chunks, pages) = attempt.sending.schedule().kept();
        let last = Final {
            chunks,
            iteration: attempt.sending.schedule().iteration(),
            sections: 1,
            pages,
            fenced: attempt.sending.fenced_count(),
            digest: None,
        };
        let before = attempt.last.replace(last.clone());
        if before.as_ref() == Some(&last) {
            return;
        }
        if before.is_some() {
            self.pass(Passage::FinalAgain);
        } else {
            self.source_says(Message::Section(Section {
                name: "state".into(),
                instance: 0,
                version: 1,
                required: true,
                bytes: vec![0],
            }));
        }
        self.source_says(Message::Final(last));
        self.moment(Moment::Final);
        if before.is_none() {
            self.source_feeds(SourceEvent::FinalSent);
        }
    }

    /// Whether messages of a lost control lane are repeated on the next control lane.
    pub(crate) fn repeats(&mut self) -> bool {
        let kind = crate::tally::FaultKind::MessagesRepeated;
        let repeats = self.armed.contains(&kind);
        if repeats {
            self.struck.insert(kind);
        }
        repeats
    }

    /// Sends *cancel* and closes the control lane, because the source abandons the migration
    /// attempt.
    pub(super) fn farewell(&mut self) {
        self.source_says(Message::Cancel {
            fault: dunlin_proto::fault::FaultCode::Cancelled,
            text: String::new(),
        });
        if let Some(connection) = self.attempt().link.connection() {
            self.close(connection, Side::Source, false);
        }
        self.attempt().link = super::Link::Down;
    }
}
