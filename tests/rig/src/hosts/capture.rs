//! What was on a wire.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{Host, HostsError, run};

/// A running tcpdump.
#[derive(Debug)]
pub struct Capture {
    child: Child,
    file: PathBuf,
}

impl Capture {
    /// Begins to write the packets of `interface`, whole, into `file` (pcap). The interface is
    /// listened to when this returns.
    pub(super) fn start(host: &Host, interface: &str, file: &Path) -> Result<Self, HostsError> {
        let failed = |output: String| HostsError::Command {
            command: "tcpdump".to_owned(),
            output,
        };
        let mut child = host
            .command("tcpdump")
            .args(["--interface", interface, "--snapshot-length", "0"])
            .args([
                "--packet-buffered",
                "--immediate-mode",
                "--no-promiscuous-mode",
            ])
            // It would become another user, who may not write the file.
            .args(["--relinquish-privileges", "root", "-w"])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let mut messages = BufReader::new(child.stderr.take().expect("it was asked for"));
        let mut said = String::new();
        let mut line = String::new();
        while messages.read_line(&mut line).is_ok_and(|count| count > 0) {
            if line.contains("listening on") {
                // It says little more; the pipe holds that until it has ended.
                child.stderr = Some(messages.into_inner());
                return Ok(Self {
                    child,
                    file: file.to_path_buf(),
                });
            }
            said += &line;
            line.clear();
        }
        let _ = child.kill();
        let _ = child.wait();
        Err(failed(said))
    }

    /// Ends it, once everything seen so far is in the file.
    ///
    /// # Errors
    /// It had ended before.
    pub fn stop(mut self) -> Result<PathBuf, HostsError> {
        let id = self.child.id().to_string();
        run(Command::new("sh").args(["-c", "kill -INT \"$1\"", "sh", &id]))?;
        let _ = self.child.wait();
        Ok(self.file.clone())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
