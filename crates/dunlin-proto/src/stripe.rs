//! A tunnel's *stripe*: the bytes of many connections over many lanes.
//!
//! ```text
//!   near                             data lanes, one way each                  far
//!   socket ─▶ cut into chunks, ═══▶ whichever lane is free ═══▶ in order, ─▶ socket
//!             a turn each                                       once
//!          ◀─ the same the other way, on lanes that the far side opens ─
//!             control lane, both ways: open, credit, acknowledgements, eof …
//! ```
//!
//! Two tunnel processes have one *trunk*: a control lane, which may be
//! lost and resumed, and data lanes. Data lanes carry data one way, so that no
//! circle of blocked writers and readers can form. [`Trunk`] is one side
//! of it and decides everything; [`frame`] and [`message`] are what it says to
//! the other.
//!
//! **Lost lanes.** A chunk is kept until it is acknowledged, and goes out again
//! on another lane, with the same bounds, when its lane is lost. The bytes at an
//! offset of a channel never change and no channel has the number of an earlier
//! one; so it does not matter whether the lost lane's copy arrives too, and when:
//! there is nothing to fence, and nothing to wait for.
//!
//! **Lost control lanes.** Every message says how something stands and may be
//! heard twice or late. A new control lane is resumed by both sides saying all of
//! it again.
//!
//! **Memory (I8).** A channel's bytes between its two sockets are within its
//! window, which covers what it has delivered in the last round trip and 10 ms,
//! and the windows of a peer are within a common bound ([`Config`]). A consumer
//! that stalls keeps its window full and nobody else waiting. [`Trunk::granted`]
//! and [`Trunk::held`] tell what is granted and here.
//!
//! **Ends.** An end is passed on after the last byte before it, each way by
//! itself; an abort at once, before all that waits. A side that has aborted or
//! refused a channel remembers so until the other confirms with *gone*; it
//! forgets one that has ended both ways without asking, and answers *gone* when
//! asked about it. So *gone* about a living channel means that it ended well.

mod fault;
pub mod frame;
mod inbound;
mod lanes;
pub mod message;
mod outbound;
mod receiving;
mod trunk;
mod turns;
mod window;

pub use crate::lanes::{KeyUsage, Timeouts};
pub use fault::PeerFault;
pub use inbound::{Arrival, Delivery};
pub use receiving::ACK_DELAY_NS;
pub use trunk::{Action, Config, Left, OpenError, Opening, Outcome, Side, Trunk, Usage, Work};
pub use window::SLACK_NS;
