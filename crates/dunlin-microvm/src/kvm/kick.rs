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
/// it.
#[derive(Debug, Default)]
pub(crate) struct Kick(Mutex<Target>);

#[derive(Debug, Default)]
struct Target {
    /// Id of the attached thread, if there is one.
    thread: Option<libc::pid_t>,
    /// Whether a signal has been sent but not yet received. At most one signal to this thread is
    /// queued, so repeated kicks cannot exhaust the limit on queued signals (RLIMIT_SIGPENDING).
    sent: bool,
}

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
        lock(&self.0).thread = Some(gettid().as_raw_pid());
        Ok(Attached {
            kick: self,
            old,
            this_thread_only: PhantomData,
        })
    }

    /// Makes the attached thread leave KVM_RUN, now or as soon as the thread enters it. Has
    /// no effect if no thread is attached.
    pub(crate) fn kick(&self) {
        let mut target = lock(&self.0);
        let Some(thread) = target.thread else { return };
        if target.sent {
            return;
        }
        // SAFETY: tgkill touches no memory. The target thread clears `thread` under this lock
        // before it unblocks the signal, so it is alive and has the signal blocked outside KVM_RUN.
        let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal()) };
        assert_eq!(sent, 0, "the attached thread is alive and one signal fits");
        target.sent = true;
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
        let mut target = lock(&self.kick.0);
        let only = set_of(signal());
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: both pointers are to live locals, and a null siginfo is allowed.
        while unsafe { libc::sigtimedwait(&only, ptr::null_mut(), &now) } > 0 {}
        target.sent = false;
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        lock(&self.kick.0).thread = None;
        self.take();
        // SAFETY: `old` is the mask that `attach` read on this very thread.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.old, ptr::null_mut()) };
    }
}

fn signal() -> libc::c_int {
    libc::SIGRTMIN()
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
    let mut old = set_of(signal());
    // SAFETY: both sets are live and initialised.
    let code = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set_of(signal()), &mut old) };
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
        if blocked && number != signal() {
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
