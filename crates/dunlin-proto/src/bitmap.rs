//! A bitmap of the guest pages that are still to be sent.
//!
//! [`PageBitmap::union`] adds the pages of a dirty log, and [`PageBitmap::take_run`] removes pages
//! for a chunk. The bitmap needs one bit per guest page, however many pages are pending (I8).

/// Pages of one region that are waiting to be sent, one bit each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageBitmap {
    words: Vec<u64>,
    pages: u64,
    set: u64,
}

/// `count` pages, starting with page `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first page.
    pub first: u64,
    /// Number of pages, at least one.
    pub count: u64,
}

const WORD_BITS: u64 = u64::BITS as u64;

impl PageBitmap {
    /// An empty bitmap for `pages` pages.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(WORD_BITS)).unwrap_or(usize::MAX);
        Self {
            words: vec![0; words],
            pages,
            set: 0,
        }
    }

    /// Number of pages that the bitmap covers.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of pages that are set.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.set
    }

    /// Whether `page` is set; false for a page past the end.
    #[must_use]
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / WORD_BITS) as usize] >> (page % WORD_BITS) & 1 == 1
    }

    /// Sets the pages of `run`; pages past the end are ignored.
    pub fn insert(&mut self, run: Run) {
        let end = run.first.saturating_add(run.count).min(self.pages);
        let mut page = run.first;
        while page < end {
            let bit = page % WORD_BITS;
            let here = (end - page).min(WORD_BITS - bit);
            let mask = mask(bit, here);
            let word = &mut self.words[(page / WORD_BITS) as usize];
            self.set += u64::from((mask & !*word).count_ones());
            *word |= mask;
            page += here;
        }
    }

    /// Sets the pages that are set in `log`, which has the format of KVM's dirty bitmap: bit 0 of
    /// word 0 is page 0. Bits and words past the end are ignored. Returns the number of pages set
    /// in `log`.
    pub fn union(&mut self, log: &[u64]) -> u64 {
        let last = self.words.len().saturating_sub(1);
        let mut named = 0;
        for (index, (word, &new)) in self.words.iter_mut().zip(log).enumerate() {
            let tail = self.pages % WORD_BITS;
            let new = if index == last && tail != 0 {
                new & mask(0, tail)
            } else {
                new
            };
            named += u64::from(new.count_ones());
            self.set += u64::from((new & !*word).count_ones());
            *word |= new;
        }
        named
    }

    /// Removes and returns the first run of set pages at or after `from`, at most `limit` pages
    /// long. Returns `None` if no such page is set or `limit` is 0.
    pub fn take_run(&mut self, from: u64, limit: u64) -> Option<Run> {
        let first = self.first_set(from)?;
        if limit == 0 {
            return None;
        }
        let mut count = 0;
        let mut page = first;
        while count < limit && page < self.pages {
            let bit = page % WORD_BITS;
            let word = &mut self.words[(page / WORD_BITS) as usize];
            let here = u64::from((!(*word >> bit)).trailing_zeros())
                .min(WORD_BITS - bit)
                .min(limit - count);
            if here == 0 {
                break;
            }
            *word &= !mask(bit, here);
            count += here;
            page += here;
            if page % WORD_BITS != 0 {
                break;
            }
        }
        self.set -= count;
        Some(Run { first, count })
    }

    fn first_set(&self, from: u64) -> Option<u64> {
        if from >= self.pages || self.set == 0 {
            return None;
        }
        let start = (from / WORD_BITS) as usize;
        let head = self.words[start] & !mask(0, from % WORD_BITS);
        if head != 0 {
            return Some(start as u64 * WORD_BITS + u64::from(head.trailing_zeros()));
        }
        let offset = self.words[start + 1..].iter().position(|&word| word != 0)?;
        let index = start + 1 + offset;
        Some(index as u64 * WORD_BITS + u64::from(self.words[index].trailing_zeros()))
    }
}

/// A word with `count` ones from bit `first` on; `first + count` is at most 64.
fn mask(first: u64, count: u64) -> u64 {
    if count == 0 {
        return 0;
    }
    (u64::MAX >> (WORD_BITS - count)) << first
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bits_beyond_the_last_page_are_ignored() {
        let mut bitmap = PageBitmap::new(70);
        assert_eq!(bitmap.union(&[u64::MAX, u64::MAX, u64::MAX]), 70);
        assert_eq!(bitmap.count(), 70);
        bitmap.insert(Run {
            first: 60,
            count: u64::MAX,
        });
        assert_eq!(bitmap.count(), 70);
        assert!(!bitmap.contains(70));
    }

    #[test]
    fn a_run_continues_across_words() {
        let mut bitmap = PageBitmap::new(256);
        bitmap.insert(Run {
            first: 60,
            count: 140,
        });
        assert_eq!(
            bitmap.take_run(0, 1000),
            Some(Run {
                first: 60,
                count: 140
            })
        );
        assert_eq!(bitmap.count(), 0);
        assert_eq!(bitmap.take_run(0, 1000), None);
    }

    proptest! {
        /// Taking every run returns each set page exactly once.
        #[test]
        fn runs_partition_the_set_pages(
            pages in 1u64..400,
            log in prop::collection::vec(any::<u64>(), 0..8),
            limit in 1u64..100,
        ) {
            let mut bitmap = PageBitmap::new(pages);
            bitmap.union(&log);
            let before = bitmap.clone();
            let mut seen = PageBitmap::new(pages);
            let mut from = 0;
            while let Some(run) = bitmap.take_run(from, limit) {
                prop_assert!(run.count >= 1 && run.count <= limit);
                for page in run.first..run.first + run.count {
                    prop_assert!(before.contains(page) && !seen.contains(page));
                }
                seen.insert(run);
                from = run.first + run.count;
            }
            prop_assert_eq!(seen, before);
            prop_assert_eq!(bitmap.count(), 0);
        }
    }
}
