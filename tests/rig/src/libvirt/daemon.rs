//! A host with a libvirtd of its own.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{LibvirtError, TIMEOUT, at};
use crate::hosts::Host;
use dunlin_test_base::Scratch;

const SCRIPT: &str = include_str!("host.sh");

/// The user of QEMU, as Debian numbers it.
pub const QEMU_USER: u32 = 64055;

/// A host with libvirtd. Dropping it ends all its processes.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    /// The process ID, outside the host's namespaces, of process 1 of the host.
    first: u32,
    child: Child,
    root: PathBuf,
    host: Host,
    _scratch: Scratch,
}

/// The end of a program.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The exit status; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output and standard error.
    pub said: String,
    /// How long the program ran.
    pub took: Duration,
}

impl Ended {
    /// Whether the exit status is 0.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.code == Some(0)
    }
}

/// A program that runs on a host, killed on drop.
#[derive(Debug)]
pub struct Running {
    child: Child,
    command: String,
    started: Instant,
    /// Receives all output of the program, after the program has closed its standard output and
    /// standard error.
    output: Receiver<Vec<u8>>,
}

impl Daemon {
    /// Starts libvirtd in `host`, with `packages` as its programs and `files` (a path relative to
    /// the root, and the content) as configuration.
    pub(super) fn start(
        host: Host,
        name: &str,
        uuid: &str,
        packages: &Path,
        files: &[(String, String)],
    ) -> Result<Self, LibvirtError> {
        let scratch = Scratch::try_new().map_err(at("a scratch folder"))?;
        let (root, given) = (scratch.join("root"), scratch.join("files"));
        fs::create_dir(&root).map_err(at(&root))?;
        for (path, content) in files {
            let path = given.join(path.trim_start_matches('/'));
            let folder = path.parent().unwrap_or(&given);
            fs::create_dir_all(folder).map_err(at(folder))?;
            fs::write(&path, content).map_err(at(&path))?;
        }
        let (script, log) = (scratch.join("host.sh"), scratch.join("setup"));
        fs::write(&script, SCRIPT).map_err(at(&script))?;
        let mut child = host
            .command("unshare")
            .args([
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
            ])
            .arg("sh")
            .arg(&script)
            .arg(name)
            .args([packages, &root])
            .arg(uuid)
            .arg(&given)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).map_err(at(&log))?)
            .spawn()
            .map_err(at("unshare"))?;
        let mut line = String::new();
        let output = child.stdout.take().expect("the command has a stdout pipe");
        let read = BufReader::new(output).read_line(&mut line);
        let first = read.ok().and_then(|_| line.trim().parse().ok());
        let mut daemon = Self {
            name: name.to_owned(),
            first: first.unwrap_or(0),
            child,
            root,
            host,
            _scratch: scratch,
        };
        if first.is_none() {
            let said = fs::read_to_string(&log).unwrap_or_default();
            return Err(LibvirtError::Host(daemon.name.clone(), said));
        }
        daemon.wait_socket()?;
        Ok(daemon)
    }

    /// Waits until libvirtd accepts connections.
    fn wait_socket(&mut self) -> Result<(), LibvirtError> {
        let socket = self.path("run/libvirt/libvirt-sock");
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            let is_over = matches!(self.child.try_wait(), Ok(Some(_)) | Err(_));
            if is_over || Instant::now() > deadline {
                return Err(LibvirtError::Host(self.name.clone(), self.journal()));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The host's name. Both hosts of a pair resolve it to an address of this host.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The network of this host.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The path of a file of this host, for this process.
    #[must_use]
    pub fn path(&self, file: &str) -> PathBuf {
        let root = self.root.strip_prefix("/").unwrap_or(&self.root);
        PathBuf::from(format!("/proc/{}/root", self.first))
            .join(root)
            .join(file.trim_start_matches('/'))
    }

    /// The path of a file of this host, for the programs that [`Self::enter`] starts.
    #[must_use]
    pub fn path_inside(&self, file: &str) -> PathBuf {
        self.root.join(file.trim_start_matches('/'))
    }

    /// A command that runs a program of this host's file system.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("chroot");
        command.env("LC_ALL", "C").arg(&self.root).arg(program);
        self.enter(&command)
    }

    /// A command that runs a program on this host. The program has the files of the real machine,
    /// but this host's network, name, `/run`, `/etc/hosts` and users. The child's process ID is
    /// that of the program.
    #[must_use]
    pub fn enter(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside
            .args(["--target", &self.first.to_string()])
            .args(["--mount", "--net", "--uts", "--ipc", "--"])
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }

    /// Runs `virsh` with these words as its arguments until it ends.
    ///
    /// # Errors
    /// virsh cannot be started, or does not end within [`TIMEOUT`].
    pub fn virsh(&self, words: &str) -> Result<Ended, LibvirtError> {
        self.virsh_begin(words)?.wait(TIMEOUT)
    }

    /// Starts `virsh` with these words as its arguments.
    ///
    /// # Errors
    /// virsh cannot be started.
    pub fn virsh_begin(&self, words: &str) -> Result<Running, LibvirtError> {
        let mut command = self.command("/usr/bin/virsh");
        command.args(words.split_whitespace());
        Running::start(command)
    }

    /// Kills libvirtd. The VMs of the host continue to run.
    ///
    /// # Errors
    /// libvirtd does not run, or cannot be killed.
    pub fn kill_libvirtd(&self) -> Result<(), LibvirtError> {
        let file = self.path("run/libvirtd.pid");
        let pid = fs::read_to_string(&file).map_err(at(&file))?;
        let mut kill = self.among();
        kill.args(["sh", "-c", &format!("kill -KILL {}", pid.trim())]);
        self.succeed(kill)?;
        let socket = self.path("run/libvirt/libvirt-sock");
        let deadline = Instant::now() + TIMEOUT;
        while UnixStream::connect(&socket).is_ok() {
            if Instant::now() > deadline {
                return Err(LibvirtError::Host(self.name.clone(), self.journal()));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts libvirtd again. Returns when it accepts connections.
    ///
    /// # Errors
    /// libvirtd does not start.
    pub fn start_libvirtd(&mut self) -> Result<(), LibvirtError> {
        let mut start = self.among();
        start
            .args(["chroot", &self.root.to_string_lossy(), "/usr/sbin/libvirtd"])
            .args([
                "--daemon",
                "--listen",
                "--config",
                "/etc/libvirt/libvirtd.conf",
            ]);
        self.succeed(start)?;
        self.wait_socket()
    }

    /// A command that runs among the processes of this host; the caller adds the program and its
    /// arguments.
    fn among(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.first.to_string()])
            .args(["--mount", "--net", "--uts", "--ipc", "--pid", "--"])
            .env("LC_ALL", "C");
        command
    }

    fn succeed(&self, mut command: Command) -> Result<(), LibvirtError> {
        let status = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map_err(at("nsenter"))?;
        if status.success() {
            return Ok(());
        }
        Err(LibvirtError::Host(self.name.clone(), self.journal()))
    }

    /// What libvirtd printed, and its log file.
    #[must_use]
    pub fn journal(&self) -> String {
        ["var/log/libvirt/output", "var/log/libvirt/libvirtd.log"]
            .map(|file| fs::read(self.path(file)).unwrap_or_default())
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .concat()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Killing `unshare` kills process 1, which ends the namespace.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Starts a command.
    ///
    /// # Errors
    /// The command cannot be started.
    pub fn start(mut command: Command) -> Result<Self, LibvirtError> {
        let (mut reader, writer) = io::pipe().map_err(at("a pipe"))?;
        let both = writer.try_clone().map_err(at("a pipe"))?;
        command.stdin(Stdio::null()).stdout(writer).stderr(both);
        let child = command.spawn().map_err(at(command.get_program()))?;
        let (sender, output) = sync_channel(1);
        thread::spawn(move || {
            let mut said = Vec::new();
            let _ = reader.read_to_end(&mut said);
            let _ = sender.send(said);
        });
        Ok(Self {
            child,
            command: format!("{command:?}"),
            started: Instant::now(),
            output,
        })
    }

    /// Waits for the program's end, at most until `limit` after its start.
    ///
    /// # Errors
    /// The program has not ended in time. This function then kills it.
    pub fn wait(mut self, limit: Duration) -> Result<Ended, LibvirtError> {
        let left = limit.saturating_sub(self.started.elapsed());
        let Ok(said) = self.output.recv_timeout(left) else {
            return Err(LibvirtError::Endless(self.command.clone(), limit));
        };
        let status = self.child.wait().map_err(at(&self.command))?;
        Ok(Ended {
            code: status.code(),
            said: String::from_utf8_lossy(&said).into_owned(),
            took: self.started.elapsed(),
        })
    }

    /// Whether the program still runs.
    #[must_use]
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
