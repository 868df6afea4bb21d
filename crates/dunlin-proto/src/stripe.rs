//! The *stripe* of a tunnel: the bytes of many connections over many lanes.
//!
//! ```text
//!   near                             data lanes, one way each                  far
//!   socket ─▶ cut into chunks, ═══▶ any free lane          ═══▶ in order, ─▶ socket
//!             in turns                                          once
//!          ◀─ the same the other way, on lanes of that direction ───────
//!             control lane, both ways: open, credit, acknowledgements, eof …
//! ```
//!
//! Two tunnel processes share one *trunk*: a control lane, which may be lost and resumed, and data
//! lanes. A data lane carries data in one direction, so that blocked writers and readers cannot
//! form a cycle. [`Trunk`] is one side of a trunk and makes all decisions; [`frame`] and
//! [`message`] are its wire formats.
//!
//! **Lost lanes.** A sender keeps a chunk until it is acknowledged. If the lane is lost, the sender
//! resends the chunk, with the same bounds, on another lane. The bytes at an offset of a channel
//! never change, and channel numbers are never reused. It therefore does not matter whether, or
//! when, the lost lane's copy arrives too: no fence is needed, and nothing waits for one.
//!
//! **Lost control lanes.** Every message states a current value, not a change, and may arrive twice
//! or late. To resume a control lane, both sides send all current values again.
//!
//! **Memory (I8).** The window of a channel limits its bytes between the two sockets. A period of
//! one round trip plus 10 ms determines it: the window is 1.25 times the number of bytes that the
//! channel last delivered within such a period. The windows of all channels of a peer share a bound
//! ([`Config`]). A consumer that stalls fills its own window and delays no other channel.
//! [`Trunk::usage`] returns the bytes that are granted and held.
//!
//! **Ends.** Each direction ends independently, after its last byte. An abort takes effect
//! immediately, ahead of the bytes that wait. A side that has aborted or refused a channel keeps a
//! record of it until the other side confirms with *gone*. A channel that has ended in both
//! directions is forgotten without confirmation, and a later message about it is answered with
//! *gone*. Therefore a side that receives *gone* for a live channel treats the channel as ended
//! cleanly.

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
