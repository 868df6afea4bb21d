//! Two hosts with libvirt, each with the configuration of a tunnel with a redirect. Functions that
//! check a migration's outcome by virsh's answer, the VM, the tunnel's status and the traffic on
//! the wire.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_rig::hosts::{Family, Traffic, Wire};
use dunlin_rig::libvirt::{
    CONTROL_PORT, CREDENTIALS, Ended, PORTS, Pair, Running, Side, TIMEOUT, Vm,
};
use dunlin_rig::need;

use super::support::{Done, Scratch, finish, words};
use super::tunnel::Tunnel;

pub const TUNNEL_PORT: u16 = 18300;
/// The port of the tunnel's listener for redirected connections to its first peer.
pub const REDIRECT_PORT: u16 = 18301;

/// How long virsh may take to fail if a part is missing. It usually takes one second, most of which
/// is the start of QEMU on the target. On a busy host it takes longer.
pub const FAST: Duration = Duration::from_secs(5);

/// Two hosts with libvirt, and the configurations of their tunnels.
pub struct Scene {
    pub pair: Pair,
    pub tunnels: [Option<Tunnel>; 2],
    pub scratch: Scratch,
}

impl Scene {
    /// Hosts with libvirt alone.
    pub fn bare() -> Option<Self> {
        Some(Self {
            pair: need::libvirt()?,
            tunnels: [None, None],
            scratch: Scratch::new(),
        })
    }

    /// Hosts with a tunnel and a redirect on each.
    pub fn new() -> Option<Self> {
        let mut scene = Self::bare()?;
        for side in [Side::A, Side::B] {
            let peer = scene.address(side.other(), Family::V4);
            scene.enable(side, &peer, "");
        }
        Some(scene)
    }

    /// Writes the configuration of a host for libvirt, starts its tunnel, and applies the rules. `peer`
    /// is an address or the name of the other host, and `more` has further keys of the redirect.
    pub fn enable(&mut self, side: Side, peer: &str, more: &str) {
        self.configure(side, peer, more);
        self.begin_dunlin(side);
    }

    /// Starts the tunnel of a host, and applies the rules.
    pub fn begin_dunlin(&mut self, side: Side) {
        self.start(side);
        self.redirect(side, "apply").expect(0);
    }

    pub fn config(&self, side: Side) -> PathBuf {
        self.scratch.join(format!("{}.toml", side.name()))
    }

    /// A host's address on the link.
    pub fn address(&self, side: Side, family: Family) -> String {
        let host = self.pair.on(side).host();
        self.pair.link.address(host, family).to_string()
    }

    /// Writes the configuration of a host, with the parameters of [`Self::enable`].
    fn configure(&self, side: Side, peer: &str, more: &str) {
        let redirect = format!(
            "[redirect.libvirt]\nports = \"{}-{}\"\nusers = [\"root\", \"libvirt-qemu\"]\n\
             peers = {{ {peer:?} = {:?} }}\n{more}",
            PORTS.start(),
            PORTS.end(),
            side.other().name(),
        );
        self.write(side, &redirect);
    }

    /// Writes the configuration of a host with this redirect.
    pub fn write(&self, side: Side, redirect: &str) {
        let identity = self.pair.on(side).path_inside(CREDENTIALS);
        let text = format!("listen = \"[::]:{TUNNEL_PORT}\"\nidentity = {identity:?}\n{redirect}");
        fs::write(self.config(side), text).unwrap();
    }

    /// Kills the tunnel of a host. Waits until the other host's tunnel refuses redirected
    /// connections. At first that tunnel still accepts them: for a second, it tries to reach the
    /// killed tunnel again.
    pub fn stop(&mut self, side: Side) {
        self.tunnels[side as usize] = None;
        if self.tunnels[side.other() as usize].is_some() {
            self.wait_listener(side.other(), false);
        }
    }

    pub fn start(&mut self, side: Side) {
        let file = self.config(side);
        let mut command = words("tunnel run --config");
        command.arg(&file);
        let command = self.pair.on(side).enter(&command);
        self.tunnels[side as usize] = Some(Tunnel::follow(command, file));
        if self.tunnels.iter().all(Option::is_some) {
            self.wait_open();
        }
    }

    /// Waits until both tunnels accept redirected connections. A tunnel does so only if it reaches
    /// the other tunnel.
    fn wait_open(&self) {
        for side in [Side::A, Side::B] {
            self.wait_listener(side, true);
        }
    }

    /// Waits until the listener for redirected connections is open, or closed, as `is_open` says.
    /// This function connects to it directly; an open listener accepts such a connection and then
    /// closes it.
    fn wait_listener(&self, side: Side, is_open: bool) {
        let deadline = Instant::now() + TIMEOUT;
        let connects = || TcpStream::connect((Ipv4Addr::LOCALHOST, REDIRECT_PORT)).is_ok();
        while self.pair.on(side).host().run(connects).unwrap() != is_open {
            assert!(Instant::now() < deadline, "{}", self.logs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs `dunlin redirect` with these words and the host's configuration.
    pub fn redirect(&self, side: Side, what: &str) -> Done {
        let mut command = words("redirect");
        command
            .args(what.split_whitespace())
            .arg("--config")
            .arg(self.config(side));
        finish(self.pair.on(side).enter(&command))
    }

    /// Runs a program on a host.
    pub fn run(&self, side: Side, line: &str) -> Done {
        let mut line = line.split_whitespace();
        let mut command = Command::new(line.next().unwrap());
        command.args(line);
        finish(self.pair.on(side).enter(&command))
    }

    /// Ends the tunnels, and returns what they logged.
    pub fn logs(&self) -> String {
        let log = |tunnel: &Tunnel| {
            tunnel.signal("KILL");
            tunnel.log.rest().join("\n")
        };
        let logs = self.tunnels.iter().flatten().map(log);
        logs.collect::<Vec<_>>().join("\n--\n")
    }

    pub fn count(&self, vms: &[&Vm]) -> Wire {
        let all: HashSet<u64> = vms.iter().flat_map(|vm| vm.words()).collect();
        self.pair.link.count(self.pair.a.host(), all).unwrap()
    }

    pub fn begin(&self, from: Side, vm: &Vm, flags: &str) -> Running {
        let line = format!(
            "migrate --live {flags} {} qemu+tcp://{}/system",
            vm.name,
            from.other().name()
        );
        self.pair.on(from).virsh_begin(&line).unwrap()
    }

    /// Waits until no connection of the toolstack is left in the tunnel of a host: the tunnel keeps
    /// connections to a lost peer for some seconds. Returns how many connections ended well so far,
    /// and how many failed.
    pub fn carried(&self, side: Side) -> (u64, u64) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let status = finish(self.pair.on(side).enter(&words("status --json"))).expect(0);
            let lines = status.lines();
            let line = lines.iter().find(|line| line["event"] == "tunnel").unwrap();
            let route = &line["routes"][0];
            let number = |key: &str| route[key].as_u64().unwrap();
            if number("channels") == 0 {
                return (number("closed") + number("left_unread"), number("failed"));
            }
            assert!(Instant::now() < deadline, "{route}");
        }
    }

    /// Migrates VMs at the same time. Expects that they arrive, and that all their traffic went
    /// through the tunnels. Returns the number of connections.
    pub fn moves(&self, from: Side, vms: &[&Vm], flags: &str) -> u64 {
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

    /// Expects that a migration fails at once, that the VM runs on, and that none of its memory was
    /// sent in the clear. Returns the number of connections that were tried, by port.
    pub fn fails(&self, from: Side, vm: &Vm, flags: &str) -> BTreeMap<u16, u64> {
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

    /// Begins a migration. Calls `end` after some memory was sent; `end` makes the migration fail.
    /// Expects that the migration fails, that none of the memory was sent in the clear, and that
    /// the VM runs on. Returns how long the migration took to fail after `end`.
    pub fn interrupted(&self, from: Side, vm: &Vm, flags: &str, end: impl FnOnce()) -> Duration {
        let wire = self.count(&[vm]);
        let running = self.begin(from, vm, flags);
        self.wait_sent(from, vm);
        end();
        let since = Instant::now();
        let ended = running.wait(TIMEOUT).unwrap();
        let took = since.elapsed();
        println!("{flags}: {took:?}, {}", ended.said.trim());
        assert_eq!(ended.code, Some(1), "{}", ended.said);
        assert_no_clear(&wire.stop().unwrap());
        self.runs_on(from, vm);
        took
    }

    /// Waits until some of a VM's memory was sent.
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

    /// Expects that the VM runs on this host and only there, and that its memory is intact.
    pub fn runs_on(&self, side: Side, vm: &Vm) {
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

/// Expects that no memory of a VM was sent in the clear, and no payload on the toolstack's ports.
pub fn assert_no_clear(traffic: &Traffic) {
    assert!(traffic.found.is_empty(), "{traffic:?}");
    let allowed = [TUNNEL_PORT, CONTROL_PORT];
    let ports = traffic.ports();
    assert!(
        ports.iter().all(|port| allowed.contains(port)),
        "{traffic:?}"
    );
    assert_eq!(traffic.others, 0, "{traffic:?}");
}

/// Expects that the VMs' memory was sent on the tunnel's port, and nothing in the clear.
pub fn assert_tunnelled(traffic: &Traffic, vms: &[&Vm]) {
    assert_no_clear(traffic);
    // The guests' pages cannot be compressed.
    let memory: u64 = vms.iter().map(|vm| vm.workload.pages * 4096).sum();
    assert!(traffic.bytes[&TUNNEL_PORT] > memory, "{traffic:?}");
}

/// Whether the long tests run.
pub fn soak() -> bool {
    let is_soak = std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1");
    if !is_soak {
        println!("only the soak runs this test (DUNLIN_SOAK=1)");
    }
    is_soak
}
