//! How the two sides agree on the terms of a session.

use thiserror::Error;

use super::terms::{Features, LaneSecurity, VersionRange};
use super::{Offer, Refusal, Selection};
use crate::fault::FaultCode;

/// What a destination supports and requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Supported {
    /// Supported versions: [`VERSIONS`](super::VERSIONS), or those of the tunnel.
    pub versions: VersionRange,
    /// Supported features.
    pub features: Features,
    /// Required features, a subset of `features`.
    pub required: Features,
    /// Whether the operator allows plain lanes (I6).
    pub plain_allowed: bool,
    /// Whether this host is prepared to protect lanes with IPsec. No further
    /// consent is needed, because nothing is sent in the clear and the source has
    /// asked for IPsec explicitly.
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
    /// Checks the selection against the offer. The source calls this before it acts on the
    /// selection, so a destination cannot make the source give up TLS or a required feature (I6).
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

/// A selection outside the offer. The destination is at fault, and the source ends the session.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NotOffered {
    /// A version outside the offered range.
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
    /// A lane security other than the one that the offer requests.
    #[error("the destination selected {selected} lanes instead of {offered} lanes")]
    Security {
        /// The selected security.
        selected: LaneSecurity,
        /// The offered security.
        offered: LaneSecurity,
    },
}
