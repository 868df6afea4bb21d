//! Simulates a kernel that rejects a TLS key, as in a sandbox.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use dunlin_linux::ktls::Direction;
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

/// Makes setsockopt(2) reject the keys of one direction with `EPERM`. The restriction is permanent.
/// It applies to this thread and to the threads and processes that this thread starts.
///
/// # Panics
/// The kernel has no seccomp.
pub fn forbid(direction: Direction) {
    refuse(direction, None);
}

/// Like [`forbid`], but only for the descriptor with this number.
///
/// # Panics
/// The kernel has no seccomp.
pub fn forbid_for(descriptor: RawFd, direction: Direction) {
    refuse(direction, Some(descriptor));
}

fn refuse(direction: Direction, descriptor: Option<RawFd>) {
    let equal = |argument, value: libc::c_int| {
        SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            value as u64,
        )
        .expect("setsockopt has five arguments")
    };
    let option = match direction {
        Direction::Sending => libc::TLS_TX,
        Direction::Receiving => libc::TLS_RX,
    };
    let mut conditions = vec![equal(1, libc::SOL_TLS), equal(2, option)];
    conditions.extend(descriptor.map(|number| equal(0, number)));
    let rule = SeccompRule::new(conditions).expect("the rule has conditions");
    let filter: BpfProgram = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_setsockopt, vec![rule])]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::x86_64,
    )
    .and_then(TryInto::try_into)
    .expect("the filter is a valid program");
    apply_filter(&filter).expect("the kernel has seccomp");
}
