//! The first fields of every message of an established session:
//!
//! | bytes | field |
//! | --- | --- |
//! | 4 | length of the body |
//! | 2 | kind |
//! | 2 | flags: bit 0 means that the message must be understood; the other bits are zero |
//!
//! The rest of the header and the body depend on the protocol.

use super::{
    DecodeError, DecodeReason, Encoded, Reader, Writer, bounded, index, unsupported, wide, within,
};

/// Bit 0 of the flags.
const FLAG_REQUIRED: u16 = 1;

/// The first fields of a message. The length is within its limit; the kind may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    kind: u16,
    required: bool,
    body_bytes: usize,
}

impl Start {
    /// Reads the fields from the front of a header.
    ///
    /// # Errors
    /// A body of more than `most` bytes, or a reserved bit that is set.
    pub(crate) fn read(reader: &mut Reader<'_>, most: usize) -> Result<Self, DecodeError> {
        let offset = reader.offset();
        let body_bytes = index(reader.u32("body length")?);
        within("body length", wide(body_bytes), wide(most), offset)?;
        let kind = reader.u16("message kind")?;
        let offset = reader.offset();
        let flags = reader.u16("message flags")?;
        if flags & !FLAG_REQUIRED != 0 {
            return Err(unsupported("message flags", u64::from(flags), offset));
        }
        Ok(Self {
            kind,
            required: flags & FLAG_REQUIRED != 0,
            body_bytes,
        })
    }

    /// Appends a message. The flags say that the receiver must understand the message, as in every
    /// message of this release. `rest` writes the fields of the header that follow.
    ///
    /// # Errors
    /// The errors of `body`, and a body of more than `most` bytes; `out` is then unchanged.
    pub(crate) fn write(
        out: &mut Vec<u8>,
        kind: u16,
        most: usize,
        rest: impl FnOnce(&mut Writer<'_>),
        body: impl FnOnce(&mut Writer<'_>) -> Encoded,
    ) -> Encoded {
        Writer::append(out, |writer| {
            let length_at = writer.position();
            writer.u32(0);
            writer.u16(kind);
            writer.u16(FLAG_REQUIRED);
            rest(writer);
            let body_at = writer.position();
            body(writer)?;
            let body_bytes = writer.position() - body_at;
            let length: u32 = bounded("body length", body_bytes, most)?;
            writer.patch(length_at, &length.to_le_bytes());
            Ok(())
        })
    }

    /// Bytes that follow the header.
    pub(crate) fn body_bytes(&self) -> usize {
        self.body_bytes
    }

    pub(crate) fn kind(&self) -> u16 {
        self.kind
    }

    /// Returns a reader over the body.
    ///
    /// # Errors
    /// The body does not have the announced length.
    pub(crate) fn body<'a>(&self, bytes: &'a [u8]) -> Result<Reader<'a>, DecodeError> {
        Reader::over_body(bytes, self.body_bytes)
    }

    /// Skips a message of an unknown kind.
    ///
    /// # Errors
    /// The message must be understood.
    pub(crate) fn skip<T>(&self) -> Result<Option<T>, DecodeError> {
        if !self.required {
            return Ok(None);
        }
        let why = DecodeReason::UnknownRequiredMessage { kind: self.kind };
        Err(DecodeError::new("message kind", why, 0))
    }
}
