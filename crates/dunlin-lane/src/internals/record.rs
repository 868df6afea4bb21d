//! TLS 1.3 records in this process (RFC 8446, section 5), with the traffic keys that rustls
//! negotiated. This is the user-space counterpart of a kernel-TLS socket.
//!
//! A record consists of a header of five bytes, the content, one byte with the content's type, and
//! a tag of sixteen bytes. Records are sealed and opened in place, in the caller's buffer. If the
//! crypto library supports it, the cipher works between that buffer and other memory instead, of a
//! guest or of this process, so the content is not copied. [`SealHalf`] and [`OpenHalf`] count
//! their own records and are independent of each other, so they can belong to two threads.
//!
//! A half has one key. RFC 8446, section 5.5, allows about 2^24.5 full AES-GCM records under one
//! key. A relay makes new halves for its next keys. A lane is replaced instead, see
//! [`RECORD_LIMIT`], and a peer that requests new keys ends the lane.

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
/// Maximum content of one record.
pub const CONTENT_BYTES: usize = 1 << 14;
/// The bytes after the content: its type and the tag.
pub const TRAILER_BYTES: usize = 1 + TAG_BYTES;
/// The difference between the lengths of a record and of its content.
pub const OVERHEAD_BYTES: usize = HEADER_BYTES + TRAILER_BYTES;
/// Maximum length of a record that Dunlin sends; Dunlin sends no padding.
pub const RECORD_BYTES: usize = CONTENT_BYTES + OVERHEAD_BYTES;
/// Maximum length of a record from a peer: the body may be 256 bytes longer than the maximum
/// content (RFC 8446, section 5.2).
pub const RECEIVED_RECORD_BYTES: usize = HEADER_BYTES + CONTENT_BYTES + 256;
/// A sealed close_notify.
pub const CLOSE_NOTIFY_BYTES: usize = 2 + OVERHEAD_BYTES;
/// Maximum number of data records under one key in one direction. Up to about 2^24.5 full AES-GCM
/// records keep an attacker's advantage near 2^-57 (RFC 8446, section 5.5). 2^24 records of 16 KiB
/// hold 256 GiB of content. The lane is replaced before it reaches the limit. ChaCha20-Poly1305
/// does not need a limit but has the same one, so that peers behave the same with every suite.
pub const RECORD_LIMIT: u64 = 1 << 24;

pub(super) const TAG_BYTES: usize = 16;
pub(super) const APPLICATION_DATA: u8 = 23;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const ALERT: u8 = 21;
/// The version in every protected record (RFC 8446, section 5.2).
pub(super) const LEGACY_VERSION: [u8; 2] = [3, 3];
/// Maximum number of consecutive records without content. Each of these records costs the peer 22
/// bytes and this side an AEAD call, so a longer sequence is an attack or a fault.
pub(super) const EMPTY_RUN_LIMIT: u32 = 32;
/// Records reserved for alerts after the last data record, so that a lane at its limit can still be
/// closed.
pub(super) const ALERT_ROOM: u64 = 16;

/// Why a record could not be sealed. The fault is local. Replace the lane after
/// [`SealError::Limit`]; close it after any other error.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SealError {
    /// The key has sealed its maximum number of records.
    #[error("the lane's key has sealed {RECORD_LIMIT} records, its limit: replace the lane")]
    Limit,
    /// The buffer is shorter than a record's overhead, longer than a record, or does not fit the
    /// pages.
    #[error(
        "record length {bytes} is out of range ({OVERHEAD_BYTES}–{RECORD_BYTES}) or does not fit the pages"
    )]
    Length {
        /// The length in bytes.
        bytes: usize,
    },
    /// The crypto library failed.
    #[error("the crypto library failed to seal a record")]
    Cipher,
}

/// Why a record could not be opened. Every error ends the lane.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenError {
    /// The outer content type or the version is not that of a protected record.
    #[error(
        "the peer sent an unprotected record (type {content_type}, version {major}.{minor}) on an \
         encrypted connection: the peer does not use TLS 1.3, or another program wrote to the connection"
    )]
    Unprotected {
        /// The type byte of the header.
        content_type: u8,
        /// The first version byte.
        major: u8,
        /// The second version byte.
        minor: u8,
    },
    /// The kernel found bytes that do not form a record.
    #[error(
        "the received bytes are not a TLS record of the negotiated version, or the record is too \
         long: the peer does not use TLS, or another program wrote to the connection"
    )]
    NoRecord,
    /// The record's length is outside the range of RFC 8446, or differs from the length in the
    /// record's header.
    #[error(
        "the peer sent a record of length {bytes}, which is outside the range of RFC 8446 or differs \
         from the length in the record's header"
    )]
    Length {
        /// The length of the record's body or of its plaintext.
        bytes: usize,
    },
    /// The tag is invalid: the record was modified, reordered or sealed with another key, or an
    /// earlier record was dropped.
    #[error(
        "record authentication failed: bytes were modified in transit, or the peer uses other \
         keys; the lane is closed and the record is discarded"
    )]
    Authentication,
    /// The record has no content type.
    #[error("the peer sent a record with only padding, which RFC 8446 forbids")]
    NoContentType,
    /// A type other than data, alert or handshake.
    #[error("the peer sent a record of unknown content type {content_type}")]
    ContentType {
        /// The type byte inside the protected record.
        content_type: u8,
    },
    /// Too many consecutive records without content.
    #[error("the peer sent more than {EMPTY_RUN_LIMIT} empty records in a row")]
    EmptyRun,
    /// The peer sent an alert.
    #[error("the peer ended the lane with alert {alert}")]
    Alert {
        /// The alert.
        alert: Alert,
    },
    /// An alert that is not two bytes long.
    #[error("the peer sent a malformed alert")]
    MalformedAlert,
    /// The peer sent a handshake message after the handshake.
    #[error("the peer sent {message} after the handshake: the lane must be replaced")]
    Handshake {
        /// The message.
        message: LateMessage,
    },
    /// The peer exceeded the record limit of its key.
    #[error(
        "the peer sealed more than {RECORD_LIMIT} records with one key: the lane must be replaced"
    )]
    Limit,
    /// An earlier record has already ended this half of the lane.
    #[error("this connection already failed or was closed")]
    Spent,
}

/// A handshake message that the peer sends after the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LateMessage {
    /// A session ticket. Lanes never resume sessions and do not use it.
    NewSessionTicket,
    /// The peer updates its sending key.
    KeyUpdate,
    /// Any other message, by its type.
    Other(u8),
}

impl LateMessage {
    /// The message with this handshake type (RFC 8446, section 4).
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

/// A TLS alert by its number (RFC 8446, section 6). Displays as name and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alert(pub u8);

impl std::fmt::Display for Alert {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = rustls::AlertDescription::from(self.0);
        write!(f, "{name:?} ({})", self.0)?;
        let advice = match self.0 {
            40 | 71 => "no cipher suite or key exchange in common: allow one on both hosts",
            42 | 46 | 49 => {
                "it does not allow this host as a peer: compare this host's certificate (names and pin) with \
                 the peer's list of allowed peers, and the certificate's key with the peer's list of denied \
                 keys"
            }
            43 => {
                "it does not accept this host's certificate for this side of a connection: the side that connects \
                 needs a certificate for TLS clients, and the side that accepts needs one for TLS servers \
                 (extended key usage)"
            }
            44 => "it considers this host's certificate revoked: replace it",
            45 => "it considers this host's certificate expired: renew it, or correct the clocks",
            48 => {
                "it does not trust the authority of this host's certificate, has no current revocation \
                 list of that authority, or lacks an intermediate certificate: give both hosts certificates \
                 of one authority, and append intermediate certificates to this host's certificate file"
            }
            51 => {
                "it cannot verify a signature from this host: an authority that it trusts may have the same \
                 name as the issuer of this host's certificate, but another key: give both hosts certificates \
                 of one authority"
            }
            70 => "it supports none of the TLS versions that this host offers",
            116 => "it requires a certificate and received none",
            _ => return Ok(()),
        };
        write!(f, ": {advice}")
    }
}

/// The content of an opened record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opened {
    /// Data of this many bytes: after the record's header, or at the beginning of the memory that
    /// [`OpenHalf::open_into`] fills.
    Data(usize),
    /// close_notify: the peer sends nothing more on this lane, and this close is authentic.
    Closed,
}

/// The content of a record from a peer that may be a program other than Dunlin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Content that is also allowed on a lane.
    Usual(Opened),
    /// Handshake messages. The first field is the number of their bytes; the bytes begin after the
    /// record's header. The second field is the first message. On a lane they are an error.
    Late(usize, LateMessage),
}

impl OpenError {
    /// Converts a kernel error; `None` if it does not concern a record.
    pub(super) fn of_kernel(error: &std::io::Error) -> Option<Self> {
        match error.raw_os_error()? {
            ktls::EBADMSG => Some(Self::Authentication),
            code if ktls::NO_RECORD.contains(&code) => Some(Self::NoRecord),
            _ => None,
        }
    }
}

impl Content {
    /// Interprets the content of a record that is not data.
    pub(super) fn of_control(content_type: u8, content: &[u8]) -> Result<Self, OpenError> {
        match content_type {
            ALERT => match *content {
                // TLS 1.3 ignores the alert's level (RFC 8446, section 6).
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

/// The location of an opened record's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landed {
    /// Entirely in the guest's pages.
    InGuest,
    /// After the record's header, as [`Opened`] describes.
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
    /// Returns a sending half for traffic keys (RFC 8446, section 7.3): a key of the suite's
    /// length, the write IV and the sequence number of the next record.
    ///
    /// # Errors
    /// [`ProviderError`] if the provider is not built in or rejects the key.
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

    /// The number of data records that may still be sealed. Replace the lane before the number
    /// reaches zero.
    pub fn records_left(&self) -> u64 {
        RECORD_LIMIT.saturating_sub(self.sequence)
    }

    /// Seals one data record in place. `record` is the whole record. The caller leaves
    /// [`HEADER_BYTES`] free before the content and [`TRAILER_BYTES`] after it. This call fills in
    /// both.
    ///
    /// # Errors
    /// [`SealError`]. No part of the record may be sent.
    pub fn seal(&mut self, record: &mut [u8]) -> Result<(), SealError> {
        if self.sequence >= RECORD_LIMIT {
            return Err(SealError::Limit);
        }
        self.seal_as(APPLICATION_DATA, record)
    }

    /// Seals one data record with this content. `record` is the whole record and is overwritten. If
    /// the library supports it, the cipher reads `content` directly; otherwise it is copied first.
    ///
    /// # Errors
    /// [`SealError`]. No part of the record may be sent.
    pub fn seal_from(&mut self, content: &[u8], record: &mut [u8]) -> Result<(), SealError> {
        if self.sequence >= RECORD_LIMIT {
            return Err(SealError::Limit);
        }
        let bytes = record.len();
        if content.len().saturating_add(OVERHEAD_BYTES) != bytes || bytes > RECORD_BYTES {
            return Err(SealError::Length { bytes });
        }
        let (header, body) = record.split_at_mut(HEADER_BYTES);
        let stated = stated_header(body.len());
        header.copy_from_slice(&stated);
        let nonce = nonce(&self.iv, self.sequence);
        self.key
            .seal_from(nonce, stated, content, APPLICATION_DATA, body)
            .ok_or(SealError::Cipher)?;
        self.sequence += 1;
        Ok(())
    }

    /// Seals one data record with the content of `pages` in guest memory, concatenated. `record`
    /// is the whole record and is overwritten. If the library supports it, the cipher reads the
    /// pages directly; otherwise they are copied first.
    ///
    /// The guest may write to the pages concurrently; the record may then hold a mixture of old and
    /// new bytes.
    ///
    /// # Errors
    /// [`SealError`]. No part of the record may be sent.
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

    /// Seals the close_notify alert, which ends this direction.
    ///
    /// # Errors
    /// [`SealError`], as for [`SealHalf::seal`]. The call also works on a lane at its record limit.
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
    /// Returns a receiving half for traffic keys; see [`SealHalf::new`].
    ///
    /// # Errors
    /// [`ProviderError`] if the provider is not built in or rejects the key.
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

    /// Returns the length of the whole record with this header, at most [`RECEIVED_RECORD_BYTES`].
    /// Call this before reading the rest.
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

    /// Opens one whole record in place. The content then begins after the header.
    ///
    /// # Errors
    /// [`OpenError`]. After any error, and after [`Opened::Closed`], every further call returns
    /// [`OpenError::Spent`]: records after an invalid one are never processed.
    pub fn open(&mut self, record: &mut [u8]) -> Result<Opened, OpenError> {
        if self.spent {
            return Err(OpenError::Spent);
        }
        let opened = self.open_next(record).and_then(Content::of_lane);
        self.spent = !matches!(opened, Ok(Opened::Data(_)));
        opened
    }

    /// Opens one whole record into `inner`, which receives the content, its type and the padding.
    /// `inner` must be shorter than `record` by [`HEADER_BYTES`] and the length of the tag. The
    /// content is then at the beginning of `inner`. If the library supports it, the cipher writes
    /// `inner` directly; otherwise the bytes are copied.
    ///
    /// # Errors
    /// [`OpenError`], as for [`OpenHalf::open`]. `inner` then holds undefined bytes.
    pub fn open_into(&mut self, record: &mut [u8], inner: &mut [u8]) -> Result<Opened, OpenError> {
        if self.spent {
            return Err(OpenError::Spent);
        }
        let opened = (self.within_limit())
            .and_then(|()| self.open_next_into(record, inner))
            .and_then(|()| self.classify(inner))
            .and_then(Content::of_lane);
        self.spent = !matches!(opened, Ok(Opened::Data(_)));
        opened
    }

    /// Opens one whole record of any type into `inner`, as [`OpenHalf::open_into`] does. Returns
    /// the type and the length of the content. This allows any number of records, because a peer
    /// that is not Dunlin may renew its key later than [`RECORD_LIMIT`]. The caller must not open
    /// more records after an error.
    pub(super) fn open_any_into(
        &mut self,
        record: &mut [u8],
        inner: &mut [u8],
    ) -> Result<(u8, usize), OpenError> {
        self.open_next_into(record, inner)?;
        let (content_type, content) = without_padding(inner)?;
        Ok((content_type, content.len()))
    }

    fn open_next_into(&mut self, record: &mut [u8], inner: &mut [u8]) -> Result<(), OpenError> {
        let (header, body) = Self::checked(record)?;
        if body.len() != inner.len().saturating_add(TAG_BYTES) {
            return Err(OpenError::Length { bytes: inner.len() });
        }
        let nonce = nonce(&self.iv, self.sequence);
        self.key
            .open_into(nonce, header, body, inner)
            .ok_or(OpenError::Authentication)?;
        self.sequence += 1;
        Ok(())
    }

    /// Whether [`OpenHalf::open_guest`] opens into guest memory with this library and suite.
    pub fn opens_into_guest(&self) -> bool {
        self.guest.is_some()
    }

    /// Opens one whole record straight into guest memory. The total length of `pages` must be the
    /// record's length without [`OVERHEAD_BYTES`], which is the content's length if there is no
    /// padding.
    ///
    /// If the record holds padded data or an alert, or if the library cannot open into guest
    /// memory, the result is [`Landed::InRecord`]. The content then stays in `record`, after the
    /// header, as after [`OpenHalf::open`]. The pages hold undefined bytes, and the caller must
    /// still fill them.
    ///
    /// # Errors
    /// [`OpenError`]. The content of the pages is then undefined and must be overwritten or never
    /// used.
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
        self.within_limit()?;
        let (header, body) = Self::checked(record)?;
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
        // Copy the plaintext over the ciphertext, which is no longer needed.
        let (inner, _) = body.split_at_mut(body.len() - TAG_BYTES);
        let mut at = 0;
        for page in pages {
            at += page.copy_to(&mut inner[at..]);
        }
        if let Some(end) = inner.last_mut() {
            *end = last;
        }
        let opened = self.classify(inner).and_then(Content::of_lane);
        opened.map(Landed::InRecord)
    }

    /// Checks that the peer has not exceeded its key's record limit.
    fn within_limit(&self) -> Result<(), OpenError> {
        if self.sequence >= RECORD_LIMIT + ALERT_ROOM {
            return Err(OpenError::Limit);
        }
        Ok(())
    }

    /// Checks the length of a record and splits the record into header and body.
    fn checked(record: &mut [u8]) -> Result<([u8; HEADER_BYTES], &mut [u8]), OpenError> {
        let bytes = record.len();
        let Some((header, body)) = record.split_first_chunk_mut::<HEADER_BYTES>() else {
            return Err(OpenError::Length { bytes });
        };
        if bytes != Self::record_bytes(*header)? {
            return Err(OpenError::Length { bytes: body.len() });
        }
        Ok((*header, body))
    }

    /// Like [`OpenHalf::open`], for a peer that may send TLS messages after the handshake. The
    /// caller must not open more records after an error or a close.
    pub(super) fn open_next(&mut self, record: &mut [u8]) -> Result<Content, OpenError> {
        self.within_limit()?;
        let (header, body) = Self::checked(record)?;
        let inner_bytes = self
            .key
            .open(nonce(&self.iv, self.sequence), header, body)
            .ok_or(OpenError::Authentication)?
            .len();
        self.sequence += 1;
        self.classify(&body[..inner_bytes])
    }

    /// Interprets the plaintext of a record, content type included.
    fn classify(&mut self, inner: &[u8]) -> Result<Content, OpenError> {
        match without_padding(inner)? {
            (APPLICATION_DATA, _) if self.sequence > RECORD_LIMIT => Err(OpenError::Limit),
            (APPLICATION_DATA, content) => {
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
            (content_type, content) => Content::of_control(content_type, content),
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

/// Splits the plaintext of a record into the content's type and the content. The type is the last
/// byte that is not padding (RFC 8446, section 5.4).
fn without_padding(inner: &[u8]) -> Result<(u8, &[u8]), OpenError> {
    if inner.len() > CONTENT_BYTES + 1 {
        return Err(OpenError::Length { bytes: inner.len() });
    }
    let end = inner.iter().rposition(|&byte| byte != 0);
    let end = end.ok_or(OpenError::NoContentType)?;
    Ok((inner[end], &inner[..end]))
}

/// The header of a data or alert record. The caller has checked `body_bytes`.
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
