//! A simulated connection, which replaces a socket. It has its own locks, so a mistake that a test
//! plants in the engine's locks does not affect it.

use std::collections::VecDeque;
use std::sync::Arc;

use shuttle::sync::{Condvar, Mutex};

use super::super::sync::Interrupt;

/// A frame of a data lane.
pub(super) enum Frame {
    /// A chunk: its number, its iteration, and pages with their versions.
    Chunk(u64, u32, Vec<(usize, u32)>),
    Mark(u32),
    /// The end of the lane, with the number of chunks that were sent on it.
    End(u64),
}

#[derive(Default)]
pub(super) struct Connection {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    in_flight: VecDeque<Frame>,
    /// The sender sends no more frames; frames in flight still arrive.
    closed: bool,
    /// The receiver gets no more frames.
    ended: bool,
}

impl Connection {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns false if the connection has ended.
    pub(super) fn send(&self, frame: Frame) -> bool {
        let mut state = self.state.lock().unwrap();
        let open = !state.closed && !state.ended;
        if open {
            state.in_flight.push_back(frame);
        }
        drop(state);
        self.changed.notify_all();
        open
    }

    /// The next frame; `None` if no further frame can arrive.
    pub(super) fn receive(&self) -> Option<Frame> {
        let mut state = self.state.lock().unwrap();
        loop {
            if state.ended {
                return None;
            }
            if let Some(frame) = state.in_flight.pop_front() {
                return Some(frame);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Waits for the end of a connection that carries no frames.
    pub(super) fn await_end(&self) {
        assert!(self.receive().is_none());
    }

    /// Ends the connection at the sender or in the network. Frames in flight still arrive.
    pub(super) fn close(&self) {
        self.state.lock().unwrap().closed = true;
        self.changed.notify_all();
    }

    /// Returns a function that ends the connection for the receiver. Unread frames are then lost.
    pub(super) fn interrupt(self: &Arc<Self>) -> Interrupt {
        let connection = Arc::clone(self);
        Box::new(move || {
            connection.state.lock().unwrap().ended = true;
            connection.changed.notify_all();
        })
    }
}
