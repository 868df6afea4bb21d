//! Encoding of descriptions and sections. Data from another host is decoded with
//! [`Reader`], which checks every length before use (I7).

pub(crate) use dunlin_proto::wire::Reader;
pub use dunlin_proto::wire::{DecodeError, DecodeReason};

/// The error for an invalid value of the field just read.
pub(crate) fn bad_value(reader: &Reader<'_>, what: &'static str, value: u64) -> DecodeError {
    DecodeError {
        what,
        why: DecodeReason::BadValue { value },
        offset: reader.offset(),
    }
}

/// Reads the result of [`Writer::optional_u64`].
pub(crate) fn optional_u64(
    reader: &mut Reader<'_>,
    what: &'static str,
) -> Result<Option<u64>, DecodeError> {
    match (reader.flag(what)?, reader.u64(what)?) {
        (false, 0) => Ok(None),
        (true, value) => Ok(Some(value)),
        (false, value) => Err(bad_value(reader, what, value)),
    }
}

/// Consecutive little-endian fields.
#[derive(Debug, Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.raw(&[value])
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// A presence byte, and the value or zero.
    pub(crate) fn optional_u64(&mut self, value: Option<u64>) -> &mut Self {
        self.u8(value.is_some().into()).u64(value.unwrap_or(0))
    }

    /// Bytes of a length known to the reader.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends a two-byte length and the text; truncates a text that is too long.
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        let mut end = text.len().min(usize::from(u16::MAX));
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let bytes = &text.as_bytes()[..end];
        self.u16(bytes.len() as u16).raw(bytes)
    }

    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_truncated_field_is_named() {
        let bytes = Writer::default().u32(5).text("name").finish();
        for length in 0..bytes.len() {
            let mut reader = Reader::new(&bytes[..length]);
            let result = reader
                .u32("number")
                .and_then(|_| reader.text("name", 10).map(str::len));
            let field = if length < 4 { "number" } else { "name" };
            let error = result.unwrap_err();
            assert_eq!(error.what, field);
            assert!(matches!(error.why, DecodeReason::Truncated { .. }));
        }
        let mut reader = Reader::new(&bytes);
        reader.u32("number").unwrap();
        let error = reader.text("name", 3).unwrap_err();
        assert_eq!(error.what, "name");
        assert!(matches!(error.why, DecodeReason::OverLimit { .. }));
    }
}
