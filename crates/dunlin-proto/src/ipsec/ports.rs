//! Ranges of ports, and their split into blocks. A policy's selector can express only a block.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Ports from `first` to `last`, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortRange {
    first: u16,
    last: u16,
}

/// The text is not a range or a block of ports.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("invalid port {kind} `{text}`: expected a form such as {form}")]
pub struct NotPorts {
    text: String,
    kind: &'static str,
    form: &'static str,
}

impl PortRange {
    /// Creates a range; `None` if it is empty or includes port 0.
    #[must_use]
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (0 < first && first <= last).then_some(Self { first, last })
    }

    /// Returns the first port.
    #[must_use]
    pub fn first(self) -> u16 {
        self.first
    }

    /// Returns the last port.
    #[must_use]
    pub fn last(self) -> u16 {
        self.last
    }

    /// Returns whether the range contains `port`.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    /// Returns whether a port is in both ranges.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Returns the blocks of `count` ports in the range. `count` is a power of two, and each block
    /// is aligned to it. Incomplete blocks at the edges are left out.
    pub fn parts(self, count: u16) -> impl Iterator<Item = Self> {
        let count = u32::from(count.max(1));
        let first = u32::from(self.first).next_multiple_of(count);
        let last = u32::from(self.last);
        (first..=last)
            .step_by(count as usize)
            .filter(move |first| first + count - 1 <= last)
            .filter_map(move |first| Self::new(first as u16, (first + count - 1) as u16))
    }

    /// Returns the smallest set of blocks that contain exactly these ports, in ascending order.
    /// There are at most 30. The size of a block is a power of two, and its first port is a
    /// multiple of the size.
    #[must_use]
    pub fn blocks(self) -> Vec<PortBlock> {
        let mut blocks = Vec::new();
        let (mut at, last) = (u32::from(self.first), u32::from(self.last));
        while at <= last {
            // The largest block that starts here and does not exceed the last port.
            let aligned = if at == 0 { 16 } else { at.trailing_zeros() };
            let fitting = (last - at + 1).ilog2();
            let size = 1_u32 << aligned.min(fitting);
            // The casts are correct, because ports have 16 bits and a block has at most 65536
            // ports.
            let (port, mask) = (at as u16, !(size - 1) as u16);
            blocks.push(PortBlock { port, mask });
            at += size;
        }
        blocks
    }
}

impl FromStr for PortRange {
    type Err = NotPorts;

    fn from_str(text: &str) -> Result<Self, NotPorts> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let range = first.parse().ok().zip(last.parse().ok());
        range
            .and_then(|(first, last)| Self::new(first, last))
            .ok_or_else(|| NotPorts {
                text: text.to_owned(),
                kind: "range",
                form: "49152-49215, from 1 to 65535",
            })
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return write!(formatter, "{}", self.first);
        }
        write!(formatter, "{}-{}", self.first, self.last)
    }
}

/// The ports that equal `port` in the bits of `mask`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortBlock {
    /// The value of the masked bits; the other bits are zero.
    pub port: u16,
    /// The bits that are compared; zero means any port.
    pub mask: u16,
}

impl PortBlock {
    /// Every port.
    pub const ANY: Self = Self { port: 0, mask: 0 };

    /// One port.
    #[must_use]
    pub fn only(port: u16) -> Self {
        Self {
            port,
            mask: u16::MAX,
        }
    }

    /// Returns whether the block contains `port`.
    #[must_use]
    pub fn contains(self, port: u16) -> bool {
        port & self.mask == self.port
    }

    /// Returns whether the blocks have a port in common.
    #[must_use]
    pub fn meets(self, other: Self) -> bool {
        let both = self.mask & other.mask;
        self.port & both == other.port & both
    }

    /// Returns whether the block contains every port of `other`.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.mask & other.mask == self.mask && other.port & self.mask == self.port
    }
}

impl fmt::Display for PortBlock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{:#06x}", self.port, self.mask)
    }
}

impl FromStr for PortBlock {
    type Err = NotPorts;

    fn from_str(text: &str) -> Result<Self, NotPorts> {
        let parse = || {
            let (port, mask) = text.split_once("/0x")?;
            let port = port.parse().ok()?;
            let mask = u16::from_str_radix(mask, 16).ok()?;
            (port & !mask == 0).then_some(Self { port, mask })
        };
        parse().ok_or_else(|| NotPorts {
            text: text.to_owned(),
            kind: "block",
            form: "49152/0xffc0, where every bit set in the port is also set in the mask",
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn has_exact_blocks(range: PortRange) {
        let blocks = range.blocks();
        assert!(blocks.len() <= 30, "{range}: {}", blocks.len());
        for port in 0..=u16::MAX {
            let containing = blocks.iter().filter(|block| block.contains(port)).count();
            assert_eq!(
                containing,
                usize::from(range.contains(port)),
                "{range}: port {port}"
            );
        }
    }

    #[test]
    fn ranges_at_the_edges_have_exact_blocks() {
        for (first, last) in [(1, 65_535), (1, 1), (65_535, 65_535), (1, 65_534), (2, 3)] {
            has_exact_blocks(PortRange::new(first, last).unwrap());
        }
        let aligned = PortRange::new(49_152, 49_215).unwrap().blocks();
        assert_eq!(
            aligned,
            [PortBlock {
                port: 49_152,
                mask: 0xffc0
            }]
        );
    }

    #[test]
    fn parts_are_complete_adjacent_blocks() {
        let range = PortRange::new(24_570, 24_704).unwrap();
        let parts: Vec<String> = range.parts(64).map(|part| part.to_string()).collect();
        assert_eq!(parts, ["24576-24639", "24640-24703"]);
        assert!(range.parts(64).all(|part| part.blocks().len() == 1));
        assert_eq!(PortRange::new(1, 64).unwrap().parts(64).count(), 0);
        let last = PortRange::new(65_472, 65_535).unwrap();
        assert_eq!(last.parts(64).next(), Some(last));
        assert_eq!(PortRange::new(5, 9).unwrap().parts(1).count(), 5);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn blocks_contain_exactly_the_ports_of_a_range(one in 1..=u16::MAX, other in 1..=u16::MAX) {
            has_exact_blocks(PortRange::new(one.min(other), one.max(other)).unwrap());
        }

        #[test]
        fn blocks_that_meet_share_a_port(one in any::<(u16, u16)>(), other in any::<(u16, u16)>()) {
            let block = |(port, mask): (u16, u16)| PortBlock { port: port & mask, mask };
            let (one, other) = (block(one), block(other));
            let shared = one.port | other.port;
            prop_assert_eq!(
                one.meets(other),
                one.contains(shared) && other.contains(shared)
            );
            prop_assert_eq!(one.to_string().parse(), Ok(one));
        }
    }

    #[test]
    fn text_that_is_not_a_range_of_ports_is_rejected() {
        for text in ["0", "5-4", "0-9", "70000", "-3", "4-", "a", ""] {
            assert!(text.parse::<PortRange>().is_err(), "{text}");
        }
        assert_eq!("7-9".parse(), Ok(PortRange::new(7, 9).unwrap()));
        assert_eq!("7".parse(), Ok(PortRange::new(7, 7).unwrap()));
    }

    #[test]
    fn text_that_is_not_a_block_is_rejected_as_a_block() {
        for text in [
            "49152",
            "49152/ffc0",
            "49153/0xffc0",
            "1-2",
            "70000/0xffff",
            "1/0x10000",
        ] {
            let error = text.parse::<PortBlock>().unwrap_err();
            assert_eq!((&*error.text, error.kind), (text, "block"));
        }
        let range = "49152/0xffc0".parse::<PortRange>().unwrap_err();
        assert_eq!(range.kind, "range");
    }
}
