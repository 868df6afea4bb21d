//! The file of the tunnel's configuration, which the commands change and restore.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::file::replace;

/// The text of a configuration; `None` if the file does not exist.
pub(super) fn before(config: &Path) -> Result<Option<String>> {
    match fs::read_to_string(config) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other
            .map(Some)
            .with_context(|| format!("cannot read {}", config.display())),
    }
}

/// Replaces the configuration in one step.
pub(super) fn write_file(config: &Path, text: &str) -> Result<()> {
    replace(config, text, 0o644)
}

pub(super) fn restore(config: &Path, before: Option<&str>) -> Result<()> {
    match before {
        Some(text) => write_file(config, text),
        None => {
            fs::remove_file(config).with_context(|| format!("cannot remove {}", config.display()))
        }
    }
}
