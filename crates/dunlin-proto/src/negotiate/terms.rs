//! Negotiable terms and how the two sides agree on them.

use std::fmt;

use thiserror::Error;

use super::{Offer, Refusal, Selection};
use crate::fault::FaultCode;
use crate::wire::{DecodeError, DecodeReason, Reader, bad_value};

/// What a destination supports and requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supported {
    /// Supported versions; [`VERSIONS`] except in tests.
    pub versions: VersionRange,
    /// Supported features.
    pub features: Features,
    /// Required features, a subset of `features`.
    pub required: Features,
    /// Whether the operator allows plain lanes (I6).
    pub plain_allowed: bool,
    /// Whether IPsec is prepared to protect lanes. No further consent is
    /// needed: nothing is sent in the clear, and the source has asked for IPsec
    /// explicitly.
    pub ipsec: bool,
}

/// Answers an offer with the newest common version, all common features, and
/// the security that the source asks for, if the destination supports it.
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
            format!("the source requires features that the destination lacks: {lacking}"),
        );
    }
    let offered = offer.optional.union(offer.required);
    let lacking = supported.required.without(offered);
    if !lacking.is_empty() {
        return refuse(
            FaultCode::FeatureMissing,
            format!("the destination requires features that the source does not offer: {lacking}"),
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
    /// Checks the selection against the offer. The source calls this before it
    /// acts on the selection, so a destination cannot make it give up TLS or a
    /// required feature (I6).
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

/// A selection outside the offer. The destination is at fault: end the session.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NotOffered {
    /// A version outside the range.
    #[error(
        "the destination selected version {selected}, which is not in the offered range {offered}"
    )]
    Version {
        /// The selected version.
        selected: u16,
        /// The offered versions.
        offered: VersionRange,
    },
    /// Features that were not offered.
    #[error("the destination selected features that were not offered: {0}")]
    Surplus(Features),
    /// Required features that were left out.
    #[error("the destination left out required features: {0}")]
    Missing(Features),
    /// A different lane security.
    #[error("the destination selected {selected} lanes instead of {offered} lanes")]
    Security {
        /// The selected security.
        selected: LaneSecurity,
        /// The offered security.
        offered: LaneSecurity,
    },
}

/// The versions that this release supports.
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

/// A set of optional features, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u64);

impl Features {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// Both sides digest the memory at switchover and compare (I3).
    pub const VERIFY: Self = Self(1);
    /// The connection speaks the tunnel's protocol, not a migration. Each
    /// tunnel process requires this feature, so a tunnel and a migration peer
    /// always refuse each other.
    pub const TUNNEL: Self = Self(2);

    /// The connection speaks an IPsec session's protocol; required in the same way.
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

    /// Whether all of `other` is in this set.
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
    /// Prints names, and the number of a bit that has none.
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
/// Unknown values are rejected as unsupported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneSecurity {
    /// TLS 1.3, in process or in the kernel.
    Tls,
    /// No protection: only with the consent of both sides (I6).
    Plain,
    /// ESP, with security associations set up by an IPsec session next to the control lane.
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
