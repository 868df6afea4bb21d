//! Runs and parks vCPUs. A parked vCPU's thread waits outside the guest. One lock synchronises the
//! vCPU threads with the callers that control them.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dunlin::lane::sync::{lock, wait};
use dunlin_linux::mapping::PAGE_BYTES;
use thiserror::Error;

/// The state of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmState {
    /// The machine has been built, or its state is being loaded. It has never run on this host.
    Created,
    /// The guest runs.
    Running,
    /// The guest is paused.
    Paused,
    /// The guest has powered itself off.
    PoweredOff,
    /// A check in the guest's program failed.
    Stopped(Stop),
    /// The machine failed. The text is the reason, for display.
    Failed(String),
    /// The machine has moved to another host. This copy must never run again (I1).
    Moved,
}

/// The state as text, for display and logs.
impl fmt::Display for VmState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Created => formatter.write_str("created"),
            Self::Running => formatter.write_str("running"),
            Self::Paused => formatter.write_str("paused"),
            Self::PoweredOff => formatter.write_str("powered-off"),
            Self::Stopped(stop) => write!(formatter, "stopped by a guest check: {stop}"),
            Self::Failed(why) => write!(formatter, "failed: {why}"),
            Self::Moved => formatter.write_str("moved"),
        }
    }
}

impl VmState {
    /// Returns an error unless the machine is new.
    pub(crate) fn must_be_created(&self) -> Result<(), ControlError> {
        match self {
            Self::Created => Ok(()),
            ended if ended.has_ended() => Err(ControlError::Ended(ended.clone())),
            _ => Err(ControlError::Started),
        }
    }

    /// Whether the machine can never run again.
    pub fn has_ended(&self) -> bool {
        match self {
            Self::Created | Self::Running | Self::Paused => false,
            Self::PoweredOff | Self::Stopped(_) | Self::Failed(_) | Self::Moved => true,
        }
    }
}

/// The report of a check that failed in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    /// The vCPU on which the check failed.
    pub vcpu: u8,
    /// The kind of error.
    pub code: StopCode,
    /// The page's frame number (address / 4096); 0 if no page is involved.
    pub frame: u64,
    /// The expected value.
    pub expected: u64,
    /// The value found.
    pub found: u64,
}

/// The error, its location and its code (see [`StopCode`]) as text, for display and logs.
impl fmt::Display for Stop {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            vcpu,
            code,
            frame,
            expected,
            found,
        } = self;
        // The guest writes the report, so the frame may be any number.
        let address = frame.wrapping_mul(PAGE_BYTES);
        match code {
            StopCode::WrongPass => write!(
                formatter,
                "code 1, vCPU {vcpu} found the page at {address:#x} in pass {found} instead of \
                 {expected}"
            ),
            StopCode::WrongContent => write!(
                formatter,
                "code 2, vCPU {vcpu} computed {found:#x} instead of {expected:#x} from the words \
                 of the page at {address:#x}"
            ),
            StopCode::LostSse => write!(formatter, "code 3, vCPU {vcpu} lost an SSE register"),
            StopCode::LostAvx => write!(formatter, "code 4, vCPU {vcpu} lost an AVX register"),
            StopCode::TscWentBack => write!(
                formatter,
                "code 5, vCPU {vcpu} read a TSC of {found} after {expected}"
            ),
            StopCode::Unknown(code) => write!(formatter, "unknown code {code} of vCPU {vcpu}"),
        }
    }
}

/// The kind of error that a check in the guest has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCode {
    /// 1: a page counts the guest's passes over it, and the count is wrong. The page is older or
    /// newer than expected.
    WrongPass,
    /// 2: a page's words do not match its signature.
    WrongContent,
    /// 3: an SSE register lost its value.
    LostSse,
    /// 4: the upper half of an AVX register lost its value.
    LostAvx,
    /// 5: the TSC went backwards.
    TscWentBack,
    /// Any other code.
    Unknown(u64),
}

impl From<u64> for StopCode {
    fn from(code: u64) -> Self {
        match code {
            1 => Self::WrongPass,
            2 => Self::WrongContent,
            3 => Self::LostSse,
            4 => Self::LostAvx,
            5 => Self::TscWentBack,
            _ => Self::Unknown(code),
        }
    }
}

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ControlError {
    /// The machine has ended.
    #[error("the machine has ended: {0}")]
    Ended(VmState),
    /// The machine has been started or loaded. Only a new machine can be filled, started or loaded.
    #[error("the machine has already been started or loaded")]
    Started,
    /// The machine was built from a description. Such a machine must be loaded and cannot be
    /// started.
    #[error("the machine was built for loading and cannot be started")]
    Empty,
    /// The machine has never run, so it is not paused. Only a paused machine can be resumed.
    #[error("the machine has not been started")]
    NotStarted,
    /// The throttle percentage would leave the guest no time to run.
    #[error("a throttle of {0} % is out of range (0–99 %)")]
    Throttle(u8),
}

#[derive(Debug)]
struct Inner {
    state: VmState,
    /// Set when the machine is dropped, so that its threads return.
    exits: bool,
    /// Number of parked vCPUs: their threads are outside the guest and have unlocked them.
    parked: u8,
    throttle_percent: u8,
}

impl Inner {
    /// Whether vCPUs may run the guest.
    fn runs(&self) -> bool {
        self.state == VmState::Running && !self.exits
    }
}

/// The state of a machine behind a lock, and a condition variable that signals its changes.
#[derive(Debug)]
pub(crate) struct Control {
    inner: Mutex<Inner>,
    changed: Condvar,
    vcpus: u8,
}

impl Control {
    pub(crate) fn new(vcpus: u8) -> Self {
        Self {
            inner: Mutex::new(Inner {
                state: VmState::Created,
                exits: false,
                parked: vcpus,
                throttle_percent: 0,
            }),
            changed: Condvar::new(),
            vcpus,
        }
    }

    fn wait<'a>(&self, inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        wait(&self.changed, inner, None)
    }

    /// Waits until `waits` returns false or `deadline` has passed.
    fn wait_while(
        &self,
        deadline: Instant,
        waits: impl Fn(&Inner) -> bool,
    ) -> MutexGuard<'_, Inner> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.inner), left, |inner| waits(inner));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn state(&self) -> VmState {
        lock(&self.inner).state.clone()
    }

    /// Runs the machine from the state `from`, which is `Created` or `Paused`. Resuming a running
    /// machine has no effect.
    pub(crate) fn run(&self, from: VmState) -> Result<(), ControlError> {
        let mut inner = lock(&self.inner);
        match &inner.state {
            state if *state == from => {}
            VmState::Created => return Err(ControlError::NotStarted),
            VmState::Running if from == VmState::Paused => return Ok(()),
            VmState::Running | VmState::Paused => return Err(ControlError::Started),
            ended => return Err(ControlError::Ended(ended.clone())),
        }
        inner.state = VmState::Running;
        self.changed.notify_all();
        Ok(())
    }

    /// Makes every vCPU park. `wake` makes vCPUs that run the guest leave it. Returns when
    /// all vCPUs are parked or another thread has resumed the machine.
    pub(crate) fn pause(&self, wake: impl Fn()) -> Result<(), ControlError> {
        let mut inner = lock(&self.inner);
        if inner.state == VmState::Running {
            inner.state = VmState::Paused;
            self.changed.notify_all();
            drop(inner);
            wake();
            inner = lock(&self.inner);
        }
        // Another thread may have resumed the machine in the meantime. If so, stop waiting.
        while inner.parked < self.vcpus && !inner.runs() {
            inner = self.wait(inner);
        }
        match &inner.state {
            state if state.has_ended() => Err(ControlError::Ended(state.clone())),
            _ => Ok(()),
        }
    }

    /// Calls `load` to load a source's state into a new machine. If `load` fails, the machine
    /// enters the state `Failed`.
    pub(crate) fn load<T, E: std::error::Error + From<ControlError>>(
        &self,
        load: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut inner = lock(&self.inner);
        inner.state.must_be_created()?;
        let result = load();
        inner.state = match &result {
            Ok(_) => VmState::Paused,
            Err(error) => VmState::Failed(format!("cannot load the machine's state: {error}")),
        };
        self.changed.notify_all();
        result
    }

    /// Ends the machine: sets `state`, unless the machine has already ended. `wake` makes every
    /// vCPU that runs the guest leave it.
    pub(crate) fn end(&self, state: VmState, wake: impl Fn()) {
        let mut inner = lock(&self.inner);
        if inner.state.has_ended() {
            return;
        }
        inner.state = state;
        self.changed.notify_all();
        drop(inner);
        wake();
    }

    /// Waits until the machine has ended or `deadline` has passed.
    pub(crate) fn wait_until_ended(&self, deadline: Instant) -> VmState {
        let inner = self.wait_while(deadline, |inner| !inner.state.has_ended());
        inner.state.clone()
    }

    /// Makes every vCPU thread return.
    pub(crate) fn exit(&self, wake: impl Fn()) {
        lock(&self.inner).exits = true;
        self.changed.notify_all();
        wake();
    }

    pub(crate) fn set_throttle(&self, percent: u8) {
        lock(&self.inner).throttle_percent = percent;
        self.changed.notify_all();
    }

    pub(crate) fn throttle_percent(&self) -> u8 {
        lock(&self.inner).throttle_percent
    }

    /// Waits until the vCPU may run. Returns false if the vCPU's thread must return.
    pub(crate) fn wait_to_run(&self) -> bool {
        let mut inner = lock(&self.inner);
        while !inner.runs() {
            if inner.exits {
                return false;
            }
            inner = self.wait(inner);
        }
        inner.parked -= 1;
        true
    }

    /// Records that a vCPU thread has unlocked its vCPU.
    pub(crate) fn park(&self) {
        lock(&self.inner).parked += 1;
        self.changed.notify_all();
    }

    /// Whether a vCPU may enter the guest.
    pub(crate) fn may_run(&self) -> bool {
        lock(&self.inner).runs()
    }

    /// Waits until `due`. Returns false if the vCPU must leave the guest before that time.
    pub(crate) fn wait_until(&self, due: Instant) -> bool {
        self.wait_while(due, Inner::runs).runs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    #[test]
    fn a_failed_load_wakes_a_thread_that_waits_for_the_end() {
        const LIMIT: Duration = Duration::from_secs(60);
        let control = Control::new(1);
        let (ended, wait) = channel();
        std::thread::scope(|scope| {
            let far = Instant::now() + 10 * LIMIT;
            let (control, other) = (&control, ended.clone());
            let thread = scope.spawn(move || other.send(control.wait_until_ended(far)));
            // The test cannot see whether the thread waits yet. If it does not, the test passes, but
            // has not tested the wake-up.
            std::thread::sleep(Duration::from_millis(50));
            assert!(!thread.is_finished());
            let failed = control.load(|| Err::<(), _>(ControlError::Started));
            assert!(matches!(failed, Err(ControlError::Started)));
            let state = wait.recv_timeout(LIMIT);
            // End the thread before the assertion: the scope waits for the thread even if the
            // assertion fails.
            control.end(VmState::Failed(String::new()), || {});
            control.exit(|| {});
            assert!(matches!(state, Ok(VmState::Failed(_))), "{state:?}");
        });
    }
}
