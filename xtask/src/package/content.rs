//! The files of the packages.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::commit::Version;
use super::symbols;

/// Files that dpkg does not replace after an operator has changed them, relative to the root.
const CONFIGURATION: [&str; 2] = ["etc/dunlin/accept.conf", "etc/dunlin/tunnel.toml.example"];
/// Folders of docs/ that the packages leave out.
const NOT_PAGES: [&str; 2] = ["api", "results"];

/// What the packages are made of.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The command.
    pub binary: &'a Path,
    /// The files of the commit.
    pub source: &'a Path,
    /// The manual's pages and the completions ([`super::pages`]).
    pub pages: &'a Path,
    /// The licences of what is linked into the command.
    pub licences: &'a str,
    /// The version.
    pub version: &'a Version,
}

/// The tree of files that is being written.
struct Tree<'a>(&'a Path);

impl Parts<'_> {
    /// Writes the packages' files into the new directory `tree`, and the files for dpkg itself into
    /// `tree/DEBIAN`.
    ///
    /// # Errors
    /// A file cannot be read or written, or the command needs other libraries than expected.
    pub fn lay_out(&self, tree: &Path) -> Result<()> {
        if tree.exists() {
            fs::remove_dir_all(tree)?;
        }
        let tree = Tree(tree);
        tree.copy(self.binary, "usr/bin/dunlin", 0o755)?;
        self.units(&tree)?;
        self.manual(&tree)?;
        self.documents(&tree)?;
        for path in CONFIGURATION {
            let name = Path::new(path).file_name().unwrap_or_default();
            tree.copy(&self.source.join("dist/etc").join(name), path, 0o644)?;
        }
        self.control(&tree)?;
        tree.set_modes()
    }

    fn units(&self, tree: &Tree) -> Result<()> {
        for path in files(&self.source.join("dist/systemd"))? {
            let name = name(&path);
            let to = match &*name {
                "dunlin-sysusers.conf" => "usr/lib/sysusers.d/dunlin.conf".to_owned(),
                "dunlin-tmpfiles.conf" => "usr/lib/tmpfiles.d/dunlin.conf".to_owned(),
                unit => format!("usr/lib/systemd/system/{unit}"),
            };
            tree.copy(&path, &to, 0o644)?;
        }
        Ok(())
    }

    fn manual(&self, tree: &Tree) -> Result<()> {
        for path in files(&self.pages.join("man"))? {
            tree.copy(&path, &format!("usr/share/man/man1/{}", name(&path)), 0o644)?;
        }
        for (from, to) in [
            ("dunlin.bash", "bash-completion/completions/dunlin"),
            ("_dunlin", "zsh/vendor-completions/_dunlin"),
            ("dunlin.fish", "fish/vendor_completions.d/dunlin.fish"),
        ] {
            let from = self.pages.join("completions").join(from);
            tree.copy(&from, &format!("usr/share/{to}"), 0o644)?;
        }
        Ok(())
    }

    fn documents(&self, tree: &Tree) -> Result<()> {
        const PLACE: &str = "usr/share/doc/dunlin";
        let change = format!(
            "dunlin ({}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- {MAINTAINER}  {}\n",
            self.version.text, self.version.date
        );
        tree.write(&format!("{PLACE}/changelog.Debian"), &change)?;
        let changelog = self.source.join("CHANGELOG.md");
        tree.copy(&changelog, &format!("{PLACE}/changelog"), 0o644)?;
        tree.copy(
            &self.source.join("dist/debian/copyright"),
            &format!("{PLACE}/copyright"),
            0o644,
        )?;
        tree.write(&format!("{PLACE}/licences"), self.licences)?;
        for example in ["grafana/dunlin.json", "prometheus/alerts.yaml"] {
            let from = self.source.join("dist").join(example);
            let name = name(&from);
            tree.copy(&from, &format!("{PLACE}/examples/{name}"), 0o644)?;
        }
        // The command's messages refer to these pages as `docs/…`.
        self.pages_in(tree, Path::new("docs"), PLACE)
    }

    /// Copies the pages of a folder and of its subfolders.
    fn pages_in(&self, tree: &Tree, folder: &Path, place: &str) -> Result<()> {
        let from = self.source.join(folder);
        for entry in
            fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))?
        {
            let path = entry?.path();
            let name = name(&path);
            let inner = folder.join(&name);
            if path.is_dir() {
                if !NOT_PAGES.contains(&&*name) {
                    self.pages_in(tree, &inner, place)?;
                }
            } else if name.ends_with(".md") {
                tree.copy(&path, &format!("{place}/{}", inner.display()), 0o644)?;
            }
        }
        Ok(())
    }

    /// Writes the description for dpkg; [`super::archive`] adds the size and the checksums.
    fn control(&self, tree: &Tree) -> Result<()> {
        let (major, minor) = symbols::check(self.binary)?;
        let version = &self.version.text;
        tree.write(
            "DEBIAN/control",
            &format!(
                "Package: dunlin\nVersion: {version}\nArchitecture: amd64\nMaintainer: {MAINTAINER}\n\
                 Section: admin\nPriority: optional\n\
                 Depends: libc6 (>= {major}.{minor}), libgcc-s1 (>= 4.2), systemd | \
                 systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles\n\
                 Recommends: nftables\nSuggests: libvirt-daemon-system\n\
                 Description: live migration of virtual machines over encrypted lanes\n {}\n",
                DESCRIPTION.join("\n ")
            ),
        )?;
        let conffiles: String = CONFIGURATION
            .iter()
            .map(|path| format!("/{path}\n"))
            .collect();
        tree.write("DEBIAN/conffiles", &conffiles)?;
        for script in ["postinst", "prerm", "postrm"] {
            let from = self.source.join("dist/debian").join(script);
            tree.copy(&from, &format!("DEBIAN/{script}"), 0o755)?;
        }
        Ok(())
    }
}

const MAINTAINER: &str = "The Dunlin developers <developers@dunlin.invalid>";
const DESCRIPTION: [&str; 6] = [
    "Dunlin moves the memory of running virtual machines to another host over many",
    "encrypted connections in parallel. The tunnel carries the migrations of QEMU,",
    "libvirt and other hypervisors without changes to them; `dunlin libvirt",
    "enable` sets it up.",
    ".",
    "No service is enabled or started by the installation.",
];

impl Tree<'_> {
    fn copy(&self, from: &Path, to: &str, mode: u32) -> Result<()> {
        let to = self.place(to)?;
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        fs::set_permissions(&to, Permissions::from_mode(mode))?;
        Ok(())
    }

    fn write(&self, to: &str, text: &str) -> Result<()> {
        let to = self.place(to)?;
        fs::write(&to, text).with_context(|| format!("cannot write {}", to.display()))?;
        fs::set_permissions(&to, Permissions::from_mode(0o644))?;
        Ok(())
    }

    fn place(&self, path: &str) -> Result<PathBuf> {
        let path = self.0.join(path);
        let folder = path.parent().context("the file's path has no folder")?;
        fs::create_dir_all(folder)?;
        ensure!(!path.exists(), "two files have the path {}", path.display());
        Ok(path)
    }

    /// Sets the modes of all folders. They were created with modes that depend on this process's
    /// umask.
    fn set_modes(&self) -> Result<()> {
        let mut folders = vec![self.0.to_owned()];
        while let Some(folder) = folders.pop() {
            fs::set_permissions(&folder, Permissions::from_mode(0o755))?;
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                }
            }
        }
        Ok(())
    }
}

/// The files of a folder.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let files = paths.collect::<Result<Vec<_>>>()?;
    ensure!(!files.is_empty(), "{} is empty", folder.display());
    Ok(files)
}

fn name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}
