//! QEMU on two isolated hosts with a tunnel process on each: the usual operations of operators, and
//! what happens to the guest when a tunnel dies.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_rig::guest::{Content, Workload};
use dunlin_rig::hosts::{Family, Host, Link, LinkOptions};
use dunlin_rig::machine::{
    self, Machine, MachineError, Migration, Setup, TIMEOUT, begin, finish, migrate,
};
use dunlin_rig::need;
use serde_json::{Value, json};
use support::{Hosts, words};
use tunnel::{Tunnel, control};

/// A guest of 192 MiB that writes each page of a hot set of 40 MiB about twice per second.
const WORKLOAD: Workload = Workload {
    memory_mib: 192,
    pages: 44_000,
    hot: 10_000,
    rate: Some(20_000),
    content: Content::Mixed,
    seed: 0x2417,
};
/// Bytes sent before a test acts on the migration.
const SOME_BYTES: u64 = 16 << 20;
const DISK_BYTES: usize = 48 << 20;

/// Two hosts with a tunnel each, and routes `ram` and `disk` from one to the other.
struct Scene {
    near: Option<Tunnel>,
    far: Option<Tunnel>,
    link: Link,
    source: Host,
    destination: Host,
    files: Hosts,
}

impl Scene {
    fn new() -> Option<Self> {
        if !need::hosts() {
            return None;
        }
        let source = Host::new("source").unwrap();
        let destination = Host::new("destination").unwrap();
        let link = Link::new(&source, &destination, &LinkOptions::default()).unwrap();
        let mut scene = Self {
            near: None,
            far: None,
            link,
            source,
            destination,
            files: Hosts::new(),
        };
        scene.start_far();
        scene.start_near();
        Some(scene)
    }

    fn start_far(&mut self) {
        let config = format!(
            "listen = \"{}:18300\"\nidentity = {:?}\n\
             [route.ram]\ntarget = {:?}\nallow = [\"a.test\"]\n\
             [route.disk]\ntarget = {:?}\nallow = [\"a.test\"]\n",
            self.link.address(&self.destination, Family::V4),
            self.files.scratch.join("b"),
            self.place("ram-out"),
            self.place("disk-out"),
        );
        self.far = Some(self.start("far", &self.destination, &config));
    }

    fn start_near(&mut self) {
        let to = format!("{}:18300", self.link.address(&self.destination, Family::V4));
        let to = format!("to = {to:?}\npeers = [\"b.test\"]\n");
        let config = format!(
            "listen = \"{}:18300\"\nidentity = {:?}\n\
             [route.ram]\nlisten = {:?}\n{to}[route.disk]\nlisten = {:?}\n{to}",
            self.link.address(&self.source, Family::V4),
            self.files.scratch.join("a"),
            self.place("ram-in"),
            self.place("disk-in"),
        );
        self.near = Some(self.start("near", &self.source, &config));
    }

    fn start(&self, name: &str, host: &Host, config: &str) -> Tunnel {
        let file = self.files.scratch.join(format!("{name}.toml"));
        fs::write(&file, config).unwrap();
        let mut command = words("tunnel run --config");
        command
            .arg(&file)
            .arg("--control")
            .arg(control(&self.files));
        Tunnel::follow(host.enter(&command), file)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.files.scratch.join(name)
    }

    fn place(&self, name: &str) -> String {
        format!("unix:{}", self.path(name).display())
    }

    fn migration(&self) -> Migration {
        // Removes the socket of an earlier QEMU.
        let _ = fs::remove_file(self.path("ram-out"));
        Migration::through(&self.place("ram-in"), &self.place("ram-out"))
    }

    /// A QEMU with a running guest, and a QEMU that waits for this guest.
    fn machines(&self, setup: &Setup) -> (Machine, Machine) {
        let mut source = Machine::start(setup, Some(&self.source)).unwrap();
        let destination = Machine::start_incoming(setup, Some(&self.destination)).unwrap();
        source.wait_ready().unwrap();
        (source, destination)
    }
}

fn guest() -> Option<(Setup, Scene)> {
    Some((need::bare_guest(WORKLOAD)?, Scene::new()?))
}

/// Checks that source and destination have the same memory, and that the guest continues
/// with it.
fn same_and_runs(setup: &Setup, source: &mut Machine, destination: &mut Machine) {
    assert_eq!(source.first_difference(destination).unwrap(), None);
    destination.resume().unwrap();
    continues(setup, destination);
}

/// Checks that the guest finds all of its pages correct, and continues to write.
fn continues(setup: &Setup, machine: &mut Machine) {
    assert!(machine.runs().unwrap());
    assert_eq!(machine.check_pages().unwrap(), setup.workload.pages);
    machine.forget_lines();
    machine.next_beat().unwrap();
}

fn set(machine: &mut Machine, capabilities: &[&str]) {
    let all: Vec<Value> = capabilities
        .iter()
        .map(|name| json!({"capability": name, "state": true}))
        .collect();
    let all = json!({"capabilities": all});
    machine
        .qmp()
        .execute("migrate-set-capabilities", all)
        .unwrap();
}

fn wait_status(machine: &mut Machine, wanted: &str) {
    let is = |name: &str, data: &Value| name == "MIGRATION" && data["status"] == wanted;
    if let Err(error) = machine.qmp().wait_event(TIMEOUT, is) {
        panic!("{wanted}: {error}: {}", machine.messages());
    }
}

/// Waits until `done` accepts QEMU's answer to a query.
fn wait_answer(machine: &mut Machine, question: &str, done: impl Fn(&Value) -> bool) {
    let until = Instant::now() + TIMEOUT;
    loop {
        let answer = machine.qmp().execute(question, json!({})).unwrap();
        if done(&answer) {
            return;
        }
        assert!(Instant::now() < until, "{question} says {answer}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn wait_some(source: &mut Machine) {
    wait_answer(source, "query-migrate", |answer| {
        answer["ram"]["transferred"].as_u64() >= Some(SOME_BYTES)
    });
}

#[test]
fn a_guest_moves_with_few_and_many_multifd_channels() {
    let Some((setup, scene)) = guest() else {
        return;
    };
    let _turn = need::turn();
    for channels in [2, 8] {
        let (mut source, mut destination) = scene.machines(&setup);
        let mut migration = scene.migration();
        migration.multifd = Some(channels);
        migrate(&mut source, &mut destination, &migration).unwrap();
        same_and_runs(&setup, &mut source, &mut destination);
    }
}

/// The guest runs at the destination while its memory is still at the source, and fetches pages
/// through the tunnel. With *preempt* it fetches them on a separate connection, which is opened
/// during the migration.
#[test]
fn a_guest_fetches_its_pages_behind_itself() {
    let Some((setup, scene)) = guest() else {
        return;
    };
    let _turn = need::turn();
    for capabilities in [
        &["postcopy-ram"][..],
        &["postcopy-ram", "postcopy-preempt"][..],
    ] {
        let (mut source, mut destination) = scene.machines(&setup);
        start_postcopy(&scene, &mut source, &mut destination, capabilities);
        finish(&mut source, "source").unwrap();
        finish(&mut destination, "destination").unwrap();
        continues(&setup, &mut destination);
    }
}

/// Starts with pre-copy, and switches to post-copy after some of the memory was sent.
fn start_postcopy(
    scene: &Scene,
    source: &mut Machine,
    destination: &mut Machine,
    capabilities: &[&str],
) {
    set(source, capabilities);
    set(destination, capabilities);
    let mut migration = scene.migration();
    migration.bandwidth = Some(32 << 20);
    begin(source, destination, &migration).unwrap();
    // Let the destination run the guest as soon as the guest's state arrives.
    destination.resume().unwrap();
    wait_some(source);
    source
        .qmp()
        .execute("migrate-start-postcopy", json!({}))
        .unwrap();
    wait_status(source, "postcopy-active");
}

/// When the tunnel is killed, neither QEMU has all of the guest's memory. Both QEMUs wait, and
/// continue through another tunnel.
#[test]
fn postcopy_goes_on_through_another_tunnel() {
    let Some((setup, mut scene)) = guest() else {
        return;
    };
    let _turn = need::turn();
    let (mut source, mut destination) = scene.machines(&setup);
    let slow = json!({"max-postcopy-bandwidth": 8 << 20});
    source
        .qmp()
        .execute("migrate-set-parameters", slow)
        .unwrap();
    start_postcopy(
        &scene,
        &mut source,
        &mut destination,
        &["postcopy-ram", "postcopy-preempt"],
    );
    // Until the destination has this status, it cannot pause post-copy and would fail instead.
    wait_status(&mut destination, "postcopy-active");
    scene.near.take().unwrap().child.kill().unwrap();
    wait_status(&mut source, "postcopy-paused");
    wait_status(&mut destination, "postcopy-paused");
    scene.start_near();
    let migration = scene.migration();
    let listen = json!({"uri": migration.listen});
    destination
        .qmp()
        .execute("migrate-recover", listen)
        .unwrap();
    let fast = json!({"max-postcopy-bandwidth": 0});
    source
        .qmp()
        .execute("migrate-set-parameters", fast)
        .unwrap();
    let again = json!({"uri": migration.connect, "resume": true});
    source.qmp().execute("migrate", again).unwrap();
    finish(&mut source, "source").unwrap();
    finish(&mut destination, "destination").unwrap();
    continues(&setup, &mut destination);
}

/// If a tunnel is killed in pre-copy, on either host, nothing is lost: the guest keeps running at
/// the source, QEMU gets an error, and the next attempt succeeds.
#[test]
fn a_killed_tunnel_leaves_the_guest_running() {
    let Some((setup, mut scene)) = guest() else {
        return;
    };
    let _turn = need::turn();
    let mut source = Machine::start(&setup, Some(&scene.source)).unwrap();
    source.wait_ready().unwrap();
    for is_near in [true, false] {
        let mut lost = Machine::start_incoming(&setup, Some(&scene.destination)).unwrap();
        let mut slow = scene.migration();
        slow.bandwidth = Some(32 << 20);
        slow.multifd = Some(2);
        begin(&mut source, &mut lost, &slow).unwrap();
        wait_some(&mut source);
        let which = match is_near {
            true => scene.near.take(),
            false => scene.far.take(),
        };
        which.unwrap().child.kill().unwrap();
        match finish(&mut source, "source") {
            Err(MachineError::Migration { status, reason, .. }) => {
                assert_eq!(status, "failed");
                assert!(!reason.trim().is_empty());
            }
            other => panic!("{other:?}"),
        }
        continues(&setup, &mut source);
        match is_near {
            true => scene.start_near(),
            false => scene.start_far(),
        }
    }
    let mut destination = Machine::start_incoming(&setup, Some(&scene.destination)).unwrap();
    let mut migration = scene.migration();
    migration.multifd = Some(2);
    migrate(&mut source, &mut destination, &migration).unwrap();
    same_and_runs(&setup, &mut source, &mut destination);
}

/// QEMU copies the disk and the memory in parallel, over two routes of the tunnel, as libvirt does.
/// The copy includes the guest's writes to the disk until the guest is paused.
#[test]
fn a_disk_is_mirrored_beside_the_memory() {
    let Some((setup, scene)) = guest() else {
        return;
    };
    let _turn = need::turn();
    let with_disk = |name: &str, bytes: &[u8]| {
        let file = scene.path(name);
        fs::write(&file, bytes).unwrap();
        let node = format!("driver=file,node-name=disk,filename={}", file.display());
        let mut setup = setup.clone();
        setup.options.extend(["-blockdev".to_owned(), node]);
        (setup, file)
    };
    let (near, near_disk) = with_disk("near-disk", &noise(DISK_BYTES));
    let (far, far_disk) = with_disk("far-disk", &vec![0; DISK_BYTES]);
    let mut source = Machine::start(&near, Some(&scene.source)).unwrap();
    let mut destination = Machine::start_incoming(&far, Some(&scene.destination)).unwrap();
    source.wait_ready().unwrap();
    let unix = |name: &str| json!({"type": "unix", "path": scene.path(name)});
    let exported = json!({"addr": {"type": "unix", "data": {"path": scene.path("disk-out")}}});
    let qmp = destination.qmp();
    qmp.execute("nbd-server-start", exported).unwrap();
    let export = json!({
        "type": "nbd", "id": "disk", "node-name": "disk", "name": "disk", "writable": true,
    });
    qmp.execute("block-export-add", export).unwrap();
    let qmp = source.qmp();
    let remote = json!({
        "driver": "nbd", "node-name": "remote", "server": unix("disk-in"), "export": "disk",
    });
    qmp.execute("blockdev-add", remote).unwrap();
    let mirror = json!({"job-id": "mirror", "device": "disk", "target": "remote", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror).unwrap();

    set(&mut source, &["pause-before-switchover"]);
    let migration = scene.migration();
    begin(&mut source, &mut destination, &migration).unwrap();
    wait_status(&mut source, "pre-switchover");
    wait_answer(&mut source, "query-block-jobs", |jobs| {
        jobs[0]["ready"] == true
    });
    let done = json!({"device": "mirror"});
    source.qmp().execute("block-job-cancel", done).unwrap();
    wait_answer(&mut source, "query-block-jobs", |jobs| *jobs == json!([]));
    let stop = json!({});
    destination.qmp().execute("nbd-server-stop", stop).unwrap();
    let go = json!({"state": "pre-switchover"});
    source.qmp().execute("migrate-continue", go).unwrap();
    finish(&mut source, "source").unwrap();
    finish(&mut destination, "destination").unwrap();
    same_and_runs(&setup, &mut source, &mut destination);
    assert!(same(&near_disk, &far_disk));
}

fn same(one: &Path, other: &Path) -> bool {
    fs::read(one).unwrap() == fs::read(other).unwrap()
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x51ed_2701_u64;
    let mut all = vec![0; bytes];
    for part in all.chunks_mut(8) {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        part.copy_from_slice(&state.to_be_bytes()[..part.len()]);
    }
    all
}

/// A cancelled migration leaves nothing behind in the tunnel.
#[test]
fn a_cancelled_migration_can_be_begun_again() {
    let Some((setup, scene)) = guest() else {
        return;
    };
    let _turn = need::turn();
    let mut source = Machine::start(&setup, Some(&scene.source)).unwrap();
    source.wait_ready().unwrap();
    for _ in 0..2 {
        let mut left = Machine::start_incoming(&setup, Some(&scene.destination)).unwrap();
        let mut slow = scene.migration();
        slow.bandwidth = Some(32 << 20);
        slow.multifd = Some(8);
        begin(&mut source, &mut left, &slow).unwrap();
        wait_some(&mut source);
        machine::cancel(&mut source).unwrap();
        continues(&setup, &mut source);
    }
    let mut destination = Machine::start_incoming(&setup, Some(&scene.destination)).unwrap();
    let mut migration = scene.migration();
    migration.multifd = Some(8);
    migrate(&mut source, &mut destination, &migration).unwrap();
    same_and_runs(&setup, &mut source, &mut destination);
}
