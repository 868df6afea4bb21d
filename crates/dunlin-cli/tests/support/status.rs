//! `dunlin serve-status` as a process, and a client that sends any bytes.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::support::process::Process;
use super::support::words;

/// Longer than anything that a test waits for.
const LIMIT: Duration = Duration::from_secs(60);

/// A running `dunlin serve-status` at a unix socket.
pub struct Page {
    pub process: Process,
    pub socket: PathBuf,
    pub confined: String,
}

impl Page {
    /// Serves the status of the processes below `control`.
    ///
    /// The limit of CPU time is 100 percent, because tests run a build without optimisations.
    pub fn start(control: &Path) -> Self {
        Self::limited(control, 100)
    }

    /// Like [`Self::start`], with a limit of CPU time in percent.
    pub fn limited(control: &Path, cpu_limit: u8) -> Self {
        let socket = control.join("http.sock");
        let mut command = words("serve-status --confine yes --control");
        command
            .arg(control)
            .arg("--cpu-limit")
            .arg(cpu_limit.to_string());
        command.arg("--listen");
        command.arg(format!("unix:{}", socket.display()));
        let process = Process::start(command);
        let confined = process.wait_for("confined: ");
        Self {
            process,
            socket,
            confined,
        }
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Sends bytes; returns the code and the body of the answer.
    pub fn send(&self, bytes: &[u8]) -> (u16, String) {
        answer(self.connect(), bytes)
    }

    /// The body of the answer for a path.
    pub fn get(&self, path: &str) -> String {
        let (code, body) = self.send(request("GET", path, "localhost").as_bytes());
        assert_eq!(code, 200, "{path}: {body}");
        body
    }

    pub fn status(&self) -> Value {
        serde_json::from_str(&self.get("/status.json")).unwrap()
    }

    /// Waits until `fits` accepts the status; returns the status.
    pub fn wait_for(&self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + LIMIT;
        loop {
            let status = self.status();
            if fits(&status) {
                return status;
            }
            assert!(Instant::now() < until, "no {what} in {status:#}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

pub fn request(method: &str, path: &str, host: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

/// A connection to a unix socket or by TCP.
pub trait Stream: Read + Write {}
impl Stream for UnixStream {}
impl Stream for TcpStream {}

/// Sends bytes; returns the code and the body of the answer, or 0 if the server only closed the
/// connection.
pub fn answer(mut stream: impl Stream, bytes: &[u8]) -> (u16, String) {
    // The server may answer and close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8(text).unwrap();
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return (0, text);
    };
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    for line in ["Cache-Control: no-store", "X-Content-Type-Options: nosniff"] {
        assert!(head.lines().any(|one| one == line), "{head}");
    }
    assert!(
        head.contains("Content-Security-Policy: default-src 'none'"),
        "{head}"
    );
    assert!(!head.to_lowercase().contains("access-control"), "{head}");
    (code, body.to_owned())
}

/// Simulated processes: each writes `text` to every client of its status socket.
pub struct Fakes {
    stop: Arc<AtomicBool>,
    /// The number of clients that have connected to the status sockets.
    pub asked: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Fakes {
    pub fn start(control: &Path, count: usize, text: impl Fn(usize) -> String) -> Self {
        let directory = control.join("status");
        fs::create_dir_all(&directory).unwrap();
        let fakes: Vec<_> = (0..count)
            .map(|number| {
                let path = directory.join(format!("vm-{number}.sock"));
                let listener = UnixListener::bind(path).unwrap();
                listener.set_nonblocking(true).unwrap();
                (listener, text(number))
            })
            .collect();
        let (stop, asked) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&asked));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for (listener, text) in &fakes {
                    while let Ok((mut client, _)) = listener.accept() {
                        counted.fetch_add(1, Ordering::Relaxed);
                        // The client may be gone.
                        let _ = client.write_all(text.as_bytes());
                    }
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self {
            stop,
            asked,
            thread: Some(thread),
        }
    }
}

impl Drop for Fakes {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// The status of a VM that migrates, with a name from a hostile source.
pub fn migrating(number: usize) -> String {
    let progress = json!({"iteration": 2, "bytes_per_s": 1 << 20, "remaining_bytes": 5 << 20,
        "dirty_pages_per_s": 7, "predicted_downtime_ms": 1.5, "lanes": [[1, 100], [2, 200]]});
    let migration = json!({"role": "source", "peer": "<b>&\u{202e}", "phase": "pre-copy",
        "seconds": 3.0, "rate": null, "throttle": 0, "progress": progress});
    let name = format!("vm {number} <img src=x onerror=alert(1)>\u{1b}");
    json!({"event": "status", "name": name, "uuid": format!("{number:032x}"), "pid": number,
        "state": "running", "memory_bytes": 1, "pages_checked": 0, "beats": 0, "full_passes": 0,
        "downtime_ms": null, "largest_gap_ms": 0.0, "migration": migration})
    .to_string()
}
