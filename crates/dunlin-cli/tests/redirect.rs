//! The rules of `dunlin redirect`: which connections they redirect, which they reject, and which
//! they leave alone.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/host.rs"]
mod host;
#[path = "support/redirect.rs"]
mod net;
mod support;
#[path = "support/units.rs"]
mod units;

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dunlin_rig::hosts::Family;
use host::in_own_mounts;
use net::{
    FAMILIES, MEMBER, Net, PORT, ROOT, SERVICE, STRANGER, accept, any, assert_idle, assert_reset,
    assert_talk, close, dial, dial_from, listen, listen_redirected, listen_redirected_at, loopback,
    nft, original, seen, wait_for,
};
use support::process::Process;
use support::{Done, finish};
use units::Units;

/// Claim H12 of docs/security.
#[test]
fn i6_only_the_users_connections_are_redirected_and_all_others_stay_here() {
    let Some(net) = Net::new() else { return };
    net.apply(&net.a);
    for family in FAMILIES {
        let to = net.address(&net.b, family);
        let redirected = listen_redirected(&net.a, family);
        let at_peer = listen(&net.b, (any(family), PORT));
        for (uid, port) in [(ROOT, PORT), (MEMBER, 49215)] {
            let near = dial(&net.a, uid, (to, port)).unwrap();
            let accepted = accept(&redirected);
            assert_eq!(original(&accepted), (to, port).into());
            assert_talk(&near, &accepted);
        }
        assert_reset(|| dial(&net.a, STRANGER, (to, PORT)));
        // The rules stay after the tunnel has ended.
        close(&redirected);
        assert_reset(|| dial(&net.a, ROOT, (to, PORT)));
        assert_idle(&at_peer);
        assert_eq!(seen(&net.b), 0);

        // Ports beside the range are those of other services.
        let beside = listen(&net.b, (any(family), 49216));
        let near = dial(&net.a, STRANGER, (to, 49216)).unwrap();
        assert_talk(&near, &accept(&beside));
    }
    let shown = net.show(&net.a, 0);
    let counters = &shown["counters"]["vm"];
    assert_eq!(counters["redirected"], 6, "{shown}");
    assert_eq!(counters["rejected_output"], 2, "{shown}");
    assert_eq!(counters["rejected_input"], 0, "{shown}");
}

/// Claim N15 of docs/security.
#[test]
fn i6_routed_connections_and_those_from_the_wire_are_rejected() {
    let Some(net) = Net::new() else { return };
    let far = |family| listen(&net.b, (any(family), PORT));
    let before = FAMILIES.map(far);
    // Without rules, the route through `a` works.
    let near = dial(&net.c, ROOT, (net.address(&net.b, Family::V4), PORT)).unwrap();
    assert_talk(&near, &accept(&before[0]));
    let came = seen(&net.b);
    assert_eq!(came, 1);

    net.apply(&net.a);
    for (family, at_peer) in FAMILIES.into_iter().zip(&before) {
        let here = net.address(&net.a, family);
        let at_a = listen(&net.a, (any(family), PORT));
        assert_reset(|| dial(&net.c, ROOT, (net.address(&net.b, family), PORT)));
        assert_reset(|| dial(&net.b, ROOT, (here, PORT)));
        assert_reset(|| dial(&net.c, STRANGER, (here, PORT)));
        assert_idle(at_peer);
        assert_idle(&at_a);
        // The tunnel at this host connects to the toolstack here.
        for address in [loopback(family), here] {
            let near = dial(&net.a, ROOT, (address, PORT)).unwrap();
            assert_talk(&near, &accept(&at_a));
        }
    }
    assert_eq!(seen(&net.b), came);
    let shown = net.show(&net.a, 0);
    let counters = &shown["counters"]["vm"];
    assert_eq!(counters["rejected_forward"], 2, "{shown}");
    assert_eq!(counters["rejected_input"], 4, "{shown}");
    assert_eq!(counters["redirected"], 0, "{shown}");
}

/// Other connections may use the redirect's ports as ephemeral ports.
#[test]
fn connections_from_a_port_in_the_range_pass() {
    let Some(net) = Net::new() else { return };
    let mut kept = Vec::new();
    // Open connections before and after the first `apply`. The kernel tracks the earlier ones only
    // from their next packet on, which can be a packet to a port in the range.
    for port in [49160, 49170] {
        for family in FAMILIES {
            let [a, b] = [&net.a, &net.b].map(|host| net.address(host, family));
            let c = net.ca.address(&net.c, family);
            for (from, to, host, at) in [
                // From host a, to host a, and through host a.
                (a, b, &net.a, &net.b),
                (b, a, &net.b, &net.a),
                (c, b, &net.c, &net.b),
                (b, c, &net.b, &net.c),
            ] {
                // Use each service port once. This test closes the listener, but a process that
                // another test forks keeps it open until that process executes its program.
                let service = SERVICE + u16::try_from(kept.len()).unwrap();
                let listener = listen(at, (any(family), service));
                let near = dial_from(host, (from, port).into(), (to, service).into()).unwrap();
                let accepted = accept(&listener);
                assert_talk(&near, &accepted);
                kept.push((near, accepted));
            }
        }
        // The connections do not belong to a migration, so they do not prevent an `apply`.
        net.apply(&net.a);
        for (near, accepted) in &kept {
            assert_talk(accepted, near);
        }
    }
    let shown = net.show(&net.a, 0);
    let expected = serde_json::json!({
        "redirected": 0, "rejected_output": 0, "rejected_forward": 0, "rejected_input": 0,
        "plain": {}
    });
    assert_eq!(shown["counters"]["vm"], expected);
}

#[test]
fn one_configuration_serves_both_hosts_without_a_loop() {
    let Some(net) = Net::new() else { return };
    let own: String = FAMILIES
        .map(|family| format!("\"{}\" = \"a.test\", ", net.address(&net.a, family)))
        .concat();
    net.configure(
        &net.usual()
            .replacen("peers = { ", &format!("peers = {{ {own}"), 1),
    );
    net.apply(&net.a);
    net.apply(&net.b);
    for family in FAMILIES {
        // The configuration lists A and B with their IPv4 addresses, then A and B with their IPv6
        // addresses.
        let first = if family == Family::V4 { 0 } else { 2 };
        let redirected = [(&net.a, first + 1), (&net.b, first)]
            .map(|(host, more)| listen_redirected_at(host, family, more));
        let [a, b] = [&net.a, &net.b].map(|host| net.address(host, family));
        // A connection from `a` to `b` is redirected once, at `a`.
        let near = dial(&net.a, ROOT, (b, PORT)).unwrap();
        let entrance = accept(&redirected[0]);
        assert_eq!(original(&entrance), (b, PORT).into());
        // The tunnel at `b` connects to the toolstack there, at any of the host's addresses.
        let toolstack = listen(&net.b, (any(family), PORT));
        for address in [loopback(family), b] {
            let exit = dial(&net.b, ROOT, (address, PORT)).unwrap();
            assert_talk(&exit, &accept(&toolstack));
        }
        drop(toolstack);
        // A connection from `b` to `a` is redirected too, while the first one is open.
        let back = dial(&net.b, MEMBER, (a, PORT)).unwrap();
        assert_eq!(original(&accept(&redirected[1])), (a, PORT).into());
        assert_talk(&near, &entrance);
        drop(back);
        redirected.iter().for_each(assert_idle);
    }
    for host in [&net.a, &net.b] {
        let shown = net.show(host, 0);
        assert_eq!(shown["counters"]["vm"]["redirected"], 2, "{shown}");
        assert_eq!(seen(host), 0);
    }
}

/// While `apply` replaces the rules, no connection from the wire passes, and redirected connections
/// continue.
///
/// Claim N15 of docs/security.
#[test]
fn i6_an_apply_replaces_the_rules_in_one_step() {
    let Some(net) = Net::new() else { return };
    net.apply(&net.a);
    let toolstack = listen(&net.a, (any(Family::V4), PORT));
    let redirected = listen_redirected(&net.a, Family::V4);
    let near = dial(&net.a, ROOT, (net.address(&net.b, Family::V4), PORT)).unwrap();
    let accepted = accept(&redirected);
    let applied = AtomicBool::new(false);
    let here = net.address(&net.a, Family::V4);
    let tries = thread::scope(|scope| {
        let dialler = scope.spawn(|| {
            let mut tries = 0;
            while !applied.load(Ordering::Relaxed) {
                assert_reset(|| dial(&net.b, ROOT, (here, PORT)));
                tries += 1;
            }
            tries
        });
        for users in ["0", "7"].into_iter().cycle().take(8) {
            let text = net.usual().replacen("\"root\"", &format!("\"{users}\""), 1);
            net.configure(&text);
            net.apply(&net.a);
            assert_talk(&near, &accepted);
        }
        applied.store(true, Ordering::Relaxed);
        dialler.join().unwrap()
    });
    println!("{tries} connections were rejected meanwhile");
    assert!(tries > 8, "{tries}");
    assert_idle(&toolstack);
}

#[test]
fn peers_without_a_tunnel_are_accepted_and_counted_until_the_last_day() {
    let Some(net) = Net::new() else { return };
    let today = time::OffsetDateTime::now_utc().date();
    let [b, c] = [
        net.address(&net.b, Family::V4),
        net.ca.address(&net.c, Family::V6),
    ];
    let plain = |until: time::Date| {
        let peers = net.usual();
        let (before, after) = peers.split_once("peers").unwrap();
        let (_, users) = after.split_once('\n').unwrap();
        let text = format!(
            "{before}peers = {{ \"192.0.2.7\" = \"b.test\" }}\nplain_from = [\"{b}\", \"{c}\"]\n\
             plain_until = \"{until}\"\n{users}"
        );
        net.configure(&text);
        net.apply(&net.a);
    };
    let toolstack = FAMILIES.map(|family| listen(&net.a, (any(family), PORT)));
    let dial_all = |accepted: bool| {
        for (host, family, at, listener) in [
            (
                &net.b,
                Family::V4,
                net.address(&net.a, Family::V4),
                &toolstack[0],
            ),
            (
                &net.c,
                Family::V6,
                net.ca.address(&net.a, Family::V6),
                &toolstack[1],
            ),
        ] {
            if accepted {
                let near = dial(host, ROOT, (at, PORT)).unwrap();
                assert_talk(&near, &accept(listener));
            } else {
                assert_reset(|| dial(host, ROOT, (at, PORT)));
            }
            // From `host`, connect over the other family too. plain_from does not contain the
            // address of `host` in that family.
            let other = FAMILIES.into_iter().find(|other| *other != family).unwrap();
            let other = match family {
                Family::V4 => net.address(&net.a, other),
                Family::V6 => net.ca.address(&net.a, other),
            };
            assert_reset(|| dial(host, ROOT, (other, PORT)));
        }
    };
    plain(today);
    dial_all(true);
    dial_all(true);
    let shown = net.show(&net.a, 0);
    let counters = &shown["counters"]["vm"];
    assert_eq!(counters["plain"][b.to_string()], 2, "{shown}");
    assert_eq!(counters["plain"][c.to_string()], 2, "{shown}");
    assert_eq!(counters["rejected_input"], 4, "{shown}");
    // The rules contain the end of the last day, which the kernel compares with its clock.
    plain(today.previous_day().unwrap());
    dial_all(false);
    let shown = net.show(&net.a, 0);
    assert_eq!(
        shown["counters"]["vm"]["plain"][b.to_string()],
        0,
        "{shown}"
    );
}

#[test]
fn remove_leaves_nothing() {
    let Some(net) = Net::new() else { return };
    let before = nft(&net.a, &["list", "ruleset"]).expect(0).out;
    net.apply(&net.a);
    assert_ne!(nft(&net.a, &["list", "ruleset"]).expect(0).out, before);
    finish(net.redirect(&net.a, "remove")).expect(0);
    assert_eq!(nft(&net.a, &["list", "ruleset"]).expect(0).out, before);
    assert_eq!(net.state(&net.a), None);
    let name = net.a.namespace();
    for directory in ["run", "state"] {
        let directory = net.scratch.join(format!("{name}.{directory}"));
        assert_eq!(directory.read_dir().unwrap().count(), 0, "{directory:?}");
    }
    // A second time, there is nothing to do.
    finish(net.redirect(&net.a, "remove")).expect(0);
    let shown = net.show(&net.a, 1);
    assert_eq!(shown["state"], "missing");
}

/// Changes of the rules, and whether `show` calls the table missing afterwards.
const CHANGES: [(&str, bool); 7] = [
    ("flush ruleset", true),
    ("delete table inet dunlin", true),
    ("flush chain inet dunlin nat_output", false),
    ("delete chain inet dunlin forward", false),
    ("insert rule inet dunlin input accept", false),
    ("add chain inet dunlin more", false),
    // A rule that the chain already has at another position.
    (
        "add rule inet dunlin output fib daddr type local return",
        false,
    ),
];

/// Claim H14 of docs/security.
#[test]
fn every_change_of_the_rules_is_noticed() {
    let Some(net) = Net::new() else { return };
    assert_eq!(net.show(&net.a, 1)["state"], "missing");
    for (change, is_missing) in CHANGES {
        net.apply(&net.a);
        let shown = net.show(&net.a, 0);
        assert_eq!(shown["state"], "applied");
        assert_eq!(shown["difference"], serde_json::Value::Null);
        assert_eq!(shown["digest"].as_str().unwrap().len(), 64);
        // A packet changes only the counters, which `show` does not compare.
        let _ = dial(&net.b, ROOT, (net.address(&net.a, Family::V4), PORT));
        net.show(&net.a, 0);
        nft(&net.a, &[change]).expect(0);
        let shown = net.show(&net.a, 1);
        let expected = if is_missing { "missing" } else { "different" };
        assert_eq!(shown["state"], expected, "{change}: {shown}");
        assert!(shown["difference"].is_string(), "{change}: {shown}");
    }
    // The exit code reports the state without --json too.
    finish(net.redirect(&net.a, "show")).expect(1);
    net.apply(&net.a);
    finish(net.redirect(&net.a, "show")).expect(0);
    // Without the record of the last `apply`, `show` cannot tell that the rules in force are those
    // of that `apply`.
    let name = net.a.namespace();
    fs::remove_file(net.scratch.join(format!("{name}.run/expected.json"))).unwrap();
    assert_eq!(net.show(&net.a, 1)["state"], "different");
}

#[test]
fn a_changed_configuration_is_noticed_until_it_is_applied() {
    let Some(net) = Net::new() else { return };
    net.apply(&net.a);
    let digest = net.show(&net.a, 0)["digest"].clone();
    net.configure(&net.usual().replace("49215", "49214"));
    let shown = net.show(&net.a, 1);
    assert_eq!(shown["state"], "different", "{shown}");
    assert_eq!(shown["digest"], digest);
    net.apply(&net.a);
    assert_ne!(net.show(&net.a, 0)["digest"], digest);
    net.configure("listen = 1\n");
    assert_eq!(net.show(&net.a, 1)["state"], "different");
    // Because a name in the configuration has no address, `show` cannot compare the rules with the
    // configuration, and does not call them different.
    net.configure(&net.usual().replace("49215", "49214"));
    net.apply(&net.a);
    let more = "peers = { \"no-such-name.invalid\" = \"x.test\", ";
    net.configure(&net.usual().replacen("peers = { ", more, 1));
    assert_eq!(net.show(&net.a, 0)["state"], "applied");
    finish(net.redirect(&net.a, "apply")).expect(1);
}

/// Claim H14 of docs/security.
#[test]
fn watch_writes_each_change_to_its_file() {
    let Some(net) = Net::new() else { return };
    net.apply(&net.a);
    let name = net.a.namespace();
    let file = net.scratch.join(format!("{name}.run/state.json"));
    fs::remove_file(&file).unwrap();
    let watch = Process::start(net.redirect(&net.a, "watch --interval 50ms"));
    let wait = |state: &str| {
        wait_for(state, || {
            net.state(&net.a).filter(|found| found["state"] == state)
        })
    };
    let first = wait("applied");
    assert_eq!(first["digest"], net.show(&net.a, 0)["digest"]);
    // The tunnel's user may read the file.
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o644
    );
    let now = std::time::SystemTime::now();
    let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert!(now.abs_diff(first["checked_unix_s"].as_u64().unwrap()) < 60);

    let _ = dial(&net.b, ROOT, (net.address(&net.a, Family::V4), PORT));
    wait_for("counter", || {
        let state = net.state(&net.a)?;
        (state["counters"]["vm"]["rejected_input"] == 1).then_some(())
    });
    nft(&net.a, &["flush ruleset"]).expect(0);
    wait("missing");
    net.apply(&net.a);
    wait("applied");
    nft(&net.a, &["insert rule inet dunlin input accept"]).expect(0);
    wait("different");
    watch.wait_for("rules in force");
}

/// Claim H12 of docs/security.
#[test]
fn i6_an_apply_that_fails_changes_nothing() {
    let Some(net) = Net::new() else { return };
    let table = || nft(&net.a, &["-j", "list", "table", "inet", "dunlin"]).out;
    let fail = || -> Done {
        net.configure(&net.usual().replacen("\"root\"", "\"no-such-user\"", 1));
        let done = finish(net.redirect(&net.a, "apply")).expect(1);
        net.configure(&net.usual());
        done
    };
    // Nothing was ever applied, so there is nothing to restore.
    fail();
    assert_eq!(table(), "");
    net.apply(&net.a);
    let before = table();
    fail();
    assert_eq!(table(), before);

    // Simulate a boot: no rules, and no files in /run. If `apply` fails in this state, it loads the
    // rules of the last `apply` that succeeded.
    nft(&net.a, &["delete table inet dunlin"]).expect(0);
    let name = net.a.namespace();
    fs::remove_dir_all(net.scratch.join(format!("{name}.run"))).unwrap();
    let done = fail();
    assert!(done.err.contains("no-such-user"), "{done:?}");
    assert_eq!(net.state(&net.a).unwrap()["state"], "different");
    assert_eq!(net.show(&net.a, 0)["state"], "applied");
    assert_reset(|| dial(&net.a, STRANGER, (net.address(&net.b, Family::V4), PORT)));
    // After `remove`, rules must not come back.
    finish(net.redirect(&net.a, "remove")).expect(0);
    fail();
    assert_eq!(table(), "");
}

/// Claim N15 of docs/security.
#[test]
fn connections_under_way_are_refused_or_continue() {
    let Some(net) = Net::new() else { return };
    for (host, to) in [(&net.a, &net.b), (&net.b, &net.a)] {
        // A migration in the clear, in either direction.
        let listener = listen(to, (any(Family::V6), PORT));
        let near = dial(host, MEMBER, (net.address(to, Family::V6), PORT)).unwrap();
        let far = accept(&listener);
        let done = finish(net.redirect(&net.a, "apply")).expect(1);
        let ends = near.local_addr().unwrap().to_string();
        assert!(done.err.contains(&ends), "{done:?}");
        assert_eq!(net.show(&net.a, 1)["state"], "missing");
        finish(net.redirect(&net.a, "apply --force")).expect(0);
        assert_talk(&near, &far);
        // A drop is not enough: a process that another test forks keeps both ends open until it
        // executes its program.
        for end in [&near, &far] {
            end.shutdown(Shutdown::Both).unwrap();
        }
        finish(net.redirect(&net.a, "remove")).expect(0);
    }
    // A redirected connection does not prevent an `apply`, and continues after the `apply`. The
    // connection prevents a `remove`, because the `remove` would cut the connection.
    net.apply(&net.a);
    for family in FAMILIES {
        let redirected = listen_redirected(&net.a, family);
        let near = dial(&net.a, ROOT, (net.address(&net.b, family), PORT)).unwrap();
        let far = accept(&redirected);
        net.apply(&net.a);
        assert_talk(&near, &far);
        finish(net.redirect(&net.a, "remove")).expect(1);
        assert_talk(&near, &far);
        net.show(&net.a, 0);
    }
    // A redirected connection does not prevent an `apply` that changes the tunnel's port either.
    let redirected = listen_redirected(&net.a, Family::V4);
    let near = dial(&net.a, ROOT, (net.address(&net.b, Family::V4), PORT)).unwrap();
    let far = accept(&redirected);
    let text = net.usual();
    net.configure(&text.replacen("listen", "redirect_port = 18302\nlisten", 1));
    net.apply(&net.a);
    assert_talk(&near, &far);
    net.configure(&text);
    net.apply(&net.a);
    // Without the rules, the kernel would no longer translate the connection's addresses, so what
    // the client sends would leave in the clear.
    finish(net.redirect(&net.a, "remove --force")).expect(0);
    assert_eq!(net.show(&net.a, 1)["state"], "missing");
    for (end, kind) in [
        (&near, ErrorKind::ConnectionAborted),
        (&far, ErrorKind::ConnectionReset),
    ] {
        let mut end = end;
        assert_eq!(end.read(&mut [0]).unwrap_err().kind(), kind);
    }
}

#[test]
fn a_dry_run_prints_what_apply_would_load() {
    let Some(net) = Net::new() else { return };
    let text = finish(net.redirect(&net.a, "apply --dry-run"))
        .expect(0)
        .out;
    assert_eq!(net.show(&net.a, 1)["state"], "missing");
    let object = |line| finish(net.redirect(&net.a, line)).expect(0).last();
    let dry = object("apply --dry-run --json");
    assert_eq!(dry["rules"], text);
    let file = net.scratch.join("rules.nft");
    fs::write(&file, text).unwrap();
    nft(&net.a, &["-f", file.to_str().unwrap()]).expect(0);
    let by_hand = nft(&net.a, &["list", "ruleset"]).expect(0).out;
    assert_eq!(object("apply --json")["digest"], dry["digest"]);
    assert_eq!(nft(&net.a, &["list", "ruleset"]).expect(0).out, by_hand);
    assert_eq!(object("remove --json")["removed"], true);
    assert_eq!(object("remove --json")["removed"], false);
    // A dry run may be on another host than the users, so it only warns.
    let unknown = net
        .usual()
        .replacen("users = [", "users = [\"no-such-user\", ", 1);
    net.configure(&unknown);
    for (line, code) in [("apply --dry-run", 0), ("apply", 1)] {
        let done = finish(net.redirect(&net.a, line)).expect(code);
        assert!(done.err.contains("no-such-user"), "{done:?}");
    }
    assert_eq!(net.show(&net.a, 1)["state"], "missing");
}

/// Each host lacks something, and the error names it.
#[test]
fn an_error_names_what_the_host_lacks() {
    let Some(net) = Net::new() else { return };
    let mut apply = support::words("redirect apply");
    for (flag, file) in [
        ("--config", "tunnel.toml"),
        ("--run-dir", "run"),
        ("--state-dir", "state"),
    ] {
        apply.arg(flag).arg(net.scratch.join(file));
    }
    let hide = "mount -t tmpfs none /usr/sbin && mount -t tmpfs none /usr/local/sbin";
    if let Some(without_nft) = in_own_mounts(hide, &apply) {
        let done = finish(without_nft).expect(1);
        assert!(done.err.contains("package nftables"), "{done:?}");
    }
    // An nft that fails for some of its arguments.
    let script = "case \"$*\" in $FAILS) echo \"Error: $FAILS\" >&2; exit 1;; esac";
    let program = fake_nft(&net, script);
    for (fails, part) in [
        ("*list*tables*", "CONFIG_NF_TABLES"),
        ("-j*", "JSON"),
        ("-f*", "nft_redir"),
    ] {
        let mut apply = net.redirect(&net.a, "apply");
        apply.env("PATH", &program).env("FAILS", fails);
        let done = finish(apply).expect(1);
        let said = format!("Error: {fails}");
        assert!(
            done.err.contains(part) && done.err.contains(&said),
            "{done:?}"
        );
    }
    let mut without = Command::new("setpriv");
    without.args(["--bounding-set", "-net_admin", "--inh-caps", "-net_admin"]);
    without.arg(apply.get_program()).args(apply.get_args());
    let done = finish(net.a.enter(&without)).expect(1);
    assert!(done.err.contains("CAP_NET_ADMIN"), "{done:?}");
    assert_eq!(net.show(&net.a, 1)["state"], "missing");
}

/// A search path in which the first `nft` is a script that runs `script` and then the real `nft`.
fn fake_nft(net: &Net, script: &str) -> String {
    let program = net.scratch.join("nft");
    let path = std::env::var("PATH").unwrap();
    let text = format!("#!/bin/sh\nPATH='{path}:/usr/sbin'\n{script}\nexec nft \"$@\"\n");
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    format!("{}:{path}", program.parent().unwrap().display())
}

/// Another program changes the table right after it was loaded.
///
/// Claim H14 of docs/security.
#[test]
fn an_apply_checks_that_the_rules_in_force_are_its_own() {
    let Some(net) = Net::new() else { return };
    for change in ["insert rule inet dunlin input accept", "flush ruleset"] {
        let path = fake_nft(
            &net,
            "if [ \"$*\" = '-f -' ]; then text=$(cat); printf '%s\\n' \"$text\" | nft -f - || exit; \
             case \"$text\" in *dunlin_expected*) exit;; esac; nft $CHANGE; exit; fi",
        );
        let mut apply = net.redirect(&net.a, "apply");
        apply.env("PATH", path).env("CHANGE", change);
        finish(apply).expect(1);
        assert_ne!(net.state(&net.a).unwrap()["state"], "applied", "{change}");
        net.show(&net.a, 1);
        // No copy of the table is left.
        let tables = nft(&net.a, &["list", "tables"]).expect(0).out;
        assert!(!tables.contains("dunlin_expected"), "{tables}");
        net.apply(&net.a);
        net.show(&net.a, 0);
    }
}

#[test]
fn the_units_are_valid_and_drop_what_they_do_not_need() {
    let units = Units::new();
    let names = ["dunlin-redirect.service", "dunlin-redirect-watch.service"];
    units.verify(&names);
    names.iter().for_each(|name| units.weigh(name));
    for name in names {
        let text = units.text(name);
        let has = |line: &str| text.lines().any(|one| one == line);
        assert!(has("CapabilityBoundingSet=CAP_NET_ADMIN"), "{text}");
        // The rules stay when a unit stops.
        assert!(!text.contains("ExecStop"), "{text}");
    }
}
