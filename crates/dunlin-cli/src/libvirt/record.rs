//! The record of what `dunlin libvirt enable` has changed, so that `disable` can restore it.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::state::StatePath;

/// The record that `enable` writes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// The ranges of ports that `enable` has reserved, as `A-B`.
    pub(super) ports: Vec<String>,
    /// `net.ipv4.ip_local_reserved_ports` before the first `enable`.
    pub(super) reserved_before: String,
}

impl Record {
    pub(super) fn path(state: &StatePath) -> Result<PathBuf> {
        Ok(state.directory()?.join("libvirt.json"))
    }

    pub(super) fn read(path: &Path) -> Result<Option<Self>> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let parsed = serde_json::from_str(&text);
        parsed.with_context(|| format!("{} is damaged: delete it", path.display()))
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let what = || format!("cannot write {}", path.display());
        if let Some(directory) = path.parent() {
            // The directory also holds journals, and those require this mode of their directory.
            let mut builder = DirBuilder::new();
            let made = builder.recursive(true).mode(0o700).create(directory);
            made.with_context(what)?;
        }
        fs::write(path, serde_json::to_string(self)?).with_context(what)
    }
}
