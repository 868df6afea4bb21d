//! What the control messages of all protocols have in common.

use super::{DecodeError, EncodeError, Reader, Writer, bad_value};
use crate::fault::FaultCode;
use crate::limits::MAX_TEXT_BYTES;

/// Defines the kinds of messages of one protocol, with a row for each: a number that never changes,
/// the name by which docs/wire.md and logs call it, and whatever else the protocol says of it.
macro_rules! kinds {
    ($( $variant:ident = $number:literal, $name:literal $(, $sender:ident)?; )*) => {
        /// The kinds of messages.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind {
            $( #[doc = concat!("The message *", $name, "*.")] $variant, )*
        }

        impl Kind {
            /// Every kind in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The kind's name in documents and logs.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $name, )*
                }
            }

            $crate::wire::message::kinds!(@sender $( $($variant = $sender;)? )*);

            /// The number on the wire.
            #[must_use]
            pub fn to_wire(self) -> u16 {
                match self {
                    $( Self::$variant => $number, )*
                }
            }

            pub(crate) fn from_wire(number: u16) -> Option<Self> {
                match number {
                    $( $number => Some(Self::$variant), )*
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for Kind {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.name())
            }
        }
    };
    (@sender) => {};
    (@sender $( $variant:ident = $sender:ident; )+) => {
        /// Who may send it. A message from the other side is malformed.
        #[must_use]
        pub fn sender(self) -> Sender {
            match self {
                $( Self::$variant => Sender::$sender, )*
            }
        }
    };
}
pub(crate) use kinds;

pub(crate) fn encode_fault(
    fault: FaultCode,
    text: &str,
    writer: &mut Writer<'_>,
) -> Result<(), EncodeError> {
    writer.u16(fault.to_wire());
    writer.text("text", text, MAX_TEXT_BYTES)
}

pub(crate) fn decode_fault(reader: &mut Reader<'_>) -> Result<(FaultCode, String), DecodeError> {
    let fault = FaultCode::from_wire(reader.u16("fault")?);
    let text = reader.text("text", MAX_TEXT_BYTES)?;
    Ok((fault, text.to_owned()))
}

pub(crate) fn encode_lane(lane: u16, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    if lane == 0 {
        return Err(invalid("lane", "lane 0 is the control lane"));
    }
    writer.u16(lane);
    Ok(())
}

pub(crate) fn decode_lane(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    let offset = reader.offset();
    match reader.u16("lane")? {
        0 => Err(bad_value("lane", 0, offset)),
        lane => Ok(lane),
    }
}

pub(crate) fn bounded(what: &'static str, value: u64, limit: u64) -> Result<(), EncodeError> {
    if value <= limit {
        return Ok(());
    }
    Err(EncodeError::OverLimit { what, value, limit })
}

pub(crate) fn invalid(what: &'static str, why: &'static str) -> EncodeError {
    EncodeError::Invalid { what, why }
}
