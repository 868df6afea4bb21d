//! Checks wire formats, journals and the switchover's table against their documents.

#![allow(clippy::unwrap_used)]

mod codec_properties;
mod document;
mod ipsec_vectors;
mod journal_vectors;
mod stripe_vectors;
mod switchover_table;
mod vectors;
mod wire_tables;
