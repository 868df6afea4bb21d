//! `dunlin evacuate` of a host with many VMs, and its warning about migrations in the clear. A
//! script takes the place of virsh: `evacuate.rs` has the tests with libvirt.
#![allow(clippy::unwrap_used)]

#[path = "support/etc.rs"]
mod etc;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;
#[path = "support/virsh.rs"]
mod virsh;

use dunlin_bench::process::peak_bytes;
use serde_json::Value;
use support::{Process, finish, words};
use tunnel::Tunnel;
use virsh::Virsh;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Evacuates a host, and returns the peak memory of the command.
fn peak_of(count: usize) -> u64 {
    let virsh = Virsh::new(count);
    // Hold the last VM until the command's memory has been measured.
    let last = count - 1;
    virsh.hold(last);
    let command = virsh.evacuate("--parallel 4");
    let run = Process::follow(command, &virsh.state());
    for _ in 0..last {
        let ended = run.wait_for("ended");
        assert_eq!(ended["result"], "moved", "{ended}");
    }
    let peak = peak_bytes(run.pid()).unwrap();
    virsh.release(last);
    let (code, report) = run.ended();
    let counts = ["vms", "moved", "failed", "doubt"].map(|field| report[field].as_u64());
    let all = count as u64;
    assert_eq!((code, counts), (0, [all, all, 0, 0].map(Some)), "{report}");
    assert_eq!((virsh.count("a"), virsh.count("b")), (0, count));
    peak
}

#[test]
fn i8_the_commands_memory_hardly_grows_with_the_number_of_vms() {
    let [few, many] = [10, 100].map(peak_of);
    let growth = many.saturating_sub(few);
    println!(
        "10 VMs: {:.1} MiB, 100 VMs: {:.1} MiB, {} KiB for each further VM",
        few as f64 / MIB as f64,
        many as f64 / MIB as f64,
        growth / 90 / KIB
    );
    assert!(many <= 64 * MIB, "{many}");
    assert!(growth <= 90 * 32 * KIB, "{few} and {many}");
}

/// The codes of the warnings of a dry run on host `a`.
fn warnings(scene: &etc::Scene, virsh: &Virsh, flags: &str) -> Vec<String> {
    let command = virsh.evacuate(&format!("--json --dry-run {flags}"));
    let path = format!("export PATH='{}'", virsh.path());
    let done = finish(scene.command_after("a", &path, &command)).expect(0);
    let lines = done.lines();
    assert_eq!(
        lines[0]["moves"].as_array().unwrap().len(),
        1,
        "{}",
        done.out
    );
    let warnings = lines.iter().filter(|line| line["event"] == "warning");
    let code = |line: &Value| line["code"].as_str().unwrap().to_owned();
    warnings.map(code).collect()
}

/// Starts a host's tunnel with the default control directory, where other commands find it.
fn tunnel(scene: &etc::Scene, host: &str) -> Tunnel {
    let command = words("tunnel run --confine no --config /etc/dunlin/tunnel.toml");
    let file = scene.path(host, "etc/tunnel.toml");
    Tunnel::follow(scene.command(host, &command), file)
}

#[test]
fn i6_the_warning_of_memory_in_the_clear_is_absent_only_if_a_redirect_works() {
    let Some(scene) = etc::Scene::new() else {
        return;
    };
    let virsh = Virsh::new(1);
    let clear = ["clear"];
    assert_eq!(warnings(&scene, &virsh, ""), clear);
    scene.enable("b", "").expect(0);
    let _far = tunnel(&scene, "b");
    scene.enable("a", "").expect(0);
    // The rules are there, and no tunnel runs.
    assert_eq!(warnings(&scene, &virsh, ""), clear);
    let near = tunnel(&scene, "a");
    assert_eq!(warnings(&scene, &virsh, ""), [""; 0]);
    // A configuration file that does not exist has no redirect.
    assert_eq!(warnings(&scene, &virsh, "--config /none"), clear);
    // The tunnel runs, and the rules are gone.
    let mut flush = scene.a.command("nft");
    flush.args(["delete", "table", "inet", "dunlin"]);
    finish(flush).expect(0);
    assert_eq!(warnings(&scene, &virsh, ""), clear);
    assert_eq!(warnings(&scene, &virsh, "-- --tls"), [""; 0]);
    finish(scene.dunlin("a", "redirect apply --config /etc/dunlin/tunnel.toml")).expect(0);
    assert_eq!(warnings(&scene, &virsh, ""), [""; 0]);
    drop(near);
    assert_eq!(warnings(&scene, &virsh, ""), clear);
}
