//! `dunlin evacuate`: empties a host of its virtual machines. libvirt owns and moves them. This
//! command decides the order and the rates, and watches and reports the migrations.
//!
//! ```text
//!  virsh ─▶ host (asks one libvirt) ─▶ facts (all hosts) ─▶ plan (order, placement)
//!             │                                               │
//!             └─▶ carry (moves one VM, and asks both          ▼
//!                 hosts at its end) ───────────────────▶   command ─▶ show, record
//!                                                             │ events, actions
//!                                                          schedule
//! ```
//!
//! `plan`, `schedule`, `shares` and `verdict` decide, and have neither I/O nor a clock.

mod carry;
mod command;
mod facts;
mod flags;
mod host;
mod job;
mod plan;
mod record;
mod schedule;
mod shares;
mod show;
mod table;
mod verdict;
mod virsh;

pub(crate) use flags::Evacuate;
