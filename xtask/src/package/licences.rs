//! The licences of what is linked into the command.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::commit::workspace;
use super::programs::output;

/// Prefixes of the names of files with licences.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// The output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `null` for a dependency that is linked; otherwise `dev` or `build`.
    kind: Option<String>,
}

/// Returns the names and the licences of the crates that are linked into the command.
///
/// # Errors
/// cargo fails, a crate names no licence, or a file cannot be read.
pub fn of_the_command() -> Result<String> {
    let mut cargo = crate::cargo();
    cargo.args(["metadata", "--format-version=1", "--locked"]);
    cargo.args(["--filter-platform=x86_64-unknown-linux-gnu"]);
    let metadata = output(cargo.current_dir(workspace()))?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("cannot parse the output of cargo metadata")?;
    let linked = linked(&metadata);
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut packages: Vec<&Package> = metadata.packages.iter().collect();
    packages.sort_by_key(|one| (&one.name, &one.version));
    for package in packages {
        if package.source.is_none() || !linked.contains(&*package.id) {
            continue;
        }
        let name = format!("{} {}", package.name, package.version);
        let licence = package.license.as_deref();
        list += &format!(
            "{name}: {}\n",
            licence.with_context(|| format!("the manifest of {name} names no licence"))?
        );
        let folder = package
            .manifest_path
            .parent()
            .context("the path of a crate's manifest has no folder")?;
        for text in texts_in(folder)? {
            let names = texts.entry(text).or_default();
            // A crate may contain the same text in two files.
            if names.last() != Some(&name) {
                names.push(name.clone());
            }
        }
    }
    ensure!(
        !list.is_empty(),
        "cargo metadata lists no crates that are linked into the command"
    );
    let mut all = format!(
        "The command dunlin contains these crates and the standard library of Rust (MIT or \
         Apache-2.0). Their licences:\n\n{list}"
    );
    let mut texts: Vec<_> = texts.into_iter().collect();
    texts.sort_by(|(_, one), (_, other)| one.cmp(other));
    for (text, names) in texts {
        all += &format!("\n======== {}\n\n{}\n", names.join(", "), text.trim_end());
    }
    Ok(all)
}

/// The packages that the command needs when it runs.
fn linked(metadata: &Metadata) -> BTreeSet<&str> {
    let nodes: BTreeMap<&str, &Node> = metadata
        .resolve
        .nodes
        .iter()
        .map(|node| (&*node.id, node))
        .collect();
    let is_command = |one: &&Package| one.name == "dunlin-cli";
    let mut waiting: Vec<&str> = metadata
        .packages
        .iter()
        .filter(is_command)
        .map(|one| &*one.id)
        .collect();
    let mut linked = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if linked.insert(id) {
            let dependencies = nodes.get(id).map_or(&[][..], |node| &node.deps);
            let is_linked =
                |one: &&Dependency| one.dep_kinds.iter().any(|kind| kind.kind.is_none());
            waiting.extend(dependencies.iter().filter(is_linked).map(|one| &*one.pkg));
        }
    }
    linked
}

/// The texts of licences in a crate. The crate that contains the C library AWS-LC has the library
/// and the library's licences in the folder `aws-lc`.
fn texts_in(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for folder in [folder.to_owned(), folder.join("aws-lc")] {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if NAMES.iter().any(|one| name.to_uppercase().starts_with(one)) && path.is_file() {
                files.push(path);
            }
        }
    }
    files.sort();
    let read = |path: &PathBuf| {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    files.iter().map(read).collect()
}
