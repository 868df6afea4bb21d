//! Guests for hypervisors, which check their memory while they write to it.
//!
//! Both guests have the same workload and the same protocol on the serial line. [`Guest::Bare`] has
//! no operating system and runs at privilege level 3 from the start, so it runs natively even if
//! KVM emulates level 0 (`guest/bare.S`). [`Guest::Linux`] is a Debian kernel with the writer as
//! its only process (`src/bin/rig-writer.rs`).
//!
//! # The workload
//!
//! A page holds 512 words of 8 bytes. Word 0 counts the visits. The XOR of all words is the
//! page's signature: zero if the page started as zeros, otherwise `(number + 1) *
//! 0x9e3779b97f4a7c15 ^ seed`. A visit checks the count and the signature, increments word 0 and
//! adjusts word 511 to restore the signature. A pass visits each of the first `hot` pages once;
//! each visit also checks one of the other pages.
//!
//! # The serial line
//!
//! Numbers are hexadecimal.
//!
//! ```text
//! ready PAGES HOT TICKS            the pages are filled; TICKS of the clock make a second
//! beat VISITS PASSES               twenty times a second
//! checked PAGES PASSES             all pages were checked, after `c` was received
//! wrong PAGE EXPECTED FOUND        a count or a signature; nothing comes after it
//! ```

mod bare;
mod initramfs;
mod linux;

use std::collections::HashSet;
use std::path::PathBuf;

pub use initramfs::Initramfs;

use crate::debian::Kernel;

/// The factor in the signature of a page.
const SIGNATURE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The initial content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros, until a visit writes to the page.
    Zero,
    /// Incompressible data.
    Random,
    /// Zeros on pages with an even number, incompressible data on the others.
    Mixed,
    /// The same eight words repeated.
    Text,
}

/// A guest's memory, and how the guest uses it.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The size of the guest's memory in MiB; at most 2048.
    pub memory_mib: u32,
    /// The number of pages that the guest fills and checks. They may occupy all memory except 4 MiB
    /// for the bare guest, or except 128 MiB for Linux. If the bare guest has no pages, it reports
    /// that it is ready, and then it halts. After that, it does not answer on its serial line.
    pub pages: u64,
    /// The number of hot pages. The guest writes to the first `hot` of its pages.
    pub hot: u64,
    /// Visits per second; `None` for as many as possible.
    pub rate: Option<u64>,
    /// The initial content of the pages.
    pub content: Content,
    /// A number that makes the page contents of two guests differ.
    pub seed: u64,
}

impl Workload {
    /// The distance between consecutively visited pages, modulo `hot`: large, and coprime to `hot`,
    /// so a pass visits each page once.
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

    /// Returns the word at offset 8 of each page with an initial content other than zeros. These
    /// words never change.
    #[must_use]
    pub fn words(&self) -> HashSet<u64> {
        let word = |page: u64| {
            let signature = (page + 1).wrapping_mul(SIGNATURE) ^ self.seed;
            match self.content {
                Content::Zero => None,
                Content::Mixed if page.is_multiple_of(2) => None,
                Content::Text => Some(signature.rotate_left(8)),
                Content::Random | Content::Mixed => {
                    let mut word = signature;
                    word ^= word << 13;
                    word ^= word >> 7;
                    word ^= word << 17;
                    Some(word)
                }
            }
        };
        (0..self.pages).filter_map(word).collect()
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

/// The kind of guest.
#[derive(Clone, Debug)]
pub enum Guest {
    /// The guest without an operating system.
    Bare,
    /// Linux.
    Linux(Kernel),
}

/// The bare guest as an ELF image for a hypervisor that boots with PVH.
///
/// # Panics
/// The pages do not fit into the memory.
#[must_use]
pub fn bare_image(workload: &Workload) -> Vec<u8> {
    bare::image(workload)
}

/// Files and options with which QEMU starts a guest.
#[derive(Debug)]
pub(crate) struct Boot {
    /// The files, to be written first.
    pub(crate) files: Vec<(PathBuf, Vec<u8>)>,
    /// QEMU's options.
    pub(crate) options: Vec<String>,
}

impl Guest {
    /// Returns the files and options with which QEMU starts the guest. The files are in `folder`.
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

/// A line from a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// The pages are filled.
    Ready {
        /// The number of pages.
        pages: u64,
        /// The number of pages to which the guest writes.
        hot: u64,
        /// Ticks of the guest's clock in a second.
        ticks: u64,
    },
    /// A periodic report.
    Beat {
        /// Visits so far.
        visits: u64,
        /// Passes so far.
        passes: u64,
    },
    /// All pages passed the check.
    Checked {
        /// The number of pages.
        pages: u64,
        /// Passes so far.
        passes: u64,
    },
    /// A page failed the check, and the guest has stopped.
    Wrong {
        /// The number of the page.
        page: u64,
        /// The expected count or signature.
        expected: u64,
        /// The count or signature found.
        found: u64,
    },
}

impl Line {
    /// Parses a line. Returns `None` for anything else, such as kernel messages, or the end of a
    /// line that began on the other host before a migration.
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
    fn lines_are_separated_from_noise() {
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
