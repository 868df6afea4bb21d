//! Processes of keying sessions die or hang before a change to the kernel's tables, on either host.
//! Some die during rekeying. The test also checks the processes that replace them.

use std::env;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin::engine::vmm::FaultCode;
use dunlin::lane::dial::DialCancel;
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::peers::Peer;
use dunlin::lane::provider::Crypto;
use dunlin_ipsec::{
    Association, Direction, Event, Hook, Mode, Object, Observer, Options, PortRange, Server,
    Session, Status, Step, up,
};
use dunlin_kernel_tests::sessions::{
    Capture, LIMIT, NAME, SERVER, captured, connect, credentials, inside, netns, nothing_left,
    until,
};
use dunlin_kernel_tests::{Guest, Needs, Under, run};

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "tcpdump"],
    dunlin: true,
    limit_seconds: 420,
    under: Under::Oldest,
    ..Needs::NOTHING
};

/// The argument with which this program acts as one of the two processes of a session.
const PARTY: &str = "--party";
/// An action of a session's process: the process dies before the given change to the kernel's
/// tables.
const DIES: &str = "dies";
const STOPS: &str = "stops";
/// The process dies when the session is up on both hosts.
const DIES_UP: &str = "dies-up";
/// Until the session is up, the process tries to connect before each change to the kernel's tables.
const TRIES: &str = "tries";
/// Immediately before the process adds its first SA, another program adds an SA with the same SPI.
const COLLIDES: &str = "collides";
/// The process requests new keys and ends the session without waiting for them.
const LEAVES: &str = "leaves";
/// The process delays its first change to the kernel's tables after the session is up.
const LAGS: &str = "lags";
/// A file that the test creates after the process with the action [`LEAVES`] has ended.
const LEFT: &str = "left";
/// The process runs a complete session, with new keys in both directions.
const LIVES: &str = "lives";

/// The key of SAs that do not belong to a session.
const KEY: &str = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223";
const PORT_B: &str = "10.0.0.2:4444";
const PORT_A: &str = "10.0.0.1:4444";
/// If one process of a session hangs, the timeout of the other process.
const TIMEOUT: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    if let [_, word, role, action, step, timeout] = &arguments[..]
        && word == PARTY
    {
        let step = step.parse().expect("a number");
        let timeout = Duration::from_secs(timeout.parse().expect("a number"));
        return party(role, action, step, timeout);
    }
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        let capture = Capture::begin("b", "deaths.pcap");
        for host in ["a", "b"] {
            foreign(guest, host, "add");
        }
        // Without listeners on the ports, a connection would fail even if the ports were not
        // blocked.
        let listeners = [("a", PORT_A), ("b", PORT_B)]
            .map(|(host, at)| inside(host, || TcpListener::bind(at)).expect("the port is free"));
        println!("i6_p13_the_client_dies");
        i6_p13_a_process_that_dies_leaves_nothing_in_the_clear(guest, "a");
        println!("i6_p13_the_server_dies");
        i6_p13_a_process_that_dies_leaves_nothing_in_the_clear(guest, "b");
        drop(listeners);
        println!("i6_p13_a_replacement_process_opens_no_port");
        i6_p13_a_replacement_process_opens_no_port(guest);
        println!("p13_an_spi_in_use_stays_with_its_owner");
        p13_an_spi_in_use_stays_with_its_owner(guest);
        println!("a_peers_end_is_handled_after_a_send_error");
        a_peers_end_is_handled_after_a_send_error(guest);
        println!("i6_a_peer_that_hangs_times_out");
        i6_a_peer_that_hangs_times_out(guest);
        for host in ["a", "b"] {
            foreign(guest, host, "delete");
        }
        nothing_left(guest);
        capture.end(guest);
        let seen = |filter| captured(guest, "deaths.pcap", filter);
        assert_eq!(seen("tcp and not port 7302"), 0, "packets in the clear");
        assert!(
            seen("tcp and port 7302") > 10,
            "too few packets of the control connections"
        );
    })
}

/// In each round, the process on the host `dies` dies before one of its changes to the kernel's
/// tables. Each round chooses a later change than the previous round, so that the process dies
/// while it installs, renews or removes SAs. After each death, the clean-up on each host removes
/// the policies and SAs of the session, and no others.
fn i6_p13_a_process_that_dies_leaves_nothing_in_the_clear(guest: &Guest, dies: &str) {
    let every = if guest.is_soak() { 1 } else { 6 };
    let (mut deaths, mut replaced) = (0, false);
    let mut step = usize::from(dies == "b");
    loop {
        let action = |host| if host == dies { DIES } else { LIVES };
        let serve = begin("b", action("b"), step, LIMIT);
        let asks = begin("a", action("a"), step, LIMIT);
        let [asks, serves] = [asks, serve].map(|mut one| one.wait().expect("the process ends"));
        let died = if dies == "a" { asks } else { serves };
        for (host, to) in [("a", PORT_B), ("b", PORT_A)] {
            blocked_while_installed(guest, host, to, step);
            if host == dies && !replaced {
                replaced = replacements_stay(guest, host, step);
            }
            only_foreign(guest, host, step);
        }
        if died.success() {
            break;
        }
        deaths += 1;
        step += every;
    }
    println!("died {deaths} times in {step} changes");
    assert!(step >= 18, "{step} changes");
    assert!(replaced, "no dead process left both an SA and a policy");
}

/// Replaces an SA and a policy of a dead process by an SA and a policy of another program, with the
/// same SPI and selector. The clean-up must not remove them. Returns false if the dead process left
/// no such SA or no such policy.
fn replacements_stay(guest: &Guest, host: &str, step: usize) -> bool {
    let (own, other) = match host {
        "a" => ("10.0.0.1", "10.0.0.2"),
        _ => ("10.0.0.2", "10.0.0.1"),
    };
    let ip = |line: &str| {
        let words: Vec<&str> = ["-n", host, "xfrm"]
            .into_iter()
            .chain(line.split(' '))
            .collect();
        guest.output("ip", &words)
    };
    let left = ip(&format!("state list src {other} dst {own}"));
    let mut words = left.split_whitespace().skip_while(|word| *word != "spi");
    let spi = words.nth(1);
    let policy = format!("src {own}/32 dst {other}/32 proto 6 dport 4444 dir out");
    let (Some(spi), true) = (spi, ip("policy").contains("dport 4444 ")) else {
        return false;
    };
    let sa = format!("src {other} dst {own} proto esp spi {spi}");
    ip(&format!("state delete {sa}"));
    ip(&format!(
        "state add {sa} reqid 4242 mode transport aead rfc4106(gcm(aes)) {KEY} 128"
    ));
    ip(&format!(
        "policy update {policy} action allow priority 3000"
    ));
    clean(guest, host);
    let (states, policies) = (ip("state"), ip("policy"));
    assert!(states.contains("reqid 4242"), "before {step}: {states}");
    assert!(
        policies.contains("priority 3000"),
        "before {step}: {policies}"
    );
    ip(&format!("state delete {sa}"));
    ip(&format!("policy delete {policy}"));
    true
}

/// Runs the clean-up command, which removes what dead processes left on a host.
fn clean(guest: &Guest, host: &str) {
    let folder = format!("left-{host}");
    let clean = ["dunlin", "ipsec", "clean", "--state-dir", &folder];
    guest.command("ip", &netns(host, &clean));
}

/// If the session's policies are installed, asserts that a connection to the ports fails. If the
/// attempt sends unencrypted packets, the test finds them in its capture of the link.
fn blocked_while_installed(guest: &Guest, host: &str, to: &str, step: usize) {
    let policies = guest.output("ip", &["-n", host, "xfrm", "policy"]);
    if !policies.contains("dport 4444 ") {
        return;
    }
    let to: SocketAddr = to.parse().expect("an address");
    let tried = inside(host, || {
        TcpStream::connect_timeout(&to, Duration::from_millis(200))
    });
    assert!(tried.is_err(), "{host}, before change {step}: {policies}");
}

/// Asserts that the clean-up removes everything that belongs to the session, and nothing else.
fn only_foreign(guest: &Guest, host: &str, step: usize) {
    clean(guest, host);
    let left = guest.output("ip", &["-n", host, "xfrm", "state"]);
    assert_eq!(left.matches("proto esp").count(), 1, "{step}: {left}");
    assert!(
        left.contains("dst 10.9.9.9"),
        "the foreign SA is missing: {left}"
    );
    let left = guest.output("ip", &["-n", host, "xfrm", "policy"]);
    assert_eq!(left.matches("priority").count(), 1, "{step}: {left}");
    assert!(
        left.contains("10.9.9.9"),
        "the foreign policy is missing: {left}"
    );
}

/// Both processes die while the session is up. Their replacements try to send before every change,
/// until their ports are protected again.
fn i6_p13_a_replacement_process_opens_no_port(guest: &Guest) {
    for host in ["a", "b"] {
        let _ = fs::remove_file(meeting(host));
    }
    let dead = [begin("b", DIES_UP, 0, LIMIT), begin("a", DIES_UP, 0, LIMIT)];
    for mut one in dead {
        assert!(!one.wait().expect("the process ends").success());
    }
    let replacements = [begin("b", TRIES, 0, LIMIT), begin("a", TRIES, 0, LIMIT)];
    for mut one in replacements {
        assert!(one.wait().expect("the process ends").success());
    }
    for host in ["a", "b"] {
        let policies = guest.output("ip", &["-n", host, "xfrm", "policy"]);
        assert_eq!(policies.matches("priority").count(), 1, "{policies}");
        only_foreign(guest, host, 0);
    }
}

/// If an SPI is in use, the session chooses another SPI and leaves the existing SA unchanged.
fn p13_an_spi_in_use_stays_with_its_owner(guest: &Guest) {
    let parties = [
        begin("b", COLLIDES, 0, LIMIT),
        begin("a", COLLIDES, 0, LIMIT),
    ];
    for mut one in parties {
        assert!(one.wait().expect("the process ends").success());
    }
    for host in ["a", "b"] {
        let left = guest.output("ip", &["-n", host, "xfrm", "state"]);
        assert_eq!(left.matches("proto esp").count(), 2, "{left}");
        assert!(
            left.contains("reqid 4242"),
            "the SA that was added first is missing: {left}"
        );
        let own = if host == "a" { "10.0.0.1" } else { "10.0.0.2" };
        let line = format!("-n {host} xfrm state deleteall dst {own} reqid 4242");
        guest.command("ip", &line.split_whitespace().collect::<Vec<_>>());
        only_foreign(guest, host, 0);
    }
}

/// The messages of host b no longer reach host a. The ports become free nevertheless, because host
/// a has already requested the end of the session.
fn a_peers_end_is_handled_after_a_send_error(guest: &Guest) {
    let _ = fs::remove_file(LEFT);
    let mut lagging = begin("b", LAGS, 0, LIMIT);
    let mut leaving = begin("a", LEAVES, 0, LIMIT);
    assert!(leaving.wait().expect("the process ends").success());
    fs::write(LEFT, "").expect("the directory is ours");
    assert!(lagging.wait().expect("the process ends").success());
    for host in ["a", "b"] {
        let policies = guest.output("ip", &["-n", host, "xfrm", "policy"]);
        assert_eq!(policies.matches("priority").count(), 1, "{policies}");
    }
}

/// While the session starts, one process is stopped (SIGSTOP) before one of its changes. The other
/// process ends at its timeout. As long as policies of the session are installed, no connection to
/// the ports succeeds. The clean-up then removes everything that belongs to the session.
fn i6_a_peer_that_hangs_times_out(guest: &Guest) {
    // One process is stopped before its change `step`. Whichever it is, the other process waits for
    // it: the client waits until the server has made all its changes, and the server waits for the
    // client's next message.
    let steps = if guest.is_soak() { 0..8 } else { 4..5 };
    for (stops, step) in ["a", "b"]
        .into_iter()
        .flat_map(|host| steps.clone().map(move |step| (host, step)))
    {
        let action = |host| if host == stops { STOPS } else { LIVES };
        let timeout = |host| if host == stops { LIMIT } else { TIMEOUT };
        let serve = begin("b", action("b"), step, timeout("b"));
        let asks = begin("a", action("a"), step, timeout("a"));
        let (mut stopped, mut other) = if stops == "a" {
            (asks, serve)
        } else {
            (serve, asks)
        };
        let began = Instant::now();
        assert!(
            !other.wait().expect("the process ends").success(),
            "{stops} before {step}"
        );
        assert!(
            began.elapsed() < LIMIT,
            "the other process did not end at its timeout"
        );
        stopped.kill().expect("the process runs");
        let _ = stopped.wait();
        for (host, to) in [("a", PORT_B), ("b", PORT_A)] {
            blocked_while_installed(guest, host, to, step);
            only_foreign(guest, host, step);
        }
    }
}

/// Starts one of the two processes. If it is the server, waits until it listens.
fn begin(host: &str, action: &str, step: usize, timeout: Duration) -> Child {
    let role = if host == "a" { "asks" } else { "serves" };
    let party = Command::new("ip")
        .args(["netns", "exec", host])
        .arg(env::current_exe().expect("proc is mounted"))
        .args([PARTY, role, action, &step.to_string()])
        .arg(timeout.as_secs().to_string())
        .spawn()
        .expect("ip starts");
    if host == "b" {
        let at: SocketAddr = SERVER.parse().expect("an address");
        until("the server listens", || {
            inside("a", || TcpStream::connect_timeout(&at, LIMIT)).is_ok()
        });
    }
    party
}

/// The main function of this program when it acts as one of the two processes.
fn party(role: &str, action: &str, step: usize, timeout: Duration) -> ExitCode {
    let (own, host) = if role == "asks" {
        ("host-a", "a")
    } else {
        ("host-b", "b")
    };
    let load = Identity::load(Path::new(own), LoadOptions::default());
    let (identity, _) = load.expect("`dunlin pki` created it");
    let ports: PortRange = "4444".parse().expect("a port");
    let folder = format!("left-{host}");
    let mut options = Options::new(Mode::Connection, ports, Path::new(&folder).join("ipsec"));
    options.timeout = timeout;
    let is_up = Arc::new(AtomicBool::new(false));
    options.before_change = Some(hook(action, step, host, &is_up));
    let dies_up = action == DIES_UP;
    if role == "asks" {
        let peers = [NAME.parse::<Peer>().expect("a name")]
            .into_iter()
            .collect();
        let tls = identity
            .client(&Crypto::auto(), peers)
            .expect("the settings are valid");
        let observer: Observer = Arc::new(|event: &Event| println!("a: {event}"));
        let never = DialCancel::new().expect("an eventfd");
        let session = match up(SERVER, &tls, &options, &observer, &never) {
            Ok(session) => session,
            Err(error) => {
                println!("a: {error}");
                return ExitCode::FAILURE;
            }
        };
        is_up.store(true, Ordering::SeqCst);
        if dies_up {
            met(host);
            std::process::abort();
        }
        session.rekey();
        if action == LEAVES {
            // During this sleep, the process sends its request.
            thread::sleep(Duration::from_millis(100));
        } else {
            renewed(&session);
        }
        session.end();
        return match session.wait() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("a: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let peers = ["host-a.example".parse::<Peer>().expect("a name")]
        .into_iter()
        .collect();
    let tls = identity
        .server(&Crypto::auto(), peers)
        .expect("the settings are valid");
    let (sender, events) = channel();
    let observer: Observer = Arc::new(move |event: &Event| {
        println!("b: {event}");
        let _ = sender.send(event.clone());
    });
    let listener = TcpListener::bind(SERVER).expect("the address is free");
    let server = Server::start(listener, tls, options, observer).expect("the server starts");
    loop {
        match events.recv().expect("the server runs") {
            Event::Up(_) if dies_up => {
                met(host);
                std::process::abort();
            }
            Event::Up(_) => {
                is_up.store(true, Ordering::SeqCst);
                server.rekey();
            }
            Event::Over { why, .. } => {
                server.stop();
                // The other side may end the session. Then `why` is `None` or has the code
                // *cancelled*. Any other reason is a failure.
                return match why {
                    Some(why) if !why.contains(FaultCode::Cancelled.name()) => ExitCode::FAILURE,
                    _ => ExitCode::SUCCESS,
                };
            }
            _ => {}
        }
    }
}

/// Returns the hook that runs before each change to the kernel's tables.
fn hook(action: &str, step: usize, host: &str, is_up: &Arc<AtomicBool>) -> Hook {
    let (action, is_up) = (action.to_owned(), Arc::clone(is_up));
    let to: SocketAddr = if host == "a" { PORT_B } else { PORT_A }
        .parse()
        .expect("an address");
    let done = AtomicUsize::new(0);
    let collided = AtomicBool::new(false);
    let lagged = AtomicBool::new(false);
    Arc::new(move |change| {
        let now = done.fetch_add(1, Ordering::SeqCst) == step;
        if now && action == DIES {
            println!("dies before {change:?}");
            // As with SIGKILL, nothing is unwound or dropped.
            std::process::abort();
        }
        if now && action == STOPS {
            println!("stops before {change:?}");
            let own = std::process::id().to_string();
            let _ = Command::new("kill").args(["-STOP", &own]).status();
            // The signal may reach another thread first. This thread must not continue until it is
            // stopped, so it waits in this loop.
            loop {
                thread::park();
            }
        }
        if action == COLLIDES
            && let Step::Add(Object::Association(one)) = change
            && one.direction == Direction::In
            && !collided.swap(true, Ordering::SeqCst)
        {
            take(one);
        }
        if action == LAGS && is_up.load(Ordering::SeqCst) && !lagged.swap(true, Ordering::SeqCst) {
            until("the other process has left", || Path::new(LEFT).exists());
        }
        if action == TRIES && !is_up.load(Ordering::SeqCst) {
            // Ignore the result, because the connection can also fail if the other host blocks its
            // ports. The capture shows whether packets leave this host in the clear.
            let _ = TcpStream::connect_timeout(&to, Duration::from_millis(30));
        }
    })
}

/// Adds an SA that does not belong to the session, with the SPI of the session's SA.
fn take(one: &Association) {
    let Association {
        source,
        destination,
        spi,
        ..
    } = one;
    let line = format!(
        "xfrm state add src {source} dst {destination} proto esp spi {spi:#x} reqid 4242 mode \
         transport aead rfc4106(gcm(aes)) {KEY} 128"
    );
    let added = Command::new("ip").args(line.split_whitespace()).status();
    assert!(added.expect("ip starts").success());
}

/// Returns the name of the file that a host's process creates when its session is up.
fn meeting(host: &str) -> String {
    format!("up-{host}")
}

/// Reports that the session of this host is up, and waits until the other host reports the same.
fn met(host: &str) {
    fs::write(meeting(host), "").expect("the directory is ours");
    let other = if host == "a" { "b" } else { "a" };
    let until = Instant::now() + LIMIT;
    while !Path::new(&meeting(other)).exists() {
        assert!(Instant::now() < until, "the other session is not up");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until both directions have new keys or the session has ended.
fn renewed(session: &Session) {
    let is_new = |status: &Status| {
        let mut all = status.associations.iter();
        all.all(|one| one.association.epoch == 2)
    };
    until("new keys", || {
        let status = session.status().expect("the kernel answers");
        session.is_over() || status.is_some_and(|status| is_new(&status))
    });
}

/// Adds or deletes an SA and a policy that do not belong to the session.
fn foreign(guest: &Guest, host: &str, verb: &str) {
    let sa = "src 10.0.0.1 dst 10.9.9.9 proto esp spi 0x999";
    let add = format!("reqid 99 mode transport aead rfc4106(gcm(aes)) {KEY} 128");
    let policy = "src 10.0.0.1 dst 10.9.9.9 dir out";
    let template = "priority 7 tmpl src 10.0.0.1 dst 10.9.9.9 proto esp mode transport";
    let adds = verb == "add";
    for (table, which, what) in [("state", sa, &*add), ("policy", policy, template)] {
        let what = if adds { what } else { "" };
        let line = format!("-n {host} xfrm {table} {verb} {which} {what}");
        guest.command("ip", &line.split_whitespace().collect::<Vec<_>>());
    }
}
