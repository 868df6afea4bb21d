//! A relay's records in the kernel: data goes between sockets, and what is left to do are the
//! records that are no data, and counting.

use crate::sync::lock;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::Ordering;

use dunlin_linux::ktls::{Direction, Version};
use rustls::ExtractedSecrets;

use super::{Held, KEY_UPDATE, Open, Opening, RelayError, Seal, Sealing, assemble, not_renewed};
use crate::handshake::Renewal;
use crate::kernel;
use crate::provider::Provider;
use crate::record::{ALERT, CONTENT_BYTES, Content, EMPTY_RUN_LIMIT, HANDSHAKE, OpenError, Opened};

/// A record that is no data, as `ktls::send_record` takes it.
pub type Control = (u8, Vec<u8>);

/// Records that go with one call, at most: one for each piece that a pipe holds.
const CALL_RECORDS: u64 = 16;

/// One direction of which the kernel has the key.
pub(super) struct InKernel {
    is_1_3: bool,
    /// The kernel can change the key.
    renews: bool,
    /// Records that the key has sealed or opened.
    records: u64,
}

impl InKernel {
    /// One whose key has just been renewed.
    pub(super) fn fresh() -> Self {
        Self {
            is_1_3: true,
            renews: true,
            records: 0,
        }
    }

    /// Counts data that went in one call, which ends a record. A read is of one alone.
    fn count(&mut self, bytes: usize) {
        self.records += bytes.div_ceil(CONTENT_BYTES) as u64;
    }
}

/// Both halves of a connection whose keys the kernel has, and can change if it `renews` them.
pub fn halves_in_kernel(
    secrets: &ExtractedSecrets,
    version: Version,
    renews: bool,
    provider: Provider,
    next: Box<dyn Renewal>,
) -> (Sealing, Opening) {
    let of = |records| InKernel {
        is_1_3: version == Version::V1_3,
        renews,
        records,
    };
    let (seal, open) = (of(secrets.tx.0), of(secrets.rx.0));
    assemble(Seal::Kernel(seal), Open::Kernel(open), provider, next)
}

impl Sealing {
    /// Whether the kernel seals: then nothing is to be sealed here.
    pub fn is_in_kernel(&self) -> bool {
        matches!(self.seal, Seal::Kernel(_))
    }

    /// So many bytes were given to the kernel in one call.
    pub fn gave(&mut self, bytes: usize) {
        if let Seal::Kernel(seal) = &mut self.seal {
            seal.count(bytes);
        }
    }

    /// A key update that must be sent before more data, if there is one; when it was,
    /// [`Sealing::has_renewed`] is to be called.
    ///
    /// # Errors
    /// [`RelayError::Worn`] where TLS 1.2 has no such thing.
    pub fn renews(&self) -> Result<Option<Control>, RelayError> {
        let Seal::Kernel(seal) = &self.seal else {
            return Ok(None);
        };
        let keys = &self.keys;
        let is_worn = seal.records + CALL_RECORDS > keys.limit.load(Ordering::Relaxed);
        if !seal.is_1_3 {
            return if is_worn {
                Err(RelayError::Worn)
            } else {
                Ok(None)
            };
        }
        let asked = keys.asked.swap(false, Ordering::SeqCst);
        let asking = keys.asking.swap(false, Ordering::SeqCst);
        if !(is_worn || asked || asking) {
            return Ok(None);
        }
        if !seal.renews {
            return Err(not_renewed(kernel::CANNOT_RENEW));
        }
        let mut update = KEY_UPDATE.to_vec();
        update.push(u8::from(asking));
        Ok(Some((HANDSHAKE, update)))
    }

    /// Has the kernel seal with the next key.
    ///
    /// # Errors
    /// [`RelayError::Renewal`]; nothing may be sent any more then.
    pub fn has_renewed(&mut self, stream: &TcpStream) -> Result<(), RelayError> {
        let mut next = lock(&self.keys.next);
        let secrets = next.sending().map_err(not_renewed)?;
        drop(next);
        kernel::renew(stream, Direction::Sending, &secrets).map_err(not_renewed)?;
        self.seal = Seal::Kernel(InKernel::fresh());
        Ok(())
    }

    /// The alert that ends this direction.
    pub fn closes(&mut self) -> Control {
        self.is_closed = true;
        // Level warning, description close_notify.
        (ALERT, vec![1, 0])
    }
}

impl Opening {
    /// So many bytes of data came from the kernel in one call.
    ///
    /// # Errors
    /// [`RelayError`]; they are not to be used then.
    pub fn came(&mut self, bytes: usize) -> Result<(), RelayError> {
        if let Some(&kind) = self.message.first() {
            return Err(RelayError::Late(kind));
        }
        self.late_run = 0;
        self.empty_run = 0;
        let Open::Kernel(open) = &mut self.open else {
            return Ok(());
        };
        open.count(bytes);
        let limit = self.keys.limit.load(Ordering::Relaxed);
        if open.renews && open.records >= limit / 2 && !self.asked {
            self.asked = true;
            self.keys.asking.store(true, Ordering::SeqCst);
        }
        Ok(())
    }

    /// A record without content came.
    ///
    /// # Errors
    /// [`RelayError`], for too many of them.
    pub fn was_empty(&mut self) -> Result<(), RelayError> {
        self.empty_run += 1;
        if self.empty_run > EMPTY_RUN_LIMIT {
            return Err(OpenError::EmptyRun.into());
        }
        Ok(())
    }

    /// What a record says that is no data.
    ///
    /// # Errors
    /// [`RelayError`]; nothing behind it may be looked at then.
    pub fn control(
        &mut self,
        content_type: u8,
        content: &[u8],
        stream: &TcpStream,
    ) -> Result<Held, RelayError> {
        let is_1_3 = matches!(&self.open, Open::Kernel(open) if open.is_1_3);
        if !is_1_3 {
            return self.older(content_type, content, 0..content.len());
        }
        match Content::of_control(content_type, content)? {
            Content::Usual(Opened::Closed) => Ok(Held::Closed),
            Content::Usual(Opened::Data(_)) => Err(OpenError::ContentType { content_type }.into()),
            Content::Canceled => self.count_late().map(|()| Held::Nothing),
            Content::Late(..) => {
                self.late(content, Some(stream))?;
                Ok(Held::Nothing)
            }
        }
    }

    /// What a failed read means, if it is about a record.
    pub fn failed(error: &io::Error) -> Option<RelayError> {
        OpenError::of_kernel(error).map(RelayError::Open)
    }
}
