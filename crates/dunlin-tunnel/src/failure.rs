//! The reason why an operation of the tunnel failed: a code and a text for an operator.

use dunlin_proto::text::{harmless, with_causes};
use std::error::Error;
use std::fmt;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex};

use dunlin_proto::fault::{AtFault, FaultCode, seen_by_peer};
use dunlin_proto::limits::MAX_TEXT_BYTES;
use dunlin_proto::wire::DecodeError;

use dunlin_lane::control::{ControlError, OpenError};
use dunlin_lane::dial::DialError;
use dunlin_lane::fault::fault_behind;

/// A failure, with all of its causes in one text. Its `Display` prints what happened, who is at
/// fault and the advice for the code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    code: FaultCode,
    text: String,
    /// Whether the peer reported the failure.
    of_peer: bool,
    /// Whether the peer's host refused the connection.
    connection_refused: bool,
}

impl Failure {
    pub(super) fn new(code: FaultCode, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
            of_peer: false,
            connection_refused: false,
        }
    }

    /// A failure that the peer reported. The text is escaped.
    pub(super) fn of_peer(code: FaultCode, text: &str) -> Self {
        Self {
            code,
            text: harmless(text),
            of_peer: true,
            connection_refused: false,
        }
    }

    /// Appends the cause and its sources to the text; see [`with_causes`].
    pub(super) fn because(mut self, cause: &dyn Error) -> Self {
        self.text = with_causes(self.text, Some(cause));
        self
    }

    /// The fault code.
    pub fn code(&self) -> FaultCode {
        self.code
    }

    /// The party at fault, seen from this side.
    pub fn at_fault(&self) -> AtFault {
        let at_fault = self.code.at_fault();
        if self.of_peer {
            seen_by_peer(at_fault)
        } else {
            at_fault
        }
    }

    /// What happened, without advice.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the peer's host refused the connection, as it does if no process listens there.
    pub(super) fn is_connection_refused(&self) -> bool {
        self.connection_refused
    }

    /// The text, truncated to the limit of a message.
    pub(super) fn for_peer(&self) -> String {
        let mut text = self.text.clone();
        let fits = |end: &usize| text.is_char_boundary(*end);
        let end = (0..=MAX_TEXT_BYTES.min(text.len())).rev().find(fits);
        text.truncate(end.unwrap_or(0));
        text
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        let code = fault_behind(&error).unwrap_or(match error {
            ControlError::PeerAlert(_) => FaultCode::Unauthorised,
            _ => FaultCode::ControlLost,
        });
        Self::new(code, "the control lane was lost").because(&error)
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match &error {
            OpenError::Refused(refusal) => Self::of_peer(refusal.fault, &refusal.text),
            _ => {
                let code = fault_behind(&error).unwrap_or(error.fault());
                let refused = matches!(&error, OpenError::Dial(DialError::Connect { source, .. })
                    if source.kind() == ErrorKind::ConnectionRefused);
                let failure = Self::new(code, "cannot open a control lane").because(&error);
                Self {
                    connection_refused: refused,
                    ..failure
                }
            }
        }
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Self {
        Self::new(error.fault(), "malformed message from peer").because(&error)
    }
}

/// Why a listener is at present not reachable at its path; `None` while it listens.
pub(super) type Lost = Arc<Mutex<Option<Failure>>>;

/// Converts an error to a [`Failure`].
pub(super) trait OrFailure<T> {
    /// Returns the value, or a failure with this code and text and the error as its cause. If the
    /// error has a code of its own, as that of a lack of descriptors has, the failure has that one.
    fn or_failure(self, code: FaultCode, text: impl Into<String>) -> Result<T, Failure>;
}

impl<T, E: Error + 'static> OrFailure<T> for Result<T, E> {
    fn or_failure(self, code: FaultCode, text: impl Into<String>) -> Result<T, Failure> {
        self.map_err(|error| {
            let code = fault_behind(&error).unwrap_or(code);
            Failure::new(code, text).because(&error)
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (code, who) = (self.code, self.at_fault());
        write!(
            formatter,
            "{} ({code}; at fault: {who}). {}",
            self.text,
            code.advice()
        )
    }
}

impl Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_peers_text_is_escaped_and_its_fault_is_seen_from_this_side() {
        let theirs = Failure::of_peer(FaultCode::TargetUnreachable, "no\x1b[2Jsocket\n");
        assert_eq!(theirs.text(), "no\\u{1b}[2Jsocket\\n");
        assert_eq!(theirs.at_fault(), AtFault::Peer);
        let own = Failure::new(FaultCode::TargetUnreachable, "no socket");
        assert_eq!(own.at_fault(), AtFault::Local);
        assert!(own.to_string().contains("at fault: this side"), "{own}");
    }

    #[test]
    fn i7_a_lack_of_descriptors_is_not_the_fault_of_the_peer() {
        let lack = std::io::Error::from_raw_os_error(24); // EMFILE
        let failed = Err::<(), _>(lack).or_failure(FaultCode::TargetUnreachable, "no connection");
        let code = failed.map_err(|failure| failure.code());
        assert_eq!(code, Err(FaultCode::DescriptorLimit));
    }

    #[test]
    fn a_cause_that_the_text_ends_with_is_not_repeated() {
        #[derive(Debug, thiserror::Error)]
        #[error("read failed: {0}")]
        struct Printing(#[source] std::io::Error);
        let cause = Printing(std::io::Error::other("gone"));
        let failure = Failure::new(FaultCode::LaneLost, "lost").because(&cause);
        assert_eq!(failure.text(), "lost: read failed: gone");
    }

    #[test]
    fn a_text_for_a_message_is_cut_at_a_character_boundary() {
        let long = Failure::new(FaultCode::Internal, "ä".repeat(MAX_TEXT_BYTES));
        assert_eq!(long.for_peer().len(), MAX_TEXT_BYTES / 2 * 2);
    }
}
