//! Negotiable terms: versions, features, the security of lanes.

use std::fmt;

use crate::wire::codec::OneOf;

/// The versions of migrations and keying sessions that this release supports.
pub const VERSIONS: VersionRange = VersionRange { min: 1, max: 1 };

/// The versions of the tunnel that this release supports. In version 2 the side that dialled a
/// trunk opens the lanes of both directions, and *lane open* names the direction.
pub const TUNNEL_VERSIONS: VersionRange = VersionRange { min: 1, max: 2 };

/// Protocol versions from `min` to `max`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// The oldest version, at least 1.
    pub min: u16,
    /// The newest version, at least `min`.
    pub max: u16,
}

impl VersionRange {
    /// The range of a single version.
    #[must_use]
    pub fn only(version: u16) -> Self {
        Self {
            min: version,
            max: version,
        }
    }

    /// Whether the version lies in the range.
    #[must_use]
    pub fn contains(self, version: u16) -> bool {
        (self.min..=self.max).contains(&version)
    }

    /// The newest version that lies in both ranges.
    #[must_use]
    pub fn newest_common(self, other: Self) -> Option<u16> {
        let newest = self.max.min(other.max);
        (self.contains(newest) && other.contains(newest)).then_some(newest)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} to {}", self.min, self.max)
    }
}

/// A set of features that the two sides negotiate, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// Both sides compute a digest of the memory at switchover and compare the digests (I3).
    pub const VERIFY: Self = Self(1);
    /// The connection speaks the tunnel's protocol, not that of a migration. Each tunnel process
    /// requires this feature, so a tunnel and a migration peer always refuse each other.
    pub const TUNNEL: Self = Self(2);

    /// The connection speaks the protocol of a keying session, not of a migration.
    /// Both sides of a keying session require this feature.
    pub const IPSEC: Self = Self(4);

    /// The features of this release and their names.
    const NAMES: [(Self, &'static str); 3] = [
        (Self::VERIFY, "verify"),
        (Self::TUNNEL, "tunnel"),
        (Self::IPSEC, "ipsec"),
    ];

    /// The set for bits from the wire; unknown bits are kept.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The set's bits on the wire.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether this set contains every feature of `other`.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The features in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The features in this set that are not in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Features {
    /// Prints the name of each feature, or the number of its bit if it has no name.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return formatter.write_str("none");
        }
        let mut separator = "";
        for bit in 0..u64::BITS {
            let feature = Self(1 << bit);
            if !self.contains(feature) {
                continue;
            }
            formatter.write_str(separator)?;
            separator = ", ";
            match Self::NAMES.iter().find(|(named, _)| *named == feature) {
                Some((_, name)) => formatter.write_str(name)?,
                None => write!(formatter, "feature {bit}")?,
            }
        }
        Ok(())
    }
}

/// What protects the data lanes of a session. The control lane always uses TLS.
///
/// Unknown values are rejected as unsupported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneSecurity {
    /// TLS 1.3, in process or in the kernel.
    Tls,
    /// No protection. Both sides must consent.
    Plain,
    /// ESP. A keying session beside the control lane sets up the security associations.
    Ipsec,
}

pub(super) const LANE_SECURITY: OneOf<u8, LaneSecurity> = OneOf {
    rows: &[
        (1, LaneSecurity::Tls),
        (2, LaneSecurity::Plain),
        (3, LaneSecurity::Ipsec),
    ],
    grows: true,
};

impl fmt::Display for LaneSecurity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Tls => "tls",
            Self::Plain => "plain",
            Self::Ipsec => "ipsec",
        })
    }
}
