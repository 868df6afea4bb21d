//! Any program as a process that is killed on drop, and its output.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::kill;

/// Longer than anything that a test waits for.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program that is killed on drop, and its output.
pub struct Process {
    pub child: Child,
    log: Receiver<String>,
}

impl Process {
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, log) = channel();
        let outputs: [Box<dyn Read + Send>; 2] = [
            Box::new(child.stdout.take().unwrap()),
            Box::new(child.stderr.take().unwrap()),
        ];
        for output in outputs {
            let sender = sender.clone();
            thread::spawn(move || {
                BufReader::new(output)
                    .lines()
                    .map_while(Result::ok)
                    .all(|line| sender.send(line).is_ok())
            });
        }
        Self { child, log }
    }

    /// Waits for a line that contains `words`.
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

    /// Output that no `wait_for` has returned.
    pub fn said(&self) -> Vec<String> {
        self.log.try_iter().collect()
    }

    pub fn say(&mut self, text: &str) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(text.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: &str) {
        assert!(kill(self.child.id(), signal));
    }

    pub fn code(&mut self) -> Option<i32> {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "it does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
