//! Why bytes could not be read, or values not written.

use thiserror::Error;

use crate::fault::FaultCode;

/// Why bytes from a peer were refused. The peer is at fault, or newer.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{what} at byte {offset} is refused: {why}")]
pub struct DecodeError {
    /// The field, in the words of docs/wire.md.
    pub what: &'static str,
    /// What is wrong with it.
    pub why: DecodeReason,
    /// Where it starts, in bytes from the start of the bytes that were given
    /// to the decoder.
    pub offset: usize,
}

impl DecodeError {
    /// The code to answer with: a peer that is newer is told which thing is
    /// missing here, any other that what it sent is malformed.
    pub fn fault(&self) -> FaultCode {
        match self.why {
            DecodeReason::Unsupported { .. }
            | DecodeReason::UnknownRequiredField { .. }
            | DecodeReason::UnknownRequiredMessage { .. } => FaultCode::FeatureMissing,
            _ => FaultCode::Malformed,
        }
    }
}

/// What is wrong with a field.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeReason {
    /// The bytes end inside the field.
    #[error("{needed} bytes are needed and {left} are left")]
    Truncated {
        /// Bytes that the field needs.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The number is over its limit in [`crate::limits`].
    #[error("{value} is over the limit of {limit}")]
    OverLimit {
        /// The number as sent; a sum that overflows is given as `u64::MAX`.
        value: u64,
        /// The largest that is accepted.
        limit: u64,
    },
    /// The value is none that the field can have.
    #[error("{value} is not a value it can have")]
    BadValue {
        /// The value as sent.
        value: u64,
    },
    /// The value is reserved for something that was not negotiated.
    #[error("{value} stands for something that was not negotiated")]
    Unsupported {
        /// The value as sent.
        value: u64,
    },
    /// The bytes are not UTF-8.
    #[error("it is not UTF-8")]
    BadText,
    /// An extension field that must be understood is not known here.
    #[error("the required field {tag} is unknown; the peer is newer than this release")]
    UnknownRequiredField {
        /// The field's tag.
        tag: u16,
    },
    /// A control message that must be understood is not known here.
    #[error("the required message kind {kind} is unknown; the peer is newer than this release")]
    UnknownRequiredMessage {
        /// The message's kind.
        kind: u16,
    },
    /// The object ended before its bytes did.
    #[error("{bytes} bytes are left over")]
    Trailing {
        /// Bytes that are left over.
        bytes: u64,
    },
    /// Two numbers, each fine alone, contradict each other.
    #[error("{0}")]
    Inconsistent(&'static str),
}

/// Why a message could not be written. This side is at fault: the caller built
/// something that the peer would refuse.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// The number is over its limit in [`crate::limits`].
    #[error("{what} of {value} is over the limit of {limit}")]
    OverLimit {
        /// The field, in the words of docs/wire.md.
        what: &'static str,
        /// The number that was asked for.
        value: u64,
        /// The largest that a peer accepts.
        limit: u64,
    },
    /// The value is one that a peer would refuse.
    #[error("{what}: {why}")]
    Invalid {
        /// The field, in the words of docs/wire.md.
        what: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
}
