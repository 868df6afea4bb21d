//! A pseudo-terminal with a program, and what its screen shows.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Command};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// A time limit that is longer than any wait of a passing test.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the program has drawn. Attributes are ignored.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    pub lines: Vec<String>,
    /// Whether the program uses the alternate screen.
    pub alternate: bool,
    pub hides_cursor: bool,
    /// All output.
    pub output: String,
    at: (usize, usize),
    ended: bool,
}

/// A program in a terminal of its own. It is killed on drop.
pub struct Terminal {
    pub child: Child,
    keys: File,
    /// Stays open, so that the settings of the terminal can be read after the program has ended.
    end: File,
    state: Arc<(Mutex<Screen>, Condvar)>,
}

impl Terminal {
    /// Starts the program with this terminal as its controlling terminal.
    pub fn start(command: &Command, rows: u16, columns: u16) -> Self {
        Self::start_with(command, rows, columns, |_| {})
    }

    /// Like [`Terminal::start`]; `change` may redirect outputs.
    pub fn start_with(
        command: &Command,
        rows: u16,
        columns: u16,
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC);
        let master = master.unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = std::ffi::OsString::from_vec(ptsname(&master, Vec::new()).unwrap().into());
        let mut open = OpenOptions::new();
        // O_NOCTTY: this must not become the test's controlling terminal, only the program's.
        open.read(true).write(true).custom_flags(0o400);
        let end = open.open(name).unwrap();
        let keys = File::from(master);
        resize(&keys, rows, columns);
        let mut started = Command::new("setsid");
        started.arg("--ctty").arg(command.get_program());
        started.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => started.env(name, value),
                None => started.env_remove(name),
            };
        }
        started.env("TERM", "xterm");
        started.stdin(end.try_clone().unwrap());
        started.stdout(end.try_clone().unwrap());
        started.stderr(end.try_clone().unwrap());
        change(&mut started);
        let child = started.spawn().unwrap();
        drop(started);
        let state = Arc::new((Mutex::new(Screen::default()), Condvar::new()));
        let (mut output, into) = (keys.try_clone().unwrap(), Arc::clone(&state));
        // The thread ends when no process has the terminal's end open any more.
        thread::spawn(move || {
            let mut bytes = [0; 1 << 16];
            let mut kept = Vec::new();
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                kept.extend_from_slice(&bytes[..count]);
                let mut screen = into.0.lock().unwrap();
                let used = screen.take(&kept);
                kept.drain(..used);
                into.1.notify_all();
            }
            into.0.lock().unwrap().ended = true;
            into.1.notify_all();
        });
        Self {
            child,
            keys,
            end,
            state,
        }
    }

    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    pub fn resize(&self, rows: u16, columns: u16) {
        // Otherwise lines that no longer exist would keep their last content.
        self.state.0.lock().unwrap().lines.clear();
        resize(&self.keys, rows, columns);
    }

    /// Waits until `fits` accepts the screen; returns the screen.
    pub fn wait_until(&self, what: &str, fits: impl Fn(&Screen) -> bool) -> Screen {
        let until = Instant::now() + TIMEOUT;
        let mut screen: MutexGuard<'_, Screen> = self.state.0.lock().unwrap();
        while !fits(&screen) {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no {what}:\n{}", screen.lines.join("\n"));
            screen = self.state.1.wait_timeout(screen, left).unwrap().0;
        }
        screen.clone()
    }

    /// Waits until the screen has the text.
    pub fn wait_for(&self, text: &str) -> Screen {
        self.wait_until(text, |screen| screen.has(text))
    }

    /// Presses `j` until the selected line has the text.
    pub fn select(&mut self, text: &str) {
        for _ in 0..20 {
            let screen = self.wait_until("selection", |screen| screen.selected().is_some());
            let selected = screen.selected().unwrap().to_owned();
            if selected.contains(text) {
                return;
            }
            self.press("j");
            let other = |screen: &Screen| screen.selected().is_some_and(|one| one != selected);
            self.wait_until("other selection", other);
        }
        panic!("no row {text:?}");
    }

    /// Whether a shell could use the terminal: its lines are edited and echoed.
    pub fn is_restored(&self) -> bool {
        let modes = tcgetattr(&self.end).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resize(terminal: &File, rows: u16, columns: u16) {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(terminal, size).unwrap();
}

impl Screen {
    pub fn has(&self, text: &str) -> bool {
        self.lines.iter().any(|line| line.contains(text))
    }

    /// The line of the selected row.
    pub fn selected(&self) -> Option<&str> {
        let mut lines = self.lines.iter().filter(|line| line.starts_with('>'));
        lines.next().map(String::as_str)
    }

    /// Interprets complete sequences and characters; returns the number of bytes used.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let complete = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap(),
        };
        let mut rest = complete;
        while let Some(first) = rest.chars().next() {
            let used = match first {
                '\x1b' => match self.sequence(rest) {
                    Some(used) => used,
                    None => break,
                },
                '\r' => {
                    self.at.1 = 0;
                    1
                }
                '\n' => {
                    self.at.0 += 1;
                    1
                }
                character => {
                    self.put(character);
                    character.len_utf8()
                }
            };
            self.output.push_str(&rest[..used]);
            rest = &rest[used..];
        }
        complete.len() - rest.len()
    }

    /// Interprets an escape sequence; `None` if it is incomplete.
    fn sequence(&mut self, text: &str) -> Option<usize> {
        if text.len() < 2 {
            return None;
        }
        let Some(parameters) = text.strip_prefix("\x1b[") else {
            return Some(2);
        };
        let end = parameters.find(|one: char| ('@'..='~').contains(&one))?;
        let (parameters, kind) = (&parameters[..end], parameters.as_bytes()[end]);
        let mut numbers = parameters.split(';').map(|one| one.parse().unwrap_or(1));
        match (kind, parameters) {
            (b'H', _) => {
                let (row, column): (usize, usize) =
                    (numbers.next().unwrap_or(1), numbers.next().unwrap_or(1));
                self.at = (row - 1, column - 1);
            }
            (b'J', _) => self.lines.clear(),
            (b'K', _) => {
                let (row, column) = self.at;
                if let Some(line) = self.lines.get_mut(row) {
                    *line = line.chars().take(column).collect();
                }
            }
            (b'h', "?1049") => self.alternate = true,
            (b'l', "?1049") => self.alternate = false,
            (b'h', "?25") => self.hides_cursor = false,
            (b'l', "?25") => self.hides_cursor = true,
            _ => {}
        }
        Some(2 + end + 1)
    }

    fn put(&mut self, character: char) {
        let (row, column) = self.at;
        if self.lines.len() <= row {
            self.lines.resize(row + 1, String::new());
        }
        let line = &mut self.lines[row];
        let mut characters: Vec<char> = line.chars().collect();
        if characters.len() <= column {
            characters.resize(column + 1, ' ');
        }
        characters[column] = character;
        *line = characters.into_iter().collect();
        self.at.1 += 1;
    }
}
