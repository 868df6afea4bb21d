//! One rate cap for several sessions, with fair shares.
//!
//! Each lane asks for the bytes of its next chunk and waits until they are granted. Requests of one
//! session are granted in order. Among sessions, the one that has got the least comes first
//! (start-time fair queueing: Goyal, Vin and Cheng, 1996). Sessions that always have a request
//! therefore get equal shares. They also divide equally what the other sessions do not use. An idle
//! session does not save up a share for later.
//!
//! Getter: [`Shares::first`]. Commands: [`Shares::request`], [`Shares::claim`],
//! [`Shares::abandon`]. The caller supplies the current time. After each grant and each abandoned
//! request, the caller wakes the lane of [`Shares::first`].

use std::collections::{BTreeMap, VecDeque};

use crate::pace::BURST_NS;

/// A rate cap and the requests that wait for it.
#[derive(Clone, Debug)]
pub struct Shares {
    bytes_per_s: u64,
    /// When the next request may be granted.
    free_at_ns: u64,
    /// The virtual time of start-time fair queueing: the start tag of the most recently granted
    /// request, in bytes.
    virtual_now: u64,
    sessions: BTreeMap<u64, Session>,
    next_ticket: u64,
}

#[derive(Clone, Debug, Default)]
struct Session {
    /// The start tag of the first waiting request, in bytes; the finish tag of the last request if
    /// no request waits.
    start: u64,
    waiting: VecDeque<Request>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    ticket: u64,
    bytes: u64,
}

/// The answer to [`Shares::claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The bytes may be read now.
    Granted,
    /// The request is granted next. Claim it again at this time, in nanoseconds.
    At(u64),
    /// Another request is before this one.
    Later,
}

impl Shares {
    /// Creates a cap of `bytes_per_s`.
    #[must_use]
    pub fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s: bytes_per_s.max(1),
            free_at_ns: 0,
            virtual_now: 0,
            sessions: BTreeMap::new(),
            next_ticket: 0,
        }
    }

    /// Adds a request of a session; returns its ticket.
    pub fn request(&mut self, session: u64, bytes: u64) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let now = self.virtual_now;
        let session = self.sessions.entry(session).or_default();
        if session.waiting.is_empty() {
            session.start = session.start.max(now);
        }
        session.waiting.push_back(Request { ticket, bytes });
        ticket
    }

    /// The ticket of the request that is granted next.
    #[must_use]
    pub fn first(&self) -> Option<u64> {
        let (_, session) = self.next()?;
        session.waiting.front().map(|request| request.ticket)
    }

    fn next(&self) -> Option<(u64, &Session)> {
        let waiting = self.sessions.iter().filter(|(_, s)| !s.waiting.is_empty());
        let next = waiting.min_by_key(|(_, session)| session.start);
        next.map(|(number, session)| (*number, session))
    }

    /// Grants the request with this ticket if it is the next one and its time has come.
    pub fn claim(&mut self, ticket: u64, now_ns: u64) -> Claim {
        if self.first() != Some(ticket) {
            return Claim::Later;
        }
        if self.free_at_ns > now_ns {
            return Claim::At(self.free_at_ns);
        }
        let number = self.next().map(|(number, _)| number);
        let session = number.and_then(|number| self.sessions.get_mut(&number));
        if let Some(session) = session
            && let Some(request) = session.waiting.pop_front()
        {
            self.virtual_now = session.start;
            session.start = session.start.saturating_add(request.bytes);
            let cost = u128::from(request.bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
            let from = self.free_at_ns.max(now_ns.saturating_sub(BURST_NS));
            self.free_at_ns = from.saturating_add(u64::try_from(cost).unwrap_or(u64::MAX));
            self.forget();
        }
        Claim::Granted
    }

    /// Removes a request that was not granted.
    pub fn abandon(&mut self, ticket: u64) {
        for session in self.sessions.values_mut() {
            session.waiting.retain(|request| request.ticket != ticket);
        }
        self.forget();
    }

    /// Forgets each session without a waiting request and with a start tag of at most
    /// `virtual_now`. This changes nothing, because [`Shares::request`] would raise the tag to
    /// `virtual_now`.
    fn forget(&mut self) {
        let now = self.virtual_now;
        self.sessions
            .retain(|_, session| !session.waiting.is_empty() || session.start > now);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    /// One lane for each session. The lane of session `n` asks for `sizes[n]` bytes at a time, and
    /// asks again `pauses_ns[n]` after each grant.
    struct Lanes {
        shares: Shares,
        sizes: Vec<u64>,
        pauses_ns: Vec<u64>,
    }

    impl Lanes {
        /// Runs for `until_ns`; returns the bytes of each session, and the time during which a
        /// request waited although the rate was not used up.
        fn run(&mut self, until_ns: u64) -> (Vec<u64>, u64) {
            let count = self.sizes.len();
            let mut got = vec![0; count];
            // Each session's ticket, or the time of its next request.
            let mut lanes: Vec<Result<u64, u64>> = vec![Err(0); count];
            let (mut now, mut wasted_ns) = (0, 0);
            while now < until_ns {
                for (session, lane) in lanes.iter_mut().enumerate() {
                    if lane.is_err_and(|at| at <= now) {
                        let bytes = self.sizes[session];
                        *lane = Ok(self.shares.request(session as u64, bytes));
                    }
                }
                let mut next = lanes.iter().filter_map(|lane| lane.err()).min();
                for session in 0..count {
                    let Ok(ticket) = lanes[session] else { continue };
                    match self.shares.claim(ticket, now) {
                        Claim::Granted => {
                            got[session] += self.sizes[session];
                            lanes[session] = Err(now + self.pauses_ns[session]);
                            next = Some(now);
                        }
                        Claim::At(at) => {
                            // A request waits at most as long as the bytes before it take to send.
                            let longest = self.sizes.iter().max().copied().unwrap_or(0);
                            let most = longest * SECOND_NS / self.shares.bytes_per_s;
                            wasted_ns += (at - now).saturating_sub(most);
                            next = Some(next.map_or(at, |next| next.min(at)));
                        }
                        Claim::Later => {}
                    }
                }
                now = next.unwrap_or(until_ns).max(now);
            }
            (got, wasted_ns)
        }
    }

    fn lanes(rate: u64, sizes: Vec<u64>, pauses_ns: Vec<u64>) -> Lanes {
        Lanes {
            shares: Shares::new(rate),
            sizes,
            pauses_ns,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn sessions_that_always_ask_get_equal_shares_of_the_whole_rate(
            rate in (4_u64 << 20)..(256 << 20),
            sizes in prop::collection::vec(4096_u64..(256 << 10), 1..8),
        ) {
            let count = sizes.len();
            let (got, wasted_ns) = lanes(rate, sizes.clone(), vec![0; count]).run(4 * SECOND_NS);
            // The bytes of two sessions differ by at most the sum of one request of each (Goyal, Vin
            // and Cheng, theorem 1).
            for (one, other) in (0..count).flat_map(|one| (0..one).map(move |other| (one, other))) {
                let most = sizes[one] + sizes[other];
                prop_assert!(got[one].abs_diff(got[other]) <= most, "{got:?} with {sizes:?}");
            }
            let all: u64 = got.iter().sum();
            prop_assert!(all.abs_diff(4 * rate) < 4 * rate / 20, "{got:?} of {}", 4 * rate);
            prop_assert_eq!(wasted_ns, 0);
        }

        #[test]
        fn what_one_session_does_not_use_the_others_get(
            rate in (16_u64 << 20)..(256 << 20),
            size in 4096_u64..(256 << 10),
        ) {
            // The first session asks for about a tenth of the rate.
            let pause = size * 10 * SECOND_NS / rate;
            let mut lanes = lanes(rate, vec![size; 3], vec![pause, 0, 0]);
            let (got, wasted_ns) = lanes.run(4 * SECOND_NS);
            let all: u64 = got.iter().sum();
            prop_assert!(all.abs_diff(4 * rate) < 4 * rate / 20, "{got:?} of {}", 4 * rate);
            prop_assert!(got[0] < 4 * rate / 8, "{got:?}");
            prop_assert!(got[1].abs_diff(got[2]) < rate / 20, "{got:?}");
            prop_assert_eq!(wasted_ns, 0);
        }
    }

    #[test]
    fn an_idle_session_saves_up_nothing() {
        const BYTES: u64 = 1 << 16;
        let mut shares = Shares::new(1 << 20);
        let mut now = 0;
        // Session 0 alone, for ten seconds.
        for _ in 0..160 {
            let ticket = shares.request(0, BYTES);
            while let Claim::At(at) = shares.claim(ticket, now) {
                now = at;
            }
        }
        // Then both sessions ask, and take turns.
        let mut tickets = Vec::new();
        for _ in 0..8 {
            tickets.extend([0, 1].map(|session| (shares.request(session, BYTES), session)));
        }
        let mut got = [0, 0];
        for _ in 0..8 {
            let first = shares.first();
            let &(ticket, session) = tickets
                .iter()
                .find(|(ticket, _)| Some(*ticket) == first)
                .unwrap();
            while let Claim::At(at) = shares.claim(ticket, now) {
                now = at;
            }
            got[session as usize] += 1;
        }
        assert_eq!(got, [4, 4]);
    }

    #[test]
    fn an_abandoned_request_delays_no_other() {
        let mut shares = Shares::new(1 << 20);
        let (first, second) = (shares.request(0, 1 << 20), shares.request(1, 1 << 20));
        assert_eq!(shares.claim(second, 0), Claim::Later);
        shares.abandon(first);
        assert_eq!(shares.claim(second, SECOND_NS), Claim::Granted);
        assert_eq!(shares.first(), None);
    }
}
