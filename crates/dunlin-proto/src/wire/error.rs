//! Errors of reading and writing.

use thiserror::Error;

use crate::fault::FaultCode;

/// Invalid bytes in a message or in a journal record. If they come from a peer, the peer is at
/// fault or runs a newer release.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("invalid {what} at byte {offset}: {why}")]
pub struct DecodeError {
    /// The field's name in docs/wire/.
    pub what: &'static str,
    /// What is wrong with the field.
    pub why: DecodeReason,
    /// Offset of the field in the bytes passed to the decoder.
    pub offset: usize,
}

impl DecodeError {
    pub(super) fn new(what: &'static str, why: DecodeReason, offset: usize) -> Self {
        Self { what, why, offset }
    }

    /// The fault code for the peer: a missing feature if the bytes come from a newer release,
    /// otherwise a malformed message.
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
    #[error("truncated field: {needed} bytes needed, {left} left")]
    Truncated {
        /// Bytes that the field needs.
        needed: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// The number exceeds its limit: one of [`crate::limits`], or the length of a region.
    #[error("{value} exceeds the limit of {limit}")]
    OverLimit {
        /// The number as sent; `u64::MAX` for a sum that overflows.
        value: u64,
        /// The largest accepted value.
        limit: u64,
    },
    /// The field cannot have this value.
    #[error("invalid value {value}")]
    BadValue {
        /// The value as sent.
        value: u64,
    },
    /// This release does not support the value, or the value belongs to a feature that was not
    /// negotiated.
    #[error("value {value} is not supported")]
    Unsupported {
        /// The value as sent.
        value: u64,
    },
    /// The bytes are not UTF-8.
    #[error("not UTF-8")]
    BadText,
    /// A required extension field is unknown.
    #[error("required field {tag} is unknown (the peer is newer)")]
    UnknownRequiredField {
        /// The field's tag.
        tag: u16,
    },
    /// A required message kind is unknown.
    #[error("required message kind {kind} is unknown (the peer is newer)")]
    UnknownRequiredMessage {
        /// The message's kind.
        kind: u16,
    },
    /// Bytes are left over after the object.
    #[error("trailing bytes: {bytes}")]
    Trailing {
        /// Bytes that are left over.
        bytes: u64,
    },
    /// The value contradicts another value or a rule.
    #[error("{0}")]
    Inconsistent(&'static str),
}

/// A message or a journal record could not be encoded, because its reader would reject a value.
/// This side is at fault.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncodeError {
    /// The number exceeds its limit in [`crate::limits`].
    #[error("{what} {value} exceeds the limit of {limit}")]
    OverLimit {
        /// The field's name in docs/wire/.
        what: &'static str,
        /// The number.
        value: u64,
        /// The largest value that a peer accepts.
        limit: u64,
    },
    /// A peer would reject the value.
    #[error("{what}: {why}")]
    Invalid {
        /// The field's name in docs/wire/.
        what: &'static str,
        /// What is wrong with the value.
        why: &'static str,
    },
}
