//! The state of the host before `enable`, which is restored after a failure.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result, anyhow, bail};

use super::files::{put, read};
use super::programs::{Report, UNITS, dunlin, has_systemd, is_in_use};
use super::record::Record;
use super::reserved::{self, SYSCTL};
use crate::state::StatePath;
use crate::text::chained;
use crate::tunnel::Config;

/// The state of the host before `enable`, and the steps of `enable` that began.
pub(super) struct Before<'a> {
    path: &'a Path,
    state: &'a StatePath,
    report: &'a Report,
    config: Option<String>,
    /// The files about reserved ports, with their content.
    files: [(PathBuf, Option<String>); 2],
    reserved: String,
    /// The units that were enabled or ran.
    in_use: Vec<&'static str>,
    rules: bool,
    units: bool,
}

impl<'a> Before<'a> {
    pub(super) fn take(path: &'a Path, state: &'a StatePath, report: &'a Report) -> Result<Self> {
        let files = [PathBuf::from(SYSCTL), Record::path(state)?];
        let [sysctl, record] = files.map(|file| read(&file).map(|text| (file, text)));
        let is_in_use = |unit: &&str| has_systemd() && is_in_use(unit);
        Ok(Self {
            path,
            state,
            report,
            config: read(path)?,
            files: [sysctl?, record?],
            reserved: reserved::live()?,
            in_use: UNITS.into_iter().filter(is_in_use).collect(),
            rules: false,
            units: false,
        })
    }

    pub(super) fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    /// Call this before `enable` changes the rules, so that `restore` undoes the change.
    pub(super) fn rules_follow(&mut self) {
        self.rules = true;
    }

    /// Call this before `enable` changes the units, so that `restore` undoes the change.
    pub(super) fn units_follow(&mut self) {
        self.units = true;
    }

    /// Restores all that has changed, as far as possible. Returns the reason for the failure, with
    /// a text that states what was restored.
    pub(super) fn restore(&self, reason: Error) -> Error {
        let parts: [(&str, Result<()>); 4] = [
            ("units", self.stop_units()),
            ("configuration", put(self.path, self.config.as_deref())),
            ("rules", self.restore_rules()),
            ("reserved ports", self.restore_reserved()),
        ];
        let failed: Vec<String> = parts
            .into_iter()
            .filter_map(|(part, result)| Some(format!("{part}: {}", chained(&result.err()?))))
            .collect();
        let reason = chained(&reason);
        match failed.is_empty() {
            true => anyhow!(
                "{reason}. The configuration, the reserved ports, the rules and the units are as \
                 before"
            ),
            false => anyhow!(
                "{reason}. This host is not as before, and `dunlin libvirt status` shows its state \
                 (not undone: {})",
                failed.join("; ")
            ),
        }
    }

    /// Stops the units that `enable` has started.
    fn stop_units(&self) -> Result<()> {
        if !self.units || !has_systemd() {
            return Ok(());
        }
        let is_new = |unit: &&str| !self.in_use.contains(unit);
        let mut words = vec!["disable", "--now"];
        words.extend(UNITS.iter().copied().filter(is_new));
        if words.len() > 2 && !self.report.systemctl(&words)? {
            bail!("`systemctl disable` failed");
        }
        Ok(())
    }

    fn restore_rules(&self) -> Result<()> {
        if !self.rules {
            return Ok(());
        }
        let redirects = match &self.config {
            Some(text) => Config::parse(self.path, text)?.redirects,
            None => Vec::new(),
        };
        let done = match redirects.is_empty() {
            true => dunlin(&["redirect", "remove"], None, Some(self.state))?,
            // Without --force, `apply` fails if connections in the clear are under way. The
            // restored rules were in force before `enable`, so each connection is protected as it
            // was before.
            false => {
                let words = ["redirect", "apply", "--force"];
                dunlin(&words, Some(self.path), Some(self.state))?
            }
        };
        if !done.status.success() {
            bail!("the new rules may be in force; see the error of `dunlin redirect` above");
        }
        if self.units && self.in_use.contains(&UNITS[2]) {
            self.report
                .systemctl(&["try-reload-or-restart", UNITS[2]])?;
        }
        Ok(())
    }

    fn restore_reserved(&self) -> Result<()> {
        if reserved::live()? != self.reserved {
            reserved::set_live(&self.reserved)?;
        }
        for (file, text) in &self.files {
            put(file, text.as_deref())?;
        }
        Ok(())
    }
}
