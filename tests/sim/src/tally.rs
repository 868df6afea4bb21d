//! What happened in a run, and in many.

use std::collections::BTreeMap;
use std::fmt;

/// One row for each kind: how the tally calls it.
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
    /// What can go wrong. It counts where it did something.
    FaultKind {
        /// A data lane's connection dies, and what was under way on it.
        LaneCut = "lane cut";
        /// A data lane holds what it is given, and lets it go later.
        LaneHeld = "lane held";
        /// A data lane swallows what it is given.
        LaneSwallowed = "lane swallowed";
        /// A data lane is ten times slower than the others.
        LaneSlow = "lane slow";
        /// Lanes cannot connect for a while.
        NoNewLanes = "no new lanes";
        /// A lane's opening is replayed on another connection.
        LaneReplayed = "lane replayed";
        /// The control lane's connection dies.
        ControlCut = "control cut";
        /// The control lane holds what one side sends.
        ControlHeld = "control held";
        /// The control lane swallows everything.
        ControlSwallowed = "control swallowed";
        /// What was said on a lost control lane is said again on the new one.
        MessagesRepeated = "messages repeated";
        /// The source's main thread stands still; its readers go on.
        SourceStalled = "source stalled";
        /// The destination's main thread stands still; its readers go on.
        DestinationStalled = "destination stalled";
        /// A control lane's reader at the destination has read something and
        /// does not get to hand it over.
        ReaderStalled = "reader stalled";
        /// Everything takes longer.
        Delay = "delay";
        /// The source's process dies.
        SourceCrash = "source crash";
        /// The destination's process dies.
        DestinationCrash = "destination crash";
        /// The operator cancels at the source.
        SourceCancelled = "source cancelled";
        /// The operator cancels at the destination.
        DestinationCancelled = "destination cancelled";
        /// The source's journal cannot be written once.
        SourceJournalFails = "source journal fails";
        /// The destination's journal cannot be written once.
        DestinationJournalFails = "destination journal fails";
        /// The destination cannot load, acquire or resume.
        VmmFails = "VMM fails";
        /// An inquiry is answered about an earlier attempt.
        InquiryMisrouted = "inquiry misrouted";
    }
}

kinds! {
    /// How an attempt ends. The last one's end is the run's.
    End {
        /// The VM lives at the destination.
        Moved = "moved";
        /// The same, after the source had to ask.
        MovedAfterDoubt = "moved after doubt";
        /// An operator cancelled; the VM lives at the source.
        Cancelled = "cancelled";
        /// Something failed; the VM lives at the source.
        Failed = "failed";
        /// The guest outran the link; the VM lives at the source.
        OutOfTime = "out of time";
        /// The source's process died before *commit*, and another took over.
        TakenOver = "taken over";
        /// The source asked, and the destination had aborted.
        KeptAfterDoubt = "kept after doubt";
        /// The VM ran and died at the destination; the operator took the copy
        /// at the source.
        TakenBack = "taken back";
        /// The same, and the operator gave that copy up.
        GivenUp = "given up";
        /// The VM died with the process at the source.
        DiedAtSource = "died at the source";
        /// The VM died at the destination after the source had let go.
        DiedAtDestination = "died at the destination";
    }
}

kinds! {
    /// What is worth knowing that it was passed through.
    Passage {
        /// A control lane was lost and another stood, in pre-copy.
        ControlResumed = "control lane resumed";
        /// A lane was fenced.
        Fenced = "lane fenced";
        /// A worn lane was replaced.
        Replaced = "lane replaced";
        /// *final* was sent again.
        FinalAgain = "final sent again";
        /// A lane was turned away.
        LaneRefused = "lane refused";
        /// A *commit* was found on the old control lane when the source asked.
        CommitDrained = "commit found by draining";
        /// A held or swallowed lane let go after its fence.
        HeldBeyondFence = "held beyond the fence";
        /// A cancellation came too late.
        TooLate = "cancelled too late";
        /// A source that had crashed asked.
        AskedAfterRestart = "asked after a restart";
        /// A destination that had crashed answered.
        AnsweredAfterRestart = "answered after a restart";
    }
}

/// How often what was seen: in how many of the runs.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Runs.
    pub runs: u64,
    /// Steps of all runs.
    pub steps: u64,
    /// Virtual time of all runs.
    pub virtual_ns: u128,
    /// Runs with such a fault.
    pub faults: BTreeMap<FaultKind, u64>,
    /// Runs with an attempt that ended so.
    pub ends: BTreeMap<End, u64>,
    /// Runs that passed there.
    pub passages: BTreeMap<Passage, u64>,
}

impl Tally {
    /// Adds another's.
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

    /// Kinds of faults and ends that were seen in fewer than `percent` of the
    /// runs.
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
