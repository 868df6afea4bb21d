//! Tests of the verdicts of `cargo xtask kernel`. Each test boots Debian's newest kernel with
//! scripts instead of test programs.
#![allow(clippy::unwrap_used)]
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use dunlin_rig::debian::{self, Which};
use dunlin_rig::need;
use dunlin_test_base::Scratch;
use xtask::kernel::machine::Machine;
use xtask::kernel::program::{Needs, Program, Under};
use xtask::kernel::verdict::{Failure, Outcome, Verdict};
use xtask::kernel::{Boot, Rig};

/// Boots with `scripts`, given as name and text, and runs them in this order. Returns `None` if the
/// host is not Debian or has no network.
fn boot(scripts: &[(&str, &str)], adjust: impl FnOnce(&mut Machine<'_>)) -> Option<Boot> {
    let qemu = need::qemu()?;
    let kernel = need::fetched(debian::kernel(&Which::Newest))?;
    let folder = Scratch::new();
    let programs: Vec<Program> = scripts
        .iter()
        .map(|(name, text)| {
            let path = folder.join(name);
            fs::write(&path, format!("#!/rig/busybox sh\n{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            Program {
                name: (*name).to_owned(),
                path,
                needs: Needs {
                    cpus: 2,
                    packages: Vec::new(),
                    dunlin: false,
                    previous: false,
                    library_tests: Vec::new(),
                    limit_seconds: 10,
                    under: Under::Both,
                },
            }
        })
        .collect();
    let rig = Rig {
        qemu,
        counting: false,
        verbose: false,
    };
    let boot = rig.boot(&kernel, &programs, 2, adjust).unwrap();
    Some(boot)
}

fn failure(outcome: &Outcome) -> &Failure {
    match &outcome.verdict {
        Verdict::Failed(failure) => failure,
        other => panic!("{} has not failed: {other:?}", outcome.name),
    }
}

#[test]
fn each_end_of_a_test_has_its_verdict() {
    let scripts = [
        ("a-passes", "echo 'a file' >brought-back"),
        ("b-fails", "printf 'no newline'; exit 3"),
        ("c-is-skipped", "exit 77"),
        ("d-hangs", "echo 'it waits'; sleep 1000 & sleep 1000"),
        // The virtual machine's second CPU is in another NUMA node than its sibling thread. So the
        // kernel logs a real warning when that CPU starts (topology_sane of
        // arch/x86/kernel/smpboot.c).
        (
            "e-makes-the-kernel-warn",
            "cd /sys/devices/system/cpu/cpu1; echo 1 >online; echo 0 >online",
        ),
        ("f-leaves-a-process", "sleep 1000 & exit 0"),
        ("g-passes", "exit 0"),
        (
            "h-stops-the-kernel",
            "echo c >/proc/sysrq-trigger; sleep 1000",
        ),
        ("i-is-left-over", "exit 0"),
    ];
    let Some(boot) = boot(&scripts, |machine| {
        machine.qemu_arguments = [
            ["-smp", "cpus=2,sockets=1,cores=1,threads=2"],
            ["-object", "memory-backend-ram,id=near,size=768M"],
            ["-object", "memory-backend-ram,id=far,size=768M"],
            ["-numa", "node,cpus=0,memdev=near"],
            ["-numa", "node,cpus=1,memdev=far"],
        ]
        .concat()
        .into_iter()
        .map(str::to_owned)
        .collect();
        machine.kernel_arguments = vec!["maxcpus=1".to_owned()];
    }) else {
        return;
    };
    let names: Vec<&str> = boot.outcomes.iter().map(|test| &*test.name).collect();
    let expected: Vec<&str> = scripts.iter().map(|(name, _)| *name).take(8).collect();
    assert_eq!(names, expected);
    assert_eq!(boot.rest, ["i-is-left-over"]);

    let [a, b, c, d, e, f, g, h] = &boot.outcomes[..] else {
        unreachable!("their names were compared");
    };
    assert_eq!(a.verdict, Verdict::Passed);
    let file = boot.folder.join("a-passes/brought-back");
    assert_eq!(fs::read_to_string(file).unwrap(), "a file\n");
    assert_eq!(*failure(b), Failure::Test("3".to_owned()));
    assert_eq!(b.output, ["no newline"]);
    assert_eq!(c.verdict, Verdict::Skipped);
    assert_eq!(*failure(d), Failure::TestHung);
    assert_eq!(d.output, ["it waits"]);
    assert!(
        matches!(failure(e), Failure::KernelWarning(line) if line.contains("smpboot.c")),
        "{e:?}"
    );
    assert_eq!(f.verdict, Verdict::Passed);
    assert_eq!(g.verdict, Verdict::Passed);
    assert!(matches!(failure(h), Failure::KernelOops(_)), "{h:?}");
}

#[test]
fn a_test_that_leaves_the_machine_changed_has_failed_and_the_next_has_another() {
    const LOADER: &str = "/proc/sys/kernel/modprobe";
    let changes = format!("rmmod tls; echo /nowhere >{LOADER}; exit 0");
    let scripts = [
        ("a-loads-a-module", "modprobe tls"),
        ("b-changes-the-machine", &*changes),
        ("c-is-left-over", "exit 0"),
    ];
    let Some(boot) = boot(&scripts, |_| {}) else {
        return;
    };
    assert_eq!(boot.outcomes.len(), 2, "{:?}", boot.outcomes);
    assert_eq!(boot.outcomes[0].verdict, Verdict::Passed);
    let changed = &boot.outcomes[1];
    assert_eq!(*failure(changed), Failure::LeftChanged);
    for what in [LOADER, "without the module tls"] {
        let names = |line: &String| line.contains(what);
        assert!(changed.output.iter().any(names), "{what}: {changed:?}");
    }
    assert_eq!(boot.rest, ["c-is-left-over"]);
}

#[test]
fn a_machine_that_says_nothing_has_hung() {
    // With `-S`, QEMU does not run the guest's CPUs.
    let Some(boot) = boot(&[("a", "exit 0")], |machine| {
        machine.qemu_arguments.push("-S".to_owned());
        machine.boot_limit = Duration::from_secs(3);
    }) else {
        return;
    };
    assert_eq!(boot.outcomes.len(), 1);
    assert_eq!(boot.outcomes[0].name, "boot");
    assert_eq!(
        *failure(&boot.outcomes[0]),
        Failure::MachineHung(Duration::from_secs(3))
    );
    assert_eq!(boot.rest, ["a"]);
}
