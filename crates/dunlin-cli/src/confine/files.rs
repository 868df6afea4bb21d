//! Files, TCP ports and signals, by Landlock (Documentation/userspace-api/landlock.rst).
//!
//! A rule holds for the file or directory that its path led to at the start, and for what is
//! beneath: whoever replaces a directory as a whole takes it out of reach.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dunlin::lane::identity::{Files, Role};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    path_beneath_rules,
};

use super::Needs;
use crate::control::make_directory;
use crate::state::IPSEC_RECORDS;

/// The newest version of Landlock that all of this takes: Linux 6.12.
const ALL: ABI = ABI::V6;

/// What looking a host's name up reads: resolver(3), nsswitch.conf(5), gai.conf(5), and where
/// links from there lead.
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

/// What a VM's process reads of the kernel: its own page map, its control groups' limits, the CPUs.
/// Landlock keeps other processes' files in /proc shut to it, as for a debugger.
const KERNEL: [&str; 4] = [
    "/proc",
    "/sys/fs/cgroup",
    "/sys/devices/system",
    "/dev/urandom",
];

/// One part of the confinement that is in force.
pub(super) struct Taken {
    pub(super) by: String,
    /// What the kernel cannot do of it.
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

/// What may still be done with which files; not in force yet.
pub(super) struct Rules {
    ruleset: RulesetCreated,
    files: &'static str,
    /// What is asked for that not each version has, with the first one that does.
    newer: Vec<(ABI, &'static str)>,
}

/// What each version has brought of what every process is held to.
const NEWER: [(ABI, &str); 3] = [
    (ABI::V3, "truncating files"),
    (ABI::V5, "controlling devices"),
    (ABI::V6, "signals and abstract sockets"),
];

impl Rules {
    /// Opens the directories, for which this process may still need its privileges, and makes
    /// those that are not there. Without any `identities` everything may be read.
    pub(super) fn new(needs: &Needs, identities: &[PathBuf]) -> Result<Self> {
        make_directory(&needs.control, 0o777)?;
        make_directory(&needs.journal, 0o777)?;
        if needs.ipsec.is_some() {
            // Later no directory can be made.
            make_directory(&needs.journal.join(IPSEC_RECORDS), 0o700)?;
        }
        Ok(Self {
            ruleset: ruleset(needs, identities).context("the rules for files cannot be made")?,
            newer: [&NEWER[..], &[(ABI::V4, "listening on TCP ports")]].concat(),
            files: if identities.is_empty() {
                "reading any file"
            } else {
                "reading identities"
            },
        })
    }

    /// For a process whose files are not known at its start: it reads them, and makes and removes
    /// local sockets where their paths say; it writes, makes and executes no others. Directories
    /// for sockets it makes in that of its control socket alone.
    pub(super) fn changing_none(control: Option<&Path>) -> Result<Self> {
        let left =
            AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::RemoveFile | AccessFs::MakeSock;
        let ruleset = || -> Result<RulesetCreated, RulesetError> {
            Ruleset::default()
                .set_compatibility(CompatLevel::BestEffort)
                .handle_access(AccessFs::from_all(ALL) & !left)?
                .scope(Scope::from_all(ALL))?
                .create()?
                .add_rules(path_beneath_rules(
                    control,
                    AccessFs::MakeDir | AccessFs::RemoveDir,
                ))
        };
        Ok(Self {
            ruleset: ruleset().context("the rules for files cannot be made")?,
            newer: NEWER.to_vec(),
            files: "writing no file",
        })
    }

    /// Holds from now on for this thread and those that it starts.
    pub(super) fn apply(self) -> Result<Taken> {
        let status = self.ruleset.restrict_self()?;
        let LandlockStatus::Available { effective_abi, .. } = status.landlock else {
            bail!("this kernel has no Landlock, or it is switched off");
        };
        if status.ruleset == RulesetStatus::NotEnforced {
            bail!("Landlock does not hold");
        }
        Ok(Taken {
            by: format!("Landlock {} ({})", effective_abi as i32, self.files),
            lacks: self
                .newer
                .into_iter()
                .filter(|(since, _)| effective_abi < *since)
                .map(|(_, what)| format!("what Landlock needs against {what}"))
                .collect(),
        })
    }
}

fn ruleset(needs: &Needs, identities: &[PathBuf]) -> Result<RulesetCreated, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ALL))?
        // Local sockets of other processes, where the kernel can tell them apart.
        .handle_access(AccessFs::ResolveUnix)?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(ALL))?
        .create()?;
    // Lanes over IPsec come from ports of their own.
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

/// Which access beneath which paths; what is not there needs no rule.
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
    if identities.is_empty() {
        rules.push((owned(&["/"]), read));
    } else {
        rules.push((
            identities.iter().flat_map(|one| places(one)).collect(),
            read,
        ));
    }
    if let Some(scratch) = &needs.scratch {
        let remove = AccessFs::RemoveFile | AccessFs::RemoveDir;
        rules.push((vec![scratch.clone()], read | remove));
        // A directory is removed from the one that it is in.
        if let Some(above) = scratch.parent() {
            rules.push((vec![above.to_owned()], AccessFs::RemoveDir.into()));
        }
    }
    rules
}

/// Where the files of an identity are, and those that they are links to: what renews certificates
/// puts new ones beside the old, as certbot does.
fn places(identity: &Path) -> Vec<PathBuf> {
    let mut places = vec![identity.to_owned()];
    for role in [Role::Source, Role::Destination] {
        // Whether it can be used is found when it is.
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
            places.extend(path.parent().map(Into::into));
            places.extend(target.parent().map(Into::into));
        }
    }
    places.sort();
    places.dedup();
    places
}
