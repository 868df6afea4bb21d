//! The redirects of a configuration.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::tunnel::{Config, Redirect};

/// The configuration of the redirects.
#[derive(Clone, Debug, Args)]
pub(super) struct Source {
    /// The configuration, a TOML file; see docs/reference/config.md.
    #[arg(long, value_name = "FILE", default_value = "/etc/dunlin/tunnel.toml")]
    config: PathBuf,
}

/// What the rules are made from.
pub(super) struct Read {
    pub(super) redirects: Vec<Redirect>,
    /// The first port of the tunnel's listeners for redirected connections.
    pub(super) port: u16,
    /// The user of the tunnel.
    pub(super) user: String,
}

impl Source {
    pub(super) fn of(config: &Path) -> Self {
        let config = config.to_owned();
        Self { config }
    }

    pub(super) fn read(&self) -> Result<Read> {
        let text = std::fs::read_to_string(&self.config)
            .with_context(|| format!("cannot read the configuration {}", self.config.display()))?;
        let config = Config::parse(&self.config, &text)?;
        ensure!(
            !config.redirects.is_empty(),
            "{} has no redirect (at fault: configuration): add [redirect.NAME], or delete the \
             rules with `dunlin redirect remove`",
            self.config.display()
        );
        Ok(Read {
            redirects: config.redirects,
            port: config.redirect_port,
            user: config.redirect_user.unwrap_or_else(usual_user),
        })
    }
}

/// The user of dunlin-tunnel.service (dist/systemd/dunlin-sysusers.conf).
const USER: &str = "dunlin-tunnel";

/// The tunnel's user if `redirect_user` is not set: the unit's user if it exists, otherwise root.
fn usual_user() -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let exists = users
        .lines()
        .any(|line| line.split(':').next() == Some(USER));
    if exists { USER } else { "root" }.to_owned()
}
