//! Units of dist/systemd work under Debian's systemd; the tunnel runs without root.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;

use dunlin_kernel_tests::sessions::inside;
use dunlin_kernel_tests::systemd::{Manager, write};
use dunlin_kernel_tests::{Guest, Needs, Under, run};
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
use serde_json::Value;

// Tests with the same number of CPUs share a boot of the machine. No other test has three CPUs, so
// this test has a boot to itself, which it needs because its packages replace commands of busybox.
const NEEDS: Needs = Needs {
    cpus: 3,
    packages: &["systemd", "util-linux", "nftables", "iproute2"],
    dunlin: true,
    limit_seconds: 600,
    under: Under::Newest,
    ..Needs::NOTHING
};

const TUNNEL: &str = "dunlin-tunnel.service";
/// The namespace of libvirt's peer.
const PEER: &str = "peer";
const UNITS: [&str; 3] = [
    "dunlin-redirect.service",
    "dunlin-redirect-watch.service",
    TUNNEL,
];

/// The ID of the hypervisors' user, and of the group that may connect to their sockets.
const HYPERVISOR: u32 = 4711;

/// The drop-in of docs/tunnel/operation.md for sockets of a group. With `--confine yes` the tunnel
/// starts only if the unit permits all of its confinement.
const GROUP: &str = "[Service]\nSupplementaryGroups=hypervisor\nExecStart=\n\
                     ExecStart=dunlin tunnel run --confine yes --config /etc/dunlin/tunnel.toml\n";

const CAP_NET_ADMIN: u64 = 1 << 12;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        let target = TcpListener::bind("127.0.0.1:7001").expect("the loopback is up");
        let manager = Manager::start(guest, || configure(guest));
        let hypervisor = hypervisor_socket();
        let _far = far(guest);

        manager.systemctl(&["start", "dunlin-tunnel-ram.socket", TUNNEL]);
        the_tunnel_is_no_root(&manager);
        // The service does not change the owner of a socket that a socket unit has created.
        assert_eq!(owner("/run/dunlin/ram.sock"), [HYPERVISOR; 2]);
        let [_, group] = owner("/run/dunlin/group.sock");
        assert_eq!(group, HYPERVISOR, "the tunnel's socket has another group");
        let passes = || {
            carries("/run/dunlin/ram.sock", || {
                target.accept().expect("the tunnel connects").0
            });
            carries("/run/back.sock", || {
                hypervisor.accept().expect("the tunnel connects").0
            });
        };
        passes();

        // Renew the certificate. A reload changes nothing until the service may read the new key.
        // After that, a reload uses the new certificate.
        issue(guest);
        manager.systemctl(&["reload", TUNNEL]);
        manager.wait_for("the refusal", || status(&manager).contains("not reloaded"));
        passes();
        readable(guest);
        manager.systemctl(&["reload", TUNNEL]);
        manager.wait_for("the new certificate", || {
            !status(&manager).contains("not reloaded")
        });
        assert_eq!(manager.show(TUNNEL, "ActiveState"), "active");
        passes();

        an_upgrade_leaves_the_tunnel_alone(&manager);
        passes();

        the_rules_outlive_their_units(guest, &manager);

        manager.systemctl(&["stop", TUNNEL]);
        assert_eq!(manager.show(TUNNEL, "Result"), "success");
        assert!(Path::new("/run/dunlin/ram.sock").exists());
        assert!(!Path::new("/run/dunlin/group.sock").exists());
        // The socket unit starts the tunnel again.
        passes();
        assert_eq!(manager.show(TUNNEL, "NRestarts"), "0");

        libvirt_is_enabled_with_one_command(guest, &manager);
        libvirt_is_enabled_over_unix_sockets(guest, &manager);
    })
}

/// Creates the users, identities and configurations that the two tunnels need, with the commands of
/// docs/tunnel/operation.md.
fn configure(guest: &Guest) {
    let groups = fs::read_to_string("/etc/group").expect("systemd-sysusers wrote it");
    fs::write(
        "/etc/group",
        format!("{groups}hypervisor:x:{HYPERVISOR}:\n"),
    )
    .expect("it exists");
    let users = fs::read_to_string("/etc/passwd").expect("systemd-sysusers wrote it");
    let line = format!("hypervisor:x:{HYPERVISOR}:{HYPERVISOR}::/:/usr/sbin/nologin\n");
    fs::write("/etc/passwd", users + &line).expect("it exists");
    let socket = "/etc/systemd/system/dunlin-tunnel-ram.socket.d/test.conf";
    write(
        socket,
        "[Socket]\nSocketUser=hypervisor\nSocketGroup=hypervisor\n",
    );
    write(
        "/etc/systemd/system/dunlin-tunnel.service.d/test.conf",
        GROUP,
    );

    guest.command("dunlin", &["pki", "init", "ca"]);
    guest.command(
        "dunlin",
        &["pki", "issue", "--ca", "ca", "--name", "b.test", "b"],
    );
    issue(guest);
    readable(guest);
    let config = "listen = \"127.0.0.1:18300\"\nidentity = \"/etc/dunlin\"\n\
                  [route.ram]\nlisten = \"systemd:ram\"\n\
                  to = \"127.0.0.1:18310\"\npeers = [\"b.test\"]\n\
                  [route.group]\nlisten = \"unix:/run/dunlin/group.sock\"\nsocket_mode = \"0660\"\n\
                  socket_group = \"hypervisor\"\nto = \"127.0.0.1:18310\"\npeers = [\"b.test\"]\n\
                  [route.back]\ntarget = \"unix:/run/hypervisor/in.sock\"\nallow = [\"b.test\"]\n\
                  [redirect.vm]\nports = \"49152-49215\"\nusers = [\"root\"]\n\
                  peers = { \"192.0.2.2\" = \"b.test\" }\n";
    write("/etc/dunlin/tunnel.toml", config);
    let far = "listen = \"127.0.0.1:18310\"\nidentity = \"b\"\n\
               [route.ram]\ntarget = \"tcp:127.0.0.1:7001\"\nallow = [\"a.test\"]\n\
               [route.back]\nlisten = \"unix:/run/back.sock\"\nto = \"127.0.0.1:18300\"\n\
               peers = [\"a.test\"]\n";
    write("far.toml", far);
}

/// Issues a certificate for the tunnel. Only root may read the new key.
fn issue(guest: &Guest) {
    if Path::new("a").exists() {
        fs::remove_dir_all("a").expect("it exists");
    }
    guest.command(
        "dunlin",
        &["pki", "issue", "--ca", "ca", "--name", "a.test", "a"],
    );
    for file in fs::read_dir("a").expect("it exists") {
        let file = file.expect("it exists").path();
        guest.command("cp", &["-p", &file.display().to_string(), "/etc/dunlin/"]);
    }
    guest.command("chown", &["-R", "root:root", "/etc/dunlin"]);
}

/// Runs the commands of docs/tunnel/operation.md that let the service read its identity.
fn readable(guest: &Guest) {
    guest.command("chgrp", &["-R", "dunlin", "/etc/dunlin"]);
    guest.command("chmod", &["-R", "g+rX", "/etc/dunlin"]);
}

/// A socket that a hypervisor has bound, in a directory that only its user and group may enter.
fn hypervisor_socket() -> UnixListener {
    fs::create_dir("/run/hypervisor").expect("/run is new");
    let listener = UnixListener::bind("/run/hypervisor/in.sock").expect("/run is writable");
    for (path, mode) in [
        ("/run/hypervisor", 0o750),
        ("/run/hypervisor/in.sock", 0o775),
    ] {
        std::os::unix::fs::chown(path, Some(HYPERVISOR), Some(HYPERVISOR)).expect("it exists");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        fs::set_permissions(path, mode).expect("it exists");
    }
    listener
}

/// The tunnel of the other host.
struct Far(Child);

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn far(guest: &Guest) -> Far {
    let control = guest.folder().join("control");
    let mut far = Command::new("dunlin");
    far.args(["tunnel", "run", "--config", "far.toml", "--control"]);
    Far(far.arg(control).spawn().expect("dunlin is in the path"))
}

fn the_tunnel_is_no_root(manager: &Manager) {
    assert_eq!(manager.show(TUNNEL, "ActiveState"), "active");
    assert_eq!(
        manager.show(TUNNEL, "MemoryMax"),
        (34_u64 << 30).to_string()
    );
    let process = manager.main_process(TUNNEL);
    let user: u32 = process.field("Uid")[0].parse().expect("a number");
    let users = fs::read_to_string("/etc/passwd").expect("systemd-sysusers wrote it");
    let line = users
        .lines()
        .find(|line| line.starts_with("dunlin-tunnel:"));
    let number = line.and_then(|line| line.split(':').nth(2));
    assert_eq!(number, Some(&*user.to_string()), "{process:?}");
    assert_ne!(user, 0);
    assert!(process.has_at_most(0), "{process:?}");
    assert_eq!(process.field("NoNewPrivs"), ["1"]);
    assert_eq!(process.field("Seccomp"), ["2"]);
    let mut groups = vec![user.to_string(), owner("/etc/dunlin")[1].to_string()];
    groups.push(HYPERVISOR.to_string());
    // The service is also in the group dunlin-status, which can read what processes report.
    groups.push(owner("/run/dunlin/status")[1].to_string());
    for group in process.field("Groups") {
        assert!(groups.iter().any(|one| one == group), "{process:?}");
    }
}

/// The package's script restarts nothing. It prints how to restart the services that still run the
/// earlier version.
fn an_upgrade_leaves_the_tunnel_alone(manager: &Manager) {
    let process = manager.show(TUNNEL, "MainPID");
    let said = manager.upgrade("0.1~0");
    assert!(said.contains("systemctl restart dunlin-tunnel"), "{said}");
    assert_eq!(manager.show(TUNNEL, "MainPID"), process);
}

/// Runs `dunlin init` and then `dunlin libvirt enable` on a host that has only the package and a
/// qemu.conf. A connection to the toolstack's ports at the peer then goes through the tunnel, which
/// runs without root and reads the certificates that `enable` has installed. `disable` leaves only
/// these certificates.
fn libvirt_is_enabled_with_one_command(guest: &Guest, manager: &Manager) {
    forget(guest, manager);
    connect(guest);
    let hosts = ["init", "a.test", "b.test", "--libvirt", "--out", "made"];
    guest.command("dunlin", &hosts);
    write("/etc/libvirt/qemu.conf", "user = \"hypervisor\"\n");
    let before = files(guest);
    let _peer = peer(
        guest,
        "[redirect.libvirt]\nports = \"49152-49215\"\nusers = [\"root\"]\n\
         peers = { \"192.0.2.1\" = \"a.test\" }\n",
    );

    let own = guest.folder().join("made/a.test").display().to_string();
    let steps = enable(manager, &["--install-identity", &own]);
    // There is one "advice", because the peer has answered. Without an answer there would be two.
    assert_eq!(
        steps,
        [
            "installed",
            "plan",
            "written",
            "tried",
            "reserved",
            "rules",
            "units",
            "advice"
        ]
    );
    for unit in UNITS {
        assert_eq!(manager.show(unit, "ActiveState"), "active", "{unit}");
        assert_eq!(manager.show(unit, "UnitFileState"), "enabled", "{unit}");
    }
    the_tunnel_is_no_root(manager);
    let table = guest.output("nft", &["list", "table", "inet", "dunlin"]);
    assert!(table.contains("49152-49215"), "{table}");
    let target = inside(PEER, || TcpListener::bind("127.0.0.1:49152"));
    let target = target.expect("the loopback is up");
    let near = TcpStream::connect("192.0.2.2:49152").expect("root is a user of the redirect");
    let accept = || target.accept().expect("the peer's tunnel connects").0;
    both_ways(&near, |near| near.shutdown(Shutdown::Write), accept);

    disable(manager);
    assert_eq!(guest.output("nft", &["list", "ruleset"]), "");
    let reserved = fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports");
    assert_eq!(reserved.expect("it exists").trim(), "");
    let left: Vec<_> = files(guest).difference(&before).cloned().collect();
    assert_eq!(
        left,
        ["ca-cert.pem", "cert.pem", "key.pem"].map(|file| format!("/etc/dunlin/{file}"))
    );
}

/// Runs `dunlin libvirt enable --sockets` on the same host. For a VM that leaves, `dunlin tunnel
/// open` creates a socket, as in `dunlin libvirt migrate`, and QEMU's user connects to it. For a VM
/// that arrives, QEMU's user creates a socket, and the tunnel connects to it. The directory of
/// these sockets also exists after a boot. `disable` removes everything that `enable` has written.
fn libvirt_is_enabled_over_unix_sockets(guest: &Guest, manager: &Manager) {
    const DIRECTORY: &str = "/run/dunlin/vm";
    let before = files(guest);
    fs::create_dir("/run/peer").expect("/run is writable");
    let _peer = peer(
        guest,
        "[route.\"libvirt-b.test\"]\ntarget = \"unix:/run/peer/{vm}\"\nallow = [\"a.test\"]\n\
         [route.\"libvirt-a.test\"]\nto = \"192.0.2.1:18300\"\npeers = [\"a.test\"]\n",
    );
    let steps = enable(manager, &["--sockets"]);
    // Check only the first three steps. The fourth tests the connection to the peer, and can time
    // out on a busy machine. The rest of this function passes bytes over that connection.
    assert_eq!(steps[..3], ["written", "directory", "unit"]);
    let [rules, watch, tunnel] = UNITS;
    for (unit, active, enabled) in [
        (rules, "inactive", "disabled"),
        (watch, "inactive", "disabled"),
        (tunnel, "active", "enabled"),
    ] {
        assert_eq!(manager.show(unit, "ActiveState"), active, "{unit}");
        assert_eq!(manager.show(unit, "UnitFileState"), enabled, "{unit}");
    }
    let is_right = || {
        let found = fs::metadata(DIRECTORY).unwrap_or_else(|error| panic!("{DIRECTORY}: {error}"));
        // The key belongs to the group of the services, so get the ID of the group from the key.
        let services = fs::metadata("/etc/dunlin/key.pem").expect("it is installed");
        assert_eq!(
            (found.uid(), found.gid(), found.mode() & 0o7777),
            (HYPERVISOR, services.gid(), 0o2770)
        );
    };
    is_right();
    // Imitate a boot: empty /run/dunlin, run systemd-tmpfiles with the files of all packages, and
    // start the service.
    manager.systemctl(&["stop", tunnel]);
    fs::remove_dir_all("/run/dunlin").expect("it exists");
    let boot = ["--create", "--remove", "--boot", "--prefix=/run/dunlin"];
    let _ = manager.run("systemd-tmpfiles", &boot);
    is_right();
    manager.systemctl(&["start", tunnel]);
    the_tunnel_is_no_root(manager);

    let target = UnixListener::bind("/run/peer/web.ram").expect("the directory is new");
    let leaving = format!("{DIRECTORY}/web.ram");
    let listen = format!("unix:{leaving}");
    let open = ["tunnel", "open", "libvirt-b.test", "--param", "vm=web.ram"];
    let config = ["--config", "/etc/dunlin/tunnel.toml", "--listen", &listen];
    let _ = manager.run("dunlin", &[&open[..], &config].concat());
    // libvirtd can connect to every socket. If QEMU itself connects, as for disks and with
    // --parallel, libvirtd makes QEMU's user the owner of the socket.
    std::os::unix::fs::chown(&leaving, Some(HYPERVISOR), None).expect("it exists");
    as_hypervisor(|| {
        carries(&leaving, || {
            target.accept().expect("the peer's tunnel connects").0
        });
    });

    let arriving = format!("{DIRECTORY}/db.ram");
    let qemu = as_hypervisor(|| UnixListener::bind(&arriving)).expect("the directory is its own");
    // The socket gets its group from the directory. QEMU under libvirt has the umask 002, so the
    // mode is 0775.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o775);
    fs::set_permissions(&arriving, mode).expect("it exists");
    let control = guest.folder().join("peer").display().to_string();
    let open = ["tunnel", "open", "libvirt-a.test", "--param", "vm=db.ram"];
    let more = ["--control", &control, "--listen", "unix:/run/peer/db.ram"];
    guest.command("dunlin", &[&open[..], &more].concat());
    carries("/run/peer/db.ram", || {
        qemu.accept().expect("the tunnel connects").0
    });
    fs::remove_file(arriving).expect("it exists");

    disable(manager);
    assert!(!Path::new(DIRECTORY).exists());
    assert_eq!(files(guest), before);
}

/// Runs `work` in a new thread, which accesses files with the permissions of QEMU's user
/// (setfsuid(2)).
fn as_hypervisor<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let limited = || {
        let _ = setfsgid(Gid::from_raw(HYPERVISOR));
        let _ = setfsuid(Uid::from_raw(HYPERVISOR));
        let key = fs::read("/etc/dunlin/key.pem").map_err(|error| error.kind());
        assert_eq!(key, Err(ErrorKind::PermissionDenied));
        work()
    };
    thread::scope(|scope| scope.spawn(limited).join()).expect("the thread does not panic")
}

/// Runs `dunlin libvirt enable` for the peer, and returns its steps.
fn enable(manager: &Manager, more: &[&str]) -> Vec<String> {
    let words = ["libvirt", "enable", "--json", "--peer", "192.0.2.2=b.test"];
    let said = manager.run("dunlin", &[&words[..], more].concat());
    println!("{said}");
    let lines = said.lines();
    let lines = lines.map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let steps = lines.filter_map(|line| line["step"].as_str().map(str::to_owned));
    steps.collect()
}

/// Runs `dunlin libvirt disable`, which leaves no unit enabled.
fn disable(manager: &Manager) {
    println!("{}", manager.run("dunlin", &["libvirt", "disable"]));
    for unit in UNITS {
        assert_eq!(manager.show(unit, "ActiveState"), "inactive", "{unit}");
        assert_eq!(manager.show(unit, "UnitFileState"), "disabled", "{unit}");
    }
}

/// Removes what the earlier parts of the test have configured.
fn forget(guest: &Guest, manager: &Manager) {
    manager.systemctl(&["stop", "dunlin-tunnel-ram.socket", TUNNEL]);
    guest.command("dunlin", &["redirect", "remove"]);
    let left = "rm -r /etc/dunlin/* /etc/systemd/system/dunlin-tunnel.service.d";
    guest.command("sh", &["-c", left]);
    manager.systemctl(&["daemon-reload"]);
}

/// Returns the files that outlive a boot, in the directories that `enable` changes.
fn files(guest: &Guest) -> BTreeSet<String> {
    let found = guest.output("find", &["/etc", "/var/lib/dunlin", "!", "-type", "d"]);
    found.lines().map(str::to_owned).collect()
}

/// Creates the peer's namespace, and a link to it.
fn connect(guest: &Guest) {
    let ip = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        guest.command("ip", &words);
    };
    ip(&format!("netns add {PEER}"));
    ip(&format!(
        "link add wire type veth peer name wire netns {PEER}"
    ));
    ip("addr add 192.0.2.1/24 dev wire");
    ip("link set wire up");
    for line in [
        "addr add 192.0.2.2/24 dev wire",
        "link set wire up",
        "link set lo up",
    ] {
        ip(&format!("-n {PEER} {line}"));
    }
}

/// Starts the peer's tunnel with these routes.
fn peer(guest: &Guest, routes: &str) -> Far {
    let first = "listen = \"[::]:18300\"\nidentity = \"made/b.test\"\n";
    write("peer.toml", &format!("{first}{routes}"));
    let mut peer = Command::new("ip");
    peer.args(["netns", "exec", PEER, "dunlin", "tunnel", "run"]);
    peer.args(["--config", "peer.toml", "--control"]);
    peer.arg(guest.folder().join("peer"));
    peer.stdout(Stdio::piped());
    let mut peer = Far(peer.spawn().expect("the package iproute2 has ip"));
    let mut first = String::new();
    let output = peer.0.stdout.as_mut().expect("the stream is piped");
    let read = BufReader::new(output).read_line(&mut first);
    read.expect("the tunnel reports its address");
    peer
}

fn the_rules_outlive_their_units(guest: &Guest, manager: &Manager) {
    const RULES: &str = "dunlin-redirect.service";
    const WATCH: &str = "dunlin-redirect-watch.service";
    manager.systemctl(&["start", RULES, WATCH]);
    let table = || guest.output("nft", &["list", "table", "inet", "dunlin"]);
    assert!(table().contains("49152-49215"));
    manager.wait_for("the result of the check", || {
        fs::read_to_string("/run/dunlin-redirect/state.json")
            .is_ok_and(|state| state.contains("\"applied\""))
    });
    let process = manager.main_process(WATCH);
    assert_eq!(process.field("Uid"), ["0"; 4]);
    assert!(process.has_at_most(CAP_NET_ADMIN), "{process:?}");
    let config = fs::read_to_string("/etc/dunlin/tunnel.toml").expect("it exists");
    write(
        "/etc/dunlin/tunnel.toml",
        &config.replace("49152-49215", "49152-49216"),
    );
    manager.systemctl(&["reload", RULES]);
    assert!(table().contains("49152-49216"));
    manager.systemctl(&["stop", WATCH, RULES]);
    assert!(table().contains("49152-49216"));
}

/// Passes bytes in both directions, through a socket of the tunnel.
fn carries<S: Read + Write>(entrance: &str, accept: impl FnOnce() -> S) {
    let near = UnixStream::connect(entrance).expect("the tunnel listens");
    both_ways(&near, |near| near.shutdown(Shutdown::Write), accept);
}

fn both_ways<'a, N, S: Read + Write>(
    near: &'a N,
    end: impl FnOnce(&N) -> io::Result<()>,
    accept: impl FnOnce() -> S,
) where
    &'a N: Read + Write,
{
    let mut stream = near;
    stream.write_all(b"there").expect("the tunnel reads");
    end(near).expect("it is connected");
    let mut far = accept();
    let mut came = String::new();
    far.read_to_string(&mut came)
        .expect("the tunnel carries it");
    assert_eq!(came, "there");
    far.write_all(b"back").expect("the tunnel reads");
    drop(far);
    let mut came = String::new();
    stream
        .read_to_string(&mut came)
        .expect("the tunnel carries it");
    assert_eq!(came, "back");
}

fn status(manager: &Manager) -> String {
    manager.show(TUNNEL, "StatusText")
}

fn owner(path: &str) -> [u32; 2] {
    let found = fs::metadata(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    [found.uid(), found.gid()]
}
