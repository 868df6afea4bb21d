//! Wall clocks that jump or are wrong. Deadlines use the monotonic clock. Certificates are checked
//! against the wall clock, and the messages about certificates say so.
//!
//! No clock of the host is set: libfaketime changes the wall clock of single processes.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Instant;

use crate::host::{after, assert_says, pass_on, skip};
use crate::support::{Hosts, finish, words};
use crate::{GUEST, failed, listening, migrate, receive, running, text};

/// The wall clock of one process.
struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// Returns `None` if libfaketime is missing.
    fn new(hosts: &Hosts, name: &str) -> Option<Self> {
        let libraries = fs::read_dir("/usr/lib").unwrap().map_while(Result::ok);
        let library = libraries
            .map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"))
            .find(|path| path.exists());
        let Some(library) = library else {
            skip("clocks that jump (Debian's package faketime)");
            return None;
        };
        let clock = Self {
            library,
            file: hosts.scratch.join(name),
        };
        clock.jump("+0");
        Some(clock)
    }

    /// Sets the offset from the host's clock, such as `+1d`.
    fn jump(&self, offset: &str) {
        let new = self.file.with_extension("new");
        fs::write(&new, offset).unwrap();
        // Replace the file atomically, because the process may read it at any time.
        fs::rename(new, &self.file).unwrap();
    }

    /// Wraps the command so that its process has this clock.
    fn by(&self, command: &Command) -> Command {
        let variables = [
            ("LD_PRELOAD", self.library.display().to_string()),
            ("FAKETIME_TIMESTAMP_FILE", self.file.display().to_string()),
            ("FAKETIME_NO_CACHE", "1".into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ];
        let export = variables.map(|(name, value)| format!("export {name}={value}"));
        let mut command = after(&export.join(" && "), command);
        // Lets a confined process read the file.
        command.arg("--identities").args(self.file.parent());
        command
    }
}

fn run() -> Command {
    words(&format!("vm run --name vm {GUEST}"))
}

#[test]
fn wall_clocks_that_jump_by_a_day_do_not_affect_a_migration() {
    let hosts = Hosts::new();
    let (Some(here), Some(there)) = (Clock::new(&hosts, "here"), Clock::new(&hosts, "there"))
    else {
        return;
    };
    let source = running(&hosts, here.by(&run()), "1");
    let destination = listening(&hosts, there.by(&receive(&hosts, "")), "2");
    let flags = "--peer b.test --rate 16M --verify --time-limit 1h";
    let began = Instant::now();
    let client = hosts.begin(&source, &destination, "a", flags);
    client.wait_for("lane-up");
    for (ours, theirs) in [
        ("+1d", "-1d"),
        ("-1d", "+1d"),
        ("+400d", "+0"),
        ("+0", "-1d"),
    ] {
        here.jump(ours);
        there.jump(theirs);
        client.wait_for("progress");
        client.wait_for("progress");
    }
    // The reported states do not depend on the times in the journals.
    let mut status = words("status --json --state-dir");
    status.arg(hosts.scratch.join("state"));
    let sessions = finish(status).expect(0).lines();
    assert_eq!(sessions.len(), 2, "{sessions:?}");
    for session in &sessions {
        assert_eq!(session["process"], "lives", "{session}");
        let phase = session["phase"].as_str().unwrap();
        assert!(["migrating", "prepared"].contains(&phase), "{session}");
    }
    let (code, moved) = client.ended();
    assert_eq!((code, &moved["event"]), (0, &"moved".into()), "{moved}");
    assert_eq!(moved["digests_equal"], true);
    let took = began.elapsed().as_secs_f64();
    let reported = moved["total_s"].as_f64().unwrap();
    assert!(
        (0.0..=took).contains(&reported),
        "{reported} s reported, {took} s passed"
    );
    destination.wait_for("received");
    hosts.assert_runs(&destination);
}

#[test]
fn a_clock_that_goes_back_by_a_day_delays_no_deadline() {
    let hosts = Hosts::new();
    let Some(clock) = Clock::new(&hosts, "clock") else {
        return;
    };
    let source = running(&hosts, clock.by(&run()), "1");
    // A destination that accepts the connection and does not answer.
    let mut destination = hosts.receive("b", "2", "");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    destination.address = silent.local_addr().unwrap().to_string();
    let began = Instant::now();
    let going_back = thread::spawn(move || {
        let held = silent.accept().unwrap();
        clock.jump("-1d");
        held
    });
    let done = migrate(&hosts, &source, &destination, "");
    let took = began.elapsed();
    drop(going_back.join().unwrap());
    failed(&hosts, &source, done, "control-lost", "network");
    assert!((9..20).contains(&took.as_secs()), "{took:?}");
}

#[test]
fn clocks_that_count_from_another_start_do_not_affect_a_migration() {
    // Simulate hosts that were started at different times, and so have different monotonic clocks.
    let days_ahead = |command: &Command| {
        let mut unshare = Command::new("unshare");
        // unshare remains the parent. If unshare is killed, the process is killed too.
        unshare.args(["--fork", "--kill-child", "--time"]);
        unshare.args(["--monotonic", "8640000", "--boottime", "8640000"]);
        pass_on(&mut unshare, command);
        unshare
    };
    let mut uptime = Command::new("cat");
    uptime.arg("/proc/uptime");
    let tried = finish(days_ahead(&uptime));
    if tried.code != 0 {
        return skip(&format!("no time namespaces, which need root: {tried:?}"));
    }
    let ahead: f64 = tried.out.split('.').next().unwrap().parse().unwrap();
    assert!(ahead > 8_640_000.0, "{tried:?}");
    for (source_ahead, destination_ahead) in [(true, false), (false, true)] {
        let hosts = Hosts::new();
        let on = |ahead: bool, command: Command| if ahead { days_ahead(&command) } else { command };
        let source = running(&hosts, on(source_ahead, run()), "1");
        let command = on(destination_ahead, receive(&hosts, ""));
        let destination = listening(&hosts, command, "2");
        let began = Instant::now();
        let moved = migrate(&hosts, &source, &destination, "--verify")
            .expect(0)
            .last();
        let took = began.elapsed().as_secs_f64();
        let reported = moved["total_s"].as_f64().unwrap();
        assert!((0.0..=took).contains(&reported), "{moved}");
        let downtime = moved["downtime"]["total_ms"].as_f64().unwrap();
        assert!((0.0..1000.0 * took).contains(&downtime), "{moved}");
        destination.wait_for("received");
        hosts.assert_runs(&destination);
    }
}

#[test]
fn a_clock_that_is_wrong_is_reported_if_a_certificate_is_refused_for_its_dates() {
    let hosts = Hosts::new();
    let (Some(here), Some(there)) = (Clock::new(&hosts, "here"), Clock::new(&hosts, "there"))
    else {
        return;
    };
    // A process with a wrong clock does not start, because it rejects its own certificate.
    for (offset, says) in [("-9d", "is not valid before"), ("+9d", "expired on")] {
        there.jump(offset);
        let done = finish(there.by(&receive(&hosts, ""))).expect(1);
        assert_says(&done.err, &[says, "correct this host's clock", "cert.pem"]);
    }
    there.jump("+0");
    hosts.issue("ca", "long", "a.test", 30);
    fs::remove_dir_all(hosts.scratch.join("a")).unwrap();
    fs::rename(hosts.scratch.join("long"), hosts.scratch.join("a")).unwrap();
    let source = running(&hosts, here.by(&run()), "1");
    let destination = listening(&hosts, there.by(&receive(&hosts, "")), "2");
    for (ours, theirs) in [
        // The source has a wrong clock and refuses the destination's valid certificate.
        ("+9d", "+0"),
        // The destination has a wrong clock. It refuses the source's certificate, and sends an
        // alert.
        ("+0", "+90d"),
        ("+0", "-9d"),
    ] {
        here.jump(ours);
        there.jump(theirs);
        let done = migrate(&hosts, &source, &destination, "");
        let said = failed(&hosts, &source, done, "certificate-date", "configuration");
        assert_says(&said, &["Compare `date` on both hosts"]);
        let rejected = destination.wait_for("rejected");
        assert_says(&text(&rejected), &["certificate", "clock"]);
    }
    here.jump("+0");
    there.jump("+0");
    migrate(&hosts, &source, &destination, "--verify").expect(0);
}
