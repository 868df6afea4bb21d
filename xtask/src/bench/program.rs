//! The programs under measurement.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use dunlin_rig::debian;
use serde::Deserialize;

/// Builds `dunlin` in release mode.
pub(super) fn dunlin() -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
    }
    let done = crate::cargo()
        .args(["build", "--locked", "--release", "--quiet"])
        .args(["--package", "dunlin-cli", "--bin", "dunlin"])
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")))
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !done.status.success() {
        bail!("dunlin does not build");
    }
    String::from_utf8_lossy(&done.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok()?.executable)
        .next_back()
        .context("cargo does not report the path of dunlin")
}

/// Returns a command that runs stunnel with the OpenSSL of Debian 13, which encrypts faster than
/// that of Debian 12. If Debian's packages cannot be fetched, the command runs the installed
/// stunnel.
pub(super) fn stunnel() -> Result<Command> {
    let debian = debian::packages("trixie", &["stunnel4"])
        .and_then(|root| debian::program(&root, "stunnel4"));
    let error = match debian {
        Ok(command) => return Ok(command),
        Err(error) => error,
    };
    let mut own = Command::new("stunnel4");
    if version(&mut own, &["stunnel"]).is_err() {
        return Err(error.into());
    }
    eprintln!("Debian's stunnel cannot be fetched, so the installed one is measured: {error}");
    Ok(Command::new("stunnel4"))
}

/// The versions of stunnel and OpenSSL that [`stunnel`] runs.
pub(super) fn stunnel_version() -> Result<String> {
    version(&mut stunnel()?, &["stunnel", "OpenSSL"])
}

/// Runs `-version`, and returns each name with the last version that follows it in the output.
fn version(command: &mut Command, names: &[&str]) -> Result<String> {
    let done = command.arg("-version").stdin(Stdio::null()).output();
    let done = done.with_context(|| format!("cannot start {command:?}"))?;
    let said = [done.stdout, done.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let words: Vec<&str> = said.split_whitespace().collect();
    let found = names.iter().map(|name| {
        let is_version = |word: &str| word.starts_with(|first: char| first.is_ascii_digit());
        let mut pairs = words.windows(2).rev();
        let pair = pairs.find(|pair| pair[0] == *name && is_version(pair[1]));
        let pair = pair.with_context(|| format!("{command:?} does not state its version"))?;
        Ok(pair.join(" "))
    });
    Ok(found.collect::<Result<Vec<_>>>()?.join(", "))
}

/// OpenSSH's programs.
pub(super) struct OpenSsh {
    pub(super) ssh: PathBuf,
    pub(super) sshd: PathBuf,
    pub(super) keygen: PathBuf,
    /// Lines that `sshd` needs in its configuration.
    pub(super) config: String,
}

/// Returns the installed OpenSSH. If it has no server, returns Debian's package instead, and writes
/// a script for each program into `folder`. Each script runs its program.
pub(super) fn openssh(folder: &Path) -> Result<OpenSsh> {
    // The server is not in the path of every user, and starts only if it is called by its full
    // path.
    let sshd = PathBuf::from("/usr/sbin/sshd");
    if sshd.is_file() {
        return Ok(OpenSsh {
            ssh: "ssh".into(),
            sshd,
            keygen: "ssh-keygen".into(),
            config: String::new(),
        });
    }
    let root = debian::packages("trixie", &["openssh-server", "openssh-client"])?;
    let wrapped = |program: &str| -> Result<PathBuf> {
        let program = root.join(program);
        let name = program
            .file_name()
            .context("the program's path has no file name")?;
        let path = folder.join(name);
        let loader = debian::program(&root, "sshd")?;
        let text = script(
            Path::new(loader.get_program()),
            &root.join("usr/lib/x86_64-linux-gnu"),
            &program,
        );
        fs::write(&path, text)?;
        fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        Ok(path)
    };
    Ok(OpenSsh {
        ssh: wrapped("usr/bin/ssh")?,
        sshd: wrapped("usr/sbin/sshd")?,
        keygen: wrapped("usr/bin/ssh-keygen")?,
        config: format!(
            "SshdSessionPath {}\nSshdAuthPath {}\n",
            wrapped("usr/lib/openssh/sshd-session")?.display(),
            wrapped("usr/lib/openssh/sshd-auth")?.display(),
        ),
    })
}

/// A script that runs a program with the loader and the libraries of the program's unpacked
/// package, as [`debian::program`] does. The script is for programs that other programs start by
/// their path.
fn script(loader: &Path, libraries: &Path, program: &Path) -> String {
    let quoted = |path: &Path| {
        let path = path.display().to_string();
        format!("'{}'", path.replace('\'', r"'\''"))
    };
    format!(
        "#!/bin/sh\nexec {} --argv0 \"$0\" --library-path {} {} \"$@\"\n",
        quoted(loader),
        quoted(libraries),
        quoted(program)
    )
}

/// The ID of a user without privileges.
const UNPRIVILEGED: &str = "65534";

/// Returns a command that runs OpenSSH's server, and the name of the user that can log in. The
/// server runs as that user.
///
/// A server that runs as root needs a user and a folder that only an installed package creates. If
/// this process is root, the server therefore runs in a user namespace that maps root to a user
/// without privileges.
pub(super) fn as_ssh_user(sshd: &Path) -> Result<(Command, String)> {
    let user = user_name(&[])?;
    if user != "root" {
        return Ok((Command::new(sshd), user));
    }
    let mut command = Command::new("unshare");
    command.arg("--user");
    command.args([
        format!("--map-user={UNPRIVILEGED}"),
        format!("--map-group={UNPRIVILEGED}"),
    ]);
    command.arg(sshd);
    Ok((command, user_name(&[UNPRIVILEGED])?))
}

/// The name of the user `id`, or of this process's user if `id` is empty.
fn user_name(id: &[&str]) -> Result<String> {
    let output = Command::new("id").arg("-un").args(id).output();
    let output = output.context("cannot start id")?;
    ensure!(output.status.success(), "id failed: {output:?}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Whether a Go compiler is installed.
pub(super) fn has_go() -> Result<bool> {
    match Command::new("go").arg("version").output() {
        Ok(done) => Ok(done.status.success()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).context("cannot start go"),
    }
}

/// Builds `go/proxy.go`, which uses only Go's standard library.
pub(super) fn build_go_proxy(output: &Path) -> Result<()> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bench/go/proxy.go");
    let done = Command::new("go")
        .args(["build", "-o"])
        .arg(output)
        .arg(source)
        // Use only the Go toolchain that is installed on this host, and no workspace or flags.
        .env("GOTOOLCHAIN", "local")
        .env("GOWORK", "off")
        .env("GOFLAGS", "")
        .stderr(Stdio::inherit())
        .status()
        .context("cannot start go")?;
    ensure!(done.success(), "{source} does not build");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use dunlin_test_base::Scratch;

    #[test]
    fn a_version_is_read_from_either_output() {
        let scratch = Scratch::new();
        let path = scratch.join("program");
        let text = "#!/bin/sh\necho stunnel 5.75 on x86 >&2\necho Compiled with OpenSSL 3.0\n\
                    echo 'Running  with OpenSSL 3.5.4 (2025)'\necho Update OpenSSL or stunnel\n";
        fs::write(&path, text).unwrap();
        let run = || {
            let mut command = Command::new("sh");
            command.arg(&path);
            command
        };
        let found = version(&mut run(), &["stunnel", "OpenSSL"]).unwrap();
        assert_eq!(found, "stunnel 5.75, OpenSSL 3.5.4");
        assert!(version(&mut run(), &["QEMU"]).is_err());
    }

    #[test]
    fn a_script_passes_its_arguments_and_its_own_path_on() {
        let scratch = Scratch::new();
        let folder = scratch.join("it's a folder");
        fs::create_dir(&folder).unwrap();
        let (loader, path) = (folder.join("loader"), folder.join("script"));
        fs::write(&loader, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n").unwrap();
        fs::write(&path, script(&loader, &folder, Path::new("/program"))).unwrap();
        fs::set_permissions(&loader, Permissions::from_mode(0o755)).unwrap();
        let done = Command::new("sh").arg(&path).args(["a b", "c"]).output();
        let said = String::from_utf8(done.unwrap().stdout).unwrap();
        let own = path.display().to_string();
        let folder = folder.display().to_string();
        let expected = [
            "--argv0",
            &own,
            "--library-path",
            &folder,
            "/program",
            "a b",
            "c",
        ];
        assert_eq!(said.lines().collect::<Vec<_>>(), expected);
    }
}
