//! How a session starts on ports that an earlier session left blocked. The session takes over the
//! blocking policies, so that the ports are never open in between.

use super::Step;
use crate::ipsec::object::{Object, Policy};
use crate::mistake::{Mistake, planted};

/// The steps by which a session (the heir) takes over ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adoption {
    /// Steps to apply instead of the session's initial steps.
    pub begin: Vec<Step>,
    /// Policies to remove immediately after [`Adoption::begin`], because the heir's own policies
    /// cover all of their packets.
    pub then: Vec<Policy>,
    /// Policies that block ports of the heir and also other ports. The heir can start only if no
    /// connection uses any of these ports; the policies are then removed.
    pub in_the_way: Vec<Policy>,
    /// Policies for ports outside the heir's range, to remove when no connection on these ports is
    /// left.
    pub when_quiet: Vec<Policy>,
}

/// Returns the steps by which a session takes over `left`, the policies that an earlier session has
/// left behind. These steps follow the immediate steps of [`undo`](super::undo). `begin` are the
/// session's usual initial steps.
#[must_use]
pub fn adopt(begin: &[Step], left: &[Policy]) -> Adoption {
    let own = |step: &Step| step.added().and_then(Object::policy).copied();
    let mut adoption = Adoption::default();
    for step in begin {
        let before = |own: &Policy| left.iter().find(|other| other.is_in_place_of(own));
        let replaced = own(step).and_then(|own| Some((own, before(&own)?)));
        match replaced {
            Some((_, other)) if planted(Mistake::HeirOpens) => {
                let gone = Step::Remove(Object::Policy(*other));
                adoption.begin.extend([gone, *step]);
            }
            Some((own, _)) => adoption.begin.push(Step::Replace(own)),
            None => adoption.begin.push(*step),
        }
    }
    let rivals = |other: &Policy| {
        let other = *other;
        let all = begin.iter().filter_map(own);
        all.filter(move |own| own.is_rival_of(&other))
    };
    for other in left {
        if rivals(other).any(|own| other.is_in_place_of(&own)) {
            continue;
        }
        if rivals(other).any(|own| own.selector.covers(&other.selector)) {
            adoption.then.push(*other);
        } else if rivals(other).next().is_some() {
            adoption.in_the_way.push(*other);
        } else {
            adoption.when_quiet.push(*other);
        }
    }
    adoption
}

#[cfg(test)]
pub(in crate::ipsec) mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::ipsec::Mode;
    use crate::ipsec::model::{Kernel, Sent};
    use crate::ipsec::plan::tests::{ends, installed_by, life, parameters, removed, senders};
    use crate::ipsec::plan::{REQIDS, undo};

    /// A planted mistake and the test that finds it.
    #[cfg(feature = "mistakes")]
    pub(in crate::ipsec) const FOUND_BY: [(Mistake, fn()); 1] =
        [(Mistake::HeirOpens, i6_an_heir_opens_no_port_while_it_begins)];

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        /// A process may be killed after any step. The session that takes over the ports of this
        /// process (the heir) opens none of them while it begins, whatever the heir's own range of
        /// ports is.
        #[test]
        fn i6_an_heir_opens_no_port_while_it_begins(
            killed in any::<prop::sample::Index>(),
            heir in 4440..4450_u16,
            more in 0..10_u16,
        ) {
            let mode = Mode::Connection;
            let dead = parameters(4444, 4446, mode);
            let own = senders(mode, &[4444, 2]);
            let more_sas = senders(mode, &[9])[1];
            let (steps, [begun, _, quiet]) = life(&dead, &own, &senders(mode, &[1]), more_sas);
            let killed = begun + killed.index(quiet - begun);
            let mut kernel = Kernel::default();
            steps[..killed].iter().for_each(|step| kernel.apply(step));
            let back = undo(&installed_by(&steps[..killed]));
            let mut after = parameters(heir, heir + more, mode);
            after.first_reqid = 9 * REQIDS;
            let shut = |kernel: &Kernel, port: u16| {
                let [out, inward] = ends(9, port);
                kernel.send(out, 0) != Sent::Clear && !kernel.receives(inward, None)
            };
            for step in &back.now {
                kernel.apply(step);
                prop_assert!((4444..=4446).all(|port| shut(&kernel, port)));
            }
            let left: Vec<Policy> = kernel.policies.values().copied().collect();
            let adoption = adopt(&after.begin(), &left);
            let then = removed(&adoption.then);
            for step in adoption.begin.iter().copied().chain(then) {
                kernel.apply(&step);
                prop_assert!((4444..=4446).all(|port| shut(&kernel, port)), "after {step:?}");
            }
            for step in removed(&adoption.in_the_way) {
                kernel.apply(&step);
                prop_assert!((heir..=heir + more).all(|port| shut(&kernel, port)));
            }
            // From here on no policy of the dead process takes precedence over one of the heir.
            for (own, other) in left.iter().flat_map(|other| {
                after.begin().into_iter().filter_map(|step| match step {
                    Step::Add(Object::Policy(own)) => Some((own, *other)),
                    _ => None,
                })
            }) {
                let is_installed = kernel.policies.values().any(|policy| *policy == other);
                prop_assert!(!(is_installed && own.is_rival_of(&other)), "{other} has precedence over {own}");
            }
            removed(&adoption.when_quiet).for_each(|step| kernel.apply(&step));
            let begun: Vec<Policy> = kernel.policies.into_values().collect();
            prop_assert_eq!(begun.len(), after.begin().len(), "policies other than the heir's are left");
        }
    }

    /// If the heir has the same ports, its policies replace the old policies one by one, and no old
    /// policy is left.
    ///
    /// Claim K5 of docs/security.
    #[test]
    fn the_same_ports_are_taken_over_in_place() {
        let dead = parameters(4444, 4446, Mode::Cpu);
        let left: Vec<Policy> = dead
            .begin()
            .iter()
            .filter_map(|step| match step {
                Step::Add(Object::Policy(policy)) => Some(*policy),
                _ => None,
            })
            .collect();
        let mut heir = dead;
        heir.first_reqid = 9 * REQIDS;
        let adoption = adopt(&heir.begin(), &left);
        assert!(
            adoption
                .begin
                .iter()
                .all(|step| matches!(step, Step::Replace(_)))
        );
        assert_eq!(adoption.begin.len(), left.len());
        assert!(adoption.then.is_empty() && adoption.in_the_way.is_empty());
        assert!(adoption.when_quiet.is_empty());
    }
}
