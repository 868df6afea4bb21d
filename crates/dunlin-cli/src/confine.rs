//! Confinement: what a process that owns a VM, or is a tunnel, gives up once it has started.
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
//!
//! A tunnel's routes may change while it runs, and with them the paths that it goes to: it keeps
//! the capabilities for other users' sockets and for low ports, and reads files and makes local
//! sockets wherever it may, but writes, makes and executes nothing else.

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
use dunlin_ipsec::PortRange;
use dunlin_linux::privileges::{self, Capability};

use crate::line::Line;

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
    /// The ports from which its lanes may go over IPsec.
    pub(crate) ipsec: Option<PortRange>,
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

/// Below the ephemeral ports of Linux, and none of Kubernetes' or libvirt's.
pub(crate) const LANE_PORTS: &str = "24576-28671";

/// Whether this process has given up what changes the network.
static GAVE_UP_NETWORK: OnceLock<()> = OnceLock::new();

/// Whether lanes over IPsec can still be had, which tells more than the kernel's refusal would.
///
/// # Errors
/// This process has given up what they take.
pub(crate) fn allows_ipsec() -> Result<()> {
    if GAVE_UP_NETWORK.get().is_some() {
        bail!(
            "the VM's process is confined and has given up what lanes over IPsec take (at fault: \
             configuration): start it with --ipsec"
        );
    }
    Ok(())
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
        if self.confine == Whether::No {
            return Ok(Taking::new(self.confine).line());
        }
        // Later it cannot listen, not even for itself; what the kernel says now is remembered.
        for suite in CipherSuite::ALL {
            let _ = abilities(suite);
        }
        let mut identities = self.identities.clone();
        identities.extend(needs.identity.clone());
        let rules = files::Rules::new(needs, &identities)?;
        let mut taking = Taking::new(self.confine);
        let privileges = match needs.ipsec {
            // What lanes over IPsec take.
            Some(_) => keep_privileges(&[Capability::Network], "no privileges but for the network"),
            None => keep_privileges(&[], "no privileges"),
        };
        if taking.take("privileges", privileges)? && needs.ipsec.is_none() {
            let _ = GAVE_UP_NETWORK.set(());
        }
        if taking.take("files", rules.apply())? && !identities.is_empty() {
            // Nobody else sets it.
            let _ = IDENTITIES.set(identities);
        }
        let work = calls::Work::Guest {
            makes_sockets: needs.makes_sockets,
            ipsec: needs.ipsec.is_some(),
        };
        taking.take("system calls", calls::apply(work))?;
        Ok(taking.line())
    }
}

/// How far a tunnel is confined.
#[derive(Clone, Debug, Args)]
pub(crate) struct ConfiningTunnel {
    /// Whether the tunnel gives up, once it has started, what it does not need: `auto` as far as
    /// the kernel can and where no route has `exec`, `yes` all of it or it does not start.
    #[arg(long, value_enum, value_name = "WHETHER", default_value_t)]
    confine: Whether,
}

impl ConfiningTunnel {
    /// As [`Confining::apply`]; `control` is the directory of the control socket. Where something stands against it, and there is what to do, the
    /// tunnel is not confined: what a route with `exec` starts would be confined with it.
    ///
    /// # Errors
    /// With `yes`, the part that cannot be had; some others may be in force then.
    pub(crate) fn apply(
        &self,
        against: Option<(&str, &str)>,
        control: Option<&Path>,
    ) -> Result<Line> {
        let mut taking = Taking::new(self.confine);
        if self.confine == Whether::No {
            return Ok(taking.line());
        }
        if let Some((text, to_do)) = against {
            if self.confine == Whether::Yes {
                bail!(
                    "the tunnel cannot be confined (at fault: configuration): {text}; {to_do}, or \
                     use --confine auto"
                );
            }
            taking.lacks.push(text.to_owned());
            return Ok(taking.line());
        }
        // Those that routes may need.
        let privileges = keep_privileges(
            &[Capability::OthersFiles, Capability::LowPorts],
            "no privileges but for others' sockets and low ports",
        );
        taking.take("privileges", privileges)?;
        let rules = files::Rules::changing_none(control).and_then(files::Rules::apply);
        taking.take("files", rules)?;
        taking.take("system calls", calls::apply(calls::Work::Channels))?;
        Ok(taking.line())
    }
}

/// What is in force so far.
struct Taking {
    whole: bool,
    by: Vec<String>,
    lacks: Vec<String>,
}

impl Taking {
    fn new(confine: Whether) -> Self {
        Self {
            whole: confine == Whether::Yes,
            by: Vec::new(),
            lacks: Vec::new(),
        }
    }

    /// Whether one part is in force now.
    ///
    /// # Errors
    /// All are wanted, and something of this one cannot be had.
    fn take(&mut self, part: &str, taken: Result<files::Taken>) -> Result<bool> {
        let held = match taken {
            Ok(taken) => {
                self.by.push(taken.by);
                self.lacks.extend(taken.lacks);
                true
            }
            Err(error) => {
                self.lacks.push(format!("{part}: {error:#}"));
                false
            }
        };
        if self.whole
            && let Some(lack) = self.lacks.first()
        {
            bail!(
                "this process cannot be confined (at fault: this side): {lack}; use a kernel \
                 that can, or --confine auto"
            );
        }
        Ok(held)
    }

    fn line(self) -> Line {
        Line::Confined {
            by: self.by,
            lacks: self.lacks,
        }
    }
}

/// Gives up all capabilities but some, and gaining any; `left` says what is left.
fn keep_privileges(kept: &[Capability], left: &str) -> Result<files::Taken> {
    privileges::gain_none()?;
    privileges::keep_capabilities(kept)?;
    Ok(files::Taken::wholly(left))
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

/// Whether anything is in force.
pub(crate) fn is_confined(confined: &Line) -> bool {
    matches!(confined, Line::Confined { by, .. } if !by.is_empty())
}
