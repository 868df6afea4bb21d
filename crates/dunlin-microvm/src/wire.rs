//! Bytes that come from another host: every length is checked before it is used (I7).

use thiserror::Error;

/// Why bytes could not be decoded. The peer that wrote them is at fault, or whoever changed them.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes end inside a field.
    #[error("the bytes end inside `{0}`")]
    Short(&'static str),
    /// More bytes than the fields account for.
    #[error("{0} bytes are left over behind the last field")]
    Excess(usize),
    /// A field holds what it cannot.
    #[error("`{0}` holds a value that is out of bounds")]
    Value(&'static str),
}

/// Little-endian fields, one behind the other.
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

    /// A byte that says whether there is a value, and the value or zero.
    pub(crate) fn optional_u64(&mut self, value: Option<u64>) -> &mut Self {
        self.u8(value.is_some().into()).u64(value.unwrap_or(0))
    }

    /// Bytes of a length that the reader knows.
    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// A length of two bytes, and so many bytes of text; what does not fit is cut off.
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

/// Reads what [`Writer`] wrote. Each call names its field for the error.
#[derive(Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn raw(
        &mut self,
        field: &'static str,
        bytes: usize,
    ) -> Result<&'a [u8], DecodeError> {
        let (taken, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or(DecodeError::Short(field))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self
            .0
            .split_first_chunk()
            .ok_or(DecodeError::Short(field))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        self.array(field).map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, DecodeError> {
        self.array(field).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        self.array(field).map(u64::from_le_bytes)
    }

    pub(crate) fn optional_u64(&mut self, field: &'static str) -> Result<Option<u64>, DecodeError> {
        match (self.u8(field)?, self.u64(field)?) {
            (0, 0) => Ok(None),
            (1, value) => Ok(Some(value)),
            _ => Err(DecodeError::Value(field)),
        }
    }

    pub(crate) fn text(
        &mut self,
        field: &'static str,
        limit_bytes: usize,
    ) -> Result<&'a str, DecodeError> {
        let length = usize::from(self.u16(field)?);
        if length > limit_bytes {
            return Err(DecodeError::Value(field));
        }
        let bytes = self.raw(field, length)?;
        std::str::from_utf8(bytes).map_err(|_| DecodeError::Value(field))
    }

    /// All must have been read.
    pub(crate) fn end(self) -> Result<(), DecodeError> {
        match self.0.len() {
            0 => Ok(()),
            left => Err(DecodeError::Excess(left)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_field_that_is_cut_off_is_named() {
        let bytes = Writer::default().u32(5).text("name").finish();
        for length in 0..bytes.len() {
            let mut reader = Reader::new(&bytes[..length]);
            let result = reader
                .u32("number")
                .and_then(|_| reader.text("name", 10).map(str::len));
            let field = if length < 4 { "number" } else { "name" };
            assert_eq!(result, Err(DecodeError::Short(field)));
        }
        let mut reader = Reader::new(&bytes);
        reader.u32("number").unwrap();
        assert_eq!(reader.text("name", 3), Err(DecodeError::Value("name")));
    }
}
