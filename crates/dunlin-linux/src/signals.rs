//! Termination and hang-up signals. A thread waits for them (sigwait(3)), because a signal handler
//! may safely call only a few functions (signal-safety(7)).

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

/// SIGINT and SIGTERM, blocked in the thread that created this value and in the threads and
/// programs that it starts later; see [`unblock_in`].
#[derive(Debug)]
pub struct EndSignals(libc::sigset_t);

/// A signal that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndSignal {
    /// SIGINT: Ctrl-C in a terminal.
    Interrupt,
    /// SIGTERM: from a supervisor or kill(1).
    Terminate,
}

impl EndSignal {
    /// The signal's number. If the signal terminates a program, a shell reports 128 plus this
    /// number as the program's exit code.
    pub fn number(self) -> i32 {
        match self {
            Self::Interrupt => libc::SIGINT,
            Self::Terminate => libc::SIGTERM,
        }
    }

    /// The signal's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        }
    }
}

/// SIGHUP, the request to reload the configuration. It is blocked like the signals of
/// [`EndSignals`].
#[derive(Debug)]
pub struct HangUps(libc::sigset_t);

impl HangUps {
    /// Blocks SIGHUP. Call it before the process has a second thread.
    ///
    /// # Errors
    /// An error from pthread_sigmask(3).
    pub fn block() -> io::Result<Self> {
        block(&[libc::SIGHUP]).map(Self)
    }

    /// Waits for the next SIGHUP.
    ///
    /// # Errors
    /// An error from sigwait(3).
    pub fn wait(&self) -> io::Result<()> {
        wait(&self.0).map(|_| ())
    }
}

impl EndSignals {
    /// Blocks SIGINT and SIGTERM. Call it before the process has a second thread: if one thread does
    /// not block them, the kernel delivers them to that thread, and they terminate the process.
    ///
    /// # Errors
    /// An error from pthread_sigmask(3).
    pub fn block() -> io::Result<Self> {
        block(&[EndSignal::Interrupt, EndSignal::Terminate].map(EndSignal::number)).map(Self)
    }

    /// Waits for the next SIGINT or SIGTERM.
    ///
    /// # Errors
    /// An error from sigwait(3).
    pub fn wait(&self) -> io::Result<EndSignal> {
        Ok(if wait(&self.0)? == libc::SIGINT {
            EndSignal::Interrupt
        } else {
            EndSignal::Terminate
        })
    }
}

/// Makes `command` start its program with no signal blocked. Otherwise the program inherits the
/// calling thread's mask, and a blocked SIGTERM does not terminate it.
pub fn unblock_in(command: &mut Command) {
    let unblock = || mask(libc::SIG_SETMASK, &set_of(&[]));
    // SAFETY: between fork and exec, `unblock` calls only sigemptyset(3) and pthread_sigmask(3),
    // which are async-signal-safe (signal-safety(7)). It allocates nothing and takes no lock.
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
        // SAFETY: `set` is live and initialised, and `signal` is a signal number.
        unsafe { libc::sigaddset(&mut set, signal) };
    }
    set
}

/// Changes the calling thread's mask as pthread_sigmask(3) does.
fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is live and initialised; a null pointer for the old mask is allowed.
    match unsafe { libc::pthread_sigmask(how, set, ptr::null_mut()) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Waits for a signal of `set` and returns its number.
fn wait(set: &libc::sigset_t) -> io::Result<i32> {
    let mut number = 0;
    // SAFETY: `set` is live and initialised, and `number` is valid for writes.
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
    fn a_program_can_be_terminated_although_its_parent_blocks_the_signal() {
        use std::os::unix::process::ExitStatusExt;
        let _signals = EndSignals::block().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "kill -TERM $$; exit 7"]);
        assert_eq!(command.status().unwrap().code(), Some(7));
        unblock_in(&mut command);
        assert_eq!(command.status().unwrap().signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn a_blocked_signal_stays_pending_until_wait() {
        let signals = EndSignals::block().unwrap();
        for signal in [EndSignal::Terminate, EndSignal::Interrupt] {
            // SAFETY: pthread_self is a live thread, and pthread_kill accesses no memory of this
            // program. The signal goes to this thread only, and this thread blocks it.
            let code = unsafe { libc::pthread_kill(libc::pthread_self(), signal.number()) };
            assert_eq!(code, 0);
            assert_eq!(signals.wait().unwrap(), signal);
        }
    }
}
