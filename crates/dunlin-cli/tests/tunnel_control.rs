//! Requests to a running tunnel: status, on-demand listeners, and a command's input and output as a
//! channel.
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::unread_bytes;
use dunlin_test_base::sockets::{ReadOnce as _, TIMEOUT, accepted, with_timeout};
use serde_json::Value;
use support::process::exit_code;
use support::{Done, Hosts, fault_in, finish, words};
use tunnel::{Tunnel, connect, control, listen};

/// Two hosts: *near* has on-demand routes, *far* has a target for each VM, a fixed target and
/// a program as target.
struct Scene {
    hosts: Hosts,
    near: Tunnel,
    far: Tunnel,
}

impl Scene {
    fn new() -> Self {
        let hosts = Hosts::new();
        let at = |name: &str| hosts.scratch.join(name);
        let allow = "allow = [\"a.test\"]";
        let far = format!(
            "listen = \"127.0.0.1:0\"\nidentity = {:?}\ndrain = \"1s\"\n\
             [route.ram]\ntarget = \"unix:{}\"\n{allow}\n\
             [route.plain]\ntarget = \"unix:{}\"\n{allow}\n\
             [route.echo]\nexec = [\"/bin/cat\"]\n{allow}\n",
            at("b"),
            at("{vm}.sock").display(),
            at("plain.sock").display(),
        );
        let far = Tunnel::start(&hosts, "far", &far);
        let route = |name: &str| {
            let to = &far.address;
            format!("[route.{name}]\nto = {to:?}\npeers = [\"b.test\"]\nlanes = 2\n")
        };
        let near = format!(
            "listen = \"127.0.0.1:0\"\nidentity = {:?}\ndrain = \"1s\"\n{}{}{}",
            at("a"),
            route("ram"),
            route("plain"),
            route("echo"),
        );
        let near = Tunnel::start(&hosts, "near", &near);
        Self { hosts, near, far }
    }

    fn target(&self, name: &str) -> UnixListener {
        listen(self.hosts.scratch.join(name))
    }

    /// A request to the near tunnel.
    fn ask(&self, line: &str) -> Command {
        let mut command = words(&format!("tunnel {line}"));
        command.arg("--config").arg(&self.near.config);
        command.arg("--control").arg(control(&self.hosts));
        command
    }

    fn asked(&self, line: &str) -> Done {
        finish(self.ask(line))
    }

    /// Runs `tunnel open --wait`, a process that opens a listener and waits until the listener
    /// ends.
    fn open(&self, line: &str) -> Waiting {
        let mut command = self.ask(&format!("open {line} --wait"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut printed = String::new();
        out.read_line(&mut printed).unwrap();
        let path = printed.trim().strip_prefix("unix:");
        let path = path.unwrap_or_else(|| panic!("{printed:?}")).into();
        Waiting { child, path }
    }

    /// `dunlin status` for these hosts.
    fn look(&self, flags: &str) -> Done {
        let mut command = words(&format!("status {flags} --state-dir"));
        command.arg(self.hosts.scratch.join("state"));
        command.arg("--control").arg(control(&self.hosts));
        finish(command).expect(0)
    }

    /// A tunnel's status; retries if the tunnel was too slow to answer.
    fn status(&self, name: &str) -> Value {
        let until = Instant::now() + TIMEOUT;
        loop {
            let mut lines = self.look("--json").lines().into_iter();
            if let Some(line) = lines.find(|line| line["name"] == name) {
                return line;
            }
            assert!(Instant::now() < until, "the tunnel does not answer");
        }
    }
}

/// A `tunnel open --wait` that has printed its address.
struct Waiting {
    child: Child,
    path: PathBuf,
}

impl Waiting {
    /// Waits until the process ends; returns its exit code and its errors.
    fn end(mut self) -> (i32, String) {
        let code = exit_code(&mut self.child).unwrap();
        let mut said = String::new();
        let mut err = self.child.stderr.take().unwrap();
        err.read_to_string(&mut said).unwrap();
        (code, said)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

#[test]
fn a_listener_for_one_vm_ends_with_its_migration_and_reports_the_result() {
    let scene = Scene::new();
    let web = scene.target("web.sock");
    let waiting = scene.open("ram --param vm=web --lanes 3");
    // The default address is next to the control socket.
    assert!(
        waiting.path.starts_with(control(&scene.hosts)),
        "{:?}",
        waiting.path
    );
    let mut near = connect(waiting.path.clone());
    let mut far = accepted(&web);
    near.write_all(b"pages").unwrap();
    far.read_exact(&mut [0; 5]).unwrap();

    let status = scene.status("near");
    let listener = &status["listeners"][0];
    assert_eq!(listener["parameter"], "vm=web", "{status:#}");
    assert_eq!(listener["channels"], 1, "{status:#}");
    let routes = status["routes"].as_array().unwrap();
    let ram = routes.iter().find(|route| route["route"] == "ram").unwrap();
    assert_eq!(ram["read_bytes"], 5, "{status:#}");
    assert_eq!(ram["channels"], 1, "{status:#}");
    let over_ms = status["over_ms"].as_f64().unwrap();
    assert!(over_ms >= 250.0, "{status:#}");
    let peer = &status["peers"][0];
    assert!(
        peer["peer"].as_str().unwrap().contains("b.test"),
        "{status:#}"
    );
    assert_eq!(peer["channels"], 1, "{status:#}");
    assert!(peer["lanes"].as_u64().unwrap() >= 1, "{status:#}");

    // The text output.
    for part in [
        "tunnel near: process ",
        "route ram, to 127.0.0.1:",
        "1 channel, 0 ended, 0 of them failed",
        "route ram for vm=web: 1 channel",
        "peer DNS b.test",
        "tunnel far: process ",
        "{vm}.sock: 1 channel,",
    ] {
        wait_until(part, || scene.look("").out.contains(part));
    }

    let path = waiting.path.clone();
    drop((near, far));
    assert_eq!(waiting.end(), (0, String::new()));
    assert!(!is_there(&path));
    scene.far.signal("TERM");
    assert_eq!(scene.far.code(), Some(0));
}

#[test]
fn a_listener_at_a_given_address_fails_with_a_reason() {
    let scene = Scene::new();
    let plain = scene.target("plain.sock");
    let place = scene.hosts.scratch.join("mine");
    let line = format!("plain --listen unix:{}", place.display());
    let waiting = scene.open(&line);
    assert_eq!(waiting.path, place);
    // The target closes its connection while bytes are unread.
    let mut near = connect(place.clone());
    let far = accepted(&plain);
    near.write_all(b"x").unwrap();
    // The close discards these bytes, so the channel is aborted instead of ended.
    wait_until("unread bytes", || unread_bytes(&far).unwrap() > 0);
    drop(far);
    while near.write_all(b"more").is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
    drop(near);
    let (code, said) = waiting.end();
    assert_eq!((code, fault_in(&said)), (1, "channel-broken"), "{said}");

    // A listener with an unreachable target reports why.
    let waiting = scene.open("ram --param vm=absent");
    let mut near = connect(waiting.path.clone());
    assert!(!matches!(near.read_once(&mut [0]), Ok(1..)));
    let (code, said) = waiting.end();
    assert_eq!((code, fault_in(&said)), (1, "target-unreachable"), "{said}");
    assert!(said.contains("absent.sock"), "{said}");
}

#[test]
fn a_listener_is_closed_by_number_or_by_address() {
    let scene = Scene::new();
    let waiting = scene.open("plain");
    let number = scene.status("near")["listeners"][0]["number"].to_string();
    scene.asked(&format!("close {number}")).expect(0);
    let path = waiting.path.clone();
    let (code, said) = waiting.end();
    assert_eq!((code, fault_in(&said)), (4, "cancelled"), "{said}");
    assert!(!is_there(&path));

    let opened = scene.asked("open plain --json").expect(0);
    let place = opened.lines()[0]["listen"].as_str().unwrap().to_owned();
    scene.asked(&format!("close {place}")).expect(0);
    wait_until("the listener stays", || {
        scene.status("near")["listeners"] == Value::Array(Vec::new())
    });
    let gone = scene.asked(&format!("close {place}")).expect(1);
    assert!(gone.err.contains(&place), "{gone:?}");
}

#[test]
fn i7_invalid_requests_are_refused_with_a_reason() {
    let scene = Scene::new();
    for (line, code, word) in [
        ("open none", 1, "[unknown-route]"),
        ("open ram --param web", 2, "NAME=VALUE"),
        ("open ram --param vm=../x", 2, "letters, digits"),
        ("open ram --param vm=", 2, "letters, digits"),
        ("open ram --lanes 0", 2, "1..=128"),
        ("open ram --listen /no/kind", 1, "unix:PATH"),
        ("open ram --listen unix:/none/here", 1, "[kernel]"),
        ("close 99", 1, " 99"),
    ] {
        let done = scene.asked(line).expect(code);
        assert!(done.err.contains(word), "{line}: {done:?}");
    }
    // Send invalid requests directly to the control socket, to bypass the command's own checks.
    let socket = control(&scene.hosts).join("tunnels/near.sock");
    for request in [
        r#"{"do":"open","route":"ram","parameter":"vm=../x","once":false,"wait":false}"#,
        r#"{"do":"open","route":"ram","parameter":"vm=a\u0000b","once":false,"wait":false}"#,
        r#"{"do":"open","route":"ram","lanes":0,"once":false,"wait":false}"#,
        r#"{"do":"open","route":"ram","listen":"unix:x","once":false,"wait":false}"#,
        r#"{"do":"sing"}"#,
        "no JSON",
    ] {
        let mut asking = connect(socket.clone());
        writeln!(asking, "{request}").unwrap();
        let mut answer = String::new();
        asking.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("\"failed\""), "{request}: {answer}");
    }
    assert_eq!(scene.status("near")["listeners"], Value::Array(Vec::new()));
}

#[test]
fn the_control_socket_is_private_and_is_removed_with_the_tunnel() {
    let scene = Scene::new();
    let socket = control(&scene.hosts).join("tunnels/near.sock");
    let mode = fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // With two tunnels, the command must name one of them.
    let mut unnamed = words("tunnel open plain --control");
    unnamed.arg(control(&scene.hosts));
    let unnamed = finish(unnamed).expect(1);
    for name in ["near.sock", "far.sock"] {
        assert!(unnamed.err.contains(name), "{unnamed:?}");
    }
    // A second tunnel with the same name is refused.
    let mut second = words("tunnel run --config");
    second
        .arg(&scene.near.config)
        .arg("--control")
        .arg(control(&scene.hosts));
    let second = finish(second).expect(1);
    assert!(second.err.contains("near.sock"), "{second:?}");

    let waiting = scene.open("plain");
    scene.near.signal("TERM");
    // A waiting client gets the failure.
    assert_eq!(waiting.end().0, 4);
    assert_eq!(scene.near.code(), Some(0));
    assert!(!is_there(&socket));
    assert!(!is_there(&socket.with_extension("d")));
}

/// A child with pipes for input and output.
struct Piped(Child);

impl Piped {
    fn start(scene: &Scene, line: &str) -> Self {
        let mut command = scene.ask(&format!("stdio {line}"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Returns all of the process's output, up to its end.
    fn output(&mut self) -> String {
        let mut out = self.0.stdout.take().unwrap();
        let (ended, output) = channel();
        thread::spawn(move || {
            let mut text = String::new();
            out.read_to_string(&mut text).unwrap();
            ended.send(text)
        });
        output.recv_timeout(TIMEOUT).unwrap()
    }

    fn end(mut self) -> (i32, String) {
        let code = exit_code(&mut self.0).unwrap();
        let mut said = String::new();
        let mut err = self.0.stderr.take().unwrap();
        err.read_to_string(&mut said).unwrap();
        (code, said)
    }
}

impl Drop for Piped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn standard_input_and_output_are_a_channel_with_both_ends() {
    let scene = Scene::new();
    let web = scene.target("web.sock");
    let mut piped = Piped::start(&scene, "ram --param vm=web");
    let mut far = accepted(&web);
    // The target ends its direction first, so the output of the command ends. The input continues.
    far.write_all(b"hello").unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    assert_eq!(piped.output(), "hello");
    let mut input = piped.0.stdin.take().unwrap();
    let sent: Vec<u8> = (0..3_u32 << 20).map(|at| (at % 251) as u8).collect();
    let all = sent.clone();
    let sending = thread::spawn(move || input.write_all(&all).unwrap());
    let mut came = Vec::new();
    far.read_to_end(&mut came).unwrap();
    sending.join().unwrap();
    assert!(came == sent);
    drop(far);
    assert_eq!(piped.end(), (0, String::new()));

    // Now the input ends first.
    let mut piped = Piped::start(&scene, "echo");
    let mut input = piped.0.stdin.take().unwrap();
    input.write_all(b"and back").unwrap();
    drop(input);
    assert_eq!(piped.output(), "and back");
    assert_eq!(piped.end(), (0, String::new()));
    assert_eq!(scene.status("near")["listeners"], Value::Array(Vec::new()));
}

/// `tunnel stdio` forwards incomplete lines immediately, and does not buffer them.
#[test]
fn a_dialogue_over_a_socket_is_not_held_back() {
    let scene = Scene::new();
    let web = scene.target("web.sock");
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut ours = with_timeout(ours);
    let mut command = scene.ask("stdio ram --param vm=web");
    command
        .stdin(Stdio::from(OwnedFd::from(theirs.try_clone().unwrap())))
        .stdout(Stdio::from(OwnedFd::from(theirs)))
        .stderr(Stdio::piped());
    let piped = Piped(command.spawn().unwrap());
    // Drop the command's copies of the socket's other end, so that only the child has it open.
    drop(command);
    let mut far = accepted(&web);
    for _ in 0..3 {
        ours.write_all(b"?").unwrap();
        far.read_exact(&mut [0]).unwrap();
        far.write_all(b"no line").unwrap();
        let mut answer = [0; 7];
        ours.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"no line");
    }
    ours.shutdown(Shutdown::Write).unwrap();
    assert_eq!(far.read_once(&mut [0]).unwrap(), 0);
    drop(far);
    assert_eq!(piped.end(), (0, String::new()));
}

/// A read error of the input must not look like the end of the input.
#[test]
fn an_input_that_cannot_be_read_is_an_error() {
    let scene = Scene::new();
    let web = scene.target("web.sock");
    let mut command = scene.ask("stdio ram --param vm=web");
    command
        .stdin(Stdio::from(fs::File::open("/").unwrap()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let piped = Piped(command.spawn().unwrap());
    drop(accepted(&web));
    let (code, said) = piped.end();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("cannot read the input"), "{said}");
}

#[test]
fn an_aborted_channel_is_an_error_of_stdio() {
    let scene = Scene::new();
    let plain = scene.target("plain.sock");
    // The channel is refused, because the target takes no parameter.
    let piped = Piped::start(&scene, "plain --param vm=web");
    let (code, said) = piped.end();
    assert_eq!((code, fault_in(&said)), (1, "parameter-refused"), "{said}");
    // The channel is aborted, because the far tunnel is killed while the input is open.
    let piped = Piped::start(&scene, "plain");
    let mut far = accepted(&plain);
    far.write_all(b"x").unwrap();
    let mut tunnel = scene.far;
    tunnel.child.kill().unwrap();
    tunnel.child.wait().unwrap();
    let (code, said) = piped.end();
    assert_eq!((code, fault_in(&said)), (1, "control-lost"), "{said}");
}

/// If a channel is refused before the tunnel has read its input, the tunnel resets the command's
/// connection. The command must report the refusal, not the reset.
#[test]
fn a_refused_channel_is_reported_even_with_unread_input() {
    let scene = Scene::new();
    for _ in 0..8 {
        let mut piped = Piped::start(&scene, "ram --param vm=none");
        // The process may end before it has read everything.
        let _ = piped.0.stdin.take().unwrap().write_all(b"hello\n");
        let (code, said) = piped.end();
        assert_eq!((code, fault_in(&said)), (1, "target-unreachable"), "{said}");
        assert!(said.contains("none.sock"), "{said}");
        assert!(!said.contains("put: "), "{said}");
    }
}

#[test]
fn an_unknown_route_is_an_object_with_json() {
    let scene = Scene::new();
    let done = scene.asked("open nowhere --json").expect(1);
    let failed = done.last();
    assert_eq!(failed["event"], "failed", "{done:?}");
    assert_eq!(failed["fault"], "unknown-route", "{done:?}");
    assert_eq!(failed["at_fault"], "configuration", "{done:?}");
    assert!(done.err.contains("nowhere"), "{done:?}");
}

/// A killed command leaves nothing open.
#[test]
fn a_killed_stdio_leaves_no_listener() {
    let scene = Scene::new();
    let plain = scene.target("plain.sock");
    let mut piped = Piped::start(&scene, "plain");
    let mut far = accepted(&plain);
    piped.0.kill().unwrap();
    assert_eq!(far.read_once(&mut [0]).unwrap(), 0);
    drop(far);
    wait_until("its listener stays", || {
        scene.status("near")["listeners"] == Value::Array(Vec::new())
    });
    // This client sends the same request as `stdio`, but disconnects without ever connecting to the
    // listener.
    let mut asking = connect(control(&scene.hosts).join("tunnels/near.sock"));
    let request = r#"{"do":"open","route":"plain","once":true,"wait":true}"#;
    writeln!(asking, "{request}").unwrap();
    let mut opened = String::new();
    BufReader::new(&asking).read_line(&mut opened).unwrap();
    let opened: Value = serde_json::from_str(&opened).unwrap();
    let path: PathBuf = opened["listen"].as_str().unwrap()["unix:".len()..].into();
    assert!(is_there(&path));
    drop(asking);
    wait_until("its listener stays", || !is_there(&path));
}

/// Checks all threads of the tunnel, including those of lanes and channels.
#[test]
fn a_tunnel_runs_on_the_cpus_that_it_is_given() {
    let scene = Scene::new();
    let first = dunlin_linux::affinity::allowed().unwrap()[0];
    let file = scene.hosts.scratch.join("kept.toml");
    fs::copy(&scene.near.config, &file).unwrap();
    let mut command = words("tunnel run --cpus");
    command.arg(first.to_string()).arg("--config").arg(&file);
    command.arg("--control").arg(control(&scene.hosts));
    let kept = Tunnel::follow(command, file.clone());
    let plain = scene.target("plain.sock");
    let mut open = words("tunnel open plain --config");
    open.arg(&file).arg("--control").arg(control(&scene.hosts));
    let place = finish(open).expect(0).out;
    let mut near = connect(place.trim()["unix:".len()..].into());
    let mut far = accepted(&plain);
    near.write_all(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    let tasks = fs::read_dir(format!("/proc/{}/task", kept.child.id())).unwrap();
    let mut threads = 0;
    for task in tasks {
        // A thread that has just ended cannot be read.
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        if let Some(list) = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        {
            assert_eq!(list.trim(), first.to_string());
            threads += 1;
        }
    }
    assert!(threads > 5, "{threads} threads");

    let mut nowhere = words("tunnel run --cpus 1023 --config");
    nowhere.arg(&file);
    let nowhere = finish(nowhere).expect(1);
    assert!(nowhere.err.contains("CPUs [1023]"), "{nowhere:?}");
}

/// Tunnels need no journal. `status` shows them even if the journal directory is broken, which
/// `status` also reports.
#[test]
fn status_shows_tunnels_despite_a_broken_journal() {
    let scene = Scene::new();
    let state = scene.hosts.scratch.join("state");
    fs::create_dir_all(&state).unwrap();
    let look = |flags: &str| {
        let mut command = words(&format!("status {flags} --state-dir"));
        command
            .arg(&state)
            .arg("--control")
            .arg(control(&scene.hosts));
        finish(command)
    };
    let show = |flags: &str, wanted: &[&str]| {
        let until = Instant::now() + TIMEOUT;
        loop {
            // Retry, because the status omits a tunnel that is too slow to answer.
            let done = look(flags);
            if wanted.iter().all(|part| done.out.contains(part)) {
                return done;
            }
            assert!(Instant::now() < until, "{done:?}");
        }
    };
    let both = ["tunnel near: process ", "tunnel far: process "];
    fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).unwrap();
    let good = show("", &both).expect(0);
    assert!(!good.err.contains("sessions"), "{good:?}");

    fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
    let shown = show("", &both).expect(1);
    assert!(shown.err.contains("755"), "{shown:?}");
    let json = show("--json", &["\"near\"", "\"far\""]).expect(1);
    let lines = json.lines();
    let failed: Vec<&Value> = lines
        .iter()
        .filter(|line| line["event"] == "failed")
        .collect();
    assert_eq!(failed.len(), 1, "{json:?}");
    assert_eq!(failed[0]["code"], 1, "{json:?}");
    assert_eq!(failed[0]["fault"], "journal", "{json:?}");
    assert!(
        failed[0]["text"].as_str().unwrap().contains("755"),
        "{json:?}"
    );
    let tunnels = lines.iter().filter(|line| line["event"] == "tunnel");
    assert_eq!(tunnels.count(), 2, "{json:?}");
}
