//! A process of a run.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A process that says nothing for so long is stuck: no limit of a run is near
/// it.
const STUCK: Duration = Duration::from_secs(40);
/// How often a process that is waited for is compared with the other one.
const GLANCE: Duration = Duration::from_millis(100);
/// How long after the other one's end a step may still come.
const LATE: Duration = Duration::from_secs(5);

/// Killed when it is dropped, stopped or not.
pub struct Party {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    /// What has come and was not looked at.
    pending: VecDeque<String>,
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
            pending: VecDeque::new(),
            said: Vec::new(),
        }
    }

    /// The rest of the next line that begins with `start`; an error where
    /// nothing comes.
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

    /// Waits until it says `line`. An error where it ends without, or where
    /// `other` has ended and it does not come any more.
    pub fn reaches(&mut self, line: &str, other: &mut Self) -> Result<(), String> {
        let mut until = Instant::now() + STUCK;
        let mut alone = false;
        while Instant::now() < until {
            match self.next(GLANCE, line)? {
                Some(said) if said == line => return Ok(()),
                Some(said) if said.starts_with("ended") => {
                    return Err(self.story("has gone another way", line));
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
            "was led another way"
        } else {
            "is stuck"
        };
        Err(self.story(what, line))
    }

    /// Whether it has said so, without taking that from who waits for it.
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
                Err(RecvTimeoutError::Disconnected) => return Err(self.story("has gone", start)),
            },
        };
        self.said.push(line.clone());
        Ok(Some(line))
    }

    fn story(&self, what: &str, start: &str) -> String {
        format!("it {what} before {start:?}: {:#?}", self.said)
    }

    pub fn tell(&mut self, line: &str) {
        // Fails if the process has been killed.
        let _ = writeln!(self.stdin, "{line}");
    }

    /// Tells it, and returns what it answers after `start`.
    pub fn ask(&mut self, line: &str, start: &str) -> Result<String, String> {
        self.tell(line);
        self.until(start)
    }

    /// SIGKILL; it is gone on return.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGSTOP; the process is stopped when this returns.
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
            assert!(Instant::now() < until, "it does not stop");
            std::thread::yield_now();
        }
    }

    pub fn go_on(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        // The shell's own: a bare Debian has no other.
        let line = format!("kill -s {name} {}", self.child.id());
        let killed = Command::new("sh").args(["-c", &line]).status();
        assert!(killed.unwrap().success(), "no kill: {name}");
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
