//! Encoding of descriptions and sections. Data from another host is decoded with
//! [`Reader`], which checks every length before use (I7).

pub use dunlin_proto::wire::{DecodeError, DecodeReason};
pub(crate) use dunlin_proto::wire::{Reader, Writer};

/// Returns the error for an invalid value of the field that was just read.
pub(crate) fn bad_value(reader: &Reader<'_>, what: &'static str, value: u64) -> DecodeError {
    DecodeError {
        what,
        why: DecodeReason::BadValue { value },
        offset: reader.offset(),
    }
}

/// Reads the result of [`put_optional_u64`].
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

/// Appends a presence byte, and then the value, or zero if there is no value.
pub(crate) fn put_optional_u64(writer: &mut Writer<'_>, value: Option<u64>) {
    writer.flag(value.is_some()).u64(value.unwrap_or(0));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_truncated_field_is_named() {
        let mut bytes = Vec::new();
        Writer::new(&mut bytes).u32(5).u16(4).bytes(b"name");
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
