//! Paces a vCPU's page visits.
//!
//! At each beat, a vCPU gets a number of visits and a time to wait before them. The number is
//! limited so that beats are about a millisecond apart. After a pause, or if the host is busy, the
//! guest makes up for the visits of at most a few milliseconds.

use std::time::{Duration, Instant};

/// The longest planned wait of a vCPU between two beats.
pub(crate) const BEAT: Duration = Duration::from_millis(1);

/// Maximum number of visits between two beats. A guest that visits pages as fast as it can needs a
/// few hundred microseconds for this number of visits.
const BATCH_LIMIT: u32 = 256;

/// If a visit starts late by at most this time, the next visit is not delayed. Timers are usually
/// late, so a much smaller value would lower the rate. A larger value would allow a burst of visits
/// after a stall.
const LATENESS: Duration = Duration::from_millis(2);

/// The pace of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pace {
    /// The vCPU only sends beats and makes no visits.
    Idle,
    /// The vCPU visits pages as fast as it can.
    Unpaced,
    /// The vCPU makes up to this number of visits per second.
    Rate(f64),
}

/// What a vCPU does after a beat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// The earliest start of the turn.
    pub(crate) due: Instant,
    /// Number of visits. If it is 0, the guest only sends the next beat.
    pub(crate) visits: u32,
}

/// The pacing of one vCPU.
#[derive(Debug)]
pub(crate) struct Pacer {
    pace: Pace,
    /// When the next visit is due.
    visit_due: Instant,
    /// When the last beat without visits was due.
    beat_due: Instant,
    /// Planned and actual start of the last batch of visits, if there was one. Used only for
    /// [`Pace::Unpaced`].
    granted: Option<(Instant, Instant)>,
}

impl Pacer {
    pub(crate) fn new(pace: Pace, now: Instant) -> Self {
        Self {
            pace,
            visit_due: now,
            beat_due: now,
            granted: None,
        }
    }

    /// Discards the due times and the current batch of visits, because pacing starts anew after a
    /// pause.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.visit_due = now;
        self.beat_due = now;
        self.granted = None;
    }

    /// Records that the visits of the current batch start now.
    pub(crate) fn begin(&mut self, now: Instant) {
        if let Some((_, begun)) = &mut self.granted {
            *begun = now;
        }
    }

    /// Returns the turn after a beat at `now`, for a guest that runs at (100 - `throttle`) % of its
    /// speed.
    pub(crate) fn turn(&mut self, now: Instant, throttle: u8) -> Turn {
        let speed = f64::from(100 - throttle.min(99)) / 100.0;
        match self.pace {
            Pace::Idle => self.beat_only(now),
            Pace::Unpaced => {
                // A throttled vCPU rests after each batch, in proportion to the duration of the
                // batch. If the batch started late, a delay of at most `LATENESS` counts as a part
                // of the rest.
                if let Some((planned, begun)) = self.granted.take() {
                    let planned = planned.max(begun.checked_sub(LATENESS).unwrap_or(begun));
                    self.visit_due = planned + (now - begun).div_f64(speed);
                }
                if self.visit_due > now + BEAT {
                    return self.beat_only(now);
                }
                let due = self.visit_due.max(now);
                self.granted = Some((self.visit_due, due));
                Turn {
                    due,
                    visits: BATCH_LIMIT,
                }
            }
            Pace::Rate(rate) => {
                if self.visit_due > now + BEAT {
                    return self.beat_only(now);
                }
                let rate = rate * speed;
                let visits = (rate * BEAT.as_secs_f64()).clamp(1.0, f64::from(BATCH_LIMIT)) as u32;
                let due = self.visit_due.max(now);
                let planned = self.visit_due.max(now.checked_sub(LATENESS).unwrap_or(now));
                self.visit_due = planned + Duration::from_secs_f64(f64::from(visits) / rate);
                Turn { due, visits }
            }
        }
    }

    /// Returns a turn without visits. Its beat is due one millisecond after the beat of the last
    /// such turn, or immediately if that time has passed.
    fn beat_only(&mut self, now: Instant) -> Turn {
        self.beat_due = (self.beat_due + BEAT).clamp(now, now + BEAT);
        Turn {
            due: self.beat_due,
            visits: 0,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Simulates a vCPU that is never late, for the time `length`. Returns its number of visits
    /// and its longest wait.
    fn run(
        pacer: &mut Pacer,
        start: Instant,
        length: Duration,
        visit: Duration,
    ) -> (u32, Duration) {
        let (mut now, mut visits, mut longest) = (start, 0, Duration::ZERO);
        while now < start + length {
            let turn = pacer.turn(now, 0);
            longest = longest.max(turn.due - now);
            now = turn.due + visit * turn.visits;
            visits += turn.visits;
        }
        (visits, longest)
    }

    #[test]
    fn a_rate_is_kept_and_a_beat_comes_every_millisecond() {
        for rate in [10.0, 999.0, 1500.0, 20_000.0, 900_000.0] {
            let start = Instant::now();
            let mut pacer = Pacer::new(Pace::Rate(rate), start);
            let (visits, longest) = run(
                &mut pacer,
                start,
                Duration::from_secs(10),
                Duration::from_nanos(500),
            );
            let expected = rate * 10.0;
            assert!(
                (f64::from(visits) - expected).abs() <= expected * 0.01 + 1.0,
                "{visits} visits, {expected} expected"
            );
            assert!(longest <= BEAT, "waited {longest:?}");
        }
    }

    #[test]
    fn a_stall_is_not_caught_up() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Pace::Rate(10_000.0), start);
        pacer.turn(start, 0);
        let late = start + Duration::from_secs(5);
        let (visits, _) = run(
            &mut pacer,
            late,
            Duration::from_millis(100),
            Duration::from_nanos(1),
        );
        assert!(visits <= 1000 + 30, "{visits} visits in 100 ms at 10 a ms");
    }

    #[test]
    fn a_throttled_unpaced_vcpu_rests_in_proportion_and_still_beats() {
        let start = Instant::now();
        for late in [Duration::ZERO, Duration::from_micros(150)] {
            let mut pacer = Pacer::new(Pace::Unpaced, start);
            let (mut now, mut visits) = (start, 0);
            while now < start + Duration::from_secs(1) {
                let turn = pacer.turn(now, 90);
                assert!(turn.due <= now + BEAT);
                now = turn.due + late;
                pacer.begin(now);
                now += Duration::from_micros(1) * turn.visits;
                visits += turn.visits;
            }
            // Without the throttle, this vCPU would make a million visits per second. The throttle
            // leaves 10 %.
            assert!((95_000..=105_000).contains(&visits), "{visits}");
        }
    }

    #[test]
    fn an_unthrottled_vcpu_never_waits() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Pace::Unpaced, start);
        let mut now = start;
        for _ in 0..100 {
            let turn = pacer.turn(now, 0);
            assert_eq!((turn.due, turn.visits), (now, BATCH_LIMIT));
            now += Duration::from_micros(300);
        }
    }

    #[test]
    fn an_idle_vcpu_that_wakes_late_beats_a_thousand_times_a_second() {
        let start = Instant::now();
        let mut pacer = Pacer::new(Pace::Idle, start);
        let (mut now, mut beats) = (start, 0);
        while now < start + Duration::from_secs(1) {
            let turn = pacer.turn(now, 0);
            assert_eq!(turn.visits, 0);
            now = turn.due + Duration::from_micros(200);
            beats += 1;
        }
        assert!((999..=1001).contains(&beats), "{beats}");
        // The vCPU pauses for a second. It does not make up for the beats that it missed.
        now += Duration::from_secs(1);
        assert_eq!(pacer.turn(now, 0).due, now);
        assert_eq!(pacer.turn(now, 0).due, now + BEAT);
    }
}
