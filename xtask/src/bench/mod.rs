//! `cargo xtask bench`: compares Dunlin with other programs on this host in one run.
//!
//! - [`tunnel`]: throughput and latency of the tunnel, stunnel, OpenSSH, a proxy in Go, a minimal
//!   tunnel (the *floor*) and a direct connection.
//! - [`whole`]: whole migrations, with Dunlin, QEMU and Cloud Hypervisor.
//! - [`long_line`]: migrations over a line with a long round trip.
//! - [`evacuate`]: all guests of a host leave it, with Dunlin and through stunnel.
//! - [`status`]: what the observers of Dunlin cost, and what their hostile clients cost.

pub mod clients;
mod cloud_hypervisor;
mod ends;
pub mod evacuate;
mod forward;
mod load;
pub mod long_line;
mod migration;
mod pair;
mod program;
mod records;
pub mod status;
pub mod tunnel;
mod turns;
mod vcpu;
mod vm;
pub mod whole;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

/// The available benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Compares relay and stripe mode with stunnel, OpenSSH, a proxy in Go and a minimal tunnel
    /// (the floor): throughput, round trips, and QEMU's downtime. Needs root if there is KVM, to
    /// limit the CPU time of guests.
    Tunnel(tunnel::TunnelOptions),
    /// Compares whole migrations into new memory: Dunlin, its floor, and QEMU with and without TLS;
    /// also Cloud Hypervisor, if `CLOUD_HYPERVISOR` names its binary. Needs root if there is KVM, to
    /// limit the CPU time of guests.
    Whole(whole::WholeOptions),
    /// Measures migrations over a line with a long round trip, with two settings of the kernel's
    /// socket buffers. Needs root.
    LongLine(long_line::LongLineOptions),
    /// Compares two evacuations of a host: by Dunlin's lanes, and through pairs of stunnels. Each
    /// is measured twice: all guests move at the same time, and one guest after the other.
    Evacuate(evacuate::EvacuateOptions),
    /// Measures what `serve-status` and `top` cost beside `dunlin bench lanes`, and what hostile
    /// clients of `serve-status` and of the status sockets cost.
    Status(status::StatusOptions),
    /// Runs the clients of `bench status`; `bench status` starts this command.
    #[command(hide = true)]
    Clients(clients::ClientsOptions),
    /// Runs one end of the floor or of the unencrypted pipeline; `bench tunnel` starts it.
    #[command(hide = true)]
    Forward(forward::ForwardOptions),
}

/// Runs the benchmark.
///
/// # Errors
/// An option is invalid, a required program or certificate is unavailable, or a measurement fails.
pub fn command(bench: &Bench) -> Result<ExitCode> {
    match bench {
        Bench::Tunnel(options) => tunnel::run(options)?,
        Bench::Whole(options) => whole::run(options)?,
        Bench::LongLine(options) => long_line::run(options)?,
        Bench::Evacuate(options) => evacuate::run(options)?,
        Bench::Status(options) => status::run(options)?,
        Bench::Clients(options) => clients::run(options)?,
        Bench::Forward(options) => forward::run(options)?,
    }
    Ok(ExitCode::SUCCESS)
}
