use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the other tests of this program that use KVM and returns a guard, or `None` without
/// KVM. Only one test runs at a time: guests that compete for the CPUs keep no rates.
///
/// # Panics
/// The machine has no KVM, and the environment has `CI=true`.
pub fn kvm() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    match File::open("/dev/kvm") {
        Ok(_) => Some(TURN.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(error) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => {
            panic!("CI must have /dev/kvm: {error}")
        }
        Err(error) => {
            println!("skipped, no /dev/kvm: {error}");
            None
        }
    }
}
