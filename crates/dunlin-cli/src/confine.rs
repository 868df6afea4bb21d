//! Confinement: the privileges that a VM's process, a tunnel or `handoff accept` drops after its
//! start.
//!
//! An attacker that takes over a confined process, from the guest or a peer, has no privileges. It
//! can use few system calls, and only the files that the process needs. Threads that already run
//! are not completely confined. A process must therefore apply the confinement before it starts a
//! second thread. docs/decisions/0010-confinement.md gives the reasons. The parts, for a VM's
//! process without IPsec lanes:
//!
//! | part | what remains |
//! | --- | --- |
//! | privileges | no capabilities; `execve` grants none |
//! | [`files`] | reading identities and system settings; writing in the journal and in the history of migrations; creating and removing sockets in the directory of the control socket; no listening TCP ports; no signals to other processes |
//! | [`calls`] | a list of system calls; no programs, new code, debugging, mounts, or new kinds of socket |
//!
//! A tunnel's routes may change while it runs, and so may the paths that the tunnel uses. A tunnel
//! therefore keeps the capabilities for other users' sockets, for low ports and, if its
//! configuration sets owners of sockets, for changing owners. It can read files and create unix
//! sockets wherever file permissions allow. It cannot write, create or execute any other files. It
//! can remove files only in the directory of control sockets, and in the directories of the sockets
//! that it had at its start. `handoff accept` keeps less, because it needs no low ports and removes
//! no files.

mod calls;
mod files;
mod names;
mod needs;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use dunlin::lane::kernel::abilities;
use dunlin::lane::provider::CipherSuite;
use dunlin_linux::local::FileAccess;
use dunlin_linux::privileges::{self, Capability};

pub(crate) use self::needs::Needs;
use crate::line::Line;

/// How far a VM's process is confined.
#[derive(Clone, Debug, Args)]
pub(crate) struct Confining {
    /// Whether the process, after its start, drops what it does not need: `auto` drops as much as
    /// the kernel allows, `yes` drops everything or the process does not start.
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    confine: Whether,
    /// A directory from which the confined process may read identities; repeatable [default: for
    /// `vm receive`, the directory of --identity; for `vm run`, any directory, because each
    /// migration names an identity].
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

/// Why a confined process may read every file, and the remedy.
const READS_ALL: &str = "it may read every file of its user, because each migration names an \
                         identity; give --identities DIR";

/// Default source ports of lanes over IPsec. They are below Linux's ephemeral ports, and neither
/// Kubernetes nor libvirt uses them.
pub(crate) const LANE_PORTS: &str = "24576-28671";

/// Set when this process has dropped CAP_NET_ADMIN.
static GAVE_UP_NETWORK: OnceLock<()> = OnceLock::new();

/// The owners and groups to which this confined tunnel may give its sockets.
static OWNERS: OnceLock<Vec<FileAccess>> = OnceLock::new();

/// Checks that a tunnel may give a socket to this owner and group, so that the error is more
/// informative than the kernel's.
///
/// # Errors
/// The tunnel is confined, and its configuration did not have this owner and group when the tunnel
/// started.
pub(crate) fn allows_owner(access: &FileAccess) -> Result<()> {
    let is_same = |one: &FileAccess| (one.owner, one.group) == (access.owner, access.group);
    match OWNERS.get() {
        Some(allowed) if access.changes_owner() && !allowed.iter().any(is_same) => bail!(
            "this tunnel is confined, and gives sockets only to the owners and groups that its \
             configuration had when it started (at fault: configuration): give a route this \
             owner and group (socket_owner, socket_group), and restart the tunnel"
        ),
        _ => Ok(()),
    }
}

/// Checks that lanes over IPsec are still possible, so that the error is more informative than
/// the kernel's EPERM.
///
/// # Errors
/// This process has dropped the necessary privileges.
pub(crate) fn allows_ipsec() -> Result<()> {
    if GAVE_UP_NETWORK.get().is_some() {
        bail!(
            "the VM's process dropped the privileges for IPsec lanes when it was confined: select \
             another --security, or start the VM with --ipsec next time (at fault: configuration)"
        );
    }
    Ok(())
}

/// The directories from which this process may read identities after it is confined.
static IDENTITIES: OnceLock<Vec<PathBuf>> = OnceLock::new();

impl Confining {
    /// A warning about a process that is confined, but may read every file. `identity` is the
    /// directory of an identity that the process reloads.
    pub(crate) fn warning(&self, identity: Option<&Path>) -> Option<String> {
        let reads_all = self.identities.is_empty() && identity.is_none();
        let warned = reads_all && self.confine != Whether::No;
        warned.then(|| format!("this process is confined, but {READS_ALL}"))
    }

    /// Confines this process permanently, as far as requested and possible; returns the line that
    /// reports it. In other existing threads, only system calls are restricted.
    ///
    /// # Errors
    /// A directory that the process needs cannot be created, or the Landlock rules cannot be built.
    /// With `--confine yes`, a part that fails is an error too; the error names the part, and other
    /// parts may be in force. Without a directory of identities, the process could read every file,
    /// which is also an error with `--confine yes`.
    pub(crate) fn apply(&self, needs: &Needs) -> Result<Line> {
        if self.confine == Whether::No {
            return Ok(Applied::new(self.confine).line());
        }
        names::load_modules();
        // Probe kernel TLS now, and cache the results. The probe needs a listening socket, which a
        // confined process cannot open.
        for suite in CipherSuite::ALL {
            let _ = abilities(suite);
        }
        let mut identities = self.identities.clone();
        identities.extend(needs.identity.clone());
        if identities.is_empty() && self.confine == Whether::Yes {
            bail!("cannot confine this process completely (at fault: configuration): {READS_ALL}");
        }
        let rules = files::Rules::new(needs, &identities)?;
        let mut applied = Applied::new(self.confine);
        let privileges = match needs.ipsec {
            // Lanes over IPsec need CAP_NET_ADMIN.
            Some(_) => keep_privileges(
                &[Capability::Network],
                "no privileges except for the network",
            ),
            None => keep_privileges(&[], "no privileges"),
        };
        if applied.take("privileges", privileges)? && needs.ipsec.is_none() {
            let _ = GAVE_UP_NETWORK.set(());
        }
        if applied.take("files", rules.apply())? && !identities.is_empty() {
            // Cannot fail, because a process is confined only once.
            let _ = IDENTITIES.set(identities);
        }
        let work = calls::Work::Guest {
            makes_sockets: needs.makes_sockets,
            ipsec: needs.ipsec.is_some(),
        };
        applied.take("system calls", calls::apply(work))?;
        Ok(applied.line())
    }
}

/// How far a tunnel or `handoff accept` is confined.
#[derive(Clone, Debug, Args)]
pub(crate) struct ConfiningService {
    /// Whether the process, after its start, drops what it does not need: `auto` drops as much as
    /// the kernel allows (nothing in a tunnel with an `exec` route), `yes` drops everything or the
    /// process does not start.
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    confine: Whether,
}

impl ConfiningService {
    /// Like [`Confining::apply`], for a tunnel. `control` is the directory of the control socket,
    /// and `sockets` are the directories of the other sockets that the tunnel removes. The tunnel
    /// may give its sockets to the owners and groups in `owners`. `against` is a reason not to
    /// confine the tunnel, with the remedy. One such reason is a route with `exec`, because its
    /// program would be confined too.
    ///
    /// # Errors
    /// `--confine yes` was given, but a part failed or there is a reason `against` it. The error
    /// names the part or the reason. Other parts may be in force.
    pub(crate) fn tunnel(
        &self,
        against: Option<(&str, &str)>,
        control: Option<&Path>,
        sockets: &[PathBuf],
        owners: &[FileAccess],
    ) -> Result<Line> {
        if let Some((text, to_do)) = against.filter(|_| self.confine != Whether::No) {
            if self.confine == Whether::Yes {
                bail!(
                    "cannot confine the tunnel (at fault: configuration): {text}; {to_do}, or \
                     use --confine auto"
                );
            }
            let mut applied = Applied::new(self.confine);
            applied.lacks.push(text.to_owned());
            return Ok(applied.line());
        }
        // Some routes need these capabilities.
        let mut kept = vec![Capability::OthersFiles, Capability::LowPorts];
        let mut left = "no privileges except for others' sockets and low ports";
        let mut owners = owners.to_vec();
        owners.retain(FileAccess::changes_owner);
        if !owners.is_empty() {
            kept.push(Capability::Owners);
            left = "no privileges except for others' sockets, their owners and low ports";
        }
        let work = calls::Work::Channels {
            owners: owners.clone(),
        };
        let line = self.apply((&kept, left), work, || {
            files::Rules::changing_none(control, sockets)
        })?;
        if is_confined(&line) {
            // Cannot fail, because a process is confined only once.
            let _ = OWNERS.set(owners);
        }
        Ok(line)
    }

    /// Like [`Confining::apply`], for `handoff accept`.
    ///
    /// # Errors
    /// A part failed although `--confine yes` was given; the error names the part. Other parts may
    /// be in force.
    pub(crate) fn handoff(&self) -> Result<Line> {
        // The sockets of receivers may belong to other users.
        let kept = [Capability::OthersFiles];
        let left = "no privileges except for others' sockets";
        self.apply((&kept, left), calls::Work::Handoff, || {
            files::Rules::changing_none(None, &[])
        })
    }

    /// Like [`Confining::apply`], for a process that only reads the status sockets and the history
    /// in `control`, and accepts connections at a listener that is open.
    ///
    /// # Errors
    /// A part failed although `--confine yes` was given; the error names the part. Other parts may
    /// be in force.
    pub(crate) fn reader(&self, control: &Path) -> Result<Line> {
        let mut applied = Applied::new(self.confine);
        if self.confine != Whether::No {
            applied.take("privileges", keep_privileges(&[], "no privileges"))?;
            applied.take(
                "files",
                files::Rules::reading(control).and_then(files::Rules::apply),
            )?;
            applied.take("system calls", calls::apply(calls::Work::Reader))?;
        }
        Ok(applied.line())
    }

    fn apply(
        &self,
        (kept, left): (&[Capability], &str),
        work: calls::Work,
        rules: impl FnOnce() -> Result<files::Rules>,
    ) -> Result<Line> {
        let mut applied = Applied::new(self.confine);
        if self.confine == Whether::No {
            return Ok(applied.line());
        }
        names::load_modules();
        // Probe kernel TLS now, and cache the results, because the kernel loads its TLS module only
        // for a privileged process.
        for suite in CipherSuite::ALL {
            let _ = abilities(suite);
        }
        applied.take("privileges", keep_privileges(kept, left))?;
        applied.take("files", rules().and_then(files::Rules::apply))?;
        applied.take("system calls", calls::apply(work))?;
        Ok(applied.line())
    }
}

/// The parts of the confinement that are in force so far, and the reasons why others are not.
struct Applied {
    whole: bool,
    by: Vec<String>,
    lacks: Vec<String>,
}

impl Applied {
    fn new(confine: Whether) -> Self {
        Self {
            whole: confine == Whether::Yes,
            by: Vec::new(),
            lacks: Vec::new(),
        }
    }

    /// Records the result of one part; returns whether the part is in force.
    ///
    /// # Errors
    /// The part failed completely or partly, although `--confine yes` was given.
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
                "cannot confine this process (at fault: this side): {lack}; use a kernel that \
                 supports it, or --confine auto"
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

/// Drops all capabilities except `kept`, and prevents the process from gaining any. `left` is the
/// text that describes `kept`.
fn keep_privileges(kept: &[Capability], left: &str) -> Result<files::Taken> {
    privileges::gain_none()?;
    privileges::keep_capabilities(kept)?;
    Ok(files::Taken::wholly(left))
}

/// Forbids new local sockets and listening sockets in all threads. After this call, the process
/// cannot reach other local services, some of which act as root for their clients. If `ipsec`,
/// lanes may still bind their source ports. No effect if system calls are not confined.
///
/// # Errors
/// The kernel rejected the filter. The previous confinement stays in force.
pub(crate) fn make_no_more_sockets(confined: &Line, ipsec: bool) -> Result<()> {
    match confined {
        Line::Confined { by, .. } if by.iter().any(|part| part == calls::NAME) => {
            calls::deny_more_sockets(ipsec)
        }
        _ => Ok(()),
    }
}

/// Checks that the confinement permits reading an identity, so that the error is more informative
/// than the kernel's EACCES.
///
/// # Errors
/// The confinement forbids reading the directory.
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
        "the VM's process is confined and reads identities only in {} (at fault: configuration): \
         start it with --identities {}, or move the files",
        allowed.join(", "),
        directory.display()
    )
}

/// Whether any part is in force.
pub(crate) fn is_confined(confined: &Line) -> bool {
    matches!(confined, Line::Confined { by, .. } if !by.is_empty())
}
