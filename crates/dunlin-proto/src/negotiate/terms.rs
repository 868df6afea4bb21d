//! What two sides can agree on, and how they do.

use std::fmt;

use thiserror::Error;

use super::{Offer, Refusal, Selection};
use crate::fault::FaultCode;
use crate::wire::{DecodeError, DecodeReason, Reader, bad_value};

/// What a destination can and will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supported {
    /// What it speaks; [`VERSIONS`] unless a test says otherwise.
    pub versions: VersionRange,
    /// What it can do.
    pub features: Features,
    /// What it insists on; part of `features`.
    pub required: Features,
    /// Whether its operator consents to lanes without security (I6).
    pub plain_allowed: bool,
    /// Whether it can have IPsec protect lanes. A source that asks for that has chosen it, and
    /// so has a destination that prepared it: nothing is in the clear, and nobody consents.
    pub ipsec: bool,
}

/// Answers an offer: the newest common version, all features that both have,
/// and the security that the source asks for if the destination consents.
///
/// # Errors
/// The [`Refusal`] to send; its text names what is missing.
pub fn select(offer: &Offer, supported: &Supported) -> Result<Selection, Refusal> {
    let refuse = |fault, text| Err(Refusal { fault, text });
    let Some(version) = supported.versions.newest_common(offer.versions) else {
        return refuse(
            FaultCode::VersionMismatch,
            format!(
                "the source speaks versions {}, the destination {}",
                offer.versions, supported.versions
            ),
        );
    };
    let lacking = offer.required.without(supported.features);
    if !lacking.is_empty() {
        return refuse(
            FaultCode::FeatureMissing,
            format!("the source requires what the destination does not have: {lacking}"),
        );
    }
    let offered = offer.optional.union(offer.required);
    let lacking = supported.required.without(offered);
    if !lacking.is_empty() {
        return refuse(
            FaultCode::FeatureMissing,
            format!("the destination requires what the source does not offer: {lacking}"),
        );
    }
    if offer.security == LaneSecurity::Plain && !supported.plain_allowed {
        return refuse(
            FaultCode::SecurityNotAgreed,
            "the source asks for plain lanes and the destination does not allow them".to_owned(),
        );
    }
    if offer.security == LaneSecurity::Ipsec && !supported.ipsec {
        return refuse(
            FaultCode::SecurityNotAgreed,
            "the source asks for lanes over IPsec and the destination is not prepared for them"
                .to_owned(),
        );
    }
    Ok(Selection {
        version,
        features: offered.intersection(supported.features),
        security: offer.security,
    })
}

impl Selection {
    /// Compares the answer with the offer that it answers. The source calls
    /// this before it believes any of it, so that a destination can neither
    /// talk it out of TLS nor out of a feature that it requires (I6).
    ///
    /// # Errors
    /// The selection is not within the offer. The peer is at fault.
    pub fn confirm(&self, offer: &Offer) -> Result<(), NotOffered> {
        if !offer.versions.contains(self.version) {
            return Err(NotOffered::Version {
                selected: self.version,
                offered: offer.versions,
            });
        }
        let surplus = self.features.without(offer.optional.union(offer.required));
        if !surplus.is_empty() {
            return Err(NotOffered::Surplus(surplus));
        }
        let missing = offer.required.without(self.features);
        if !missing.is_empty() {
            return Err(NotOffered::Missing(missing));
        }
        if self.security != offer.security {
            return Err(NotOffered::Security {
                selected: self.security,
                offered: offer.security,
            });
        }
        Ok(())
    }
}

/// A selection that is not within the offer. The destination is at fault: end
/// the session.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NotOffered {
    /// A version outside the range.
    #[error("the destination selected version {selected} although {offered} were offered")]
    Version {
        /// What it selected.
        selected: u16,
        /// What was offered.
        offered: VersionRange,
    },
    /// Features that were not offered.
    #[error("the destination selected features that were not offered: {0}")]
    Surplus(Features),
    /// Required features that were left out.
    #[error("the destination left out features that are required: {0}")]
    Missing(Features),
    /// Another lane security.
    #[error("the destination selected {selected} lanes although {offered} lanes were asked for")]
    Security {
        /// What it selected.
        selected: LaneSecurity,
        /// What was offered.
        offered: LaneSecurity,
    },
}

/// The versions of this release.
pub const VERSIONS: VersionRange = VersionRange { min: 1, max: 1 };

/// Protocol versions from `min` to `max`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// The oldest version, at least 1.
    pub min: u16,
    /// The newest version, at least `min`.
    pub max: u16,
}

impl VersionRange {
    /// The range that holds one version.
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

/// A set of optional abilities, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// No feature.
    pub const NONE: Self = Self(0);
    /// Both sides digest the memory at switchover and compare (I3).
    pub const VERIFY: Self = Self(1);
    /// What follows is the tunnel's protocol and no migration. A side that
    /// speaks it requires it of the other, so that neither is ever taken for
    /// the other.
    pub const TUNNEL: Self = Self(2);

    /// What follows is an IPsec session's protocol, in the same way.
    pub const IPSEC: Self = Self(4);

    /// The features of this release with their names.
    const NAMES: [(Self, &'static str); 3] = [
        (Self::VERIFY, "verify"),
        (Self::TUNNEL, "tunnel"),
        (Self::IPSEC, "ipsec"),
    ];

    /// The set as it came from the wire; unknown bits are kept.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The set as it goes on the wire.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether all of `other` is in this set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What is in either set.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What is in both sets.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// What is in this set and not in `other`.
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
    /// The names, a bit without one as its number.
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

/// What protects the data lanes of a session. The control lane is always TLS.
///
/// Values that this release does not know are refused as not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneSecurity {
    /// TLS 1.3, in the process or in the kernel.
    Tls,
    /// Nothing: only when both sides say so (I6).
    Plain,
    /// ESP, by security associations that an IPsec session beside the control lane sets up.
    Ipsec,
}

impl LaneSecurity {
    pub(super) fn to_wire(self) -> u8 {
        match self {
            Self::Tls => 1,
            Self::Plain => 2,
            Self::Ipsec => 3,
        }
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        const WHAT: &str = "lane security";
        let offset = reader.offset();
        match reader.u8(WHAT)? {
            1 => Ok(Self::Tls),
            2 => Ok(Self::Plain),
            3 => Ok(Self::Ipsec),
            0 => Err(bad_value(WHAT, 0, offset)),
            value => Err(DecodeError {
                what: WHAT,
                why: DecodeReason::Unsupported {
                    value: u64::from(value),
                },
                offset,
            }),
        }
    }
}

impl fmt::Display for LaneSecurity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Tls => "tls",
            Self::Plain => "plain",
            Self::Ipsec => "ipsec",
        })
    }
}
