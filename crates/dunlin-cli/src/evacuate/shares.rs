//! How the budgets of the hosts are divided among the VMs that move.

use std::collections::BTreeMap;

/// Budgets in MiB/s, the unit of virsh; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Budgets {
    /// The budget of the source.
    pub(super) outbound: Option<u64>,
    /// The budget of each destination.
    pub(super) inbound: Option<u64>,
}

/// The share of each VM in MiB/s, for VMs that move to the given destinations; `None` is unlimited.
/// If a destination's budget limits its VMs to less than an equal share of the source's budget, VMs
/// to other destinations get the difference. The shares of a host add up to its budget at most.
pub(super) fn shares(to: &[usize], budgets: Budgets) -> Vec<Option<u64>> {
    // The source is the key `None`.
    let mut left: BTreeMap<Option<usize>, u64> = BTreeMap::new();
    left.extend(budgets.outbound.map(|rate| (None, rate)));
    for to in to {
        left.extend(budgets.inbound.map(|rate| (Some(*to), rate)));
    }
    let mut shares = vec![None; to.len()];
    loop {
        let open = |host: &Option<usize>| -> Vec<usize> {
            let is_here = |at: &usize| host.is_none_or(|host| to[*at] == host);
            let open = (0..to.len()).filter(|at| shares[*at].is_none());
            open.filter(is_here).collect()
        };
        let fair = left.iter().filter_map(|(host, rate)| {
            let open = open(host);
            (!open.is_empty()).then(|| (rate / open.len() as u64, open))
        });
        let Some((rate, here)) = fair.min_by_key(|(rate, _)| *rate) else {
            return shares;
        };
        for at in here {
            shares[at] = Some(rate);
            for host in [None, Some(to[at])] {
                if let Some(left) = left.get_mut(&host) {
                    *left -= rate;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(to: &[usize], outbound: Option<u64>, inbound: Option<u64>) -> Vec<Option<u64>> {
        shares(to, Budgets { outbound, inbound })
    }

    #[test]
    fn without_budgets_nothing_is_limited() {
        assert_eq!(of(&[0, 1], None, None), [None, None]);
        assert!(of(&[], Some(10), Some(10)).is_empty());
    }

    #[test]
    fn a_budget_is_divided_evenly_and_never_exceeded() {
        assert_eq!(of(&[0, 1, 2], Some(100), None), [Some(33); 3]);
        assert_eq!(
            of(&[0, 0, 1], None, Some(100)),
            [Some(50), Some(50), Some(100)]
        );
    }

    #[test]
    fn what_a_narrow_destination_leaves_the_others_get() {
        // Two VMs share the 40 MiB/s of destination 0. The other two VMs share the remaining
        // 60 MiB/s of the source, although their destinations would allow each of them 40 MiB/s.
        let shares = of(&[0, 0, 1, 2], Some(100), Some(40));
        assert_eq!(shares, [Some(20), Some(20), Some(30), Some(30)]);
        assert_eq!(
            of(&[0, 0, 1], Some(100), Some(40)),
            [Some(20), Some(20), Some(40)]
        );
    }
}
