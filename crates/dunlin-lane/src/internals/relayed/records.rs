//! A relay's connection with TLS 1.3 in this process. The records are those of
//! [`record`](crate::internals::record), as on a lane, so aws-lc-rs seals and opens without a copy.
//! [`messages`](super::messages) interprets the records that are not data.
//!
//! The directions share only what [`messages`](super::messages) shares, so one thread can seal
//! while another opens.

use std::mem::replace;
use std::sync::Mutex;

use dunlin_linux::ktls::Version;
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets};

use super::RelayError;
use super::messages::{self, Control, Opening, Sealing, Verdict, not_renewed};
use crate::internals::handshake::{Renewal, halves};
use crate::internals::provider::{Provider, ProviderError, parts};
use crate::internals::record::{
    APPLICATION_DATA, CONTENT_BYTES, HEADER_BYTES, OVERHEAD_BYTES, OpenError, OpenHalf, SealHalf,
    TAG_BYTES,
};
use crate::internals::sync::lock;

/// The result of `Session::open`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// The number of input bytes consumed: complete records.
    pub taken: usize,
    /// The number of bytes of content.
    pub content: usize,
    /// Whether the peer has closed its direction. The close is authenticated.
    pub is_over: bool,
}

/// Both directions of a connection.
pub(super) struct Halves {
    sealer: Mutex<Sealer>,
    opener: Mutex<Opener>,
}

struct Sealer {
    records: SealHalf,
    messages: Sealing,
    provider: Provider,
    /// Whether this side has closed its direction, or a record could not be sealed. Each call sets
    /// it and clears it on success, so an error leaves it set.
    is_over: bool,
}

struct Opener {
    records: OpenHalf,
    messages: Opening,
    provider: Provider,
    /// Whether the peer has closed its direction, or a record was invalid. Each call sets it and
    /// clears it on success, so an error leaves it set.
    is_over: bool,
}

impl Halves {
    pub(super) fn new(
        secrets: ExtractedSecrets,
        next: Box<dyn Renewal>,
        is_client: bool,
        provider: Provider,
    ) -> Result<Self, ProviderError> {
        let version = Version::V1_3;
        let (sealing, opening) = messages::halves(&secrets, version, is_client, true, next);
        let (seal, open) = halves(secrets, provider)?;
        Ok(Self {
            sealer: Mutex::new(Sealer {
                records: seal,
                messages: sealing,
                provider,
                is_over: false,
            }),
            opener: Mutex::new(Opener {
                records: open,
                messages: opening,
                provider,
                is_over: false,
            }),
        })
    }

    pub(super) fn renew_after(&self, records: u64) {
        lock(&self.sealer).messages.renew_after(records);
    }

    /// See `Session::seal`.
    pub(super) fn seal(
        &self,
        content: Option<&[u8]>,
        records: &mut Vec<u8>,
    ) -> Result<usize, RelayError> {
        let mut sealer = lock(&self.sealer);
        if replace(&mut sealer.is_over, true) {
            return Err(OpenError::Spent.into());
        }
        let sealed = sealer.seal(content, records)?;
        sealer.is_over = content.is_none();
        Ok(sealed)
    }

    /// Returns a record with the request for the peer's next key, if it must be sent now; otherwise
    /// no bytes.
    pub(super) fn take_pending(&self) -> Result<Vec<u8>, RelayError> {
        let (mut sealer, mut records) = (lock(&self.sealer), Vec::new());
        if !sealer.is_over && sealer.messages.is_asking() {
            sealer.is_over = true;
            sealer.renew(0, &mut records)?;
            sealer.is_over = false;
        }
        Ok(records)
    }

    /// See `Session::open`. Also returns whether a request for the peer's next key should be sent
    /// now.
    pub(super) fn open(
        &self,
        bytes: &mut [u8],
        content: &mut [u8],
    ) -> Result<(Opened, bool), RelayError> {
        let mut opener = lock(&self.opener);
        if replace(&mut opener.is_over, true) {
            return Err(OpenError::Spent.into());
        }
        let opened = opener.open(bytes, content)?;
        opener.is_over = opened.is_over;
        Ok((opened, opener.messages.is_asking()))
    }
}

impl Sealer {
    fn seal(&mut self, content: Option<&[u8]>, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        let Some(content) = content else {
            let close = self.messages.closes();
            return self.control(&close, records);
        };
        let count = content.len().div_ceil(CONTENT_BYTES);
        let mut filled = self.renew(count as u64, records)?;
        let end = filled + content.len() + count * OVERHEAD_BYTES;
        records.resize(records.len().max(end), 0);
        for part in content.chunks(CONTENT_BYTES) {
            let record = filled..filled + part.len() + OVERHEAD_BYTES;
            filled = record.end;
            let sealed = self.records.seal_from(part, &mut records[record]);
            sealed.map_err(RelayError::Seal)?;
        }
        self.messages.gave(content.len());
        Ok(filled)
    }

    /// Seals a key update if one must be sent before `count` records of data. Returns its length.
    fn renew(&mut self, count: u64, records: &mut Vec<u8>) -> Result<usize, RelayError> {
        let Some(update) = self.messages.renews(count)? else {
            return Ok(0);
        };
        let sealed = self.control(&update, records)?;
        let secrets = self.messages.next_key()?;
        let (suite, key, iv) = parts(&secrets).map_err(not_renewed)?;
        let next = SealHalf::new(self.provider, suite, key, iv, 0);
        self.records = next.map_err(not_renewed)?;
        Ok(sealed)
    }

    /// Seals a record that is not data into the front of `records`. Returns its length.
    fn control(
        &mut self,
        (content_type, content): &Control,
        records: &mut Vec<u8>,
    ) -> Result<usize, RelayError> {
        let bytes = content.len() + OVERHEAD_BYTES;
        records.resize(records.len().max(bytes), 0);
        let record = &mut records[..bytes];
        record[HEADER_BYTES..][..content.len()].copy_from_slice(content);
        let sealed = self.records.seal_as(*content_type, record);
        sealed.map_err(RelayError::Seal)?;
        Ok(bytes)
    }
}

impl Opener {
    fn open(&mut self, bytes: &mut [u8], content: &mut [u8]) -> Result<Opened, RelayError> {
        let mut opened = Opened::default();
        while let Some(&header) = bytes[opened.taken..].first_chunk::<HEADER_BYTES>() {
            let end = opened.taken + OpenHalf::record_bytes(header)?;
            let Some(record) = bytes.get_mut(opened.taken..end) else {
                break;
            };
            let inner = record.len() - HEADER_BYTES - TAG_BYTES;
            let inner = (content[opened.content..].get_mut(..inner))
                .ok_or(OpenError::Length { bytes: inner })?;
            let (content_type, length) = self.records.open_any_into(record, inner)?;
            opened.taken = end;
            if content_type == APPLICATION_DATA {
                match length {
                    0 => self.messages.was_empty()?,
                    _ => self.messages.came(length)?,
                }
                opened.content += length;
                continue;
            }
            match self.messages.interpret(content_type, &inner[..length])? {
                Verdict::Nothing => {}
                Verdict::Closed => {
                    opened.is_over = true;
                    break;
                }
                Verdict::Renewed => {
                    let secrets = self.messages.next_key()?;
                    self.replace_key(&secrets)?;
                }
            }
        }
        Ok(opened)
    }

    fn replace_key(&mut self, secrets: &ConnectionTrafficSecrets) -> Result<(), RelayError> {
        let (suite, key, iv) = parts(secrets).map_err(not_renewed)?;
        let next = OpenHalf::new(self.provider, suite, key, iv, 0);
        self.records = next.map_err(not_renewed)?;
        Ok(())
    }
}
