//! Requirements of tests. If one is missing, the test fails in CI. Elsewhere it reports what is
//! missing and is skipped.

use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use dunlin_test_base::need::or_skip;

use crate::debian::{self, DebianError, Qemu};
use crate::guest::{Guest, Workload};
use crate::hosts::Host;
use crate::libvirt::Pair;
use crate::machine::{Accelerator, Setup};

/// Whether hosts can be created.
#[must_use]
pub fn hosts() -> bool {
    or_skip("network namespaces", Host::new("probe")).is_some()
}

/// Whether the machine has KVM.
#[must_use]
pub fn kvm() -> bool {
    or_skip("/dev/kvm", File::open("/dev/kvm")).is_some()
}

/// Returns what was fetched from Debian, or `None` if the host has no network or is not Debian.
///
/// # Panics
/// Fetching failed for another reason, or for any reason if the environment has `CI=true`.
pub fn fetched<T>(found: Result<T, DebianError>) -> Option<T> {
    match found {
        Err(error @ (DebianError::Fetch { .. } | DebianError::NotDebian(_))) => {
            or_skip("package from Debian", Err(error))
        }
        other => Some(other.unwrap_or_else(|error| panic!("{error}"))),
    }
}

/// Debian's QEMU, or `None` if it cannot be fetched.
#[must_use]
pub fn qemu() -> Option<Qemu> {
    fetched(debian::qemu())
}

/// Two hosts with libvirt, or `None` if hosts cannot be created or libvirt cannot be fetched.
///
/// # Panics
/// The hosts do not start, or something is missing and the environment has `CI=true`.
#[must_use]
pub fn libvirt() -> Option<Pair> {
    if !hosts() {
        return None;
    }
    fetched(debian::libvirt())?;
    Some(Pair::start().unwrap_or_else(|error| panic!("{error}")))
}

/// The bare guest in QEMU from Debian, on KVM if available; `None` if QEMU cannot be fetched.
#[must_use]
pub fn bare_guest(workload: Workload) -> Option<Setup> {
    let qemu = qemu()?;
    let accelerator = if kvm() {
        Accelerator::Kvm
    } else {
        Accelerator::Tcg
    };
    Some(Setup::new(&qemu, Guest::Bare, workload, accelerator))
}

/// Waits until no other test of this program uses the whole machine, and returns a guard. Other
/// tests wait here until the guard is dropped.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
