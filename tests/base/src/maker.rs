//! Names for resources that may outlive the process that created them. Each name identifies that
//! process, which lets a later process check whether the maker still runs.

use std::fs;
use std::process::Command;

/// A process. The start time distinguishes it from a later process with the same ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maker {
    id: u32,
    /// The start time, in clock ticks since the host booted (proc_pid_stat(5), field 22).
    started: u64,
}

impl Maker {
    /// This process.
    ///
    /// # Panics
    /// /proc is not mounted.
    #[must_use]
    pub fn this_process() -> Self {
        Self::process(std::process::id()).expect("this process is in /proc")
    }

    /// Returns the process `id`, or `None` if it does not exist.
    #[must_use]
    pub fn process(id: u32) -> Option<Self> {
        let started = started(id)?;
        Some(Self { id, started })
    }

    /// The prefix of all names of this process. A dash, a number and any suffix follow.
    #[must_use]
    pub fn prefix(self) -> String {
        format!("dunlin-test-{}-{}", self.id, self.started)
    }

    /// The process that a complete name identifies, or `None` if the name has another form.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("dunlin-test-")?.split('-');
        let maker = Self {
            id: parts.next()?.parse().ok()?,
            started: parts.next()?.parse().ok()?,
        };
        parts.next()?.parse::<u32>().ok().map(|_| maker)
    }

    /// Whether the process still runs.
    #[must_use]
    pub fn lives(self) -> bool {
        started(self.id) == Some(self.started)
    }

    /// Kills the process if it still runs.
    pub fn kill(self) {
        if self.lives() {
            kill([self.id.to_string().as_str()]);
        }
    }
}

/// Kills processes; ignores those that have ended.
pub fn kill<'a>(ids: impl IntoIterator<Item = &'a str>) {
    for id in ids {
        let _ = Command::new("sh")
            .args(["-c", "kill -KILL \"$1\"", "sh", id])
            .output();
    }
}

fn started(id: u32) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The second field is the program's name in parentheses; it may contain spaces and parentheses.
    let (_, rest) = line.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_its_maker_and_foreign_names_tell_none() {
        let this = Maker::this_process();
        assert!(this.lives());
        for rest in ["-0", "-17-source"] {
            assert_eq!(Maker::of(&(this.prefix() + rest)), Some(this));
        }
        let later = Maker {
            started: this.started + 1,
            ..this
        };
        assert!(!later.lives());
        for foreign in [
            "dunlin-test",
            "dunlin-test-1-2",
            "dunlin-test-1-x-3-source",
            "dunlin-test-1-2-source",
            "other-1-2-3-source",
        ] {
            assert_eq!(Maker::of(foreign), None, "{foreign}");
        }
    }
}
