//! Whom a TLS client wants, told from the first bytes that it sends, before
//! anybody has answered it.
//!
//! [`look`] is given everything that a connection has brought so far, which
//! stays in the socket meanwhile. It keeps nothing and allocates nothing but
//! the name. Where bytes are missing it says how many there must be at least
//! before another look can tell more. That bound is never more than an honest
//! client sends, and what is left of the hello shrinks with each look by a
//! fixed share, however finely it is cut: whoever waits for as many bytes looks
//! some fifty times at most.
//!
//! A hello is a handshake message, which may be spread over records (RFC 8446,
//! section 5.1); only the name in it is read (RFC 6066, section 3). Of the rest
//! no more is checked than the lengths that lead there.

#[cfg(test)]
pub(crate) mod tests;

use thiserror::Error;

use crate::limits::{MAX_CLIENT_FLIGHT_BYTES, MAX_CLIENT_HELLO_BYTES, MAX_SERVER_NAME_BYTES};

/// Content type of a handshake record.
const HANDSHAKE: u8 = 22;
const RECORD_HEADER_BYTES: usize = 5;
/// Plaintext of one record (RFC 8446, section 5.1).
const MAX_RECORD_BYTES: usize = 16 * 1024;
const MESSAGE_HEADER_BYTES: usize = 4;
const CLIENT_HELLO: u8 = 1;
/// Version, random, an empty session, one suite, one compression method.
const LEAST_BODY_BYTES: usize = 2 + 32 + 1 + 4 + 2;
const MAX_SESSION_BYTES: usize = 32;
/// The extension `server_name`, and the only kind of name in it.
const SERVER_NAME: usize = 0;
const HOST_NAME: u8 = 0;

/// What the bytes so far tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// Too little; there must be so many bytes, from the first one on.
    Needs(usize),
    /// The whole hello is there.
    Hello(Hello),
}

/// What a client says first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The server that it wants, in lower case; `None` where it names none.
    pub server_name: Option<String>,
}

/// No hello that could be read. The client is at fault.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NoHello {
    /// It does not speak TLS.
    #[error(
        "the client does not begin as TLS does (its first byte is {0:#04x}): find out who connects to this port"
    )]
    NotTls(u8),
    /// It is longer than anybody's.
    #[error(
        "the client's hello is longer than {MAX_CLIENT_HELLO_BYTES} bytes, or its records than {MAX_CLIENT_FLIGHT_BYTES}"
    )]
    TooLong,
    /// It breaks the protocol.
    #[error("the client's hello breaks the TLS protocol: {0}")]
    Malformed(&'static str),
}

/// Looks at the first bytes of a connection.
///
/// # Errors
/// [`NoHello`], whatever else may come.
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

/// How many bytes there must be at least before the hello can be whole; `None` where
/// it is.
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
        // Each piece of a header is judged as soon as it is there.
        if at > 0 && rest.first().is_some_and(|&kind| kind != HANDSHAKE) {
            return Err(NoHello::Malformed("a record within it is of another kind"));
        }
        if rest.get(1).is_some_and(|&major| major != 3) {
            return Err(match at {
                0 => NoHello::NotTls(first),
                _ => NoHello::Malformed("a record within it is of another version"),
            });
        }
        let Some(&[_, _, _, high, low]) = rest.first_chunk::<RECORD_HEADER_BYTES>() else {
            return Ok(Some(at + RECORD_HEADER_BYTES + missing));
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 {
            return Err(NoHello::Malformed("a record within it is empty"));
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
            // What this record cannot hold comes in another, with a header.
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

/// As much of the message as tells its length.
#[derive(Default)]
struct Start {
    header: [u8; MESSAGE_HEADER_BYTES],
    /// Bytes of the message that have come.
    come: usize,
}

impl Start {
    fn take(&mut self, content: &[u8]) -> Result<(), NoHello> {
        let slots = self.header.iter_mut().skip(self.come);
        for (slot, &byte) in slots.zip(content) {
            *slot = byte;
        }
        self.come += content.len();
        let [kind, high, middle, low] = self.header;
        if self.come > 0 && kind != CLIENT_HELLO {
            return Err(NoHello::Malformed("the first message is no ClientHello"));
        }
        if self.come < MESSAGE_HEADER_BYTES {
            return Ok(());
        }
        let body = u32::from_be_bytes([0, high, middle, low]) as usize;
        if body < LEAST_BODY_BYTES {
            return Err(NoHello::Malformed("it is shorter than any"));
        }
        if MESSAGE_HEADER_BYTES + body > MAX_CLIENT_HELLO_BYTES {
            return Err(NoHello::TooLong);
        }
        Ok(())
    }

    /// Bytes of the message that are known to be missing.
    fn missing(&self) -> usize {
        let [_, high, middle, low] = self.header;
        let body = match self.come {
            0..MESSAGE_HEADER_BYTES => LEAST_BODY_BYTES,
            _ => u32::from_be_bytes([0, high, middle, low]) as usize,
        };
        (MESSAGE_HEADER_BYTES + body).saturating_sub(self.come)
    }
}

/// Fields of a hello that is whole, across its records.
struct Fields<'a> {
    /// From inside the current record on.
    rest: &'a [u8],
    /// What is left of that record.
    record: usize,
    /// Bytes that may still be taken: of the message, or of a field in it.
    left: usize,
}

const SHORT: NoHello = NoHello::Malformed("a length within it is wrong");

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

    /// A number of `N` bytes, the highest first.
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

    /// Reads a field with its length of `N` bytes before it, all of it.
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

    /// Skips a field with its length of `N` bytes before it; returns that.
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
        return Err(NoHello::Malformed("its session is longer than TLS allows"));
    }
    hello.skip_field::<2>()?;
    hello.skip_field::<1>()?;
    if hello.left == 0 {
        // Before there were extensions.
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
                return Err(NoHello::Malformed("it names servers twice"));
            }
        }
        Ok(name)
    })
}

/// The one name of a list: more of a kind are not allowed, and there is one kind.
fn host_name(list: &mut Fields<'_>) -> Result<String, NoHello> {
    if list.u8()? != HOST_NAME {
        return Err(NoHello::Malformed("the server's name is of no known kind"));
    }
    list.field::<2, _>(|name| {
        if name.left == 0 || name.left > MAX_SERVER_NAME_BYTES {
            return Err(NoHello::Malformed("the server's name is empty or too long"));
        }
        let mut text = String::with_capacity(name.left);
        while name.left > 0 {
            match name.u8()? {
                byte @ 0x21..=0x7e => text.push(char::from(byte.to_ascii_lowercase())),
                _ => return Err(NoHello::Malformed("the server's name is no name")),
            }
        }
        Ok(text)
    })
}
