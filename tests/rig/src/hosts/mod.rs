//! Several hosts on one machine: network namespaces, and links between them that can be slow, long,
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
//! Dropping a host ends all processes in it. The hosts of a killed process remain. When a process
//! creates its first host, it removes the hosts of processes that have ended. To make that
//! possible, the name of a namespace contains the process ID and start time of the process that
//! created it.

mod capture;
mod delay;
mod link;
mod wire;

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
pub use wire::{Traffic, Wire};

use dunlin_test_base::maker::{Maker, kill};

/// An error of a host or a link.
#[derive(Debug, Error)]
pub enum HostsError {
    /// A program is missing, or lacks privileges.
    #[error(
        "`{command}` failed: {output} (hosts need root, network namespaces, `ip`, `nft`, `tcpdump`)"
    )]
    Command {
        /// The program and its arguments.
        command: String,
        /// Its output.
        output: String,
    },
    /// A namespace cannot be entered, or a TUN device, a thread or a file cannot be created.
    #[error("{0}")]
    Kernel(String, #[source] io::Error),
}

/// A host: a network namespace of its own, in which the loopback interface is up.
#[derive(Debug)]
pub struct Host {
    namespace: String,
    file: File,
}

impl Host {
    /// Creates a host; `name` only labels the namespace in listings.
    ///
    /// # Errors
    /// Privileges or `ip` are missing.
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

    /// Returns a command that runs `program` on this host.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        self.enter(&Command::new(program))
    }

    /// Returns a command that runs `command` on this host, with its arguments, environment and
    /// directory. The standard streams are not copied; set them on the returned command. The
    /// spawned child's process ID is that of the program.
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

    /// Runs `task` in a thread on this host. The sockets that the task creates belong to this host,
    /// even if other threads use them.
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

/// Removes the hosts of dead processes, with all processes in them, and returns their names. Keeps
/// the hosts of live processes and the namespaces of other programs.
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

/// Removes a namespace, and kills the processes in it.
fn remove(namespace: &str) {
    let Ok(file) = fs::metadata(Path::new("/run/netns").join(namespace)) else {
        // Another process has removed it.
        return;
    };
    // Delete the name before listing processes, so that no further process can enter. Ignore an
    // error: another process may have deleted the name.
    let _ = ip(&["netns", "delete", namespace]);
    // Repeat, because a killed process may be listed again, and a process that is starting may be
    // listed late.
    for _ in 0..8 {
        let ids = inside(namespace, file.ino());
        if ids.is_empty() {
            return;
        }
        kill(ids.iter().map(String::as_str));
    }
}

/// Returns the processes in a namespace, and the processes of [`Host::enter`] that are about to
/// enter the namespace. For each process, checks the command line first and the namespace second.
/// If the process enters the namespace between the two checks, the second check finds it.
fn inside(namespace: &str, inode: u64) -> Vec<String> {
    let entering = format!("ip\0netns\0exec\0{namespace}\0");
    // Exclude this process. It is not in the namespace, but one of its threads may be.
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

/// Runs a command to its end, and returns its standard output.
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
