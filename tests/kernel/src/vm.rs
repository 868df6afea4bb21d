//! VM processes inside the emulated machine, and options with time limits for migrations in it.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use dunlin::engine::destination;
use dunlin::engine::source::{Options, OptionsBuilder};
use serde_json::Value;

use crate::handoff::Background;
use crate::sessions::netns;

/// A VM's process, which must be fully confined by this kernel.
pub struct Vm {
    lines: Box<dyn Iterator<Item = String>>,
    _process: Background,
}

impl Vm {
    /// Starts a VM's process. The options for confinement and output are added to the command. The
    /// process may read identities below the working directory.
    ///
    /// # Panics
    /// The command does not start.
    #[must_use]
    pub fn start(command: &mut Command) -> Self {
        let mut process = command
            .args(["--confine", "yes", "--identities", ".", "--json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("dunlin is in the path");
        let out = process.stdout.take().expect("the stream is piped");
        Self {
            lines: Box::new(BufReader::new(out).lines().map_while(Result::ok)),
            _process: Background(process),
        }
    }

    /// Starts a VM's process on a host of [`crate::sessions`]. `line` contains the arguments of the
    /// command `dunlin`.
    ///
    /// # Panics
    /// The command does not start.
    #[must_use]
    pub fn start_at(host: &str, dunlin: &str, line: &str) -> Self {
        let here = env::current_dir().expect("the runner created the folder");
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut command = Command::new("ip");
        command
            .args(netns(host, &[&[dunlin], &words[..]].concat()))
            .args(["--control", &format!("run-{host}")])
            .arg("--state-dir")
            .arg(here.join(format!("state-{host}")));
        Self::start(&mut command)
    }

    /// Waits for the event `name` and returns its JSON value. The event of a complete confinement
    /// must come before it.
    ///
    /// # Panics
    /// The process ends first or is not fully confined.
    #[must_use]
    pub fn until(mut self, name: &str) -> (Self, Value) {
        let mut is_confined = false;
        for line in &mut self.lines {
            println!("{line}");
            let said: Value = serde_json::from_str(&line).expect("a JSON object");
            if said["event"] == "confined" {
                assert_eq!(said["lacks"].as_array().map(Vec::len), Some(0), "{said}");
                is_confined = true;
            }
            if said["event"] == name {
                assert!(is_confined, "{name} before the event \"confined\"");
                return (self, said);
            }
        }
        panic!("the process ended before {name}");
    }
}

/// Runs `vm migrate --json` on host a of [`crate::sessions`], and returns the command's last event.
///
/// # Panics
/// The command does not start, or prints nothing.
#[must_use]
pub fn migrate_from_a(dunlin: &str, line: &str) -> Value {
    let words: Vec<&str> = line.split_whitespace().collect();
    let said = Command::new("ip")
        .args(netns("a", &[&[dunlin], &words[..]].concat()))
        .output()
        .expect("ip starts");
    let said = String::from_utf8(said.stdout).expect("JSON");
    println!("{said}");
    let last = said.lines().last().expect("the command prints an event");
    serde_json::from_str(last).expect("a JSON object")
}

/// Returns the options of a source, with time limits for an emulated machine.
///
/// # Panics
/// The other options conflict with these limits.
#[must_use]
pub fn slowly(options: OptionsBuilder) -> Options {
    options
        .connect_limit(Duration::from_secs(20))
        .lane_stall_limit(Duration::from_secs(4))
        .no_lane_limit(Duration::from_secs(40))
        .silence_limit(Duration::from_secs(20))
        .control_limit(Duration::from_secs(40))
        .downtime_limit(Duration::from_secs(20))
        .build()
        .expect("the limits are consistent")
}

/// Returns the options of a destination, with time limits for an emulated machine.
///
/// # Panics
/// Never: the limits are consistent.
#[must_use]
pub fn unhurried() -> destination::Options {
    destination::Options::builder()
        .silence_limit(Duration::from_secs(20))
        .control_limit(Duration::from_secs(40))
        .build()
        .expect("the limits are consistent")
}
