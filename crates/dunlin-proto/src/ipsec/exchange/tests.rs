#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::HashSet;

use super::*;
use crate::ipsec::LEAST_SPI;
use crate::ipsec::model::{Kernel, Packet, Sent};
use crate::ipsec::object::{Direction, Object};
use crate::ipsec::plan::{REQIDS, SessionParameters, Step};
use crate::ipsec::ports::PortRange;

/// Planted mistakes and the tests that find them.
#[cfg(feature = "mistakes")]
pub(in crate::ipsec) const FOUND_BY: [(Mistake, fn()); 2] = [
    (
        Mistake::SaNumberedAgain,
        new_keys_replace_the_old_ones_in_both_directions,
    ),
    (
        Mistake::RetiredBeforeSwitch,
        nothing_is_sent_with_sas_that_the_peer_may_retire,
    ),
];

fn terms(mode: Mode, sas_max: u16) -> Terms {
    Terms {
        mode,
        ports: PortRange::new(4444, 4447).unwrap(),
        own: [192, 0, 2, 1].into(),
        other: [192, 0, 2, 2].into(),
        sas_max,
        udp: None,
    }
}

/// One side and its kernel.
struct Side {
    exchange: Exchange,
    parameters: SessionParameters,
    kernel: Kernel,
    next_spi: u32,
    up: bool,
    over: Option<Ending>,
    /// All keys ever installed: direction, index, epoch.
    keys: HashSet<(Direction, u32, u32)>,
    /// Delayed removals of inbound SAs.
    late: Vec<Step>,
}

impl Side {
    fn new(exchange: Exchange, terms: &Terms, first_spi: u32) -> Self {
        let parameters = SessionParameters {
            local: terms.own,
            peer: terms.other,
            ports: terms.ports,
            mode: terms.mode,
            first_reqid: REQIDS,
            udp: None,
        };
        Self {
            exchange,
            parameters,
            kernel: Kernel::default(),
            next_spi: first_spi,
            up: false,
            over: None,
            keys: HashSet::new(),
            late: Vec::new(),
        }
    }

    /// Performs one action and appends messages to `sent`; returns false if there is no action.
    fn act(&mut self, sent: &mut VecDeque<Message>) -> bool {
        let Some(action) = self.exchange.poll_action() else {
            return false;
        };
        match action {
            Action::Send(message) => {
                assert!(self.over.is_none());
                sent.push_back(message);
            }
            Action::Begin(_) => {
                self.apply(&self.parameters.begin());
                self.exchange.begun();
            }
            Action::InstallInbound { epoch, slots } => {
                let grants: Vec<Grant> = slots
                    .iter()
                    .map(|slot| {
                        self.next_spi += 1;
                        let spi = self.next_spi;
                        Grant { slot: *slot, spi }
                    })
                    .collect();
                self.apply(&self.parameters.inbound(epoch, &grants));
                let spis: Vec<u32> = grants.iter().map(|grant| grant.spi).collect();
                self.exchange.inbound_installed(&spis);
            }
            Action::InstallOutbound {
                epoch,
                grants,
                first,
                known,
            } => {
                self.apply(&self.parameters.outbound(epoch, &grants, first, &known));
                self.exchange.outbound_installed();
            }
            Action::RetireOutbound {
                epoch,
                grants,
                over,
            } => self.apply(&self.parameters.retire(epoch, &grants, over)),
            Action::RetireInbound { epoch, grants } => {
                let steps = self.parameters.retire_inbound(epoch, &grants);
                self.late.extend(steps);
            }
            Action::Up => self.up = true,
            Action::Over(ending) => self.over = Some(ending),
        }
        true
    }

    fn apply(&mut self, steps: &[Step]) {
        for step in steps {
            self.kernel.apply(step);
            if let Step::Add(Object::Association(one)) = step {
                let key = (one.direction, one.slot.index, one.epoch);
                assert!(self.keys.insert(key), "a key is installed twice: {one}");
            }
        }
    }
}

struct Pair {
    sides: [Side; 2],
    /// Messages that each side has sent and the other has not received.
    sent: [VecDeque<Message>; 2],
}

impl Pair {
    fn new(mode: Mode, senders: [Vec<Sender>; 2], sas_max: u16) -> Self {
        let here = terms(mode, MAX_SAS);
        let there = Terms {
            own: here.other,
            other: here.own,
            ..here
        };
        let [own, peers] = senders;
        let initiator = Exchange::initiator(here, own);
        let responder = Exchange::responder(sas_max, None, peers);
        Self {
            sides: [
                Side::new(initiator, &here, 0x1000),
                Side::new(responder, &there, 0x1000),
            ],
            sent: Default::default(),
        }
    }

    /// Performs one event that is possible now; returns false if there is none.
    fn step(&mut self, which: usize) -> bool {
        for offset in 0..4 {
            let which = (which + offset) % 4;
            let (side, kind) = (which % 2, which / 2);
            let other = 1 - side;
            if kind == 0 && self.sides[side].act(&mut self.sent[side]) {
                return true;
            }
            // A side handles a message only after it has performed all its pending actions.
            if kind == 1
                && self.sides[side].exchange.actions.is_empty()
                && let Some(message) = self.sent[other].pop_front()
            {
                self.sides[side].exchange.handle_message(message);
                return true;
            }
        }
        false
    }

    fn settle(&mut self) {
        while self.step(0) {}
    }

    /// Checks what happens to packets of the ports. A side sends them in the clear only before it
    /// has policies, and drops them only before both sides are up. It seals all other packets with
    /// an SA that the other side opens.
    fn check(&self) {
        let everything_up = self.sides.iter().all(|side| side.up);
        for side in 0..2 {
            let (from, to) = (&self.sides[side], &self.sides[1 - side]);
            for (source, destination) in [(50_000, 4444), (4445, 50_002), (50_004, 4446)] {
                for cpu in 0..5 {
                    let packet = Packet {
                        source: (from.parameters.local, source),
                        destination: (from.parameters.peer, destination),
                    };
                    match from.kernel.send(packet, cpu) {
                        Sent::Clear => assert!(from.kernel.policies.is_empty()),
                        Sent::Dropped => assert!(!everything_up, "CPU {cpu} cannot send"),
                        Sent::Sealed { spi, .. } => {
                            assert!(to.kernel.receives(packet, Some(spi)), "{packet:?}");
                        }
                    }
                }
            }
        }
    }
}

fn cpus(numbers: &[u32]) -> Vec<Sender> {
    numbers.iter().copied().map(Sender::Cpu).collect()
}

fn senders_of(side: &Side) -> Vec<Sender> {
    let (_, grants) = side.exchange.outbound();
    grants.iter().map(|grant| grant.slot.sender).collect()
}

#[test]
fn p14_both_sides_come_up_with_an_sa_for_each_of_their_cpus() {
    let mut pair = Pair::new(Mode::Cpu, [cpus(&[0, 1]), cpus(&[0, 1, 2, 3])], MAX_SAS);
    let waits = pair.sides[1].exchange.waits_for();
    assert_eq!(waits.map(|awaited| awaited.word), Some("terms"));
    pair.settle();
    pair.check();
    assert!(pair.sides.iter().all(|side| side.up && side.over.is_none()));
    assert_eq!(senders_of(&pair.sides[0]).len(), 3);
    assert_eq!(senders_of(&pair.sides[1]).len(), 5);
    assert_eq!(pair.sides[0].exchange.inbound().1.len(), 5);
    assert_eq!(pair.sides[0].exchange.waits_for(), None);
}

#[test]
fn each_request_of_a_side_has_its_own_timeout() {
    let mut pair = Pair::new(Mode::Connection, [vec![], vec![]], MAX_SAS);
    pair.settle();
    let mut waits = |from| {
        let sender = Sender::Connection { from, to: 4444 };
        pair.sides[0].exchange.want(sender);
        let waits = pair.sides[0].exchange.waits_for().unwrap();
        pair.settle();
        waits
    };
    let (one, other) = (waits(50_000), waits(50_001));
    assert_eq!(one.word, other.word);
    assert!(one.index < other.index);
}

#[test]
fn a_responder_uses_cpus_only_in_mode_cpu() {
    let mut pair = Pair::new(Mode::Connection, [vec![], cpus(&[0, 1])], MAX_SAS);
    pair.settle();
    assert!(pair.sides.iter().all(|side| side.up));
    assert_eq!(senders_of(&pair.sides[1]), [Sender::Fallback]);
}

#[test]
fn a_peer_that_accepts_one_sa_gets_the_fallback() {
    let mut pair = Pair::new(Mode::Cpu, [cpus(&[0, 1]), cpus(&[3])], 1);
    pair.settle();
    pair.check();
    assert_eq!(senders_of(&pair.sides[0]), [Sender::Fallback]);
    assert_eq!(senders_of(&pair.sides[1]).len(), 2);
    pair.sides[0].exchange.want(Sender::Cpu(4));
    pair.settle();
    assert_eq!(senders_of(&pair.sides[0]), [Sender::Fallback]);
}

#[test]
fn a_request_waits_for_room_and_is_dropped_on_release() {
    let mut pair = Pair::new(Mode::Cpu, [cpus(&[0, 1, 2, 3]), vec![]], 2);
    pair.settle();
    assert_eq!(
        senders_of(&pair.sides[0]),
        [Sender::Fallback, Sender::Cpu(0)]
    );
    assert_eq!(pair.sides[0].exchange.waits_for(), None);
    pair.sides[0].exchange.release(Sender::Cpu(1));
    pair.sides[0].exchange.rekey();
    pair.settle();
    assert_eq!(
        senders_of(&pair.sides[0]),
        [Sender::Fallback, Sender::Cpu(0)]
    );
    pair.sides[0].exchange.release(Sender::Cpu(0));
    pair.settle();
    pair.check();
    assert_eq!(
        senders_of(&pair.sides[0]),
        [Sender::Fallback, Sender::Cpu(2)]
    );
    pair.sides[0].exchange.release(Sender::Cpu(2));
    pair.settle();
    assert_eq!(
        senders_of(&pair.sides[0]),
        [Sender::Fallback, Sender::Cpu(3)]
    );
    assert!(pair.sides.iter().all(|side| side.over.is_none()));
}

#[test]
fn an_sa_is_added_on_demand_and_removed_on_release() {
    let connection = Sender::Connection {
        from: 50_000,
        to: 4444,
    };
    let mut pair = Pair::new(Mode::Connection, [vec![], vec![]], MAX_SAS);
    pair.settle();
    pair.sides[0].exchange.want(connection);
    pair.settle();
    pair.check();
    assert_eq!(senders_of(&pair.sides[0]), [Sender::Fallback, connection]);
    assert_eq!(pair.sides[1].kernel.associations.len(), 3);
    pair.sides[0].exchange.release(connection);
    pair.settle();
    pair.check();
    assert_eq!(senders_of(&pair.sides[0]), [Sender::Fallback]);
    assert_eq!(pair.sides[1].late.len(), 1);
    assert_eq!(pair.sides[0].kernel.associations.len(), 2);
}

/// Claim K2 of docs/security.
#[test]
fn new_keys_replace_the_old_ones_in_both_directions() {
    let mut pair = Pair::new(Mode::Cpu, [cpus(&[0, 1]), cpus(&[2])], MAX_SAS);
    pair.settle();
    for _ in 0..3 {
        for side in 0..2 {
            pair.sides[side].exchange.rekey();
            pair.settle();
            pair.check();
            for side in &mut pair.sides {
                let late = std::mem::take(&mut side.late);
                side.apply(&late);
            }
            pair.check();
        }
    }
    assert_eq!(pair.sides[0].exchange.outbound().0, 4);
    assert_eq!(pair.sides[1].exchange.inbound().0, 4);
    assert_eq!(senders_of(&pair.sides[0]).len(), 3);
    // Two SAs and the fallback in one direction, one SA and the fallback in the other direction,
    // and no further SA.
    assert_eq!(pair.sides[0].kernel.associations.len(), 5);
}

/// After a rekey, a side sends no packet with an old SA that the peer may already have removed.
/// This holds whatever the order of the two sides' actions.
#[test]
fn nothing_is_sent_with_sas_that_the_peer_may_retire() {
    for first in 0..4 {
        let mut pair = Pair::new(Mode::Cpu, [cpus(&[0, 1]), cpus(&[2])], MAX_SAS);
        pair.settle();
        for side in &mut pair.sides {
            side.exchange.rekey();
        }
        while pair.step(first) {
            for side in &mut pair.sides {
                let late = std::mem::take(&mut side.late);
                side.apply(&late);
            }
            pair.check();
        }
        for side in &pair.sides {
            assert_eq!(
                (side.exchange.outbound().0, side.exchange.inbound().0),
                (2, 2)
            );
            assert_eq!(side.kernel.associations.len(), 5, "wrong number of SAs");
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    Happen(usize),
    Want(usize, u32),
    Release(usize, u32),
    Rekey(usize),
    RemoveLate(usize),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        20 => (0..4_usize).prop_map(Event::Happen),
        2 => (0..2_usize, 0..5_u32).prop_map(|(side, cpu)| Event::Want(side, cpu)),
        1 => (0..2_usize, 0..5_u32).prop_map(|(side, cpu)| Event::Release(side, cpu)),
        1 => (0..2_usize).prop_map(Event::Rekey),
        1 => (0..2_usize).prop_map(Event::RemoveLate),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the order of requests, releases and renewals, each side opens what the other seals,
    /// nothing is in the clear, and no key is installed twice.
    #[test]
    fn i6_each_side_always_opens_what_the_other_seals(
        by_connection in any::<bool>(),
        events in vec(event(), 0..400),
    ) {
        let mode = if by_connection { Mode::Connection } else { Mode::Cpu };
        let sender = |side: usize, number: u32| match mode {
            Mode::Cpu => Sender::Cpu(number),
            Mode::Connection => {
                let (one, other) = (50_000 + 2 * number as u16, 4444 + (number % 4) as u16);
                let (from, to) = if side == 0 { (one, other) } else { (other, one) };
                Sender::Connection { from, to }
            }
        };
        let first = |side| vec![sender(side, 0)];
        let mut pair = Pair::new(mode, [first(0), first(1)], 4);
        for event in events {
            match event {
                Event::Happen(which) => {
                    pair.step(which);
                }
                Event::Want(side, number) => pair.sides[side].exchange.want(sender(side, number)),
                Event::Release(side, number) => {
                    pair.sides[side].exchange.release(sender(side, number));
                }
                Event::Rekey(side) => pair.sides[side].exchange.rekey(),
                // When every message has been received, no packet is in flight, so the delayed
                // removals may run.
                Event::RemoveLate(side) if pair.sent.iter().all(VecDeque::is_empty) => {
                    let late = std::mem::take(&mut pair.sides[side].late);
                    pair.sides[side].apply(&late);
                }
                Event::RemoveLate(_) => {}
            }
            pair.check();
        }
        pair.settle();
        pair.check();
        for side in &pair.sides {
            prop_assert!(side.up && side.over.is_none(), "{:?}", side.over);
        }
        prop_assert!(senders_of(&pair.sides[0]).len() <= 4, "more SAs than the responder accepts");
    }
}

/// A running responder: it has requested its fallback SA and granted nothing.
fn granting() -> Exchange {
    let mut exchange = Exchange::responder(4, None, Vec::new());
    exchange.handle_message(Message::Terms(terms(Mode::Cpu, 4)));
    assert!(matches!(exchange.poll_action(), Some(Action::Begin(_))));
    exchange.begun();
    while exchange.poll_action().is_some() {}
    exchange
}

fn slot(index: u32, sender: Sender) -> Slot {
    Slot { index, sender }
}

fn want(epoch: u32, slots: &[Slot]) -> Message {
    Message::Want {
        epoch,
        slots: slots.to_vec(),
    }
}

/// Checks that the message ends the session with this fault, which is sent to the peer.
fn refused(mut exchange: Exchange, message: Message, fault: FaultCode) {
    exchange.handle_message(message.clone());
    let sent = exchange.poll_action();
    let Some(Action::Send(Message::End {
        fault: reported, ..
    })) = sent
    else {
        panic!("{message:?} is accepted: {sent:?}");
    };
    assert_eq!(reported, fault, "{message:?}");
    assert!(matches!(exchange.poll_action(), Some(Action::Over(ending)) if !ending.by_peer));
    assert_eq!(exchange.poll_action(), None);
    // After the end, nothing more is sent or handled.
    exchange.handle_message(Message::Ready);
    exchange.want(Sender::Cpu(1));
    exchange.rekey();
    exchange.begun();
    assert_eq!(exchange.poll_action(), None);
}

/// Claim K3 of docs/security.
#[test]
fn i7_a_message_out_of_order_ends_the_session_with_a_fault() {
    use FaultCode::{LaneLimit, Malformed};
    let fallback = slot(0, Sender::Fallback);
    let fresh = || Exchange::responder(4, None, Vec::new());
    refused(fresh(), want(1, &[fallback]), Malformed);
    refused(fresh(), Message::Ready, Malformed);
    let again = Message::Terms(terms(Mode::Cpu, 4));
    refused(granting(), again, Malformed);
    let spis = vec![(7, LEAST_SPI)];
    refused(granting(), Message::Granted { epoch: 1, spis }, Malformed);
    refused(granting(), Message::Ready, Malformed);
    refused(granting(), Message::Retire { epoch: 1 }, Malformed);
    let indices = vec![0];
    refused(granting(), Message::Release { indices }, Malformed);
    refused(granting(), want(2, &[fallback]), Malformed);
    // Invalid: a request for epoch 0, or a second request before the first is granted.
    refused(granting(), want(0, &[slot(0, Sender::Cpu(1))]), Malformed);
    let mut installing = granting();
    installing.handle_message(want(1, &[fallback]));
    let action = installing.poll_action();
    assert!(matches!(action, Some(Action::InstallInbound { .. })));
    refused(installing, want(1, &[slot(1, Sender::Fallback)]), Malformed);
    // Invalid: a first request without the fallback, with a sender twice, with descending indices,
    // or with a sender of another mode; too many SAs.
    refused(granting(), want(1, &[slot(0, Sender::Cpu(1))]), Malformed);
    let twice = [fallback, slot(1, Sender::Cpu(1)), slot(2, Sender::Cpu(1))];
    refused(granting(), want(1, &twice), Malformed);
    let back = [slot(5, Sender::Fallback), slot(4, Sender::Cpu(1))];
    refused(granting(), want(1, &back), Malformed);
    let connection = Sender::Connection { from: 1, to: 4444 };
    refused(
        granting(),
        want(1, &[fallback, slot(1, connection)]),
        Malformed,
    );
    let many: Vec<Slot> = (1..5).map(|at| slot(at, Sender::Cpu(at))).collect();
    let many = [&[fallback], &many[..]].concat();
    refused(granting(), want(1, &many), LaneLimit);
}

#[test]
fn i7_a_third_epoch_is_rejected_until_the_first_is_retired() {
    let mut exchange = granting();
    let install = |exchange: &mut Exchange, epoch, index| {
        exchange.handle_message(want(epoch, &[slot(index, Sender::Fallback)]));
        let action = exchange.poll_action();
        assert!(
            matches!(action, Some(Action::InstallInbound { .. })),
            "{action:?}"
        );
        exchange.inbound_installed(&[LEAST_SPI + index]);
        let action = exchange.poll_action();
        assert!(matches!(
            action,
            Some(Action::Send(Message::Granted { .. }))
        ));
    };
    install(&mut exchange, 1, 0);
    install(&mut exchange, 2, 1);
    refused(
        exchange,
        want(3, &[slot(2, Sender::Fallback)]),
        FaultCode::Malformed,
    );
}

#[test]
fn i7_an_spi_that_is_granted_twice_is_rejected() {
    let mut exchange = granting();
    // This side has requested the fallback, so it accepts the first grant.
    let spis = vec![(0, 0x1000)];
    exchange.handle_message(Message::Granted { epoch: 1, spis });
    assert!(matches!(
        exchange.poll_action(),
        Some(Action::InstallOutbound { .. })
    ));
    exchange.outbound_installed();
    assert_eq!(exchange.poll_action(), Some(Action::Send(Message::Ready)));
    exchange.want(Sender::Cpu(1));
    assert!(matches!(
        exchange.poll_action(),
        Some(Action::Send(Message::Want { .. }))
    ));
    let spis = vec![(1, 0x1000)];
    refused(
        exchange,
        Message::Granted { epoch: 1, spis },
        FaultCode::Malformed,
    );
}

#[test]
fn a_translated_address_is_reported() {
    let mut exchange = Exchange::initiator(terms(Mode::Cpu, 4), Vec::new());
    let _ = exchange.poll_action();
    let answer = Terms {
        own: [192, 0, 2, 2].into(),
        other: [198, 51, 100, 7].into(),
        ..terms(Mode::Cpu, 4)
    };
    refused(
        exchange,
        Message::Terms(answer),
        FaultCode::AddressTranslated,
    );
}

#[test]
fn the_end_of_a_peer_is_not_answered() {
    let mut exchange = granting();
    let (fault, text) = (FaultCode::Cancelled, "the operator says so".to_owned());
    exchange.handle_message(Message::End { fault, text });
    assert!(matches!(exchange.poll_action(), Some(Action::Over(ending)) if ending.by_peer));
    assert_eq!(exchange.poll_action(), None);
}
