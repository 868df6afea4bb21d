//! Restricts files, TCP ports and signals with Landlock
//! (Documentation/userspace-api/landlock.rst).
//!
//! A rule applies to the file or directory that its path named at the start, and to everything
//! beneath it. A directory that later replaces the original one is not accessible.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dunlin::lane::identity::{Files, Role};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    path_beneath_rules,
};

use super::needs::Needs;
use crate::control::make_directory;
use crate::state::IPSEC_RECORDS;

/// The Landlock version of Linux 6.12. A VM's process uses all restrictions of this version except
/// that of TCP connections. Of the restrictions that later versions added, it uses only
/// `AccessFs::ResolveUnix`.
const ALL: ABI = ABI::V6;

/// Files of host name resolution: resolver(3), nsswitch.conf(5), gai.conf(5), the targets of
/// symbolic links among them, and the directories of libraries.
const NAMES: [&str; 13] = [
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/usr/lib",
    "/lib",
    "/lib64",
];

/// Kernel files that a VM's process reads: its page map, the limits of its control groups, the
/// CPUs, random numbers. The rule for /proc includes files of other processes, but Landlock denies
/// those that require the permission to debug the other process.
const KERNEL: [&str; 4] = [
    "/proc",
    "/sys/fs/cgroup",
    "/sys/devices/system",
    "/dev/urandom",
];

/// A part of the confinement that is in force.
pub(super) struct Taken {
    pub(super) by: String,
    /// Restrictions of this part that the kernel does not support.
    pub(super) lacks: Vec<String>,
}

impl Taken {
    pub(super) fn wholly(by: impl Into<String>) -> Self {
        Self {
            by: by.into(),
            lacks: Vec::new(),
        }
    }
}

/// Access rules for files, not yet in force.
pub(super) struct Rules {
    ruleset: RulesetCreated,
    files: &'static str,
    /// Restrictions that only newer versions of Landlock support, each with the version that added
    /// it.
    newer: Vec<(ABI, &'static str)>,
}

/// Restrictions that apply to every confined process, with the version of Landlock that added each.
const NEWER: [(ABI, &str); 3] = [
    (ABI::V3, "truncating files"),
    (ABI::V5, "controlling devices"),
    (ABI::V6, "signals and abstract sockets"),
];

impl Rules {
    /// Opens the directories, and creates missing ones. This can need privileges that the process
    /// drops later. With empty `identities`, every file may be read.
    pub(super) fn new(needs: &Needs, identities: &[PathBuf]) -> Result<Self> {
        // No other user may write to the directories, whatever the umask.
        make_directory(&needs.control, 0o755)?;
        make_directory(&needs.journal, 0o700)?;
        if let Some(history) = &needs.history {
            make_directory(history, 0o750)?;
        }
        if needs.ipsec.is_some() {
            // After it is confined, the process cannot create directories.
            make_directory(&needs.journal.join(IPSEC_RECORDS), 0o700)?;
        }
        Ok(Self {
            ruleset: ruleset(needs, identities).context("cannot create the Landlock rules")?,
            newer: [&NEWER[..], &[(ABI::V4, "listening on TCP ports")]].concat(),
            files: if identities.is_empty() {
                "reading any file"
            } else {
                "reading identities"
            },
        })
    }

    /// Rules for a process that uses files at paths that are unknown when it starts. They permit
    /// reading any file and creating local sockets at any path. They forbid writing and executing
    /// any file, and creating any file that is not a socket. Files can be removed only in
    /// `sockets`, the directories of the process's sockets, and in `control`, the directory of its
    /// control socket. In `control`, directories can be created and removed.
    pub(super) fn changing_none(control: Option<&Path>, sockets: &[PathBuf]) -> Result<Self> {
        let left = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::MakeSock;
        let ruleset = || -> Result<RulesetCreated, RulesetError> {
            Ruleset::default()
                .set_compatibility(CompatLevel::BestEffort)
                .handle_access(AccessFs::from_all(ALL) & !left)?
                .scope(Scope::from_all(ALL))?
                .create()?
                .add_rules(path_beneath_rules(
                    control,
                    AccessFs::MakeDir | AccessFs::RemoveDir | AccessFs::RemoveFile,
                ))?
                .add_rules(path_beneath_rules(sockets, AccessFs::RemoveFile))
        };
        Ok(Self {
            ruleset: ruleset().context("cannot create the Landlock rules")?,
            newer: NEWER.to_vec(),
            files: "writing no file",
        })
    }

    /// Rules for a process that reads files and connects to local sockets below `directory`, and
    /// does nothing else with files or TCP ports.
    pub(super) fn reading(directory: &Path) -> Result<Self> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::ResolveUnix;
        let ruleset = || -> Result<RulesetCreated, RulesetError> {
            Ruleset::default()
                .set_compatibility(CompatLevel::BestEffort)
                .handle_access(AccessFs::from_all(ALL))?
                .handle_access(AccessFs::ResolveUnix)?
                .handle_access(AccessNet::BindTcp | AccessNet::ConnectTcp)?
                .scope(Scope::from_all(ALL))?
                .create()?
                .add_rules(path_beneath_rules([directory], read))
        };
        Ok(Self {
            ruleset: ruleset().context("cannot create the Landlock rules")?,
            newer: [&NEWER[..], &[(ABI::V4, "TCP ports")]].concat(),
            files: "reading the status",
        })
    }

    /// Applies the rules to this thread and the threads that it starts.
    pub(super) fn apply(self) -> Result<Taken> {
        let status = self.ruleset.restrict_self()?;
        let LandlockStatus::Available { effective_abi, .. } = status.landlock else {
            bail!("this kernel has no Landlock, or it is disabled");
        };
        if status.ruleset == RulesetStatus::NotEnforced {
            bail!("the kernel enforces none of the Landlock rules");
        }
        Ok(Taken {
            by: format!("Landlock {} ({})", effective_abi as i32, self.files),
            lacks: self
                .newer
                .into_iter()
                .filter(|(since, _)| effective_abi < *since)
                .map(|(_, what)| format!("Landlock's restriction of {what}"))
                .collect(),
        })
    }
}

fn ruleset(needs: &Needs, identities: &[PathBuf]) -> Result<RulesetCreated, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ALL))?
        // Also restrict which unix sockets may be connected to, if the kernel supports that.
        .handle_access(AccessFs::ResolveUnix)?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(ALL))?
        .create()?;
    // Lanes over IPsec bind these source ports.
    if let Some(ports) = needs.ipsec {
        for port in ports.first()..=ports.last() {
            ruleset = ruleset.add_rule(NetPort::new(port, AccessNet::BindTcp))?;
        }
    }
    for (paths, access) in rules(needs, identities) {
        ruleset = ruleset.add_rules(path_beneath_rules(paths, access))?;
    }
    Ok(ruleset)
}

/// Access rights by path. The caller ignores paths that do not exist.
fn rules(needs: &Needs, identities: &[PathBuf]) -> Vec<(Vec<PathBuf>, BitFlags<AccessFs>)> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let owned = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
    let mut rules = vec![
        (owned(&KERNEL), read),
        (owned(&NAMES), read | AccessFs::ResolveUnix),
        (
            owned(&["/dev/kvm"]),
            AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev,
        ),
        (
            vec![needs.journal.clone()],
            read | AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile,
        ),
        (
            vec![needs.control.clone()],
            read | AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ResolveUnix,
        ),
    ];
    if let Some(history) = &needs.history {
        let change = AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile;
        rules.push((vec![history.clone()], read | change));
    }
    if identities.is_empty() {
        rules.push((owned(&["/"]), read));
    } else {
        rules.push((
            identities
                .iter()
                .flat_map(|one| directories_of(one))
                .collect(),
            read,
        ));
    }
    if let Some(scratch) = &needs.scratch {
        let remove = AccessFs::RemoveFile | AccessFs::RemoveDir;
        rules.push((vec![scratch.clone()], read | remove));
        // Removing a directory requires the right on its parent.
        if let Some(above) = scratch.parent() {
            rules.push((vec![above.to_owned()], AccessFs::RemoveDir.into()));
        }
    }
    rules
}

/// The directories of an identity's files and, for files that are symbolic links, of their targets.
/// All of them are necessary, because tools that renew certificates, such as certbot, put the new
/// files next to the old ones.
fn directories_of(identity: &Path) -> Vec<PathBuf> {
    let mut directories = vec![identity.to_owned()];
    for role in [Role::Source, Role::Destination] {
        // Ignore unusable files here, because loading the identity reports them.
        let Ok(files) = Files::in_directory(identity, None, Some(role)) else {
            continue;
        };
        let paths = [
            Some(files.certificate),
            Some(files.key),
            files.authorities,
            files.revocations,
            files.denied,
        ];
        for path in paths.into_iter().flatten() {
            let target = path.canonicalize().unwrap_or_else(|_| path.clone());
            directories.extend(path.parent().map(Into::into));
            directories.extend(target.parent().map(Into::into));
        }
    }
    directories.sort();
    directories.dedup();
    directories
}
