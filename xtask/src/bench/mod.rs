//! `cargo xtask bench`: Dunlin beside other programs, on this host, in one run.
//!
//! - [`tunnel`]: what the tunnel carries, beside a pair of stunnels, a pair
//!   of programs that seal nothing, and no tunnel at all.

mod ends;
mod figures;
mod forward;
mod load;
mod migration;
mod program;
pub mod tunnel;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// The tunnel: bytes through stunnel, relay and stripe, round trips, and QEMU's downtime.
    Tunnel(tunnel::TunnelOptions),
    /// One end of the tunnel's ceiling, which it starts itself.
    #[command(hide = true)]
    Forward(forward::ForwardOptions),
}

/// Measures what is asked for.
///
/// # Errors
/// Something that is needed cannot be had, or does not carry what it is given.
pub fn command(bench: &Bench) -> Result<ExitCode> {
    match bench {
        Bench::Tunnel(options) => tunnel::run(options)?,
        Bench::Forward(options) => forward::run(options)?,
    }
    Ok(ExitCode::SUCCESS)
}
