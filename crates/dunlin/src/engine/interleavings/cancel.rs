//! Scenarios of a cancellation, and of the backlog of a control lane.

use std::sync::Arc;

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::mpsc::channel;
use shuttle::thread::spawn;

use super::super::control::{Backlog, QUEUED_MESSAGES};
use super::super::host::Cancel;
use super::connection::Connection;

/// A cancellation ends the session at any time: while it connects, while it waits for
/// events, and in between.
pub(super) fn cancellation() {
    let cancel = Cancel::new();
    let operator = {
        let cancel = cancel.clone();
        spawn(move || cancel.cancel())
    };
    let connection = Connection::new();
    let interrupting = cancel.listen(connection.interrupt());
    if thread_rng().r#gen() {
        // The peer never answers.
        connection.await_end();
    } else {
        drop(interrupting);
        let (events, cancelled) = channel();
        let _listening = cancel.listen(move || events.send(()).unwrap());
        cancelled.recv().expect("the listener was dropped");
    }
    assert!(cancel.is_cancelled());
    operator.join().unwrap();
}

/// A reader waits while too many messages are queued, and continues when one is taken.
pub(super) fn backlog() {
    const MESSAGES: usize = QUEUED_MESSAGES + 4;
    let backlog = Arc::new(Backlog::default());
    let (messages, read) = channel();
    let reader = {
        let backlog = Arc::clone(&backlog);
        spawn(move || {
            for message in 0..MESSAGES {
                backlog.await_room();
                messages.send(message).unwrap();
            }
        })
    };
    for expected in 0..MESSAGES {
        assert_eq!(read.recv(), Ok(expected));
        backlog.took();
    }
    reader.join().unwrap();
}

/// A reader that waits in `await_room` ends when the lane is closed. Before it ends, it queues at
/// most one message more than the limit.
pub(super) fn backlog_closes() {
    let backlog = Arc::new(Backlog::default());
    let (messages, read) = channel();
    let reader = {
        let backlog = Arc::clone(&backlog);
        spawn(move || {
            while !backlog.is_closed() {
                backlog.await_room();
                messages.send(()).unwrap();
            }
        })
    };
    read.recv().expect("the reader has ended");
    backlog.took();
    read.recv().expect("the reader has ended");
    backlog.close();
    reader.join().unwrap();
    assert!(read.iter().count() <= QUEUED_MESSAGES + 1);
}
