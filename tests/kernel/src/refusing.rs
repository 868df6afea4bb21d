//! A kernel that refuses a key, as in a sandbox or where a direction lacks the cipher.

use std::collections::BTreeMap;
use std::os::fd::RawFd;

use dunlin_linux::ktls::Direction;
use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

/// Has setsockopt(2) refuse one direction's keys with `EPERM`, in this thread and what it starts, for
/// ever.
///
/// # Panics
/// The kernel has no seccomp.
pub fn forbid(direction: Direction) {
    refuse(direction, None);
}

/// The same for the socket that has this number alone.
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
    let rule = SeccompRule::new(conditions).expect("it has conditions");
    let filter: BpfProgram = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_setsockopt, vec![rule])]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::x86_64,
    )
    .and_then(TryInto::try_into)
    .expect("it is a program");
    apply_filter(&filter).expect("the kernel has seccomp");
}
