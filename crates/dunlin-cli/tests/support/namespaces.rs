//! Two hosts on one machine: network namespaces connected by a wire.
#![allow(dead_code, unreachable_pub)]

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where `ip netns` keeps names.
const NAMES: &str = "/run/netns";
/// Prefix of a namespace's name, before the ID of the test's process and a number.
const PREFIX: &str = "dunlin-test-";

/// Two namespaces, `a` and `b`, connected only to each other. They are removed on drop. The next
/// test removes the namespaces of a killed test.
pub struct Wire {
    a: String,
    b: String,
}

/// The size of the queue of a limited wire. TCP keeps at most two packets of 64 KiB for each lane
/// in the queue, so all lanes of a test together do not fill it. If the queue overflowed, it would
/// drop the last packets of a lane, and no later packet would make the receiver report the loss.
/// TCP would send these packets again only after 200 ms, which lengthens the downtime.
const QUEUE_BYTES: u32 = 4 << 20;

/// The addresses of both ends, from the block for documentation (RFC 5737).
pub const B: &str = "192.0.2.2";
const A: &str = "192.0.2.1";

impl Wire {
    /// Creates a wire that carries `megabits` Mbit/s from `a` to `b`, or any rate if that is `None`.
    /// If this process may not create namespaces, panics in CI and returns `None` elsewhere.
    pub fn new(megabits: Option<u32>) -> Option<Self> {
        match Self::make(megabits) {
            Ok(wire) => Some(wire),
            Err(error) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => {
                panic!("CI must allow network namespaces: {error}")
            }
            Err(error) => {
                println!("skipped, no network namespaces (they need root, ip and tc): {error}");
                None
            }
        }
    }

    fn make(megabits: Option<u32>) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        sweep();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("{PREFIX}{}-{number}{end}", std::process::id());
        let (a, b) = (name("a"), name("b"));
        run(&format!("ip netns add {a}"))?;
        // From here on, drop cleans up.
        let wire = Self { a, b };
        let (a, b) = (&wire.a, &wire.b);
        run(&format!("ip netns add {b}"))?;
        run(&format!(
            "ip link add wire netns {a} type veth peer name wire netns {b}"
        ))?;
        for (end, address) in [(a, A), (b, B)] {
            run(&format!("ip -n {end} address add {address}/24 dev wire"))?;
            run(&format!("ip -n {end} link set lo up"))?;
            run(&format!("ip -n {end} link set wire up"))?;
        }
        if let Some(megabits) = megabits {
            run(&format!(
                "tc -n {a} qdisc add dev wire root tbf rate {megabits}mbit burst 128kb \
                 limit {QUEUE_BYTES}"
            ))?;
        }
        Ok(wire)
    }

    /// The command, run at end `a`.
    pub fn at_a(&self, command: &Command) -> Command {
        within(&self.a, command)
    }

    /// The command, run at end `b`.
    pub fn at_b(&self, command: &Command) -> Command {
        within(&self.b, command)
    }

    /// Bytes sent by `a`, from its network device's counter.
    pub fn sent_bytes(&self) -> u64 {
        let mut cat = Command::new("cat");
        cat.arg("/sys/class/net/wire/statistics/tx_bytes");
        let output = self.at_a(&cat).output().unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        for name in [&self.a, &self.b] {
            // The second namespace may not exist.
            let _ = run(&format!("ip netns delete {name}"));
        }
    }
}

/// Removes the namespaces of killed tests.
fn sweep() {
    for entry in fs::read_dir(NAMES).into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let Some((pid, _)) = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split_once('-'))
        else {
            continue;
        };
        if !Path::new("/proc").join(pid).exists() {
            let _ = run(&format!("ip netns delete {name}"));
        }
    }
}

fn run(line: &str) -> io::Result<()> {
    let mut words = line.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{line}: {}", said.trim())))
}

/// Wraps the command so that it runs in a namespace. `ip netns exec` execs the command in the same
/// process.
fn within(namespace: &str, command: &Command) -> Command {
    let mut inside = Command::new("ip");
    inside
        .args(["netns", "exec", namespace])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => inside.env(name, value),
            None => inside.env_remove(name),
        };
    }
    inside
}
