//! The status page: in headless Chromium (only in the soak), and without a browser.
#![allow(clippy::unwrap_used)]

#[path = "support/status.rs"]
mod status;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use serde_json::{Value, json};
use status::{Fakes, Page, migrating};
use support::process::Process;
use support::{Hosts, Scratch, words};

fn is_soak() -> bool {
    let is = std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1");
    if !is {
        println!("left to the soak, which has a browser");
    }
    is
}

/// The document of the page after some samples, and what the browser logged.
fn browsed(scratch: &Path, address: &str, flags: &[&str]) -> (String, String) {
    let profile = Scratch::new();
    let mut browser = Command::new("chromium");
    browser
        // The tests run as root, for which Chromium has no sandbox.
        .args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
        ])
        .args([
            "--virtual-time-budget=6000",
            "--timeout=30000",
            "--dump-dom",
        ])
        .arg(format!(
            "--user-data-dir={}",
            profile.join("profile").display()
        ))
        .args(flags)
        .arg(address)
        .current_dir(scratch);
    let done = browser.output().expect("cannot run chromium");
    assert!(done.status.success(), "{done:?}");
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(done.stdout), text(done.stderr))
}

#[test]
fn a_browser_shows_the_page_and_reports_no_violation() {
    if !is_soak() {
        return;
    }
    let hosts = Hosts::new();
    let source = hosts.run("from", "--guest process --memory 64M --fill-size 32M");
    let destination = hosts.receive("b", "to", "");
    let history = source.control.join("history");
    let hostile = "<img src=x onerror=document.title='owned'>";
    let downtime = json!({"guest_ms": 9.0, "total_ms": 9.0, "pause_ms": 1.0, "last_pages_ms": 4.0,
        "state_ms": 2.0, "ready_ms": 1.5, "resume_ms": 0.5});
    let entry = json!({"ended_ms": 1_700_000_000_000_u64, "role": "source", "vm": hostile,
        "peer": hostile, "result": "moved", "total_s": 2.0, "wire_bytes": 5, "downtime": downtime});
    fs::write(history.join("001700000000000-1.json"), entry.to_string()).unwrap();
    let failed = json!({"ended_ms": 1_700_000_000_001_u64, "role": "source", "vm": "late",
        "peer": "b.test", "result": "failed", "fault": "lane-lost", "text": hostile, "total_s": 2.0});
    fs::write(history.join("001700000000001-1.json"), failed.to_string()).unwrap();
    let migration = hosts.begin(&source, &destination, "a", "--peer b.test --rate 2M");
    migration.wait_for("progress");

    let mut command = words("serve-status --cpu-limit 100 --listen 127.0.0.1:0 --control");
    command.arg(&source.control);
    let process = Process::start(command);
    let line = process.wait_for("listening on http://");
    let address = line.trim_start_matches("listening on ").to_owned();
    for flags in [
        &["--window-size=1400,1000"][..],
        &[
            "--window-size=360,740",
            "--force-dark-mode",
            "--force-prefers-reduced-motion",
        ],
    ] {
        let (dom, log) = browsed(hosts.scratch.path(), &address, flags);
        for violation in ["Content Security Policy", "Uncaught", "TrustedHTML"] {
            assert!(!log.contains(violation), "{log}");
        }
        assert!(dom.contains("<h3>vm</h3>"), "{dom}");
        assert!(dom.contains("to 127.0.0.1:"), "{dom}");
        assert!(dom.contains("lane 1"), "{dom}");
        // The curve and its alternative for screen readers.
        assert!(dom.contains("aria-label=\"Rate: now "), "{dom}");
        assert!(dom.contains(": pause 1.0 ms, last pages 4.0 ms"), "{dom}");
        // Texts that a pointer shows as tooltips are also in the document, for keyboards and phones.
        assert!(
            dom.contains("failed: lane-lost</span></summary>&lt;img"),
            "{dom}"
        );
        assert!(dom.contains("<span class=\"hide\">: "), "{dom}");
        // Names from peers are inserted as text.
        assert!(!dom.contains("<img"), "{dom}");
        assert!(dom.contains("&lt;img src=x"), "{dom}");
        assert!(!dom.contains("<title>owned"), "{dom}");
    }
    migration.signal("INT");
}

/// A request for an unknown host name that resolves to this host does not get the status. A script
/// in a page of another site cannot read the status.
///
/// Claim H20 of docs/security.
#[test]
fn a_browser_gives_no_other_site_the_status() {
    if !is_soak() {
        return;
    }
    let scratch = Scratch::new();
    let mut command = words("serve-status --cpu-limit 100 --listen 127.0.0.1:0 --control");
    command.arg(scratch.path());
    let process = Process::start(command);
    let line = process.wait_for("listening on http://");
    let (_, port) = line.trim_end_matches('/').rsplit_once(':').unwrap();
    let resolve = "--host-resolver-rules=MAP evil.example 127.0.0.1";
    let address = format!("http://evil.example:{port}/");
    let (dom, _) = browsed(scratch.path(), &address, &[resolve]);
    assert!(dom.contains("unknown host name"), "{dom}");
    assert!(!dom.contains("<h1>"), "{dom}");

    // A page of another origin, which writes into its document what it could read.
    let hostile = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = hostile.local_addr().unwrap();
    let script = format!(
        "const seen = document.getElementById('seen');\n\
         for (const mode of ['cors', 'no-cors', 'same-origin'])\n\
         fetch('http://127.0.0.1:{port}/status.json', {{mode}}).then(async (answer) => {{\n\
         seen.append(mode + ' read ' + (await answer.text()).length + '; '); }},\n\
         () => seen.append(mode + ' refused; '));"
    );
    let page = format!("<!doctype html><p id=\"seen\"></p><script>{script}</script>");
    thread::spawn(move || {
        for stream in hostile.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.read(&mut [0; 4096]);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n";
            let _ = write!(stream, "{head}Content-Length: {}\r\n\r\n{page}", page.len());
        }
    });
    let (dom, _) = browsed(scratch.path(), &format!("http://{own}/"), &[]);
    for mode in ["cors", "no-cors", "same-origin"] {
        assert!(dom.contains(&format!("{mode} refused; ")), "{dom}");
        assert!(!dom.contains(&format!("{mode} read ")), "{dom}");
    }
}

#[test]
fn i8_a_browser_shows_the_most_urgent_of_a_thousand_migrations() {
    if !is_soak() {
        return;
    }
    let scratch = Scratch::new();
    let _fakes = Fakes::start(scratch.path(), 1000, migrating);
    let mut command = words("serve-status --cpu-limit 100 --listen 127.0.0.1:0 --control");
    command.arg(scratch.path());
    let process = Process::start(command);
    let line = process.wait_for("listening on http://");
    let address = line.trim_start_matches("listening on ");
    let (dom, log) = browsed(scratch.path(), address, &["--window-size=1400,1000"]);
    assert_eq!(dom.matches("<h3>vm ").count(), 40, "{dom}");
    assert!(dom.contains("and 960 more"), "{dom}");
    assert!(dom.contains("1000 / 0"), "{dom}");
    for violation in ["Content Security Policy", "Uncaught", "TrustedHTML"] {
        assert!(!log.contains(violation), "{log}");
    }
}

/// The contrast ratio of two colours, by the formula of WCAG 2.2. Each is `#rgb` or `#rrggbb`.
fn contrast(one: &str, other: &str) -> f64 {
    let luminance = |colour: &str| {
        let digits = colour.trim_start_matches('#');
        let width = digits.len() / 3;
        let channel = |at: usize| {
            let digits = digits[at * width..][..width].repeat(3 - width);
            let value = f64::from(u8::from_str_radix(&digits, 16).unwrap()) / 255.0;
            match value <= 0.04045 {
                true => value / 12.92,
                false => ((value + 0.055) / 1.055).powf(2.4),
            }
        };
        0.2126 * channel(0) + 0.7152 * channel(1) + 0.0722 * channel(2)
    };
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

/// The ratios that WCAG 2.2 requires at level AA: 4.5 for text, 3 for curves and bars.
#[test]
fn colours_have_contrast_in_light_and_dark() {
    let scratch = Scratch::new();
    let html = Page::start(scratch.path()).get("/");
    let themes: Vec<_> = html.split(":root {").skip(1).collect();
    assert_eq!(themes.len(), 2, "not one theme for light and one for dark");
    for theme in themes {
        let colour = |name: &str| {
            let (_, rest) = theme.split_once(&format!("--{name}: ")).unwrap();
            rest.split(';').next().unwrap()
        };
        for (fore, backs) in [
            ("text", "ground card faint warn-fill bad-fill"),
            ("soft", "ground card warn-fill bad-fill"),
            ("sent", "ground"),
            ("good", "card"),
            ("warn", "warn-fill"),
            ("bad", "bad-fill card"),
        ] {
            for back in backs.split(' ') {
                let ratio = contrast(colour(fore), colour(back));
                assert!(ratio >= 4.5, "{fore} on {back}: {ratio}");
            }
        }
        for fore in ["sent", "received", "dirty", "p1", "p2", "p3", "p4", "p5"] {
            for back in ["card", "faint"] {
                let ratio = contrast(colour(fore), colour(back));
                assert!(ratio >= 3.0, "{fore} on {back}: {ratio}");
            }
        }
    }
}

/// Checks, without a browser, that the page contains what a browser needs.
#[test]
fn the_page_is_one_file_with_text_for_every_part() {
    let scratch = Scratch::new();
    let page = Page::start(scratch.path());
    let html = page.get("/");
    for part in [
        "<html lang=\"en\">",
        "name=\"viewport\"",
        "aria-live=\"polite\"",
        "prefers-color-scheme: dark",
        "prefers-reduced-motion",
        "scope: \"col\"",
        ":focus-visible",
    ] {
        assert!(html.contains(part), "{part}");
    }
    // Each section is labelled by its heading.
    let labels = html.split("aria-labelledby=\"").skip(1);
    let labels: Vec<_> = labels.map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(labels.len() >= 6, "{labels:?}");
    for label in labels {
        assert!(html.contains(&format!("<h2 id=\"{label}\">")), "{label}");
    }
    // Every element that the script looks up is there.
    let looked_up = html.split("byId(\"").skip(1);
    for id in looked_up.map(|rest| rest.split('"').next().unwrap()) {
        assert!(html.contains(&format!("id=\"{id}\"")), "{id}");
    }
    let status: Value = page.status();
    for key in [
        "host",
        "sessions",
        "tunnels",
        "ipsec",
        "handoffs",
        "identities",
        "silent",
        "history",
        "taken_ms",
        "version",
    ] {
        assert!(!status[key].is_null(), "{key}");
        assert!(html.contains(key), "{key}");
    }
}
