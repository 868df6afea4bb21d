//! Two hosts with libvirt, a tunnel and a redirect on each: the usual commands migrate machines
//! through the tunnels, and if a part is missing, they fail and the machines run on.
//!
//! Each migration is judged by the machine (which checks its own memory), by virsh, and by the wire:
//! every packet between the hosts is counted by port and searched for the machine's memory.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use dunlin_rig::hosts::{Family, Traffic, Wire};
use dunlin_rig::libvirt::{
    CONTROL_PORT, CREDENTIALS, Ended, PORTS, Pair, QEMU_USER, Running, Side, TIMEOUT, Vm,
};
use dunlin_rig::need;
use support::{Done, Scratch, finish, words};
use tunnel::Tunnel;

const TUNNEL_PORT: u16 = 18300;

/// How long virsh may take to fail if a part is missing. It takes one second, most of which is the
/// start of QEMU on the target, and up to three on a busy machine.
const FAST: Duration = Duration::from_secs(5);

/// Two hosts with libvirt, and the configurations of their tunnels.
struct Scene {
    pair: Pair,
    tunnels: [Option<Tunnel>; 2],
    scratch: Scratch,
}

impl Scene {
    /// Hosts with libvirt alone.
    fn bare() -> Option<Self> {
        Some(Self {
            pair: need::libvirt()?,
            tunnels: [None, None],
            scratch: Scratch::new(),
        })
    }

    /// Hosts with a tunnel and a redirect on each.
    fn new() -> Option<Self> {
        let mut scene = Self::bare()?;
        for side in [Side::A, Side::B] {
            let peer = scene.address(side.other(), Family::V4);
            scene.configure(side, &peer, "");
            scene.begin_dunlin(side);
        }
        Some(scene)
    }

    fn begin_dunlin(&mut self, side: Side) {
        self.start(side);
        self.redirect(side, "apply").expect(0);
    }

    fn config(&self, side: Side) -> PathBuf {
        self.scratch.join(format!("{}.toml", side.name()))
    }

    /// A host's address on the link.
    fn address(&self, side: Side, family: Family) -> String {
        let host = self.pair.on(side).host();
        self.pair.link.address(host, family).to_string()
    }

    /// Writes the configuration of a host. `peer` is an address or the name of the other host, and
    /// `more` further keys of the redirect.
    fn configure(&self, side: Side, peer: &str, more: &str) {
        let daemon = self.pair.on(side);
        let text = format!(
            "listen = \"[::]:{TUNNEL_PORT}\"\nidentity = {:?}\n\
             [redirect.libvirt]\nports = \"{}-{}\"\npeers = {{ {peer:?} = {:?} }}\n\
             users = [\"root\", \"libvirt-qemu\"]\n{more}",
            daemon.path_inside(CREDENTIALS),
            PORTS.start(),
            PORTS.end(),
            side.other().name(),
        );
        fs::write(self.config(side), text).unwrap();
    }

    /// Kills the tunnel of a host.
    fn stop(&mut self, side: Side) {
        self.tunnels[side as usize] = None;
    }

    fn start(&mut self, side: Side) {
        let file = self.config(side);
        let mut command = words("tunnel run --config");
        command.arg(&file);
        let command = self.pair.on(side).enter(&command);
        self.tunnels[side as usize] = Some(Tunnel::follow(command, file));
    }

    /// Runs `dunlin redirect` with these words and the host's configuration.
    fn redirect(&self, side: Side, what: &str) -> Done {
        let mut command = words("redirect");
        command
            .args(what.split_whitespace())
            .arg("--config")
            .arg(self.config(side));
        finish(self.pair.on(side).enter(&command))
    }

    /// Runs a program on a host.
    fn run(&self, side: Side, line: &str) -> Done {
        let mut line = line.split_whitespace();
        let mut command = Command::new(line.next().unwrap());
        command.args(line);
        finish(self.pair.on(side).enter(&command))
    }

    /// Ends the tunnels, and returns what they logged.
    fn logs(&self) -> String {
        let log = |tunnel: &Tunnel| {
            tunnel.signal("KILL");
            tunnel.log.rest().join("\n")
        };
        let logs = self.tunnels.iter().flatten().map(log);
        logs.collect::<Vec<_>>().join("\n--\n")
    }

    fn count(&self, vms: &[&Vm]) -> Wire {
        let all: HashSet<u64> = vms.iter().flat_map(|vm| vm.words()).collect();
        self.pair.link.count(self.pair.a.host(), all).unwrap()
    }

    fn begin(&self, from: Side, vm: &Vm, flags: &str) -> Running {
        let line = format!(
            "migrate --live {flags} {} qemu+tcp://{}/system",
            vm.name,
            from.other().name()
        );
        self.pair.on(from).virsh_begin(&line).unwrap()
    }

    /// The connections of the toolstack that the tunnel of a host has carried: those that ended well,
    /// and those that failed.
    fn carried(&self, side: Side) -> (u64, u64) {
        let status = finish(self.pair.on(side).enter(&words("status --json"))).expect(0);
        let line = status
            .lines()
            .into_iter()
            .find(|line| line["event"] == "tunnel");
        let route = &line.unwrap()["routes"][0];
        let number = |key: &str| route[key].as_u64().unwrap();
        assert_eq!(number("channels"), 0, "{route}");
        (number("closed") + number("left_unread"), number("failed"))
    }

    /// Migrates machines at the same time. Expects that they arrive, and that all of it went through
    /// the tunnels. Returns the number of connections.
    fn moves(&self, from: Side, vms: &[&Vm], flags: &str) -> u64 {
        let (carried, failed) = self.carried(from);
        let before: Vec<u64> = vms
            .iter()
            .map(|vm| self.pair.visits(from, vm).unwrap())
            .collect();
        let wire = self.count(vms);
        let running: Vec<Running> = vms.iter().map(|vm| self.begin(from, vm, flags)).collect();
        let ended: Vec<Ended> = running
            .into_iter()
            .map(|one| one.wait(TIMEOUT).unwrap())
            .collect();
        let traffic = wire.stop().unwrap();
        for one in &ended {
            assert!(one.is_ok(), "{flags}: {}\n{}", one.said, self.logs());
        }
        let took = ended.iter().map(|one| one.took).max().unwrap();
        println!("{from:?} {} {flags}: {took:?}, {traffic:?}", vms.len());
        assert_tunnelled(&traffic, vms);
        for (vm, before) in vms.iter().zip(before) {
            assert!(self.pair.visits(from.other(), vm).unwrap() > before);
            self.runs_on(from.other(), vm);
        }
        let (now, failed_now) = self.carried(from);
        assert_eq!(failed_now, failed, "{flags}");
        now - carried
    }

    /// Expects that a migration fails at once, that the machine runs on, and that none of its memory
    /// was sent in the clear.
    /// Returns the connections that were tried on the wire.
    fn fails(&self, from: Side, vm: &Vm, flags: &str) -> BTreeMap<u16, u64> {
        let wire = self.count(&[vm]);
        let ended = self.begin(from, vm, flags).wait(TIMEOUT).unwrap();
        let traffic = wire.stop().unwrap();
        let said = ended.said.trim();
        println!("{flags}: {:?}, {said}, {traffic:?}", ended.took);
        assert_eq!(ended.code, Some(1), "{said}");
        assert!(ended.took < FAST, "{:?}: {said}", ended.took);
        assert_no_clear(&traffic);
        self.runs_on(from, vm);
        traffic.tried
    }

    /// Waits until some of a machine's memory was sent.
    fn wait_sent(&self, side: Side, vm: &Vm) {
        let deadline = Instant::now() + TIMEOUT;
        let job = format!("domjobinfo --rawstats {}", vm.name);
        loop {
            let job = self.pair.must(side, &job).unwrap();
            let sent = job
                .lines()
                .find_map(|line| line.split_once("memory_processed: "));
            let sent: u64 = sent.map_or(0, |(_, bytes)| bytes.trim().parse().unwrap());
            if sent > 1 << 20 {
                return;
            }
            assert!(Instant::now() < deadline, "{job}");
        }
    }

    /// Expects that the machine runs on this host and only there, and that its memory is intact.
    fn runs_on(&self, side: Side, vm: &Vm) {
        let state = self.pair.state(side, vm).unwrap().unwrap_or_default();
        assert!(state.starts_with("running"), "{state}");
        let other = self.pair.state(side.other(), vm).unwrap();
        assert!(
            other
                .as_deref()
                .is_none_or(|state| state.starts_with("shut off")),
            "{other:?}"
        );
        self.pair.visits(side, vm).unwrap();
        self.pair.check(side, vm).unwrap();
    }
}

/// Expects nothing of a machine's memory in the clear, and no payload on the toolstack's ports.
fn assert_no_clear(traffic: &Traffic) {
    assert!(traffic.found.is_empty(), "{traffic:?}");
    let allowed = [TUNNEL_PORT, CONTROL_PORT];
    let ports = traffic.ports();
    assert!(
        ports.iter().all(|port| allowed.contains(port)),
        "{traffic:?}"
    );
    assert_eq!(traffic.others, 0, "{traffic:?}");
}

/// Expects the machines' memory on the tunnel's port, and nothing in the clear.
fn assert_tunnelled(traffic: &Traffic, vms: &[&Vm]) {
    assert_no_clear(traffic);
    // The guests' pages cannot be compressed.
    let memory: u64 = vms.iter().map(|vm| vm.workload.pages * 4096).sum();
    assert!(traffic.bytes[&TUNNEL_PORT] > memory, "{traffic:?}");
}

/// Whether the long tests run, too.
fn soak() -> bool {
    let is_soak = std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1");
    if !is_soak {
        println!("only the soak runs this test (DUNLIN_SOAK=1)");
    }
    is_soak
}

#[test]
fn the_usual_command_migrates_a_machine_through_the_tunnels_and_back() {
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    assert_eq!(scene.moves(Side::A, &[&vm], ""), 1);
    let flags = "--parallel --parallel-connections 2";
    assert_eq!(scene.moves(Side::B, &[&vm], flags), 3);
}

/// Rules stay when a tunnel ends, and each host's rules suffice to keep a migration from the wire.
#[test]
fn if_a_tunnel_or_a_hosts_rules_are_gone_nothing_leaves_in_the_clear() {
    let _turn = need::turn();
    let Some(mut scene) = Scene::new() else {
        return;
    };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();

    for side in [Side::A, Side::B] {
        scene.stop(side);
        let tried = scene.fails(Side::A, &vm, "");
        // The rules of the source lead the connection to the tunnel: no packet of it leaves.
        assert!(!tried.keys().any(|port| PORTS.contains(port)), "{tried:?}");
        scene.fails(Side::A, &vm, "--parallel --parallel-connections 2");
        scene.start(side);
    }

    // The target rejects what comes from the wire.
    scene.run(Side::A, "nft flush ruleset").expect(0);
    let tried = scene.fails(Side::A, &vm, "");
    assert!(tried.keys().any(|port| PORTS.contains(port)), "{tried:?}");
    scene.redirect(Side::A, "apply").expect(0);

    // Without the target's rules, those of the source still lead to the tunnel.
    scene.run(Side::B, "nft flush ruleset").expect(0);
    scene.moves(Side::A, &[&vm], "");
    scene.redirect(Side::B, "apply").expect(0);
    scene.moves(Side::B, &[&vm], "");
}

/// What the rules cannot prevent: without the rules of both hosts, the memory is in the clear. `show`
/// reports each host.
#[test]
fn without_the_rules_of_both_hosts_the_memory_is_in_the_clear_and_show_reports_it() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let vm = Vm::new("web");
    scene.pair.create(Side::A, &vm).unwrap();
    for side in [Side::A, Side::B] {
        scene.redirect(side, "show").expect(0);
        scene.run(side, "nft flush ruleset").expect(0);
        assert_ne!(scene.redirect(side, "show").code, 0);
    }
    let wire = scene.count(&[&vm]);
    let ended = scene.begin(Side::A, &vm, "").wait(TIMEOUT).unwrap();
    assert!(ended.is_ok(), "{}", ended.said);
    let traffic = wire.stop().unwrap();
    assert!(!traffic.found.is_empty(), "{traffic:?}");
    assert!(!traffic.bytes.contains_key(&TUNNEL_PORT), "{traffic:?}");
}

#[test]
fn a_peer_without_a_tunnel_gets_nothing_and_is_admitted_only_if_configured() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(mut scene) = Scene::bare() else {
        return;
    };
    let vm = Vm::new("web");
    let peer = scene.address(Side::B, Family::V4);
    scene.configure(Side::A, &peer, "");
    scene.begin_dunlin(Side::A);
    scene.pair.create(Side::A, &vm).unwrap();
    scene.fails(Side::A, &vm, "");
    scene.fails(Side::A, &vm, "--parallel --parallel-connections 2");

    // The other direction: A rejects what B sends in the clear.
    let other = Vm::new("db");
    scene.pair.create(Side::B, &other).unwrap();
    scene.fails(Side::B, &other, "");
}

/// Another user's connection to the ports does not leave the host.
#[test]
fn a_user_without_the_redirect_reaches_no_port_of_the_range() {
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let wire = scene.count(&[]);
    let to = scene.address(Side::B, Family::V4);
    let dial = |user: u32, address: &str, port: u16| {
        let line = format!("exec 3<>/dev/tcp/{address}/{port}");
        let mut command = Command::new("setpriv");
        command
            .args([format!("--reuid={user}"), format!("--regid={user}")])
            .args(["--clear-groups", "bash", "-c", &line]);
        finish(scene.pair.a.enter(&command)).code
    };
    assert_eq!(dial(1000, &to, *PORTS.start()), 1);
    let traffic = wire.stop().unwrap();
    assert_eq!(traffic.tried.get(PORTS.start()), None, "{traffic:?}");
    // The same command as a user of the redirect reaches the tunnel.
    assert_eq!(dial(QEMU_USER, &to, *PORTS.start()), 0);
}

#[test]
fn every_kind_of_migration_goes_through_the_tunnels() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let mut vm = Vm::new("web");
    vm.disk = Some(16 << 20);
    scene.pair.create(Side::A, &vm).unwrap();
    let parallel = |connections: u32| format!("--parallel --parallel-connections {connections}");
    let nova = "--p2p --undefinesource --persistent --migrateuri tcp://TO";
    let mut from = Side::A;
    // The connections of the memory; the disk has one of its own.
    for (flags, connections) in [
        (String::new(), 1),
        ("--p2p".to_owned(), 1),
        (parallel(2), 3),
        (parallel(4), 5),
        ("--tls".to_owned(), 1),
        (format!("--tls {}", parallel(4)), 5),
        ("--tls --p2p".to_owned(), 1),
        (nova.to_owned(), 1),
        (format!("{nova} --auto-converge --postcopy"), 1),
    ] {
        let flags = flags.replace("TO", from.other().name()) + " --copy-storage-all";
        let carried = scene.moves(from, &[&vm], &flags);
        assert_eq!(carried, connections + 1, "{flags}");
        let disk = scene.pair.disk(from.other(), &vm).unwrap();
        assert!(disk == vm.disk_content(), "{flags}: the disk differs");
        from = from.other();
    }
}

/// The guest writes faster than the memory is sent, so that virsh switches to post-copy. QEMU then
/// opens a second connection, over which the target fetches pages.
#[test]
fn postcopy_fetches_pages_through_the_tunnels() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let mut vm = Vm::new("web");
    vm.workload.hot = vm.workload.pages / 2;
    vm.workload.rate = Some(20_000);
    scene.pair.create(Side::A, &vm).unwrap();
    for from in [Side::A, Side::B] {
        let flags = "--postcopy --postcopy-after-precopy --bandwidth 16";
        assert_eq!(scene.moves(from, &[&vm], flags), 2);
    }
}

#[test]
fn two_machines_at_once_and_a_cancelled_migration() {
    if !soak() {
        return;
    }
    let _turn = need::turn();
    let Some(scene) = Scene::new() else { return };
    let (web, db) = (Vm::new("web"), Vm::new("db"));
    scene.pair.create(Side::A, &web).unwrap();
    scene.pair.create(Side::A, &db).unwrap();
    scene.moves(Side::A, &[&web, &db], "");
    scene.moves(Side::B, &[&web, &db], "--parallel --parallel-connections 2");

    for flags in [
        "--bandwidth 2",
        "--bandwidth 2 --parallel --parallel-connections 2",
    ] {
        let wire = scene.count(&[&web]);
        let running = scene.begin(Side::A, &web, flags);
        scene.wait_sent(Side::A, &web);
        scene.pair.must(Side::A, "domjobabort web").unwrap();
        let ended = running.wait(TIMEOUT).unwrap();
        assert_eq!(ended.code, Some(1), "{}", ended.said);
        assert_no_clear(&wire.stop().unwrap());
        scene.runs_on(Side::A, &web);
    }
    scene.moves(Side::A, &[&web, &db], "");
}
