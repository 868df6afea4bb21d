//! The commit that is checked out.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::programs::output;

/// A version of the package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The version, as Debian's tools compare it.
    pub text: String,
    /// The time of the commit, in seconds since 1970.
    pub epoch: u64,
    /// The time of the commit as a date (RFC 5322), in UTC.
    pub date: String,
}

/// The version of the commit that is checked out. If the commit has the tag of a release, this is
/// the version of that release. Otherwise it is a version that sorts before the next release; such
/// versions sort by the dates of their commits.
///
/// # Errors
/// The workspace is not a git clone.
pub fn version() -> Result<Version> {
    let number = env!("CARGO_PKG_VERSION");
    let epoch = git(&["log", "-1", "--format=%ct"])?;
    let epoch = epoch
        .parse()
        .context("cannot parse the time of the commit")?;
    let tags = git(&["tag", "--points-at", "HEAD"])?;
    let text = match tags.lines().any(|tag| tag == format!("v{number}")) {
        true => number.to_owned(),
        false => {
            let format = "--format=%cd.%h";
            let date = "--date=format-local:%Y%m%d%H%M%S";
            format!(
                "{number}~{}",
                git(&["log", "-1", "--abbrev=8", date, format])?
            )
        }
    };
    let format = "--date=format-local:%a, %d %b %Y %H:%M:%S +0000";
    let date = git(&["log", "-1", format, "--format=%cd"])?;
    Ok(Version { text, epoch, date })
}

/// The workspace's directory.
#[must_use]
pub fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Runs git in the workspace, and returns its output.
pub(super) fn git(words: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    git.args(words).current_dir(workspace());
    // Dates are in UTC and in English.
    git.env("TZ", "UTC").env("LC_ALL", "C");
    output(&mut git)
}
