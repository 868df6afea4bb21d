//! A migration that this process carries out: its followers, progress, settings and result.

use dunlin_lane::sync::{lock, wait};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Instant;

use anyhow::{Result, bail};
use dunlin::engine::{Cancel, Event, Tune};
use serde_json::Value;
use tracing::Span;

use super::story;
use crate::line::{Line, MigrationLine};

/// Maximum number of lines queued for a follower that does not read. Further lines are dropped,
/// because a stopped follower must not stop the migration.
const FOLLOWER_LINES: usize = 1024;

/// How many of the newest iterations the status keeps.
const SHOWN_ITERATIONS: usize = 32;

/// Phase of a migration, on either side, in which it can no longer be cancelled.
pub(super) const COMMITTED: &str = "committed";

/// One migration at its source.
pub(crate) struct Moving {
    pub(crate) cancel: Cancel,
    pub(crate) tune: Tune,
    started: Instant,
    /// The session's span.
    span: OnceLock<Span>,
    seen: Mutex<Seen>,
    changed: Condvar,
}

struct Seen {
    line: MigrationLine,
    followers: Vec<SyncSender<Line>>,
    timeline: Option<Line>,
    ended: Option<Line>,
}

impl Seen {
    fn send(&self, line: &Line) {
        // A follower that does not read loses lines, but never the last line, which is stored in
        // `ended`.
        for follower in &self.followers {
            let _ = follower.try_send(line.clone());
        }
    }
}

impl Moving {
    pub(crate) fn new(to: String, rate: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            cancel: Cancel::new(),
            tune: Tune::new(),
            started: Instant::now(),
            span: OnceLock::new(),
            seen: Mutex::new(Seen {
                line: MigrationLine {
                    role: "source".into(),
                    peer: to,
                    phase: "connecting".into(),
                    rate,
                    ..MigrationLine::default()
                },
                followers: Vec::new(),
                timeline: None,
                ended: None,
            }),
            changed: Condvar::new(),
        })
    }

    /// Processes an event of the engine, on any of its threads.
    pub(crate) fn observe(&self, event: &Event) {
        // The first event arrives before any step begins, so the current span is that of the
        // session.
        self.span.get_or_init(Span::current);
        story::at_source(event);
        let line = Line::from(event);
        let mut seen = lock(&self.seen);
        match event {
            Event::Accepted { .. } => seen.line.phase = "pre-copy".into(),
            Event::Paused => seen.line.phase = "switchover".into(),
            Event::Committing => seen.line.phase = COMMITTED.into(),
            Event::Progress(progress) => seen.line.progress = Some(progress.into()),
            Event::LaneLost { .. } => seen.line.lanes_lost += 1,
            Event::Iterated(iteration) => {
                let iterations = &mut seen.line.iterations;
                if iterations.len() == SHOWN_ITERATIONS {
                    iterations.remove(0);
                }
                iterations.push(iteration.into());
            }
            Event::Throttled { percent } => seen.line.throttle = *percent,
            _ => {}
        }
        seen.send(&line);
    }

    /// Sends every follower a warning that is not an event of the engine.
    pub(crate) fn warn(&self, text: String) {
        lock(&self.seen).send(&Line::Warning { text });
    }

    /// Keeps the timeline for the followers.
    pub(crate) fn keep_timeline(&self, events: Vec<Value>) {
        lock(&self.seen).timeline = Some(Line::Timeline { events });
    }

    /// Ends the migration with its last line.
    pub(crate) fn end(&self, line: Line) {
        let mut seen = lock(&self.seen);
        seen.ended = Some(line.clone());
        seen.followers.clear();
        drop(seen);
        self.changed.notify_all();
        story::ended(self.span.get().unwrap_or(&Span::none()), &line);
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.seen).ended.is_some()
    }

    /// Whether the source has begun to send *commit*, so that the destination may run the VM.
    pub(super) fn is_committed(&self) -> bool {
        lock(&self.seen).line.phase == COMMITTED
    }

    /// Waits for the end; returns the last line.
    pub(crate) fn wait(&self) -> Line {
        let mut seen = lock(&self.seen);
        loop {
            if let Some(line) = &seen.ended {
                return line.clone();
            }
            seen = wait(&self.changed, seen, None);
        }
    }

    /// Requests the cancellation of the migration. [`Self::wait`] returns the last line.
    ///
    /// # Errors
    /// It is too late to cancel; nothing was requested.
    pub(crate) fn ask_to_end(&self) -> Result<()> {
        if self.is_committed() {
            bail!(
                "too late to cancel: commit may have been sent, so the destination may run the VM"
            );
        }
        self.cancel.cancel();
        Ok(())
    }

    /// Limits the rate from now on.
    pub(crate) fn set_rate(&self, bytes_per_s: Option<u64>) -> Result<()> {
        self.tune.set_rate(bytes_per_s)?;
        lock(&self.seen).line.rate = bytes_per_s;
        Ok(())
    }

    /// Status of the migration.
    pub(crate) fn line(&self) -> MigrationLine {
        MigrationLine {
            seconds: self.started.elapsed().as_secs_f64(),
            ..lock(&self.seen).line.clone()
        }
    }

    /// Follows the migration from now on.
    pub(crate) fn follow(self: &Arc<Self>) -> Follower {
        let (sender, lines) = sync_channel(FOLLOWER_LINES);
        let mut seen = lock(&self.seen);
        if seen.ended.is_none() {
            seen.followers.push(sender);
        }
        drop(seen);
        Follower {
            moving: Arc::clone(self),
            lines,
        }
    }
}

/// A follower of a [`Moving`].
pub(crate) struct Follower {
    moving: Arc<Moving>,
    lines: Receiver<Line>,
}

impl Follower {
    /// Calls `show` with every line up to the last one; stops at the first error of `show`.
    pub(crate) fn show(self, mut show: impl FnMut(&Line) -> Result<()>) -> Result<()> {
        for line in &self.lines {
            show(&line)?;
        }
        let last = self.moving.wait();
        let timeline = lock(&self.moving.seen).timeline.clone();
        timeline.iter().try_for_each(&mut show)?;
        show(&last)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_follower_that_does_not_read_delays_nothing_and_gets_the_last_line() {
        let moving = Moving::new("host:1".into(), None);
        let follower = moving.follow();
        let (sender, done) = channel();
        std::thread::spawn(move || {
            for lane in 0..5000 {
                moving.observe(&Event::LaneUp { lane });
            }
            moving.end(Line::Done);
            sender.send(()).unwrap();
        });
        done.recv_timeout(Duration::from_secs(10)).unwrap();
        let mut lines = Vec::new();
        let show = |line: &Line| {
            lines.push(line.clone());
            Ok(())
        };
        follower.show(show).unwrap();
        assert_eq!(lines.len(), FOLLOWER_LINES + 1);
        assert!(matches!(lines[0], Line::LaneUp { lane: 0 }));
        assert!(matches!(lines.last(), Some(Line::Done)));
    }
}
