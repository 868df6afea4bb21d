//! TLS 1.3 records in the process (RFC 8446, section 5): what the kernel does for a kernel-TLS
//! socket, done here on the traffic keys that rustls agreed on.
//!
//! A record is a header of five bytes, the content, one byte that names the content's type, and a
//! tag of sixteen bytes. Sealing and opening happen in place, in memory that the caller arranged,
//! or, where the crypto library can, between that and guest memory: then a page is never copied.
//! Each half counts its own records and needs nothing from the other: they can live on two
//! threads.
//!
//! No rekeying. AES-GCM allows 2^24 full records under one key (RFC 8446, section 5.5); a lane is
//! replaced well before, see [`RECORD_LIMIT`], and a peer that asks for new keys ends the lane.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;

use dunlin_linux::ktls;
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::provider::{
    AeadKey, CipherSuite, GuestOpener, GuestSealer, Provider, ProviderError, reaches_guest,
};

/// The header of a record: type, version, length.
pub const HEADER_BYTES: usize = 5;
/// The most content that one record carries.
pub const CONTENT_BYTES: usize = 1 << 14;
/// What follows the content: its type and the tag.
pub const TRAILER_BYTES: usize = 1 + TAG_BYTES;
/// What a record is longer than its content.
pub const OVERHEAD_BYTES: usize = HEADER_BYTES + TRAILER_BYTES;
/// The longest record of ours, without padding.
pub const RECORD_BYTES: usize = CONTENT_BYTES + OVERHEAD_BYTES;
/// The longest record that a peer may send: 256 bytes above the content (RFC 8446, section 5.2).
pub const RECEIVED_RECORD_BYTES: usize = HEADER_BYTES + CONTENT_BYTES + 256;
/// A sealed close_notify.
pub const CLOSE_NOTIFY_BYTES: usize = 2 + OVERHEAD_BYTES;
/// Data records under one key in one direction. 2^24 full AES-GCM records keep an attacker's
/// advantage near 2^-57 (RFC 8446, section 5.5); at 16 KiB that is 256 GiB, after which a lane is
/// replaced. ChaCha20-Poly1305 has no such limit and gets the same one, so that no peer depends
/// on the suite.
pub const RECORD_LIMIT: u64 = 1 << 24;

pub(super) const TAG_BYTES: usize = 16;
pub(super) const APPLICATION_DATA: u8 = 23;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const ALERT: u8 = 21;
/// The version that every protected record states (RFC 8446, section 5.2).
pub(super) const LEGACY_VERSION: [u8; 2] = [3, 3];
/// Records without content cost the peer 22 bytes and us an AEAD call: a run of them is an attack
/// or a fault, never traffic.
pub(super) const EMPTY_RUN_LIMIT: u32 = 32;
/// Alerts may follow the last data record: closing must be possible on a lane that is full.
pub(super) const ALERT_ROOM: u64 = 16;

/// Why a record could not be sealed. The fault is local; the lane must be given up, or, for
/// [`SealError::Limit`], replaced.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SealError {
    /// The key has sealed all the records it may seal.
    #[error("this lane's key has sealed {RECORD_LIMIT} records, the most it may: replace the lane")]
    Limit,
    /// The slice is shorter than a record's overhead or longer than a record.
    #[error("a record of {bytes} bytes cannot exist: it takes {OVERHEAD_BYTES} to {RECORD_BYTES}")]
    Length {
        /// The length asked for.
        bytes: usize,
    },
    /// The crypto library failed.
    #[error("the crypto library could not seal a record: give up the lane and report a bug")]
    Cipher,
}

/// Why a record could not be opened. The lane is at its end in every case.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// The outer type is not that of a protected record.
    #[error(
        "the peer sent an unprotected record (type {content_type}, version {major}.{minor}) on an \
         encrypted lane: it does not speak TLS 1.3 here, or someone wrote into the connection"
    )]
    Unprotected {
        /// The type byte of the header.
        content_type: u8,
        /// The first version byte.
        major: u8,
        /// The second version byte.
        minor: u8,
    },
    /// The kernel has found bytes that are no record.
    #[error(
        "what came on an encrypted connection is no TLS record of its version, or one that is too \
         long: the peer does not speak TLS here, or someone wrote into the connection"
    )]
    NoRecord,
    /// The stated length is outside what RFC 8446 allows.
    #[error("the peer stated a record of {bytes} bytes, which RFC 8446 does not allow")]
    Length {
        /// The stated length of the record's body.
        bytes: usize,
    },
    /// The tag does not fit: the record was changed, reordered, dropped or sealed with another key.
    #[error(
        "a record failed authentication: bytes were changed on the way, or the peer uses other \
         keys; the lane is closed and nothing of the record is used"
    )]
    Authentication,
    /// A record without a content type.
    #[error("the peer sent a record of padding alone, which RFC 8446 forbids")]
    NoContentType,
    /// A type other than data, alert or handshake.
    #[error("the peer sent a record of unknown content type {content_type}")]
    ContentType {
        /// The type byte inside the protected record.
        content_type: u8,
    },
    /// Too many records without content.
    #[error("the peer sent more than {EMPTY_RUN_LIMIT} empty records in a row")]
    EmptyRun,
    /// The peer gave up and said why.
    #[error("the peer ended the lane with the alert {alert}")]
    Alert {
        /// What it said.
        alert: Alert,
    },
    /// An alert that is not two bytes long.
    #[error("the peer sent a malformed alert")]
    MalformedAlert,
    /// A handshake message after the handshake.
    #[error("the peer sent {message} after the handshake: the lane must be replaced")]
    Handshake {
        /// What it was.
        message: LateMessage,
    },
    /// The peer has sealed more records under one key than it may.
    #[error("the peer sealed {RECORD_LIMIT} records under one key: the lane must be replaced")]
    Limit,
    /// An earlier record already ended this half.
    #[error("this lane already failed or was closed")]
    Spent,
}

/// A handshake message that came after the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LateMessage {
    /// A session ticket: of no use to lanes, which never resume.
    NewSessionTicket,
    /// The peer changes its sending key.
    KeyUpdate,
    /// Any other, by its type.
    Other(u8),
}

impl LateMessage {
    /// The one of a handshake type (RFC 8446, section 4).
    pub(super) fn of(kind: u8) -> Self {
        match kind {
            4 => Self::NewSessionTicket,
            24 => Self::KeyUpdate,
            kind => Self::Other(kind),
        }
    }
}

impl std::fmt::Display for LateMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NewSessionTicket => f.write_str("a session ticket"),
            Self::KeyUpdate => f.write_str("a key update"),
            Self::Other(kind) => write!(f, "handshake message {kind}"),
        }
    }
}

/// A TLS alert by its number (RFC 8446, section 6); prints its name and the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alert(pub u8);

impl std::fmt::Display for Alert {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = rustls::AlertDescription::from(self.0);
        write!(f, "{name:?} ({})", self.0)?;
        let advice = match self.0 {
            40 | 71 => "no cipher suite or key exchange in common: allow one on both hosts",
            42 | 46 | 49 => {
                "it does not count us among its peers: compare our certificate's names, and its \
                 pin, with the peers that it allows, and its key with those that it denies"
            }
            43 => {
                "it does not take our certificate for our side of a connection: a source needs \
                 one for TLS clients, a destination one for TLS servers (extended key usage)"
            }
            44 => "it holds our certificate for revoked: replace it",
            45 => "it holds our certificate for expired: renew it, or correct the clocks",
            48 => {
                "it does not trust the authority of our certificate, has no current revocation \
                 list of it, or misses an intermediate's certificate: give both hosts \
                 certificates of one authority, and append intermediates to ours"
            }
            51 => {
                "it cannot verify a signature of ours: its authority may bear the name of the one \
                 that issued our certificate and have another key"
            }
            70 => "it does not speak TLS 1.3",
            116 => "it demands a certificate and got none",
            _ => return Ok(()),
        };
        write!(f, ": {advice}")
    }
}

/// What an opened record held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opened {
    /// So many bytes of content, in place behind the record's header.
    Data(usize),
    /// close_notify: the peer sends nothing more on this lane, and this end is authentic.
    Closed,
}

/// What a record of a peer that need not be Dunlin held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// What a lane's record may hold.
    Usual(Opened),
    /// So many bytes of handshake messages, in place behind the record's header. A lane ends with
    /// one, for the reason given.
    Late(usize, LateMessage),
}

impl OpenError {
    /// What the kernel's error means that opens records for us, if it is about a record.
    pub(super) fn of_kernel(error: &std::io::Error) -> Option<Self> {
        match error.raw_os_error()? {
            ktls::EBADMSG => Some(Self::Authentication),
            code if ktls::NO_RECORD.contains(&code) => Some(Self::NoRecord),
            _ => None,
        }
    }
}

impl Content {
    /// What a record says that is no data, by its content type.
    pub(super) fn of_control(content_type: u8, content: &[u8]) -> Result<Self, OpenError> {
        match content_type {
            ALERT => match *content {
                // The level says nothing in TLS 1.3 (section 6).
                [_, 0] => Ok(Self::Usual(Opened::Closed)),
                [_, alert] => Err(OpenError::Alert {
                    alert: Alert(alert),
                }),
                _ => Err(OpenError::MalformedAlert),
            },
            HANDSHAKE => {
                let kind = content.first().copied().unwrap_or(0);
                Ok(Self::Late(content.len(), LateMessage::of(kind)))
            }
            content_type => Err(OpenError::ContentType { content_type }),
        }
    }

    pub(super) fn of_lane(self) -> Result<Opened, OpenError> {
        match self {
            Self::Usual(opened) => Ok(opened),
            Self::Late(_, message) => Err(OpenError::Handshake { message }),
        }
    }
}

/// Where an opened record's content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landed {
    /// In the guest's pages, all of it.
    InGuest,
    /// Behind the record's header, as the [`Opened`] says.
    InRecord(Opened),
}

/// The sending half: seals records in place and counts them.
pub struct SealHalf {
    key: AeadKey,
    guest: Option<GuestSealer>,
    iv: [u8; 12],
    sequence: u64,
}

/// The receiving half: opens records in place and counts them.
pub struct OpenHalf {
    key: AeadKey,
    guest: Option<GuestOpener>,
    iv: [u8; 12],
    sequence: u64,
    empty_run: u32,
    spent: bool,
}

impl SealHalf {
    /// A sending half from traffic keys (RFC 8446, section 7.3): a key of the suite's length,
    /// the write IV and the number of the next record.
    ///
    /// # Errors
    /// [`ProviderError`] when the provider is not built in or refuses the key.
    pub fn new(
        provider: Provider,
        suite: CipherSuite,
        key: &[u8],
        iv: [u8; 12],
        sequence: u64,
    ) -> Result<Self, ProviderError> {
        let guest = reaches_guest(provider, suite).then(|| GuestSealer::new(key));
        Ok(Self {
            key: AeadKey::new(provider, suite, key)?,
            guest: guest.flatten(),
            iv,
            sequence,
        })
    }

    /// Records sealed so far, alerts included.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Data records that may still be sealed; replace the lane before this reaches zero.
    pub fn records_left(&self) -> u64 {
        RECORD_LIMIT.saturating_sub(self.sequence)
    }

    /// Seals one data record in place. `record` is the whole record: [`HEADER_BYTES`] to be
    /// written, the content, [`TRAILER_BYTES`] to be written.
    ///
    /// # Errors
    /// [`SealError`]; nothing of the record may be sent then.
    pub fn seal(&mut self, record: &mut [u8]) -> Result<(), SealError> {
        if self.sequence >= RECORD_LIMIT {
            return Err(SealError::Limit);
        }
        self.seal_as(APPLICATION_DATA, record)
    }

    /// Seals one data record whose content is guest memory: `pages`, one after the other. `record`
    /// is the whole record, all of it to be written. Where the library can, the pages are read
    /// once, by the cipher; else they are copied first.
    ///
    /// The guest may go on writing: the record then holds some mixture of old and new bytes.
    ///
    /// # Errors
    /// [`SealError`]; nothing of the record may be sent then.
    pub fn seal_guest(
        &mut self,
        pages: &[VolatileSlice<'_>],
        record: &mut [u8],
    ) -> Result<(), SealError> {
        if self.sequence >= RECORD_LIMIT {
            return Err(SealError::Limit);
        }
        let bytes = record.len();
        let content = pages.iter().map(VolatileSlice::len).sum::<usize>();
        if content.saturating_add(OVERHEAD_BYTES) != bytes || bytes > RECORD_BYTES {
            return Err(SealError::Length { bytes });
        }
        let Some(guest) = &mut self.guest else {
            let mut rest = &mut record[HEADER_BYTES..];
            for page in pages {
                let (slot, behind) = rest.split_at_mut(page.len());
                page.copy_to(slot);
                rest = behind;
            }
            return self.seal_as(APPLICATION_DATA, record);
        };
        let (header, body) = record.split_at_mut(HEADER_BYTES);
        let stated = stated_header(body.len());
        header.copy_from_slice(&stated);
        guest
            .seal(
                &nonce(&self.iv, self.sequence),
                &stated,
                pages,
                APPLICATION_DATA,
                body,
            )
            .ok_or(SealError::Cipher)?;
        self.sequence += 1;
        Ok(())
    }

    /// Seals the alert that ends this direction.
    ///
    /// # Errors
    /// [`SealError`], as for [`SealHalf::seal`], though a full lane can still be closed.
    pub fn close_notify(&mut self) -> Result<[u8; CLOSE_NOTIFY_BYTES], SealError> {
        if self.sequence >= RECORD_LIMIT + ALERT_ROOM {
            return Err(SealError::Limit);
        }
        let mut record = [0; CLOSE_NOTIFY_BYTES];
        // Level warning, description close_notify.
        record[HEADER_BYTES..][..2].copy_from_slice(&[1, 0]);
        self.seal_as(ALERT, &mut record)?;
        Ok(record)
    }

    pub(super) fn seal_as(&mut self, content_type: u8, record: &mut [u8]) -> Result<(), SealError> {
        let bytes = record.len();
        if !(OVERHEAD_BYTES..=RECORD_BYTES).contains(&bytes) {
            return Err(SealError::Length { bytes });
        }
        let (header, body) = record.split_at_mut(HEADER_BYTES);
        let stated = stated_header(body.len());
        header.copy_from_slice(&stated);
        let (inner, tag) = body.split_at_mut(body.len() - TAG_BYTES);
        if let Some(last) = inner.last_mut() {
            *last = content_type;
        }
        let sealed = self
            .key
            .seal(nonce(&self.iv, self.sequence), stated, inner)
            .ok_or(SealError::Cipher)?;
        tag.copy_from_slice(&sealed);
        self.sequence += 1;
        Ok(())
    }
}

impl OpenHalf {
    /// A receiving half from traffic keys; see [`SealHalf::new`].
    ///
    /// # Errors
    /// [`ProviderError`] when the provider is not built in or refuses the key.
    pub fn new(
        provider: Provider,
        suite: CipherSuite,
        key: &[u8],
        iv: [u8; 12],
        sequence: u64,
    ) -> Result<Self, ProviderError> {
        let guest = reaches_guest(provider, suite).then(|| GuestOpener::new(key));
        Ok(Self {
            key: AeadKey::new(provider, suite, key)?,
            guest: guest.flatten(),
            iv,
            sequence,
            empty_run: 0,
            spent: false,
        })
    }

    /// Records opened so far, alerts included.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Data records that the peer may still send.
    pub fn records_left(&self) -> u64 {
        RECORD_LIMIT.saturating_sub(self.sequence)
    }

    /// The length of the whole record that begins with `header`, at most
    /// [`RECEIVED_RECORD_BYTES`]: to be asked before the rest is read.
    ///
    /// # Errors
    /// [`OpenError::Unprotected`] and [`OpenError::Length`].
    pub fn record_bytes(header: [u8; HEADER_BYTES]) -> Result<usize, OpenError> {
        let [content_type, major, minor, high, low] = header;
        if content_type != APPLICATION_DATA || [major, minor] != LEGACY_VERSION {
            return Err(OpenError::Unprotected {
                content_type,
                major,
                minor,
            });
        }
        let bytes = usize::from(u16::from_be_bytes([high, low]));
        if !(TRAILER_BYTES..=RECEIVED_RECORD_BYTES - HEADER_BYTES).contains(&bytes) {
            return Err(OpenError::Length { bytes });
        }
        Ok(HEADER_BYTES + bytes)
    }

    /// Opens one whole record in place; its content then stands right behind the header.
    ///
    /// # Errors
    /// [`OpenError`]. After any error, and after [`Opened::Closed`], every further call answers
    /// [`OpenError::Spent`]: nothing behind a bad record is ever looked at.
    pub fn open(&mut self, record: &mut [u8]) -> Result<Opened, OpenError> {
        if self.spent {
            return Err(OpenError::Spent);
        }
        let opened = self.open_next(record).and_then(Content::of_lane);
        self.spent = !matches!(opened, Ok(Opened::Data(_)));
        opened
    }

    /// Whether [`OpenHalf::open_guest`] works with this library and suite.
    pub fn opens_into_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Opens one whole record straight into guest memory, `pages` being as long together as the
    /// record's content would be without padding ([`OVERHEAD_BYTES`] less than the record).
    ///
    /// A record that holds something else after all, padded data or an alert, comes out as from
    /// [`OpenHalf::open`], in place behind the header, with [`Landed::InRecord`]; bytes of it have
    /// then been written to the pages, and the caller must still fill those.
    ///
    /// # Errors
    /// [`OpenError`]. What is in the pages then is nobody's content and must be written again, or
    /// never be used.
    pub fn open_guest(
        &mut self,
        record: &mut [u8],
        pages: &[VolatileSlice<'_>],
    ) -> Result<Landed, OpenError> {
        if self.spent {
            return Err(OpenError::Spent);
        }
        let landed = self.open_next_guest(record, pages);
        self.spent = !matches!(
            landed,
            Ok(Landed::InGuest | Landed::InRecord(Opened::Data(_)))
        );
        landed
    }

    fn open_next_guest(
        &mut self,
        record: &mut [u8],
        pages: &[VolatileSlice<'_>],
    ) -> Result<Landed, OpenError> {
        let (header, body) = self.checked(record)?;
        let Some(guest) = &mut self.guest else {
            let opened = self.open_next(record).and_then(Content::of_lane);
            return opened.map(Landed::InRecord);
        };
        let last = guest
            .open(&nonce(&self.iv, self.sequence), &header, body, pages)
            .ok_or(OpenError::Authentication)?;
        self.sequence += 1;
        if last == APPLICATION_DATA && body.len() > TRAILER_BYTES {
            if self.sequence > RECORD_LIMIT {
                return Err(OpenError::Limit);
            }
            self.empty_run = 0;
            return Ok(Landed::InGuest);
        }
        // Read back, over the ciphertext, which nobody needs any more.
        let (inner, _) = body.split_at_mut(body.len() - TAG_BYTES);
        let mut at = 0;
        for page in pages {
            at += page.copy_to(&mut inner[at..]);
        }
        if let Some(end) = inner.last_mut() {
            *end = last;
        }
        let opened = self.judge(inner).and_then(Content::of_lane);
        opened.map(Landed::InRecord)
    }

    /// The header and the body of a record whose length is right and may be opened.
    fn checked<'a>(
        &self,
        record: &'a mut [u8],
    ) -> Result<([u8; HEADER_BYTES], &'a mut [u8]), OpenError> {
        let bytes = record.len();
        let Some((header, body)) = record.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Err(OpenError::Length { bytes });
        };
        if bytes != Self::record_bytes(*header)? {
            return Err(OpenError::Length { bytes: body.len() });
        }
        if self.sequence >= RECORD_LIMIT + ALERT_ROOM {
            return Err(OpenError::Limit);
        }
        Ok((*header, body))
    }

    /// As [`OpenHalf::open`], for a peer that may send messages after the handshake. The caller
    /// opens no more records after an error or the end.
    pub(super) fn open_next(&mut self, record: &mut [u8]) -> Result<Content, OpenError> {
        let (header, body) = self.checked(record)?;
        let inner_bytes = self
            .key
            .open(nonce(&self.iv, self.sequence), header, body)
            .ok_or(OpenError::Authentication)?
            .len();
        self.sequence += 1;
        self.judge(&body[..inner_bytes])
    }

    /// What an opened record says, its content type included.
    fn judge(&mut self, inner: &[u8]) -> Result<Content, OpenError> {
        if inner.len() > CONTENT_BYTES + 1 {
            return Err(OpenError::Length { bytes: inner.len() });
        }
        // The type is the last byte that is not padding (RFC 8446, section 5.4).
        let end = inner
            .iter()
            .rposition(|&byte| byte != 0)
            .ok_or(OpenError::NoContentType)?;
        let content = &inner[..end];
        match inner[end] {
            APPLICATION_DATA if self.sequence > RECORD_LIMIT => Err(OpenError::Limit),
            APPLICATION_DATA => {
                self.empty_run = if content.is_empty() {
                    self.empty_run + 1
                } else {
                    0
                };
                if self.empty_run > EMPTY_RUN_LIMIT {
                    return Err(OpenError::EmptyRun);
                }
                Ok(Content::Usual(Opened::Data(content.len())))
            }
            content_type => Content::of_control(content_type, content),
        }
    }
}

impl std::fmt::Debug for SealHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SealHalf")
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for OpenHalf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenHalf")
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

/// The header of a data or alert record with a body of `body_bytes`, its length checked before.
fn stated_header(body_bytes: usize) -> [u8; HEADER_BYTES] {
    let [high, low] = u16::try_from(body_bytes)
        .expect("a record's body is at most 16,401 bytes, checked by every caller")
        .to_be_bytes();
    [
        APPLICATION_DATA,
        LEGACY_VERSION[0],
        LEGACY_VERSION[1],
        high,
        low,
    ]
}

/// The nonce of record `sequence` (RFC 8446, section 5.3).
pub(super) fn nonce(iv: &[u8; 12], sequence: u64) -> [u8; 12] {
    let mut nonce = *iv;
    for (byte, of_sequence) in nonce[4..].iter_mut().zip(sequence.to_be_bytes()) {
        *byte ^= of_sequence;
    }
    nonce
}
