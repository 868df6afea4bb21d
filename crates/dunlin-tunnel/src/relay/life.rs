//! The states of a channel, and how its threads and the watch thread change them. This file uses no
//! sockets or threads.
//!
//! ```text
//!          abort
//! Relaying ─────▶ Aborted
//!     │              │
//!     │              │  both threads have ended
//!     ▼              ▼
//!  Settled ◀─────────┘
//! ```
//!
//! If one direction ends cleanly, the channel stays in `Relaying` until both threads have ended. No
//! transition leads back.

use crate::failure::Failure;

pub(super) enum Life {
    /// The state of each direction, and the number of threads that have not ended.
    Relaying(Inward, Outward, u8),
    /// The channel was aborted, for the first reason reported. The sockets are shut down, and the
    /// threads end.
    Aborted(Failure, u8),
    /// Both threads have ended.
    Settled,
}

/// The direction from the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inward {
    Open,
    /// The peer's connection was reset. The reading thread determines whether the peer's
    /// *close_notify* arrived before the reset.
    Reset,
    /// The peer has ended this direction cleanly.
    Ended,
    /// The peer has ended its direction, and data was sent to it after that.
    EndedThenSent,
}

/// The direction to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outward {
    Open,
    /// This side is sending its *close_notify*, or has sent it.
    Ended,
}

impl Life {
    /// The life of a channel with two threads.
    pub(super) fn new() -> Self {
        Self::Relaying(Inward::Open, Outward::Open, 2)
    }

    pub(super) fn is_relaying(&self) -> bool {
        matches!(self, Self::Relaying(..))
    }

    pub(super) fn is(&self, expected: Inward) -> bool {
        matches!(self, Self::Relaying(inward, ..) if *inward == expected)
    }

    /// Called before data is sent to the peer. Returns false if the channel is aborted.
    pub(super) fn send(&mut self) -> bool {
        if let Self::Relaying(inward @ Inward::Ended, ..) = self {
            *inward = Inward::EndedThenSent;
        }
        self.is_relaying()
    }

    /// Called when this side ends its direction. Returns false if the channel is aborted.
    pub(super) fn end_outward(&mut self) -> bool {
        if let Self::Relaying(_, outward, _) = self {
            *outward = Outward::Ended;
        }
        self.is_relaying()
    }

    /// Called when the peer has ended its direction. Returns true if data of this side is lost: the
    /// peer's connection was reset earlier, and this side has not ended its own direction.
    pub(super) fn end_inward(&mut self) -> bool {
        let loses_data = matches!(self, Self::Relaying(Inward::Reset, Outward::Open, _));
        if let Self::Relaying(inward @ (Inward::Open | Inward::Reset), ..) = self {
            *inward = Inward::Ended;
        }
        loses_data
    }

    /// Called when the peer's connection was reset. Returns true if the caller must abort the
    /// channel. The caller must do so if a thread has already read the peer's end and this side has
    /// not ended its own direction. In that case data of this side is lost, and no thread would
    /// find the reset, because none reads after the peer's end.
    pub(super) fn reset(&mut self) -> bool {
        if let Self::Relaying(inward @ Inward::Open, ..) = self {
            *inward = Inward::Reset;
        }
        matches!(self, Self::Relaying(inward, Outward::Open, _) if *inward != Inward::Reset)
    }

    /// Relaying → Aborted. In other states this changes nothing.
    pub(super) fn abort(&mut self, failure: Failure) {
        if let Self::Relaying(_, _, threads) = *self {
            *self = Self::Aborted(failure, threads);
        }
    }

    /// Called when a thread ends. When the last thread ends, the channel becomes settled, and this
    /// returns the channel's result.
    pub(super) fn leave(&mut self) -> Option<Result<(), Failure>> {
        let (Self::Relaying(_, _, threads) | Self::Aborted(_, threads)) = self else {
            return None;
        };
        *threads -= 1;
        if *threads > 0 {
            return None;
        }
        match std::mem::replace(self, Self::Settled) {
            Self::Aborted(failure, _) => Some(Err(failure)),
            _ => Some(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use dunlin_proto::fault::FaultCode;

    use super::*;

    const INWARD: [Inward; 4] = [
        Inward::Open,
        Inward::Reset,
        Inward::Ended,
        Inward::EndedThenSent,
    ];

    fn failure(code: FaultCode) -> Failure {
        Failure::new(code, "")
    }

    /// Every state with a given number of threads.
    fn states(threads: u8) -> Vec<Life> {
        let mut states = Vec::new();
        for outward in [Outward::Open, Outward::Ended] {
            states.extend(INWARD.map(|inward| Life::Relaying(inward, outward, threads)));
        }
        states.push(Life::Aborted(failure(FaultCode::Busy), threads));
        states.push(Life::Settled);
        states
    }

    fn name(life: &Life) -> String {
        match life {
            Life::Relaying(inward, outward, threads) => format!("{inward:?}/{outward:?}*{threads}"),
            Life::Aborted(failure, threads) => format!("{}*{threads}", failure.code()),
            Life::Settled => "Settled".to_owned(),
        }
    }

    /// Functions that each apply one event to a state, and format the value that the event returns.
    const EVENTS: [fn(&mut Life) -> String; 6] = [
        |life| format!(" {}", life.send()),
        |life| format!(" {}", life.end_outward()),
        |life| format!(" {}", life.end_inward()),
        |life| format!(" {}", life.reset()),
        |life| {
            life.abort(failure(FaultCode::Ended));
            String::new()
        },
        |life| match life.leave() {
            None => String::new(),
            Some(Ok(())) => " closed".to_owned(),
            Some(Err(failure)) => format!(" {}", failure.code()),
        },
    ];

    /// Returns one line per state: the result of each event, with the next state if it
    /// differs.
    fn table(threads: u8) -> String {
        let mut table = String::new();
        for number in 0..states(threads).len() {
            let before = name(&states(threads)[number]);
            table += &before;
            for event in EVENTS {
                let mut life = states(threads).remove(number);
                let returned = event(&mut life);
                let after = name(&life);
                let after = if after == before { "" } else { &after };
                table += &format!(" | {}", format!("{after}{returned}").trim());
            }
            table.push('\n');
        }
        table
    }

    #[test]
    fn each_event_in_each_state_has_one_outcome() {
        assert_eq!(table(2), TABLE);
    }

    /// Columns: send, end_outward, end_inward, reset, abort, leave.
    const TABLE: &str = "\
Open/Open*2 | true | Open/Ended*2 true | Ended/Open*2 false | Reset/Open*2 false | ended*2 | Open/Open*1
Reset/Open*2 | true | Reset/Ended*2 true | Ended/Open*2 true | false | ended*2 | Reset/Open*1
Ended/Open*2 | EndedThenSent/Open*2 true | Ended/Ended*2 true | false | true | ended*2 | Ended/Open*1
EndedThenSent/Open*2 | true | EndedThenSent/Ended*2 true | false | true | ended*2 | EndedThenSent/Open*1
Open/Ended*2 | true | true | Ended/Ended*2 false | Reset/Ended*2 false | ended*2 | Open/Ended*1
Reset/Ended*2 | true | true | Ended/Ended*2 false | false | ended*2 | Reset/Ended*1
Ended/Ended*2 | EndedThenSent/Ended*2 true | true | false | false | ended*2 | Ended/Ended*1
EndedThenSent/Ended*2 | true | true | false | false | ended*2 | EndedThenSent/Ended*1
busy*2 | false | false | false | false |  | busy*1
Settled | false | false | false | false |  | 
";

    #[test]
    fn the_last_thread_to_leave_settles_every_state() {
        let last_column = |line: &str| line.rsplit(" | ").next().unwrap_or_default().to_owned();
        let left: Vec<String> = table(1).lines().map(last_column).collect();
        let mut expected = vec!["Settled closed"; 8];
        expected.extend(["Settled busy", ""]);
        assert_eq!(left, expected);
    }
}
