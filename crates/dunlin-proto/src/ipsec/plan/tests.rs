#![allow(clippy::unwrap_used)]

use std::collections::HashSet;

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::*;
use crate::ipsec::Slot;
use crate::ipsec::key::{Role, context};
use crate::ipsec::model::{Kernel, Packet, Sent};

/// Planted mistakes and the tests that find them.
#[cfg(feature = "mistakes")]
pub(in crate::ipsec) const FOUND_BY: [(Mistake, fn()); 2] = [
    (
        Mistake::RequestIdKept,
        new_keys_carry_nothing_before_a_policy_selects_them,
    ),
    (
        Mistake::TakenBackUnblocked,
        i6_removing_what_a_dead_process_left_sends_nothing_in_the_clear,
    ),
];

const LOCAL: [u8; 4] = [192, 0, 2, 1];
const PEER: [u8; 4] = [192, 0, 2, 2];

pub(super) fn parameters(first: u16, last: u16, mode: Mode) -> SessionParameters {
    SessionParameters {
        local: LOCAL.into(),
        peer: PEER.into(),
        ports: PortRange::new(first, last).unwrap(),
        mode,
        first_reqid: 7 * REQIDS,
        udp: None,
    }
}

/// Grants for these senders, with indices that start at `index` and SPIs that start at `spi`.
fn grants(senders: &[Sender], index: u32, spi: u32) -> Vec<Grant> {
    let grant = |(at, sender): (usize, &Sender)| {
        let at = u32::try_from(at).unwrap();
        Grant {
            slot: Slot {
                index: index + at,
                sender: *sender,
            },
            spi: spi + at,
        }
    };
    senders.iter().enumerate().map(grant).collect()
}

pub(super) fn senders(mode: Mode, numbers: &[u16]) -> Vec<Sender> {
    let other = |number: &u16| match mode {
        Mode::Cpu => Sender::Cpu(u32::from(*number)),
        Mode::Connection => Sender::Connection {
            from: *number,
            to: 4444,
        },
    };
    let others = numbers.iter().map(other);
    std::iter::once(Sender::Fallback).chain(others).collect()
}

pub(super) fn ends(one: u16, other: u16) -> [Packet; 2] {
    let (local, peer) = (IpAddr::from(LOCAL), IpAddr::from(PEER));
    [
        Packet {
            source: (local, one),
            destination: (peer, other),
        },
        Packet {
            source: (peer, other),
            destination: (local, one),
        },
    ]
}

/// Returns all steps of a session: initial policies, SAs, one more SA, new keys, removal. Also
/// returns three step counts: after the initial policies, before the removal, and before the part
/// of the removal that waits until no connection uses the ports.
pub(super) fn life(
    parameters: &SessionParameters,
    own: &[Sender],
    peers: &[Sender],
    more: Sender,
) -> (Vec<Step>, [usize; 3]) {
    let mut steps = parameters.begin();
    let begun = steps.len();
    steps.extend(parameters.inbound(1, &grants(peers, 0, 0x1000)));
    let mut held = grants(own, 0, 0x2000);
    steps.extend(parameters.outbound(1, &held, true, &[]));
    let late = grants(&[more], 1000, 0x3000);
    steps.extend(parameters.outbound(1, &late, false, &[]));
    held.extend(late);
    let known: Vec<Sender> = held.iter().map(|grant| grant.slot.sender).collect();
    steps.extend(parameters.inbound(2, &grants(peers, 2000, 0x4000)));
    steps.extend(parameters.outbound(2, &grants(&known, 3000, 0x5000), true, &known));
    steps.extend(parameters.retire(1, &held, false));
    steps.extend(parameters.retire_inbound(1, &grants(peers, 0, 0x1000)));
    let installed = installed_by(&steps);
    let undo = undo(&installed);
    let over = steps.len();
    steps.extend(undo.now);
    let quiet = steps.len();
    steps.extend(removed(&undo.when_quiet));
    (steps, [begun, over, quiet])
}

/// Returns the steps that remove these policies.
pub(in crate::ipsec) fn removed(policies: &[Policy]) -> impl Iterator<Item = Step> {
    let remove = |policy: &Policy| Step::Remove(Object::Policy(*policy));
    policies.iter().map(remove)
}

/// Returns the objects that the record on disk lists after these steps.
pub(super) fn installed_by(steps: &[Step]) -> Vec<Object> {
    let mut objects: Vec<Object> = Vec::new();
    for step in steps {
        match step {
            Step::Add(object) => objects.push(*object),
            Step::Replace(policy) => {
                objects.retain(
                    |one| !matches!(one, Object::Policy(other) if other.is_in_place_of(policy)),
                );
                objects.push(Object::Policy(*policy));
            }
            Step::Remove(object) => objects.retain(|one| one != object),
        }
    }
    objects
}

fn any_mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Cpu), Just(Mode::Connection)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// No packet of the ports leaves or enters in the clear at any step from the first policies to
    /// the last removal, in both modes, for any ports and senders.
    #[test]
    fn i6_no_packet_of_the_ports_is_in_the_clear_between_any_two_steps(
        mode in any_mode(),
        (one, other) in any::<(u16, u16)>(),
        own in btree_set(5..40_u16, 1..5),
        peers in btree_set(0..40_u16, 1..5),
        ports in vec((any::<u16>(), any::<u16>()), 1..20),
    ) {
        let (first, last) = (one.min(other).max(1), one.max(other).max(1));
        let parameters = parameters(first, last, mode);
        let own: Vec<u16> = own.into_iter().collect();
        let peers: Vec<u16> = peers.into_iter().collect();
        let more = senders(mode, &[60])[1];
        let (steps, [begun, _, quiet]) =
            life(&parameters, &senders(mode, &own), &senders(mode, &peers), more);
        let pairs: Vec<(u16, u16)> = ports
            .iter()
            .flat_map(|(local, peer)| [(*local, *peer), (*local, first), (last, *peer)])
            .chain(own.iter().map(|number| (*number, 4444)))
            .collect();
        let mut kernel = Kernel::default();
        for (at, step) in steps.iter().enumerate() {
            kernel.apply(step);
            if at + 1 < begun || at >= quiet {
                continue;
            }
            for (local, peer) in &pairs {
                let [out, inward] = ends(*local, *peer);
                let covered = parameters.covers(*local, *peer);
                for cpu in own.iter().take(2) {
                    let sent = kernel.send(out, u32::from(*cpu));
                    let own_connection = own.contains(local) && *peer == 4444;
                    if covered {
                        prop_assert_ne!(sent, Sent::Clear, "after {:?}", step);
                    } else if !own_connection {
                        prop_assert_eq!(sent, Sent::Clear, "a foreign packet, after {:?}", step);
                    }
                }
                prop_assert_eq!(kernel.receives(inward, None), !covered, "after {:?}", step);
            }
        }
        prop_assert!(kernel.policies.is_empty() && kernel.associations.is_empty());
    }

    /// If a process is killed at any step, the removal of its recorded objects lets no packet pass
    /// in the clear.
    #[test]
    fn i6_removing_what_a_dead_process_left_sends_nothing_in_the_clear(
        mode in any_mode(),
        killed in any::<prop::sample::Index>(),
        again in any::<prop::sample::Index>(),
    ) {
        let parameters = parameters(4444, 4446, mode);
        let own = senders(mode, &[4444, 2]);
        let (steps, [begun, _, quiet]) = life(&parameters, &own, &senders(mode, &[1]), senders(mode, &[9])[1]);
        let killed = begun + killed.index(quiet - begun);
        let mut kernel = Kernel::default();
        steps[..killed].iter().for_each(|step| kernel.apply(step));
        // The process that removes the objects may be killed too.
        let mut objects = installed_by(&steps[..killed]);
        let first = undo(&objects);
        let cut = again.index(first.now.len() + 1);
        for step in &first.now[..cut] {
            kernel.apply(step);
            prop_assert_ne!(kernel.send(ends(9, 4444)[0], 0), Sent::Clear);
        }
        let done: Vec<Step> = steps[..killed].iter().chain(&first.now[..cut]).copied().collect();
        objects = installed_by(&done);
        let second = undo(&objects);
        for step in &second.now {
            kernel.apply(step);
            prop_assert_ne!(kernel.send(ends(9, 4444)[0], 0), Sent::Clear);
            prop_assert!(!kernel.receives(ends(9, 4444)[1], None));
        }
        removed(&second.when_quiet).for_each(|step| kernel.apply(&step));
        prop_assert!(kernel.policies.is_empty() && kernel.associations.is_empty());
    }
}

#[test]
fn a_cpu_uses_its_own_sa_or_the_fallback() {
    let parameters = parameters(4444, 4444, Mode::Cpu);
    let own = senders(Mode::Cpu, &[0, 2]);
    let mut kernel = Kernel::default();
    let steps = parameters.begin().into_iter();
    let outbound = parameters.outbound(1, &grants(&own, 0, 0x2000), true, &[]);
    for step in steps.chain(outbound) {
        kernel.apply(&step);
    }
    let packet = ends(50_000, 4444)[0];
    let by = |cpu| match kernel.send(packet, cpu) {
        Sent::Sealed { sender, .. } => sender,
        other => panic!("{other:?}"),
    };
    assert_eq!(by(0), Sender::Cpu(0));
    assert_eq!(by(2), Sender::Cpu(2));
    assert_eq!(by(1), Sender::Fallback);
}

#[test]
fn a_connection_uses_its_own_sa_or_the_fallback() {
    let parameters = parameters(4444, 4444, Mode::Connection);
    let own = senders(Mode::Connection, &[50_000, 50_002]);
    let mut kernel = Kernel::default();
    let steps = parameters.begin().into_iter();
    let outbound = parameters.outbound(1, &grants(&own, 0, 0x2000), true, &[]);
    for step in steps.chain(outbound) {
        kernel.apply(&step);
    }
    let by = |port| match kernel.send(ends(port, 4444)[0], 0) {
        Sent::Sealed { sender, .. } => sender,
        other => panic!("{other:?}"),
    };
    assert_eq!(by(50_000), own[1]);
    assert_eq!(by(50_002), own[2]);
    assert_eq!(by(50_004), Sender::Fallback);
}

/// Each side opens what the other side seals, although the sides have different numbers of CPUs.
#[test]
fn p14_two_cpus_and_four_open_what_the_other_seals() {
    let here = parameters(4444, 4444, Mode::Cpu);
    let there = SessionParameters {
        local: here.peer,
        peer: here.local,
        first_reqid: 9 * REQIDS,
        ..here
    };
    let (two, four) = (
        senders(Mode::Cpu, &[0, 1]),
        senders(Mode::Cpu, &[0, 1, 2, 3]),
    );
    let (from_here, from_there) = (grants(&two, 0, 0x1000), grants(&four, 0, 0x1000));
    let side = |parameters: &SessionParameters, own: &[Grant], peers: &[Grant]| {
        let mut kernel = Kernel::default();
        let steps = parameters
            .begin()
            .into_iter()
            .chain(parameters.inbound(1, peers));
        for step in steps.chain(parameters.outbound(1, own, true, &[])) {
            kernel.apply(&step);
        }
        kernel
    };
    let (a, b) = (
        side(&here, &from_here, &from_there),
        side(&there, &from_there, &from_here),
    );
    let [packet, answer] = ends(50_000, 4444);
    for cpu in 0..4 {
        for (from, to, packet) in [(&a, &b, packet), (&b, &a, answer)] {
            let Sent::Sealed { spi, .. } = from.send(packet, cpu) else {
                panic!("not sealed on CPU {cpu}");
            };
            assert!(to.receives(packet, Some(spi)));
        }
    }
}

/// Claim K1 of docs/security.
#[test]
fn an_outgoing_policy_blocks_before_any_sa_and_is_replaced_after_the_last() {
    let parameters = parameters(4444, 4445, Mode::Cpu);
    let own = grants(&senders(Mode::Cpu, &[0, 1]), 0, 0x2000);
    let begun = parameters.begin();
    assert!(
        begun
            .iter()
            .all(|step| matches!(step, Step::Add(Object::Policy(_))))
    );
    let out = begun.iter().filter_map(|step| match step {
        Step::Add(Object::Policy(policy)) if policy.direction == Direction::Out => Some(policy),
        _ => None,
    });
    assert!(out.clone().count() > 0 && out.clone().all(|one| one.action == Action::Block));
    let steps = parameters.outbound(1, &own, true, &[]);
    let of_sa = |step: &Step| matches!(step, Step::Add(Object::Association(_)));
    assert_eq!(steps.iter().take_while(|step| of_sa(step)).count(), 3);
    assert!(
        steps[3..]
            .iter()
            .all(|step| matches!(step, Step::Replace(_)))
    );
    let Step::Add(Object::Association(first)) = steps[0] else {
        panic!("the first step adds no SA");
    };
    assert_eq!(first.slot.sender, Sender::Fallback);
}

#[test]
fn sas_in_udp_differ_in_their_source_ports() {
    let udp = |first_source| Udp {
        listener: 4500,
        first_source,
    };
    let parameters = SessionParameters {
        udp: Some((udp(50_000), udp(60_000))),
        ..parameters(4444, 4444, Mode::Cpu)
    };
    assert!(
        parameters
            .begin()
            .contains(&Step::Add(Object::Listener(Listener {
                address: parameters.local,
                port: 4500
            })))
    );
    let own = grants(&senders(Mode::Cpu, &[0, 1, 2]), 0, 0x2000);
    let ports = |steps: Vec<Step>| -> Vec<(u16, u16)> {
        let of = |step| match step {
            Step::Add(Object::Association(one)) => one
                .encapsulation
                .map(|udp| (udp.source_port, udp.destination_port)),
            _ => None,
        };
        steps.into_iter().filter_map(of).collect()
    };
    let out = ports(parameters.outbound(1, &own, false, &[]));
    assert_eq!(
        out,
        [50_000, 50_001, 50_002, 50_003].map(|port| (port, 4500))
    );
    let inward = ports(parameters.inbound(1, &own[..1]));
    assert_eq!(inward, [(60_000, 4500)]);
}

/// The SAs of two epochs never mix. Only policies move traffic from the old SAs to the new SAs,
/// after all new SAs are installed. The removal of the old SAs changes nothing.
#[test]
fn new_keys_carry_nothing_before_a_policy_selects_them() {
    for mode in [Mode::Cpu, Mode::Connection] {
        let parameters = parameters(4444, 4444, mode);
        let own = senders(mode, &[2, 3]);
        let of_epoch = |epoch: u32| grants(&own, 10 * epoch, 0x1000 * epoch);
        let mut kernel = Kernel::default();
        let mut spis_after = |step: &Step| {
            kernel.apply(step);
            [2, 3, 9].map(
                |number| match kernel.send(ends(number, 4444)[0], u32::from(number)) {
                    Sent::Sealed { spi, .. } => spi,
                    _ => 0,
                },
            )
        };
        parameters
            .begin()
            .iter()
            .for_each(|step| _ = spis_after(step));
        let mut before = [0; 3];
        for step in parameters.outbound(1, &of_epoch(1), true, &[]) {
            before = spis_after(&step);
        }
        for epoch in 2..5 {
            let renewed = parameters.outbound(epoch, &of_epoch(epoch), true, &own);
            let retired = parameters.retire(epoch - 1, &of_epoch(epoch - 1), false);
            for step in renewed.iter().chain(&retired) {
                let spis = spis_after(step);
                if !matches!(step, Step::Replace(_)) {
                    assert_eq!(spis, before, "after {step:?}");
                }
                before = spis;
            }
            assert!(
                before.iter().all(|spi| spi / 0x1000 == epoch),
                "{before:x?}"
            );
        }
    }
}

/// Compares the contexts from which a session derives its keys.
#[test]
fn no_two_sas_of_a_session_share_a_key() {
    let mut seen = HashSet::new();
    let own = senders(Mode::Cpu, &[0, 1, 2]);
    let (steps, _) = life(
        &parameters(4444, 4444, Mode::Cpu),
        &own,
        &own,
        Sender::Cpu(9),
    );
    for step in steps {
        if let Step::Add(Object::Association(one)) = step {
            let sender = match one.direction {
                Direction::Out => Role::Initiator,
                Direction::In => Role::Responder,
            };
            let key = context(&[1; 16], sender, one.slot.index, one.epoch);
            assert!(seen.insert(key), "{one}");
        }
    }
}
