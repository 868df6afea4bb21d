//! The layout of guest memory. `guest/workload.S` defines the same layout for the guest; the two
//! files must agree.
//!
//! The workload's pages are numbered from the start of memory, without the hole between 3 and 4
//! GiB. A page's frame number is its address divided by 4096, so it includes the hole.

use dunlin_linux::mapping::{HOLE_END, HOLE_START, HUGE_PAGE_BYTES, PAGE_BYTES};

use crate::config::{Config, Fill, WORKLOAD_START, Workload};

/// Address of the first page table, the only table of the top level.
pub(crate) const TABLES: u64 = 0x1_0000;
/// Address of the guest's program and of its first instruction.
pub(crate) const CODE: u64 = 0x6_0000;
/// Address of the first parameter block. The other blocks follow, one page each.
pub(crate) const BLOCKS: u64 = 0x7_0000;
/// Guest-physical address of 16 pages that the guest does not touch. The VMM writes to them like a
/// device.
pub const DEVICE_START: u64 = 0x8_0000;

/// Byte offsets of the words of a parameter block.
pub(crate) mod block {
    pub(crate) const HAS_AVX: u64 = 0x00;
    pub(crate) const SEED: u64 = 0x08;
    pub(crate) const FILL_END: u64 = 0x10;
    pub(crate) const FILL: u64 = 0x18;
    pub(crate) const SHARE: u64 = 0x20;
    pub(crate) const SET_0: u64 = 0x40;
    pub(crate) const SET_1: u64 = 0x80;
    pub(crate) const VISITS: u64 = 0xc0;
    pub(crate) const LAST_TSC: u64 = 0xc8;
    pub(crate) const BEATS: u64 = 0xd0;
    /// Where the guest reports a failed check: code, frame, expected value and actual value, of
    /// eight bytes each.
    pub(crate) const STOP: u64 = 0xd8;
}

/// The I/O ports that the guest uses.
pub(crate) mod port {
    pub(crate) const BEAT: u16 = 0x500;
    pub(crate) const STOPPED: u16 = 0x501;
    pub(crate) const POWER_OFF: u16 = 0x502;
}

/// The VMM's answer to a beat if the guest must power off.
pub(crate) const POWER_OFF_ANSWER: u32 = u32::MAX;

/// Distance between non-zero pages of a sparse fill, in pages: one huge page.
const SPARSE_PAGES: u64 = HUGE_PAGE_BYTES / PAGE_BYTES;

/// Multiplier for the signature of a filled page. It is odd, so that the signatures of filled pages
/// differ.
const SIGNATURE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Address of the parameter block of a vCPU.
pub(crate) fn block_start(vcpu: u8) -> u64 {
    BLOCKS + u64::from(vcpu) * PAGE_BYTES
}

/// The frame number of a page.
pub(crate) fn frame(page: u64) -> u64 {
    if page < HOLE_START / PAGE_BYTES {
        page
    } else {
        page + (HOLE_END - HOLE_START) / PAGE_BYTES
    }
}

/// The number of the first page after the pages that `fill` applies to.
pub(crate) fn fill_end(config: &Config) -> u64 {
    let first = WORKLOAD_START / PAGE_BYTES;
    let room = config.memory_bytes / PAGE_BYTES - first;
    let filled = config.fill_bytes.map_or(room, |bytes| bytes / PAGE_BYTES);
    first + filled.min(room)
}

/// The signature of a page: the XOR of all its words. `None` if `fill` leaves the page zero.
pub(crate) fn signature(fill: Fill, seed: u64, frame: u64) -> Option<u64> {
    let product = frame.wrapping_mul(SIGNATURE);
    match fill {
        Fill::Zero => None,
        Fill::Mixed if product >> 63 == 1 => None,
        Fill::Sparse if frame % SPARSE_PAGES != SPARSE_PAGES / 2 => None,
        Fill::Random | Fill::Mixed | Fill::Sparse => Some(product ^ seed),
    }
}

/// A set of pages, `base..base + count`, each of which is visited once per pass. The first position
/// is 0. The position after x is (x * multiplier + increment) & mask; this step is repeated while
/// the result is not below `count`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageSet {
    base: u64,
    count: u64,
    multiplier: u64,
    increment: u64,
    mask: u64,
}

impl PageSet {
    fn in_order(base: u64, count: u64) -> Self {
        Self {
            base,
            count,
            multiplier: 1,
            increment: 1,
            mask: u64::MAX,
        }
    }

    /// Visits the pages in a scattered order. A linear congruential generator has its full period
    /// modulo a power of two if the increment is odd and the multiplier is 1 modulo 4 (Hull and
    /// Dobell, 1962).
    fn scattered(base: u64, count: u64) -> Self {
        Self {
            base,
            count,
            multiplier: 0x5851_f42d_4c95_7f2d,
            increment: 0x1405_7b7e_f767_814f,
            mask: count.next_power_of_two() - 1,
        }
    }

    /// Number of pages.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The number of the page at position `cursor`.
    pub(crate) fn page(&self, cursor: u64) -> u64 {
        self.base + cursor
    }

    /// The position visited after `cursor`, which must not be the last position of its pass.
    pub(crate) fn next(&self, mut cursor: u64) -> u64 {
        loop {
            cursor = cursor
                .wrapping_mul(self.multiplier)
                .wrapping_add(self.increment)
                & self.mask;
            if cursor < self.count {
                return cursor;
            }
        }
    }

    /// The words of a parameter block that describe this set, with the values before the guest's
    /// first visit to a page.
    pub(crate) fn words(&self) -> [u64; 8] {
        let (cursor, left, pass) = (0, self.count, 0);
        [
            self.base,
            self.count,
            cursor,
            left,
            pass,
            self.multiplier,
            self.increment,
            self.mask,
        ]
    }
}

/// The two page sets of a vCPU, and the percentage of its visits that go to the first set.
pub(crate) fn page_sets(config: &Config, vcpu: u8) -> ([PageSet; 2], u64) {
    let first = WORKLOAD_START / PAGE_BYTES;
    let all = config
        .working_set_bytes
        .unwrap_or(config.memory_bytes - WORKLOAD_START)
        / PAGE_BYTES;
    let (vcpu, vcpus) = (u64::from(vcpu), u64::from(config.vcpus));
    let start = all * vcpu / vcpus;
    let count = all * (vcpu + 1) / vcpus - start;
    let base = first + start;
    match config.workload {
        Workload::Idle | Workload::Sequential => ([PageSet::in_order(base, count); 2], 100),
        Workload::Random => ([PageSet::scattered(base, count); 2], 100),
        Workload::HotSet { share_percent } => {
            let hot = count / 8;
            let sets = [
                PageSet::in_order(base, hot),
                PageSet::in_order(base + hot, count - hot),
            ];
            (sets, u64::from(share_percent))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(set: PageSet) -> Vec<u64> {
        let mut cursor = 0;
        (0..set.count())
            .map(|visit| {
                if visit > 0 {
                    cursor = set.next(cursor);
                }
                set.page(cursor)
            })
            .collect()
    }

    #[test]
    fn the_scattered_order_visits_each_page_once() {
        for count in [8, 9, 1000, 4095, 4096, 4097] {
            let mut pages = order(PageSet::scattered(100, count));
            assert_ne!(pages, (100..100 + count).collect::<Vec<_>>());
            pages.sort_unstable();
            assert_eq!(pages, (100..100 + count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_vcpus_share_the_working_set_without_a_gap_or_overlap() {
        let config = Config {
            vcpus: 3,
            working_set_bytes: Some(1000 * PAGE_BYTES),
            workload: Workload::HOT_SET,
            ..Config::default()
        };
        let mut pages: Vec<u64> = (0..3)
            .flat_map(|vcpu| page_sets(&config, vcpu).0)
            .flat_map(order)
            .collect();
        pages.sort_unstable();
        assert_eq!(pages, (1024..2024).collect::<Vec<_>>());
    }

    #[test]
    fn frames_leave_out_the_hole() {
        assert_eq!(frame(0xb_ffff), 0xb_ffff);
        assert_eq!(frame(0xc_0000), 0x10_0000);
    }
}
