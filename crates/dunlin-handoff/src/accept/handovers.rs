//! The hand-overs of one name, while they are in flight. The receiver gets the socket and a line of
//! text that describes it. A hand-over ends when the receiver has read both or has closed the
//! connection, or when the client is refused.
//!
//! ```text
//!   admitted ─▶ a thread: keys, line, socket ─▶ the line is unread ─▶ ended
//!                       └─ refused ────────────────────────────────────▲
//! ```
//!
//! The kernel counts the sockets that one user has passed and that no process has received yet
//! (ETOOMANYREFS, unix(7)). All names share this allowance, so each name gets a part of it.

use std::os::unix::net::UnixStream;

use dunlin_linux::fdpass::is_received;

/// What happens to a client after its handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    HandOver,
    /// The client is over the limit, and gets an alert.
    Alert,
    /// The client is over the limit, and the limit of threads that send alerts is reached too. The
    /// client's connection is closed without an alert.
    Close,
}

/// The hand-overs of one name.
#[derive(Debug, Default)]
pub(super) struct Handovers {
    /// The number of threads that pass sockets.
    passing: usize,
    /// The number of threads that send alerts.
    alerting: usize,
    /// The connections to the receiver that carry a line and a socket. An open connection is the
    /// only way to query whether the receiver has read them.
    unread: Vec<UnixStream>,
}

impl Handovers {
    /// Admits a client, given the limit `most` of hand-overs and of alerts, and counts its thread.
    pub(super) fn admit(&mut self, most: usize) -> Admission {
        self.close_read();
        if self.passing + self.unread.len() < most {
            self.passing += 1;
            Admission::HandOver
        } else if self.alerting < most {
            self.alerting += 1;
            Admission::Alert
        } else {
            Admission::Close
        }
    }

    /// Counts the thread of an admitted client as ended. `passed` is the connection on which it passed
    /// a socket.
    pub(super) fn end(&mut self, admission: Admission, passed: Option<UnixStream>) {
        match admission {
            Admission::HandOver => self.passing -= 1,
            Admission::Alert => self.alerting -= 1,
            Admission::Close => {}
        }
        self.unread.extend(passed);
    }

    /// Closes the connections on which the receiver has read the line and the socket.
    pub(super) fn close_read(&mut self) {
        // The query does not fail for a unix socket. An error counts as read, because otherwise the
        // connection would never end.
        self.unread.retain(|one| !is_received(one).unwrap_or(true));
    }

    pub(super) fn threads(&self) -> usize {
        self.passing + self.alerting
    }

    pub(super) fn is_empty(&self) -> bool {
        self.threads() == 0 && self.unread.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i7_as_many_clients_as_the_limit_wait_for_an_alert() {
        let mut handovers = Handovers::default();
        let admitted = [(); 5].map(|()| handovers.admit(2));
        let [handover, alert] = [Admission::HandOver, Admission::Alert];
        assert_eq!(
            admitted,
            [handover, handover, alert, alert, Admission::Close]
        );
        // An alert that ends makes no room for a hand-over.
        handovers.end(alert, None);
        assert_eq!(handovers.admit(2), alert);
        // Clients that wait for their alert do not prevent the hand-over of other clients.
        handovers.end(handover, None);
        assert_eq!(handovers.admit(2), handover);
    }
}
