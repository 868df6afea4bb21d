//! Counts the members of a bounded set, such as the channels or programs of a peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A member of a bounded set. Dropping this removes the member.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// Adds a member; `None` if the set already has its maximum of `most` members.
    pub(super) fn one_more(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let one = Self(Arc::clone(count));
        (one.0.fetch_add(1, Ordering::SeqCst) < most).then_some(one)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i8_no_more_than_the_limit_are_counted_and_a_dropped_one_is_freed() {
        let count = Arc::default();
        let one = Counted::one_more(&count, 1);
        assert!(one.is_some());
        assert!(Counted::one_more(&count, 1).is_none());
        drop(one);
        assert_eq!(count.load(Ordering::SeqCst), 0);
        assert!(Counted::one_more(&count, 1).is_some());
    }
}
