//! Reads and writes bounded little-endian bytes. Every codec of this crate uses this module.
//!
//! Fields follow one another without padding. A text or list is preceded by a 16-bit count,
//! opaque bytes by a 32-bit count. Before anything is allocated, each count is compared with
//! the field's limit *and* with the number of unread bytes (I7). Extension fields follow a
//! message's fixed part. Later releases use them to extend a message without a new version:
//!
//! | bytes | field |
//! | --- | --- |
//! | 2 | tag; tags ascend strictly within a message |
//! | 2 | flags: bit 0 means required; the other bits are zero |
//! | 4 | length of the value |
//! | length | value |
//!
//! An unknown optional field is skipped; an unknown required field makes the
//! message invalid.

pub(crate) mod codec;
mod error;
pub(crate) mod message;
pub(crate) mod numbered;
mod start;

pub use error::{DecodeError, DecodeReason, EncodeError};
pub(crate) use start::Start;

/// The result of appending a field or a message.
pub(crate) type Encoded = Result<(), EncodeError>;

/// Converts a length without loss, because on every target of Rust a `usize` has at most 64 bits.
pub(crate) const fn wide(length: usize) -> u64 {
    length as u64
}

/// Converts a value without loss, because [`crate::limits`] asserts that a `usize` has at least 32
/// bits.
pub(crate) const fn index(value: u32) -> usize {
    value as usize
}

/// Reads fields from the front of a slice.
///
/// The methods that read a field take its name, for errors. No method allocates.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    /// A reader over all of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            rest: bytes,
            offset: 0,
        }
    }

    /// Bytes read so far, which is the offset of the next field.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// Reads the next `length` bytes.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`].
    pub fn bytes(&mut self, what: &'static str, length: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.truncated(what, length));
        };
        self.rest = rest;
        self.offset += length;
        Ok(taken)
    }

    /// Reads the next `N` bytes.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`].
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(what, N)?);
        Ok(array)
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`].
    pub fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        self.array(what).map(u8::from_le_bytes)
    }

    /// Reads two bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`].
    pub fn u16(&mut self, what: &'static str) -> Result<u16, DecodeError> {
        self.array(what).map(u16::from_le_bytes)
    }

    /// Reads four bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`].
    pub fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// Reads eight bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`].
    pub fn u64(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads one byte, 0 or 1.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`] or [`DecodeReason::BadValue`].
    pub fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        let offset = self.offset;
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(bad_value(what, u64::from(value), offset)),
        }
    }

    /// Reads `N` reserved bytes that must be zero in this version.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`] or [`DecodeReason::Unsupported`].
    pub fn reserved<const N: usize>(&mut self, what: &'static str) -> Result<(), DecodeError> {
        let offset = self.offset;
        let first_set = self.array::<N>(what)?.into_iter().find(|byte| *byte != 0);
        first_set.map_or(Ok(()), |byte| {
            Err(unsupported(what, u64::from(byte), offset))
        })
    }

    /// Reads opaque bytes preceded by a 32-bit length of at most `limit`.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`] or [`DecodeReason::OverLimit`].
    pub fn blob(&mut self, what: &'static str, limit: usize) -> Result<&'a [u8], DecodeError> {
        let offset = self.offset;
        let length = index(self.u32(what)?);
        within(what, wide(length), wide(limit), offset)?;
        self.bytes(what, length)
    }

    /// Reads UTF-8 preceded by a 16-bit length of at most `limit` bytes.
    ///
    /// The text comes from the peer, so the caller must escape it before display.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`], [`DecodeReason::OverLimit`] or
    /// [`DecodeReason::BadText`].
    pub fn text(&mut self, what: &'static str, limit: usize) -> Result<&'a str, DecodeError> {
        let offset = self.offset;
        let length = usize::from(self.u16(what)?);
        within(what, wide(length), wide(limit), offset)?;
        std::str::from_utf8(self.bytes(what, length)?)
            .map_err(|_| DecodeError::new(what, DecodeReason::BadText, offset))
    }

    /// Reads a 16-bit count of items; the count is at most `limit`. Checks that at least
    /// `item_bytes` bytes are left for each item, so the caller can allocate memory for this count.
    ///
    /// # Errors
    /// [`DecodeReason::Truncated`] or [`DecodeReason::OverLimit`].
    pub fn count(
        &mut self,
        what: &'static str,
        limit: usize,
        item_bytes: usize,
    ) -> Result<usize, DecodeError> {
        let offset = self.offset;
        let count = usize::from(self.u16(what)?);
        within(what, wide(count), wide(limit), offset)?;
        let needed = count * item_bytes;
        if needed > self.rest.len() {
            return Err(self.truncated(what, needed));
        }
        Ok(count)
    }

    /// Reads the extension fields up to the end of the bytes.
    ///
    /// `known` receives each field's tag and a reader that contains only the field's value. `known`
    /// returns whether it implements the tag. If it does, it must read the whole value.
    ///
    /// # Errors
    /// The errors of `known`; [`DecodeReason::Truncated`]; [`DecodeReason::Inconsistent`] if tags
    /// do not ascend; [`DecodeReason::Unsupported`] if a reserved flag is set;
    /// [`DecodeReason::UnknownRequiredField`]; [`DecodeReason::Trailing`] if `known` leaves bytes
    /// of a known field unread.
    pub fn fields(
        mut self,
        mut known: impl FnMut(u16, &mut Reader<'a>) -> Result<bool, DecodeError>,
    ) -> Result<(), DecodeError> {
        const WHAT: &str = "extension field";
        let mut previous = None;
        while !self.rest.is_empty() {
            let offset = self.offset;
            let tag = self.u16(WHAT)?;
            let flags = self.u16(WHAT)?;
            if previous.is_some_and(|previous| tag <= previous) {
                return Err(inconsistent(WHAT, "tags do not ascend strictly", offset));
            }
            previous = Some(tag);
            if flags & !FIELD_REQUIRED != 0 {
                return Err(unsupported(WHAT, u64::from(flags), offset));
            }
            let length = index(self.u32(WHAT)?);
            let start = self.offset;
            let mut value = Reader {
                rest: self.bytes(WHAT, length)?,
                offset: start,
            };
            if known(tag, &mut value)? {
                value.finish(WHAT)?;
            } else if flags & FIELD_REQUIRED != 0 {
                let why = DecodeReason::UnknownRequiredField { tag };
                return Err(DecodeError::new(WHAT, why, offset));
            }
        }
        Ok(())
    }

    /// Checks that no bytes are left.
    ///
    /// # Errors
    /// [`DecodeReason::Trailing`].
    pub fn finish(self, what: &'static str) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let bytes = wide(self.rest.len());
        let why = DecodeReason::Trailing { bytes };
        Err(DecodeError::new(what, why, self.offset))
    }

    /// A reader over a message's `body`, which must have the announced length.
    pub(crate) fn over_body(body: &'a [u8], announced_bytes: usize) -> Result<Self, DecodeError> {
        let mut whole = Self::new(body);
        let announced = Self::new(whole.bytes("body", announced_bytes)?);
        whole.finish("body")?;
        Ok(announced)
    }

    /// Moves all remaining bytes to the returned reader.
    pub(crate) fn rest(&mut self) -> Self {
        let left = Self {
            rest: &[],
            offset: self.offset + self.rest.len(),
        };
        std::mem::replace(self, left)
    }

    fn truncated(&self, what: &'static str, needed: usize) -> DecodeError {
        let why = DecodeReason::Truncated {
            needed: wide(needed),
            left: wide(self.rest.len()),
        };
        DecodeError::new(what, why, self.offset)
    }
}

/// Bit 0 of an extension field's flags.
const FIELD_REQUIRED: u16 = 1;

/// Compares a number with its limit.
pub(crate) fn within(
    what: &'static str,
    value: u64,
    limit: u64,
    offset: usize,
) -> Result<(), DecodeError> {
    if value <= limit {
        return Ok(());
    }
    Err(over_limit(what, value, limit, offset))
}

/// The error for a number over its limit.
pub(crate) fn over_limit(what: &'static str, value: u64, limit: u64, offset: usize) -> DecodeError {
    DecodeError::new(what, DecodeReason::OverLimit { value, limit }, offset)
}

/// The error for a value that a field cannot have.
pub(crate) fn bad_value(what: &'static str, value: u64, offset: usize) -> DecodeError {
    DecodeError::new(what, DecodeReason::BadValue { value }, offset)
}

/// The error for a value that this release does not implement.
pub(crate) fn unsupported(what: &'static str, value: u64, offset: usize) -> DecodeError {
    DecodeError::new(what, DecodeReason::Unsupported { value }, offset)
}

/// The error for a value that contradicts another value or a rule.
pub(crate) fn inconsistent(what: &'static str, why: &'static str, offset: usize) -> DecodeError {
    DecodeError::new(what, DecodeReason::Inconsistent(why), offset)
}

/// Appends fields to a vector; the counterpart of [`Reader`].
///
/// Nothing is allocated while the vector has room.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    /// Appends to `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out }
    }

    /// Lets `write` append to `out`; after an error `out` is unchanged.
    ///
    /// # Errors
    /// The errors of `write`.
    pub fn append<T>(
        out: &'a mut Vec<u8>,
        write: impl FnOnce(&mut Writer<'_>) -> Result<T, EncodeError>,
    ) -> Result<T, EncodeError> {
        let before = out.len();
        let result = write(&mut Writer::new(out));
        if result.is_err() {
            out.truncate(before);
        }
        result
    }

    /// Length of the vector, including earlier content.
    pub fn position(&self) -> usize {
        self.out.len()
    }

    /// Appends these bytes unchanged.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        self
    }

    /// Appends one byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    /// Appends two bytes, little-endian.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends four bytes, little-endian.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends eight bytes, little-endian.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends one byte, 0 or 1.
    pub fn flag(&mut self, value: bool) -> &mut Self {
        self.u8(u8::from(value))
    }

    /// Appends a 32-bit length and opaque bytes.
    ///
    /// # Errors
    /// [`EncodeError::OverLimit`] if there are more than `limit` bytes.
    pub fn blob(
        &mut self,
        what: &'static str,
        bytes: &[u8],
        limit: usize,
    ) -> Result<(), EncodeError> {
        let length = bounded(what, bytes.len(), limit)?;
        self.u32(length).bytes(bytes);
        Ok(())
    }

    /// Appends a 16-bit length and UTF-8.
    ///
    /// # Errors
    /// [`EncodeError::OverLimit`] if there are more than `limit` bytes.
    pub fn text(
        &mut self,
        what: &'static str,
        text: &str,
        limit: usize,
    ) -> Result<(), EncodeError> {
        let length = bounded(what, text.len(), limit)?;
        self.u16(length).bytes(text.as_bytes());
        Ok(())
    }

    /// Appends a 16-bit count of the items that follow.
    ///
    /// # Errors
    /// [`EncodeError::OverLimit`] if there are more than `limit` items.
    pub fn count(
        &mut self,
        what: &'static str,
        count: usize,
        limit: usize,
    ) -> Result<(), EncodeError> {
        let count = bounded(what, count, limit)?;
        self.u16(count);
        Ok(())
    }

    /// Appends an extension field. The caller writes tags in ascending order.
    ///
    /// # Errors
    /// [`EncodeError::OverLimit`] if the value is longer than
    /// [`crate::limits::MAX_CONTROL_BODY_BYTES`].
    pub fn field(&mut self, tag: u16, required: bool, value: &[u8]) -> Result<(), EncodeError> {
        self.u16(tag).u16(if required { FIELD_REQUIRED } else { 0 });
        self.blob(
            "extension field",
            value,
            crate::limits::MAX_CONTROL_BODY_BYTES,
        )
    }

    /// Overwrites bytes that were written before, such as a length that is known only at the end.
    /// `position` is an earlier result of [`Writer::position`]. After that call, at least
    /// `bytes.len()` bytes must have been written.
    pub(crate) fn patch(&mut self, position: usize, bytes: &[u8]) {
        self.out[position..position + bytes.len()].copy_from_slice(bytes);
    }
}

/// The error for a value that a peer would refuse.
pub(crate) fn invalid(what: &'static str, why: &'static str) -> EncodeError {
    EncodeError::Invalid { what, why }
}

/// The error for a number over its limit.
pub(crate) fn over(what: &'static str, value: u64, limit: u64) -> EncodeError {
    EncodeError::OverLimit { what, value, limit }
}

/// Converts a length to its field's integer type after checking its limit.
pub(crate) fn bounded<T: TryFrom<usize>>(
    what: &'static str,
    value: usize,
    limit: usize,
) -> Result<T, EncodeError> {
    let error = over(what, wide(value), wide(limit));
    if value > limit {
        return Err(error);
    }
    T::try_from(value).map_err(|_| error)
}
