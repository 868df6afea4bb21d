//! Rules of ARCHITECTURE.md, "Crates", that the compiler does not check: which crate depends on which,
//! imports without circles, small structs, and where `unsafe` is allowed.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use syn::visit::{self, Visit};
use syn::{Attribute, Fields, Item, ItemMod, ItemUse, UseTree};

/// Each crate, and the crates of this workspace that it may depend on.
const LAYERS: [(&str, &[&str]); 9] = [
    ("dunlin-proto", &[]),
    ("dunlin-linux", &[]),
    ("dunlin-lane", &["dunlin-proto", "dunlin-linux"]),
    ("dunlin", &["dunlin-proto", "dunlin-linux", "dunlin-lane"]),
    (
        "dunlin-tunnel",
        &["dunlin-proto", "dunlin-linux", "dunlin-lane"],
    ),
    (
        "dunlin-handoff",
        &["dunlin-proto", "dunlin-linux", "dunlin-lane"],
    ),
    (
        "dunlin-ipsec",
        &["dunlin-proto", "dunlin-linux", "dunlin-lane"],
    ),
    (
        "dunlin-microvm",
        &["dunlin-proto", "dunlin-linux", "dunlin-lane", "dunlin"],
    ),
    (
        "dunlin-cli",
        &[
            "dunlin-proto",
            "dunlin-linux",
            "dunlin-lane",
            "dunlin",
            "dunlin-tunnel",
            "dunlin-handoff",
            "dunlin-ipsec",
            "dunlin-microvm",
        ],
    ),
];

/// Crates that a VMM author must not have to compile.
const NOT_FOR_A_VMM: [&str; 5] = [
    "kvm",
    "netlink",
    "dunlin-tunnel",
    "dunlin-handoff",
    "dunlin-ipsec",
];

/// The largest number of fields in a struct.
const MAX_FIELDS: usize = 24;

/// Crates that contain `unsafe`, anywhere or in one module.
const WITH_UNSAFE: [&str; 2] = ["dunlin-linux", "dunlin-microvm"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

fn cargo(arguments: &[&str]) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(arguments)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn crates_depend_downwards_only() {
    let metadata = cargo(&["metadata", "--no-deps", "--locked", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let allowed: BTreeMap<&str, &[&str]> = LAYERS.into_iter().collect();
    let mut seen = BTreeSet::new();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let manifest = package["manifest_path"].as_str().unwrap();
        if !manifest.contains("/crates/") {
            continue;
        }
        seen.insert(name);
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = dependency["name"].as_str().unwrap();
            if dependency["kind"].is_null() && on.starts_with("dunlin") {
                assert!(allowed[name].contains(&on), "{name} depends on {on}");
            }
        }
    }
    assert!(seen.iter().eq(allowed.keys()), "{seen:?}");
}

#[test]
fn a_vmm_compiles_no_other_product() {
    let tree = cargo(&[
        "tree",
        "--locked",
        "--package=dunlin",
        "--edges=normal",
        "--prefix=none",
        "--all-features",
    ]);
    for line in tree.lines() {
        let name = line.split(' ').next().unwrap();
        let unwanted = NOT_FOR_A_VMM.iter().any(|part| name.contains(part));
        assert!(!unwanted, "dunlin depends on {name}");
    }
}

/// A crate's product code: its files by module path, without tests.
struct Sources {
    files: BTreeMap<Vec<String>, syn::File>,
}

impl Sources {
    fn of(package: &str) -> Self {
        let directory = root().join("crates").join(package).join("src");
        let mut sources = Self {
            files: BTreeMap::new(),
        };
        for start in ["lib.rs", "main.rs"] {
            let file = directory.join(start);
            if file.exists() {
                sources.add(Vec::new(), &file, &directory);
            }
        }
        assert!(!sources.files.is_empty(), "{package} has no sources");
        sources
    }

    /// Adds a file and the files of its modules, which are in `directory`.
    fn add(&mut self, path: Vec<String>, file: &Path, directory: &Path) {
        let parsed = syn::parse_file(&fs::read_to_string(file).unwrap()).unwrap();
        for item in &parsed.items {
            let Item::Mod(module) = item else { continue };
            if module.content.is_some() || is_for_tests(&module.attrs) {
                continue;
            }
            let name = module.ident.to_string();
            let beside = directory.join(format!("{name}.rs"));
            let below = directory.join(&name);
            let at = if beside.exists() {
                beside
            } else {
                below.join("mod.rs")
            };
            let mut path = path.clone();
            path.push(name);
            self.add(path, &at, &below);
        }
        self.files.insert(path, parsed);
    }

    /// The file that defines what `path` names, as seen from the module `from`.
    fn target(&self, from: &[String], path: &[String]) -> Option<Vec<String>> {
        let mut at = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => from.to_vec(),
            // A module below this one.
            name => {
                let mut child = from.to_vec();
                child.push(name.to_owned());
                self.files.contains_key(&child).then(|| from.to_vec())?
            }
        };
        for segment in path {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => drop(at.pop()),
                name => {
                    at.push(name.to_owned());
                    if !self.files.contains_key(&at) {
                        at.pop();
                        break;
                    }
                }
            }
        }
        Some(at)
    }
}

/// `#[cfg(test)]`, `#[cfg(any(test, …))]` and `#[cfg(all(test, …))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && quote::ToTokens::to_token_stream(&attribute.meta)
                .to_string()
                .split(|character: char| !character.is_alphanumeric())
                .any(|word| word == "test")
    })
}

/// The paths below `crate`, `self` and `super` that a file imports or uses.
#[derive(Default)]
struct Paths(Vec<Vec<String>>);

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_for_tests(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        if !is_for_tests(&import.attrs) {
            self.tree(&import.tree, &mut Vec::new());
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter();
        let names: Vec<String> = segments.map(|one| one.ident.to_string()).collect();
        if matches!(names[0].as_str(), "crate" | "super" | "self") && names.len() > 1 {
            self.0.push(names);
        }
        visit::visit_path(self, path);
    }

    // Visibilities name modules too: `pub(in crate::engine)`.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

impl Paths {
    fn tree(&mut self, tree: &UseTree, before: &mut Vec<String>) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(&path.tree, before);
                before.pop();
            }
            UseTree::Name(name) => self.leaf(name.ident.to_string(), before),
            UseTree::Rename(rename) => self.leaf(rename.ident.to_string(), before),
            UseTree::Glob(_) => self.0.push(before.clone()),
            UseTree::Group(group) => {
                for one in &group.items {
                    self.tree(one, before);
                }
            }
        }
    }

    fn leaf(&mut self, name: String, before: &[String]) {
        let mut path = before.to_vec();
        path.push(name);
        self.0.push(path);
    }
}

/// Imports between a module and the modules below it do not count.
fn is_one_unit(one: &[String], other: &[String]) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

#[test]
fn no_files_of_a_crate_import_each_other_in_a_circle() {
    let mut circles = Vec::new();
    for (package, _) in LAYERS {
        let sources = Sources::of(package);
        let mut imports = BTreeMap::new();
        for (from, file) in &sources.files {
            let mut paths = Paths::default();
            paths.visit_file(file);
            let targets = paths.0.iter().filter_map(|path| sources.target(from, path));
            let targets: BTreeSet<_> = targets.filter(|to| !is_one_unit(from, to)).collect();
            imports.insert(from.clone(), targets);
        }
        // Remove files without remaining imports and files that no remaining file imports: neither
        // can be part of a circle.
        loop {
            let before = imports.len();
            let left: BTreeSet<_> = imports.keys().cloned().collect();
            let imported: BTreeSet<_> = imports.values().flatten().cloned().collect();
            imports.retain(|file, targets| {
                imported.contains(file) && targets.iter().any(|target| left.contains(target))
            });
            if imports.len() == before {
                break;
            }
        }
        let files = imports.keys().map(|path| path.join("::"));
        circles.extend(files.map(|file| format!("{package}: {file}")));
    }
    assert!(
        circles.is_empty(),
        "files in circles, or between two: {circles:#?}"
    );
}

/// Every Rust file below a directory, tests included.
fn rust_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Structs with too many fields.
#[derive(Default)]
struct Large(Vec<String>);

impl<'ast> Visit<'ast> for Large {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        if let Fields::Named(fields) = &item.fields
            && fields.named.len() > MAX_FIELDS
        {
            self.0
                .push(format!("{} has {} fields", item.ident, fields.named.len()));
        }
    }
}

#[test]
fn no_struct_has_more_than_24_fields() {
    for part in ["crates", "tests", "xtask", "fuzz"] {
        let mut files = Vec::new();
        rust_files(&root().join(part), &mut files);
        assert!(!files.is_empty(), "{part} has no sources");
        for file in files {
            let mut large = Large::default();
            large.visit_file(&syn::parse_file(&fs::read_to_string(&file).unwrap()).unwrap());
            assert!(large.0.is_empty(), "{}: {:?}", file.display(), large.0);
        }
    }
}

#[test]
fn crates_without_unsafe_forbid_it() {
    for (package, _) in LAYERS {
        let sources = Sources::of(package);
        let forbids = sources.files[&Vec::new()].attrs.iter().any(|attribute| {
            let text = quote::ToTokens::to_token_stream(&attribute.meta).to_string();
            text == "forbid (unsafe_code)"
        });
        let may = WITH_UNSAFE.contains(&package);
        assert_eq!(forbids, !may, "{package}: #![forbid(unsafe_code)]");
    }
}
