use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns the turn of a test if the machine has KVM. One test of a program runs at a time: guests
/// that compete for the CPUs keep no rates.
///
/// # Panics
/// There is no KVM, and the environment says `CI=true`.
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
