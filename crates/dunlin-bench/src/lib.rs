//! The harness of `dunlin bench` and `cargo xtask bench`.
//!
//! A benchmark runs its variants in turn, round after round, so that other load on the host affects
//! all of them. It adds each measurement to [`Results`], which computes the median, the minimum and
//! the maximum of every figure. [`Output`] then prints a table for people or JSON lines for
//! programs ([`Results::json`]), and writes a page with plots ([`report`]).
#![forbid(unsafe_code)]

mod output;
pub mod process;
mod progress;
pub mod report;
mod results;
mod table;
mod touch;

pub use output::Output;
pub use progress::Progress;
pub use results::{Comparison, Line, Results, Spread};
pub use touch::{TouchedMemory, available_bytes, touch_physical_memory};
