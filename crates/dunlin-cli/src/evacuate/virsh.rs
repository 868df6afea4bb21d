//! Runs virsh. Its arguments are passed as a vector, never through a shell. VMs are named by UUID.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use dunlin_linux::signals::unblock_in;

use crate::text::clean;

/// The bytes that are kept of each output. The rest is read and dropped.
const OUTPUT_LIMIT: u64 = 4 << 20;

/// Time limit for a query. libvirt itself waits up to 30 s for a domain's lock.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(40);

/// Maximum number of characters that are reported of an error.
const ERROR_LIMIT: usize = 400;

/// Runs virsh for one libvirt.
#[derive(Clone, Debug)]
pub(super) struct Virsh {
    pub(super) uri: String,
}

/// A program that has ended.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) is_ok: bool,
    pub(super) out: String,
    err: String,
}

impl Answer {
    /// libvirt's reason, on one line.
    pub(super) fn reason(&self) -> String {
        let lines = self.err.lines().map(|line| line.trim());
        let lines = lines.filter(|line| !line.is_empty());
        let lines: Vec<&str> = lines
            .map(|line| line.strip_prefix("error: ").unwrap_or(line))
            .collect();
        let text: String = lines.join("; ").chars().take(ERROR_LIMIT).collect();
        match text.is_empty() {
            true => "virsh gave no reason".into(),
            false => text,
        }
    }
}

/// A program that runs.
#[derive(Debug)]
pub(super) struct Running {
    child: Child,
    outputs: Receiver<(bool, Vec<u8>)>,
}

impl Running {
    /// Waits for the end of the program; kills it at the deadline.
    pub(super) fn wait(mut self, deadline: Option<Instant>) -> Result<Answer> {
        let mut texts = [String::new(), String::new()];
        for _ in 0..texts.len() {
            let output = match deadline {
                None => self.outputs.recv().ok(),
                Some(at) => {
                    let left = at.saturating_duration_since(Instant::now());
                    self.outputs.recv_timeout(left).ok()
                }
            };
            let Some((is_error, bytes)) = output else {
                let _ = self.child.kill();
                let _ = self.child.wait();
                bail!("virsh did not end in time, and was killed");
            };
            texts[usize::from(is_error)] = String::from_utf8_lossy(&bytes).into_owned();
        }
        let status = self.child.wait().context("cannot wait for virsh")?;
        let [out, err] = texts;
        Ok(Answer {
            is_ok: status.success(),
            out,
            err,
        })
    }
}

impl Virsh {
    pub(super) fn new(uri: &str) -> Self {
        Self { uri: uri.into() }
    }

    /// Starts virsh with these words, in a process group of its own: an interrupt from the terminal
    /// must not reach it, because virsh would cancel the migration.
    pub(super) fn start(&self, words: &[&str]) -> Result<Running> {
        let mut command = Command::new("virsh");
        command
            .args(["-c", &self.uri])
            .args(words)
            .env("LC_ALL", "C")
            .env_remove("VIRSH_DEBUG")
            .env_remove("VIRSH_LOG_FILE");
        spawn(command).context("cannot run virsh: install libvirt's clients")
    }

    /// Runs virsh until it ends.
    pub(super) fn call(&self, words: &[&str]) -> Result<Answer> {
        self.start(words)?.wait(Some(Instant::now() + ANSWER_LIMIT))
    }

    /// The output of a command that must succeed.
    pub(super) fn ask(&self, words: &[&str]) -> Result<String> {
        let answer = self.call(words)?;
        match answer.is_ok {
            true => Ok(answer.out),
            false => Err(anyhow!("{}: {}", self.uri, clean(&answer.reason()))),
        }
    }

    /// Runs several commands over one connection and returns the output of each. The output of a
    /// failed command is empty. The commands consist of words without quotes and semicolons.
    pub(super) fn batch(&self, commands: &[String]) -> Result<Vec<String>> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        let line: Vec<String> = commands
            .iter()
            .map(|command| format!("{command}; echo {END}"))
            .collect();
        let answer = self.call(&[&line.join("; ")])?;
        let blocks = split(&answer.out);
        match blocks.len() == commands.len() {
            true => Ok(blocks),
            false => Err(anyhow!("{}: {}", self.uri, clean(&answer.reason()))),
        }
    }
}

/// The line after the output of each command of a batch. No output contains this line: a line that
/// shows a domain's name begins with other words, and a name has no line breaks. Do not use
/// `--quiet`, because it makes virsh print this line without a line break.
const END: &str = "dunlin-end-of-output";

/// Starts a program with bounded outputs and no signal blocked.
fn spawn(mut command: Command) -> io::Result<Running> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    unblock_in(&mut command);
    let mut child = command.spawn()?;
    let (sender, outputs) = channel();
    if let Some(out) = child.stdout.take() {
        let sender = sender.clone();
        thread::spawn(move || sender.send((false, bounded(out))));
    }
    if let Some(err) = child.stderr.take() {
        thread::spawn(move || sender.send((true, bounded(err))));
    }
    Ok(Running { child, outputs })
}

fn split(out: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block = String::new();
    for line in out.lines() {
        if line == END {
            blocks.push(std::mem::take(&mut block));
        } else {
            block.push_str(line);
            block.push('\n');
        }
    }
    blocks
}

fn bounded(mut stream: impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let _ = stream.by_ref().take(OUTPUT_LIMIT).read_to_end(&mut kept);
    let _ = io::copy(&mut stream, &mut io::sink());
    kept
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        spawn(command).unwrap()
    }

    /// No test can make virsh hang, print without end, or fail without a reason, so a shell takes
    /// the place of virsh.
    #[test]
    fn i7_a_program_is_bounded_in_time_and_in_output() {
        let soon = Instant::now() + Duration::from_millis(200);
        assert!(shell("sleep 60").wait(Some(soon)).is_err());
        assert!(soon.elapsed() < Duration::from_secs(30));
        let long = shell("head -c 5000000 /dev/zero").wait(None).unwrap();
        assert_eq!(long.out.len() as u64, OUTPUT_LIMIT);
        let failed = shell("echo 'error: a' >&2; echo >&2; echo 'error: b' >&2; exit 1");
        let failed = failed.wait(None).unwrap();
        assert_eq!((failed.is_ok, &*failed.reason()), (false, "a; b"));
        assert!(!shell("false").wait(None).unwrap().reason().is_empty());
    }

    #[test]
    fn outputs_of_a_batch_are_separated() {
        let out = format!("a\nb\n{END}\n{END}\nName: {END}\n{END}\nrest\n");
        assert_eq!(split(&out), ["a\nb\n", "", &*format!("Name: {END}\n")]);
    }
}
