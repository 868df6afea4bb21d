//! What the control messages of all protocols have in common: one table of their kinds, and one of
//! their fields.

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

        impl Message {
            /// Which message it is.
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

/// Defines `encode_body` and `decode_body`: the fields of every message in their order on the wire, each
/// with its name in errors and its [`Codec`](super::codec::Codec). A message that is a struct names that
/// alone.
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

        /// Reads the body of a message of this kind to its end.
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
