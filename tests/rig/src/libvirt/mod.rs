//! Two hosts with a libvirtd each, and virtual machines that check their own memory.
//!
//! ```no_run
//! use dunlin_rig::libvirt::{Pair, Side, Vm};
//!
//! let pair = Pair::start()?;
//! let vm = Vm::new("web");
//! pair.create(Side::A, &vm)?;
//! let done = pair.a.virsh("migrate --live web qemu+tcp://b.example/system")?;
//! assert!(done.is_ok(), "{}", done.said);
//! pair.check(Side::B, &vm)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! libvirt and QEMU are Debian's, unpacked ([`crate::debian::packages`]). A host is a set of
//! namespaces: network, mounts, processes, UTS and IPC. Its file system is in memory, so each host
//! has its own `/etc`, `/run` and `/var`. libvirtd runs as root, and QEMU as [`QEMU_USER`], as in
//! Debian. The control connections are `qemu+tcp` without authentication. cgroups, AppArmor,
//! SELinux and systemd are not in use.

mod daemon;
mod vm;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

pub use daemon::{Daemon, Ended, QEMU_USER, Running};
pub use vm::Vm;

use crate::debian::{self, DebianError};
use crate::hosts::{Family, Host, HostsError, Link, LinkOptions};
use crate::machine;

/// The time limit of every wait, sufficient on a busy machine and under emulation.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// The ports that libvirt takes for migrations, unless qemu.conf states others.
pub const PORTS: std::ops::RangeInclusive<u16> = 49152..=49215;

/// The folder with QEMU's certificates on each host, in QEMU's layout. One authority has issued the
/// certificates of both hosts.
pub const CREDENTIALS: &str = "/etc/pki/qemu";

/// The port of the control connections.
pub const CONTROL_PORT: u16 = 16509;

/// An error of the two hosts, or of libvirt.
#[derive(Debug, Error)]
pub enum LibvirtError {
    /// The packages are not available.
    #[error(transparent)]
    Debian(#[from] DebianError),
    /// A network namespace or the link could not be made.
    #[error(transparent)]
    Hosts(#[from] HostsError),
    /// A host could not be set up, or its libvirtd did not start.
    #[error("no libvirtd on {0}: {1}")]
    Host(String, String),
    /// A file of this machine cannot be used, or a program cannot be started.
    #[error("{0}")]
    Local(PathBuf, #[source] std::io::Error),
    /// A command did not end.
    #[error("{0} did not end within {1:?}")]
    Endless(String, Duration),
    /// virsh failed.
    #[error("virsh {0}: {1}")]
    Virsh(String, String),
    /// The guest did not print what was expected, or found a wrong page.
    #[error("the guest {0}: {1}")]
    Guest(String, String),
}

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host `a.example`.
    A,
    /// The host `b.example`.
    B,
}

impl Side {
    /// The other host.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// The host's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "a.example",
            Self::B => "b.example",
        }
    }

    fn uuid(self) -> &'static str {
        match self {
            Self::A => "a0000000-77aa-4000-8000-000000000001",
            Self::B => "b0000000-77bb-4000-8000-000000000002",
        }
    }
}

/// Two hosts with libvirt, and a link between them.
#[derive(Debug)]
pub struct Pair {
    /// The host `a.example`.
    pub a: Daemon,
    /// The host `b.example`.
    pub b: Daemon,
    /// The link. The names `a.example` and `b.example` resolve to its IPv4 addresses.
    pub link: Link,
}

impl Pair {
    /// Starts both hosts. Returns when both libvirtds accept connections and have found their QEMU.
    ///
    /// # Errors
    /// See [`LibvirtError`].
    pub fn start() -> Result<Self, LibvirtError> {
        let root = debian::libvirt()?;
        let (a, b) = (Host::new("a")?, Host::new("b")?);
        let link = Link::new(&a, &b, &LinkOptions::default())?;
        let names = format!(
            "127.0.0.1 localhost\n::1 localhost\n{} a.example\n{} b.example\n",
            link.address(&a, Family::V4),
            link.address(&b, Family::V4),
        );
        let [of_a, of_b] = machine::of_hosts([Side::A, Side::B].map(Side::name));
        let start = |host, side: Side, credentials| {
            let mut files = files(side, &names);
            for (name, content) in credentials {
                files.push((format!("{CREDENTIALS}/{name}"), content));
            }
            Daemon::start(host, side.name(), side.uuid(), &root, &files)
        };
        let pair = Self {
            a: start(a, Side::A, of_a)?,
            b: start(b, Side::B, of_b)?,
            link,
        };
        // libvirtd examines QEMU before it first uses QEMU. The examination takes seconds. Let
        // libvirtd do it here, so that migrations take as long as on hosts in use.
        let examined = [&pair.a, &pair.b].map(|on| on.virsh_begin("domcapabilities"));
        for one in examined {
            one?.wait(TIMEOUT)?;
        }
        Ok(pair)
    }

    /// One of the hosts.
    #[must_use]
    pub fn on(&self, side: Side) -> &Daemon {
        match side {
            Side::A => &self.a,
            Side::B => &self.b,
        }
    }
}

/// The files of a host that are not from packages.
fn files(side: Side, names: &str) -> Vec<(String, String)> {
    let passwd = format!(
        "root:x:0:0:root:/root:/bin/sh\n\
         libvirt-qemu:x:{QEMU_USER}:{QEMU_USER}::/var/lib/libvirt:/usr/sbin/nologin\n"
    );
    let group = format!("root:x:0:\nkvm:x:104:\nlibvirt-qemu:x:{QEMU_USER}:\nnogroup:x:65534:\n");
    let qemu = "user = \"libvirt-qemu\"\ngroup = \"libvirt-qemu\"\nsecurity_driver = \"none\"\n\
                cgroup_controllers = []\nnamespaces = []\nstdio_handler = \"file\"\n";
    let libvirtd = format!(
        "listen_tls = 0\nlisten_tcp = 1\nauth_tcp = \"none\"\n\
         auth_unix_ro = \"none\"\nauth_unix_rw = \"none\"\nhost_uuid = \"{}\"\n\
         log_filters = \"1:qemu.qemu_migration 3:*\"\n\
         log_outputs = \"1:file:/var/log/libvirt/libvirtd.log\"\n",
        side.uuid()
    );
    let lookup = "passwd: files\ngroup: files\nhosts: files\n";
    [
        ("etc/hosts", names.to_owned()),
        ("etc/passwd", passwd),
        ("etc/group", group),
        ("etc/nsswitch.conf", lookup.to_owned()),
        ("etc/machine-id", side.uuid().replace('-', "") + "\n"),
        ("etc/libvirt/qemu.conf", qemu.to_owned()),
        ("etc/libvirt/libvirtd.conf", libvirtd),
    ]
    .map(|(path, content)| (path.to_owned(), content))
    .into()
}

/// For `map_err`: wraps an I/O error that occurred at a path or with a program.
fn at(path: impl AsRef<OsStr>) -> impl FnOnce(std::io::Error) -> LibvirtError {
    let path = PathBuf::from(path.as_ref());
    move |error| LibvirtError::Local(path, error)
}
