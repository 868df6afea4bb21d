//! The guest at the source: its dirty logs, its throttle and its pause.

use dunlin_proto::fault::FaultCode;

use super::super::fault::{Fault, OrFault, VmIs};
use super::super::lock;
use super::super::report::Event;
use super::super::vmm::{DirtyLog, RunState, SourceVm};
use super::session::Session;

/// The guest's run state; fails if the guest has ended.
pub(super) fn check_guest(vm: &dyn SourceVm) -> Result<RunState, Fault> {
    match vm.run_state() {
        RunState::PoweredOff => {
            let what = "the guest has powered itself off";
            Err(Fault::new(FaultCode::GuestPoweredOff, what))
        }
        RunState::Stopped(why) => {
            let what = format!("the guest has stopped: {why}");
            Err(Fault::new(FaultCode::GuestStopped, what))
        }
        state => Ok(state),
    }
}

/// A guest with dirty logs and a throttle.
#[derive(Default)]
pub(super) struct LoggedGuest {
    logs: Vec<Box<dyn DirtyLog>>,
    pub(super) throttle: u8,
}

impl LoggedGuest {
    pub(super) fn start(&mut self, session: &Session<'_>) -> Result<(), Fault> {
        self.logs = session.vm.dirty_logs();
        for log in &mut self.logs {
            log.start()
                .or_fault(FaultCode::Kernel, "cannot start dirty logging")?;
        }
        Ok(())
    }

    /// Fetches the dirty logs, and adds the reported pages to the pending pages. Returns how many
    /// pages the logs reported.
    pub(super) fn fetch(&mut self, session: &Session<'_>) -> Result<u64, Fault> {
        let mut named = 0;
        for log in &mut self.logs {
            log.fetch(&mut |index, words| {
                let mut state = lock(&session.work_queue.state);
                named += state.lanes.schedule_mut().mark_dirty(index, words);
            })
            .or_fault(FaultCode::Kernel, "cannot read the dirty log")?;
        }
        Ok(named)
    }

    pub(super) fn throttle(&mut self, session: &Session<'_>, percent: u8) {
        if percent == self.throttle {
            return;
        }
        match session.vm.throttle(percent) {
            Ok(true) => {
                self.throttle = percent;
                session.observer.event(&Event::Throttled { percent });
            }
            Ok(false) => {}
            Err(error) => session.warn(format!("cannot throttle the guest: {error}")),
        }
    }

    /// Stops the dirty logs and removes the throttle.
    pub(super) fn release(&mut self, session: &Session<'_>) {
        for mut log in self.logs.drain(..) {
            if let Err(error) = log.stop() {
                session.warn(format!("cannot stop dirty logging: {error}"));
            }
        }
        self.throttle(session, 0);
    }
}

/// A guest that is paused for the switchover.
pub(super) struct PausedGuest {
    pub(super) logged: LoggedGuest,
    /// Whether [`SourceVm::deactivate`] has been called.
    pub(super) deactivated: bool,
}

impl PausedGuest {
    /// Takes back the disks and devices, if they were released. Resumes the guest, unless the guest
    /// has ended or the owner had paused the VM. Returns where the VM is.
    pub(super) fn resume(&self, session: &Session<'_>) -> VmIs {
        // Ask the VMM whether the guest has ended, because a fault that the peer sent may state any
        // reason.
        let ended = check_guest(&**session.vm).is_err();
        let reactivated = !self.deactivated || self.reactivate(session);
        if ended {
            return VmIs::Gone;
        }
        if !reactivated {
            return VmIs::StuckAtSource;
        }
        if session.paused_by_owner {
            return VmIs::AtSource;
        }
        match session.vm.resume() {
            Ok(()) => VmIs::AtSource,
            Err(error) => {
                session.warn(format!("cannot resume the guest: {error}"));
                VmIs::StuckAtSource
            }
        }
    }

    /// Acquires disks and devices again; returns whether that succeeded.
    fn reactivate(&self, session: &Session<'_>) -> bool {
        let result = session.vm.reactivate();
        if let Err(error) = &result {
            session.warn(format!("cannot take back disks and devices: {error}"));
        }
        result.is_ok()
    }

    pub(super) fn destroy(&mut self, session: &Session<'_>) {
        self.logged.release(session);
        session.vm.destroy();
        session.observer.event(&Event::Running);
    }
}
