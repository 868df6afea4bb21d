//! QEMU migrates through the tunnel under the AppArmor profile that libvirt makes for a VM.
//! Over unix sockets, the migration succeeds with the rule of `dunlin libvirt enable --sockets`,
//! and fails without the rule. Over TCP, which a redirect uses too, QEMU needs no rule.
//!
//! No libvirtd runs, because both hosts share one kernel. The daemons of both would load a profile
//! with the VM's name into this kernel.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use dunlin_kernel_tests::systemd::write;
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_rig::debian::Qemu;
use dunlin_rig::guest::{self, Content, Workload};
use dunlin_rig::machine::{Accelerator, Machine, MachineError, Migration, Setup, begin, finish};
use dunlin_test_support::lane::{Authority, names};
use dunlin_test_support::tunnel::{FAR, NEAR, identities};
use dunlin_tunnel::{Entrance, Exit, Listen, Mode, Routes, Target, Tunnel, WINDOW_BYTES};

// Tests with the same number of CPUs share a boot of the machine. No other test has one CPU, so the
// large packages of this test are loaded for this test only.
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

const UUID: &str = "5f0c1e6a-0000-4000-8000-00000000aa01";
const DIRECTORY: &str = "/run/dunlin/vm";
/// The sockets of the route over unix sockets: the source's QEMU connects to the first, and the
/// tunnel connects to the second. The tunnel listens on the first, and the destination's QEMU
/// listens on the second.
const NEAR_SOCKET: &str = "/run/dunlin/vm/near.ram";
const FAR_SOCKET: &str = "/run/dunlin/vm/far.ram";
/// The addresses of the route over TCP: the tunnel listens on the first, and the destination's QEMU
/// listens on the second.
const NEAR_PORT: &str = "127.0.0.1:7001";
const FAR_PORT: &str = "127.0.0.1:7002";
/// The file with the AppArmor rule that `dunlin libvirt enable --sockets` writes.
const RULE: &str = "/etc/apparmor.d/abstractions/libvirt-qemu.d/dunlin";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let profile = Profile::load(guest);
        fs::create_dir_all(DIRECTORY).expect("/run is writable");
        let _tunnels = tunnels();
        let mut setup = Setup::new(
            &Qemu::installed(),
            guest::Guest::Bare,
            WORKLOAD,
            Accelerator::Tcg,
        );
        setup.options = ["-cpu", "max"].map(str::to_owned).into();
        let incoming = || profile.confine(|| Machine::start_incoming(&setup, None));
        let mut source = profile.confine(|| Machine::start(&setup, None));
        source.wait_ready().expect("the guest fills its pages");

        let over_tcp = Migration::through(&format!("tcp:{NEAR_PORT}"), &format!("tcp:{FAR_PORT}"));
        let mut source = moved(source, incoming(), &over_tcp);
        // Without the rule, AppArmor does not allow QEMU at the destination to create its socket.
        let over_unix = Migration::through(
            &format!("unix:{NEAR_SOCKET}"),
            &format!("unix:{FAR_SOCKET}"),
        );
        let mut destination = incoming();
        let denied = begin(&mut source, &mut destination, &over_unix);
        assert_denied(&denied.expect_err("the rule is missing"));
        assert!(!Path::new(FAR_SOCKET).exists());
        source.next_beat().expect("the guest continues");
        drop(destination);

        enable(guest);
        profile.replace(guest);
        moved(source, incoming(), &over_unix);
    })
}

/// Migrates. Returns the machine at the destination, where the guest runs.
fn moved(mut source: Machine, mut destination: Machine, migration: &Migration) -> Machine {
    begin(&mut source, &mut destination, migration).expect("the migration begins");
    finish(&mut source, "source").expect("the migration completes");
    finish(&mut destination, "destination").expect("the migration completes");
    let differs = source.first_difference(&mut destination);
    assert_eq!(differs.expect("both are paused"), None);
    drop(source);
    destination.resume().expect("the guest continues");
    let pages = destination.check_pages().expect("every page is right");
    assert_eq!(pages, WORKLOAD.pages);
    println!("migrated over {}", migration.listen);
    destination
}

/// Expects that the kernel denied QEMU an access.
fn assert_denied(error: &MachineError) {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    println!("{text}");
    assert!(text.contains("Permission denied"), "{text}");
    assert!(text.contains(FAR_SOCKET), "{text}");
}

/// Two tunnels, with a route over unix sockets and one over TCP.
fn tunnels() -> (Tunnel, Tunnel) {
    let authority = Authority::new();
    let any = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let exit = |route: &str, target| Exit {
        route: route.to_owned(),
        allow: names(&[NEAR]),
        target,
        window_bytes: WINDOW_BYTES,
    };
    let exits = vec![
        exit("unix", Target::Unix(FAR_SOCKET.into())),
        exit("tcp", Target::Tcp(FAR_PORT.to_owned())),
    ];
    let routes = Routes::new(Vec::new(), exits).expect("the routes are valid");
    let far = Tunnel::builder(any, identities(authority.identity(&[FAR])), &routes);
    let far = far.start().expect("the tunnel starts");
    let entrance = |route: &str, listen| Entrance {
        route: route.to_owned(),
        listen,
        to: far.address().expect("it accepts peers").to_string(),
        peers: names(&[FAR]),
        lanes: 2,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    };
    let entrances = vec![
        entrance("unix", Listen::Unix(NEAR_SOCKET.into())),
        entrance("tcp", Listen::Tcp(NEAR_PORT.parse().expect("an address"))),
    ];
    let routes = Routes::new(entrances, Vec::new()).expect("the routes are valid");
    let near = Tunnel::builder(
        None::<TcpListener>,
        identities(authority.identity(&[NEAR])),
        &routes,
    );
    let near = near.start().expect("the tunnel starts");
    (far, near)
}

/// Runs `dunlin libvirt enable --sockets`, which writes the rule. The peer that the command
/// requires does not exist.
fn enable(guest: &Guest) {
    assert!(!Path::new(RULE).exists());
    write("/etc/passwd", "root:x:0:0::/root:/bin/sh\n");
    write("/etc/group", "root:x:0:\n");
    guest.command("dunlin", &["pki", "init", "ca"]);
    let issue = ["pki", "issue", "--ca", "ca", "--name", "a.test", "a"];
    guest.command("dunlin", &issue);
    let words = "libvirt enable --sockets --peer 192.0.2.2=b.test --identity a --config a.toml";
    let words: Vec<_> = words.split_whitespace().collect();
    println!("{}", guest.output("dunlin", &words));
    assert!(Path::new(RULE).exists());
}

/// The loaded profile of a VM. Dropping it unloads the profile.
struct Profile {
    name: String,
    file: String,
}

impl Profile {
    /// Makes and loads the profile with libvirt's program `virt-aa-helper`.
    fn load(guest: &Guest) -> Self {
        guest.command(
            "mount",
            &["-t", "securityfs", "none", "/sys/kernel/security"],
        );
        let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled");
        assert_eq!(enabled.expect("the kernel has AppArmor").trim(), "Y");
        let domain = format!(
            "<domain type='qemu'><name>web</name><uuid>{UUID}</uuid>\
             <memory unit='MiB'>64</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type></os><devices>\
             <emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>"
        );
        let name = format!("libvirt-{UUID}");
        let mut helper = Command::new("/usr/lib/libvirt/virt-aa-helper")
            .args(["-c", "-u", &name])
            .stdin(Stdio::piped())
            .spawn()
            .expect("the package of the driver has virt-aa-helper");
        let mut input = helper.stdin.take().expect("the stream is piped");
        let written = input.write_all(domain.as_bytes());
        written.expect("virt-aa-helper reads the domain");
        drop(input);
        let status = helper.wait().expect("virt-aa-helper ends");
        assert!(status.success(), "virt-aa-helper: {status}");
        let file = format!("/etc/apparmor.d/libvirt/{name}");
        let profile = Self { name, file };
        // Allow the files that this test has in the temporary directory. With a real VM, libvirt
        // lists the files in the domain, and `virt-aa-helper` allows them.
        let files = format!("{}.files", profile.file);
        let text = fs::read_to_string(&files).expect("virt-aa-helper wrote it");
        let own = format!("  \"{}/**\" rwk,\n", std::env::temp_dir().display());
        write(&files, &(text + &own));
        profile.replace(guest);
        profile
    }

    /// Loads the profile again, also for the processes that it confines.
    fn replace(&self, guest: &Guest) {
        guest.command(
            "apparmor_parser",
            &["--replace", "--skip-cache", &self.file],
        );
    }

    /// Starts a QEMU under the profile, which must be in force.
    fn confine(&self, start: impl FnOnce() -> Result<Machine, MachineError>) -> Machine {
        // The profile applies to the next program that this thread, or a process that it creates,
        // executes.
        let exec = "/proc/thread-self/attr/apparmor/exec";
        fs::write(exec, format!("exec {}", self.name)).expect("the profile is loaded");
        let machine = start();
        fs::write(exec, "exec unconfined").expect("the test is unconfined");
        let machine = machine.expect("QEMU starts");
        let label = format!("/proc/{}/attr/apparmor/current", machine.process());
        let label = fs::read_to_string(label).expect("QEMU runs");
        assert_eq!(label.trim(), format!("{} (enforce)", self.name));
        machine
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        let _ = Command::new("apparmor_parser")
            .args(["--remove", &self.file])
            .status();
    }
}
