//! Which VM moves where, and in which order.

use std::cmp::Reverse;

use super::table::mib;

/// A VM that runs at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Vm {
    pub(super) uuid: String,
    /// The name that the owner of the VM chose; escape it before printing.
    pub(super) name: String,
    /// The bytes of memory that the VM may use.
    pub(super) memory: u64,
    /// How busy the VM is. The value is used only to compare VMs.
    pub(super) busy: u64,
    /// The VM was paused before anything moved, and arrives paused.
    pub(super) is_paused: bool,
    /// libvirt keeps the VM's definition while the VM does not run.
    pub(super) is_persistent: bool,
    /// The destination of a migration that is already under way.
    pub(super) bound: Option<usize>,
}

/// A host to which VMs may move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) uri: String,
    /// How many bytes of memory the host can give to arriving VMs.
    pub(super) free: u64,
}

/// The order in which VMs move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Smallest,
    Busiest,
    /// First the VMs with these names or UUIDs, in this order. The other VMs follow, the smallest
    /// first.
    Listed(Vec<String>),
}

/// A VM and the index of its destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) vm: Vm,
    pub(super) to: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// In the order in which they start.
    pub(super) moves: Vec<Move>,
    /// VMs that fit nowhere, with the reason.
    pub(super) stays: Vec<(Vm, String)>,
    /// Entries of the list that name no VM of the source.
    pub(super) unknown: Vec<String>,
}

/// Places the largest VMs first, each at the destination with the most free memory, and then puts
/// the moves in order.
pub(super) fn plan(vms: Vec<Vm>, mut destinations: Vec<Destination>, order: &Order) -> Plan {
    let mut plan = Plan::default();
    if let Order::Listed(listed) = order {
        let is_known = |entry: &&String| vms.iter().any(|vm| is_named(vm, entry));
        plan.unknown = listed
            .iter()
            .filter(|one| !is_known(one))
            .cloned()
            .collect();
    }
    let mut by_size = vms;
    by_size.sort_by(|a, b| (b.memory, &a.uuid).cmp(&(a.memory, &b.uuid)));
    for vm in by_size {
        // If a VM is on its way, its memory already counts as used at its destination. So do not
        // subtract that memory again.
        if let Some(to) = vm.bound {
            plan.moves.push(Move { vm, to });
            continue;
        }
        let fullest =
            (0..destinations.len()).max_by_key(|at| (destinations[*at].free, Reverse(*at)));
        match fullest {
            Some(to) if destinations[to].free >= vm.memory => {
                destinations[to].free -= vm.memory;
                plan.moves.push(Move { vm, to });
            }
            most => {
                let room = most.map_or(0, |at| destinations[at].free);
                let reason = format!(
                    "needs {}, and no destination has more than {} left",
                    mib(vm.memory),
                    mib(room)
                );
                plan.stays.push((vm, reason));
            }
        }
    }
    plan.moves.sort_by_key(|one| rank(&one.vm, order));
    plan
}

/// A VM's sort key. Its first part puts VMs that are on their way before the other VMs.
fn rank(vm: &Vm, order: &Order) -> (bool, usize, u64, u64, String) {
    let place = match order {
        Order::Listed(listed) => {
            let found = listed.iter().position(|entry| is_named(vm, entry));
            found.unwrap_or(listed.len())
        }
        Order::Smallest | Order::Busiest => 0,
    };
    let idle = match order {
        Order::Busiest => u64::MAX - vm.busy,
        Order::Smallest | Order::Listed(_) => 0,
    };
    (vm.bound.is_none(), place, idle, vm.memory, vm.uuid.clone())
}

fn is_named(vm: &Vm, entry: &str) -> bool {
    entry == vm.name || entry.eq_ignore_ascii_case(&vm.uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn vm(name: &str, gib: u64, busy: u64) -> Vm {
        Vm {
            uuid: format!("{name}-uuid"),
            name: name.into(),
            memory: gib * GIB,
            busy,
            is_paused: false,
            is_persistent: true,
            bound: None,
        }
    }

    fn to(free: &[u64]) -> Vec<Destination> {
        let one = |(at, gib): (usize, &u64)| Destination {
            uri: format!("qemu+ssh://{at}/system"),
            free: gib * GIB,
        };
        free.iter().enumerate().map(one).collect()
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.moves.iter().map(|one| one.vm.name.as_str()).collect()
    }

    #[test]
    fn the_order_is_by_size_by_business_or_by_the_list() {
        let vms = || vec![vm("large", 8, 5), vm("small", 1, 1), vm("busy", 4, 90)];
        let of = |order: &Order| plan(vms(), to(&[64]), order);
        assert_eq!(names(&of(&Order::Smallest)), ["small", "busy", "large"]);
        assert_eq!(names(&of(&Order::Busiest)), ["busy", "large", "small"]);
        let list = ["gone", "large", "BUSY-uuid"].map(str::to_owned).into();
        let listed = of(&Order::Listed(list));
        assert_eq!(names(&listed), ["large", "busy", "small"]);
        assert_eq!(listed.unknown, ["gone"]);
    }

    #[test]
    fn vms_go_where_most_memory_is_free_and_the_largest_choose_first() {
        let vms = vec![vm("a", 2, 0), vm("b", 3, 0), vm("c", 6, 0), vm("d", 2, 0)];
        let plan = plan(vms, to(&[6, 8]), &Order::Smallest);
        let placed: Vec<_> = plan
            .moves
            .iter()
            .map(|one| (&*one.vm.name, one.to))
            .collect();
        // c takes 6 of 8, b takes 3 of 6, a takes 2 of the 3 that b left, d takes the 2 that c
        // left.
        assert_eq!(placed, [("a", 0), ("d", 1), ("b", 0), ("c", 1)]);
        assert!(plan.stays.is_empty());
    }

    #[test]
    fn a_vm_that_fits_nowhere_stays_and_the_smaller_ones_move() {
        let vms = vec![vm("small", 1, 0), vm("huge", 9, 0), vm("other", 7, 0)];
        let plan = plan(vms, to(&[8, 2]), &Order::Smallest);
        assert_eq!(names(&plan), ["small", "other"]);
        let [(stays, reason)] = &plan.stays[..] else {
            panic!("{plan:?}")
        };
        assert_eq!(stays.name, "huge");
        assert!(
            reason.contains("9216 MiB") && reason.contains("8192 MiB"),
            "{reason}"
        );
    }

    #[test]
    fn a_vm_that_is_on_its_way_is_first_and_takes_no_room() {
        let mut moving = vm("moving", 8, 0);
        moving.bound = Some(1);
        let plan = plan(
            vec![vm("small", 1, 0), moving],
            to(&[0, 1]),
            &Order::Smallest,
        );
        let placed: Vec<_> = plan
            .moves
            .iter()
            .map(|one| (&*one.vm.name, one.to))
            .collect();
        assert_eq!(placed, [("moving", 1), ("small", 1)]);
    }
}
