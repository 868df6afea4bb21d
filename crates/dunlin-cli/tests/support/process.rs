//! Any program as a process that is killed on drop, and its output.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::kill;

/// Longer than anything that a test waits for.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The lines of a process, from several outputs.
pub struct Log(Receiver<String>);

impl Log {
    pub fn of(outputs: [Box<dyn Read + Send>; 2]) -> Self {
        let (sender, lines) = channel();
        for output in outputs {
            let sender = sender.clone();
            thread::spawn(move || {
                BufReader::new(output)
                    .lines()
                    .map_while(Result::ok)
                    .all(|line| sender.send(line).is_ok())
            });
        }
        Self(lines)
    }

    /// Waits for a line that contains `words`.
    pub fn wait_for(&self, words: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        let mut seen = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no {words:?} in {seen:#?}"),
            }
        }
    }

    /// Prints the lines that no `wait_for` has read. Never panics, so that a `drop` can call it
    /// after a failed assertion.
    pub fn print(&self, name: &str) {
        while let Ok(line) = self.0.recv_timeout(Duration::from_secs(1)) {
            println!("{name}: {line}");
        }
    }

    /// Returns the lines that no `wait_for` has read. Waits until the process has closed its
    /// outputs.
    pub fn rest(&self) -> Vec<String> {
        let until = Instant::now() + TIMEOUT;
        let mut lines = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.0.recv_timeout(left) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Disconnected) => return lines,
                Err(RecvTimeoutError::Timeout) => panic!("the process does not end: {lines:#?}"),
            }
        }
    }
}

/// Waits until the child ends by itself; returns its exit code, or `None` after a signal.
pub fn exit_code(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < until, "{child:?} does not end");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A program that is killed on drop, and its output.
pub struct Process {
    pub child: Child,
    log: Log,
}

impl Process {
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Log::of([
            Box::new(child.stdout.take().unwrap()),
            Box::new(child.stderr.take().unwrap()),
        ]);
        Self { child, log }
    }

    /// Starts stunnel, and returns its port. The configuration must have `accept = 127.0.0.1:0` and
    /// the log level `info`.
    pub fn stunnel(config: &Path) -> (Self, u16) {
        let mut command = Command::new("stunnel4");
        command.arg(config);
        let process = Self::start(command);
        let line = process.wait_for(" bound to 127.0.0.1:");
        let port = line.rsplit_once(':').unwrap().1.parse().unwrap();
        (process, port)
    }

    /// Waits for a line that contains `words`.
    pub fn wait_for(&self, words: &str) -> String {
        self.log.wait_for(words)
    }

    /// See [`Log::rest`].
    pub fn rest(&self) -> Vec<String> {
        self.log.rest()
    }

    pub fn say(&mut self, text: &str) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(text.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: &str) {
        assert!(kill(self.child.id(), signal));
    }

    pub fn code(&mut self) -> Option<i32> {
        exit_code(&mut self.child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
