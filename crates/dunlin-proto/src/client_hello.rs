//! Reads the server name from the first bytes that a TLS client sends, before any reply is sent.
//!
//! [`look`] takes all bytes that the connection has received so far; the bytes
//! stay in the socket. It keeps no state and allocates only the name. If the hello
//! is incomplete, it returns the total number of bytes for which the caller must
//! wait. An honest client always sends at least that many. Each look reduces the
//! missing part of the hello by a fixed share, even if the client splits the hello
//! into tiny records. A caller therefore looks at most about fifty times.
//!
//! A ClientHello is a handshake message and may span several records (RFC 8446,
//! section 5.1). Only the server name is read (RFC 6066, section 3). Of the other fields, only the
//! lengths are checked.

#[cfg(test)]
pub(crate) mod tests;

use thiserror::Error;

use crate::limits::{MAX_CLIENT_FLIGHT_BYTES, MAX_CLIENT_HELLO_BYTES, MAX_SERVER_NAME_BYTES};

/// Content type of a handshake record.
const HANDSHAKE: u8 = 22;
const RECORD_HEADER_BYTES: usize = 5;
/// Maximum plaintext of one record (RFC 8446, section 5.1).
const MAX_RECORD_BYTES: usize = 16 * 1024;
const MESSAGE_HEADER_BYTES: usize = 4;
const CLIENT_HELLO: u8 = 1;
/// The shortest body: version, random, empty session ID, one cipher suite, one compression method.
const LEAST_BODY_BYTES: usize = 2 + 32 + 1 + 4 + 2;
const MAX_SESSION_BYTES: usize = 32;
/// The extension `server_name`, and the only name type that it defines.
const SERVER_NAME: usize = 0;
const HOST_NAME: u8 = 0;

/// The result of [`look`] for the bytes received so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// The hello is incomplete. The next look needs at least this many bytes in total, including
    /// those already received.
    Needs(usize),
    /// The hello is complete.
    Hello(Hello),
}

/// A client's ClientHello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The server name, in lower case; `None` if the client sent none.
    pub server_name: Option<String>,
}

/// The first bytes are not a readable ClientHello. The client is at fault.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NoHello {
    /// The client does not speak TLS.
    #[error("client does not speak TLS (first byte {0:#04x})")]
    NotTls(u8),
    /// The hello or its records exceed the limit.
    #[error(
        "ClientHello exceeds {MAX_CLIENT_HELLO_BYTES} bytes, or its records exceed {MAX_CLIENT_FLIGHT_BYTES}"
    )]
    TooLong,
    /// The client breaks the protocol.
    #[error("malformed ClientHello: {0}")]
    Malformed(&'static str),
}

/// Looks at the first bytes of a connection.
///
/// # Errors
/// [`NoHello`] if the bytes are not a readable ClientHello. More bytes would not change this.
pub fn look(bytes: &[u8]) -> Result<Look, NoHello> {
    match needed(bytes)? {
        Some(least) if least > MAX_CLIENT_FLIGHT_BYTES => Err(NoHello::TooLong),
        Some(least) => Ok(Look::Needs(least)),
        None => {
            let mut message = Fields::new(bytes);
            message.skip(1)?;
            let server_name = message.field::<3, _>(server_name)?;
            Ok(Look::Hello(Hello { server_name }))
        }
    }
}

/// Returns the total number of bytes that the next look needs, as in [`Look::Needs`]; `None` if the
/// hello is complete.
fn needed(bytes: &[u8]) -> Result<Option<usize>, NoHello> {
    let Some(&first) = bytes.first() else {
        return Ok(Some(1));
    };
    if first != HANDSHAKE {
        return Err(NoHello::NotTls(first));
    }
    let mut start = Start::default();
    let mut at = 0;
    loop {
        let rest = bytes.get(at..).unwrap_or_default();
        let missing = start.missing();
        if missing == 0 {
            return Ok(None);
        }
        // Check each header field as soon as it has arrived.
        if at > 0 && rest.first().is_some_and(|&kind| kind != HANDSHAKE) {
            return Err(NoHello::Malformed(
                "one of its records has a different type",
            ));
        }
        if rest.get(1).is_some_and(|&major| major != 3) {
            return Err(match at {
                0 => NoHello::NotTls(first),
                _ => NoHello::Malformed("one of its records has a different version"),
            });
        }
        let Some(&[_, _, _, high, low]) = rest.first_chunk::<RECORD_HEADER_BYTES>() else {
            return Ok(Some(at + RECORD_HEADER_BYTES + missing));
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 {
            return Err(NoHello::Malformed("one of its records is empty"));
        }
        if length > MAX_RECORD_BYTES {
            return Err(NoHello::Malformed("a record is longer than TLS allows"));
        }
        at += RECORD_HEADER_BYTES;
        let content = bytes.get(at..).unwrap_or_default();
        let content = content.get(..length).unwrap_or(content);
        start.take(content)?;
        let missing = start.missing();
        if missing > 0 && content.len() < length {
            // If the hello does not end in this record, it continues in another record. So the
            // header of that record is missing too.
            let left = length - content.len();
            let beyond = match missing.saturating_sub(left) {
                0 => missing,
                further => left + RECORD_HEADER_BYTES + further,
            };
            return Ok(Some(at + content.len() + beyond));
        }
        at += length;
    }
}

/// The message's header, as far as it has arrived. It contains the message's length.
#[derive(Default)]
struct Start {
    header: [u8; MESSAGE_HEADER_BYTES],
    /// Bytes of the message received so far.
    received: usize,
}

impl Start {
    fn take(&mut self, content: &[u8]) -> Result<(), NoHello> {
        let slots = self.header.iter_mut().skip(self.received);
        for (slot, &byte) in slots.zip(content) {
            *slot = byte;
        }
        self.received += content.len();
        let [kind, high, middle, low] = self.header;
        if self.received > 0 && kind != CLIENT_HELLO {
            return Err(NoHello::Malformed("the first message is not a ClientHello"));
        }
        if self.received < MESSAGE_HEADER_BYTES {
            return Ok(());
        }
        let body = u32::from_be_bytes([0, high, middle, low]) as usize;
        if body < LEAST_BODY_BYTES {
            return Err(NoHello::Malformed("it is shorter than the minimum"));
        }
        if MESSAGE_HEADER_BYTES + body > MAX_CLIENT_HELLO_BYTES {
            return Err(NoHello::TooLong);
        }
        Ok(())
    }

    /// The number of bytes that are known to be missing from the message.
    fn missing(&self) -> usize {
        let [_, high, middle, low] = self.header;
        let body = match self.received {
            0..MESSAGE_HEADER_BYTES => LEAST_BODY_BYTES,
            _ => u32::from_be_bytes([0, high, middle, low]) as usize,
        };
        (MESSAGE_HEADER_BYTES + body).saturating_sub(self.received)
    }
}

/// Reads the fields of a complete hello, which may span several records.
struct Fields<'a> {
    /// All unread bytes. They start inside the current record.
    rest: &'a [u8],
    /// Unread bytes of the current record.
    record: usize,
    /// Unread bytes of the message, or of the field that is being read.
    left: usize,
}

const SHORT: NoHello = NoHello::Malformed("a length inside it is wrong");

impl<'a> Fields<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            rest: bytes,
            record: 0,
            left: MAX_CLIENT_HELLO_BYTES,
        }
    }

    fn u8(&mut self) -> Result<u8, NoHello> {
        if self.left == 0 {
            return Err(SHORT);
        }
        if self.record == 0 {
            let Some((&[_, _, _, high, low], rest)) =
                self.rest.split_first_chunk::<RECORD_HEADER_BYTES>()
            else {
                return Err(SHORT);
            };
            self.record = usize::from(u16::from_be_bytes([high, low]));
            self.rest = rest;
        }
        let Some((&byte, rest)) = self.rest.split_first() else {
            return Err(SHORT);
        };
        self.rest = rest;
        self.record = self.record.saturating_sub(1);
        self.left -= 1;
        Ok(byte)
    }

    /// A big-endian number of `N` bytes.
    fn number<const N: usize>(&mut self) -> Result<usize, NoHello> {
        const { assert!(N <= 3) };
        let mut number = 0;
        for _ in 0..N {
            number = number << 8 | usize::from(self.u8()?);
        }
        Ok(number)
    }

    fn skip(&mut self, count: usize) -> Result<(), NoHello> {
        if count > self.left {
            return Err(SHORT);
        }
        for _ in 0..count {
            self.u8()?;
        }
        Ok(())
    }

    /// Reads a whole field that is prefixed by a length of `N` bytes.
    fn field<const N: usize, T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, NoHello>,
    ) -> Result<T, NoHello> {
        let length = self.number::<N>()?;
        let Some(behind) = self.left.checked_sub(length) else {
            return Err(SHORT);
        };
        self.left = length;
        let value = read(self)?;
        if self.left > 0 {
            return Err(SHORT);
        }
        self.left = behind;
        Ok(value)
    }

    /// Skips a field that is prefixed by a length of `N` bytes; returns the length.
    fn skip_field<const N: usize>(&mut self) -> Result<usize, NoHello> {
        self.field::<N, _>(|field| {
            let length = field.left;
            field.skip(length).map(|()| length)
        })
    }
}

fn server_name(hello: &mut Fields<'_>) -> Result<Option<String>, NoHello> {
    hello.skip(2 + 32)?;
    if hello.skip_field::<1>()? > MAX_SESSION_BYTES {
        return Err(NoHello::Malformed(
            "its session ID is longer than TLS allows",
        ));
    }
    hello.skip_field::<2>()?;
    hello.skip_field::<1>()?;
    if hello.left == 0 {
        // Up to TLS 1.2, a hello without extensions is valid. It has no server name.
        return Ok(None);
    }
    hello.field::<2, _>(|extensions| {
        let mut name = None;
        while extensions.left > 0 {
            if extensions.number::<2>()? != SERVER_NAME {
                extensions.skip_field::<2>()?;
                continue;
            }
            let found = extensions.field::<2, _>(|extension| extension.field::<2, _>(host_name))?;
            if name.replace(found).is_some() {
                return Err(NoHello::Malformed("it has two server_name extensions"));
            }
        }
        Ok(name)
    })
}

/// Returns the only name in the list; RFC 6066 allows one name per type and defines one type.
fn host_name(list: &mut Fields<'_>) -> Result<String, NoHello> {
    if list.u8()? != HOST_NAME {
        return Err(NoHello::Malformed("the server name has an unknown type"));
    }
    list.field::<2, _>(|name| {
        if name.left == 0 || name.left > MAX_SERVER_NAME_BYTES {
            return Err(NoHello::Malformed("the server name is empty or too long"));
        }
        let mut text = String::with_capacity(name.left);
        while name.left > 0 {
            match name.u8()? {
                byte @ 0x21..=0x7e => text.push(char::from(byte.to_ascii_lowercase())),
                _ => return Err(NoHello::Malformed("the server name has invalid characters")),
            }
        }
        Ok(text)
    })
}
