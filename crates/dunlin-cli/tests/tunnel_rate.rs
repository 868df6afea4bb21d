//! Limits of rates in a tunnel's configuration, and `dunlin tunnel set`.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_test_base::sockets::{TIMEOUT, accepted};
use serde_json::Value;
use support::{Done, Hosts, finish, words};
use tunnel::{Tunnel, connect, control, far_config, listen, near_config};

const MIB: u64 = 1 << 20;

/// Two hosts with one route. Its channel has bytes to send until the test ends.
struct Scene {
    hosts: Hosts,
    near: Tunnel,
    _far: Tunnel,
}

impl Scene {
    fn new(keys: &str) -> Self {
        let hosts = Hosts::new();
        let target = listen(hosts.scratch.join("out"));
        let far = Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"));
        let config = near_config(&hosts, &far.address, "ram", "in") + keys;
        let near = Tunnel::start(&hosts, "near", &config);
        let mut stream = connect(hosts.scratch.join("in"));
        let mut arriving = accepted(&target);
        // Both threads end with the tunnels.
        thread::spawn(move || while stream.write_all(&[7; 1 << 16]).is_ok() {});
        thread::spawn(move || {
            let mut bytes = vec![0; 1 << 20];
            while matches!(arriving.read(&mut bytes), Ok(1..)) {}
        });
        Self {
            hosts,
            near,
            _far: far,
        }
    }

    fn set(&self, line: &str) -> Done {
        let mut command = words(&format!("tunnel set {line}"));
        command.arg("--config").arg(&self.near.config);
        command.arg("--control").arg(control(&self.hosts));
        finish(command)
    }

    /// The near tunnel's status.
    fn status(&self) -> Value {
        let until = Instant::now() + TIMEOUT;
        loop {
            let mut command = words("status --json --state-dir");
            command.arg(self.hosts.scratch.join("state"));
            command.arg("--control").arg(control(&self.hosts));
            let lines = finish(command).expect(0).lines();
            if let Some(near) = lines.into_iter().find(|line| line["name"] == "near") {
                return near;
            }
            assert!(Instant::now() < until, "the tunnel does not answer");
        }
    }

    /// Asserts that the near tunnel reads at 80 to 105 percent of `limit`, by its own counters and
    /// clock. Other processes on the host may slow it down.
    fn assert_rate(&self, limit: u64) {
        let of = |status: &Value| {
            let bytes = status["routes"][0]["read_bytes"].as_f64().unwrap();
            (bytes, status["running_s"].as_f64().unwrap())
        };
        let before = of(&self.status());
        thread::sleep(Duration::from_secs(1));
        let after = of(&self.status());
        let part = (after.0 - before.0) / (after.1 - before.1) / limit as f64;
        assert!((0.8..1.05).contains(&part), "{part:.3} of the limit");
    }

    fn limits(&self) -> (Option<u64>, Option<u64>) {
        let status = self.status();
        let of = |line: &Value| line["limit_bytes_per_s"].as_u64();
        (of(&status["routes"][0]), of(&status["peers"][0]))
    }
}

#[test]
fn the_limits_of_a_route_and_a_peer_hold_and_a_running_tunnel_takes_others() {
    let scene = Scene::new("rate = \"8M\"\n[peer.\"b.test\"]\nrate = \"1G\"\n");
    assert_eq!(scene.limits(), (Some(8 * MIB), Some(1024 * MIB)));
    scene.assert_rate(8 * MIB);
    scene.set("ram --rate 16M").expect(0);
    scene.assert_rate(16 * MIB);
    scene.set("--peer b.test --rate 4M").expect(0);
    assert_eq!(scene.limits(), (Some(16 * MIB), Some(4 * MIB)));
    scene.assert_rate(4 * MIB);
    scene.set("ram --rate none").expect(0);
    scene.set("--peer b.test --rate none").expect(0);
    assert_eq!(scene.limits(), (None, None));

    let config = fs::read_to_string(&scene.near.config).unwrap();
    let config = config.replace("rate = \"8M\"", "rate = \"2M\"");
    fs::write(&scene.near.config, config).unwrap();
    scene.near.signal("HUP");
    scene.near.wait_for("configuration reloaded");
    scene.assert_rate(2 * MIB);
    assert_eq!(scene.limits(), (Some(2 * MIB), Some(1024 * MIB)));
}

#[test]
fn an_invalid_limit_changes_nothing() {
    let scene = Scene::new("");
    let unknown = scene.set("none --rate 1M --json").expect(1);
    assert_eq!(unknown.last()["fault"], "unknown-route", "{unknown:?}");
    for usage in [
        "--rate 1M",
        "ram",
        "ram --rate 0",
        "ram --rate 1K",
        "ram --rate fast",
        "ram --peer b.test --rate 1M",
    ] {
        scene.set(usage).expect(2);
    }
    assert_eq!(scene.limits(), (None, None));
}
