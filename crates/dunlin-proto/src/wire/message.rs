//! The table of a protocol's control messages.

/// Defines the control messages of one protocol. The row of a message has a number
/// that never changes, the name in docs/wire/ and logs, and the fields in wire order,
/// each with its name in errors and its [`Codec`](super::codec::Codec). The row of a
/// message that wraps a struct lists only the struct.
///
/// The macro generates `Kind`, and the methods `kind`, `append` and `decode` of `Message`.
macro_rules! messages {
    ($(
        $variant:ident = $number:literal, $name:literal
        $( { $( $field:ident: $what:literal as $codec:expr ),* $(,)? } )?
        $( ( $whole:ident: $whole_what:literal as $whole_codec:expr ) )?;
    )*) => {
        $crate::wire::numbered::numbered! {
            /// The kinds of messages.
            Kind: u16 {
                $( #[doc = concat!("The message *", $name, "*.")] $variant = $number, $name; )*
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

            /// Appends header and body. `rest` writes the header's remaining fields, after the
            /// fields with which every header begins.
            fn append(
                &self,
                out: &mut Vec<u8>,
                most: usize,
                rest: impl FnOnce(&mut $crate::wire::Writer<'_>),
            ) -> $crate::wire::Encoded {
                $crate::wire::Start::write(out, self.kind().to_wire(), most, rest, |writer| {
                    match self {
                        $( Self::$variant $( { $( $field ),* } )? $( ($whole) )? => {
                            $( $( $crate::wire::codec::Codec::encode(&$codec, $what, $field, writer)?; )* )?
                            $( $crate::wire::codec::Codec::encode(&$whole_codec, $whole_what, $whole, writer)?; )?
                        } )*
                    }
                    Ok(())
                })
            }

            /// Reads the body that follows `header`. Returns `None` for a message of an
            /// unknown kind that may be skipped.
            ///
            /// # Errors
            /// [`DecodeError`](crate::wire::DecodeError), including when the body does not
            /// have the announced length.
            pub fn decode(
                header: &Header,
                body: &[u8],
            ) -> Result<Option<Self>, $crate::wire::DecodeError> {
                let mut body = header.start.body(body)?;
                let reader = &mut body;
                let message = match Kind::from_wire(header.start.kind()) {
                    $( Some(Kind::$variant) => Self::$variant
                        $( { $( $field: $crate::wire::codec::Codec::decode(&$codec, $what, reader)?, )* } )?
                        $( ($crate::wire::codec::Codec::decode(&$whole_codec, $whole_what, reader)?) )?, )*
                    None => return header.start.skip(),
                };
                body.fields(|_, _| Ok(false))?;
                Ok(Some(message))
            }
        }
    };
}
pub(crate) use messages;
