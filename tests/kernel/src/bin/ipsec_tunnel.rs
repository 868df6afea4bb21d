//! QEMU migrates through a tunnel with lanes over IPsec while a lane is killed and keys change.
//! All pages are compared, and no data is sent in the clear. Another test passes bytes in both
//! directions.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use dunlin_kernel_tests::ipsec::tap::Tap;
use dunlin_kernel_tests::sessions::{Process, connect, credentials, empty, inside, netns, until};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use dunlin_rig::debian::Qemu;
use dunlin_rig::guest::{self, Content, Workload};
use dunlin_rig::machine::{Accelerator, Machine, Migration, Setup, begin, finish};
use dunlin_test_base::pattern;
use serde_json::json;

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "qemu-system-x86"],
    dunlin: true,
    limit_seconds: 300,
    under: Under::Newest,
    ..Needs::NOTHING
};

const WORKLOAD: Workload = Workload {
    memory_mib: 64,
    pages: 6_000,
    hot: 400,
    rate: Some(200),
    content: Content::Random,
    seed: 0x7a,
};
/// A bandwidth in bytes per second. It is so low that the migration lasts until the test has killed
/// a lane and keys have been renewed.
const SLOW: u64 = 2 << 20;
const LANES: usize = 4;
/// The number of bytes that are sent and returned.
const BYTES: usize = 4 << 20;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        for host in ["a", "b"] {
            guest.command("ip", &["-n", host, "link", "set", "lo", "up"]);
            // The ports of a lost session stay blocked until TCP gives up the unsent data of its
            // lanes. Make TCP do so soon.
            let sysctl = ["sysctl", "-q", "-w", "net.ipv4.tcp_orphan_retries=1"];
            guest.command("ip", &netns(host, &sysctl));
        }
        credentials(guest);
        let tap = Tap::begin();
        let far = tunnel("b", "far", &far_config(guest, true, 18_300));
        let unprepared = tunnel("b", "unprepared", &far_config(guest, false, 18_302));
        let near = tunnel("a", "near", &near_config(guest));
        println!("a_peer_without_ipsec_refuses_the_channel");
        a_peer_without_ipsec_refuses_the_channel();
        unprepared.end(guest);
        println!("bytes_pass_in_both_directions");
        bytes_pass_in_both_directions();
        println!("i6_qemu_migrates_while_a_lane_is_killed");
        i6_qemu_migrates_while_a_lane_is_killed(guest);
        near.end(guest);
        far.end(guest);
        until("the ports of lost sessions are free", || {
            for (host, folder) in [("a", "state-near"), ("b", "state-far")] {
                let clean = ["dunlin", "ipsec", "clean", "--state-dir", folder];
                guest.command("ip", &netns(host, &clean));
            }
            empty(guest, "a") && empty(guest, "b")
        });
        let left = tap.end();
        // Only the tunnels' own connections were not sealed, and they use TLS.
        assert!(left.is_sealed(&(24_576..=28_671)), "{left:?}");
        for (from, to) in left.clear.keys() {
            let is_tls = [18_300, 18_302]
                .iter()
                .any(|port| [from, to].contains(&port));
            assert!(is_tls, "{from} to {to}: {left:?}");
        }
        let sealed: u64 = left.sealed.values().sum();
        let clear: u64 = left.clear.values().sum();
        let least = (WORKLOAD.pages * 4096 + 2 * BYTES as u64) / 1500;
        assert!(sealed > least, "too few frames in ESP: {left:?}");
        assert!(
            clear < least / 4,
            "more frames in the clear than control lanes send: {left:?}"
        );
        // Each key generation has one SA for each CPU and a fallback SA, and there were at least
        // two generations.
        assert!(
            left.sealed.len() >= 2 * LANES,
            "too few SAs for new keys: {left:?}"
        );
    })
}

/// If the peer does not accept lanes over IPsec, the channel is refused and the log has the reason.
fn a_peer_without_ipsec_refuses_the_channel() {
    let input = File::open("/dev/null").expect("the device exists");
    let done = stdio("unprepared", input).output().expect("ip starts");
    assert_eq!(done.status.code(), Some(1));
    let said = fs::read_to_string("near.log").expect("the log exists");
    assert!(said.contains("(security-not-agreed; "), "{said}");
}

/// Over IPsec, each side of a trunk opens the lanes for the data that it sends.
fn bytes_pass_in_both_directions() {
    fs::write("content", pattern(BYTES, 7)).expect("the folder is writable");
    let input = File::open("content").expect("the file exists");
    let done = stdio("echo", input).output().expect("ip starts");
    let log = || fs::read_to_string("near.log").unwrap_or_default();
    assert!(done.status.success(), "{done:?}\n{}", log());
    assert!(
        done.stdout == pattern(BYTES, 7),
        "the received data differs"
    );
    fs::remove_file("content").expect("the file is not in use");
}

fn stdio(route: &str, input: File) -> Command {
    let mut command = Command::new("dunlin");
    command
        .args(["tunnel", "stdio", route, "--control", "run-near"])
        .stdin(Stdio::from(input))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn i6_qemu_migrates_while_a_lane_is_killed(guest: &Guest) {
    let mut setup = Setup::new(
        &Qemu::installed(),
        guest::Guest::Bare,
        WORKLOAD,
        Accelerator::Tcg,
    );
    setup.options = ["-cpu", "max"].map(str::to_owned).into();
    let mut source = inside("a", || Machine::start(&setup, None)).expect("QEMU starts");
    let mut destination =
        inside("b", || Machine::start_incoming(&setup, None)).expect("QEMU starts");
    source.wait_ready().expect("the guest fills its pages");
    let unix = |name| format!("unix:{}", path_of(guest, name).display());
    let mut migration = Migration::through(&unix("ram.sock"), &unix("in.sock"));
    migration.multifd = Some(2);
    migration.bandwidth = Some(SLOW);
    begin(&mut source, &mut destination, &migration).expect("the migration begins");
    until("all lanes are open", || lanes(guest).len() == LANES);
    let killed = lanes(guest).remove(0);
    let filter = ["sport", "=", &format!(":{killed}")];
    let kill = [&["ss", "-K", "-H", "-n", "-t"][..], &filter].concat();
    guest.command("ip", &netns("a", &kill));
    until("the lane is replaced", || {
        let lanes = lanes(guest);
        lanes.len() == LANES && !lanes.contains(&killed)
    });
    let said = fs::read_to_string("near.log").expect("the log exists");
    assert!(
        said.contains(" lane="),
        "the log has no line about the lost lane: {said}"
    );
    let epochs = keys(guest);
    until("new keys", || keys(guest).is_disjoint(&epochs));
    // Without SAs nothing can be sent. The sessions of both directions end, and new sessions start.
    let before = lanes(guest);
    guest.command("ip", &["-n", "a", "xfrm", "state", "flush"]);
    until("lanes of another session are open", || {
        let lanes = lanes(guest);
        lanes.len() == LANES && lanes.iter().all(|port| !before.contains(port))
    });
    source
        .qmp()
        .execute("migrate-set-parameters", json!({"max-bandwidth": 0}))
        .expect("QEMU accepts parameters during the migration");
    finish(&mut source, "source").expect("the migration completes");
    finish(&mut destination, "destination").expect("the migration completes");
    let difference = source.first_difference(&mut destination);
    assert_eq!(difference.expect("both are paused"), None);
    destination.resume().expect("the guest continues");
    let pages = destination.check_pages().expect("every page is right");
    assert_eq!(pages, WORKLOAD.pages);
}

/// Returns the source ports of the lanes that host a has opened.
fn lanes(guest: &Guest) -> Vec<u16> {
    let list = netns("a", &["ss", "-H", "-n", "-t", "state", "established"]);
    let lines = guest.output("ip", &list);
    let port = |line: &str| {
        let mut ends = line.split_whitespace().skip(2);
        let port = |end: &str| end.rsplit(':').next()?.parse::<u16>().ok();
        let (own, peer) = (port(ends.next()?)?, port(ends.next()?)?);
        (peer == 18_300 && (24_576..=28_671).contains(&own)).then_some(own)
    };
    lines.lines().filter_map(port).collect()
}

/// Returns the SPIs of host a's outbound SAs.
fn keys(guest: &Guest) -> std::collections::BTreeSet<String> {
    let states = guest.output(
        "ip",
        &["-n", "a", "-o", "xfrm", "state", "list", "src", "10.0.0.1"],
    );
    let spi = |line: &str| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "spi");
        words.nth(1).map(str::to_owned)
    };
    states.lines().filter_map(spi).collect()
}

fn path_of(guest: &Guest, name: &str) -> PathBuf {
    guest.folder().join(name)
}

fn near_config(guest: &Guest) -> String {
    format!(
        r#"
listen = "10.0.0.1:18300"
identity = "host-a"

[limits]
vanished = "60s"

[ipsec]
cpus = "0-3"
rekey_after = "5s"

[route.ram]
listen = "unix:{ram}"
to = "10.0.0.2:18300"
peers = ["host-b.example"]
lanes = {LANES}
security = "ipsec"

[route.echo]
to = "10.0.0.2:18300"
peers = ["host-b.example"]
security = "ipsec"

[route.unprepared]
to = "10.0.0.2:18302"
peers = ["host-b.example"]
security = "ipsec"
"#,
        ram = path_of(guest, "ram.sock").display()
    )
}

fn far_config(guest: &Guest, is_prepared: bool, port: u16) -> String {
    format!(
        r#"
listen = "10.0.0.2:{port}"
identity = "host-b"

[limits]
vanished = "60s"
{ipsec}
[route.ram]
target = "unix:{incoming}"
allow = ["host-a.example"]

[route.echo]
exec = ["/rig/bin/cat"]
allow = ["host-a.example"]

[route.unprepared]
exec = ["/rig/bin/cat"]
allow = ["host-a.example"]
"#,
        ipsec = if is_prepared { "\n[ipsec]\n" } else { "" },
        incoming = path_of(guest, "in.sock").display()
    )
}

/// Starts a tunnel on a host. The tunnel's log goes to a file.
fn tunnel(host: &str, name: &str, config: &str) -> Process {
    let file = format!("{name}.toml");
    fs::write(&file, config).expect("the folder is writable");
    let path = format!("{name}.log");
    let log = File::create(Path::new(&path)).expect("the folder is writable");
    let same = log.try_clone().expect("a descriptor");
    let (control, state) = (format!("run-{name}"), format!("state-{name}"));
    let run = ["dunlin", "tunnel", "run", "--config", &file];
    let more = ["--control", &control, "--state-dir", &state];
    let child = Command::new("ip")
        .args(netns(host, &[&run[..], &more].concat()))
        .stdout(same)
        .stderr(log)
        .spawn()
        .expect("ip starts");
    until("the tunnel runs", || {
        let said = fs::read_to_string(&path).unwrap_or_default();
        said.contains("listening on")
    });
    Process(child)
}
