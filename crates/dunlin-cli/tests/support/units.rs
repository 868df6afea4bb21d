//! The units in `dist/systemd`, checked with systemd's own tool.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{Done, Scratch, finish};

/// The limit of each service's exposure level (systemd-analyze(1)), multiplied by ten. The first
/// two services have most of their level because they use the network. The last two run as root,
/// with CAP_NET_ADMIN.
const EXPOSURE: [(&str, u32); 5] = [
    ("dunlin-tunnel.service", 16),
    ("dunlin-accept.service", 15),
    ("dunlin-status.service", 11),
    ("dunlin-redirect.service", 20),
    ("dunlin-redirect-watch.service", 19),
];

/// Copies of the shipped units that start the program of this build.
pub struct Units(Scratch);

impl Units {
    pub fn new() -> Self {
        let scratch = Scratch::new();
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/systemd");
        let mut count = 0;
        for unit in fs::read_dir(shipped).unwrap() {
            let unit = unit.unwrap();
            let text = fs::read_to_string(unit.path()).unwrap();
            let text = text.replace(
                "/usr/bin/dunlin ",
                concat!(env!("CARGO_BIN_EXE_dunlin"), " "),
            );
            let name = unit.file_name().into_string().unwrap();
            fs::write(scratch.join(&name), text).unwrap();
            count += 1;
        }
        assert_eq!(count, 10);
        Self(scratch)
    }

    /// The lines of a unit or of a file that is installed with the units.
    pub fn lines(&self, name: &str) -> Vec<String> {
        self.text(name).lines().map(Into::into).collect()
    }

    /// Adds a drop-in to the copy of a unit.
    pub fn add(&self, unit: &str, drop_in: &str) {
        let folder = self.path(&format!("{unit}.d"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("test.conf"), drop_in).unwrap();
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Asserts that the units load and have no unknown settings.
    pub fn verify(&self, names: &[&str]) {
        let paths: Vec<_> = names.iter().map(|name| self.path(name)).collect();
        if let Some(done) = analyze(&["verify", "--man=no"], &paths) {
            let done = done.expect(0);
            // systemd-analyze reports unknown settings only as warnings.
            assert_eq!(done.err, "", "{done:?}");
        }
    }

    /// Asserts that a service stays below its exposure limit.
    pub fn weigh(&self, name: &str) {
        let limit = EXPOSURE.iter().find(|(service, _)| *service == name);
        let limit = format!("--threshold={}", limit.unwrap().1);
        let service = [self.path(name)];
        if let Some(done) = analyze(&["security", "--offline=true", &limit], &service) {
            let done = done.expect(0);
            assert!(done.out.contains("Overall exposure level"), "{done:?}");
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

/// Runs `systemd-analyze` without a running service manager. Returns `None` if it is not installed,
/// which is a failure in CI.
fn analyze(arguments: &[&str], units: &[PathBuf]) -> Option<Done> {
    let mut command = Command::new("systemd-analyze");
    command.args(arguments).args(units);
    let mut found = Command::new("systemd-analyze");
    if let Err(error) = found.arg("--version").stdout(Stdio::null()).status() {
        let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
        assert!(
            !ci,
            "CI must have systemd-analyze (package systemd): {error}"
        );
        println!("skipped, no systemd-analyze (package systemd): {error}");
        return None;
    }
    Some(finish(command))
}
