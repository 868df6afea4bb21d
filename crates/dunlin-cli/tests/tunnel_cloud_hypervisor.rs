//! Cloud Hypervisor migrates over four connections, without its own TLS, and a redirect carries them
//! through the tunnels. Runs in the soak, with the binary that the variable `CLOUD_HYPERVISOR` names.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/libvirt.rs"]
mod libvirt;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::thread;

use dunlin_rig::cloud_hypervisor::{CloudHypervisor, program};
use dunlin_rig::guest::{Content, Line, Workload, bare_image};
use dunlin_rig::hosts::Family;
use dunlin_rig::libvirt::{PORTS, Side};
use dunlin_rig::need;
use libvirt::{Scene, TUNNEL_PORT, assert_no_clear, soak};
use serde_json::json;

const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 12_000,
    hot: 2_000,
    rate: Some(4_000),
    content: Content::Random,
    seed: 0xc4,
};
const CONNECTIONS: u64 = 4;

/// Two hosts, each with a tunnel and the redirect of docs/hypervisors/cloud-hypervisor.md.
fn scene() -> Option<Scene> {
    let mut scene = Scene::bare()?;
    for side in [Side::A, Side::B] {
        let peer = scene.address(side.other(), Family::V4);
        let redirect = format!(
            "[redirect.ch]\nports = \"{}-{}\"\nusers = [\"root\"]\npeers = {{ {peer:?} = {:?} }}\n",
            PORTS.start(),
            PORTS.end(),
            side.other().name(),
        );
        scene.write(side, &redirect);
        scene.begin_dunlin(side);
    }
    Some(scene)
}

#[test]
fn cloud_hypervisor_migrates_over_four_connections_through_the_tunnels() {
    if !soak() {
        return;
    }
    let Some(program) = program() else {
        println!("not run: CLOUD_HYPERVISOR names no binary");
        return;
    };
    let _turn = need::turn();
    let Some(scene) = scene() else { return };
    let image = scene.scratch.join("bare.elf");
    fs::write(&image, bare_image(&WORKLOAD)).unwrap();
    let (image, memory) = (
        image.to_string_lossy(),
        format!("size={}M", WORKLOAD.memory_mib),
    );
    let mut options = vec!["--kernel", &image, "--memory", &memory, "--cpus", "boot=1"];
    options.extend(["--serial", "tty", "--console", "off"]);
    let [a, b] = [Side::A, Side::B].map(|side| scene.pair.on(side).host());
    let source = CloudHypervisor::start(&program, Some(a), &options).unwrap();
    source.wait("ready guest", is_ready).unwrap();
    let destination = CloudHypervisor::start(&program, Some(b), &[]).unwrap();
    let port = PORTS.start();
    let to = scene.address(Side::B, Family::V4);
    let send = json!({
        "destination_url": format!("tcp:{to}:{port}"), "connections": CONNECTIONS,
    });

    // The tunnel cannot reach the receiver, which does not listen yet.
    let wire = scene.pair.link.count(a, WORKLOAD.words()).unwrap();
    source.api().request("vm.send-migration", &send).unwrap();
    source.wait_event("migration-failed").unwrap();
    assert_no_clear(&wire.stop().unwrap());
    all_pages_are_right(&source);

    let (before, failed) = scene.carried(Side::A);
    let wire = scene.pair.link.count(a, WORKLOAD.words()).unwrap();
    thread::scope(|scope| {
        let receive = json!({ "receiver_url": format!("tcp:127.0.0.1:{port}") });
        let api = destination.api();
        // The answer arrives when the migration has ended.
        let received = scope.spawn(move || api.request("vm.receive-migration", &receive));
        destination.wait_event("migration-receive-ready").unwrap();
        source.api().request("vm.send-migration", &send).unwrap();
        destination.wait_event("resumed").unwrap();
        received.join().unwrap().unwrap();
    });
    source.wait_end().unwrap();
    let traffic = wire.stop().unwrap();
    println!("{traffic:?}");
    assert_no_clear(&traffic);
    assert!(
        traffic.bytes[&TUNNEL_PORT] > WORKLOAD.pages * 4096,
        "{traffic:?}"
    );
    all_pages_are_right(&destination);
    let (now, failed_now) = scene.carried(Side::A);
    // One connection for the commands, and four for the memory.
    assert_eq!((now - before, failed_now - failed), (CONNECTIONS + 1, 0));
}

fn is_ready(line: &str) -> bool {
    matches!(Line::parse(line), Some(Line::Ready { .. }))
}

/// Waits for two visits per page of the guest's memory, counted from the guest's next report. Each
/// visit checks a page that the guest writes to, and one of the other pages.
fn all_pages_are_right(machine: &CloudHypervisor) {
    let visits = |line: &str| match Line::parse(line) {
        Some(Line::Wrong { page, .. }) => panic!("page {page} is wrong"),
        Some(Line::Beat { visits, .. }) => Some(visits),
        _ => None,
    };
    let first = std::cell::Cell::new(None);
    let enough = |line: &str| {
        let Some(now) = visits(line) else {
            return false;
        };
        let begin = first.get().unwrap_or(now);
        first.set(Some(begin));
        now - begin >= 2 * WORKLOAD.pages
    };
    machine.wait("visits of all pages", enough).unwrap();
}
