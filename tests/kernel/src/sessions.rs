//! Two hosts with sessions of `dunlin ipsec`: their namespaces with a link that can be captured,
//! the command on each host, and connections.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_rig::linux::netns::run_inside;
use serde_json::Value;

use crate::{Guest, PREVIOUS};

/// The two hosts, each a network namespace, and their addresses.
pub const HOSTS: [(&str, &str); 2] = [("a", "10.0.0.1"), ("b", "10.0.0.2")];
/// The ports that sessions protect.
pub const PORTS: &str = "4444-4447";
/// The address to which the test's connections are made.
pub const AT: &str = "10.0.0.2:4444";
/// The address of the server, `dunlin ipsec serve`.
pub const SERVER: &str = "10.0.0.2:7302";
/// [`AT`] over IPv6.
pub const AT_6: &str = "[fd00::2]:4444";
/// [`SERVER`] over IPv6.
pub const SERVER_6: &str = "[fd00::2]:7302";
/// The name of the server's certificate.
pub const NAME: &str = "host-b.example";
/// The number of bytes sent over a connection at a time.
pub const BYTES: usize = 256 << 10;
/// The time limit for every step.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Sends bytes over all connections simultaneously, from the near end to the far end. If the bytes
/// do not arrive, prints the IPsec state of both hosts.
pub fn carry(guest: &Guest, connections: &[(TcpStream, TcpStream)]) {
    let carried: Vec<io::Result<()>> = thread::scope(|scope| {
        let one = |(near, far): &(TcpStream, TcpStream)| -> io::Result<()> {
            near.set_write_timeout(Some(LIMIT))?;
            far.set_read_timeout(Some(LIMIT))?;
            let (mut near, mut far) = (near, far);
            thread::scope(|scope| {
                let written = scope.spawn(move || near.write_all(&vec![7; BYTES]));
                let mut bytes = vec![0; BYTES];
                // `read_exact` repeats a call that was interrupted.
                far.read_exact(&mut bytes)?;
                assert!(bytes.iter().all(|byte| *byte == 7));
                written.join().expect("the thread does not panic")
            })
        };
        let threads: Vec<_> = connections
            .iter()
            .map(|connection| scope.spawn(move || one(connection)))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, io::Result<()>>| {
            thread.join().expect("the thread does not panic")
        };
        threads.into_iter().map(join).collect()
    });
    if carried.iter().all(Result::is_ok) {
        return;
    }
    for (host, _) in HOSTS {
        for table in ["state", "policy"] {
            println!(
                "{host}: {}",
                guest.output("ip", &["-n", host, "-s", "xfrm", table])
            );
        }
        let counters = netns(host, &["cat", "/proc/net/xfrm_stat"]);
        println!("{host}: {}", guest.output("ip", &counters));
    }
    panic!("not all data arrived: {carried:?}");
}

/// Connects to an address, with a time limit.
///
/// # Errors
/// An error from connect(2).
pub fn connect_to(at: &str) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&at.parse().expect("an address"), LIMIT)
}

/// Returns the SAs of a host's sessions, as `dunlin ipsec status` prints them.
pub fn associations(guest: &Guest, host: &str) -> Vec<Value> {
    associations_by("dunlin", guest, host)
}

/// Like [`associations`], but with another version of the command.
pub fn associations_by(dunlin: &str, guest: &Guest, host: &str) -> Vec<Value> {
    let text = guest.output(dunlin, &status(host, &["--json"]));
    let sessions = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let associations = sessions.map(|one| one["associations"].as_array().cloned());
    associations.flatten().flatten().collect()
}

/// Returns the arguments of `dunlin ipsec status` for a host.
pub fn status<'a>(host: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let control = if host == "a" { "run-a" } else { "run-b" };
    [&["ipsec", "status", "--control", control], more].concat()
}

/// Waits until neither host has an SA or a policy.
///
/// # Panics
/// A host still has an SA or a policy when the time limit expires.
pub fn nothing_left(guest: &Guest) {
    let limit = Instant::now() + LIMIT;
    for (host, _) in HOSTS {
        while !empty(guest, host) {
            if Instant::now() > limit {
                for table in ["state", "policy"] {
                    println!("{}", guest.output("ip", &["-n", host, "xfrm", table]));
                }
                panic!("{host} still has SAs or policies");
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Whether a host has neither SAs nor policies.
pub fn empty(guest: &Guest, host: &str) -> bool {
    let table = |table| guest.output("ip", &["-n", host, "xfrm", table]);
    !table("state").contains("proto esp") && !table("policy").contains("priority")
}

/// Waits until the condition is true.
pub fn until(what: &str, mut come: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !come() {
        assert!(Instant::now() < limit, "timed out: {what}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Runs `task` in a host's namespace.
pub fn inside<T: Send>(host: &str, task: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(Path::new("/run/netns").join(host)).expect("the namespace exists");
    run_inside(&namespace, task).expect("the file is a namespace")
}

/// The arguments that make `ip` run a command on a host.
pub fn netns<'a>(host: &'a str, command: &[&'a str]) -> Vec<&'a str> {
    [&["netns", "exec", host], command].concat()
}

/// A running `dunlin` command.
#[derive(Debug)]
pub struct Process(pub Child);

impl Process {
    /// Starts `dunlin ipsec serve` on host b.
    #[must_use]
    pub fn serve() -> Self {
        Self::serve_with(&[])
    }

    /// Starts the server with additional arguments.
    #[must_use]
    pub fn serve_with(more: &[&str]) -> Self {
        Self::serve_of("dunlin", more)
    }

    /// Starts the server with another version of the command.
    #[must_use]
    pub fn serve_of(dunlin: &str, more: &[&str]) -> Self {
        let arguments = netns(
            "b",
            &[
                dunlin,
                "ipsec",
                "serve",
                "--listen",
                "[::]:7302",
                "--udp",
                "4500",
                timeout_flag(dunlin),
                "60s",
                "--ports",
                PORTS,
                "--identity",
                "host-b",
                "--peer",
                "host-a.example",
                "--control",
                "run-b",
                "--state-dir",
                "state-b",
            ],
        );
        let mut command = Command::new("ip");
        command.args(arguments).args(more);
        Self::begin(command, "listening on")
    }

    /// Opens a session from host a, with `dunlin ipsec up`.
    #[must_use]
    pub fn up(mode: &str) -> Self {
        Self::begin(up_with(SERVER, &["--mode", mode]), "up")
    }

    /// Starts a command and waits for its first line of output.
    ///
    /// # Panics
    /// The first line of output does not begin with `first`.
    #[must_use]
    pub fn begin(mut command: Command, first: &str) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("ip starts");
        let said = child.stdout.take().expect("the stream is piped");
        let line = BufReader::new(said).lines().next();
        let line = line.and_then(Result::ok).unwrap_or_default();
        assert!(line.starts_with(first), "{line:?}");
        Self(child)
    }

    /// Stops the process and expects exit code 0.
    ///
    /// # Panics
    /// The command exits with another code.
    pub fn end(self, guest: &Guest) {
        assert_eq!(self.end_with(guest), Some(0));
    }

    /// Stops the process and returns its exit code.
    ///
    /// # Panics
    /// The signal cannot be sent.
    #[must_use]
    pub fn end_with(mut self, guest: &Guest) -> Option<i32> {
        // `ip netns exec` replaces itself with the program that it starts, so the program has the
        // child's process id.
        guest.command("kill", &["-TERM", &self.0.id().to_string()]);
        self.0.wait().expect("the process ends").code()
    }
}

/// Returns the command `dunlin ipsec up` for host a.
pub fn up_with(server: &str, more: &[&str]) -> Command {
    up_of("dunlin", server, more)
}

/// Like [`up_with`], but with another version of the command.
pub fn up_of(dunlin: &str, server: &str, more: &[&str]) -> Command {
    let mut command = Command::new("ip");
    command.args(netns(
        "a",
        &[
            dunlin,
            "ipsec",
            "up",
            "--peer",
            server,
            "--name",
            NAME,
            "--ports",
            PORTS,
            "--identity",
            "host-a",
            "--state-dir",
            "state-a",
        ],
    ));
    if !more.contains(&"--control") {
        command.args(["--control", "run-a"]);
    }
    command.args([timeout_flag(dunlin), "60s"]).args(more);
    command
}

/// Returns the name of the option that limits how long a peer may take to answer. The option has
/// another name in the previous version of `dunlin`.
fn timeout_flag(dunlin: &str) -> &'static str {
    if dunlin == PREVIOUS {
        "--patience"
    } else {
        "--timeout"
    }
}

/// Creates certificates for both hosts.
pub fn credentials(guest: &Guest) {
    guest.command("dunlin", &["pki", "init", "ca"]);
    for host in ["host-a", "host-b"] {
        let name = format!("{host}.example");
        let arguments = ["pki", "issue", "--ca", "ca", "--name", &name, host];
        guest.command("dunlin", &arguments);
    }
}

/// Creates the two hosts' namespaces and a link between them.
pub fn connect(guest: &Guest) {
    let ip = |arguments: &str| {
        guest.command("ip", &arguments.split(' ').collect::<Vec<_>>());
    };
    guest.command("modprobe", &["-a", "esp4_offload", "esp6_offload"]);
    for (host, _) in HOSTS {
        // An earlier test in the same virtual machine may have left the namespace's file, on which
        // nothing is mounted any more. With this file, `ip netns add` would fail.
        let _ = std::fs::remove_file(Path::new("/run/netns").join(host));
        ip(&format!("netns add {host}"));
    }
    ip("link add link-a netns a type veth peer name link-b netns b");
    for (host, address) in HOSTS {
        // The kernel would add automatic IPv6 addresses later. Each new address makes connections
        // look up their routes again.
        ip(&format!("-n {host} link set link-{host} addrgenmode none"));
        ip(&format!("-n {host} addr add {address}/24 dev link-{host}"));
        let address_6 = address.replace("10.0.0.", "fd00::");
        ip(&format!(
            "-n {host} addr add {address_6}/64 dev link-{host} nodad"
        ));
        ip(&format!("-n {host} link set link-{host} up"));
    }
    // If the link came up after a connection was made, the connection would look up its route
    // again. Wait until the link is up.
    for (host, _) in HOSTS {
        until("the link is up", || {
            let link = format!("link-{host}");
            let said = guest.output("ip", &["-n", host, "-o", "link", "show", &link]);
            said.contains("state UP")
        });
    }
}

/// A running tcpdump that captures a host's link.
#[derive(Debug)]
pub struct Capture(Child);

impl Capture {
    /// Starts capturing a host's link into a file.
    ///
    /// # Panics
    /// tcpdump does not start.
    #[must_use]
    pub fn begin(host: &str, file: &str) -> Self {
        let link = format!("link-{host}");
        let tcpdump = [
            "tcpdump",
            "-Z",
            "root",
            "--immediate-mode",
            "-U",
            "-s",
            "96",
            "-i",
            &link,
        ];
        let mut child = Command::new("ip")
            .args(netns(host, &tcpdump))
            .args(["-w", file])
            .stderr(Stdio::piped())
            .spawn()
            .expect("ip starts");
        let said = child.stderr.take().expect("the stream is piped");
        let mut lines = BufReader::new(said).lines();
        let listens = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("listening on"));
        assert!(listens, "tcpdump ended");
        Self(child)
    }

    /// Stops the capture after every packet has been written to the file.
    ///
    /// # Panics
    /// tcpdump does not end.
    pub fn end(mut self, guest: &Guest) {
        // On SIGINT tcpdump writes out its buffer.
        guest.command("kill", &["-INT", &self.0.id().to_string()]);
        self.0.wait().expect("the process ends");
    }
}

/// Returns the number of captured packets that match a filter.
pub fn captured(guest: &Guest, file: &str, filter: &str) -> usize {
    guest
        .output("tcpdump", &["-Z", "root", "-n", "-r", file, filter])
        .lines()
        .count()
}
