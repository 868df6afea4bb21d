//! The files of a redirect.
//!
//! | file | written by | read by |
//! | --- | --- | --- |
//! | `expected.json` in the run directory | `apply` | `show`, `watch` |
//! | `state.json` in the run directory | `apply`, `watch` | the tunnel |
//! | `redirect.nft` in the state directory | `apply` | `apply`, if it fails after a boot |

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use super::state::State;
use super::table::Record;
use crate::file::replace;
use crate::text::plain;

/// Where `apply` and `watch` leave their results for other processes.
#[derive(Clone, Debug, Args)]
pub(super) struct RunPath {
    /// Directory of the record of the last `apply`, and of the result of `watch`.
    #[arg(long, value_name = "DIR", default_value = USUAL)]
    run_dir: PathBuf,
}

const USUAL: &str = "/run/dunlin-redirect";

impl RunPath {
    pub(super) fn usual() -> Self {
        let run_dir = PathBuf::from(USUAL);
        Self { run_dir }
    }

    /// The record of the last `apply`; `None` if there is none that this version can read.
    pub(super) fn record(&self) -> Result<Option<Record>> {
        let text = read(&self.run_dir.join("expected.json"))?;
        Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
    }

    pub(super) fn write_record(&self, record: &Record) -> Result<()> {
        self.write("expected.json", record)
    }

    pub(super) fn write_state(&self, state: &State) -> Result<()> {
        self.write("state.json", state)
    }

    /// Deletes the files.
    pub(super) fn clear(&self) -> Result<()> {
        for name in ["expected.json", "state.json"] {
            delete(&self.run_dir.join(name))?;
        }
        Ok(())
    }

    fn write(&self, name: &str, value: &impl Serialize) -> Result<()> {
        // The tunnel's user must be able to read the files.
        make(&self.run_dir, 0o755)?;
        let json = plain(serde_json::to_string(value)?);
        replace(&self.run_dir.join(name), &json, 0o644)
    }
}

/// The text of a file; `None` if there is none.
pub(super) fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// Creates a directory, unless it exists. An existing one keeps its mode.
pub(super) fn make(path: &Path, mode: u32) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .with_context(|| format!("cannot create {}", path.display()))
}

/// Deletes a file, if it exists.
pub(super) fn delete(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot delete {}", path.display()))
        }
        _ => Ok(()),
    }
}
