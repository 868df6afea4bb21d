use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::need::or_skip;

/// Waits until no other test of this program uses KVM, then returns a guard. Returns `None` without
/// KVM. Tests with KVM run one at a time, because guests that compete for the CPUs cannot keep
/// their rates.
///
/// # Panics
/// The host has no KVM, and the environment has `CI=true`.
pub fn kvm() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    or_skip("/dev/kvm", File::open("/dev/kvm"))?;
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}
