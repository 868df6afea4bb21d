//! `dunlin serve-status` as a process, and a client that sends any bytes.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

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
    /// Serves the processes below `control`.
    pub fn start(control: &Path) -> Self {
        let socket = control.join("http.sock");
        let mut command = words("serve-status --confine yes --control");
        command.arg(control).arg("--listen");
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

    /// The body of a path.
    pub fn get(&self, path: &str) -> String {
        let (code, body) = self.send(request("GET", path, "localhost").as_bytes());
        assert_eq!(code, 200, "{path}: {body}");
        body
    }

    pub fn status(&self) -> Value {
        serde_json::from_str(&self.get("/status.json")).unwrap()
    }

    /// Waits until the status fits; returns it.
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
