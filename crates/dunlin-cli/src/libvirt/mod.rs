//! `dunlin libvirt`: makes the migrations of this host's libvirt go through a tunnel, by the
//! redirect of docs/tunnel/redirect.md.
//!
//! ```text
//!  enable: look up (host, qemu_conf) ─▶ certificates (install) ─▶ configuration (block)
//!          ─▶ test of the path ─▶ reserved ports ─▶ rules ─▶ units
//!          a failure after the certificates undoes all steps after them (undo)
//!  disable: rules ─▶ units ─▶ configuration ─▶ reserved ports
//! ```
//!
//! With `enable --sockets`, migrations do not use the packet filter. They use unix sockets
//! (`sockets`), which `migrate` opens for each migration.

mod block;
mod disable;
mod enable;
mod files;
mod host;
mod install;
mod migrate;
mod programs;
mod qemu_conf;
mod record;
mod reserved;
mod sockets;
mod status;
mod undo;

use anyhow::Result;
use clap::Subcommand;

pub(crate) use host::IDENTITIES;
pub(crate) use qemu_conf::QemuConf;
pub(crate) use status::leads_to_a_tunnel;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Let this host's migrations to and from its peers go through a tunnel.
    Enable(enable::Enable),
    /// Migrate a VM over the unix sockets of `enable --sockets`.
    Migrate(migrate::Migrate),
    /// Undo `enable`: migrations are in the clear again.
    Disable(disable::Disable),
    /// Show the rules, the tunnel and the peers that `enable` has set up.
    Status(status::Status),
}

pub(crate) fn run(command: &Command) -> Result<i32> {
    match command {
        Command::Enable(enable) => enable.run(),
        Command::Migrate(migrate) => migrate.run(),
        Command::Disable(disable) => disable.run(),
        Command::Status(status) => status.run(),
    }
}

/// Whether the running kernel keeps libvirt's ports free of outgoing connections.
pub(crate) fn are_reserved(conf: &QemuConf) -> Result<bool> {
    Ok(reserved::covers(&reserved::live()?, conf.ports))
}
