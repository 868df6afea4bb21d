//! Several hosts on one machine: network namespaces, and links between them that can be slow, far,
//! cut or lossy.
//!
//! ```no_run
//! use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};
//! use std::net::TcpListener;
//!
//! let source = Host::new("source")?;
//! let destination = Host::new("destination")?;
//! let link = Link::new(&source, &destination, &LinkOptions::default())?;
//! let there = link.address(&destination, Family::V6);
//! let listener = destination.run(|| TcpListener::bind((there, 4444)))??;
//! let started = source.command("true").spawn();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A host goes with its owner, and whatever still runs in it. Of a process that was killed the
//! hosts stay, so the first host of every process removes those whose maker is gone: the name of a
//! namespace holds its maker's process id and start time.

mod capture;
mod delay;
mod link;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::linux::netns;
use thiserror::Error;

pub use capture::Capture;
pub use link::{Direction, Family, Link, LinkOptions};

use dunlin_test_base::maker::{Maker, kill};

/// Why hosts or links cannot be had.
#[derive(Debug, Error)]
pub enum HostsError {
    /// A program is not there, or may not do this.
    #[error("`{command}`: {output} (hosts need root, network namespaces, `ip`, `nft`, `tcpdump`)")]
    Command {
        /// The program and its arguments.
        command: String,
        /// What it said.
        output: String,
    },
    /// A namespace cannot be entered, or a TUN device not be made in it.
    #[error("{0}")]
    Kernel(String, #[source] io::Error),
}

/// One host: a network namespace of its own, with its loopback up.
#[derive(Debug)]
pub struct Host {
    namespace: String,
    file: File,
}

impl Host {
    /// Makes a host; `name` is for those who look at the list of namespaces.
    ///
    /// # Errors
    /// No privilege, or no `ip`.
    pub fn new(name: &str) -> Result<Self, HostsError> {
        static SWEPT: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        SWEPT.call_once(|| {
            sweep();
        });
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("{}-{number}-{name}", Maker::this_process().prefix());
        ip(&["netns", "add", &namespace])?;
        let path = Path::new("/run/netns").join(&namespace);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) => {
                let _ = ip(&["netns", "delete", &namespace]);
                return Err(HostsError::Kernel(path.display().to_string(), error));
            }
        };
        let host = Self { namespace, file };
        ip(&["-n", &host.namespace, "link", "set", "lo", "up"])?;
        Ok(host)
    }

    /// The name of its network namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// A command that runs `program` there.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        self.enter(&Command::new(program))
    }

    /// A command that runs `command` there, with its arguments, environment and directory; what
    /// was said about its standard streams is to be said again. The process has the id of the
    /// child that was started.
    #[must_use]
    pub fn enter(&self, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside
            .args(["netns", "exec", &self.namespace])
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        if let Some(directory) = command.get_current_dir() {
            inside.current_dir(directory);
        }
        inside
    }

    /// Runs `task` in a thread there: the sockets that it makes are this host's, and stay so
    /// wherever they are used.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn run<T: Send>(&self, task: impl FnOnce() -> T + Send) -> Result<T, HostsError> {
        netns::run_inside(&self.file, task)
            .map_err(|error| HostsError::Kernel(self.namespace.clone(), error))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        remove(&self.namespace);
    }
}

/// Removes the hosts that were made by processes which are gone, with everything that still runs in
/// them, and says which these were. Hosts of living processes and namespaces of others stay.
pub fn sweep() -> Vec<String> {
    let names: Vec<String> = fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| Maker::of(name).is_some_and(|maker| !maker.lives()))
        .collect();
    for name in &names {
        remove(name);
    }
    names
}

/// Removes a namespace, and ends what runs in it.
fn remove(namespace: &str) {
    let Ok(file) = fs::metadata(Path::new("/run/netns").join(namespace)) else {
        // Another process that sweeps came first.
        return;
    };
    // Before those inside are looked for, so that nobody enters any more. It may be gone by now.
    let _ = ip(&["netns", "delete", namespace]);
    // Whoever was killed may be seen once more, and whoever was just started not at once.
    for _ in 0..8 {
        let ids = inside(namespace, file.ino());
        if ids.is_empty() {
            return;
        }
        kill(ids.iter().map(String::as_str));
    }
}

/// The processes in a namespace, and those that [`Host::enter`] has started and that are on their
/// way into it. A process of the second kind is looked for first: it becomes one of the first.
fn inside(namespace: &str, inode: u64) -> Vec<String> {
    let entering = format!("ip\0netns\0exec\0{namespace}\0");
    // This process is not in it, but a thread of it may be.
    let own = std::process::id().to_string();
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|id| id.parse::<u32>().is_ok() && *id != own)
        .filter(|id| {
            let process = Path::new("/proc").join(id);
            fs::read(process.join("cmdline"))
                .is_ok_and(|line| line.starts_with(entering.as_bytes()))
                || fs::metadata(process.join("ns/net")).is_ok_and(|net| net.ino() == inode)
        })
        .collect()
}

fn ip(arguments: &[&str]) -> Result<String, HostsError> {
    run(Command::new("ip").args(arguments))
}

/// Runs a command to its end.
fn run(command: &mut Command) -> Result<String, HostsError> {
    let failed = |command: &Command, output: String| HostsError::Command {
        command: std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| word.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" "),
        output,
    };
    let done = command
        .output()
        .map_err(|error| failed(command, error.to_string()))?;
    if !done.status.success() {
        let output = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        return Err(failed(command, output));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}
