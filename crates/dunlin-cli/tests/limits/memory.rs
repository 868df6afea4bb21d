//! A destination in a control group with too little memory for the VM.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::host::{after, assert_says, skip};
use crate::support::{Hosts, assert_at_source};
use crate::{GUEST, failed, listening, migrate, receive, text};

/// A control group with a memory limit, inside the control group of this process. It is removed on
/// drop.
struct Cgroup {
    directory: PathBuf,
    limit: &'static str,
}

impl Cgroup {
    /// Returns `None` if this process cannot create a control group.
    fn new(limit_bytes: u64) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let group = |controllers: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let named = fields.next()?.split(',').any(|one| one == controllers);
                fields.next().filter(|_| named)
            })
        };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dunlin-test-{}-{number}", std::process::id());
        let mut tried = Vec::new();
        for (mount, controllers, limit) in [
            ("/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "", "memory.max"),
        ] {
            let Some(group) = group(controllers) else {
                continue;
            };
            let directory = PathBuf::from(format!("{mount}{group}/{name}"));
            match fs::create_dir(&directory) {
                Ok(()) => {}
                Err(error) => {
                    tried.push(format!("{}: {error}", directory.display()));
                    continue;
                }
            }
            let cgroup = Self { directory, limit };
            match cgroup.limit(limit_bytes) {
                Ok(()) => return Some(cgroup),
                Err(error) => tried.push(format!("{limit}: {error}")),
            }
        }
        skip(&format!("no control group with a memory limit: {tried:?}"));
        None
    }

    fn limit(&self, bytes: u64) -> io::Result<()> {
        fs::write(self.directory.join(self.limit), bytes.to_string())
    }

    /// Wraps the command so that it runs in this control group.
    fn holds(&self, command: &Command) -> Command {
        let processes = self.directory.join("cgroup.procs");
        after(&format!("echo $$ > {}", processes.display()), command)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The group can be removed, because its processes have ended.
        let _ = fs::remove_dir(&self.directory);
    }
}

/// Claim P8 of docs/security.
#[test]
fn a_vm_larger_than_the_destinations_control_group_is_refused_before_it_moves() {
    let Some(cgroup) = Cgroup::new(192 << 20) else {
        return;
    };
    let hosts = Hosts::new();
    let source = hosts.run(
        "1",
        "--guest process --memory 256M --fill zero --dirty-rate 100",
    );
    let destination = listening(&hosts, cgroup.holds(&receive(&hosts, "")), "2");
    let done = migrate(&hosts, &source, &destination, "");
    assert!(!done.out.contains("lane-up"), "{}", done.out);
    let said = failed(&hosts, &source, done, "no-memory", "peer");
    assert_says(&said, &["268435456", "201326592", "/memory."]);
    let rejected = destination.wait_for("rejected");
    let parts = ["201326592", "(no-memory, at fault: this side)"];
    assert_says(&text(&rejected), &parts);
}

#[test]
fn i2_a_destination_that_the_kernel_kills_for_lack_of_memory_leaves_the_vm_at_the_source() {
    let Some(cgroup) = Cgroup::new(256 << 20) else {
        return;
    };
    let hosts = Hosts::new();
    let source = hosts.run("1", GUEST);
    let destination = listening(&hosts, cgroup.holds(&receive(&hosts, "")), "2");
    let flags = "--peer b.test --rate 16M";
    let client = hosts.begin(&source, &destination, "a", flags);
    client.wait_for("lane-up");
    // The limit is less than the VM needs, but more than has arrived.
    cgroup.limit(32 << 20).unwrap();
    let (code, line) = client.ended();
    assert_eq!(code, 1, "{line}");
    assert_eq!(destination.code(), -1, "the destination was not killed");
    hosts.assert_runs(&source);
    assert_at_source(&line, "control-lost", "peer");
    // The error only hints at the cause, because the source cannot see why the destination ended.
    assert_says(&text(&line), &["killed it for lack of memory"]);
    // The VM can still migrate.
    let destination = hosts.receive("b", "3", "");
    migrate(&hosts, &source, &destination, "--verify").expect(0);
}
