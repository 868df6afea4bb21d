//! `dunlin libvirt enable` and `disable` on two hosts without systemd: what they write, what they
//! test, what they refuse, and that `disable` or a failed `enable` leaves nothing. Also the output
//! of `migrate`, with a program in place of virsh. The libvirt rig tests migrations.
#![allow(clippy::unwrap_used)]

#[path = "support/etc.rs"]
mod etc;
mod support;
#[path = "support/terminal.rs"]
mod terminal;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::{Duration, Instant};

use dunlin_rig::hosts::Family;
use etc::{GROUP, RESERVED, Scene};
use serde_json::json;
use support::process::exit_code;
use support::{Done, finish, words};
use terminal::Terminal;
use tunnel::Tunnel;

#[test]
fn two_hosts_are_enabled_with_one_command_each_and_disabled_without_a_trace() {
    let Some(scene) = Scene::new() else { return };
    let mut reserve = scene.a.command("sh");
    let echo = format!("echo 8080,49000-49160 > {RESERVED}");
    assert!(reserve.args(["-c", &echo]).status().unwrap().success());
    // B is not enabled yet.
    let first = scene.enable("a", "");
    assert_eq!(first.code, 0, "{first:?}");
    assert_eq!(scene.reserved("a"), "8080,49000-49215");
    assert!(
        scene.rules("a").contains("inet dunlin"),
        "{}",
        scene.rules("a")
    );
    let near = scene.tunnel("a");
    let second = scene.enable("b", "");
    assert_eq!(second.code, 0, "{second:?}");
    let far = scene.tunnel("b");
    // B's tunnel runs now, so a second `enable` on A measures the path to B. It changes nothing.
    let before = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    let again = scene.enable("a", "");
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.out.contains("GiB/s"), "{}", again.out);
    let after = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert_eq!(after, before);
    // A third host is added, and B stays.
    let more = scene.enable("a", "--peer 192.0.2.9=c.test");
    assert_eq!(more.code, 0, "{more:?}");
    let third = scene.enable("a", "--ports 49152-49300");
    assert_eq!(third.code, 0, "{third:?}");
    let after = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert!(
        after.contains("c.test") && after.contains("b.test"),
        "{after}"
    );
    assert_eq!(scene.reserved("a"), "8080,49000-49300");
    drop((near, far));
    let disabled = finish(scene.dunlin("a", "libvirt disable"));
    assert_eq!(disabled.code, 0, "{disabled:?}");
    assert_eq!(scene.reserved("a"), "8080,49000-49160");
    assert!(!scene.rules("a").contains("inet dunlin"));
    for left in [
        "etc/tunnel.toml",
        "sysctl/60-dunlin-libvirt.conf",
        "state/libvirt.json",
    ] {
        assert!(!scene.path("a", left).exists(), "{left}");
    }
}

/// The rules of other redirects in the same configuration stay.
#[test]
fn disable_keeps_the_redirects_of_others() {
    let Some(scene) = Scene::new() else { return };
    let b = scene.link.address(&scene.b, Family::V4);
    let own = format!(
        "listen = \"[::]:18300\"\nidentity = {:?}\n[redirect.proxmox]\nports = \"60000-60050\"\n\
         peers = {{ \"{b}\" = \"b.test\" }}\nusers = [\"root\"]\n",
        scene.files.scratch.join("a"),
    );
    fs::write(scene.path("a", "etc/tunnel.toml"), &own).unwrap();
    assert_eq!(scene.enable("a", "").code, 0);
    let disabled = finish(scene.dunlin("a", "libvirt disable"));
    assert_eq!(disabled.code, 0, "{disabled:?}");
    let after = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert_eq!(after, own);
    let mut rules = scene.a.command("nft");
    let rules = rules
        .args(["list", "table", "inet", "dunlin"])
        .output()
        .unwrap();
    let rules = String::from_utf8(rules.stdout).unwrap();
    assert!(
        rules.contains("60000-60050") && !rules.contains("49152"),
        "{rules}"
    );
}

#[test]
fn a_dry_run_changes_nothing() {
    let Some(scene) = Scene::new() else { return };
    let shown = scene.enable("a", "--dry-run --ports 60000-60050");
    assert_eq!(shown.code, 0, "{shown:?}");
    assert!(
        shown.out.contains("ports = \"60000-60050\""),
        "{}",
        shown.out
    );
    let lines = scene.enable("a", "--dry-run --json").expect(0).lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert_eq!(lines[0]["step"], "plan");
    assert_eq!(lines[0]["ports"], "49152-49215");
    assert_eq!(lines[0]["peers"][0]["identity"], "b.test");
    assert!(!scene.path("a", "etc/tunnel.toml").exists());
    assert_eq!(scene.reserved("a"), "");
    assert!(!scene.rules("a").contains("inet dunlin"));
}

#[test]
fn with_json_each_step_is_an_object_and_the_status_ends_with_a_summary() {
    let Some(scene) = Scene::new() else { return };
    let status = || finish(scene.dunlin("a", "libvirt status --json"));
    assert_eq!(status().expect(1).last(), json!({ "enabled": false }));
    let steps = |done: Done| {
        let lines = done.expect(0).lines().into_iter();
        lines
            .map(|line| line["step"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let enabled = steps(scene.enable("a", "--json"));
    assert_eq!(
        enabled,
        [
            "plan", "written", "tried", "reserved", "rules", "units", "advice", "advice"
        ]
    );
    let summary = |runs| json!({ "enabled": true, "rules_applied": true, "tunnel_runs": runs });
    assert_eq!(status().expect(1).last(), summary(false));
    let disabled = steps(finish(scene.dunlin("a", "libvirt disable --json")));
    assert_eq!(disabled, ["rules", "restored", "reserved"]);
}

/// If a peer has a certificate for another name than expected, `enable` changes nothing.
#[test]
fn enable_changes_nothing_if_a_peer_is_another_than_expected() {
    let Some(scene) = Scene::new() else { return };
    scene.enable("b", "");
    let _far = scene.tunnel("b");
    let own = "listen = \"[::]:18300\"\nidentity = \"/etc/dunlin\"\n[route.x]\ntarget = \"unix:/x\"\nallow = [\"b.test\"]\n";
    fs::write(scene.path("a", "etc/tunnel.toml"), own).unwrap();
    let peer = scene.link.address(&scene.b, Family::V4);
    for file in ["cert.pem", "key.pem", "ca-cert.pem"] {
        let from = scene.files.scratch.join("a").join(file);
        fs::copy(from, scene.path("a", "etc").join(file)).unwrap();
    }
    let mut enable = words("libvirt enable --qemu-conf /none --users root");
    enable.args(["--peer", &format!("{peer}=c.test")]);
    let refused = finish(scene.command("a", &enable));
    assert_eq!(refused.code, 1, "{refused:?}");
    let after = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert_eq!(after, own);
    assert_eq!(scene.reserved("a"), "");
    assert!(!scene.rules("a").contains("inet dunlin"));
}

/// Another program may use the redirect's ports. GlusterFS, for example, listens on port 49152 and
/// the ports after it.
#[test]
fn enable_refuses_if_another_program_listens_on_the_ports() {
    let Some(scene) = Scene::new() else { return };
    let held = scene.a.run(|| std::net::TcpListener::bind("0.0.0.0:49153"));
    let held = held.unwrap().unwrap();
    let refused = scene.enable("a", "");
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("49153"), "{}", refused.err);
    assert!(!scene.path("a", "etc/tunnel.toml").exists());
    drop(held);
    assert_eq!(scene.enable("a", "").code, 0);
}

/// If a name has an IPv4 and an IPv6 address, both belong to one peer, also in the next `enable`.
#[test]
fn a_name_with_two_addresses_is_one_peer() {
    let Some(scene) = Scene::new() else { return };
    let enable = || {
        let mut enable = words("libvirt enable --qemu-conf /none --users root --peer b.test");
        enable.arg("--identity").arg(scene.files.scratch.join("a"));
        finish(scene.command("a", &enable)).expect(0);
        fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap()
    };
    let first = enable();
    for family in [Family::V4, Family::V6] {
        let peer = format!("\"{}\" = \"b.test\"", scene.link.address(&scene.b, family));
        assert_eq!(first.matches(&peer).count(), 1, "{first}");
    }
    assert_eq!(enable(), first);
}

/// libvirt accepts a host name in `migration_address`, but `local` of the redirect needs an
/// address.
#[test]
fn a_name_in_migration_address_needs_local() {
    let Some(scene) = Scene::new() else { return };
    let conf = scene.path("a", "etc/qemu.conf");
    fs::write(&conf, "migration_address = \"a.test\"\n").unwrap();
    let with_conf = |more: &str| {
        let more = format!("{more} --qemu-conf /etc/dunlin/qemu.conf");
        let mut enable = words("libvirt enable --users root --peer b.test");
        enable.arg("--identity").arg(scene.files.scratch.join("a"));
        enable.args(more.split_whitespace());
        finish(scene.command("a", &enable))
    };
    let refused = with_conf("").expect(1);
    assert!(refused.err.contains("migration_address") && refused.err.contains("--local"));
    assert!(!scene.path("a", "etc/tunnel.toml").exists());
    with_conf("--local 192.0.2.1").expect(0);
    let written = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert!(written.contains("local = [\"192.0.2.1\"]"), "{written}");
}

/// `enable`, `disable` and the commands that these two run use the directory of `--state-dir`.
#[test]
fn the_state_directory_is_that_of_the_rules_too() {
    let Some(scene) = Scene::new() else { return };
    let elsewhere = "--state-dir /run/elsewhere";
    scene.enable("a", elsewhere).expect(0);
    for file in ["libvirt.json", "redirect.nft"] {
        assert!(
            scene.path("a", "run/elsewhere").join(file).exists(),
            "{file}"
        );
    }
    let empty = |path: &str| {
        fs::read_dir(scene.path("a", path))
            .unwrap()
            .next()
            .is_none()
    };
    assert!(empty("state"));
    let disable = format!("libvirt disable {elsewhere}");
    finish(scene.dunlin("a", &disable)).expect(0);
    assert!(empty("run/elsewhere"));
}

/// Checks that `enable` failed, and that the host is as it was before.
fn assert_undone(scene: &Scene, failed: &Done, config: Option<&str>, rules: bool) {
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.err.contains("are as before"), "{}", failed.err);
    let now = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).ok();
    assert_eq!(now.as_deref(), config);
    assert_eq!(scene.rules("a").contains("inet dunlin"), rules);
    assert_eq!(scene.reserved("a"), if rules { "49152-49215" } else { "" });
    for left in ["sysctl/60-dunlin-libvirt.conf", "state/libvirt.json"] {
        assert_eq!(scene.path("a", left).exists(), rules, "{left}");
    }
}

#[test]
fn enable_undoes_all_if_the_ports_cannot_be_reserved() {
    let Some(scene) = Scene::new() else { return };
    let read_only = "mount --bind -o ro /etc/sysctl.d /etc/sysctl.d && mount -o remount,bind,ro \
                     /etc/sysctl.d";
    let failed = scene.enable_after("a", read_only, "");
    assert_undone(&scene, &failed, None, false);
    scene.enable("a", "").expect(0);
}

#[test]
fn enable_undoes_all_if_the_units_cannot_be_started() {
    let Some(scene) = Scene::new() else { return };
    // A script takes the place of systemctl. It behaves as on a host on which no unit runs and none
    // can be enabled.
    let calls = scene.path("a", "run/calls");
    let bin = scene.files.scratch.join("bin");
    fs::create_dir(&bin).unwrap();
    let program = "#!/bin/sh\necho \"$*\" >>/run/calls\n[ \"$1\" = disable ]\n";
    fs::write(bin.join("systemctl"), program).unwrap();
    fs::create_dir_all(scene.path("a", "run/systemd/system")).unwrap();
    let first = format!(
        "chmod 755 {0}/systemctl && export PATH={0}:$PATH",
        bin.display()
    );

    let failed = scene.enable_after("a", &first, "");
    assert_undone(&scene, &failed, None, false);
    let called = fs::read_to_string(&calls).unwrap();
    assert!(
        called.contains("\ndisable --now dunlin-redirect.service"),
        "{called}"
    );

    // If adding a peer on an enabled host fails, the earlier rules are restored.
    fs::remove_dir_all(scene.path("a", "run/systemd")).unwrap();
    scene.enable("a", "").expect(0);
    fs::create_dir_all(scene.path("a", "run/systemd/system")).unwrap();
    let before = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    let failed = scene.enable_after("a", &first, "--peer 192.0.2.9=c.test");
    assert_undone(&scene, &failed, Some(&before), true);
    let mut list = scene.a.command("nft");
    let rules = list
        .args(["list", "table", "inet", "dunlin"])
        .output()
        .unwrap();
    let rules = String::from_utf8(rules.stdout).unwrap();
    assert!(!rules.contains("192.0.2.9"), "{rules}");
}

/// From `dunlin init` to bytes between the tunnels, with one command on each host.
#[test]
fn the_identities_of_init_are_installed_for_the_services() {
    let Some(scene) = Scene::new() else { return };
    let hosts = scene.files.scratch.join("made");
    let mut init = words("init a.test b.test --libvirt --out");
    finish({
        init.arg(&hosts);
        init
    })
    .expect(0);
    let private = fs::Permissions::from_mode(0o700);
    fs::set_permissions(scene.path("a", "etc"), private).unwrap();
    let enable = |host: &str, peer: &str, from: &str| {
        let mut enable = words("libvirt enable --qemu-conf /none --users root --peer");
        enable
            .arg(peer)
            .arg("--install-identity")
            .arg(hosts.join(from));
        finish(scene.command(host, &enable))
    };
    enable("b", "a.test", "b.test").expect(0);
    let _far = scene.tunnel("b");
    let first = enable("a", "b.test", "a.test").expect(0);
    assert!(first.out.contains("GiB/s"), "{}", first.out);
    // The output has no advice that would make the key unreadable for the services.
    assert!(!first.err.contains("key.pem"), "{}", first.err);
    for (file, mode) in [("", 0o750), ("key.pem", 0o640), ("cert.pem", 0o640)] {
        let found = fs::metadata(scene.path("a", "etc").join(file)).unwrap();
        assert_eq!((found.mode() & 0o777, found.gid()), (mode, GROUP), "{file}");
    }
    let config = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert!(config.contains("identity = \"/etc/dunlin\""), "{config}");
    // `enable` installs the same identity again, but refuses to replace it with another one.
    enable("a", "b.test", "a.test").expect(0);
    let refused = enable("a", "b.test", "b.test").expect(1);
    assert!(
        refused.err.contains("/etc/dunlin/cert.pem"),
        "{}",
        refused.err
    );
    let after = fs::read_to_string(scene.path("a", "etc/tunnel.toml")).unwrap();
    assert_eq!(after, config);
}

/// `enable` limits the time of a name lookup. The resolver's own limit in this test is 30 seconds.
#[test]
fn a_name_server_that_does_not_answer_is_given_up() {
    let Some(scene) = Scene::new() else { return };
    let server = scene.a.run(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)));
    let server = server.unwrap().unwrap();
    let settings = scene.files.scratch.join("resolv.conf");
    let text = "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n";
    fs::write(&settings, text).unwrap();
    let first = format!("mount --bind {} /etc/resolv.conf", settings.display());
    let began = Instant::now();
    let refused = scene.enable_after("a", &first, "--dry-run --peer slow.test");
    assert!(began.elapsed() < Duration::from_secs(20), "{refused:?}");
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("slow.test"), "{}", refused.err);
    // The server has received the query.
    server.set_nonblocking(true).unwrap();
    assert!(server.recv(&mut [0; 512]).unwrap() > 0);
}

const UUID: &str = "11111111-2222-3333-4444-555555555555";

/// With --json, standard output has one object, and virsh's output is on standard error. On a
/// terminal, virsh shows the progress.
#[test]
fn migrate_prints_an_object_or_shows_the_progress_of_virsh() {
    let Some(scene) = Scene::new() else { return };
    let config = format!(
        "listen = \"127.0.0.1:0\"\nidentity = {:?}\n[route.\"libvirt-b.test\"]\n\
         to = \"b.test:18300\"\npeers = [\"b.test\"]\n",
        scene.files.scratch.join("a")
    );
    fs::write(scene.path("a", "etc/tunnel.toml"), config).unwrap();
    fs::create_dir_all(scene.path("a", "run/dunlin/vm")).unwrap();
    let run = words("tunnel run --confine no --config /etc/dunlin/tunnel.toml");
    let run = scene.command("a", &run);
    let _tunnel = Tunnel::follow(run, scene.path("a", "etc/tunnel.toml"));
    let (bin, calls) = (scene.path("a", "bin"), scene.path("a", "calls"));
    let fails = scene.path("a", "fails");
    fs::create_dir(&bin).unwrap();
    let virsh = format!(
        "#!/bin/sh\n[ $1 = migrate ] || exec echo {UUID}\necho \"$*\" >{}\necho moving\n\
         [ ! -e {} ]\n",
        calls.display(),
        fails.display()
    );
    fs::write(bin.join("virsh"), virsh).unwrap();
    fs::set_permissions(bin.join("virsh"), fs::Permissions::from_mode(0o755)).unwrap();
    let migrate = |flags: &str| {
        let command = words(&format!("libvirt migrate {flags} web b.test --p2p"));
        let mut with_path = Command::new("env");
        let path = format!("PATH={}:/usr/sbin:/usr/bin:/sbin:/bin", bin.display());
        with_path.arg(path).arg(command.get_program());
        with_path.args(command.get_args());
        scene.command("a", &with_path)
    };
    let called = || fs::read_to_string(&calls).unwrap();

    let moved = finish(migrate("--json")).expect(0);
    let object = json!({ "event": "moved", "vm": "web", "uuid": UUID, "host": "b.test" });
    assert_eq!(moved.lines(), [object]);
    assert!(moved.err.contains("moving"), "{}", moved.err);
    let expected = format!(
        "migrate --live --migrateuri unix:///run/dunlin/vm/{UUID}.ram --p2p web \
         qemu+ssh://b.test/system\n"
    );
    assert_eq!(called(), expected);
    let text = finish(migrate("")).expect(0);
    assert_eq!(text.out, "moving\n");
    assert!(!called().contains("--verbose"), "{}", called());
    let mut terminal = Terminal::start(&migrate(""), 24, 80);
    assert_eq!(exit_code(&mut terminal.child), Some(0));
    assert!(called().contains(" --verbose "), "{}", called());

    fs::write(&fails, "").unwrap();
    let failed = finish(migrate("--json")).expect(1);
    assert_eq!(failed.last()["event"], "failed");
    assert_eq!(failed.last()["fault"], "usage");
    assert_eq!(failed.lines().len(), 1, "{}", failed.out);
    // The sockets of these migrations are closed.
    let sockets = fs::read_dir(scene.path("a", "run/dunlin/vm")).unwrap();
    assert_eq!(sockets.count(), 0);
}
