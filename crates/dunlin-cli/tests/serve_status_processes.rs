//! What `dunlin serve-status` shows of lanes on a lossy link, of hand-offs, and of the identities of
//! processes.
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
#[path = "support/status.rs"]
mod status;
mod support;
#[path = "support/namespaces.rs"]
mod wires;

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dunlin_test_base::need::are_here;
use serde_json::{Value, json};
use status::Page;
use support::process::Process;
use support::{Hosts, kernel_has_tls, kill, words};
use wires::{B, Wire};

const DAY_S: f64 = 86_400.0;

/// The value of the only sample of this metric with these labels.
fn value(metrics: &str, name: &str, labels: &str) -> Option<f64> {
    let of_name = metrics.lines().filter(|line| line.starts_with(name));
    let mut found = of_name.filter(|line| line.contains(labels));
    let (_, value) = found.next()?.rsplit_once(' ').unwrap();
    assert!(found.next().is_none(), "{name} {labels}: {metrics}");
    Some(value.parse().unwrap())
}

/// The days until the certificate of a process expires.
fn days_left(page: &Page, labels: &str) -> Option<f64> {
    let labels = format!("{labels},item=\"certificate\"");
    let name = "dunlin_certificate_expiry_timestamp_seconds{";
    let at = value(&page.get("/metrics"), name, &labels)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Some((at - now.as_secs_f64()) / DAY_S)
}

/// Waits until the metrics say that the certificate expires in this many days.
fn wait_for_days(page: &Page, labels: &str, days: f64) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let left = days_left(page, labels);
        if left.is_some_and(|left| (left - days).abs() < 0.2) {
            return;
        }
        let now = Instant::now();
        assert!(now < until, "{labels}: {left:?} days instead of {days}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// While packets with data are lost, the kernel sends them again. The counter of each lane shows that.
#[test]
fn the_segments_that_a_lane_of_a_vm_sends_again_are_counted() {
    let Some(wire) = Wire::new(None) else { return };
    let hosts = Hosts::new();
    let run = words("vm run --name vm --guest process --memory 64M --fill-size 48M");
    let source = support::Process::start(wire.at_a(&run), &hosts.scratch.join("1"));
    source.wait_for("started");
    let mut receive = words(&format!("vm receive --listen {B}:0 --identity"));
    receive.arg(hosts.scratch.join("b"));
    let mut destination = support::Process::start(wire.at_b(&receive), &hosts.scratch.join("2"));
    let listening = destination.wait_for("listening");
    destination.address = listening["address"].as_str().unwrap().to_owned();
    let page = Page::start(&source.control);
    let flags = "--peer b.test --lanes 2 --rate 4M";
    let migration = hosts.begin(&source, &destination, "a", flags);
    let retransmits = |status: &Value| -> Vec<u64> {
        let progress = &status["sessions"][0]["live"]["migration"]["progress"];
        let lanes = progress["retransmits"].as_array();
        let lanes = lanes.into_iter().flatten();
        lanes.map(|lane| lane[1].as_u64().unwrap()).collect()
    };
    // On a busy machine TCP may also resend segments that were not lost.
    let status = page.wait_for("two lanes", |status| retransmits(status).len() == 2);
    let before = retransmits(&status);

    let nft = |rules: &str| {
        let mut nft = Command::new("nft");
        nft.arg(rules);
        let output = wire.at_b(&nft).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    nft("add table inet lossy; \
         add chain inet lossy inward { type filter hook input priority 0; policy drop; }");
    page.wait_for("lost segments", |status| {
        let now = retransmits(status);
        now.len() == 2 && now.iter().zip(&before).all(|(now, before)| now > before)
    });
    nft("delete table inet lossy");
    let metrics = page.get("/metrics");
    for lane in ["1", "2"] {
        let name = "dunlin_migration_lane_retransmits_total{vm=\"vm\"";
        let count = value(&metrics, name, &format!("lane=\"{lane}\""));
        assert!(count > Some(0.0), "lane {lane}: {metrics}");
    }
    let mut set = words("vm set --name vm --rate none --control");
    set.arg(&source.control);
    support::succeed(set);
    migration.wait_for("moved");
}

/// A process that waits for a VM reports when its certificate expires, also after it has loaded
/// another certificate.
#[test]
fn a_process_that_waits_for_a_vm_reports_when_its_identity_expires() {
    let hosts = Hosts::new();
    let destination = hosts.receive("b", "to", "");
    let page = Page::start(&destination.control);
    let of = "kind=\"vm\",name=\"\"";
    wait_for_days(&page, of, 1.0);
    assert_eq!(page.status()["identities"][0]["kind"], "vm");
    // A waiting process has no session.
    assert_eq!(page.status()["sessions"], json!([]));

    hosts.issue("ca", "renewed", "b.test", 7);
    for file in ["cert.pem", "key.pem"] {
        let (from, to) = (hosts.scratch.join("renewed"), hosts.scratch.join("b"));
        fs::rename(from.join(file), to.join(file)).unwrap();
    }
    wait_for_days(&page, of, 1.0);
    destination.signal("HUP");
    wait_for_days(&page, of, 7.0);

    // After the VM has arrived, the process reports the VM's name.
    let source = hosts.run("from", "--guest process --memory 64M --fill-size 8M");
    let migration = hosts.begin(&source, &destination, "a", "--peer b.test");
    migration.wait_for("moved");
    wait_for_days(&page, "kind=\"vm\",name=\"vm\"", 7.0);
}

#[test]
fn a_hand_off_reports_what_became_of_its_clients_and_when_its_identity_expires() {
    if !are_here(&["openssl"]) {
        return;
    }
    let scene = accept::Scene::new();
    let control = scene.path("control");
    let accept = scene.start(&format!("--control {}", control.display()));
    let page = Page::start(&control);
    let at = &accept.address;
    wait_for_days(&page, &format!("kind=\"handoff\",name=\"{at}\""), 1.0);
    let count = |name: &str, labels: &str| value(&page.get("/metrics"), name, labels);
    let of = format!("at=\"{at}\"");
    assert_eq!(count("dunlin_handoff_forwarded_total{", &of), Some(0.0));
    assert_eq!(count("dunlin_handoff_refused_total{", &of), None);

    // A client that speaks no TLS is refused.
    let mut stranger = TcpStream::connect(at).unwrap();
    stranger.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    page.wait_for("a refused client", |status| {
        status["handoffs"][0]["refused"]["malformed"] == 1
    });
    // A client that asks for another name is forwarded.
    let _other = scene.client(at, "other.test", "");
    page.wait_for("a forwarded client", |status| {
        status["handoffs"][0]["forwarded"] == 1
    });
    // A client that asks for the hand-off's name is handed over, or is refused if the kernel has no
    // TLS.
    let mut own = scene.client(at, "own.test", "");
    scene.delivers(&accept, &mut own);
    let (counter, key) = match kernel_has_tls() {
        true => ("handed_over", "own.test"),
        false => ("refused", "kernel"),
    };
    page.wait_for(counter, |status| status["handoffs"][0][counter][key] == 1);
    assert_eq!(count("dunlin_handoff_forwarded_total{", &of), Some(1.0));
    let fault = format!("{of},fault=\"malformed\"");
    assert_eq!(count("dunlin_handoff_refused_total{", &fault), Some(1.0));

    // After a reload, the page shows the date of the new certificate.
    scene.hosts.issue("ca", "renewed", "own.test", 7);
    for file in ["cert.pem", "key.pem"] {
        fs::rename(
            scene.path("renewed").join(file),
            scene.path("own").join(file),
        )
        .unwrap();
    }
    kill(accept.process.child.id(), "HUP");
    wait_for_days(&page, &format!("kind=\"handoff\",name=\"{at}\""), 7.0);
}

/// Without `--control` a hand-off creates no file.
#[test]
fn a_hand_off_reports_nothing_unasked() {
    let scene = accept::Scene::new();
    let control = scene.path("control");
    let mut command = scene.command("127.0.0.1:0", "--else tcp:127.0.0.1:9");
    command.env("RUNTIME_DIRECTORY", &control);
    let process = Process::start(command);
    process.wait_for("listening on ");
    assert!(!control.exists());
}
