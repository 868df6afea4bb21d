//! The rate at which a listener's sessions receive together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dunlin_proto::shares::{Claim, Shares};

use super::super::sync::{Condvar, Mutex, lock, wait};
use super::super::threads::nanos;

/// A waiting lane checks at least once in this time whether it must end.
const CHECK: Duration = Duration::from_millis(50);

/// A rate cap that several sessions share.
pub(super) struct Pacer {
    since: Instant,
    state: Mutex<State>,
}

struct State {
    shares: Shares,
    /// The condition variable of each waiting lane, by the ticket of the lane's request.
    lanes: BTreeMap<u64, Arc<Condvar>>,
}

/// One session's access to a [`Pacer`].
#[derive(Clone)]
pub(super) struct Share {
    pub(super) pacer: Arc<Pacer>,
    /// A number that no other session has.
    pub(super) session: u64,
}

impl Pacer {
    pub(super) fn new(bytes_per_s: u64) -> Arc<Self> {
        Arc::new(Self {
            since: Instant::now(),
            state: Mutex::new(State {
                shares: Shares::new(bytes_per_s),
                lanes: BTreeMap::new(),
            }),
        })
    }

    fn now(&self) -> u64 {
        nanos(self.since.elapsed())
    }
}

impl Share {
    /// Waits until the session may receive `bytes`. Returns false if `goes_on` has become false.
    pub(super) fn take(&self, bytes: u64, goes_on: impl Fn() -> bool) -> bool {
        let pacer = &self.pacer;
        let changed = Arc::<Condvar>::default();
        let mut state = lock(&pacer.state);
        let ticket = state.shares.request(self.session, bytes);
        state.lanes.insert(ticket, Arc::clone(&changed));
        let granted = loop {
            let now = pacer.now();
            let limit = match state.shares.claim(ticket, now) {
                Claim::Granted => break true,
                Claim::At(at) => CHECK.min(Duration::from_nanos(at - now)),
                Claim::Later => CHECK,
            };
            if !goes_on() {
                state.shares.abandon(ticket);
                break false;
            }
            state = wait(&changed, state, Some(limit));
        };
        state.lanes.remove(&ticket);
        let first = state.shares.first();
        if let Some(next) = first.and_then(|first| state.lanes.get(&first)) {
            next.notify_all();
        }
        granted
    }
}
