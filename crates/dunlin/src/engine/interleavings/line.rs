//! A connection without a socket. It has no part in the mistakes that are
//! planted in the engine's locks.

use std::collections::VecDeque;
use std::sync::Arc;

use shuttle::sync::{Condvar, Mutex};

use super::super::sync::Interrupt;

/// What a data lane carries.
pub(super) enum Frame {
    /// A chunk: its number, its iteration, and pages with their versions.
    Chunk(u64, u32, Vec<(usize, u32)>),
    Mark(u32),
    /// The end, and how many chunks there were.
    End(u64),
}

#[derive(Default)]
pub(super) struct Line {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    under_way: VecDeque<Frame>,
    /// Nothing more comes; what is under way still arrives.
    closed: bool,
    /// Nothing arrives any more.
    ended: bool,
}

impl Line {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// False where the connection is gone.
    pub(super) fn send(&self, frame: Frame) -> bool {
        let mut state = self.state.lock().unwrap();
        let stands = !state.closed && !state.ended;
        if stands {
            state.under_way.push_back(frame);
        }
        drop(state);
        self.changed.notify_all();
        stands
    }

    /// The next frame; `None` where none can come.
    pub(super) fn receive(&self) -> Option<Frame> {
        let mut state = self.state.lock().unwrap();
        loop {
            if state.ended {
                return None;
            }
            if let Some(frame) = state.under_way.pop_front() {
                return Some(frame);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Waits for bytes that never come.
    pub(super) fn await_end(&self) {
        assert!(self.receive().is_none());
    }

    /// The sender is gone, or the network between the two.
    pub(super) fn close(&self) {
        self.state.lock().unwrap().closed = true;
        self.changed.notify_all();
    }

    /// Closes the receiver's end, with whatever has not been read.
    pub(super) fn interrupt(self: &Arc<Self>) -> Interrupt {
        let line = Arc::clone(self);
        Box::new(move || {
            line.state.lock().unwrap().ended = true;
            line.changed.notify_all();
        })
    }
}
