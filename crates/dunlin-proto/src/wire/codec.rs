//! Writes and reads the fields of a message. A message lists its fields once
//! ([`layout!`] for a struct, [`messages!`](super::message::messages) for
//! the messages of a protocol). The same list is used to write and to read.

use std::ops::RangeInclusive;

use super::{DecodeError, Encoded, Reader, Writer, bad_value, invalid, over, unsupported, within};
use crate::fault::FaultCode;
use crate::limits::MAX_LANES;
use crate::negotiate::SessionSecret;

/// Writes and reads a field of type `T`. `what` names the field in errors.
pub(crate) trait Codec<T> {
    /// Appends the field.
    ///
    /// # Errors
    /// The field has a value that a peer would reject.
    fn encode(&self, what: &'static str, value: &T, writer: &mut Writer<'_>) -> Encoded;

    /// Reads the field.
    ///
    /// # Errors
    /// [`DecodeError`].
    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<T, DecodeError>;
}

/// A value with exactly one encoding, such as a struct with its fields in sequence.
pub(crate) trait Layout: Sized {
    /// Appends the fields.
    ///
    /// # Errors
    /// A field has a value that a peer would reject.
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded;

    /// Reads the fields.
    ///
    /// # Errors
    /// [`DecodeError`].
    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// Implements [`Layout`] from the fields of a struct in wire order, each with
/// its name in errors and its [`Codec`].
macro_rules! layout {
    ($type:ident { $( $field:tt: $what:literal as $codec:expr ),* $(,)? }) => {
        impl $crate::wire::codec::Layout for $type {
            fn encode_fields(
                &self,
                writer: &mut $crate::wire::Writer<'_>,
            ) -> $crate::wire::Encoded {
                $( $crate::wire::codec::Codec::encode(&$codec, $what, &self.$field, writer)?; )*
                Ok(())
            }

            fn decode_fields(
                reader: &mut $crate::wire::Reader<'_>,
            ) -> Result<Self, $crate::wire::DecodeError> {
                Ok(Self {
                    $( $field: $crate::wire::codec::Codec::decode(&$codec, $what, reader)?, )*
                })
            }
        }
    };
}
pub(crate) use layout;

/// A value that has a [`Layout`].
pub(crate) struct Fields;

impl<T: Layout> Codec<T> for Fields {
    fn encode(&self, _: &'static str, value: &T, writer: &mut Writer<'_>) -> Encoded {
        value.encode_fields(writer)
    }

    fn decode(&self, _: &'static str, reader: &mut Reader<'_>) -> Result<T, DecodeError> {
        T::decode_fields(reader)
    }
}

/// A number, a flag, or an array of bytes: any value is allowed.
pub(crate) struct Plain;

macro_rules! plain {
    ($( $type:ty, $method:ident; )*) => { $(
        impl Codec<$type> for Plain {
            fn encode(
                &self,
                _: &'static str,
                value: &$type,
                writer: &mut Writer<'_>,
            ) -> Encoded {
                writer.$method(*value);
                Ok(())
            }

            fn decode(
                &self,
                what: &'static str,
                reader: &mut Reader<'_>,
            ) -> Result<$type, DecodeError> {
                reader.$method(what)
            }
        }
    )* };
}
plain! {
    bool, flag;
    u8, u8;
    u16, u16;
    u32, u32;
    u64, u64;
}

impl<const N: usize> Codec<[u8; N]> for Plain {
    fn encode(&self, _: &'static str, value: &[u8; N], writer: &mut Writer<'_>) -> Encoded {
        writer.bytes(value);
        Ok(())
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<[u8; N], DecodeError> {
        reader.array(what)
    }
}

layout! { SessionSecret { 0: "session secret" as Plain } }

impl Layout for FaultCode {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        writer.u16(self.to_wire());
        Ok(())
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        reader.u16("fault").map(Self::from_wire)
    }
}

/// A number in a range.
pub(crate) struct Within(pub(crate) RangeInclusive<u64>);

/// A number that is not zero, such as the number of a data lane.
pub(crate) const NOT_ZERO: Within = Within(1..=u64::MAX);

/// The number of data lanes that a peer may open.
pub(crate) const LANES: Within = Within(1..=MAX_LANES as u64);

impl<T: Copy + Into<u64>> Codec<T> for Within
where
    Plain: Codec<T>,
{
    fn encode(&self, what: &'static str, value: &T, writer: &mut Writer<'_>) -> Encoded {
        let number = (*value).into();
        if number < *self.0.start() {
            return Err(invalid(what, "below the minimum"));
        }
        if number > *self.0.end() {
            return Err(over(what, number, *self.0.end()));
        }
        Plain.encode(what, value, writer)
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<T, DecodeError> {
        let offset = reader.offset();
        let value: T = Plain.decode(what, reader)?;
        let number = value.into();
        if number < *self.0.start() {
            return Err(bad_value(what, number, offset));
        }
        within(what, number, *self.0.end(), offset)?;
        Ok(value)
    }
}

/// UTF-8 of at most this many bytes, preceded by its 16-bit length.
pub(crate) struct Text(pub(crate) usize);

impl Codec<String> for Text {
    fn encode(&self, what: &'static str, value: &String, writer: &mut Writer<'_>) -> Encoded {
        writer.text(what, value, self.0)
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<String, DecodeError> {
        reader.text(what, self.0).map(str::to_owned)
    }
}

/// At most this many bytes, preceded by their 32-bit length.
pub(crate) struct Blob(pub(crate) usize);

impl Codec<Vec<u8>> for Blob {
    fn encode(&self, what: &'static str, value: &Vec<u8>, writer: &mut Writer<'_>) -> Encoded {
        writer.blob(what, value, self.0)
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<Vec<u8>, DecodeError> {
        reader.blob(what, self.0).map(<[u8]>::to_vec)
    }
}

/// A list, preceded by its 16-bit count.
pub(crate) struct List<C> {
    /// Largest number of items.
    pub(crate) most: usize,
    /// Smallest size of an item.
    pub(crate) item_bytes: usize,
    /// An item's name in errors.
    pub(crate) each: &'static str,
    pub(crate) item: C,
}

impl<T, C: Codec<T>> Codec<Vec<T>> for List<C> {
    fn encode(&self, what: &'static str, value: &Vec<T>, writer: &mut Writer<'_>) -> Encoded {
        writer.count(what, value.len(), self.most)?;
        value
            .iter()
            .try_for_each(|item| self.item.encode(self.each, item, writer))
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<Vec<T>, DecodeError> {
        let count = reader.count(what, self.most, self.item_bytes)?;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.item.decode(self.each, reader)?);
        }
        Ok(items)
    }
}

/// One of a fixed set of values, each with its number.
pub(crate) struct OneOf<N: 'static, T: 'static> {
    pub(crate) rows: &'static [(N, T)],
    /// Whether later releases may add values. If so, an unknown number other than 0
    /// is unsupported, not invalid.
    pub(crate) grows: bool,
}

impl<N: Copy + PartialEq + Into<u64>, T: Copy + PartialEq> Codec<T> for OneOf<N, T>
where
    Plain: Codec<N>,
{
    fn encode(&self, what: &'static str, value: &T, writer: &mut Writer<'_>) -> Encoded {
        let row = self.rows.iter().find(|(_, one)| one == value);
        let (number, _) = row.ok_or(invalid(what, "the value has no number on the wire"))?;
        Plain.encode(what, number, writer)
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<T, DecodeError> {
        let offset = reader.offset();
        let number: N = Plain.decode(what, reader)?;
        match self.rows.iter().find(|(one, _)| *one == number) {
            Some((_, value)) => Ok(*value),
            None if self.grows && number.into() != 0 => {
                Err(unsupported(what, number.into(), offset))
            }
            None => Err(bad_value(what, number.into(), offset)),
        }
    }
}
