//! Chooses the fastest crypto library by measuring all that are built in.

use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use dunlin_linux::affinity;

use crate::internals::provider::{CipherSuite, Crypto, Provider};
use crate::internals::record::{CONTENT_BYTES, OpenHalf, RECORD_BYTES, SealHalf};

/// The library that [`auto`] chose, and the measurements that led to the choice.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The library to use.
    pub provider: Provider,
    /// The measurements: one core seals and opens 16 KiB AES-256-GCM records.
    pub speeds: Vec<Speed>,
}

/// One library's speed on this processor.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// The library.
    pub provider: Provider,
    /// Bytes sealed and opened per second.
    pub bytes_per_second: f64,
}

impl Crypto {
    /// Returns settings with the fastest library on this processor and all suites, AES-256-GCM
    /// first.
    pub fn auto() -> Self {
        Self::with(auto().provider)
    }
}

/// Returns the fastest library on this processor. The first call measures for about five
/// milliseconds if both libraries are built in; later calls return immediately.
pub fn auto() -> &'static Choice {
    static CHOICE: OnceLock<Choice> = OnceLock::new();
    CHOICE.get_or_init(probe)
}

/// Minimum and maximum of [`lanes`]. With two lanes, the loss of one does not interrupt the
/// transfer. The engine and the tunnel state their memory limits for eight lanes.
const AUTOMATIC_LANES: [u16; 2] = [2, 8];

/// A number of lanes for this host, from 2 to 8. It is one for each CPU that this process may use,
/// but no more than `rate` needs (in bytes per second; `None` for no limit). A lane has one thread
/// on each host, so more lanes than CPUs would only share the CPUs.
#[must_use]
pub fn lanes(rate: Option<u64>) -> u16 {
    let cpus = affinity::allowed().map_or(1, |cpus| cpus.len());
    // A lane's thread copies each byte to or from the socket, and seals or opens it. A copy takes
    // about as long as sealing or opening. The measurement seals and opens each byte, so its rate
    // is about that of a lane.
    let lane = || {
        auto()
            .speeds
            .first()
            .map_or(0.0, |best| best.bytes_per_second)
    };
    count(cpus, rate.map(|rate| rate as f64 / lane()))
}

/// The number of lanes for this many CPUs. `needed` lanes at full speed carry the rate; `None` if
/// the rate has no limit.
fn count(cpus: usize, needed: Option<f64>) -> u16 {
    let [least, most] = AUTOMATIC_LANES;
    let lanes = needed.map_or(f64::INFINITY, f64::ceil).min(cpus as f64);
    // The cast saturates.
    (lanes as u16).clamp(least, most)
}

fn probe() -> Choice {
    let mut speeds: Vec<Speed> = Provider::built_in()
        .iter()
        .map(|&provider| Speed {
            provider,
            bytes_per_second: measure(provider),
        })
        .collect();
    speeds.sort_by(|a, b| b.bytes_per_second.total_cmp(&a.bytes_per_second));
    let provider = speeds
        .first()
        .map_or(Provider::built_in()[0], |best| best.provider);
    Choice { provider, speeds }
}

/// Returns the best speed of five short runs, because other load on this host slows down some of
/// the runs.
fn measure(provider: Provider) -> f64 {
    const RUN: Duration = Duration::from_micros(400);
    const SUITE: CipherSuite = CipherSuite::Aes256Gcm;
    // A fixed key is safe here: it only seals records that this function itself opens again.
    let key = [7; SUITE.key_bytes()];
    let (Ok(mut seal), Ok(mut open)) = (
        SealHalf::new(provider, SUITE, &key, [0; 12], 0),
        OpenHalf::new(provider, SUITE, &key, [0; 12], 0),
    ) else {
        return 0.0;
    };
    let mut record = vec![0; RECORD_BYTES];
    let mut run = |least: Duration| {
        let begin = Instant::now();
        let mut bytes = 0.0;
        loop {
            if seal.seal(&mut record).is_err() || open.open(&mut record).is_err() {
                return 0.0;
            }
            bytes += CONTENT_BYTES as f64;
            let spent = begin.elapsed();
            if spent >= least {
                return bytes / spent.as_secs_f64();
            }
        }
    };
    // Warm up: the first record fills the tables that later records use.
    run(Duration::ZERO);
    (0..5).map(|_| run(RUN)).fold(0.0, f64::max)
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.provider)?;
        if let [only] = &self.speeds[..] {
            let speed = only.bytes_per_second / f64::from(1 << 30);
            return write!(
                f,
                "the only library built in ({speed:.2} GiB/s sealed and opened)"
            );
        }
        for (position, speed) in self.speeds.iter().enumerate() {
            let separator = if position == 0 { "" } else { " against " };
            let gibibytes = speed.bytes_per_second / f64::from(1 << 30);
            write!(f, "{separator}{} {gibibytes:.2} GiB/s", speed.provider)?;
        }
        f.write_str(", AES-256-GCM sealed and opened on one core")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_follow_cpus_and_rate() {
        for (cpus, needed, expected) in [
            (1, None, 2),
            (2, None, 2),
            (6, None, 6),
            (64, None, 8),
            (6, Some(0.4), 2),
            (6, Some(2.5), 3),
            (6, Some(45.0), 6),
            // The probe failed on this processor.
            (6, Some(f64::INFINITY), 6),
        ] {
            assert_eq!(count(cpus, needed), expected, "{cpus} {needed:?}");
        }
    }

    #[test]
    fn the_probe_measures_every_library_and_chooses_the_fastest() {
        let choice = probe();
        assert_eq!(choice.speeds.len(), Provider::built_in().len());
        assert!(
            choice
                .speeds
                .iter()
                .all(|speed| speed.bytes_per_second > 1e6)
        );
        let speeds = choice.speeds.iter().map(|speed| speed.bytes_per_second);
        assert!(speeds.is_sorted_by(|one, next| one >= next), "{choice}");
        assert_eq!(choice.provider, choice.speeds[0].provider);
        for provider in Provider::built_in() {
            assert!(choice.to_string().contains(&provider.to_string()));
        }
    }
}
