//! Sessions of `dunlin ipsec` install SAs, renew keys and detect interference by other programs.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use dunlin_kernel_tests::sessions::{
    AT, AT_6, BYTES, Capture, LIMIT, NAME, PORTS, Process, SERVER, SERVER_6, associations,
    captured, carry, connect, connect_to, credentials, empty, inside, netns, nothing_left, status,
    until, up_with,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_linux::affinity::pin_to;
use dunlin_linux::socket::set_reset_on_close;
use serde_json::Value;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "tcpdump"],
    dunlin: true,
    limit_seconds: 420,
    under: Under::Oldest,
    ..Needs::NOTHING
};

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        let capture = Capture::begin("b", "sessions.pcap");
        let serve = Process::serve();
        println!("the_server_reports_when_its_identity_expires");
        the_server_reports_when_its_identity_expires(&serve);
        println!("i6_each_of_four_connections_has_an_sa_and_new_keys");
        i6_each_of_four_connections_has_an_sa_and_new_keys(guest);
        println!("each_cpu_has_an_sa");
        each_cpu_has_an_sa(guest);
        println!("esp_in_udp_works_over_ipv6");
        esp_in_udp_works_over_ipv6(guest);
        println!("conflicting_policies_are_reported");
        conflicting_policies_are_reported(guest);
        println!("removed_policies_and_sas_end_the_session");
        removed_policies_and_sas_end_the_session(guest);
        println!("a_device_that_bypasses_ipsec_is_refused");
        a_device_that_bypasses_ipsec_is_refused(guest);
        println!("without_the_capability_no_session_starts");
        without_the_capability_no_session_starts(guest);
        println!("up_ends_on_sigterm_without_waiting");
        up_ends_on_sigterm_without_waiting(guest);
        println!("a_peer_is_bound_to_its_addresses");
        a_peer_is_bound_to_its_addresses(guest);
        println!("ports_of_another_control_connection_are_refused");
        ports_of_another_control_connection_are_refused(guest);
        println!("i6_ports_in_use_stay_blocked_until_their_connections_end");
        i6_ports_in_use_stay_blocked_until_their_connections_end(guest);
        let serve = p13_a_restarted_server_removes_what_the_killed_one_left(guest, serve);
        serve.end(guest);
        capture.end(guest);
        // All TCP packets except those of the control connections must be in ESP. A host with
        // blocked ports does not answer packets of its peer, so it sends no resets in the clear.
        let seen = |filter| captured(guest, "sessions.pcap", filter);
        assert_eq!(
            seen("tcp and not port 7302 and not port 7303"),
            0,
            "packets in the clear"
        );
        assert!(seen("esp") > 100, "too few packets in ESP");
        assert!(
            seen("ip6 and udp port 4500") > 10,
            "too few packets in ESP in UDP"
        );
        assert!(
            seen("tcp and port 7302") > 10,
            "too few packets of the control connections"
        );
    })
}

/// Reads the status socket of the server, as `dunlin serve-status` does.
fn the_server_reports_when_its_identity_expires(serve: &Process) {
    let socket = format!("run-b/status/ipsec-{}.sock", serve.0.id());
    let mut text = String::new();
    until("the status socket", || {
        let stream = UnixStream::connect(&socket);
        stream.is_ok_and(|mut stream| stream.read_to_string(&mut text).is_ok())
    });
    let status: Value = serde_json::from_str(&text).expect("the status is an object");
    assert_eq!(status["name"], "serve", "{status}");
    let items = status["certificates"].as_array().expect("items");
    let names: Vec<_> = items.iter().map(|one| &one["item"]).collect();
    assert_eq!(
        names,
        ["certificate", "authority's certificate"],
        "{status}"
    );
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.expect("the clock is after 1970").as_secs();
    for one in items {
        assert!(one["not_after_unix_s"].as_u64() > Some(now), "{status}");
    }
}

/// Uses `ipsec up --mode connection` as for a hypervisor with several connections.
fn i6_each_of_four_connections_has_an_sa_and_new_keys(guest: &Guest) {
    let session = Process::up("connection");
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let connections: Vec<(TcpStream, TcpStream)> = (0..4)
        .map(|_| {
            let near = inside("a", || connect_to(AT)).expect("a connects");
            let (far, _) = listener.accept().expect("b accepts");
            (near, far)
        })
        .collect();
    let own = |lines: &[Value]| -> Vec<Value> {
        let out = lines.iter().filter(|one| one["direction"] == "out");
        out.filter(|one| !one["connection"].is_null())
            .cloned()
            .collect()
    };
    until("each connection has its SA", || {
        own(&associations(guest, "a")).len() == 4
    });
    until("each connection has its SA in the other direction", || {
        own(&associations(guest, "b")).len() == 4
    });
    carry(guest, &connections);
    let used = own(&associations(guest, "a"));
    for one in &used {
        assert!(one["bytes"].as_u64() >= Some(BYTES as u64), "{used:?}");
        assert_eq!(one["not_authentic"], 0, "{used:?}");
    }
    let mut seen = keys(guest, "a");
    assert!(
        seen.len() >= 10,
        "fewer than five SAs in a direction: {seen:?}"
    );
    for host in ["a", "b"] {
        guest.command("dunlin", &status(host, &["--rekey"]));
    }
    until("new keys", || {
        let lines = associations(guest, "a");
        lines.iter().all(|one| one["epoch"] == 2)
    });
    let before = seen.len();
    seen.extend(keys(guest, "a"));
    assert!(
        seen.len() >= before + 10,
        "the new keys have too few new SPIs: {seen:?}"
    );
    // Two SAs with the same key would repeat nonces, because the nonces of both count from 0. With
    // GCM, this would break both confidentiality and authentication.
    let different: BTreeSet<&String> = seen.values().collect();
    assert_eq!(different.len(), seen.len(), "a key is used twice: {seen:?}");
    carry(guest, &connections);
    let used = own(&associations(guest, "a"));
    assert_eq!(used.len(), 4);
    for one in &used {
        assert!(one["bytes"].as_u64() >= Some(BYTES as u64), "{used:?}");
    }
    // When a connection ends, its SA is removed and the other SAs remain.
    let mut connections = connections;
    connections.pop();
    until("the SA is removed with its connection", || {
        own(&associations(guest, "a")).len() == 3
    });
    carry(guest, &connections);
    drop(connections);
    drop(listener);
    session.end(guest);
    nothing_left(guest);
}

/// This test may require per-CPU SAs: the newest and the oldest supported kernel have them, the
/// oldest by a backport.
fn each_cpu_has_an_sa(guest: &Guest) {
    let session = Process::up("cpu");
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let connections: Vec<(TcpStream, TcpStream)> = (0..4)
        .map(|cpu| {
            let connect = || {
                pin_to(cpu).expect("the machine has four CPUs");
                connect_to(AT)
            };
            let near = inside("a", connect).expect("a connects");
            (near, listener.accept().expect("b accepts").0)
        })
        .collect();
    carry(guest, &connections);
    let lines = associations(guest, "a");
    for cpu in 0..4 {
        let own = |one: &&Value| one["direction"] == "out" && one["cpu"] == cpu;
        let one = lines
            .iter()
            .find(own)
            .unwrap_or_else(|| panic!("{lines:?}"));
        let bytes = one["bytes"].as_u64().expect("the SA exists") as usize;
        assert!((BYTES..2 * BYTES).contains(&bytes), "CPU {cpu}: {lines:?}");
    }
    drop(connections);
    session.end(guest);
    nothing_left(guest);
}

/// Over IPv6, a connection's SA carries the connection's bytes as ESP in UDP.
fn esp_in_udp_works_over_ipv6(guest: &Guest) {
    let session = Process::begin(
        up_with(SERVER_6, &["--mode", "connection", "--udp", "4500"]),
        "up",
    );
    let listener = inside("b", || TcpListener::bind(AT_6)).expect("b listens");
    let near = inside("a", || connect_to(AT_6)).expect("a connects");
    let connection = [(near, listener.accept().expect("b accepts").0)];
    let of_connection = |one: &Value| one["direction"] == "out" && !one["connection"].is_null();
    until("the connection has its SA", || {
        associations(guest, "a").iter().any(of_connection)
    });
    carry(guest, &connection);
    let lines = associations(guest, "a");
    let own = lines
        .iter()
        .find(|one| of_connection(one))
        .expect("the SA exists");
    assert!(own["bytes"].as_u64() >= Some(BYTES as u64), "{lines:?}");
    drop(connection);
    session.end(guest);
    nothing_left(guest);
}

/// A policy of another program conflicts with a new session, and so does an earlier session of this
/// host. The policy and the earlier session stay unchanged.
fn conflicting_policies_are_reported(guest: &Guest) {
    let policy = "src 10.0.0.0/24 dst 10.0.0.0/24 proto 6 dport 4446 dir out";
    let ip = |line: String| guest.command("ip", &line.split_whitespace().collect::<Vec<_>>());
    ip(format!(
        "-n a xfrm policy add {policy} action allow priority 3000"
    ));
    refused("ports-taken", "");
    assert!(
        guest
            .output("ip", &["-n", "a", "xfrm", "policy"])
            .contains("priority 3000")
    );
    ip(format!("-n a xfrm policy delete {policy}"));
    nothing_left(guest);
    let session = Process::up("connection");
    refused("ports-taken", "");
    assert_eq!(
        associations(guest, "a").len(),
        2,
        "the first session's SAs changed"
    );
    assert_eq!(associations(guest, "b").len(), 2);
    // The port of the control connection must not be among the ports of its own session or of
    // another session.
    let server = serve_at("[::]:4447", "4447-4451", "host-a.example");
    for ports in ["4447", "4448-4451"] {
        fails(up_at("10.0.0.2:4447", ports), "ports-taken", "port 4447");
    }
    server.end(guest);
    session.end(guest);
    nothing_left(guest);
}

/// Asserts that the session is refused with this fault code and that the message contains `name`.
fn refused(code: &str, name: &str) {
    let more = ["--mode", "connection", "--control", "run-2"];
    fails(up_with(SERVER, &more), code, name);
}

/// If a policy is removed, the session ends with an error and its ports stay blocked.
fn removed_policies_and_sas_end_the_session(guest: &Guest) {
    let mut session = Process::up("connection");
    guest.command("ip", &["-n", "a", "xfrm", "policy", "flush"]);
    assert!(!session.0.wait().expect("the process ends").success());
    let policies = guest.output("ip", &["-n", "a", "xfrm", "policy"]);
    assert!(policies.contains("action block"), "{policies}");
    assert_eq!(sealed(guest, "a"), 0);
    until("the peer's session is over", || has_none(guest, "b"));
    Process::up("connection").end(guest);
    nothing_left(guest);
    // If SAs are removed, the session also ends with an error and its ports stay blocked.
    let mut session = Process::up("connection");
    guest.command("ip", &["-n", "a", "xfrm", "state", "flush"]);
    assert!(!session.0.wait().expect("the process ends").success());
    let policies = guest.output("ip", &["-n", "a", "xfrm", "policy"]);
    assert!(policies.contains("action block"), "{policies}");
    until("the peer's session is over", || has_none(guest, "b"));
    Process::up("connection").end(guest);
    nothing_left(guest);
}

/// Tests settings of one device, or of all devices, with which the packets of the ports would
/// bypass IPsec.
fn a_device_that_bypasses_ipsec_is_refused(guest: &Guest) {
    let set = |of: &str, name: &str, value: u8| {
        let file = format!("/proc/sys/net/ipv4/conf/{of}/{name}");
        let line = format!("echo {value} > {file}");
        guest.command("ip", &netns("a", &["sh", "-c", &line]));
    };
    for (of, name) in [("link-a", "disable_xfrm"), ("all", "disable_policy")] {
        set(of, name, 1);
        refused("kernel", &format!("net/ipv4/conf/{of}/{name}"));
        set(of, name, 0);
        nothing_left(guest);
    }
    let mut session = Process::up("connection");
    set("link-a", "disable_policy", 1);
    assert!(!session.0.wait().expect("the process ends").success());
    set("link-a", "disable_policy", 0);
    Process::up("connection").end(guest);
    nothing_left(guest);
}

/// The command fails on either side, and its error names the missing capability.
fn without_the_capability_no_session_starts(guest: &Guest) {
    const UNPRIVILEGED: u32 = 65_534;
    let own = format!("{UNPRIVILEGED}:{UNPRIVILEGED}");
    for host in ["a", "b"] {
        let identity = format!("unprivileged-{host}");
        guest.command("cp", &["-r", &format!("host-{host}"), &identity]);
        guest.command("mkdir", &[&format!("state-unprivileged-{host}")]);
        let state = format!("state-unprivileged-{host}");
        guest.command("chown", &["-R", &own, &identity, &state]);
        let mut command = Command::new("dunlin");
        command.args(["ipsec", if host == "a" { "up" } else { "serve" }]);
        command.args([
            "--ports",
            PORTS,
            "--identity",
            &identity,
            "--state-dir",
            &state,
        ]);
        command.args(["--control", &state]);
        command.args(if host == "a" {
            ["--peer", SERVER, "--name", NAME]
        } else {
            ["--peer", "host-a.example", "--listen", "[::]:7303"]
        });
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        let refused = inside(host, || command.output()).expect("the program starts");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success());
        assert!(said.contains("CAP_NET_ADMIN"), "{host}: {said}");
    }
    nothing_left(guest);
}

/// The peer accepts the connection but sends nothing.
fn up_ends_on_sigterm_without_waiting(guest: &Guest) {
    let silent = inside("b", || TcpListener::bind("10.0.0.2:7303")).expect("b listens");
    let mut command = up_with("10.0.0.2:7303", &["--control", "run-2"]);
    let child = command.spawn().expect("ip starts");
    let _taken = silent.accept().expect("the peer connects");
    let began = Instant::now();
    assert_eq!(
        Process(child).end_with(guest),
        Some(4),
        "the exit code of a cancelled command"
    );
    assert!(
        began.elapsed() < LIMIT / 2,
        "the process waited for its timeout of {LIMIT:?}"
    );
    nothing_left(guest);
}

/// A session must not include the port of another session's control connection. The host that has
/// the record of the other session refuses the new one before it installs anything. After the
/// process of a session is killed, `status` still lists the session and advises
/// `dunlin ipsec clean`.
fn ports_of_another_control_connection_are_refused(guest: &Guest) {
    let mut session = Process::up("connection");
    let policies = || {
        let of = |host| guest.output("ip", &["-n", host, "xfrm", "policy"]);
        [of("a"), of("b")]
    };
    let before = policies();
    // With another directory of records, a host finds no record of the other session.
    for (state_a, state_b, is_peers) in
        [("state-a", "other-b", false), ("other-a", "state-b", true)]
    {
        let mut command = Command::new("ip");
        let serve = ["dunlin", "ipsec", "serve", "--listen", "[::]:7303"];
        command
            .args(netns("b", &serve))
            .args(["--ports", "7301-7302", "--identity", "host-b"])
            .args(["--peer", "host-a.example", "--control", "run-3"])
            .args(["--state-dir", state_b]);
        let server = Process::begin(command, "listening on");
        let mut command = Command::new("ip");
        let up = ["dunlin", "ipsec", "up", "--peer", "10.0.0.2:7303"];
        command
            .args(netns("a", &up))
            .args(["--name", NAME, "--ports", "7302", "--identity", "host-a"])
            .args(["--state-dir", state_a, "--control", "run-2"])
            .args(["--mode", "connection"]);
        let refused = command.output().expect("the program starts");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success());
        let of_port = said.contains("port 7302 ") && said.contains(PORTS);
        assert!(of_port && ends_with_code(&said, "ports-taken"), "{said}");
        assert_eq!(said.contains("ended by the peer"), is_peers, "{said}");
        assert_eq!(policies(), before);
        server.end(guest);
    }
    assert!(sealed(guest, "a") > 0 && sealed(guest, "b") > 0);
    guest.command("kill", &["-KILL", &session.0.id().to_string()]);
    let pid = session.0.id();
    let _ = session.0.wait();
    let at = |host: &str, command: &str, more: &[&str]| {
        let state = format!("state-{host}");
        let words = ["dunlin", "ipsec", command, "--state-dir", &state];
        guest.output("ip", &netns(host, &[&words, more].concat()))
    };
    let said = at("a", "status", &["--control", "run-a"]);
    assert!(
        said.contains(&pid.to_string()) && said.contains("`dunlin ipsec clean`"),
        "{said}"
    );
    until("the peer has noticed the loss", || sealed(guest, "b") == 0);
    let said = at("b", "status", &["--control", "run-b", "--json"]);
    assert!(said.contains("\"kept\":false"), "{said}");
    for host in ["a", "b"] {
        at(host, "clean", &[]);
        assert!(empty(guest, host), "{host}");
        let said = at(
            host,
            "status",
            &["--control", &format!("run-{host}"), "--json"],
        );
        assert_eq!(said, "");
    }
}

/// A server rejects a certificate that is used from an address outside the peer's addresses.
fn a_peer_is_bound_to_its_addresses(guest: &Guest) {
    let up = || up_at("10.0.0.2:7303", PORTS);
    let server = serve_at("[::]:7303", PORTS, "host-a.example=10.0.0.3,fd00::/64");
    fails(up(), "unauthorised", "10.0.0.1");
    assert!(empty(guest, "a") && empty(guest, "b"));
    server.end(guest);
    let server = serve_at("[::]:7303", PORTS, "host-a.example=10.0.0.0/31");
    Process::begin(up(), "up").end(guest);
    server.end(guest);
    nothing_left(guest);
}

/// Starts an additional server on host b.
fn serve_at(listen: &str, ports: &str, peer: &str) -> Process {
    let words = ["dunlin", "ipsec", "serve", "--listen", listen];
    let mut command = Command::new("ip");
    command
        .args(netns("b", &words))
        .args(["--ports", ports, "--identity", "host-b", "--peer", peer])
        .args(["--control", "run-3", "--state-dir", "state-b"]);
    Process::begin(command, "listening on")
}

/// Returns the command that starts an additional session from host a.
fn up_at(server: &str, ports: &str) -> Command {
    let words = ["dunlin", "ipsec", "up", "--peer", server];
    let mut command = Command::new("ip");
    command
        .args(netns("a", &words))
        .args(["--name", NAME, "--ports", ports, "--identity", "host-a"])
        .args(["--state-dir", "state-a", "--control", "run-2"])
        .args(["--mode", "connection", "--timeout", "60s"]);
    command
}

/// Asserts that the command fails with this fault code and that the message contains `name`.
fn fails(mut command: Command, code: &str, name: &str) {
    let refused = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success());
    assert!(ends_with_code(&said, code) && said.contains(name), "{said}");
}

/// Whether the last line, which is the command's error, ends with this fault code.
fn ends_with_code(said: &str, code: &str) -> bool {
    said.trim_end().ends_with(&format!(" [{code}]"))
}

/// Returns the number of outgoing packets of host a that policies have blocked.
fn blocked(guest: &Guest) -> u64 {
    let counters = guest.output("ip", &netns("a", &["cat", "/proc/net/xfrm_stat"]));
    let mut lines = counters.lines();
    let blocked = lines.find_map(|line| line.strip_prefix("XfrmOutPolBlock"));
    let blocked = blocked.and_then(|count| count.trim().parse().ok());
    blocked.unwrap_or_else(|| panic!("{counters}"))
}

/// After a session has ended, unsent data of a connection does not leave in the clear.
fn i6_ports_in_use_stay_blocked_until_their_connections_end(guest: &Guest) {
    let session = Process::begin(
        up_with(SERVER, &["--mode", "connection", "--quiet-wait", "1s"]),
        "up",
    );
    let listener = inside("b", || TcpListener::bind(AT)).expect("b listens");
    let near = inside("a", || connect_to(AT)).expect("a connects");
    let far = listener.accept().expect("b accepts").0;
    carry(
        guest,
        &[(
            near.try_clone().expect("a descriptor"),
            far.try_clone().expect("a descriptor"),
        )],
    );
    assert_eq!(session.end_with(guest), Some(1), "the ports are not free");
    // From now on, TCP would retransmit the data if a policy allowed it.
    let before = blocked(guest);
    let _ = (&near).write_all(&[7; 4096]);
    // Both the first segment and one retransmission are blocked.
    until("the policy blocks what is sent again", || {
        blocked(guest) >= before + 2
    });
    let policies = guest.output("ip", &["-n", "a", "xfrm", "policy"]);
    assert!(policies.contains("action block"), "{policies}");
    assert!(
        !guest
            .output("ip", &["-n", "a", "xfrm", "state"])
            .contains("proto esp")
    );
    let clean = netns("a", &["dunlin", "ipsec", "clean", "--state-dir", "state-a"]);
    guest.command("ip", &clean);
    let policies = guest.output("ip", &["-n", "a", "xfrm", "policy"]);
    assert!(
        policies.contains("action block"),
        "ports in use are not blocked: {policies}"
    );
    // Act as if the connection's owner had died, so that the kernel discards the unsent data.
    for end in [&near, &far] {
        set_reset_on_close(end).expect("a socket");
    }
    drop((near, far));
    until("the ports are free", || {
        guest.command("ip", &clean);
        empty(guest, "a") && empty(guest, "b")
    });
}

/// The next server removes the SAs of a killed server before it accepts a peer. The peer's session
/// has already ended.
fn p13_a_restarted_server_removes_what_the_killed_one_left(
    guest: &Guest,
    serve: Process,
) -> Process {
    let mut session = Process::up("connection");
    guest.command("kill", &["-KILL", &serve.0.id().to_string()]);
    let mut serve = serve;
    let _ = serve.0.wait();
    assert!(
        !session.0.wait().expect("the process ends").success(),
        "the session did not fail after the death of the server"
    );
    // Killing the server or cutting the control connection does not unblock a port.
    assert_eq!(sealed(guest, "a"), 0);
    let policies = guest.output("ip", &["-n", "a", "xfrm", "policy"]);
    assert!(policies.contains("action block"), "{policies}");
    assert!(!empty(guest, "b"));
    let again = Process::serve();
    // The session's SAs are removed. The blocking policies stay until the next session replaces
    // them.
    assert_eq!(sealed(guest, "b"), 0);
    let policies = guest.output("ip", &["-n", "b", "xfrm", "policy"]);
    assert!(policies.contains("action block"), "{policies}");
    Process::up("connection").end(guest);
    nothing_left(guest);
    again
}

/// Whether the server on a host has no session and no SA.
fn has_none(guest: &Guest, host: &str) -> bool {
    let sessions = guest.output("dunlin", &status(host, &["--json"]));
    sealed(guest, host) == 0 && sessions.is_empty()
}

/// Returns the keys of a host's SAs by SPI, read from the kernel.
fn keys(guest: &Guest, host: &str) -> BTreeMap<String, String> {
    let states = guest.output("ip", &["-n", host, "-o", "xfrm", "state"]);
    let word_after = |line: &str, name: &str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).map(str::to_owned)
    };
    let key = |line: &str| {
        Some((
            word_after(line, "spi")?,
            word_after(line, "rfc4106(gcm(aes))")?,
        ))
    };
    states.lines().filter_map(key).collect()
}

/// Returns the number of a host's SAs.
fn sealed(guest: &Guest, host: &str) -> usize {
    let states = guest.output("ip", &["-n", host, "xfrm", "state"]);
    states.matches("proto esp").count()
}
