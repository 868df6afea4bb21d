//! Makes a vCPU thread leave KVM_RUN, from another thread and without a lost wake-up.
//!
//! A kick is a signal to the vCPU thread. The thread blocks this signal, except while KVM runs the
//! guest (KVM_SET_SIGNAL_MASK, section 4.30 of the kernel's KVM API). A kick that arrives early
//! therefore stays pending and makes the next KVM_RUN return EINTR immediately. This module installs
//! no signal handler, so it does not change the global state of the embedding program.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Mutex;

use dunlin::lane::sync::lock;
use rustix::thread::gettid;

use crate::kvm::Vcpu;

/// Makes one vCPU thread leave the guest. That thread shares this value with the threads that kick
/// it. Holds the id of the attached thread, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Kick(Mutex<Option<libc::pid_t>>);

/// The signal. It is a standard signal, which needs no entry in the queue of signals. tgkill(2) of a
/// real-time signal fails when the user's queue is full (RLIMIT_SIGPENDING, signal(7)), and any
/// process of the user can fill it. No kernel sends SIGSTKFLT.
const SIGNAL: libc::c_int = libc::SIGSTKFLT;

impl Kick {
    /// Makes the calling thread the target of kicks, until the returned value is dropped.
    ///
    /// The caller must be the thread that will run `vcpu`. It must call this function before its
    /// first KVM_RUN.
    ///
    /// # Errors
    /// An error from KVM_SET_SIGNAL_MASK or pthread_sigmask.
    pub(crate) fn attach(&self, vcpu: &Vcpu) -> io::Result<Attached<'_>> {
        let old = block()?;
        set_guest_mask(vcpu, &old)?;
        *lock(&self.0) = Some(gettid().as_raw_pid());
        Ok(Attached {
            kick: self,
            old,
            this_thread_only: PhantomData,
        })
    }

    /// Makes the attached thread leave KVM_RUN, now or as soon as the thread enters it. Has
    /// no effect if no thread is attached.
    pub(crate) fn kick(&self) {
        let target = lock(&self.0);
        let Some(thread) = *target else { return };
        // SAFETY: tgkill touches no memory. The target thread clears `target` under this lock
        // before it unblocks the signal, so it is alive and has the signal blocked outside KVM_RUN.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
        assert_eq!(sent, 0, "tgkill(2) failed for a live thread");
    }
}

/// While this value lives, the calling thread is the target of a [`Kick`].
#[derive(Debug)]
pub(crate) struct Attached<'a> {
    kick: &'a Kick,
    old: libc::sigset_t,
    /// Makes this type `!Send`: dropping the value restores the signal mask of the current thread,
    /// so the value must stay on its thread.
    this_thread_only: PhantomData<*const ()>,
}

impl Attached<'_> {
    /// Clears a pending kick, after KVM_RUN has returned EINTR.
    ///
    /// Read the kicker's request *after* this call. A kick that is sent after this call makes the
    /// next KVM_RUN return EINTR again.
    pub(crate) fn take(&self) {
        let only = set_of(SIGNAL);
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: both pointers are to live locals, and a null siginfo is allowed.
        while unsafe { libc::sigtimedwait(&only, ptr::null_mut(), &now) } > 0 {}
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        *lock(&self.kick.0) = None;
        self.take();
        // SAFETY: `old` is the mask that `attach` read on this very thread.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.old, ptr::null_mut()) };
    }
}

fn set_of(signal: libc::c_int) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `set` is valid for writes, and sigemptyset initialises all of it.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `set` was initialised by the call above.
    let mut set = unsafe { set.assume_init() };
    // SAFETY: `set` is a live, initialised set, and `signal` is a valid signal number.
    unsafe { libc::sigaddset(&mut set, signal) };
    set
}

/// Blocks the kick's signal in this thread and returns the previous mask.
fn block() -> io::Result<libc::sigset_t> {
    let mut old = set_of(SIGNAL);
    // SAFETY: both sets are live and initialised.
    let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set_of(SIGNAL), &mut old) };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    Ok(old)
}

/// `struct kvm_signal_mask`, followed by the kernel's signal set of eight bytes.
#[repr(C, packed)]
struct GuestMask {
    length: u32,
    set: u64,
}

/// Sets the signal mask that the thread has while the guest runs: `old` without the kick's signal.
fn set_guest_mask(vcpu: &Vcpu, old: &libc::sigset_t) -> io::Result<()> {
    /// `_IOW(KVMIO, 0x8b, struct kvm_signal_mask)`. The size in this number is that of the header
    /// without the set.
    const KVM_SET_SIGNAL_MASK: libc::c_ulong = 0x4004_ae8b;
    let mut set = 0;
    for number in 1..=64 {
        // SAFETY: `old` is an initialised set and the number is in the kernel's range.
        let blocked = unsafe { libc::sigismember(old, number) } == 1;
        if blocked && number != SIGNAL {
            set |= 1u64 << (number - 1);
        }
    }
    let mask = GuestMask { length: 8, set };
    // SAFETY: the descriptor is that of a vCPU. The kernel reads `length` bytes after the header,
    // and these bytes are the set.
    let code = unsafe { libc::ioctl(vcpu.as_raw_fd(), KVM_SET_SIGNAL_MASK, &raw const mask) };
    if code < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    fn is_pending() -> bool {
        let mut pending = set_of(SIGNAL);
        // SAFETY: `pending` is a live, initialised set.
        unsafe { libc::sigpending(&mut pending) == 0 && libc::sigismember(&pending, SIGNAL) == 1 }
    }

    #[test]
    fn a_kick_needs_no_room_in_the_queue_of_signals() {
        let kick = Kick::default();
        let attached = Attached {
            kick: &kick,
            old: block().unwrap(),
            this_thread_only: PhantomData,
        };
        *lock(&kick.0) = Some(gettid().as_raw_pid());
        let limit = getrlimit(Resource::Sigpending);
        let none = Rlimit {
            current: Some(0),
            ..limit
        };
        setrlimit(Resource::Sigpending, none).unwrap();
        kick.kick();
        kick.kick();
        setrlimit(Resource::Sigpending, limit).unwrap();
        assert!(is_pending());
        attached.take();
        assert!(!is_pending());
        drop(attached);
        kick.kick();
        assert!(!is_pending());
    }
}
