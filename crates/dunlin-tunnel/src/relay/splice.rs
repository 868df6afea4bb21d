//! A channel of a relay. The kernel seals and opens its records. The bytes go from socket to
//! socket by splice(2). Only control records enter this process.

use std::io;
use std::time::Instant;

use dunlin_linux::ktls;
use dunlin_linux::socket::wait_writable;
use dunlin_linux::splice::Conduit;
use dunlin_proto::fault::FaultCode;

use super::channel::{Channel, Kernel, is_early, of_hypervisor, try_lock};
use super::life::Inward;
use crate::failure::{Failure, OrFailure};
use dunlin_lane::record::{CONTENT_BYTES, OpenError};
use dunlin_lane::relayed::RelayError;
use dunlin_lane::relayed::in_kernel::{CALL_RECORDS, Control, Held, Opening, Sealing};
use dunlin_lane::splice::{Readiness, Stop, wait};
use dunlin_lane::sync::lock;

/// The error number of splice(2) if the next record is not a data record (net/tls/tls_sw.c).
const EINVAL: i32 = 22;

impl Channel {
    /// Carries the hypervisor's bytes to the peer.
    pub(super) fn splice_out(&self, kernel: &Kernel) -> Result<(), Failure> {
        let stop = &kernel.outward;
        let mut conduit = conduit()?;
        loop {
            let taken = match conduit.take_at_most(&self.plain, self.limited(usize::MAX)) {
                Ok(0) => return self.end_outward_by_kernel(kernel),
                Ok(count) => count,
                Err(error) if is_early(&error) => {
                    // The next read reports the error.
                    let _ = wait(&self.plain, Readiness::Readable, stop);
                    continue;
                }
                Err(error) => return Err(of_hypervisor(&error)),
            };
            let mut held = lock(&kernel.sealing);
            self.renew_by_kernel(&mut held, stop)?;
            if !self.life().send() {
                return Ok(());
            }
            self.plain.has_read(taken);
            while conduit.held() > 0 {
                let before = conduit.held();
                match conduit.give(&self.tls) {
                    Ok(left) => held.gave(before - left),
                    Err(error) if is_early(&error) => {
                        if !self.is_relaying() {
                            return Ok(());
                        }
                        let _ = wait(&self.tls, Readiness::Writable, stop);
                    }
                    Err(error) => return Err(self.of_io(&error)),
                }
            }
            drop(held);
            self.pace(taken);
            self.renew_by_kernel_unless_sending(kernel, stop)?;
        }
    }

    /// Carries the peer's bytes to the hypervisor.
    pub(super) fn splice_in(&self, kernel: &Kernel) -> Result<(), Failure> {
        let (stop, mut opening) = (&kernel.inward, lock(&kernel.opening));
        let mut conduit = conduit()?;
        loop {
            if !self.is_relaying() {
                return Ok(());
            }
            let is_over = match conduit.take(&self.tls) {
                // splice(2) returns 0 at the end of file, and for an empty record.
                Ok(0) => self.take_record(&mut opening, true)?,
                Ok(count) => {
                    opening.came(count).map_err(|error| self.of_tls(&error))?;
                    self.deliver_by_kernel(&mut conduit, &mut opening, stop)?
                }
                Err(error) if is_early(&error) => {
                    if self.life().is(Inward::Reset) {
                        return Err(self.lost("connection reset"));
                    }
                    // The next read reports the error.
                    let _ = wait(&self.tls, Readiness::Readable, stop);
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(EINVAL) => {
                    self.take_record(&mut opening, false)?
                }
                Err(error) => return Err(self.of_read(&error)),
            };
            if is_over {
                return self.end_inward();
            }
            self.renew_by_kernel_unless_sending(kernel, stop)?;
        }
    }

    fn of_read(&self, error: &io::Error) -> Failure {
        match Opening::failed(error) {
            Some(error) => self.of_tls(&error),
            None => self.of_io(error),
        }
    }

    /// Writes all bytes in the pipe to the hypervisor, however long that takes. Returns true if the
    /// peer's *close_notify* followed those bytes.
    fn deliver_by_kernel(
        &self,
        conduit: &mut Conduit,
        opening: &mut Opening,
        stop: &Stop,
    ) -> Result<bool, Failure> {
        let mut behind = None;
        while conduit.held() > 0 {
            let held = conduit.held();
            match conduit.give(&self.plain) {
                Ok(left) => self.plain.has_written(held - left),
                Err(error) if is_early(&error) => {
                    if !self.is_relaying() {
                        return Ok(false);
                    }
                    if behind.is_some() {
                        self.wait_for_consumer();
                    } else if self.life().is(Inward::Reset) {
                        behind = Some(self.take_rest(opening)?);
                    } else {
                        let _ = wait(&self.plain, Readiness::Writable, stop);
                    }
                }
                Err(error) => return Err(of_hypervisor(&error)),
            }
        }
        let Some(behind) = behind else {
            return Ok(false);
        };
        self.write(&behind, true)?;
        Ok(true)
    }

    /// Reads the bytes that the peer sent before its connection was reset, up to the peer's
    /// *close_notify*. Fails if the *close_notify* did not arrive; otherwise the reset has no
    /// effect. The bytes were in the socket's buffer, which limits their number.
    fn take_rest(&self, opening: &mut Opening) -> Result<Vec<u8>, Failure> {
        let mut rest = Vec::new();
        let mut part = vec![0; CONTENT_BYTES];
        loop {
            let Ok(received) = ktls::receive(&self.tls, &mut part) else {
                return Err(self.lost("connection reset"));
            };
            let bytes = &part[..received.bytes];
            let held = match received.control {
                None if bytes.is_empty() => return Err(self.lost("connection reset")),
                None => opening.came(bytes.len()).map(|()| Held::Nothing),
                Some(content_type) => opening.control(content_type, bytes, &self.tls),
            };
            match held.map_err(|error| self.of_tls(&error))? {
                Held::Closed => return Ok(rest),
                _ if received.control.is_none() => rest.extend_from_slice(bytes),
                _ => {}
            }
        }
    }

    /// Reads the record at which splice(2) stopped. Returns whether it was a *close_notify*.
    /// `may_be_empty` means that splice(2) returned 0: at the end of file or for an empty record.
    fn take_record(&self, opening: &mut Opening, may_be_empty: bool) -> Result<bool, Failure> {
        let mut record = vec![0; CONTENT_BYTES];
        let received = match ktls::receive(&self.tls, &mut record) {
            Ok(received) => received,
            Err(error) if is_early(&error) => {
                let read = match may_be_empty {
                    true => opening.was_empty(),
                    // The bytes are not a record, and the kernel reads no further.
                    false => Err(RelayError::Open(OpenError::NoRecord)),
                };
                return read.map(|()| false).map_err(|error| self.of_tls(&error));
            }
            Err(error) => return Err(self.of_read(&error)),
        };
        match (received.bytes, received.control) {
            (bytes, Some(content_type)) => {
                let held = opening.control(content_type, &record[..bytes], &self.tls);
                Ok(held.map_err(|error| self.of_tls(&error))? == Held::Closed)
            }
            (0, None) => Err(self.lost("closed without close_notify")),
            // The record contains data, although splice(2) did not move it.
            (bytes, None) => {
                opening.came(bytes).map_err(|error| self.of_tls(&error))?;
                self.write(&record[..bytes], false)?;
                Ok(false)
            }
        }
    }

    /// Ends the direction to the peer.
    fn end_outward_by_kernel(&self, kernel: &Kernel) -> Result<(), Failure> {
        let mut sealing = lock(&kernel.sealing);
        let close = sealing.closes();
        self.end_outward(|| self.send_control(&close, &kernel.outward))
    }

    /// Sends a key update if one must be sent before further data.
    fn renew_by_kernel(&self, sealing: &mut Sealing, stop: &Stop) -> Result<(), Failure> {
        let update = sealing.renews(CALL_RECORDS);
        if let Some(update) = update.map_err(|error| self.of_tls(&error))? {
            self.send_control(&update, stop)?;
            let renewed = sealing.has_renewed(&self.tls);
            renewed.map_err(|error| self.of_tls(&error))?;
        }
        Ok(())
    }

    /// Sends a key update if one is due, even if there is no data to send. If the channel's other
    /// thread is sending data now, that thread will send the update.
    fn renew_by_kernel_unless_sending(&self, kernel: &Kernel, stop: &Stop) -> Result<(), Failure> {
        let Some(mut sealing) = try_lock(&kernel.sealing) else {
            return Ok(());
        };
        // Do not wait until the peer reads, because the thread that reads from the peer calls this
        // too. A later call sends the update. If the socket has failed, the next write reports it.
        if sealing.is_asking() && wait_writable(&self.tls, Instant::now()).unwrap_or(false) {
            self.renew_by_kernel(&mut sealing, stop)?;
        }
        Ok(())
    }

    fn send_control(&self, (content_type, content): &Control, stop: &Stop) -> Result<(), Failure> {
        loop {
            match ktls::send_record(&self.tls, *content_type, content) {
                Ok(()) => return Ok(()),
                Err(error) if is_early(&error) => {
                    if !self.is_relaying() {
                        return Ok(());
                    }
                    let _ = wait(&self.tls, Readiness::Writable, stop);
                }
                Err(error) => return Err(self.of_io(&error)),
            }
        }
    }
}

fn conduit() -> Result<Conduit, Failure> {
    Conduit::new().or_failure(FaultCode::Kernel, "cannot create a pipe for a relay")
}
