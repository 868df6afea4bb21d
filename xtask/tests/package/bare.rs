//! A minimal Debian to install packages on: an overlay over the cached file system. Each command
//! runs in a mount namespace and a PID namespace of its own. No service manager runs.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use dunlin_rig::debian;
use dunlin_rig::need;
use dunlin_test_base::Scratch;
use dunlin_test_base::need::or_skip;
use xtask::package::RELEASE;

/// Mounts the file system and runs a script in it. The arguments are the scratch directory, the
/// lower directory of the overlay, and the script.
const ENTER: &str = "set -e; cd \"$1\"
mount --bind \"$2\" below
mount -t overlay -o lowerdir=below,upperdir=upper,workdir=work none root
mount -t proc none root/proc
mount --rbind /dev root/dev
mount -t sysfs none root/sys 2>/dev/null || mount --rbind /sys root/sys
mount --bind run root/run
mkdir -p root/shared
mount --bind shared root/shared
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root TERM=dumb \\
    DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 MANWIDTH=100 chroot root sh -c \"$3\"";

/// A program that replaces systemctl. For `is-active`, it searches a list of running units. For
/// other commands, it logs its arguments.
const SYSTEMCTL: &str = "#!/bin/sh\ncase $2 in is-active) exec grep -qx \"$3\" /run/active ;; esac\n\
                         echo \"$*\" >>/run/calls\n";

/// Paths in which files change independently of the package's content.
const CHANGING: [&str; 8] = [
    "/dev",
    "/proc",
    "/shared",
    "/sys",
    "/tmp",
    "/var/cache",
    "/var/lib/dpkg",
    "/var/log",
];
/// The files that list users and groups. A purge of the package does not remove its user and group,
/// as is usual in Debian.
const USERS: [&str; 9] = [
    "/etc/group",
    "/etc/group-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/passwd",
    "/etc/passwd-",
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/.pwd.lock",
];

pub struct Bare {
    scratch: Scratch,
    below: PathBuf,
    /// The host's directory that is mounted in the Debian as /shared.
    pub shared: PathBuf,
}

impl Bare {
    /// Returns `None` without a network or without the permission to mount. In CI, it panics
    /// instead.
    pub fn new() -> Option<Self> {
        let below = need::fetched(debian::bare(RELEASE, &["man-db", "systemd"]))?;
        let scratch = Scratch::in_memory();
        for folder in ["root", "below", "upper", "work", "shared", "run"] {
            fs::create_dir(scratch.join(folder)).unwrap();
        }
        let shared = scratch.join("shared");
        let bare = Self {
            scratch,
            below,
            shared,
        };
        let tried = bare.command("true").output().unwrap();
        let permitted = match tried.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&tried.stderr).into_owned()),
        };
        or_skip("permission to mount file systems", permitted)?;
        Some(bare)
    }

    fn command(&self, script: &str) -> Command {
        let mut unshare = Command::new("unshare");
        unshare.args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            ENTER,
            "sh",
        ]);
        unshare
            .arg(self.scratch.path())
            .arg(&self.below)
            .arg(script);
        unshare
    }

    /// Runs a script, which must succeed, and returns its output.
    pub fn run(&self, script: &str) -> String {
        let done = self.command(script).output().unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&done.stdout), text(&done.stderr));
        assert!(done.status.success(), "{script}: {out}{err}");
        out
    }

    /// A shell for several scripts. The processes that a script starts may outlive the script. Do
    /// not call [`Bare::run`] until the shell has ended.
    pub fn shell(&self) -> Shell {
        let mut command = self.command("exec sh");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Shell {
            stdin: child.stdin.take().unwrap(),
            stdout: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// A file in /run of the Debian.
    pub fn run_file(&self, name: &str) -> PathBuf {
        self.scratch.join("run").join(name)
    }

    /// Makes the package's scripts find a systemd that runs these units.
    pub fn fake_systemd(&self, active: &[&str]) {
        fs::create_dir_all(self.scratch.join("run/systemd/system")).unwrap();
        fs::write(self.scratch.join("run/active"), active.join("\n") + "\n").unwrap();
        fs::write(self.shared.join("systemctl"), SYSTEMCTL).unwrap();
        self.run("install -D -m 755 /shared/systemctl /usr/local/bin/systemctl");
    }

    pub fn no_systemd(&self) {
        fs::remove_dir_all(self.scratch.join("run/systemd")).unwrap();
        for file in ["active", "calls"] {
            fs::remove_file(self.scratch.join("run").join(file)).unwrap();
        }
        self.run("rm /usr/local/bin/systemctl");
    }

    /// The arguments of the logged calls of systemctl ([`SYSTEMCTL`]) since the last call of this
    /// function.
    pub fn systemctl_calls(&self) -> Vec<String> {
        let log = self.scratch.join("run/calls");
        let calls = fs::read_to_string(&log).unwrap();
        fs::write(&log, "").unwrap();
        calls.lines().map(Into::into).collect()
    }

    /// All files with their types, modes, owners and link targets, except [`CHANGING`] and
    /// [`USERS`].
    pub fn files(&self) -> BTreeSet<String> {
        let prune: Vec<_> = CHANGING
            .iter()
            .map(|path| format!("-path {path}"))
            .collect();
        let users: Vec<_> = USERS.iter().map(|path| format!("! -path {path}")).collect();
        let script = format!(
            "find / \\( {} \\) -prune -o {} -printf '%p %m %U %G %y %l\\n'",
            prune.join(" -o "),
            users.join(" ")
        );
        self.run(&script).lines().map(Into::into).collect()
    }
}

/// A shell in the Debian. When the shell ends, all processes that it has started end too.
pub struct Shell {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Shell {
    /// Runs a script, which must succeed, and returns its output.
    pub fn run(&mut self, script: &str) -> String {
        let (out, code) = self.ask(&format!("( {script} ) </dev/null 2>&1; echo \"end $?\""));
        assert_eq!(code, 0, "{script}: {out}");
        out
    }

    /// Starts a program with its output in /shared/NAME.log; returns its process ID.
    pub fn start(&mut self, name: &str, line: &str) -> u32 {
        // Remove the log of an earlier start. Otherwise a caller that waits for a line would find a
        // line of the earlier start.
        let log = format!("/shared/{name}.log");
        let start = format!("rm -f {log}; {line} </dev/null >{log} 2>&1 & echo \"end $!\"");
        self.ask(&start).1
    }

    /// Waits for a program that this shell has started; returns its exit code.
    pub fn wait(&mut self, pid: u32) -> u32 {
        self.ask(&format!("wait {pid}; echo \"end $?\"")).1
    }

    /// Sends a line to the shell; returns its output, and the number in the line `end`.
    fn ask(&mut self, line: &str) -> (String, u32) {
        writeln!(self.stdin, "{line}").unwrap();
        let mut out = String::new();
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "{out}");
            if let Some(number) = line.strip_prefix("end ") {
                return (out, number.trim().parse().unwrap());
            }
            out += &line;
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // When the first process of a PID namespace ends, the kernel kills the other processes.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
