//! Whose a thing is that outlasts its process: the name of everything such holds its maker.

use std::fs;
use std::process::Command;

/// A process, told from a later one with the same number by the time of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Maker {
    id: u32,
    /// In clock ticks since the machine started (proc_pid_stat(5), field 22).
    started: u64,
}

impl Maker {
    pub(crate) fn this_process() -> Self {
        Self::process(std::process::id()).expect("a process sees itself in /proc")
    }

    /// A living process.
    pub(crate) fn process(id: u32) -> Option<Self> {
        let started = started(id)?;
        Some(Self { id, started })
    }

    /// With this the names of what it made begin; a dash, a number and what else there is to say
    /// come after it.
    pub(crate) fn prefix(self) -> String {
        format!("dunlin-rig-{}-{}", self.id, self.started)
    }

    /// The reverse, for a whole name; none for names that are not ours.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("dunlin-rig-")?.split('-');
        let maker = Self {
            id: parts.next()?.parse().ok()?,
            started: parts.next()?.parse().ok()?,
        };
        parts.next()?.parse::<u32>().ok().map(|_| maker)
    }

    pub(crate) fn lives(self) -> bool {
        started(self.id) == Some(self.started)
    }

    /// Ends it, unless it has ended.
    pub(crate) fn kill(self) {
        if self.lives() {
            kill([self.id.to_string().as_str()]);
        }
    }
}

/// Ends processes; those that have ended meanwhile are passed over.
pub(crate) fn kill<'a>(ids: impl IntoIterator<Item = &'a str>) {
    for id in ids {
        let _ = Command::new("sh")
            .args(["-c", "kill -KILL \"$1\"", "sh", id])
            .output();
    }
}

fn started(id: u32) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The second field is the program's name in brackets, which may hold blanks and brackets.
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
            "dunlin-rig",
            "dunlin-rig-1-2",
            "dunlin-rig-1-x-3-source",
            "dunlin-rig-1-2-source",
            "other-1-2-3-source",
        ] {
            assert_eq!(Maker::of(foreign), None, "{foreign}");
        }
    }
}
