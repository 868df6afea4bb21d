//! Fuzz entries for IPsec: the decoder, and one side of a session with a peer that sends
//! anything.

use super::{Choices, as_is_and_with_its_length};
use crate::fault::FaultCode;
use crate::ipsec::exchange::{Action, Exchange};
use crate::ipsec::message::{Header, MESSAGE_HEADER_BYTES, Message, Terms};
use crate::ipsec::ports::PortRange;
use crate::ipsec::{LEAST_SPI, Mode, Sender, Slot};
use crate::limits::{MAX_IPSEC_BODY_BYTES, MAX_SAS, MAX_SLOTS, MAX_TEXT_BYTES};

/// Decodes the bytes as a message of a keying session twice: as given, and after correcting the
/// length in the header.
pub fn fuzz_ipsec_message(bytes: &[u8]) {
    as_is_and_with_its_length(bytes, MESSAGE_HEADER_BYTES, message);
}

fn message(bytes: &[u8]) {
    let Some((header, body)) = bytes.split_first_chunk::<MESSAGE_HEADER_BYTES>() else {
        return;
    };
    let Ok(header) = Header::decode(header) else {
        return;
    };
    assert!(header.body_bytes() <= MAX_IPSEC_BODY_BYTES);
    let Ok(Some(message)) = Message::decode(&header, body) else {
        return;
    };
    assert_eq!(body.len(), header.body_bytes());
    match &message {
        Message::Terms(terms) => {
            assert!((1..=MAX_SAS).contains(&terms.sas_max));
            assert_eq!(terms.own.is_ipv4(), terms.other.is_ipv4());
        }
        Message::Want { slots, .. } => assert!(slots.len() <= MAX_SLOTS),
        Message::Granted { spis, .. } => {
            assert!(spis.len() <= MAX_SLOTS);
            assert!(spis.iter().all(|(_, spi)| *spi >= LEAST_SPI));
        }
        Message::Release { indices } => assert!(indices.len() <= MAX_SLOTS),
        Message::End { text, .. } => assert!(text.len() <= MAX_TEXT_BYTES),
        Message::Ready | Message::Retire { .. } => {}
    }
    let mut encoded = Vec::new();
    message
        .encode(&mut encoded)
        .expect("what decodes is within every limit");
    let (again, body) = encoded
        .split_first_chunk::<MESSAGE_HEADER_BYTES>()
        .expect("a message starts with its header");
    let again = Header::decode(again).expect("the header was encoded here");
    assert_eq!(Message::decode(&again, body), Ok(Some(message)));
}

const SAS: u16 = 4;

/// Runs one side with a peer that sends anything and a caller that requests anything at any time.
/// Checks that nothing panics, that the state stays within its bounds, that no SA is installed
/// twice or removed without being installed, and that nothing is sent after the end (I7, I8).
pub fn fuzz_ipsec_session(bytes: &[u8]) {
    let mut choices = Choices::new(bytes);
    let mode = match choices.byte() % 2 {
        0 => Mode::Cpu,
        _ => Mode::Connection,
    };
    let senders = vec![sender(&mut choices, mode)];
    let exchange = match choices.byte() % 2 {
        0 => Exchange::initiator(terms(mode, &mut choices), senders),
        _ => Exchange::responder(SAS, None, senders),
    };
    let mut rig = Rig {
        exchange,
        inbound: Vec::new(),
        outbound: Vec::new(),
        spi: LEAST_SPI,
        over: false,
    };
    rig.settle();
    while choices.more() {
        rig.step(mode, &mut choices);
        rig.settle();
        // SAs of two epochs may be installed until the caller has removed the retired SAs.
        assert!(rig.inbound.len() <= 2 * usize::from(SAS));
        assert!(rig.outbound.len() <= usize::from(MAX_SAS));
        if rig.over {
            assert_eq!(rig.exchange.waits_for(), None);
        }
    }
}

fn terms(mode: Mode, choices: &mut Choices<'_>) -> Terms {
    let near = |number: u8| [192, 0, 2, number].into();
    Terms {
        mode,
        ports: PortRange::new(4444, 4444 + u16::from(choices.byte() % 2))
            .expect("the ports are in order"),
        own: near(1 + choices.byte() % 2),
        other: near(1 + choices.byte() % 2),
        sas_max: SAS,
        udp: None,
    }
}

fn sender(choices: &mut Choices<'_>, mode: Mode) -> Sender {
    let number = choices.below(6) as u16;
    match choices.byte() % 8 {
        0 => Sender::Fallback,
        1 => Sender::Connection {
            from: 1 + number,
            to: 9,
        },
        _ if mode == Mode::Cpu => Sender::Cpu(u32::from(number)),
        _ => Sender::Connection {
            from: 50_000 + number,
            to: 4444,
        },
    }
}

struct Rig {
    exchange: Exchange,
    /// Index and epoch of each installed inbound SA.
    inbound: Vec<(u32, u32)>,
    outbound: Vec<(u32, u32)>,
    spi: u32,
    over: bool,
}

impl Rig {
    fn step(&mut self, mode: Mode, choices: &mut Choices<'_>) {
        match choices.byte() % 16 {
            0 => self.exchange.want(sender(choices, mode)),
            1 => self.exchange.release(sender(choices, mode)),
            2 => self.exchange.rekey(),
            3 if choices.byte() == 0 => self.exchange.end(FaultCode::Cancelled, "enough"),
            _ => {
                let message = self.message(mode, choices);
                self.exchange.handle_message(message);
            }
        }
    }

    /// Returns a message that is valid in most cases.
    fn message(&self, mode: Mode, choices: &mut Choices<'_>) -> Message {
        let (epoch, _) = self.exchange.inbound();
        let near = u32::from(choices.byte() % 4);
        match choices.byte() % 8 {
            0 => Message::Terms(terms(mode, choices)),
            1 => Message::Ready,
            2 => Message::Retire {
                epoch: epoch.wrapping_sub(near % 2),
            },
            3 => Message::Release {
                indices: vec![near, near + choices.below(2) as u32],
            },
            4 => Message::Granted {
                epoch: self.exchange.outbound().0.wrapping_add(near % 2),
                spis: (0..near)
                    .map(|at| (at + choices.below(8) as u32, LEAST_SPI + at))
                    .collect(),
            },
            _ => {
                let begin = choices.byte().is_multiple_of(2);
                let last = self.exchange.inbound().1.last();
                let index = last.map_or(0, |grant| grant.slot.index + 1);
                let first = if begin {
                    Sender::Fallback
                } else {
                    sender(choices, mode)
                };
                let mut slots = vec![Slot {
                    index,
                    sender: first,
                }];
                for at in 1..=near {
                    slots.push(Slot {
                        index: index + at,
                        sender: sender(choices, mode),
                    });
                }
                let epoch = epoch.wrapping_add(u32::from(begin));
                Message::Want { epoch, slots }
            }
        }
    }

    /// Performs all actions, as a caller does.
    fn settle(&mut self) {
        while let Some(action) = self.exchange.poll_action() {
            assert!(!self.over, "{action:?} after the end");
            match action {
                Action::Send(message) => {
                    let mut bytes = Vec::new();
                    message.encode(&mut bytes).expect("a sent message is valid");
                }
                Action::Begin(_) => self.exchange.begun(),
                Action::InstallInbound { epoch, slots } => {
                    let mut spis = Vec::new();
                    for slot in slots {
                        let key = (slot.index, epoch);
                        assert!(!self.inbound.contains(&key), "{slot:?} is installed twice");
                        self.inbound.push(key);
                        self.spi += 1;
                        spis.push(self.spi);
                    }
                    self.exchange.inbound_installed(&spis);
                }
                Action::InstallOutbound { epoch, grants, .. } => {
                    for grant in grants {
                        let key = (grant.slot.index, epoch);
                        assert!(
                            !self.outbound.contains(&key),
                            "{grant:?} is installed twice"
                        );
                        self.outbound.push(key);
                    }
                    self.exchange.outbound_installed();
                }
                Action::RetireOutbound { epoch, grants, .. } => {
                    for grant in grants {
                        remove(&mut self.outbound, (grant.slot.index, epoch));
                    }
                }
                Action::RetireInbound { epoch, grants } => {
                    for grant in grants {
                        remove(&mut self.inbound, (grant.slot.index, epoch));
                    }
                }
                Action::Up => {}
                Action::Over(_) => self.over = true,
            }
        }
    }
}

fn remove(installed: &mut Vec<(u32, u32)>, key: (u32, u32)) {
    let at = installed.iter().position(|one| *one == key);
    installed.swap_remove(at.expect("the SA was installed"));
}
