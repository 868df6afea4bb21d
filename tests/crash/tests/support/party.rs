//! One process of a run, as the test controls it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A process that has not printed an awaited line after this time is stuck.
const STUCK: Duration = Duration::from_secs(40);
/// How often [`Party::reaches`] checks whether the other process has ended.
const GLANCE: Duration = Duration::from_millis(100);
/// How long a process can take to report a step after the end of the other process.
const LATE: Duration = Duration::from_secs(5);

/// A process of a run. Dropping this kills the process, even if it is stopped.
pub struct Party {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// Lines that have arrived but have not been processed.
    pending: VecDeque<String>,
    /// All lines that have been processed.
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
            pending: VecDeque::new(),
            said: Vec::new(),
        }
    }

    /// Waits for the next line that begins with `start`, and returns the rest of it. Fails if the
    /// process ends or is stuck.
    pub fn until(&mut self, start: &str) -> Result<String, String> {
        let until = Instant::now() + STUCK;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Some(line) = self.next(left, start)? else {
                return Err(self.story("is stuck", start));
            };
            if let Some(rest) = line.strip_prefix(start) {
                return Ok(rest.trim_start().to_owned());
            }
        }
    }

    /// Waits until the process prints `line`. Fails if the process ends without printing it, is
    /// stuck, or does not print it within [`LATE`] after `other` has ended.
    pub fn reaches(&mut self, line: &str, other: &mut Self) -> Result<(), String> {
        let mut until = Instant::now() + STUCK;
        let mut alone = false;
        while Instant::now() < until {
            match self.next(GLANCE, line)? {
                Some(said) if said == line => return Ok(()),
                Some(said) if said.starts_with("ended") => {
                    return Err(self.story("took another path and ended", line));
                }
                Some(_) => {}
                None if !alone && other.has_ended() => {
                    alone = true;
                    until = until.min(Instant::now() + LATE);
                }
                None => {}
            }
        }
        let what = if alone {
            "took another path"
        } else {
            "is stuck"
        };
        Err(self.story(what, line))
    }

    /// Whether the process has reported its end. Lines that have arrived stay pending.
    fn has_ended(&mut self) -> bool {
        self.pending.extend(self.lines.try_iter());
        self.pending.iter().any(|line| line.starts_with("ended"))
    }

    fn next(&mut self, wait: Duration, start: &str) -> Result<Option<String>, String> {
        let line = match self.pending.pop_front() {
            Some(line) => line,
            None => match self.lines.recv_timeout(wait) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => return Err(self.story("died", start)),
            },
        };
        self.said.push(line.clone());
        Ok(Some(line))
    }

    fn story(&self, what: &str, start: &str) -> String {
        format!(
            "the process {what} before it printed {start:?}: {:#?}",
            self.said
        )
    }

    pub fn tell(&mut self, line: &str) {
        // Ignore an error: the process may have been killed.
        let _ = writeln!(self.stdin, "{line}");
    }

    /// Sends `line`; returns the rest of the answer that begins with `start`.
    pub fn ask(&mut self, line: &str, start: &str) -> Result<String, String> {
        self.tell(line);
        self.until(start)
    }

    /// Kills the process with SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops the process with SIGSTOP. When this returns, the process is stopped.
    pub fn stop(&self) {
        self.signal("STOP");
        let stat = format!("/proc/{}/stat", self.child.id());
        let is_stopped = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            let after_name = stat.rsplit_once(')').unwrap().1;
            after_name.trim_start().starts_with('T')
        };
        let until = Instant::now() + STUCK;
        while !is_stopped() {
            assert!(Instant::now() < until, "the process does not stop");
            std::thread::yield_now();
        }
    }

    pub fn go_on(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        // Use the shell's builtin, because a minimal Debian has no program `kill`.
        let line = format!("kill -s {name} {}", self.child.id());
        let killed = Command::new("sh").args(["-c", &line]).status();
        assert!(killed.unwrap().success(), "cannot send SIG{name}");
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
