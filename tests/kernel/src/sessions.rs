//! Two hosts between which `dunlin ipsec` has sessions: namespaces with a captured link, the
//! command at either of them, and connections.

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
/// The ports of sessions.
pub const PORTS: &str = "4444-4447";
/// Where connections arrive.
pub const AT: &str = "10.0.0.2:4444";
/// Where sessions are asked for.
pub const SERVER: &str = "10.0.0.2:7302";
/// The same over IPv6.
pub const AT_6: &str = "[fd00::2]:4444";
/// The same over IPv6.
pub const SERVER_6: &str = "[fd00::2]:7302";
/// The name of the server's certificate.
pub const NAME: &str = "host-b.example";
/// What is sent over a connection at a time.
pub const BYTES: usize = 256 << 10;
/// Far more than anything takes in this machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Bytes over every connection, near to far, all at once. Where they do not come through, what
/// both hosts have is printed.
pub fn carry(guest: &Guest, connections: &[(TcpStream, TcpStream)]) {
    let carried: Vec<io::Result<()>> = thread::scope(|scope| {
        let one = |(near, far): &(TcpStream, TcpStream)| -> io::Result<()> {
            near.set_write_timeout(Some(LIMIT))?;
            far.set_read_timeout(Some(LIMIT))?;
            let (mut near, mut far) = (near, far);
            thread::scope(|scope| {
                let written = scope.spawn(move || near.write_all(&vec![7; BYTES]));
                let mut bytes = vec![0; BYTES];
                // `read_exact` goes on after an interruption.
                far.read_exact(&mut bytes)?;
                assert!(bytes.iter().all(|byte| *byte == 7));
                written.join().expect("it does not panic")
            })
        };
        let threads: Vec<_> = connections
            .iter()
            .map(|connection| scope.spawn(move || one(connection)))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, io::Result<()>>| {
            thread.join().expect("it does not panic")
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
    panic!("not everything came through: {carried:?}");
}

/// A connection to an address.
///
/// # Errors
/// What connect(2) says.
pub fn connect_to(at: &str) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&at.parse().expect("an address"), LIMIT)
}

/// The SAs of a host's sessions.
pub fn associations(guest: &Guest, host: &str) -> Vec<Value> {
    associations_by("dunlin", guest, host)
}

/// The same, as another version of the command shows them.
pub fn associations_by(dunlin: &str, guest: &Guest, host: &str) -> Vec<Value> {
    let text = guest.output(dunlin, &status(host, &["--json"]));
    let sessions = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let associations = sessions.map(|one| one["associations"].as_array().cloned());
    associations.flatten().flatten().collect()
}

/// The words of `dunlin ipsec status` at a host.
pub fn status<'a>(host: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let control = if host == "a" { "run-a" } else { "run-b" };
    [&["ipsec", "status", "--control", control], more].concat()
}

/// Waits until neither host has an SA or a policy.
///
/// # Panics
/// One still has when the limit has come.
pub fn nothing_left(guest: &Guest) {
    let limit = Instant::now() + LIMIT;
    for (host, _) in HOSTS {
        while !empty(guest, host) {
            if Instant::now() > limit {
                for table in ["state", "policy"] {
                    println!("{}", guest.output("ip", &["-n", host, "xfrm", table]));
                }
                panic!("not everything is taken back at {host}");
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

/// Waits for something that comes, with a limit that only a defect reaches.
pub fn until(what: &str, mut come: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !come() {
        assert!(Instant::now() < limit, "{what}: not yet");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Does something in a host's namespace.
pub fn inside<T: Send>(host: &str, task: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(Path::new("/run/netns").join(host)).expect("it was made");
    run_inside(&namespace, task).expect("it is a namespace")
}

/// The words by which `ip` runs a command at a host.
pub fn netns<'a>(host: &'a str, command: &[&'a str]) -> Vec<&'a str> {
    [&["netns", "exec", host], command].concat()
}

/// A `dunlin ipsec` that runs.
#[derive(Debug)]
pub struct Process(pub Child);

impl Process {
    /// The server, at host b.
    #[must_use]
    pub fn serve() -> Self {
        Self::serve_with(&[])
    }

    /// The same with more words.
    #[must_use]
    pub fn serve_with(more: &[&str]) -> Self {
        Self::serve_of("dunlin", more)
    }

    /// The same with another version of the command.
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

    /// A session, from host a.
    #[must_use]
    pub fn up(mode: &str) -> Self {
        Self::begin(up_with(SERVER, &["--mode", mode]), "up")
    }

    /// Begins one and waits for its first words.
    ///
    /// # Panics
    /// It says something else.
    #[must_use]
    pub fn begin(mut command: Command, first: &str) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("ip starts");
        let said = child.stdout.take().expect("it was asked for");
        let line = BufReader::new(said).lines().next();
        let line = line.and_then(Result::ok).unwrap_or_default();
        assert!(line.starts_with(first), "{line:?}");
        Self(child)
    }

    /// Has it end, and well.
    ///
    /// # Panics
    /// It fails.
    pub fn end(self, guest: &Guest) {
        assert_eq!(self.end_with(guest), Some(0));
    }

    /// Has it end, and says with which exit code it does.
    ///
    /// # Panics
    /// It cannot be asked to.
    #[must_use]
    pub fn end_with(mut self, guest: &Guest) -> Option<i32> {
        // `ip netns exec` becomes the program that it starts.
        guest.command("kill", &["-TERM", &self.0.id().to_string()]);
        self.0.wait().expect("it ends").code()
    }
}

/// `dunlin ipsec up` at host a.
pub fn up_with(server: &str, more: &[&str]) -> Command {
    up_of("dunlin", server, more)
}

/// The same with another version of the command.
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

/// The flag that limits how long a peer may take to answer. The earlier command has another name for
/// it.
fn timeout_flag(dunlin: &str) -> &'static str {
    if dunlin == PREVIOUS {
        "--patience"
    } else {
        "--timeout"
    }
}

/// Certificates for both hosts.
pub fn credentials(guest: &Guest) {
    guest.command("dunlin", &["pki", "init", "ca"]);
    for host in ["host-a", "host-b"] {
        let name = format!("{host}.example");
        let arguments = ["pki", "issue", "--ca", "ca", "--name", &name, host];
        guest.command("dunlin", &arguments);
    }
}

/// A link between the two hosts.
pub fn connect(guest: &Guest) {
    let ip = |arguments: &str| {
        guest.command("ip", &arguments.split(' ').collect::<Vec<_>>());
    };
    guest.command("modprobe", &["-a", "esp4_offload", "esp6_offload"]);
    for (host, _) in HOSTS {
        // Of an earlier test in the same machine, whose namespaces have gone with it.
        let _ = std::fs::remove_file(Path::new("/run/netns").join(host));
        ip(&format!("netns add {host}"));
    }
    ip("link add link-a netns a type veth peer name link-b netns b");
    for (host, address) in HOSTS {
        // An address that came by itself later would make connections look for their way anew.
        ip(&format!("-n {host} link set link-{host} addrgenmode none"));
        ip(&format!("-n {host} addr add {address}/24 dev link-{host}"));
        let address_6 = address.replace("10.0.0.", "fd00::");
        ip(&format!(
            "-n {host} addr add {address_6}/64 dev link-{host} nodad"
        ));
        ip(&format!("-n {host} link set link-{host} up"));
    }
    // So would a link that the kernel takes for up a moment later.
    for (host, _) in HOSTS {
        until("the link is up", || {
            let link = format!("link-{host}");
            let said = guest.output("ip", &["-n", host, "-o", "link", "show", &link]);
            said.contains("state UP")
        });
    }
}

/// What goes over a host's link, as tcpdump sees it.
#[derive(Debug)]
pub struct Capture(Child);

impl Capture {
    /// Begins to capture what goes over a host's link.
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
        let said = child.stderr.take().expect("it was asked for");
        let mut lines = BufReader::new(said).lines();
        let listens = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("listening on"));
        assert!(listens, "tcpdump ended");
        Self(child)
    }

    /// Ends it, with everything written.
    ///
    /// # Panics
    /// tcpdump does not end.
    pub fn end(mut self, guest: &Guest) {
        // Asked to end, it writes out what it holds.
        guest.command("kill", &["-INT", &self.0.id().to_string()]);
        self.0.wait().expect("it ends");
    }
}

/// How many captured packets a filter lets through.
pub fn captured(guest: &Guest, file: &str, filter: &str) -> usize {
    guest
        .output("tcpdump", &["-Z", "root", "-n", "-r", file, filter])
        .lines()
        .count()
}
