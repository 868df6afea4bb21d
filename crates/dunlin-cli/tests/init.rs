//! `dunlin init`: the files of two and of three hosts, and tunnels that run with them.
#![allow(clippy::unwrap_used)]

#[path = "support/etc.rs"]
mod etc;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dunlin_test_base::sockets::accepted;
use etc::Scene;
use serde_json::json;
use support::{Done, Scratch, finish, words};
use tunnel::{connect, listen};

fn init(out: &Path, line: &str) -> Done {
    let mut init = words(&format!("init {line} --out"));
    init.arg(out);
    finish(init)
}

/// Every file below a directory, with its mode.
fn files(directory: &Path) -> BTreeSet<(String, u32)> {
    let mut found = BTreeSet::new();
    for folder in fs::read_dir(directory).unwrap() {
        let folder = folder.unwrap();
        for file in fs::read_dir(folder.path()).unwrap() {
            let file = file.unwrap();
            let name = format!(
                "{}/{}",
                folder.file_name().to_str().unwrap(),
                file.file_name().to_str().unwrap()
            );
            let mode = file.metadata().unwrap().permissions().mode() & 0o777;
            found.insert((name, mode));
        }
    }
    found
}

#[test]
fn each_host_gets_its_files_and_nothing_is_overwritten() {
    let scratch = Scratch::new();
    let out = scratch.join("hosts");
    let done = init(&out, "a.example b.example --json").expect(0);
    let expected = [
        ("a.example/ca-cert.pem", 0o644),
        ("a.example/cert.pem", 0o644),
        ("a.example/key.pem", 0o600),
        ("a.example/tunnel.toml", 0o644),
        ("b.example/ca-cert.pem", 0o644),
        ("b.example/cert.pem", 0o644),
        ("b.example/key.pem", 0o600),
        ("b.example/tunnel.toml", 0o644),
        ("ca/ca-cert.pem", 0o644),
        ("ca/ca-key.pem", 0o600),
    ];
    let expected = expected.map(|(name, mode)| (name.to_owned(), mode));
    assert_eq!(files(&out), BTreeSet::from(expected.clone()));
    // The output names every file of a host, with the path at which to install it.
    let line = done.last();
    let named: BTreeSet<(String, String)> = line["hosts"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|host| host["files"].as_array().unwrap())
        .map(|file| {
            let text = |key: &str| file[key].as_str().unwrap().to_owned();
            assert_eq!(file["secret"], text("file").ends_with("key.pem"));
            (text("file"), text("to"))
        })
        .collect();
    let of_hosts = expected.iter().filter(|(name, _)| !name.starts_with("ca/"));
    let of_hosts = of_hosts.map(|(name, _)| {
        let (_, file) = name.split_once('/').unwrap();
        (
            out.join(name).to_str().unwrap().to_owned(),
            format!("/etc/dunlin/{file}"),
        )
    });
    assert_eq!(named, of_hosts.collect());
    let of_a = &line["hosts"][0];
    let copy = format!("scp -r {} root@a.example:", out.join("a.example").display());
    assert_eq!(of_a["copy"], copy);
    let commands = [
        "install -m 640 -g dunlin -t /etc/dunlin a.example/* && rm -r a.example",
        "systemctl enable --now dunlin-tunnel",
    ];
    assert_eq!(of_a["commands"], json!(commands));

    let key = fs::read(out.join("a.example/key.pem")).unwrap();
    init(&out, "a.example b.example").expect(1);
    assert_eq!(fs::read(out.join("a.example/key.pem")).unwrap(), key);
    // A mistake is found before the first file is written.
    for line in [
        "a.example",
        "a.example a.example",
        "a.example ../b",
        "a.example *.example",
    ] {
        let new = scratch.join("new");
        assert_ne!(init(&new, line).code, 0, "{line}");
        assert!(!new.exists(), "{line}");
    }
}

/// With `--libvirt`, `init` writes no configuration. With three hosts, each has a route to every
/// other host.
#[test]
fn hosts_of_libvirt_have_no_configuration_and_three_hosts_have_all_routes() {
    let scratch = Scratch::new();
    let done = init(
        &scratch.join("libvirt"),
        "a.example b.example c.example --libvirt --json --days 9",
    );
    let commands = "dunlin libvirt enable --peer a.example --peer c.example \
                    --install-identity b.example";
    let line = done.expect(0).last();
    assert_eq!(line["hosts"][1]["commands"], json!([commands]));
    // The certificate was made a moment ago, so less than the 9 days of `--days` are left.
    let mut examine = words("doctor --json --identity");
    examine.arg(scratch.join("libvirt/b.example"));
    let verdicts = finish(examine).lines();
    let mut certificates = verdicts
        .iter()
        .filter(|one| one["check"] == "identity.certificate");
    assert_eq!(
        certificates.next().unwrap()["value"],
        "DNS b.example, 8 days"
    );
    assert!(!scratch.join("libvirt/a.example/tunnel.toml").exists());
    init(
        &scratch.join("three"),
        "a.example b.example 192.0.2.3 --route vm",
    )
    .expect(0);
    let config = fs::read_to_string(scratch.join("three/b.example/tunnel.toml")).unwrap();
    let tables: Vec<_> = config
        .lines()
        .filter(|line| line.starts_with("[route"))
        .collect();
    let expected = [
        "[route.vm-to-a]",
        "[route.vm-to-192-0-2-3]",
        "[route.vm-to-b]",
    ];
    assert_eq!(tables, expected, "{config}");
    assert!(
        config.contains("allow = [\"a.example\", \"192.0.2.3\"]"),
        "{config}"
    );
    assert!(config.contains("to = \"192.0.2.3:18300\""), "{config}");
}

#[test]
fn two_tunnels_with_the_files_of_init_carry_bytes_both_ways() {
    let Some(scene) = Scene::new() else { return };
    let out = scene.files.scratch.join("made");
    init(&out, "a.test b.test").expect(0);
    for host in ["a", "b"] {
        for file in fs::read_dir(out.join(format!("{host}.test"))).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), scene.path(host, "etc").join(file.file_name())).unwrap();
        }
        fs::create_dir(scene.path(host, "run/dunlin")).unwrap();
        let check = "tunnel check --config /etc/dunlin/tunnel.toml";
        finish(scene.dunlin(host, check)).expect(0);
    }
    let targets = ["a", "b"].map(|host| listen(scene.path(host, "run/dunlin/ram-in.sock")));
    let _tunnels = ["a", "b"].map(|host| scene.tunnel(host));
    for (from, to, target) in [("a", "b", &targets[1]), ("b", "a", &targets[0])] {
        let socket = format!("run/dunlin/ram-to-{to}.sock");
        let mut near = connect(scene.path(from, &socket));
        near.write_all(b"there").unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let mut far = accepted(target);
        let mut came = String::new();
        far.read_to_string(&mut came).unwrap();
        assert_eq!(came, "there");
        far.write_all(b"back").unwrap();
        drop(far);
        let mut came = String::new();
        near.read_to_string(&mut came).unwrap();
        assert_eq!(came, "back");
    }
}
