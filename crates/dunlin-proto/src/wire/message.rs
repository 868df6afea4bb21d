//! Macros for the control messages of all protocols: a table of message kinds,
//! and a table of their fields.

/// Defines the message kinds of one protocol, one row each: a number that never
/// changes, and the name in docs/wire/ and logs.
macro_rules! kinds {
    ($( $variant:ident = $number:literal, $name:literal; )*) => {
        /// The kinds of messages.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind {
            $( #[doc = concat!("The message *", $name, "*.")] $variant, )*
        }

        impl Kind {
            /// Every kind, ordered by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The kind's name in documents and logs.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $name, )*
                }
            }

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

        impl Message {
            /// The message's kind.
            #[must_use]
            pub fn kind(&self) -> Kind {
                match self {
                    $( Self::$variant { .. } => Kind::$variant, )*
                }
            }
        }

        impl std::fmt::Display for Kind {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.name())
            }
        }
    };
}
pub(crate) use kinds;

/// Defines `encode_body` and `decode_body` from the fields of every message in
/// wire order, each with its name in errors and its
/// [`Codec`](super::codec::Codec). For a message that wraps a struct, only the
/// struct is listed.
macro_rules! bodies {
    ($(
        $variant:ident
        $( { $( $field:ident: $what:literal as $codec:expr ),* $(,)? } )?
        $( ( $whole:ident: $whole_what:literal as $whole_codec:expr ) )?;
    )*) => {
        /// Appends a message's body.
        fn encode_body(
            message: &Message,
            writer: &mut $crate::wire::Writer<'_>,
        ) -> Result<(), $crate::wire::EncodeError> {
            match message {
                $( Message::$variant $( { $( $field ),* } )? $( ($whole) )? => {
                    $( $( $crate::wire::codec::Codec::encode(&$codec, $what, $field, writer)?; )* )?
                    $( $crate::wire::codec::Codec::encode(&$whole_codec, $whole_what, $whole, writer)?; )?
                } )*
            }
            Ok(())
        }

        /// Reads the whole body of a message of this kind.
        fn decode_body(
            kind: Kind,
            mut body: $crate::wire::Reader<'_>,
        ) -> Result<Message, $crate::wire::DecodeError> {
            let reader = &mut body;
            let message = match kind {
                $( Kind::$variant => Message::$variant
                    $( { $( $field: $crate::wire::codec::Codec::decode(&$codec, $what, reader)?, )* } )?
                    $( ($crate::wire::codec::Codec::decode(&$whole_codec, $whole_what, reader)?) )?, )*
            };
            body.fields(|_, _| Ok(false))?;
            Ok(message)
        }
    };
}
pub(crate) use bodies;
