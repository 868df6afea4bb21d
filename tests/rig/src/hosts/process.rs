//! Whose a host is, and the end of those whose maker has ended.

use std::fs;
use std::process::Command;

use super::ip;

/// A process, told from a later one with the same number by the time of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Maker {
    id: u32,
    /// In clock ticks since the machine started (proc_pid_stat(5), field 22).
    started: u64,
}

impl Maker {
    pub(super) fn this_process() -> Self {
        let id = std::process::id();
        Self {
            id,
            started: started(id).unwrap_or_default(),
        }
    }

    /// With this the names of its namespaces begin.
    pub(super) fn prefix(self) -> String {
        format!("dunlin-rig-{}-{}", self.id, self.started)
    }

    /// The reverse, for a whole name; none for names that are not ours.
    fn of(namespace: &str) -> Option<Self> {
        let mut parts = namespace.strip_prefix("dunlin-rig-")?.split('-');
        let maker = Self {
            id: parts.next()?.parse().ok()?,
            started: parts.next()?.parse().ok()?,
        };
        // The number of the host and its name.
        parts.next()?.parse::<u32>().ok()?;
        parts.next().map(|_| maker)
    }

    fn lives(self) -> bool {
        started(self.id) == Some(self.started)
    }
}

fn started(id: u32) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The second field is the program's name in brackets, which may hold blanks and brackets.
    let (_, rest) = line.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Removes the hosts that were made by processes which are gone, with everything that still runs in
/// them, and says which these were. Hosts of living processes and namespaces of others stay.
pub fn sweep() -> Vec<String> {
    let names: Vec<String> = fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| Maker::of(name).is_some_and(|maker| !maker.lives()))
        .collect();
    for name in &names {
        remove(name);
    }
    names
}

/// Ends what runs in a namespace and removes it.
pub(super) fn remove(namespace: &str) {
    kill_inside(namespace);
    // It may be gone already: another process may sweep at the same time.
    let _ = ip(&["netns", "delete", namespace]);
}

/// Ends every process of a namespace that is ours, exactly these.
fn kill_inside(namespace: &str) {
    let Ok(list) = ip(&["netns", "pids", namespace]) else {
        return;
    };
    let own = std::process::id().to_string();
    let ids = list.split_whitespace().filter(|id| *id != own);
    let mut kill = Command::new("sh");
    kill.args(["-c", "kill -KILL \"$@\" 2>/dev/null", "sh"]);
    let named = kill.get_args().len();
    kill.args(ids);
    if kill.get_args().len() > named {
        // Those that ended meanwhile make it fail.
        let _ = kill.output();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_name_tells_its_maker_and_foreign_names_tell_none() {
        let this = Maker::this_process();
        assert!(this.lives());
        assert_eq!(
            Maker::of(&format!("{}-0-source", this.prefix())),
            Some(this)
        );
        let later = Maker {
            started: this.started + 1,
            ..this
        };
        assert!(!later.lives());
        for foreign in [
            "dunlin-rig",
            "dunlin-rig-1-2",
            "dunlin-rig-1-2-3",
            "dunlin-rig-1-x-3-source",
            "other-1-2-3-source",
        ] {
            assert_eq!(Maker::of(foreign), None, "{foreign}");
        }
    }
}
