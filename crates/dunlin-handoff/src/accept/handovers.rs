//! The hand-overs of one name that are in flight: until the receiver has read their lines.
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
    /// Too many clients over the limit wait until they have read their alert. The connection is
    /// closed without an alert.
    Close,
}

/// The hand-overs of one name.
#[derive(Debug, Default)]
pub(super) struct Handovers {
    /// The number of threads that serve clients of the name.
    pub(super) threads: usize,
    /// The connections to the receiver that carry a line and a socket. An open connection is the
    /// only way to query whether the receiver has read them.
    unread: Vec<UnixStream>,
}

impl Handovers {
    /// Admits a client, given the limit `most`, and counts its thread.
    pub(super) fn admit(&mut self, most: usize) -> Admission {
        let in_flight = self.in_flight();
        let admission = match in_flight {
            _ if in_flight < most => Admission::HandOver,
            _ if in_flight < 2 * most => Admission::Alert,
            _ => return Admission::Close,
        };
        self.threads += 1;
        admission
    }

    /// Counts a thread as ended. `passed` is the connection on which it passed a socket.
    pub(super) fn end(&mut self, passed: Option<UnixStream>) {
        self.threads -= 1;
        self.unread.extend(passed);
    }

    /// The number of hand-overs in flight. Closes the connections of lines that have been read.
    pub(super) fn in_flight(&mut self) -> usize {
        // The query does not fail for a unix socket. If it did, the connection would never end.
        self.unread.retain(|one| !is_received(one).unwrap_or(true));
        self.threads + self.unread.len()
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
        handovers.end(None);
        assert_eq!(handovers.admit(2), alert);
    }
}
