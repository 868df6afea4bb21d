//! Signals that ask a process to end, taken by a thread that waits for them
//! (sigwait(3)) instead of by a handler, which could do next to nothing.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

/// SIGINT and SIGTERM, blocked for the thread that made this and for all that
/// it starts later, programs included: see [`unblock_in`].
#[derive(Debug)]
pub struct EndSignals(libc::sigset_t);

/// A signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndSignal {
    /// SIGINT: somebody pressed Ctrl-C.
    Interrupt,
    /// SIGTERM: a supervisor, or `kill`.
    Terminate,
}

impl EndSignal {
    /// Its number, to which shells add 128 for an exit code.
    pub fn number(self) -> i32 {
        match self {
            Self::Interrupt => libc::SIGINT,
            Self::Terminate => libc::SIGTERM,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        }
    }
}

/// SIGHUP, blocked in the same way: whoever waits for it reads its files again.
#[derive(Debug)]
pub struct HangUps(libc::sigset_t);

impl HangUps {
    /// Blocks it. Call it before the process has a second thread.
    ///
    /// # Errors
    /// What pthread_sigmask(3) says.
    pub fn block() -> io::Result<Self> {
        block(&[libc::SIGHUP]).map(Self)
    }

    /// Waits for the next one.
    ///
    /// # Errors
    /// What sigwait(3) says.
    pub fn wait(&self) -> io::Result<()> {
        wait(&self.0).map(|_| ())
    }
}

impl EndSignals {
    /// Blocks them. Call it before the process has a second thread: a thread
    /// in which they are not blocked would be ended by them, and all others
    /// with it.
    ///
    /// # Errors
    /// What pthread_sigmask(3) says.
    pub fn block() -> io::Result<Self> {
        block(&[EndSignal::Interrupt, EndSignal::Terminate].map(EndSignal::number)).map(Self)
    }

    /// Waits for the next one.
    ///
    /// # Errors
    /// What sigwait(3) says.
    pub fn wait(&self) -> io::Result<EndSignal> {
        Ok(if wait(&self.0)? == libc::SIGINT {
            EndSignal::Interrupt
        } else {
            EndSignal::Terminate
        })
    }
}

/// Has a program start with no signal blocked, whatever the thread blocks that starts it: one
/// that inherits the mask cannot be asked to end.
pub fn unblock_in(command: &mut Command) {
    let unblock = || mask(libc::SIG_SETMASK, &set_of(&[]));
    // SAFETY: between fork and exec only sigemptyset(3) and pthread_sigmask(3) run, which are safe
    // there (signal-safety(7)); nothing is allocated, and no lock is taken.
    unsafe { command.pre_exec(unblock) };
}

fn block(signals: &[i32]) -> io::Result<libc::sigset_t> {
    let set = set_of(signals);
    mask(libc::SIG_BLOCK, &set)?;
    Ok(set)
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `set` is valid for writes, and sigemptyset initialises all of it.
    let mut set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for &signal in signals {
        // SAFETY: `set` is a live, initialised set, and the number is a signal's.
        unsafe { libc::sigaddset(&mut set, signal) };
    }
    set
}

/// Changes the calling thread's mask as pthread_sigmask(3) does.
fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is live and initialised, and the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(how, set, ptr::null_mut()) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// The number of the next one.
fn wait(set: &libc::sigset_t) -> io::Result<i32> {
    let mut number = 0;
    // SAFETY: the set is live and initialised, and `number` is valid for writes.
    let code = unsafe { libc::sigwait(set, &mut number) };
    if code != 0 {
        return Err(io::Error::from_raw_os_error(code));
    }
    Ok(number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_program_can_be_asked_to_end_although_its_parent_blocks_that() {
        use std::os::unix::process::ExitStatusExt;
        let _signals = EndSignals::block().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "kill -TERM $$; exit 7"]);
        assert_eq!(command.status().unwrap().code(), Some(7));
        unblock_in(&mut command);
        assert_eq!(command.status().unwrap().signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn a_signal_waits_until_somebody_takes_it() {
        let signals = EndSignals::block().unwrap();
        for signal in [EndSignal::Terminate, EndSignal::Interrupt] {
            // SAFETY: it touches no memory; the signal is blocked in this thread, to which alone
            // it goes.
            let code = unsafe { libc::pthread_kill(libc::pthread_self(), signal.number()) };
            assert_eq!(code, 0);
            assert_eq!(signals.wait().unwrap(), signal);
        }
    }
}
