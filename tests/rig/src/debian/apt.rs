//! A private configuration of apt, separate from the machine's own configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{DebianError, at};
use crate::cache;

/// The private apt of one release and its backports.
#[derive(Debug)]
pub(super) struct Apt {
    directory: PathBuf,
    /// The release, and the preferred suite: the release itself or its backports.
    release: String,
    suite: String,
}

impl Apt {
    /// Writes the configuration for `suite`, "trixie" or "trixie-backports" for instance.
    pub(super) fn new(suite: &str) -> Result<Self, DebianError> {
        let release = suite.strip_suffix("-backports").unwrap_or(suite);
        let directory = cache::directory().join("debian/apt").join(release);
        for part in ["lists/partial", "cache", "state", "nothing"] {
            let folder = directory.join(part);
            fs::create_dir_all(&folder).map_err(at(&folder))?;
        }
        let apt = Self {
            directory,
            release: release.to_owned(),
            suite: suite.to_owned(),
        };
        apt.write("status", "")?;
        apt.write("sources.list", &apt.sources()?)?;
        apt.write("apt.conf", &apt.configuration()?)?;
        Ok(apt)
    }

    /// Whether package lists have been fetched before.
    pub(super) fn has_lists(&self) -> bool {
        self.directory.join("lists-fetched").exists()
    }

    /// Fetches the package lists.
    pub(super) fn refresh(&self) -> Result<(), DebianError> {
        self.fetch(
            self.command("apt-get").args([
                "update",
                "-qq",
                "--option",
                "APT::Update::Error-Mode=any",
            ]),
            &format!("the package lists of {}", self.suite),
        )?;
        self.write("lists-fetched", "")
    }

    /// The names of packages that match the regular expression `pattern`.
    pub(super) fn names(&self, pattern: &str) -> Result<Vec<String>, DebianError> {
        let found = output(
            self.command("apt-cache")
                .args(["search", "--names-only", pattern]),
        )?;
        Ok(found
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .map(str::to_owned)
            .collect())
    }

    /// Downloads the archives of the packages and all their dependencies to `folder`.
    pub(super) fn download_all(&self, names: &[&str], folder: &Path) -> Result<(), DebianError> {
        let partial = folder.join("partial");
        fs::create_dir_all(&partial).map_err(at(&partial))?;
        let archives = format!("Dir::Cache::Archives={}", folder.display());
        self.fetch(
            self.command("apt-get")
                .args(["install", "--yes", "-qq", "--download-only"])
                .args(["--no-install-recommends", "--option", &archives])
                .args(["--target-release", &self.suite])
                .args(names),
            &names.join(", "),
        )
    }

    /// Downloads only the archives of these packages to `folder`.
    pub(super) fn download_only(&self, names: &[&str], folder: &Path) -> Result<(), DebianError> {
        fs::create_dir_all(folder).map_err(at(folder))?;
        self.fetch(
            self.command("apt-get")
                .args(["download", "-qq", "--target-release", &self.suite])
                .args(names)
                .current_dir(folder),
            &names.join(", "),
        )
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("APT_CONFIG", self.directory.join("apt.conf"))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C.UTF-8");
        command
    }

    fn fetch(&self, command: &mut Command, what: &str) -> Result<(), DebianError> {
        match output(command) {
            Ok(_) => Ok(()),
            Err(DebianError::Tool { output, .. }) => Err(DebianError::Fetch {
                what: what.to_owned(),
                output,
                cache: cache::directory(),
            }),
            Err(other) => Err(other),
        }
    }

    fn write(&self, name: &str, content: &str) -> Result<(), DebianError> {
        let path = self.directory.join(name);
        fs::write(&path, content).map_err(at(&path))
    }

    /// The sources of the release and its backports, from the machine's own mirror.
    fn sources(&self) -> Result<String, DebianError> {
        let Mirror { uri, keyrings } = mirror()?;
        let options = if keyrings.is_empty() {
            // Without `signed-by`, apt uses the keys that the machine trusts for all sources.
            String::new()
        } else {
            format!(" [signed-by={}]", keyrings.join(","))
        };
        let release = &self.release;
        Ok(format!(
            "deb{options} {uri} {release} main\ndeb{options} {uri} {release}-backports main\n"
        ))
    }

    /// The text of the configuration: the machine's network settings (proxies, certificates,
    /// timeouts), and private directories. It leaves out the machine's other settings, because a
    /// hook after an update, for instance, would write outside the cache.
    fn configuration(&self) -> Result<String, DebianError> {
        let machine = output(Command::new("apt-config").arg("dump").arg("Acquire"))?;
        let mut text = String::new();
        for line in machine.lines() {
            if line.starts_with("Acquire::") && !line.starts_with("Acquire::IndexTargets") {
                text += line;
                text.push('\n');
            }
        }
        let place = |part: &str| self.directory.join(part).display().to_string();
        for (key, value) in [
            ("Dir::Etc::Main", "/dev/null".to_owned()),
            ("Dir::Etc::Parts", place("nothing")),
            ("Dir::Etc::SourceList", place("sources.list")),
            ("Dir::Etc::SourceParts", place("nothing")),
            ("Dir::Etc::Preferences", "/dev/null".to_owned()),
            ("Dir::Etc::PreferencesParts", place("nothing")),
            ("Dir::State", place("state")),
            ("Dir::State::Lists", place("lists")),
            ("Dir::State::Status", place("status")),
            ("Dir::Cache", place("cache")),
            ("Dir::Log", place("state")),
            ("Acquire::Languages", "none".to_owned()),
            // Download as root, because the user that apt otherwise switches to may lack access to
            // the cache.
            ("APT::Sandbox::User", "root".to_owned()),
            ("APT::Architecture", "amd64".to_owned()),
        ] {
            text += &format!("{key} \"{value}\";\n");
        }
        Ok(text)
    }
}

/// Runs a command to its end, and returns its standard output.
pub(super) fn output(command: &mut Command) -> Result<String, DebianError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let done = match command.output() {
        Ok(done) => done,
        Err(error) => return Err(DebianError::NotDebian(format!("{program}: {error}"))),
    };
    if !done.status.success() {
        let mut line = program;
        for argument in command.get_args() {
            line.push(' ');
            line += &argument.to_string_lossy();
        }
        return Err(DebianError::Tool {
            command: line,
            output: String::from_utf8_lossy(&done.stderr).trim().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

pub(super) struct Mirror {
    pub(super) uri: String,
    keyrings: Vec<String>,
}

/// The mirror of the machine's own release, according to apt's own parser.
pub(super) fn mirror() -> Result<Mirror, DebianError> {
    let about = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = about
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .unwrap_or("stable")
        .trim_matches('"');
    let format = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(CREATED_BY)|$(SOURCESENTRY)";
    let targets = output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
    targets
        .lines()
        .filter_map(|line| {
            let mut fields = line.split('|');
            let uri = fields.next()?;
            let (release, component) = (fields.next()?, fields.next()?);
            let source = fields.nth(1)?;
            let mains = [codename, "stable", "testing", "unstable", "sid"];
            (component == "main" && mains.contains(&release)).then(|| Mirror {
                uri: uri.to_owned(),
                keyrings: keyrings(source),
            })
        })
        .next()
        .ok_or_else(|| DebianError::NotDebian(format!("apt has no source for {codename} main")))
}

/// The key files that the source at `entry` ("FILE:LINE") names.
fn keyrings(entry: &str) -> Vec<String> {
    let file = entry.rsplit_once(':').map_or(entry, |(file, _)| file);
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut found = Vec::new();
    for word in text.split(|mark: char| mark.is_whitespace() || "[]=,:".contains(mark)) {
        let is_keys = [".gpg", ".pgp", ".asc"]
            .iter()
            .any(|kind| word.ends_with(kind));
        if is_keys && word.starts_with('/') && Path::new(word).is_file() {
            let word = word.to_owned();
            if !found.contains(&word) {
                found.push(word);
            }
        }
    }
    found
}
