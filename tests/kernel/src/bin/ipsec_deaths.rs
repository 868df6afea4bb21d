//! Processes of IPsec sessions that die or hang between any two changes of the kernel's tables, at
//! either host, while keys are renewed too; and what takes their place.

use std::env;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

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

/// Asks this program to be one of a session's two processes.
const PARTY: &str = "--party";
/// What a process does before the change of its tables that it was given.
const DIES: &str = "dies";
const STOPS: &str = "stops";
/// It dies as soon as the session is up.
const DIES_UP: &str = "dies-up";
/// Before each change until the session is up it tries to connect.
const TRIES: &str = "tries";
/// Somebody else takes the number of its first SA just before it does.
const COLLIDES: &str = "collides";
/// It renews its keys and ends the session, and waits for nobody.
const LEAVES: &str = "leaves";
/// It is slow with the first change that it makes while the session stands.
const LAGS: &str = "lags";
/// Longer than the other one takes to leave.
const LAG: Duration = Duration::from_millis(1500);
/// It has a session from its beginning to its end, with new keys in both directions.
const LIVES: &str = "lives";

/// Of SAs that are not ours.
const KEY: &str = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223";
const PORT_B: &str = "10.0.0.2:4444";
const PORT_A: &str = "10.0.0.1:4444";
/// How long a process waits for one that hangs.
const PATIENCE: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().collect();
    if let [_, word, role, deed, step, patience] = &arguments[..]
        && word == PARTY
    {
        let step = step.parse().expect("a number");
        let patience = Duration::from_secs(patience.parse().expect("a number"));
        return party(role, deed, step, patience);
    }
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        let capture = Capture::begin("b", "deaths.pcap");
        for host in ["a", "b"] {
            foreign(guest, host, "add");
        }
        // Whoever tries the ports finds somebody there, and fails where they are shut alone.
        let entrances = [("a", PORT_A), ("b", PORT_B)]
            .map(|(host, at)| inside(host, || TcpListener::bind(at)).expect("it is free"));
        println!("i6_p13_the_side_that_asks_dies");
        i6_p13_a_process_that_dies_leaves_nothing_in_the_clear(guest, "a");
        println!("i6_p13_the_side_that_is_asked_dies");
        i6_p13_a_process_that_dies_leaves_nothing_in_the_clear(guest, "b");
        drop(entrances);
        println!("i6_p13_an_heir_opens_no_port");
        i6_p13_an_heir_opens_no_port(guest);
        println!("p13_an_spi_that_is_taken_stays_its_owner_s");
        p13_an_spi_that_is_taken_stays_its_owner_s(guest);
        println!("an_end_is_heard_by_one_that_cannot_say_anything_any_more");
        an_end_is_heard_by_one_that_cannot_say_anything_any_more(guest);
        println!("i6_a_peer_that_hangs_is_given_up");
        i6_a_peer_that_hangs_is_given_up(guest);
        for host in ["a", "b"] {
            foreign(guest, host, "delete");
        }
        nothing_left(guest);
        capture.end(guest);
        let seen = |filter| captured(guest, "deaths.pcap", filter);
        assert_eq!(seen("tcp and not port 7302"), 0, "in the clear");
        assert!(seen("tcp and port 7302") > 10, "the control connections");
    })
}

/// One of the two dies before each of its changes, forth, while keys are renewed, and back. Each
/// time both take back what is theirs.
fn i6_p13_a_process_that_dies_leaves_nothing_in_the_clear(guest: &Guest, dies: &str) {
    let every = if guest.is_soak() { 1 } else { 6 };
    let (mut deaths, mut replaced) = (0, false);
    let mut step = usize::from(dies == "b");
    loop {
        let deed = |host| if host == dies { DIES } else { LIVES };
        let serve = begin("b", deed("b"), step, LIMIT);
        let asks = begin("a", deed("a"), step, LIMIT);
        let [asks, serves] = [asks, serve].map(|mut one| one.wait().expect("it ends"));
        let died = if dies == "a" { asks } else { serves };
        for (host, to) in [("a", PORT_B), ("b", PORT_A)] {
            closed_where_ours(guest, host, to, step);
            if host == dies && !replaced {
                replaced = in_the_place_of_ours(guest, host, step);
            }
            only_foreign(guest, host, step);
        }
        if died.success() {
            break;
        }
        deaths += 1;
        step += every;
    }
    println!("died {deaths} times, of {step} changes");
    assert!(step >= 18, "{step} changes");
    assert!(replaced, "an SA and a policy were left once");
}

/// What somebody has put in the place of a dead one's SA and policy, under the same number and for
/// the same packets, stays. False where it has left none such.
fn in_the_place_of_ours(guest: &Guest, host: &str, step: usize) -> bool {
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

/// Takes back what processes of a host have left that have died.
fn clean(guest: &Guest, host: &str) {
    let folder = format!("left-{host}");
    let clean = ["dunlin", "ipsec", "clean", "--state-dir", &folder];
    guest.command("ip", &netns(host, &clean));
}

/// Where the ports are ours still, nothing of them is sent: the capture has all of it.
fn closed_where_ours(guest: &Guest, host: &str, to: &str, step: usize) {
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

/// What a start takes back is all that was ours.
fn only_foreign(guest: &Guest, host: &str, step: usize) {
    clean(guest, host);
    let left = guest.output("ip", &["-n", host, "xfrm", "state"]);
    assert_eq!(left.matches("proto esp").count(), 1, "{step}: {left}");
    assert!(left.contains("dst 10.9.9.9"), "the foreign SA: {left}");
    let left = guest.output("ip", &["-n", host, "xfrm", "policy"]);
    assert_eq!(left.matches("priority").count(), 1, "{step}: {left}");
    assert!(left.contains("10.9.9.9"), "the foreign policy: {left}");
}

/// Both are killed while the session stands, and begin anew: each tries to send before every
/// change that it makes until its ports are protected again.
fn i6_p13_an_heir_opens_no_port(guest: &Guest) {
    let dead = [begin("b", DIES_UP, 0, LIMIT), begin("a", DIES_UP, 0, LIMIT)];
    for mut one in dead {
        assert!(!one.wait().expect("it ends").success());
    }
    let heirs = [begin("b", TRIES, 0, LIMIT), begin("a", TRIES, 0, LIMIT)];
    for mut one in heirs {
        assert!(one.wait().expect("it ends").success());
    }
    for host in ["a", "b"] {
        let policies = guest.output("ip", &["-n", host, "xfrm", "policy"]);
        assert_eq!(policies.matches("priority").count(), 1, "{policies}");
        only_foreign(guest, host, 0);
    }
}

/// The session takes another, and leaves the SA alone that has it.
fn p13_an_spi_that_is_taken_stays_its_owner_s(guest: &Guest) {
    let parties = [
        begin("b", COLLIDES, 0, LIMIT),
        begin("a", COLLIDES, 0, LIMIT),
    ];
    for mut one in parties {
        assert!(one.wait().expect("it ends").success());
    }
    for host in ["a", "b"] {
        let left = guest.output("ip", &["-n", host, "xfrm", "state"]);
        assert_eq!(left.matches("proto esp").count(), 2, "{left}");
        assert!(
            left.contains("reqid 4242"),
            "the one that was faster: {left}"
        );
        let own = if host == "a" { "10.0.0.1" } else { "10.0.0.2" };
        let line = format!("-n {host} xfrm state deleteall dst {own} reqid 4242");
        guest.command("ip", &line.split_whitespace().collect::<Vec<_>>());
        only_foreign(guest, host, 0);
    }
}

/// What it has to say meanwhile finds nobody. The end was asked for all the same, and the ports
/// are free.
fn an_end_is_heard_by_one_that_cannot_say_anything_any_more(guest: &Guest) {
    let parties = [begin("b", LAGS, 0, LIMIT), begin("a", LEAVES, 0, LIMIT)];
    for mut one in parties {
        assert!(one.wait().expect("it ends").success());
    }
    for host in ["a", "b"] {
        let policies = guest.output("ip", &["-n", host, "xfrm", "policy"]);
        assert_eq!(policies.matches("priority").count(), 1, "{policies}");
    }
}

/// It is stopped before one of its changes while the session begins. The other one says for what
/// it has waited, and leaves no SA, nor a port that is open and was protected.
fn i6_a_peer_that_hangs_is_given_up(guest: &Guest) {
    // The side that is asked answers *terms* behind its 0th to 3rd change, and is waited for until
    // its last policy is replaced by the 7th.
    let steps = if guest.is_soak() { 0..8 } else { 4..5 };
    for (stops, step) in ["a", "b"]
        .into_iter()
        .flat_map(|host| steps.clone().map(move |step| (host, step)))
    {
        let deed = |host| if host == stops { STOPS } else { LIVES };
        let patience = |host| if host == stops { LIMIT } else { PATIENCE };
        let serve = begin("b", deed("b"), step, patience("b"));
        let asks = begin("a", deed("a"), step, patience("a"));
        let (mut stopped, mut other) = if stops == "a" {
            (asks, serve)
        } else {
            (serve, asks)
        };
        let began = Instant::now();
        assert!(
            !other.wait().expect("it ends").success(),
            "{stops} before {step}"
        );
        assert!(
            began.elapsed() < LIMIT,
            "it was not waited for by its own patience"
        );
        stopped.kill().expect("it is there");
        let _ = stopped.wait();
        for (host, to) in [("a", PORT_B), ("b", PORT_A)] {
            closed_where_ours(guest, host, to, step);
            only_foreign(guest, host, step);
        }
    }
}

/// Begins a party, and waits until it listens if it is the one that is asked.
fn begin(host: &str, deed: &str, step: usize, patience: Duration) -> Child {
    let role = if host == "a" { "asks" } else { "serves" };
    let party = Command::new("ip")
        .args(["netns", "exec", host])
        .arg(env::current_exe().expect("it runs"))
        .args([PARTY, role, deed, &step.to_string()])
        .arg(patience.as_secs().to_string())
        .spawn()
        .expect("ip starts");
    if host == "b" {
        let at: SocketAddr = SERVER.parse().expect("an address");
        until("it listens", || {
            inside("a", || TcpStream::connect_timeout(&at, LIMIT)).is_ok()
        });
    }
    party
}

/// What this program does as one of the two.
fn party(role: &str, deed: &str, step: usize, patience: Duration) -> ExitCode {
    let (own, host) = if role == "asks" {
        ("host-a", "a")
    } else {
        ("host-b", "b")
    };
    let load = Identity::load(Path::new(own), LoadOptions::default());
    let (identity, _) = load.expect("it was made");
    let ports: PortRange = "4444".parse().expect("a port");
    let folder = format!("left-{host}");
    let mut options = Options::new(Mode::Connection, ports, Path::new(&folder).join("ipsec"));
    options.timeout = patience;
    let is_up = Arc::new(AtomicBool::new(false));
    options.before_change = Some(hook(deed, step, host, &is_up));
    let dies_up = deed == DIES_UP;
    if role == "asks" {
        let peers = [NAME.parse::<Peer>().expect("a name")]
            .into_iter()
            .collect();
        let tls = identity
            .client(&Crypto::auto(), peers)
            .expect("the settings are whole");
        let observer: Observer = Arc::new(|event| println!("a: {event}"));
        let session = match up(SERVER, &tls, &options, &observer) {
            Ok(session) => session,
            Err(error) => {
                println!("a: {error}");
                return ExitCode::FAILURE;
            }
        };
        is_up.store(true, Ordering::SeqCst);
        if dies_up {
            // The other one is up as well, or will be without this one.
            thread::sleep(Duration::from_millis(500));
            std::process::abort();
        }
        session.rekey();
        if deed == LEAVES {
            // What it wants is on its way then.
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
        .expect("the settings are whole");
    let (tell, told) = channel();
    let observer: Observer = Arc::new(move |event| {
        println!("b: {event}");
        let _ = tell.send(event.clone());
    });
    let listener = TcpListener::bind(SERVER).expect("nobody listens there");
    let server = Server::start(listener, tls, options, observer).expect("it starts");
    loop {
        match told.recv().expect("the server is there") {
            Event::Up(_) if dies_up => std::process::abort(),
            Event::Up(_) => {
                is_up.store(true, Ordering::SeqCst);
                server.rekey();
            }
            Event::Over { why, .. } => {
                server.stop();
                // The other one asks for the end where all goes well.
                return match why {
                    Some(why) if !why.contains("ended here") => ExitCode::FAILURE,
                    _ => ExitCode::SUCCESS,
                };
            }
            _ => {}
        }
    }
}

/// What is done before a change of the kernel's tables.
fn hook(deed: &str, step: usize, host: &str, is_up: &Arc<AtomicBool>) -> Hook {
    let (deed, is_up) = (deed.to_owned(), Arc::clone(is_up));
    let to: SocketAddr = if host == "a" { PORT_B } else { PORT_A }
        .parse()
        .expect("an address");
    let done = AtomicUsize::new(0);
    let collided = AtomicBool::new(false);
    let lagged = AtomicBool::new(false);
    Arc::new(move |change| {
        let now = done.fetch_add(1, Ordering::SeqCst) == step;
        if now && deed == DIES {
            println!("dies before {change:?}");
            // As by SIGKILL: nothing is unwound or dropped.
            std::process::abort();
        }
        if now && deed == STOPS {
            println!("stops before {change:?}");
            let own = std::process::id().to_string();
            let _ = Command::new("kill").args(["-STOP", &own]).status();
            // The signal may reach another thread first: this one must not go on meanwhile, and is
            // killed here.
            loop {
                thread::park();
            }
        }
        if deed == COLLIDES
            && let Step::Add(Object::Association(one)) = change
            && one.direction == Direction::In
            && !collided.swap(true, Ordering::SeqCst)
        {
            take(one);
        }
        if deed == LAGS && is_up.load(Ordering::SeqCst) && !lagged.swap(true, Ordering::SeqCst) {
            thread::sleep(LAG);
        }
        if deed == TRIES && !is_up.load(Ordering::SeqCst) {
            // The other host may have shut its ports already: what leaves this one is captured.
            let _ = TcpStream::connect_timeout(&to, Duration::from_millis(30));
        }
    })
}

/// An SA that is not ours, under the number that ours was to have.
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

/// Waits until both directions have new keys, or it is over.
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

/// An SA and a policy that are not ours.
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
