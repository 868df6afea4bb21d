//! Statistics of one run, or of many.

use std::collections::BTreeMap;
use std::fmt;

/// Defines an enum of kinds, each with its name in the tally.
macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident { $( $(#[$row:meta])* $variant:ident = $text:literal; )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $( $(#[$row])* $variant, )*
        }

        impl $name {
            /// Every kind.
            pub const ALL: [Self; [$($text),*].len()] = [$(Self::$variant,)*];
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.pad(match self { $( Self::$variant => $text, )* })
            }
        }
    };
}

kinds! {
    /// Faults. The tally counts a fault only if it had an effect.
    FaultKind {
        /// A data lane's connection dies, and packets in flight may be lost.
        LaneCut = "lane cut";
        /// A data lane delays its data.
        LaneHeld = "lane held";
        /// A data lane drops its data.
        LaneSwallowed = "lane swallowed";
        /// A data lane becomes ten times slower.
        LaneSlow = "lane slow";
        /// Lanes cannot connect for a while.
        NoNewLanes = "no new lanes";
        /// *lane open* is replayed on another connection.
        LaneReplayed = "lane replayed";
        /// The control lane's connection dies.
        ControlCut = "control cut";
        /// The control lane delays the messages of one direction.
        ControlHeld = "control held";
        /// The control lane drops everything.
        ControlSwallowed = "control swallowed";
        /// Messages of a lost control lane are repeated on the new one.
        MessagesRepeated = "messages repeated";
        /// The source's main thread stops; its readers continue.
        SourceStalled = "source stalled";
        /// The destination's main thread stops; its readers continue.
        DestinationStalled = "destination stalled";
        /// A control lane's reader at the destination has read a packet and cannot pass it to the
        /// main thread.
        ReaderStalled = "reader stalled";
        /// All packets take longer.
        Delay = "delay";
        /// The source's process dies.
        SourceCrash = "source crash";
        /// The destination's process dies.
        DestinationCrash = "destination crash";
        /// The operator cancels at the source.
        SourceCancelled = "source cancelled";
        /// The operator cancels at the destination.
        DestinationCancelled = "destination cancelled";
        /// One write to the source's journal fails.
        SourceJournalFails = "source journal fails";
        /// One write to the destination's journal fails.
        DestinationJournalFails = "destination journal fails";
        /// The destination cannot load the VM's state, acquire its disks and devices, or resume it.
        VmmFails = "VMM fails";
        /// An inquiry receives an answer about an earlier attempt.
        InquiryMisrouted = "inquiry misrouted";
    }
}

kinds! {
    /// Outcomes of a migration attempt. A run's outcome is that of its final attempt.
    End {
        /// The VM lives at the destination.
        Moved = "moved";
        /// The VM is at the destination, after an inquiry.
        MovedAfterDoubt = "moved after doubt";
        /// An operator cancelled; the VM is at the source.
        Cancelled = "cancelled";
        /// Something failed; the VM is at the source.
        Failed = "failed";
        /// Pre-copy reached its time limit, or could not meet the downtime limit; the VM is at the
        /// source.
        OutOfTime = "out of time";
        /// The source's process died. The new process found in the journal that the VM stays at the
        /// source.
        TakenOver = "taken over";
        /// After *commit* or in doubt, the source received the report that the destination had
        /// aborted.
        KeptAfterDoubt = "kept after doubt";
        /// The VM ran and died at the destination; the operator resumed the
        /// copy at the source.
        TakenBack = "taken back";
        /// The VM ran and died at the destination; the operator gave up the copy at the source.
        GivenUp = "given up";
        /// The VM died with the process at the source.
        DiedAtSource = "died at the source";
        /// The VM died at the destination after the source had released it.
        DiedAtDestination = "died at the destination";
    }
}

kinds! {
    /// Situations. For each, the tally counts the runs in which it occurred.
    Passage {
        /// A control lane was lost and replaced during pre-copy.
        ControlResumed = "control lane resumed";
        /// A lane was fenced.
        Fenced = "lane fenced";
        /// A lane was replaced because its key was near the record limit.
        Replaced = "lane replaced";
        /// *final* was sent again.
        FinalAgain = "final sent again";
        /// A lane was refused.
        LaneRefused = "lane refused";
        /// A *commit* was found on an old control lane after an inquiry.
        CommitDrained = "commit found by draining";
        /// Data of a lane arrived after the lane's fence.
        HeldBeyondFence = "held beyond the fence";
        /// A cancellation came too late.
        TooLate = "cancelled too late";
        /// A source was restarted after it had recorded *committing*.
        AskedAfterRestart = "asked after a restart";
        /// A restarted destination answered.
        AnsweredAfterRestart = "answered after a restart";
    }
}

/// Counts of runs.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The number of runs.
    pub runs: u64,
    /// The number of steps of all runs.
    pub steps: u64,
    /// The virtual time of all runs, in nanoseconds.
    pub virtual_ns: u128,
    /// For each fault: the number of runs in which it had an effect.
    pub faults: BTreeMap<FaultKind, u64>,
    /// For each outcome of an attempt: the number of runs in which it occurred.
    pub ends: BTreeMap<End, u64>,
    /// For each situation: the number of runs in which it occurred.
    pub passages: BTreeMap<Passage, u64>,
}

impl Tally {
    /// Adds another tally.
    pub fn add(&mut self, other: &Self) {
        fn sum<K: Ord + Copy>(into: &mut BTreeMap<K, u64>, from: &BTreeMap<K, u64>) {
            for (&key, &count) in from {
                *into.entry(key).or_default() += count;
            }
        }
        self.runs += other.runs;
        self.steps += other.steps;
        self.virtual_ns += other.virtual_ns;
        sum(&mut self.faults, &other.faults);
        sum(&mut self.ends, &other.ends);
        sum(&mut self.passages, &other.passages);
    }

    /// Kinds of faults and outcomes that occurred in less than `percent` per cent of the runs.
    #[must_use]
    pub fn rarer_than(&self, percent: u64) -> Vec<String> {
        let rare = |count: Option<&u64>| count.copied().unwrap_or(0) * 100 < self.runs * percent;
        let faults = FaultKind::ALL
            .iter()
            .filter(|kind| rare(self.faults.get(kind)));
        let ends = End::ALL.iter().filter(|kind| rare(self.ends.get(kind)));
        faults
            .map(ToString::to_string)
            .chain(ends.map(ToString::to_string))
            .collect()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = |what: &str, rows: Vec<(String, u64)>| {
            writeln!(formatter, "{what}")?;
            for (name, count) in rows {
                let percent = count as f64 * 100.0 / self.runs.max(1) as f64;
                writeln!(formatter, "  {name:28} {count:9}  {percent:5.1} %")?;
            }
            Ok(())
        };
        fn of<K: Ord + Copy + fmt::Display>(
            all: &[K],
            seen: &BTreeMap<K, u64>,
        ) -> Vec<(String, u64)> {
            all.iter()
                .map(|kind| (kind.to_string(), seen.get(kind).copied().unwrap_or(0)))
                .collect()
        }
        rows("faults, in runs", of(&FaultKind::ALL, &self.faults))?;
        rows("ends of attempts, in runs", of(&End::ALL, &self.ends))?;
        rows("passed through, in runs", of(&Passage::ALL, &self.passages))
    }
}
