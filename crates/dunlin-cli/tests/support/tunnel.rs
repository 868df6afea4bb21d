//! Tunnels as processes, and plain sockets in place of hypervisors.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::support::{Hosts, kill, words};

/// Longer than anything that a test waits for.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A tunnel's process, killed on drop.
pub struct Tunnel {
    pub child: Child,
    pub address: String,
    pub log: Receiver<String>,
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

    /// Starts a complete command.
    pub fn follow(mut command: Command, file: PathBuf) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, log) = channel();
        let said = BufReader::new(child.stderr.take().unwrap());
        let out = sender.clone();
        thread::spawn(move || {
            said.lines()
                .map_while(Result::ok)
                .all(|line| out.send(line).is_ok())
        });
        let mut first = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut first).unwrap();
        thread::spawn(move || {
            stdout
                .lines()
                .map_while(Result::ok)
                .all(|line| sender.send(line).is_ok())
        });
        let address = first.trim().strip_prefix("listening on ");
        let address = address.unwrap_or_else(|| panic!("{first:?}, {:?}", log.recv()));
        Self {
            address: address.to_owned(),
            child,
            log,
            config: file,
        }
    }

    pub fn signal(&self, name: &str) {
        assert!(kill(self.child.id(), name), "no kill: {name}");
    }

    /// Waits for a log line.
    pub fn wait_for(&self, words: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        let mut seen = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.log.recv_timeout(left) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no {words:?} in {seen:#?}"),
            }
        }
    }

    pub fn code(mut self) -> Option<i32> {
        let until = Instant::now() + TIMEOUT;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("it does not end")
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Directory of the control sockets of these hosts' tunnels.
pub fn control(hosts: &Hosts) -> PathBuf {
    hosts.scratch.join("control")
}

pub fn listen(path: PathBuf) -> UnixListener {
    UnixListener::bind(path).unwrap()
}

pub fn with_timeout(stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    stream
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
        (near, with_timeout(self.target.accept().unwrap().0))
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
