//! Tunnels as processes, and plain sockets in place of hypervisors.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;

use dunlin_test_base::sockets::{accepted, with_timeout};

use super::support::process::{Log, exit_code};
use super::support::{Hosts, kill, words};

/// A tunnel's process, killed on drop.
pub struct Tunnel {
    pub child: Child,
    pub address: String,
    pub log: Log,
    pub config: PathBuf,
}

impl Tunnel {
    pub fn start(hosts: &Hosts, name: &str, config: &str) -> Self {
        let file = hosts.scratch.join(format!("{name}.toml"));
        fs::write(&file, config).unwrap();
        let mut command = words("tunnel run --config");
        command.arg(&file).arg("--control").arg(control(hosts));
        Self::follow(command, file)
    }

    /// Starts a command that already has all its arguments.
    pub fn follow(mut command: Command, file: PathBuf) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut first).unwrap();
        let log = Log::of([Box::new(child.stderr.take().unwrap()), Box::new(stdout)]);
        let address = first.trim().strip_prefix("listening on ");
        let address = address.unwrap_or_else(|| panic!("{first:?}, {:?}", log.wait_for("")));
        Self {
            address: address.to_owned(),
            child,
            log,
            config: file,
        }
    }

    pub fn signal(&self, name: &str) {
        assert!(kill(self.child.id(), name), "cannot send SIG{name}");
    }

    /// Waits for a log line that contains `words`.
    pub fn wait_for(&self, words: &str) -> String {
        self.log.wait_for(words)
    }

    pub fn code(mut self) -> Option<i32> {
        exit_code(&mut self.child)
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            self.log.print(&self.config.display().to_string());
        }
    }
}

/// Directory of the control sockets of these hosts' tunnels.
pub fn control(hosts: &Hosts) -> PathBuf {
    hosts.scratch.join("control")
}

pub fn listen(path: PathBuf) -> UnixListener {
    UnixListener::bind(path).unwrap()
}

pub fn connect(path: PathBuf) -> UnixStream {
    with_timeout(UnixStream::connect(path).unwrap())
}

/// Two hosts with tunnels, and one route from `in` to `out`.
pub struct Scene {
    pub hosts: Hosts,
    pub near: Tunnel,
    pub far: Tunnel,
    pub target: UnixListener,
}

impl Scene {
    pub fn new() -> Self {
        let hosts = Hosts::new();
        let target = listen(hosts.scratch.join("out"));
        let far = Tunnel::start(&hosts, "far", &far_config(&hosts, "a.test"));
        let near = Tunnel::start(
            &hosts,
            "near",
            &near_config(&hosts, &far.address, "ram", "in"),
        );
        Self {
            hosts,
            near,
            far,
            target,
        }
    }

    pub fn channel(&self) -> (UnixStream, UnixStream) {
        let near = connect(self.hosts.scratch.join("in"));
        (near, accepted(&self.target))
    }
}

pub fn far_config(hosts: &Hosts, allowed: &str) -> String {
    format!(
        "listen = \"127.0.0.1:0\"\nidentity = {:?}\ndrain = \"2s\"\n\
         [route.ram]\ntarget = \"unix:{}\"\nallow = [{allowed:?}]\n",
        hosts.scratch.join("b"),
        hosts.scratch.join("out").display(),
    )
}

pub fn near_config(hosts: &Hosts, to: &str, route: &str, socket: &str) -> String {
    format!(
        "listen = \"127.0.0.1:0\"\nidentity = {:?}\ndrain = \"2s\"\n\
         [route.{route}]\nlisten = \"unix:{}\"\nto = {to:?}\npeers = [\"b.test\"]\nlanes = 2\n",
        hosts.scratch.join("a"),
        hosts.scratch.join(socket).display(),
    )
}

/// Sends bytes in both directions, and then ends both directions.
pub fn exchange(mut near: UnixStream, mut far: UnixStream) {
    let sent: Vec<u8> = (0..8_u32 << 20).map(|at| (at % 251) as u8).collect();
    let all = sent.clone();
    let mut out = near.try_clone().unwrap();
    let sender = thread::spawn(move || {
        out.write_all(&all).unwrap();
        out.shutdown(Shutdown::Write).unwrap();
    });
    let mut came = Vec::new();
    far.read_to_end(&mut came).unwrap();
    sender.join().unwrap();
    assert!(came == sent);
    far.write_all(b"thanks").unwrap();
    drop(far);
    let mut answer = String::new();
    near.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "thanks");
}
