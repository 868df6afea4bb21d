//! Under the AppArmor profile that libvirt makes for a VM, QEMU migrates through the tunnel's unix
//! sockets with the rule of `dunlin libvirt enable --sockets`, and is refused without it.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_rig::debian::Qemu;
use dunlin_rig::guest::{self, Content, Workload};
use dunlin_rig::machine::{Accelerator, Machine, MachineError, Migration, Setup, begin, finish};
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{FAR, NEAR, identities};
use dunlin_tunnel::{Entrance, Exit, Listen, Mode, Routes, Target, Tunnel, WINDOW_BYTES};
use serde_json::json;

// No other test has one processor, so none shares the boot: the packages are large.
const NEEDS: Needs = Needs {
    cpus: 1,
    packages: &[
        "apparmor",
        "libvirt-daemon",
        "libvirt-daemon-driver-qemu",
        "qemu-system-x86",
    ],
    dunlin: true,
    limit_seconds: 600,
    under: Under::Newest,
    ..Needs::NOTHING
};
const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 4_000,
    hot: 400,
    rate: Some(200),
    content: Content::Random,
    seed: 0xa9,
};
const PROFILE: &str = "libvirt-5f0c1e6a-0000-4000-8000-00000000aa01";
/// The socket of the tunnel, to which the source connects, and that of the destination.
const NEAR_SOCKET: &str = "/run/dunlin/vm/near.ram";
const FAR_SOCKET: &str = "/run/dunlin/vm/far.ram";
/// What `dunlin libvirt enable --sockets` writes.
const RULE: &str = "/etc/apparmor.d/abstractions/libvirt-qemu.d/dunlin";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let _left = Profile::load(guest);
        fs::create_dir_all("/run/dunlin/vm").expect("/run is writable");
        let (_far, _near) = tunnels();
        let mut options = Setup::new(
            &Qemu::installed(),
            guest::Guest::Bare,
            WORKLOAD,
            Accelerator::Tcg,
        );
        options.options = ["-cpu", "max"].map(str::to_owned).into();
        let mut source = confined(|| Machine::start(&options, None));
        source.wait_ready().expect("the guest fills its pages");
        let incoming = || confined(|| Machine::start_incoming(&options, None));
        let migration = Migration::through(
            &format!("unix:{NEAR_SOCKET}"),
            &format!("unix:{FAR_SOCKET}"),
        );

        // Neither QEMU may use a socket there.
        let mut destination = incoming();
        let refused = begin(&mut source, &mut destination, &migration);
        assert_refused(&refused.expect_err("the destination may not make its socket"));
        assert!(!Path::new(FAR_SOCKET).exists());
        let connects = source.execute("migrate", json!({"uri": migration.connect}));
        match connects {
            Err(error) => assert_refused(&error),
            Ok(_) => {
                let failed = finish(&mut source, "source");
                assert_refused(&failed.expect_err("the source may not connect"));
            }
        }
        source.next_beat().expect("the guest continues");
        drop(destination);

        enable(guest);
        Profile::reload(guest);
        let mut destination = incoming();
        begin(&mut source, &mut destination, &migration).expect("the migration begins");
        finish(&mut source, "source").expect("the migration completes");
        finish(&mut destination, "destination").expect("the migration completes");
        let differs = source.first_difference(&mut destination);
        assert_eq!(differs.expect("both are paused"), None);
        destination.resume().expect("the guest continues");
        let pages = destination.check_pages().expect("every page is right");
        assert_eq!(pages, WORKLOAD.pages);
    })
}

fn assert_refused(error: &MachineError) {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    assert!(text.contains("Permission denied"), "{text}");
}

/// Starts a QEMU under the profile, which must be in force.
fn confined(start: impl FnOnce() -> Result<Machine, MachineError>) -> Machine {
    let exec = "/proc/thread-self/attr/apparmor/exec";
    // Applies to the next program of this thread and of the processes that it creates.
    fs::write(exec, format!("exec {PROFILE}")).expect("the profile is loaded");
    let machine = start();
    fs::write(exec, "exec unconfined").expect("the test is unconfined");
    let machine = machine.expect("QEMU starts");
    let label = fs::read_to_string(format!("/proc/{}/attr/apparmor/current", machine.process()));
    let label = label.expect("QEMU runs");
    assert_eq!(label.trim(), format!("{PROFILE} (enforce)"));
    machine
}

/// Two tunnels, from the source's socket to the destination's.
fn tunnels() -> (Tunnel, Tunnel) {
    let authority = Authority::new();
    let any = || TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let exit = Exit {
        route: "ram".to_owned(),
        allow: names(&[NEAR]),
        target: Target::Unix(FAR_SOCKET.into()),
        window_bytes: WINDOW_BYTES,
    };
    let routes = Routes::new(Vec::new(), vec![exit]).expect("the route is valid");
    let far = Tunnel::builder(any(), identities(authority.identity(&[FAR])), &routes);
    let far = far.start().expect("the tunnel starts");
    let entrance = Entrance {
        route: "ram".to_owned(),
        listen: Listen::Unix(NEAR_SOCKET.into()),
        to: far.address().expect("it accepts peers").to_string(),
        peers: names(&[FAR]),
        lanes: 2,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    };
    let routes = Routes::new(vec![entrance], Vec::new()).expect("the route is valid");
    let near = Tunnel::builder(None, identities(authority.identity(&[NEAR])), &routes);
    (far, near.start().expect("the tunnel starts"))
}

/// Lets Dunlin's command write the rule. The peer need not exist.
fn enable(guest: &Guest) {
    guest.command("dunlin", &["pki", "init", "ca"]);
    let issue = ["pki", "issue", "--ca", "ca", "--name", "a.test", "a"];
    guest.command("dunlin", &issue);
    let words = "libvirt enable --sockets --peer 192.0.2.2=b.test --identity a --config a.toml";
    let words: Vec<_> = words.split_whitespace().collect();
    let printed = guest.output("dunlin", &words);
    assert!(printed.contains(RULE), "{printed}");
}

/// The profile of a VM. Dropping it unloads the profile and removes the files of the test.
struct Profile;

impl Profile {
    /// Lets libvirt's program make and load the profile.
    fn load(guest: &Guest) -> Self {
        if !Path::new("/sys/kernel/security/apparmor").exists() {
            guest.command(
                "mount",
                &["-t", "securityfs", "none", "/sys/kernel/security"],
            );
        }
        let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
        assert_eq!(enabled.expect("the kernel has AppArmor").trim(), "Y");
        let uuid = PROFILE.trim_start_matches("libvirt-");
        let domain = format!(
            "<domain type='qemu'><name>web</name><uuid>{uuid}</uuid>\
             <memory unit='MiB'>64</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type></os><devices>\
             <emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>"
        );
        let mut helper = Command::new("/usr/lib/libvirt/virt-aa-helper")
            .args(["-c", "-u", PROFILE])
            .stdin(Stdio::piped())
            .spawn()
            .expect("the package has virt-aa-helper");
        let input = helper.stdin.as_mut().expect("the stream is piped");
        input
            .write_all(domain.as_bytes())
            .expect("it reads the domain");
        drop(helper.stdin.take());
        assert!(
            helper.wait().expect("it ends").success(),
            "virt-aa-helper failed"
        );
        let loaded = Self;
        // The rig's files take the place of those that libvirt gives to QEMU.
        let own = format!("\"{}/**\" rwk,\n", std::env::temp_dir().display());
        let files = format!("/etc/apparmor.d/libvirt/{PROFILE}.files");
        let text = fs::read_to_string(&files).expect("virt-aa-helper wrote it");
        fs::write(&files, text + &own).expect("/etc is writable");
        Self::reload(guest);
        loaded
    }

    fn reload(guest: &Guest) {
        let file = format!("/etc/apparmor.d/libvirt/{PROFILE}");
        guest.command("apparmor_parser", &["--replace", "--skip-cache", &file]);
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        let file = format!("/etc/apparmor.d/libvirt/{PROFILE}");
        let _ = Command::new("apparmor_parser")
            .args(["--remove", &file])
            .status();
        for file in [
            &file,
            &format!("{file}.files"),
            RULE,
            "/etc/tmpfiles.d/dunlin-libvirt.conf",
        ] {
            let _ = fs::remove_file(file);
        }
        let _ = fs::remove_dir_all("/run/dunlin/vm");
    }
}
