//! Confinement: what a process that owns a VM gives up once it has started.
//!
//! Whoever takes such a process over, from the guest's side or a peer's, finds no privileges, files
//! only where the process needs them, and few system calls. Each thread inherits it, so it comes
//! before there is a second one. docs/decisions/0010-confinement.md says why it is as it is.
//!
//! | part | what is left |
//! | --- | --- |
//! | privileges | no capabilities, and none by executing something |
//! | [`files`] | reading where identities and the system's own settings are, writing in the journal and beside the control socket; no TCP port to listen on; no signals to others |
//! | [`calls`] | the system calls of a list; no programs, no debugging, no mounts, no new kinds of socket |

mod calls;
mod files;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use dunlin::lane::kernel::abilities;
use dunlin::lane::provider::CipherSuite;
use dunlin_sys::privileges;

use crate::line::Line;

/// How far a process is confined.
#[derive(Clone, Debug, Args)]
pub(crate) struct Confining {
    /// Whether this process gives up, once it has started, what it does not need: `auto` as far
    /// as the kernel can, `yes` all of it or it does not start.
    #[arg(long, value_enum, value_name = "WHETHER", default_value_t)]
    confine: Whether,
    /// A directory from which the confined process may read identities; repeatable [default: to
    /// receive, that of --identity; to run, any, since a migration names its own].
    #[arg(long, value_name = "DIR")]
    identities: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Whether {
    #[default]
    Auto,
    Yes,
    No,
}

/// What a process goes on needing.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// The directory of its control socket.
    pub(crate) control: PathBuf,
    /// The directory of its journal.
    pub(crate) journal: PathBuf,
    /// A directory that goes with it.
    pub(crate) scratch: Option<PathBuf>,
    /// An identity that it reads again.
    pub(crate) identity: Option<PathBuf>,
    /// Whether it still has a control socket to make.
    pub(crate) makes_sockets: bool,
}

impl Needs {
    /// The directory in which a socket is made.
    pub(crate) fn directory_of(socket: &Path) -> PathBuf {
        match socket.parent() {
            Some(directory) if directory != "" => directory.into(),
            _ => ".".into(),
        }
    }
}

/// Where this process may read identities, once that is confined.
static IDENTITIES: OnceLock<Vec<PathBuf>> = OnceLock::new();

impl Confining {
    /// Confines this process for good, as far as that is wanted and can be; returns what there is
    /// to say about it. Threads that exist already stay as they are.
    ///
    /// # Errors
    /// With `yes`, the part that cannot be had; some others may be in force then.
    pub(crate) fn apply(&self, needs: &Needs) -> Result<Line> {
        let (mut by, mut lacks) = (Vec::new(), Vec::new());
        if self.confine == Whether::No {
            return Ok(Line::Confined { by, lacks });
        }
        // Later it cannot listen, not even for itself; what the kernel says now is remembered.
        for suite in CipherSuite::ALL {
            let _ = abilities(suite);
        }
        let mut identities = self.identities.clone();
        identities.extend(needs.identity.clone());
        let rules = files::Rules::new(needs, &identities)?;
        let whole = self.confine == Whether::Yes;
        let mut take = |part: &str, taken: Result<files::Taken>| -> Result<bool> {
            let held = match taken {
                Ok(taken) => {
                    by.push(taken.by);
                    lacks.extend(taken.lacks);
                    true
                }
                Err(error) => {
                    lacks.push(format!("{part}: {error:#}"));
                    false
                }
            };
            if whole && let Some(lack) = lacks.first() {
                bail!(
                    "this process cannot be confined (at fault: this side): {lack}; use a kernel \
                     that can, or --confine auto"
                );
            }
            Ok(held)
        };
        take("privileges", drop_privileges())?;
        if take("files", rules.apply())? && !identities.is_empty() {
            // Nobody else sets it.
            let _ = IDENTITIES.set(identities);
        }
        take("system calls", calls::apply(needs.makes_sockets))?;
        Ok(Line::Confined { by, lacks })
    }
}

fn drop_privileges() -> Result<files::Taken> {
    privileges::gain_none()?;
    privileges::drop_capabilities()?;
    Ok(files::Taken::wholly("no privileges"))
}

/// No local socket can be made any more: other local services, some of which would do anything
/// for root, are out of reach. For all threads; nothing changes where system calls are not
/// confined.
///
/// # Errors
/// The kernel does not do it. All else goes on as before.
pub(crate) fn make_no_more_sockets(confined: &Line) -> Result<()> {
    match confined {
        Line::Confined { by, .. } if by.iter().any(|part| part == calls::NAME) => {
            calls::deny_local_sockets()
        }
        _ => Ok(()),
    }
}

/// Whether an identity may be read, which tells more than the kernel's refusal would.
///
/// # Errors
/// It lies elsewhere.
pub(crate) fn allows_identity(directory: &Path) -> Result<()> {
    let Some(allowed) = IDENTITIES.get() else {
        return Ok(());
    };
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if allowed
        .iter()
        .any(|one| real(directory).starts_with(real(one)))
    {
        return Ok(());
    }
    let allowed: Vec<_> = allowed
        .iter()
        .map(|one| one.display().to_string())
        .collect();
    bail!(
        "the VM's process is confined and reads identities in {} alone (at fault: configuration): \
         start it with --identities {}, or move the files",
        allowed.join(", "),
        directory.display()
    )
}

/// Says what is in force.
pub(crate) fn say(confined: &Line, json: bool) {
    match confined {
        _ if json => confined.print(),
        Line::Confined { by, .. } if by.is_empty() => println!("not confined"),
        Line::Confined { by, lacks } => {
            println!("confined: {}", by.join(", "));
            if !lacks.is_empty() {
                println!("warning: this host lacks {}", lacks.join(", "));
            }
        }
        _ => {}
    }
}
