//! Counters of the packets that IPsec dropped in a network namespace, by reason
//! (Documentation/networking/xfrm/xfrm_proc.rst).

use std::collections::BTreeMap;
use std::fs;
use std::io;

/// The file for the namespace of the calling thread. `/proc/net` would show the namespace of the
/// main thread.
const FILE: &str = "/proc/thread-self/net/xfrm_stat";

/// Packet counters since the namespace was created, by the kernel's names, for instance
/// `XfrmInNoStates`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics(BTreeMap<String, u64>);

impl Statistics {
    /// Reads the counters of the calling thread's network namespace.
    ///
    /// # Errors
    /// `NotFound` if the kernel has no counters (`CONFIG_XFRM_STATISTICS`).
    pub fn read() -> io::Result<Self> {
        fs::read_to_string(FILE).map(|text| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let lines = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(char::is_whitespace)?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        });
        Self(lines.collect())
    }

    /// Returns a counter, or 0 if the kernel has no counter with that name.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Returns the growth of each counter since `earlier`, without counters that did not grow.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> BTreeMap<&str, u64> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.saturating_sub(earlier.get(name))))
            .filter(|(_, grown)| *grown > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_by_their_names_and_compared() {
        let earlier = Statistics::parse("XfrmInError                     0\nXfrmInNoStates\t7\n");
        let later = Statistics::parse("XfrmInError 0\nXfrmInNoStates 9\nodd\n");
        assert_eq!((earlier.get("XfrmInNoStates"), later.get("None")), (7, 0));
        let grown: Vec<_> = later.since(&earlier).into_iter().collect();
        assert_eq!(grown, [("XfrmInNoStates", 2)]);
    }
}
