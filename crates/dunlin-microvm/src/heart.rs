//! Records the guest's beats and computes its longest silence and the downtime of a migration. A
//! *beat* is the message that each vCPU sends to the VMM about every millisecond.
//!
//! The last beat is part of the machine's state. The downtime is the time from the last beat at the
//! source to the first beat at the destination. CLOCK_MONOTONIC measures the downtime if the
//! source and the destination are on the same host (equal boot ids). Otherwise the guest's own
//! clock measures it, because this clock continues during the migration.

use std::fs;
use std::sync::{Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use dunlin::lane::sync::lock;
use dunlin_linux::clock::monotonic;

use crate::wire::{DecodeError, Reader, Writer};

/// The longest plausible downtime. A longer time means that the clocks of the two hosts are not
/// synchronised; it is treated as zero.
const CREDIBLE: Duration = Duration::from_secs(24 * 3600);

const BOOT_ID_BYTES: usize = 36;

/// A point in time, on the clocks of one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// CLOCK_MONOTONIC, in nanoseconds.
    pub(crate) monotonic_ns: u64,
    /// CLOCK_REALTIME, in nanoseconds since 1970.
    pub(crate) realtime_ns: u64,
    boot_id: [u8; BOOT_ID_BYTES],
}

impl Moment {
    pub(crate) fn now() -> Self {
        let realtime = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Self {
            monotonic_ns: monotonic().as_nanos() as u64,
            realtime_ns: realtime.map_or(0, |since| since.as_nanos() as u64),
            boot_id: *BOOT_ID,
        }
    }

    /// Whether both moments are from the same boot of one host, so that their monotonic times are
    /// comparable.
    pub(crate) fn same_boot(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id && self.boot_id != [0; BOOT_ID_BYTES]
    }

    /// The time since `earlier`. Zero if the clocks show `earlier` as the later moment, or if the
    /// time is longer than [`CREDIBLE`].
    pub(crate) fn since(&self, earlier: &Self) -> Duration {
        let nanoseconds = if self.same_boot(earlier) {
            self.monotonic_ns.saturating_sub(earlier.monotonic_ns)
        } else {
            self.realtime_ns.saturating_sub(earlier.realtime_ns)
        };
        let since = Duration::from_nanos(nanoseconds);
        if since > CREDIBLE {
            Duration::ZERO
        } else {
            since
        }
    }

    pub(crate) fn encode(&self, writer: &mut Writer<'_>) {
        writer
            .u64(self.monotonic_ns)
            .u64(self.realtime_ns)
            .bytes(&self.boot_id);
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            monotonic_ns: reader.u64("monotonic time")?,
            realtime_ns: reader.u64("real time")?,
            boot_id: reader.array("boot id")?,
        })
    }
}

/// The boot id of this host, or zeros if the kernel does not provide it.
static BOOT_ID: LazyLock<[u8; BOOT_ID_BYTES]> = LazyLock::new(|| {
    fs::read("/proc/sys/kernel/random/boot_id")
        .ok()
        .and_then(|bytes| bytes.first_chunk().copied())
        .unwrap_or([0; BOOT_ID_BYTES])
});

/// A beat of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beat {
    pub(crate) at: Moment,
    pub(crate) guest_tsc: u64,
}

/// The longest time without a beat so far, and the downtime.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pulse {
    pub(crate) largest_gap: Duration,
    pub(crate) downtime: Option<Duration>,
}

/// The beats of all vCPUs of a machine.
#[derive(Debug)]
pub(crate) struct Heart {
    beats: Mutex<Beats>,
    /// Notified of the first beat after a migration.
    first: Condvar,
}

#[derive(Debug)]
struct Beats {
    last: Option<Beat>,
    /// CLOCK_MONOTONIC in nanoseconds at the last beat of each vCPU.
    each_ns: Vec<Option<u64>>,
    largest_gap: Duration,
    /// The last beat at the source. `None` without a migration, and after the first beat on this
    /// host.
    source: Option<Beat>,
    downtime: Option<Duration>,
    tsc_khz: u32,
}

impl Heart {
    pub(crate) fn new(vcpus: u8, tsc_khz: u32) -> Self {
        Self {
            beats: Mutex::new(Beats {
                last: None,
                each_ns: vec![None; usize::from(vcpus)],
                largest_gap: Duration::ZERO,
                source: None,
                downtime: None,
                tsc_khz,
            }),
            first: Condvar::new(),
        }
    }

    /// Records a beat of a vCPU.
    pub(crate) fn beat(&self, vcpu: u8, guest_tsc: u64) {
        let beat = Beat {
            at: Moment::now(),
            guest_tsc,
        };
        let mut beats = lock(&self.beats);
        let now = beat.at.monotonic_ns;
        if let Some(source) = beats.source.take() {
            let silent = if beat.at.same_boot(&source.at) {
                beat.at.since(&source.at)
            } else {
                let ticks = guest_tsc.saturating_sub(source.guest_tsc);
                Duration::from_nanos(ticks_to_ns(ticks, beats.tsc_khz))
            };
            beats.downtime = Some(silent);
            self.first.notify_all();
            beats.largest_gap = beats.largest_gap.max(silent);
        }
        let own = &mut beats.each_ns[usize::from(vcpu)];
        if let Some(before) = own.replace(now) {
            let gap = Duration::from_nanos(now.saturating_sub(before));
            beats.largest_gap = beats.largest_gap.max(gap);
        }
        if beats.last.is_none_or(|last| last.at.monotonic_ns <= now) {
            beats.last = Some(beat);
        }
    }

    pub(crate) fn pulse(&self) -> Pulse {
        let beats = lock(&self.beats);
        Pulse {
            largest_gap: beats.largest_gap,
            downtime: beats.downtime,
        }
    }

    /// Waits for the first beat after a migration, for at most `limit`, and returns the downtime.
    /// Returns `None` if there was no such beat.
    pub(crate) fn wait_for_downtime(&self, limit: Duration) -> Option<Duration> {
        let beats = lock(&self.beats);
        let (beats, _) = self
            .first
            .wait_timeout_while(beats, limit, |beats| beats.source.is_some())
            .unwrap_or_else(PoisonError::into_inner);
        beats.downtime
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let beats = lock(&self.beats);
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        writer.u64(beats.largest_gap.as_nanos() as u64);
        // If a machine arrives and leaves again before its first beat here, the last beat is still
        // that of the first source.
        match beats.last.or(beats.source) {
            None => writer.u8(0),
            Some(beat) => {
                beat.at.encode(writer.u8(1));
                writer.u64(beat.guest_tsc)
            }
        };
        bytes
    }

    /// Loads the encoded state of a source's heart.
    pub(crate) fn load(&self, bytes: &[u8]) -> Result<(), DecodeError> {
        let mut reader = Reader::new(bytes);
        let largest_gap = Duration::from_nanos(reader.u64("largest gap")?);
        let source = match reader.flag("presence of the last beat")? {
            false => None,
            true => Some(Beat {
                at: Moment::decode(&mut reader)?,
                guest_tsc: reader.u64("guest TSC of the last beat")?,
            }),
        };
        reader.finish("heart")?;
        let mut beats = lock(&self.beats);
        beats.largest_gap = largest_gap;
        beats.source = source;
        Ok(())
    }
}

/// The duration in nanoseconds of `ticks` of a counter that runs at `khz`, at most `u64::MAX`.
pub(crate) fn ticks_to_ns(ticks: u64, khz: u32) -> u64 {
    let nanoseconds = u128::from(ticks) * 1_000_000 / u128::from(khz.max(1));
    u64::try_from(nanoseconds).unwrap_or(u64::MAX)
}

/// The number of ticks in `time` of a counter that runs at `khz`.
pub(crate) fn time_to_ticks(time: Duration, khz: u32) -> u64 {
    let ticks = time.as_nanos() * u128::from(khz) / 1_000_000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire::DecodeReason;

    #[test]
    fn downtime_is_the_silence_between_the_last_and_the_first_beat() {
        let source = Heart::new(1, 1_000_000);
        source.beat(0, 5000);
        let bytes = source.encode();
        std::thread::sleep(Duration::from_millis(20));
        let destination = Heart::new(1, 1_000_000);
        destination.load(&bytes).unwrap();
        assert_eq!(destination.pulse().downtime, None);
        destination.beat(0, 6000);
        let downtime = destination.pulse().downtime.unwrap();
        assert!(downtime >= Duration::from_millis(20), "{downtime:?}");
        assert!(downtime < Duration::from_secs(2), "{downtime:?}");
        assert_eq!(destination.pulse().largest_gap, downtime);
    }

    #[test]
    fn without_a_common_clock_the_guest_tsc_measures_the_downtime() {
        let source = Heart::new(1, 2_000_000);
        source.beat(0, 1_000_000);
        let mut bytes = source.encode();
        // Changes the boot id. In the encoding, it follows the largest gap (8 bytes), the presence
        // byte and two clocks of 8 bytes.
        bytes[8 + 1 + 16] ^= 1;
        let destination = Heart::new(1, 2_000_000);
        destination.load(&bytes).unwrap();
        destination.beat(0, 101_000_000);
        assert_eq!(
            destination.pulse().downtime,
            Some(Duration::from_millis(50))
        );
    }

    #[test]
    fn i7_contradicting_clocks_give_zero() {
        let now = Moment::now();
        let mut other = now;
        other.boot_id[0] ^= 1;
        other.realtime_ns = 0;
        assert_eq!(now.since(&other), Duration::ZERO);
        other.realtime_ns = u64::MAX;
        assert_eq!(now.since(&other), Duration::ZERO);
    }

    #[test]
    fn i7_a_truncated_or_overlong_heart_is_rejected() {
        let source = Heart::new(1, 1);
        source.beat(0, 1);
        let bytes = source.encode();
        for length in 0..bytes.len() {
            assert!(Heart::new(1, 1).load(&bytes[..length]).is_err());
        }
        let long = [&bytes[..], &[0]].concat();
        let error = Heart::new(1, 1).load(&long).unwrap_err();
        assert_eq!(error.why, DecodeReason::Trailing { bytes: 1 });
    }
}
