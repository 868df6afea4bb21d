//! QEMU, driven as Proxmox VE drives it with `migration: insecure`. QEMU runs as root. It sends the
//! memory over one TCP connection to a port of 60000–60050 at the target's migration address, and
//! the disk over NBD to another of these ports. A redirect carries both through the tunnels.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/libvirt.rs"]
mod libvirt;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use dunlin_rig::guest::{Content, Workload};
use dunlin_rig::hosts::Family;
use dunlin_rig::libvirt::Side;
use dunlin_rig::machine::{Machine, MachineError, Migration, TIMEOUT, begin, finish, migrate};
use dunlin_rig::need;
use dunlin_test_base::pattern;
use libvirt::{Scene, TUNNEL_PORT, assert_no_clear, soak};
use serde_json::{Value, json};

const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 12_000,
    hot: 2_000,
    rate: Some(4_000),
    content: Content::Random,
    seed: 0x9e0,
};
const DISK_BYTES: usize = 16 << 20;
/// Proxmox assigns ports in ascending order. The copy of the disk starts first, so the disk has the
/// lower port.
const DISK_PORT: u16 = 60_000;
const MEMORY_PORT: u16 = 60_001;

/// The hosts with a tunnel and a redirect each. QEMU listens at the migration address only.
fn scene() -> Option<Scene> {
    let mut scene = Scene::bare()?;
    for side in [Side::A, Side::B] {
        let own = scene.address(side, Family::V4);
        let peer = scene.address(side.other(), Family::V4);
        let redirect = format!(
            "[redirect.proxmox]\nports = \"60000-60050\"\nusers = [\"root\"]\n\
             peers = {{ {peer:?} = {:?} }}\nlocal = [{own:?}]\n",
            side.other().name(),
        );
        scene.write(side, &redirect);
        scene.begin_dunlin(side);
    }
    Some(scene)
}

fn wait(machine: &mut Machine, question: &str, done: impl Fn(&Value) -> bool) {
    let until = Instant::now() + TIMEOUT;
    loop {
        let answer = machine.qmp().execute(question, json!({})).unwrap();
        if done(&answer) {
            return;
        }
        assert!(Instant::now() < until, "{question} says {answer}");
    }
}

#[test]
fn qemu_as_proxmox_drives_it_migrates_through_the_tunnels_with_its_disk() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(setup) = need::bare_guest(WORKLOAD) else {
        return;
    };
    let Some(mut scene) = scene() else { return };
    let content = pattern(DISK_BYTES, 7);
    let with_disk = |name: &str, bytes: &[u8]| {
        let file: PathBuf = scene.scratch.join(name);
        fs::write(&file, bytes).unwrap();
        let node = format!("driver=file,node-name=disk,filename={}", file.display());
        let mut setup = setup.clone();
        setup.options.extend(["-blockdev".to_owned(), node]);
        (setup, file)
    };
    let (near, _) = with_disk("near", &content);
    let (far, far_disk) = with_disk("far", &vec![0; DISK_BYTES]);
    let [a, b] = [Side::A, Side::B].map(|side| scene.pair.on(side).host());
    let mut source = Machine::start(&near, Some(a)).unwrap();
    let mut destination = Machine::start_incoming(&far, Some(b)).unwrap();
    source.wait_ready().unwrap();
    let to = scene.address(Side::B, Family::V4);

    let mut words: HashSet<u64> = WORKLOAD.words();
    let blocks = content.chunks_exact(4096);
    words.extend(blocks.map(|block| u64::from_le_bytes(*block.first_chunk().unwrap())));
    let wire = scene.pair.link.count(a, words).unwrap();
    mirror(&mut source, &mut destination, &to);
    let migration = Migration::tcp(format!("{to}:{MEMORY_PORT}").parse().unwrap());
    move_with_mirror(&mut source, &mut destination, &migration);
    let traffic = wire.stop().unwrap();
    println!("{traffic:?}");
    assert_no_clear(&traffic);
    let both = WORKLOAD.pages * 4096 + DISK_BYTES as u64;
    assert!(traffic.bytes[&TUNNEL_PORT] > both, "{traffic:?}");
    assert_eq!(source.first_difference(&mut destination).unwrap(), None);
    destination.resume().unwrap();
    assert_eq!(destination.check_pages().unwrap(), WORKLOAD.pages);
    assert!(fs::read(far_disk).unwrap() == content);

    // Without the tunnel, QEMU's connection is refused, and the guest continues to run.
    scene.stop(Side::A);
    let b = scene.pair.b.host();
    let mut other = Machine::start_incoming(&setup, Some(b)).unwrap();
    let a = scene.pair.a.host();
    let mut source = Machine::start(&setup, Some(a)).unwrap();
    source.wait_ready().unwrap();
    let failed = migrate(&mut source, &mut other, &migration);
    assert!(
        matches!(failed, Err(MachineError::Migration { .. })),
        "{failed:?}"
    );
    assert!(source.runs().unwrap());
}

/// Starts to copy the disk over NBD.
fn mirror(source: &mut Machine, destination: &mut Machine, to: &str) {
    let server = json!({"type": "inet", "host": to, "port": DISK_PORT.to_string()});
    let mut data = server.clone();
    data.as_object_mut().unwrap().remove("type");
    let qmp = destination.qmp();
    qmp.execute(
        "nbd-server-start",
        json!({"addr": {"type": "inet", "data": data}}),
    )
    .unwrap();
    let export = json!({
        "type": "nbd", "id": "disk", "node-name": "disk", "name": "disk", "writable": true,
    });
    qmp.execute("block-export-add", export).unwrap();
    let qmp = source.qmp();
    let remote = json!({
        "driver": "nbd", "node-name": "remote", "server": server, "export": "disk",
    });
    qmp.execute("blockdev-add", remote).unwrap();
    let mirror = json!({"job-id": "mirror", "device": "disk", "target": "remote", "sync": "full"});
    qmp.execute("blockdev-mirror", mirror).unwrap();
}

/// Migrates, and ends the copy of the disk while the guest is paused.
fn move_with_mirror(source: &mut Machine, destination: &mut Machine, migration: &Migration) {
    wait(source, "query-block-jobs", |jobs| jobs[0]["ready"] == true);
    let pause = json!({"capabilities": [{"capability": "pause-before-switchover", "state": true}]});
    let qmp = source.qmp();
    qmp.execute("migrate-set-capabilities", pause).unwrap();
    begin(source, destination, migration).unwrap();
    wait(source, "query-migrate", |answer| {
        answer["status"] == "pre-switchover"
    });
    let done = json!({"device": "mirror"});
    source.qmp().execute("block-job-cancel", done).unwrap();
    wait(source, "query-block-jobs", |jobs| *jobs == json!([]));
    let stop = json!({});
    destination.qmp().execute("nbd-server-stop", stop).unwrap();
    let go = json!({"state": "pre-switchover"});
    source.qmp().execute("migrate-continue", go).unwrap();
    finish(source, "source").unwrap();
    finish(destination, "destination").unwrap();
}
