//! Units of dist/systemd work under Debian's systemd; the tunnel runs without root.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode};

use dunlin_kernel_tests::systemd::{Manager, write};
use dunlin_kernel_tests::{Guest, Needs, Under, run};

// No other test has three processors, and so none shares the boot: the packages replace commands of
// busybox.
const NEEDS: Needs = Needs {
    cpus: 3,
    packages: &["systemd", "util-linux", "nftables"],
    dunlin: true,
    limit_seconds: 180,
    under: Under::Newest,
    ..Needs::NOTHING
};

const TUNNEL: &str = "dunlin-tunnel.service";

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
        // The service leaves the sockets of socket units to their owner.
        assert_eq!(owner("/run/dunlin/ram.sock"), [HYPERVISOR; 2]);
        let [_, group] = owner("/run/dunlin/group.sock");
        assert_eq!(
            group, HYPERVISOR,
            "the tunnel gives its socket to its group"
        );
        let passes = || {
            carries("/run/dunlin/ram.sock", || {
                target.accept().expect("the tunnel connects").0
            });
            carries("/run/back.sock", || {
                hypervisor.accept().expect("the tunnel connects").0
            });
        };
        passes();

        // A reload reads the renewed certificate, and an unreadable one changes nothing.
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

        the_rules_outlive_their_units(guest, &manager);

        manager.systemctl(&["stop", TUNNEL]);
        assert_eq!(manager.show(TUNNEL, "Result"), "success");
        assert!(Path::new("/run/dunlin/ram.sock").exists());
        assert!(!Path::new("/run/dunlin/group.sock").exists());
        // The socket unit starts the tunnel again.
        passes();
        assert_eq!(manager.show(TUNNEL, "NRestarts"), "0");
    })
}

/// Writes what the two tunnels need, by the commands of docs/tunnel/operation.md.
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
    fs::create_dir("/etc/dunlin").expect("/etc is new");
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
    // The members of dunlin-status may read what processes report.
    groups.push(owner("/run/dunlin/status")[1].to_string());
    for group in process.field("Groups") {
        assert!(groups.iter().any(|one| one == group), "{process:?}");
    }
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

/// Passes bytes in both directions.
fn carries<S: Read + Write>(entrance: &str, accept: impl FnOnce() -> S) {
    let mut near = UnixStream::connect(entrance).expect("the tunnel listens");
    near.write_all(b"there").expect("the tunnel reads");
    near.shutdown(Shutdown::Write).expect("it is connected");
    let mut far = accept();
    let mut came = String::new();
    far.read_to_string(&mut came)
        .expect("the tunnel carries it");
    assert_eq!(came, "there");
    far.write_all(b"back").expect("the tunnel reads");
    drop(far);
    let mut came = String::new();
    near.read_to_string(&mut came)
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
