//! The thread of a session: performs the actions of the exchange.

use dunlin_proto::text::{chain, harmless};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender as Channel, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::xfrm::{self};
use dunlin_proto::fault::FaultCode;
use dunlin_proto::ipsec::exchange::Action;
use dunlin_proto::ipsec::message::Message;
use dunlin_proto::ipsec::object::{Direction, Object};
use dunlin_proto::ipsec::plan::Step;
use dunlin_proto::ipsec::{LEAST_SPI, Mode, Sender, Slot};
use dunlin_proto::limits::MAX_SAS;

use super::reader::read;
use super::shared::Command;
use super::state::{Driver, Late, Ports, Sending};
use super::system::{guarded, random};
use crate::error::IpsecError;
use crate::event::Event;
use crate::sock_diag::TcpConnection;
use crate::sockets::connections;
use crate::tables::still_used;
use dunlin_lane::sync::lock;

/// The interval at which connections are listed, and at which an ending session checks whether
/// its ports are still in use.
const TICK: Duration = Duration::from_millis(200);
/// The interval at which installed policies and SAs are verified.
const LOOK: Duration = Duration::from_secs(1);
/// How long an old outbound SA stays installed after a rekey has switched the policies to new SAs.
/// The kernel may have selected the old SA for packets just before the switch. The peer can open
/// these packets, because it keeps its inbound SA for longer ([`GRACE`]).
const LINGER: Duration = Duration::from_secs(1);
/// How long an inbound SA stays after the peer has stopped using it, for packets that are still on
/// their way.
const GRACE: Duration = Duration::from_secs(2);
/// How long to read the peer's final messages after a send error.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);
/// The maximum number of SAs that stay for [`GRACE`] or [`LINGER`]. If a peer creates and
/// releases more, the oldest are removed early.
const MOST_LATE: usize = 2 * MAX_SAS as usize;

impl Driver {
    pub(super) fn run(
        mut self,
        commands: &Receiver<Command>,
        reader_commands: Channel<Command>,
    ) -> Result<(), IpsecError> {
        let control = Arc::clone(&self.control);
        let (dealt, next) = channel();
        let reader = thread::Builder::new()
            .name("dunlin-ipsec-control".to_owned())
            .spawn(move || read(&control, &reader_commands, &next));
        let why = match &reader {
            Ok(_) => self.serve(commands, &dealt),
            Err(source) => IpsecError::resources("a thread")(source.kind().into()),
        };
        self.exchange.end(why.code(), &chain(&why));
        // This call sends the reason to the peer, unless the exchange has already ended. Ignore the
        // result, which repeats the reason.
        let _ = self.settle();
        // This unblocks the reader.
        drop(dealt);
        // This tells the peer that no more messages follow. It fails if the peer has already closed
        // the connection.
        let _ = self.control.close();
        self.control.shutdown();
        if let Ok(reader) = reader {
            let _ = reader.join();
        }
        self.remove_installed(commands, is_asked_for(&why))?;
        match why {
            IpsecError::Ended => Ok(()),
            error => Err(error),
        }
    }

    /// Performs the exchange until the session has ended. Returns the reason.
    fn serve(&mut self, commands: &Receiver<Command>, dealt: &Channel<()>) -> IpsecError {
        let mut step = || {
            self.settle()?;
            match commands.recv_timeout(TICK) {
                Ok(Command::Received(message)) => {
                    self.exchange.handle_message(message);
                    self.settle()?;
                    let _ = dealt.send(());
                }
                Ok(Command::Lost(error)) => return Err(error),
                Ok(Command::Want(sender)) => self.exchange.want(sender),
                Ok(Command::Rekey) => self.rekey(),
                Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => {
                    return Err(IpsecError::Ended);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.settle()?;
            self.look_around()
        };
        loop {
            if let Err(why) = step() {
                return why;
            }
        }
    }

    /// Performs all pending actions.
    ///
    /// # Errors
    /// The reason why the session has ended.
    fn settle(&mut self) -> Result<(), IpsecError> {
        let mut result = Ok(());
        while result.is_ok()
            && let Some(action) = self.exchange.poll_action()
        {
            result = self.act(action);
        }
        let (outbound, inbound) = (self.exchange.outbound(), self.exchange.inbound());
        let mut shared = lock(&self.shared);
        shared.outbound = (outbound.0, outbound.1.to_vec());
        shared.inbound = (inbound.0, inbound.1.to_vec());
        if let Ports::Blocked(blocked) = &self.ports {
            shared.parameters = Some(blocked.parameters);
        }
        result
    }

    fn act(&mut self, action: Action) -> Result<(), IpsecError> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::Begin(terms) => {
                self.begin(&terms)?;
                self.exchange.begun();
                Ok(())
            }
            Action::InstallInbound { epoch, slots } => {
                let spis = self.install_inbound(epoch, &slots)?;
                self.exchange.inbound_installed(&spis);
                Ok(())
            }
            Action::InstallOutbound {
                epoch,
                grants,
                first,
                known,
            } => {
                if first {
                    // Epochs alternate between two sets of request ids. SAs from two epochs ago
                    // therefore have the same request ids as this epoch. Remove these SAs now,
                    // because they would match the policies of this epoch.
                    let lingering = lingering(&mut self.blocked()?.late);
                    self.apply(&lingering)?;
                }
                let steps = self.parameters()?.outbound(epoch, &grants, first, &known);
                self.apply(&steps)?;
                self.exchange.outbound_installed();
                Ok(())
            }
            Action::RetireOutbound {
                epoch,
                grants,
                over,
            } => {
                let steps = self.parameters()?.retire(epoch, &grants, over);
                if over {
                    return self.apply(&steps);
                }
                self.delay(LINGER, steps)
            }
            Action::RetireInbound { epoch, grants } => {
                let steps = self.parameters()?.retire_inbound(epoch, &grants);
                self.delay(GRACE, steps)
            }
            Action::Up => {
                lock(&self.shared).up = true;
                let parameters = self.parameters()?;
                self.tell(Event::Up(parameters));
                let _ = self.tell_up.send(());
                Ok(())
            }
            Action::Over(ending) if ending.by_peer => Err(IpsecError::EndedByPeer {
                fault: ending.fault,
                text: harmless(&ending.text),
            }),
            Action::Over(ending) => Err(IpsecError::Refused {
                fault: ending.fault,
                text: ending.text,
            }),
        }
    }

    /// Schedules steps for later.
    fn delay(&mut self, by: Duration, steps: Vec<Step>) -> Result<(), IpsecError> {
        let when = Instant::now() + by;
        let late = &mut self.blocked()?.late;
        let at = late.partition_point(|(other, _)| *other <= when);
        late.insert(at, (when, steps));
        Ok(())
    }

    /// Installs SAs for the packets that the peer sends, each under a free SPI.
    fn install_inbound(&mut self, epoch: u32, slots: &[Slot]) -> Result<Vec<u32>, IpsecError> {
        let parameters = self.parameters()?;
        let spi = || Ok::<_, IpsecError>(u32::from_le_bytes(random()?).max(LEAST_SPI));
        let grants = slots.iter().map(|slot| Ok(slot.granted(spi()?)));
        let mut grants = grants.collect::<Result<Vec<_>, IpsecError>>()?;
        // Record all SAs in one call, because each call waits for the disk.
        let coming = parameters.inbound(epoch, &grants);
        let coming = coming.iter().filter_map(Step::added).copied();
        let record = &mut self.blocked()?.record;
        record.add(&coming.collect::<Vec<_>>())?;
        for grant in &mut grants {
            // Another SA may already have the SPI: the chance is one in 2^32 for each existing SA.
            for attempt in 0.. {
                match self.apply(&parameters.inbound(epoch, &[*grant])) {
                    Ok(()) => break,
                    Err(IpsecError::Kernel {
                        source: xfrm::Error::Taken { .. },
                        ..
                    }) if attempt < 8 => grant.spi = spi()?,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(grants.iter().map(|grant| grant.spi).collect())
    }

    /// Handles what depends on time: timeouts, checks of the installed policies and SAs, delayed
    /// steps, rekeys, and new and closed connections.
    fn look_around(&mut self) -> Result<(), IpsecError> {
        let now = Instant::now();
        if let Sending::Failed(error, since) = &mut self.sending
            && now.duration_since(*since) >= DRAIN_LIMIT
        {
            return Err(std::mem::replace(error, IpsecError::Ended));
        }
        self.waits_since = match (self.exchange.waits_for(), self.waits_since) {
            (None, _) => None,
            (Some(what), Some((before, since))) if what == before => Some((before, since)),
            (Some(what), _) => Some((what, now)),
        };
        if let Some((what, since)) = self.waits_since
            && now.duration_since(since) >= self.options.timeout
        {
            return Err(IpsecError::Silent(what.word));
        }
        if let Ports::Blocked(blocked) = &mut self.ports {
            if now.duration_since(blocked.verified) >= LOOK {
                self.tables.verify_installed(&blocked.record)?;
                // Ignore other errors, such as a temporary lack of a route: without a route, no
                // packet leaves.
                if let Err(error @ IpsecError::Unguarded { .. }) = guarded(self.control.socket()) {
                    return Err(error);
                }
                blocked.verified = now;
            }
            let due = due(&mut blocked.late, now, MOST_LATE);
            if !due.is_empty() {
                self.apply(&due)?;
            }
        }
        if self
            .options
            .rekey_after
            .is_some_and(|after| self.rekeyed.elapsed() >= after)
        {
            self.rekey();
        }
        if lock(&self.shared).up && self.parameters()?.mode == Mode::Connection {
            self.follow_connections()?;
        }
        Ok(())
    }

    /// Requests an SA for each new connection on the ports and releases the SA of each connection
    /// that has ended.
    fn follow_connections(&mut self) -> Result<(), IpsecError> {
        let parameters = self.parameters()?;
        let ours = |one: &TcpConnection| {
            one.local.ip() == parameters.local
                && one.peer.ip() == parameters.peer
                && parameters.covers(one.local.port(), one.peer.port())
        };
        let sender = |one: &TcpConnection| Sender::Connection {
            from: one.local.port(),
            to: one.peer.port(),
        };
        let mut all = connections()?;
        all.retain(ours);
        let open: BTreeSet<Sender> = all.iter().map(sender).collect();
        let Ports::Blocked(blocked) = &mut self.ports else {
            return Ok(());
        };
        for gone in blocked.known.extract_if(.., |one| !open.contains(one)) {
            self.exchange.release(gone);
        }
        let established = all.iter().filter(|one| one.is_established());
        for sender in established.map(sender) {
            if blocked.known.insert(sender) {
                self.exchange.want(sender);
            }
        }
        Ok(())
    }

    fn rekey(&mut self) {
        self.rekeyed = Instant::now();
        self.exchange.rekey();
    }

    /// Sends a message. If the send fails, the peer may have ended the session, and its final
    /// message may still be unread. A send error therefore does not end the session immediately:
    /// the peer's final message takes precedence over the loss of the connection.
    fn send(&mut self, message: &Message) -> Result<(), IpsecError> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes)?;
        if let Sending::Works = self.sending
            && let Err(error) = self.control.send(&bytes)
        {
            self.sending = Sending::Failed(error.into(), Instant::now());
        }
        Ok(())
    }

    /// Removes the session's policies and SAs. Waits for at most `quiet_wait` until no connection
    /// uses the ports. If connections use them for longer, the ports stay blocked until a later
    /// process frees them. If neither side requested the end and the ports were protected, this
    /// function does not wait, and the ports stay blocked. If it freed them in that case, an
    /// attacker could open them by interrupting the connection or by making a peer send garbage.
    fn remove_installed(
        mut self,
        commands: &Receiver<Command>,
        asked: bool,
    ) -> Result<(), IpsecError> {
        lock(&self.shared).up = false;
        let Ports::Blocked(blocked) = std::mem::replace(&mut self.ports, Ports::Free) else {
            return Ok(());
        };
        let mut record = blocked.record;
        if asked {
            // If this process dies before it frees the ports, the line `ended` lets a later process
            // free them. Ignore an error, for example on a full disk. It only means that the ports
            // stay blocked if this process dies.
            let _ = record.end();
        }
        let undo = self.tables.remove_recorded(&mut record)?;
        let is_left = !asked && record.has_protected();
        let began = Instant::now();
        let mut reported = false;
        while is_left || !self.tables.finish(&undo.when_quiet, &mut record)? {
            let connections = still_used(&undo.when_quiet)?;
            if !reported && !is_left {
                self.tell(Event::StillUsed { connections });
                reported = true;
            }
            if is_left || began.elapsed() >= self.options.quiet_wait {
                let record = record.path().to_owned();
                self.tell(Event::Left {
                    record,
                    connections,
                });
                return Ok(());
            }
            // Commands are ignored from here on.
            let _ = commands.recv_timeout(TICK);
        }
        record.forget()
    }
}

/// Whether the owner of either side requested the end.
fn is_asked_for(why: &IpsecError) -> bool {
    matches!(
        why,
        IpsecError::Ended
            | IpsecError::EndedByPeer {
                fault: FaultCode::Cancelled,
                ..
            }
    )
}

/// Removes from `late` all steps for outbound SAs, due or not, and returns them.
fn lingering(late: &mut Late) -> Vec<Step> {
    let outbound = |step: &Step| matches!(step, Step::Remove(Object::Association(one)) if one.direction == Direction::Out);
    let now = late.extract_if(.., |(_, steps)| steps.iter().any(outbound));
    now.flat_map(|(_, steps)| steps).collect()
}

/// Removes from `late` the steps that are due, and returns them. If more than `most` steps would
/// remain, it also removes and returns the steps that are due next.
fn due(late: &mut Late, now: Instant, most: usize) -> Vec<Step> {
    let mut left: usize = late.iter().map(|(_, steps)| steps.len()).sum();
    let mut count = 0;
    for (when, steps) in late.iter() {
        if *when > now && left <= most {
            break;
        }
        left -= steps.len();
        count += 1;
    }
    late.drain(..count).flat_map(|(_, steps)| steps).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Claim K4 of docs/security.
    #[test]
    fn an_end_is_asked_for_by_an_owner_and_by_nothing_else() {
        let by_peer = |fault| IpsecError::EndedByPeer {
            fault,
            text: String::new(),
        };
        for asked in [IpsecError::Ended, by_peer(FaultCode::Cancelled)] {
            assert!(is_asked_for(&asked));
        }
        let lost = dunlin_lane::control::ControlError::Deadline;
        for other in [
            by_peer(FaultCode::Malformed),
            IpsecError::Control(lost),
            IpsecError::Silent("granted"),
            IpsecError::Refused {
                fault: FaultCode::Malformed,
                text: String::new(),
            },
        ] {
            assert!(!is_asked_for(&other), "{other}");
        }
    }

    #[test]
    fn lingering_outbound_sas_are_removed_before_their_request_ids_are_reused() {
        let now = Instant::now();
        let step = |way: &str, spi: u32| {
            let line = format!(
                "sa {way} 192.0.2.2 192.0.2.1 spi {spi:#010x} reqid 65536 epoch 1 index 0 fallback"
            );
            Step::Remove(line.parse().unwrap())
        };
        let mut late: Late = vec![
            (now, vec![step("in", 0x1000)]),
            (now, vec![step("out", 0x2000), step("out", 0x2001)]),
            (now, vec![step("in", 0x3000)]),
        ];
        let gone = [step("out", 0x2000), step("out", 0x2001)];
        assert_eq!(lingering(&mut late), gone);
        assert_eq!(lingering(&mut late), []);
        assert_eq!(late.len(), 2);
    }

    #[test]
    fn the_oldest_of_too_many_released_sas_are_removed_at_once() {
        let now = Instant::now();
        let step = |spi: u32| {
            let line = format!(
                "sa in 192.0.2.2 192.0.2.1 spi {spi:#010x} reqid 65536 epoch 1 index 0 fallback"
            );
            Step::Remove(line.parse().unwrap())
        };
        let mut late: Late = (0..5)
            .map(|at| (now + GRACE, vec![step(0x2000 + at), step(0x3000 + at)]))
            .collect();
        late.insert(0, (now, vec![step(0x1000)]));
        assert_eq!(due(&mut late, now, 10), [step(0x1000)]);
        assert_eq!(due(&mut late, now, 10), []);
        let oldest = due(&mut late, now, 7);
        assert_eq!(oldest, [0x2000, 0x3000, 0x2001, 0x3001].map(step));
        assert_eq!(due(&mut late, now + GRACE, 7).len(), 6);
        assert!(late.is_empty());
    }
}
