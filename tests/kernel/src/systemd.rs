//! Debian's systemd in namespaces of the virtual machine, with the units in `dist/systemd`.
//!
//! The manager is process 1 of its own process and control group namespaces. The folders in which
//! the test changes files are copies on file systems of their own.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::Guest;

/// The time limit of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The control group of the manager.
const GROUP: &str = "/sys/fs/cgroup/systemd-of-the-test";

/// The folders in which the test changes files.
const REPLACED: [&str; 6] = [
    "/etc",
    "/run",
    "/var",
    "/usr/lib/systemd/system",
    "/usr/lib/sysusers.d",
    "/usr/lib/tmpfiles.d",
];

/// The units, and the files that are installed with them, each with its path in the Debian package.
const SHIPPED: [(&str, &str); 6] = [
    (
        "/usr/lib/systemd/system/dunlin-tunnel.service",
        include_str!("../../../dist/systemd/dunlin-tunnel.service"),
    ),
    (
        "/usr/lib/systemd/system/dunlin-tunnel-ram.socket",
        include_str!("../../../dist/systemd/dunlin-tunnel-ram.socket"),
    ),
    (
        "/usr/lib/systemd/system/dunlin-redirect.service",
        include_str!("../../../dist/systemd/dunlin-redirect.service"),
    ),
    (
        "/usr/lib/systemd/system/dunlin-redirect-watch.service",
        include_str!("../../../dist/systemd/dunlin-redirect-watch.service"),
    ),
    (
        "/usr/lib/sysusers.d/dunlin.conf",
        include_str!("../../../dist/systemd/dunlin-sysusers.conf"),
    ),
    (
        "/usr/lib/tmpfiles.d/dunlin.conf",
        include_str!("../../../dist/systemd/dunlin-tmpfiles.conf"),
    ),
];

/// The script that dpkg runs after it has unpacked the package.
const POSTINST: &str = include_str!("../../../dist/debian/postinst");

/// Units of Debian that the test does not need, because the machine has already booted. On an
/// emulated processor they would take seconds.
const MASKED: [&str; 21] = [
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "kmod-static-nodes.service",
    "ldconfig.service",
    "proc-sys-fs-binfmt_misc.automount",
    "run-lock.mount",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-ask-password-console.path",
    "systemd-journal-catalog-update.service",
    "systemd-journal-flush.service",
    "systemd-modules-load.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
    "systemd-sysusers.service",
    "systemd-tmpfiles-setup-dev-early.service",
    "systemd-tmpfiles-setup-dev.service",
    "systemd-tmpfiles-setup.service",
];

/// A running service manager. Dropping it kills all of its processes.
#[derive(Debug)]
pub struct Manager {
    process: Child,
    /// The process ID of systemd, outside of its namespace.
    first: String,
}

/// A process of a service, as the kernel describes it.
#[derive(Debug)]
pub struct Status(String);

impl Status {
    /// The words of a line of `/proc/PID/status`.
    ///
    /// # Panics
    /// The kernel has no such line.
    #[must_use]
    pub fn field(&self, name: &str) -> Vec<&str> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {}", self.0));
        line.trim_start_matches(':').split_whitespace().collect()
    }

    /// Whether every capability set of the process is a subset of `capabilities`.
    ///
    /// # Panics
    /// See [`Status::field`].
    #[must_use]
    pub fn has_at_most(&self, capabilities: u64) -> bool {
        ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]
            .iter()
            .all(|set| {
                let bits = u64::from_str_radix(self.field(set)[0], 16);
                bits.is_ok_and(|bits| bits & !capabilities == 0)
            })
    }
}

impl Manager {
    /// Installs the units, and creates the users and directories, as dpkg does. `prepare` writes
    /// the configuration. Then starts the manager.
    ///
    /// # Panics
    /// A command fails, or the manager does not answer.
    #[must_use]
    pub fn start(guest: &Guest, prepare: impl FnOnce()) -> Self {
        for folder in REPLACED {
            replace(guest, folder);
        }
        // This creates Debian's own users. The package's script creates the users of the services.
        guest.command("systemd-sysusers", &[]);
        for (path, text) in SHIPPED {
            write(path, text);
        }
        for unit in MASKED {
            let path = format!("/etc/systemd/system/{unit}");
            std::os::unix::fs::symlink("/dev/null", path).expect("the unit is not masked yet");
        }
        write("/etc/machine-id", "0123456789abcdef0123456789abcdef\n");
        fs::create_dir("/etc/dunlin").expect("/etc is new");
        write(
            &guest.folder().join("postinst").display().to_string(),
            POSTINST,
        );
        guest.command("sh", &["postinst", "configure"]);
        prepare();
        guest.command("mount", &["-t", "cgroup2", "none", "/sys/fs/cgroup"]);
        fs::create_dir(GROUP).expect("the control group is new");
        // A control group that contains processes cannot have subgroups with controllers. Therefore
        // only process 1 of the new namespaces enters the group. It becomes systemd, which moves
        // itself to a subgroup. Use util-linux's unshare, because busybox's cannot create a control
        // group namespace.
        let script = format!(
            "echo 0 >{GROUP}/cgroup.procs; exec /usr/bin/unshare --cgroup sh -c 'umount \
             /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec /usr/lib/systemd/systemd \
             --unit=sysinit.target --log-target=console --show-status=no'"
        );
        let process = Command::new("/usr/bin/unshare")
            .args(["--pid", "--fork", "--mount-proc", "sh", "-c", &script])
            .env("container", "dunlin-test")
            .stdin(Stdio::null())
            .spawn()
            .expect("the package util-linux has unshare");
        let mut manager = Self {
            process,
            first: String::new(),
        };
        manager.wait_for("systemd runs", || first_process().is_some());
        manager.first = first_process().expect("it runs");
        manager.wait_for("systemd has booted", || {
            let mut asked = manager.inside("systemctl");
            asked.args(["is-active", "--quiet", "sysinit.target"]);
            asked.stderr(Stdio::null());
            asked.status().is_ok_and(|status| status.success())
        });
        manager
    }

    /// Returns a command that runs a program in the manager's process namespace. The manager
    /// refuses clients from other namespaces.
    fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("/usr/bin/nsenter");
        command.args(["--target", &self.first, "--pid", "--mount", program]);
        command
    }

    /// Configures the package as in an upgrade, and returns what its script prints.
    ///
    /// # Panics
    /// The script fails.
    #[must_use]
    pub fn upgrade(&self, before: &str) -> String {
        let mut script = self.inside("sh");
        script.args(["-c", POSTINST, "postinst", "configure", before]);
        let done = script.output().expect("the package util-linux has nsenter");
        assert!(done.status.success(), "{done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Runs a command that talks to the manager. Returns its output.
    ///
    /// # Panics
    /// The command fails.
    #[must_use]
    pub fn run(&self, program: &str, words: &[&str]) -> String {
        let done = self.inside(program).args(words).output();
        let done = done.expect("the package util-linux has nsenter");
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(
            done.status.success(),
            "{text}{}",
            String::from_utf8_lossy(&done.stderr)
        );
        text
    }

    /// Runs systemctl. If it fails, prints the state of Dunlin's units and the end of the journal.
    ///
    /// # Panics
    /// systemctl fails.
    pub fn systemctl(&self, words: &[&str]) {
        let run = |program, words: &[&str]| {
            let status = self.inside(program).args(words).status();
            status.is_ok_and(|status| status.success())
        };
        if !run("systemctl", words) {
            let _ = run("systemctl", &["--no-pager", "status", "dunlin-*"]);
            let _ = run("journalctl", &["--no-pager", "--lines=50"]);
            panic!("systemctl {words:?} failed");
        }
    }

    /// A property of a unit.
    ///
    /// # Panics
    /// systemctl fails.
    #[must_use]
    pub fn show(&self, unit: &str, property: &str) -> String {
        let mut command = self.inside("systemctl");
        command.args(["show", "--value", "--property", property, unit]);
        let done = command
            .output()
            .expect("the package util-linux has nsenter");
        assert!(done.status.success(), "{done:?}");
        String::from_utf8_lossy(&done.stdout).trim_end().to_owned()
    }

    /// The main process of a service, in the test's process namespace.
    ///
    /// # Panics
    /// The service does not run.
    #[must_use]
    pub fn main_process(&self, unit: &str) -> Status {
        let inner = self.show(unit, "MainPID");
        let group = self.show(unit, "ControlGroup");
        let listed = fs::read_to_string(format!("{GROUP}{group}/cgroup.procs"));
        let listed = listed.unwrap_or_else(|error| panic!("{unit}: {error}"));
        let found = listed.lines().find_map(|process| {
            let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
            let status = Status(status);
            (status.field("NSpid").last() == Some(&inner.as_str())).then_some(status)
        });
        found.unwrap_or_else(|| panic!("{unit} has no process {inner} in {listed}"))
    }

    /// Waits until `is_so` returns true.
    ///
    /// # Panics
    /// `is_so` does not return true within the time limit.
    pub fn wait_for(&self, what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + TIMEOUT;
        while !is_so() {
            assert!(Instant::now() < until, "not within {TIMEOUT:?}: {what}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if let Err(error) = fs::write(format!("{GROUP}/cgroup.kill"), "1") {
            println!("{GROUP}/cgroup.kill: {error}");
        }
        let _ = self.process.wait();
    }
}

/// The process ID of systemd. `None` until systemd has set up its control groups and has entered
/// init.scope.
fn first_process() -> Option<String> {
    let listed = fs::read_to_string(format!("{GROUP}/init.scope/cgroup.procs")).ok()?;
    listed.lines().next().map(str::to_owned)
}

/// Mounts a file system with a copy of a folder in place of the folder.
fn replace(guest: &Guest, folder: &str) {
    let copy = guest.folder().join("copy").display().to_string();
    fs::create_dir_all(folder).expect("the root is writable");
    guest.command("cp", &["-a", folder, &copy]);
    guest.command("mount", &["-t", "tmpfs", "none", folder]);
    guest.command("cp", &["-a", &format!("{copy}/."), folder]);
    fs::remove_dir_all(copy).expect("the copy exists");
}

/// Writes a file, and creates its directory.
///
/// # Panics
/// The file cannot be written.
pub fn write(path: &str, text: &str) {
    if let Some(folder) = Path::new(path).parent() {
        fs::create_dir_all(folder).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
    fs::write(path, text).unwrap_or_else(|error| panic!("{path}: {error}"));
}
