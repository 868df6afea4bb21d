//! Migrations of Cloud Hypervisor in `cargo xtask bench whole`, with the binary that
//! `CLOUD_HYPERVISOR` names.
//!
//! This module controls the program over HTTP on a unix socket, as its own tool `ch-remote` does.
//! The program's events and its guest's serial line arrive on standard error and standard output.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dunlin_bench::process;
use dunlin_rig::guest::{Line, Workload, bare_image};
use dunlin_test_base::Scratch;
use serde_json::{Value, json};

use super::whole::{self, Moved};

/// The limit for every wait.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The interval between checks for the API socket of a new process, and for the end of the
/// source's process.
const PERIOD: Duration = Duration::from_millis(5);

/// The program, if `CLOUD_HYPERVISOR` names one.
pub(super) fn program() -> Option<OsString> {
    env::var_os("CLOUD_HYPERVISOR").filter(|name| !name.is_empty())
}

/// A running process and what it prints.
struct Process {
    child: Child,
    api: PathBuf,
    lines: Receiver<(Instant, String)>,
}

impl Process {
    fn start(program: &OsString, scratch: &Path, name: &str, options: &[&str]) -> Result<Self> {
        let api = scratch.join(name);
        let mut child = Command::new(program)
            .arg("--api-socket")
            .arg(&api)
            // Events go to standard error.
            .args(["--event-monitor", "fd=2"])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.to_string_lossy()))?;
        let (sender, lines) = channel();
        let streams: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().context("no standard output")?),
            Box::new(child.stderr.take().context("no standard error")?),
        ];
        for stream in streams {
            let sender = sender.clone();
            thread::spawn(move || {
                let mut stream = BufReader::new(stream);
                let mut line = Vec::new();
                while matches!(stream.read_until(b'\n', &mut line), Ok(count) if count > 0) {
                    let text = String::from_utf8_lossy(&line).trim().to_owned();
                    if sender.send((Instant::now(), text)).is_err() {
                        break;
                    }
                    line.clear();
                }
            });
        }
        Ok(Self { child, api, lines })
    }

    /// Waits for a line that `wanted` accepts; returns when it arrived.
    fn wait(&self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<Instant> {
        let deadline = Instant::now() + TIMEOUT;
        let mut said = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((when, line)) = self.lines.recv_timeout(left) else {
                bail!(
                    "Cloud Hypervisor: no {what}; it printed:\n{}",
                    said.join("\n")
                );
            };
            if wanted(&line) {
                return Ok(when);
            }
            said.push(line);
        }
    }

    /// Waits for an event, a pretty-printed JSON object with the name on a separate line.
    fn wait_event(&self, name: &str) -> Result<Instant> {
        let line = format!("\"event\": \"{name}\"");
        self.wait(name, |text| text.trim_end_matches(',') == line)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a request on a new connection. Waits for the socket if the process has just started.
fn request(api: &Path, action: &str, body: &Value) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = loop {
        match UnixStream::connect(api) {
            Ok(stream) => break stream,
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused
                ) && Instant::now() < deadline =>
            {
                thread::sleep(PERIOD);
            }
            Err(error) => return Err(error).context("cannot reach Cloud Hypervisor"),
        }
    };
    let body = body.to_string();
    write!(
        stream,
        "PUT /api/v1/{action} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut status = String::new();
    BufReader::new(&stream).read_line(&mut status)?;
    ensure!(
        status
            .split(' ')
            .nth(1)
            .is_some_and(|code| code.starts_with('2')),
        "Cloud Hypervisor refused {action}: {}",
        status.trim()
    );
    Ok(())
}

/// Whether a process has ended and is not reaped yet, so that its CPU times can still be read.
fn has_ended(id: u32) -> Result<bool> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat"))?;
    Ok(stat
        .rsplit_once(')')
        .is_some_and(|(_, fields)| fields.trim_start().starts_with('Z')))
}

/// Starts a guest and migrates it once. `content` is a file with the memory of a guest that writes
/// no pages.
pub(super) fn migrate(
    workload: &Workload,
    content: Option<&Path>,
    connections: u8,
    tls: Option<&Path>,
) -> Result<Moved> {
    let program = &program().context("CLOUD_HYPERVISOR names no binary")?;
    let scratch = Scratch::try_new().context("cannot create a scratch folder")?;
    let image = scratch.join("bare.elf");
    fs::write(&image, bare_image(workload)).context("cannot write the guest's image")?;
    let image = image.to_string_lossy();
    let memory = format!("size={}M", workload.memory_mib);
    let mut options = vec!["--kernel", &image, "--memory", &memory];
    options.extend(["--cpus", "boot=1", "--serial", "tty", "--console", "off"]);
    let content = content.map(Path::to_string_lossy);
    if let Some(content) = &content {
        options.extend(["--initramfs", content]);
    }
    let source = Process::start(program, scratch.path(), "source", &options)?;
    source.wait("ready guest", |line| {
        matches!(Line::parse(line), Some(Line::Ready { .. }))
    })?;
    let destination = Process::start(program, scratch.path(), "destination", &[])?;
    let ids = [source.child.id(), destination.child.id()];
    let cpu = || {
        ids.iter()
            .map(|&id| process::cpu_s(id))
            .sum::<Result<f64>>()
    };
    // The port is free until Cloud Hypervisor listens there, unless another program takes it in the
    // meantime; in that case Cloud Hypervisor reports that and this turn fails.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let with_tls = |mut body: Value| {
        if let Some(folder) = tls {
            body["tls_dir"] = folder.to_string_lossy().into();
        }
        body
    };
    whole::touch(workload)?;
    let before = cpu()?;
    thread::scope(|scope| {
        let body = with_tls(json!({ "receiver_url": format!("tcp:127.0.0.1:{port}") }));
        // The answer arrives when the migration has ended.
        let api = &destination.api;
        let received = scope.spawn(move || request(api, "vm.receive-migration", &body));
        destination.wait_event("migration-receive-ready")?;
        let begin = Instant::now();
        // Use an address instead of a name. With some versions of glibc, Cloud Hypervisor's seccomp
        // filter kills the process when it looks up a name.
        let url = format!("tcp:127.0.0.1:{port}");
        let body = with_tls(json!({ "destination_url": url, "connections": connections }));
        request(&source.api, "vm.send-migration", &body)?;
        let paused = source.wait_event("pausing")?;
        let resumed = destination.wait_event("resumed")?;
        ensure!(
            matches!(received.join(), Ok(Ok(()))),
            "the destination reports a failure"
        );
        // Wait until the source's process has ended. Its CPU times remain available until it is
        // reaped.
        let deadline = Instant::now() + TIMEOUT;
        while !has_ended(source.child.id())? {
            ensure!(
                Instant::now() < deadline,
                "the source's process does not end"
            );
            thread::sleep(PERIOD);
        }
        Ok(Moved {
            total_s: (resumed - begin).as_secs_f64(),
            cpu_s: cpu()? - before,
            downtime_ms: (resumed - paused).as_secs_f64() * 1e3,
            iterations: None,
            destination_peak_mib: process::peak_bytes(destination.child.id())? as f64
                / f64::from(1 << 20),
        })
    })
}
