//! The redirects of a configuration.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::tunnel::{Config, Redirect};

/// The configuration of the redirects.
#[derive(Clone, Debug, Args)]
pub(super) struct Source {
    /// The configuration, a TOML file; see docs/reference/config.md.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

impl Source {
    /// Reads the configuration; returns its redirects, and the port of the tunnel's listener for
    /// them.
    pub(super) fn read(&self) -> Result<(Vec<Redirect>, u16)> {
        let text = std::fs::read_to_string(&self.config)
            .with_context(|| format!("cannot read the configuration {}", self.config.display()))?;
        let config = Config::parse(&self.config, &text)?;
        ensure!(
            !config.redirects.is_empty(),
            "{} has no redirect (at fault: configuration): add [redirect.NAME], or delete the \
             rules with `dunlin redirect remove`",
            self.config.display()
        );
        Ok((config.redirects, config.redirect_port))
    }
}
