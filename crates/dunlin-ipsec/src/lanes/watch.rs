//! Detects lanes that do not use the SAs of their CPUs, by comparing the bytes that lanes sent with
//! the bytes that SAs carried.
//!
//! A connection keeps the SA of its last route lookup, which may have happened on another CPU
//! (after a lost SYN, a timeout or a new address of the host). The counter of the right SA then
//! falls behind the bytes that the lane sent.

use std::collections::BTreeMap;

use dunlin_proto::ipsec::Sender;

/// Fewer bytes than this are not significant, because the counters of lanes and of SAs are not read
/// at the same instant.
const LEAST_BYTES: u64 = 64 << 10;

/// One sample of all counters.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    /// For each outbound SA, its SPI and byte count, read just before the byte counts of the lanes.
    pub(super) before: BTreeMap<Sender, (u32, u64)>,
    /// For each lane number, the CPU of the lane and the number of bytes that the lane sent.
    pub(super) lanes: BTreeMap<u64, (u32, u64)>,
    /// Like `before`, but read just after the byte counts of the lanes.
    pub(super) after: BTreeMap<Sender, (u32, u64)>,
}

/// The lanes of one CPU, if some of them do not use the SA of that CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stray {
    pub(super) cpu: u32,
    /// Bytes that the lanes sent since the last sample.
    pub(super) sent: u64,
    /// Upper bound of the bytes that the SA carried.
    pub(super) carried: u64,
}

/// Returns the CPUs with lanes that used an SA of another CPU or the fallback SA between two
/// samples. Skips CPUs without an SA, and CPUs for which a new epoch replaced the SA between the
/// samples.
pub(super) fn strays(last: &Look, now: &Look) -> Vec<Stray> {
    let carried = |sender: Sender| {
        let (spi, before) = last.before.get(&sender)?;
        let (same, after) = now.after.get(&sender)?;
        (spi == same).then(|| after.saturating_sub(*before))
    };
    let mut sent = BTreeMap::<u32, u64>::new();
    for (lane, (cpu, bytes)) in &now.lanes {
        if let Some((same, before)) = last.lanes.get(lane)
            && same == cpu
        {
            *sent.entry(*cpu).or_default() += bytes.saturating_sub(*before);
        }
    }
    let served: Vec<Stray> = sent
        .into_iter()
        .filter_map(|(cpu, sent)| {
            let carried = carried(Sender::Cpu(cpu))?;
            Some(Stray { cpu, sent, carried })
        })
        .collect();
    let behind =
        |stray: &&Stray| stray.sent >= LEAST_BYTES && stray.carried < stray.sent - stray.sent / 8;
    let behind: Vec<Stray> = served.iter().filter(behind).copied().collect();
    let all_served = now
        .lanes
        .values()
        .all(|(cpu, _)| now.after.contains_key(&Sender::Cpu(*cpu)));
    // No CPU's deficit is large enough to be detected, but the fallback SA carried bytes although
    // each CPU has its own SA. Report all CPUs with lanes that sent.
    if behind.is_empty() && all_served && carried(Sender::Fallback) >= Some(LEAST_BYTES) {
        return served.into_iter().filter(|one| one.sent > 0).collect();
    }
    behind
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A sample with one lane on each of two CPUs: the bytes that the lanes sent, and the bytes of
    /// the SAs of CPU 0, of CPU 1 and of the fallback.
    fn look(lanes: [u64; 2], sas: [u64; 3]) -> Look {
        let senders = [Sender::Cpu(0), Sender::Cpu(1), Sender::Fallback];
        let sas: BTreeMap<_, _> = senders.into_iter().zip((0x1000..).zip(sas)).collect();
        Look {
            before: sas.clone(),
            lanes: (0..).zip((0..).zip(lanes)).collect(),
            after: sas,
        }
    }

    #[test]
    fn lanes_that_use_their_own_sas_have_not_strayed() {
        let last = look([0; 2], [0; 3]);
        let now = look([MIB, 2 * MIB], [MIB + 4000, 2 * MIB + 8000, 0]);
        assert_eq!(strays(&last, &now), []);
        // Bytes of other connections, or of new lanes, do not count as a deficit.
        assert_eq!(strays(&last, &look([MIB, 0], [MIB, MIB, 0])), []);
        assert_eq!(strays(&Look::default(), &now), []);
        assert_eq!(strays(&now, &now), []);
    }

    #[test]
    fn a_lane_that_uses_another_sa_is_found() {
        let last = look([MIB; 2], [MIB, MIB, 0]);
        let expected = |carried| Stray {
            cpu: 1,
            sent: MIB,
            carried,
        };
        for (sas, carried) in [
            ([3 * MIB, MIB, 0], 0),
            ([2 * MIB, MIB, MIB], 0),
            ([2 * MIB, MIB + MIB / 2, MIB / 2], MIB / 2),
        ] {
            let now = look([2 * MIB; 2], sas);
            assert_eq!(strays(&last, &now), [expected(carried)], "{sas:?}");
        }
    }

    #[test]
    fn bytes_of_the_fallback_are_attributed_to_a_lane() {
        let last = look([MIB; 2], [MIB, MIB, 0]);
        let now = look([2 * MIB, MIB], [2 * MIB - MIB / 10, MIB, MIB / 10]);
        let found: Vec<u32> = strays(&last, &now).iter().map(|one| one.cpu).collect();
        assert_eq!(found, [0]);
    }

    #[test]
    fn new_keys_and_cpus_without_an_sa_are_no_strays() {
        let last = look([0; 2], [0; 3]);
        let mut rekeyed = look([MIB; 2], [0; 3]);
        for (spi, _) in rekeyed.after.values_mut() {
            *spi += 0x100;
        }
        assert_eq!(strays(&last, &rekeyed), []);
        let mut unserved = look([MIB; 2], [MIB, 0, MIB]);
        unserved.after.remove(&Sender::Cpu(1));
        assert_eq!(strays(&last, &unserved), []);
    }
}
