//! The state of a trunk's control lane.

use std::sync::Arc;

use dunlin_lane::control::ControlStream;
use dunlin_proto::fault::FaultCode;

/// The control lane of a trunk. Each new one has a higher epoch than the previous one.
///
/// ```text
///         lost                  resumed
///   Up ─────────▶ Lost ─────────────────▶ Up
///   │               │
///   │ give up       │ give up
///   ▼    close      ▼
///   Closing ──────▶ Over
/// ```
///
/// In `Closing` and `Over` the trunk has ended, and no transition leads back. In `Up` and `Closing`
/// the stream is open. In `Closing` the talker closes it, so that the peer sees a clean end.
pub(super) enum Control {
    Up {
        epoch: u32,
        stream: Arc<ControlStream>,
    },
    Lost {
        epoch: u32,
    },
    Closing {
        fault: FaultCode,
        stream: Arc<ControlStream>,
    },
    Over {
        fault: FaultCode,
    },
}

impl Control {
    /// The reason why the trunk has ended, if it has.
    pub(super) fn fault(&self) -> Option<FaultCode> {
        match self {
            Self::Up { .. } | Self::Lost { .. } => None,
            Self::Closing { fault, .. } | Self::Over { fault } => Some(*fault),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.fault().is_some()
    }

    /// Whether `next` is the epoch of a later control lane, and the trunk has not ended.
    pub(super) fn is_before(&self, next: u32) -> bool {
        match self {
            Self::Up { epoch, .. } | Self::Lost { epoch } => *epoch < next,
            Self::Closing { .. } | Self::Over { .. } => false,
        }
    }

    /// Whether the control lane of this epoch is up.
    pub(super) fn is_up(&self, at: u32) -> bool {
        matches!(self, Self::Up { epoch, .. } if *epoch == at)
    }

    /// Up → Lost. Returns the lost stream; `None` if the control lane of this epoch is not up.
    pub(super) fn lose(&mut self, epoch: u32) -> Option<Arc<ControlStream>> {
        if !self.is_up(epoch) {
            return None;
        }
        match std::mem::replace(self, Self::Lost { epoch }) {
            Self::Up { stream, .. } => Some(stream),
            _ => None,
        }
    }

    /// Up or Lost → Up: replaces the control lane with a later one, and shuts down the old one if
    /// it is up. Returns false if `epoch` is not higher or the trunk has ended.
    pub(super) fn resume(&mut self, epoch: u32, stream: &Arc<ControlStream>) -> bool {
        if !self.is_before(epoch) {
            return false;
        }
        if let Self::Up { stream, .. } = self {
            stream.shutdown();
        }
        let stream = Arc::clone(stream);
        *self = Self::Up { epoch, stream };
        true
    }

    /// Up → Closing, Lost → Over. If the trunk has already ended, its first reason is kept.
    pub(super) fn give_up(&mut self, fault: FaultCode) {
        *self = match std::mem::replace(self, Self::Over { fault }) {
            Self::Up { stream, .. } => Self::Closing { fault, stream },
            Self::Lost { .. } => Self::Over { fault },
            over => over,
        };
    }

    /// Closing → Over. Returns the stream to close.
    pub(super) fn close(&mut self) -> Option<Arc<ControlStream>> {
        let fault = self.fault()?;
        match std::mem::replace(self, Self::Over { fault }) {
            Self::Closing { stream, .. } => Some(stream),
            _ => None,
        }
    }
}
