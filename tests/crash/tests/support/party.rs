//! A process of a run.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A process that says nothing for so long is stuck: no limit of a run is near
/// it.
const STUCK: Duration = Duration::from_secs(40);

/// Killed when it is dropped, stopped or not.
pub struct Party {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// Everything that it has said and that was looked at.
    pub said: Vec<String>,
}

impl Party {
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_party"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            stdin,
            lines,
            said: Vec::new(),
        }
    }

    /// The rest of the next line that begins with `start`; an error where one
    /// that begins with `unless` comes first, or nothing does.
    pub fn until(&mut self, start: &str, unless: Option<&str>) -> Result<String, String> {
        let until = Instant::now() + STUCK;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => return Err(self.story("is stuck", start)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.story("has ended", start)),
            };
            self.said.push(line.clone());
            if let Some(rest) = line.strip_prefix(start) {
                return Ok(rest.trim_start().to_owned());
            }
            if unless.is_some_and(|unless| line.starts_with(unless)) {
                return Err(self.story("has gone another way", start));
            }
        }
    }

    fn story(&self, what: &str, start: &str) -> String {
        format!("it {what} before {start:?}: {:#?}", self.said)
    }

    pub fn tell(&mut self, line: &str) {
        // One that has been killed hears nothing.
        let _ = writeln!(self.stdin, "{line}");
    }

    /// Tells it, and returns what it answers after `start`.
    pub fn ask(&mut self, line: &str, start: &str) -> Result<String, String> {
        self.tell(line);
        self.until(start, None)
    }

    /// SIGKILL; it is gone on return.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGSTOP; it stands still on return.
    pub fn stop(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.child.id());
        let stands = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            let after_name = stat.rsplit_once(')').unwrap().1;
            after_name.trim_start().starts_with('T')
        };
        let until = Instant::now() + STUCK;
        while !stands() {
            assert!(Instant::now() < until, "it does not stop");
            std::thread::yield_now();
        }
    }

    pub fn go_on(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let mut kill = Command::new("kill");
        kill.args([format!("-{name}"), self.child.id().to_string()]);
        assert!(kill.status().unwrap().success(), "no kill: {name}");
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
