//! Guests for hypervisors, which keep their memory under watch while they write to it.
//!
//! There are two, with the same workload and the same language on the serial line:
//! [`Guest::Bare`] has no operating system and runs at privilege level 3 from the start, natively
//! also under a KVM that emulates level 0 (`guest/bare.S`); [`Guest::Linux`] is one of Debian's
//! kernels whose first and only process is the writer (`src/bin/rig-writer.rs`).
//!
//! # The workload
//!
//! A page holds 512 words of 8 bytes. Word 0 counts the visits. The exclusive or of all words is
//! the page's signature: zero if the page was zero at first, else
//! `(number + 1) * 0x9e3779b97f4a7c15 ^ seed`. A visit to a page checks both, counts itself in word
//! 0 and puts word 511 right again. The first `hot` pages are visited, each once in a pass; with
//! every visit one of the other pages is checked too.
//!
//! # The serial line
//!
//! Numbers are hexadecimal.
//!
//! ```text
//! ready PAGES HOT TICKS            the pages are filled; TICKS of the clock make a second
//! beat VISITS PASSES               twenty times a second
//! checked PAGES PASSES             all pages were looked at, as `c` on the line asks for
//! wrong PAGE EXPECTED FOUND        a count or a signature; nothing comes after it
//! ```

mod bare;
mod initramfs;
mod linux;

use std::path::PathBuf;

pub use initramfs::Initramfs;

use crate::debian::Kernel;

/// What a page holds at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing; a page is written to only by visits.
    Zero,
    /// What no compression makes smaller.
    Random,
    /// Pages of even number nothing, the others as random.
    Mixed,
    /// The same eight words again and again.
    Text,
}

/// What a guest does with its memory.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The guest's memory, MiB; at most 2048.
    pub memory_mib: u32,
    /// Pages that it fills and checks: at most the memory less 4 MiB for the bare guest, less
    /// 128 MiB for Linux.
    pub pages: u64,
    /// How many of these it writes to.
    pub hot: u64,
    /// Visits per second; as many as it can when not said.
    pub rate: Option<u64>,
    /// What the pages hold at first.
    pub content: Content,
    /// So that two guests differ.
    pub seed: u64,
}

impl Workload {
    /// From one visited page to the next, modulo `hot`: far, and by no common divisor, so that a
    /// pass visits each once.
    fn stride(&self) -> u64 {
        let divides = |mut one: u64, mut other: u64| {
            while other != 0 {
                (one, other) = (other, one % other);
            }
            one
        };
        (self.hot * 2 / 5 + 1..self.hot)
            .find(|stride| divides(self.hot, *stride) == 1)
            .unwrap_or(0)
    }

    fn content_number(&self) -> u64 {
        match self.content {
            Content::Zero => 0,
            Content::Random => 1,
            Content::Mixed => 2,
            Content::Text => 3,
        }
    }
}

/// Which guest.
#[derive(Clone, Debug)]
pub enum Guest {
    /// The one without an operating system.
    Bare,
    /// Linux.
    Linux(Kernel),
}

/// Files and options by which QEMU starts a guest.
#[derive(Debug)]
pub(crate) struct Boot {
    /// The files, to be written before.
    pub(crate) files: Vec<(PathBuf, Vec<u8>)>,
    /// QEMU's options.
    pub(crate) options: Vec<String>,
}

impl Guest {
    /// How to start it with its files in `folder`.
    pub(crate) fn boot(&self, workload: &Workload, folder: &std::path::Path) -> Boot {
        assert!(
            workload.hot <= workload.pages && workload.memory_mib <= 2048,
            "{workload:?}"
        );
        match self {
            Self::Bare => bare::boot(workload, folder),
            Self::Linux(kernel) => linux::boot(kernel, workload, folder),
        }
    }
}

/// A line that a guest wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// The pages are filled.
    Ready {
        /// How many.
        pages: u64,
        /// How many of them are written to.
        hot: u64,
        /// Ticks of the guest's clock in a second.
        ticks: u64,
    },
    /// It goes on.
    Beat {
        /// Visits so far.
        visits: u64,
        /// Passes so far.
        passes: u64,
    },
    /// All pages were right.
    Checked {
        /// How many.
        pages: u64,
        /// Passes so far.
        passes: u64,
    },
    /// A page was wrong, and the guest has stopped.
    Wrong {
        /// Its number.
        page: u64,
        /// The count or signature that it should have.
        expected: u64,
        /// The one that it has.
        found: u64,
    },
}

impl Line {
    /// Reads a line; `None` for anything else, such as a kernel's messages, and a line whose
    /// beginning went to another host's serial line.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let kind = words.next()?;
        let mut number = || u64::from_str_radix(words.next()?, 16).ok();
        match kind {
            "ready" => Some(Self::Ready {
                pages: number()?,
                hot: number()?,
                ticks: number()?,
            }),
            "beat" => Some(Self::Beat {
                visits: number()?,
                passes: number()?,
            }),
            "checked" => Some(Self::Checked {
                pages: number()?,
                passes: number()?,
            }),
            "wrong" => Some(Self::Wrong {
                page: number()?,
                expected: number()?,
                found: number()?,
            }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_visits_every_hot_page_once() {
        for hot in [1, 2, 3, 4, 6, 64, 1000, 40_000, 65_521] {
            let workload = Workload {
                memory_mib: 512,
                pages: hot,
                hot,
                rate: None,
                content: Content::Zero,
                seed: 0,
            };
            let stride = workload.stride();
            let mut visited = vec![false; usize::try_from(hot).unwrap_or(0)];
            let mut cursor = 0;
            for _ in 0..hot {
                visited[usize::try_from(cursor).unwrap_or(0)] = true;
                cursor = (cursor + stride) % hot;
            }
            assert!(visited.iter().all(|page| *page), "{hot} by {stride}");
        }
    }

    #[test]
    fn lines_are_told_from_noise() {
        assert_eq!(
            Line::parse("beat ff 2\r\n"),
            Some(Line::Beat {
                visits: 255,
                passes: 2
            })
        );
        for noise in ["", "at ff 2", "beat ff", "[ 1.0] ready to go on now"] {
            assert_eq!(Line::parse(noise), None, "{noise}");
        }
    }
}
