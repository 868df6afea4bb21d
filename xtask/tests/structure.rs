//! Rules of ARCHITECTURE.md, "Crates", and of CONTRIBUTING.md that the compiler does not check:
//! which crate depends on which, imports without cycles, the number of fields of structs and
//! variants, and where `unsafe` is allowed.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::process::Command;

use quote::ToTokens;
use serde_json::Value;
use syn::buffer::{Cursor, TokenBuffer};
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, ExprMethodCall, Fields, Ident, ImplItem, ImplItemFn, Item, ItemImpl, ItemMod,
    ItemUse, Macro, Meta, Type, UseTree, Visibility,
};

/// Each crate, and the crates of this workspace that it may depend on.
const LAYERS: [(&str, &[&str]); 10] = [
    ("dunlin-bench", &["dunlin-linux"]),
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
            "dunlin-bench",
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

/// Names, or parts of names, of crates that a VMM author must not have to compile.
const NOT_FOR_A_VMM: [&str; 5] = [
    "kvm",
    "netlink",
    "dunlin-tunnel",
    "dunlin-handoff",
    "dunlin-ipsec",
];

/// Crates that only tests use. The tests of every crate may use them.
const FOR_TESTS: [&str; 3] = ["dunlin-test-base", "dunlin-test-support", "dunlin-rig"];

/// The largest number of fields in a struct or in a variant of an enum.
const MAX_FIELDS: usize = 24;

/// The files and directories that may contain `unsafe`.
const WITH_UNSAFE: [&str; 4] = [
    "crates/dunlin-linux/src",
    "crates/dunlin-microvm/src/kvm",
    "crates/dunlin-microvm/src/kvm.rs",
    "tests/rig/src/linux",
];

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
    assert!(
        output.status.success(),
        "cargo {arguments:?} failed: {output:?}"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Checks which crates each crate depends on. The tests of a crate may use the same crates as the
/// crate itself, and the crates for tests. Of the crates for tests, only `dunlin-test-base` is
/// restricted. Unit tests use it, so it must not depend on a crate of the workspace: cargo would
/// build that crate twice.
#[test]
fn crates_depend_downwards_only() {
    let metadata = cargo(&["metadata", "--no-deps", "--locked", "--format-version", "1"]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let allowed: BTreeMap<&str, &[&str]> = LAYERS.into_iter().collect();
    let mut seen = BTreeSet::new();
    let in_workspace: BTreeSet<_> = packages
        .iter()
        .map(|package| package["name"].as_str().unwrap())
        .collect();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let manifest = package["manifest_path"].as_str().unwrap();
        let allowed = if manifest.contains("/crates/") {
            seen.insert(name);
            allowed[name]
        } else if name == "dunlin-test-base" {
            &[]
        } else {
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = dependency["name"].as_str().unwrap();
            let may = match dependency["kind"].as_str() {
                Some("dev") => allowed.contains(&on) || FOR_TESTS.contains(&on),
                _ => allowed.contains(&on),
            };
            assert!(
                may || !in_workspace.contains(on),
                "{name} depends on {on}: {dependency}"
            );
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
    files: BTreeMap<Vec<String>, Source>,
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
        let source = Source::of(&parsed);
        self.files.insert(path, source);
    }

    /// Returns the files that define the item that `path` names in the file `from`. Follows imports
    /// and re-exports. Returns no file for a path that leads out of the crate.
    fn definitions(&self, from: &[String], path: &Named) -> BTreeSet<Vec<String>> {
        let mut found = BTreeSet::new();
        self.follow(from, path, &mut Vec::new(), &mut found);
        found
    }

    fn follow(
        &self,
        from: &[String],
        path: &Named,
        visited: &mut Vec<(Vec<String>, String)>,
        found: &mut BTreeSet<Vec<String>>,
    ) {
        let mut at = from.to_vec();
        let mut inline = path.inline;
        let mut rest = path.segments.as_slice();
        while let Some((first, after)) = rest.split_first() {
            match first.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" if inline > 0 => inline -= 1,
                "super" => drop(at.pop()),
                _ => break,
            }
            rest = after;
        }
        let anchored = rest.len() < path.segments.len();
        while let Some((first, after)) = rest.split_first() {
            let mut below = at.clone();
            below.push(first.clone());
            if !self.files.contains_key(&below) {
                break;
            }
            at = below;
            rest = after;
        }
        let Some(name) = rest.first() else {
            // The path ends at a module. Only `use module::*` is a use of the module's file. After
            // `use module`, each path through the module is resolved separately.
            if path.whole {
                found.insert(at);
            }
            return;
        };
        let file = &self.files[&at];
        let local = file.defined.contains(name) || file.globs.is_empty();
        if !anchored && at == from && local && !file.bound.contains_key(name) {
            return;
        }
        let key = (at.clone(), name.clone());
        if visited.contains(&key) {
            return;
        }
        visited.push(key);
        if let Some(imports) = file.bound.get(name) {
            for import in imports {
                let mut import = import.clone();
                import.segments.extend_from_slice(&rest[1..]);
                self.follow(&at, &import, visited, found);
            }
        } else if local {
            found.insert(at);
        } else {
            let mut behind = BTreeSet::new();
            for glob in &file.globs {
                let mut import = glob.clone();
                import.whole = false;
                import.segments.extend_from_slice(rest);
                self.follow(&at, &import, visited, &mut behind);
            }
            behind.retain(|file| self.files[file].defined.contains(name));
            found.extend(behind);
        }
    }

    /// The files that define the type that `of` names in the file `from`.
    fn homes(&self, from: &[String], of: &Named) -> BTreeSet<Vec<String>> {
        let mut homes = self.definitions(from, of);
        if homes.is_empty() && of.segments.len() == 1 {
            homes.insert(from.to_vec());
        }
        homes
    }

    /// Maps each method and associated function, except those of traits, to the files that define
    /// it. A key is the file of the type, the type's name and the method's name.
    fn methods(&self) -> BTreeMap<(Vec<String>, String, String), BTreeSet<Vec<String>>> {
        let mut methods = BTreeMap::<_, BTreeSet<_>>::new();
        for (file, source) in &self.files {
            for (of, method) in &source.methods {
                for home in self.homes(file, of) {
                    let key = (home, of.last(), method.clone());
                    methods.entry(key).or_default().insert(file.clone());
                }
            }
        }
        methods
    }

    /// The files that the file `from` uses, each with the paths by which `from` names it.
    fn used_by(&self, from: &[String], reexports: bool) -> Uses {
        let file = &self.files[from];
        let mut uses = Uses::new();
        let reexported = file.reexported.iter().filter(|_| reexports);
        for path in file.used.iter().chain(reexported) {
            for to in self.definitions(from, path) {
                if to != from {
                    uses.entry(to).or_default().insert(path.segments.join("::"));
                }
            }
        }
        uses
    }

    fn uses(&self, reexports: bool) -> BTreeMap<Vec<String>, Uses> {
        let methods = self.methods();
        let mut all = BTreeMap::new();
        for (from, source) in &self.files {
            let mut uses = self.used_by(from, reexports);
            for (of, method) in &source.calls {
                for home in self.homes(from, of) {
                    let key = (home, of.last(), method.clone());
                    for to in methods.get(&key).into_iter().flatten() {
                        if to != from {
                            let call = format!("{}::{method}", of.last());
                            uses.entry(to.clone()).or_default().insert(call);
                        }
                    }
                }
            }
            all.insert(from.clone(), uses);
        }
        all
    }
}

/// The files that a file uses, each with the paths by which the file names it.
type Uses = BTreeMap<Vec<String>, BTreeSet<String>>;

/// Whether a `cfg` attribute contains the word `test`, as in `#[cfg(test)]` and
/// `#[cfg(any(test, …))]`.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute
                .to_token_stream()
                .to_string()
                .split(|character: char| !character.is_alphanumeric())
                .any(|word| word == "test")
    })
}

/// A Rust path in a source file.
#[derive(Clone)]
struct Named {
    segments: Vec<String>,
    /// The number of inline modules that enclose the path.
    inline: usize,
    /// Whether the path names everything in a module, as in `use module::*`.
    whole: bool,
}

impl Named {
    /// The path's last name.
    fn last(&self) -> String {
        self.segments.last().cloned().unwrap_or_default()
    }
}

/// What a file defines, imports and uses.
#[derive(Default)]
struct Source {
    defined: BTreeSet<String>,
    /// The names that the file's imports and re-exports bind, each with the paths that it refers
    /// to.
    bound: BTreeMap<String, Vec<Named>>,
    globs: Vec<Named>,
    /// Every path in its code, and every import that is not a re-export.
    used: Vec<Named>,
    reexported: Vec<Named>,
    /// Methods and associated functions that the file defines, except those of traits, each with
    /// its type.
    methods: Vec<(Named, String)>,
    /// The calls of the forms `self.method()`, `Self::function()` and `Type::function()`, each with
    /// the type.
    calls: Vec<(Named, String)>,
    /// The type of the `impl` block that is being read.
    implemented: Option<Named>,
    inline: usize,
}

impl Source {
    fn of(file: &syn::File) -> Self {
        let mut source = Self::default();
        source.visit_file(file);
        source
    }

    fn import(&mut self, tree: &UseTree, before: &mut Vec<String>, public: bool) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(&path.tree, before, public);
                before.pop();
            }
            UseTree::Name(name) => self.bind(&name.ident, &name.ident, before, public),
            UseTree::Rename(rename) => self.bind(&rename.ident, &rename.rename, before, public),
            UseTree::Glob(_) => {
                let glob = self.named(before.clone(), true);
                self.uses(public).push(glob.clone());
                self.globs.push(glob);
            }
            UseTree::Group(group) => {
                for one in &group.items {
                    self.import(one, before, public);
                }
            }
        }
    }

    fn bind(&mut self, name: &Ident, bound: &Ident, before: &[String], public: bool) {
        let mut path = before.to_vec();
        let mut bound = bound.to_string();
        if name == "self" {
            if bound == "self" {
                bound = before[before.len() - 1].clone();
            }
        } else {
            path.push(name.to_string());
        }
        let path = self.named(path, false);
        self.uses(public).push(path.clone());
        self.bound.entry(bound).or_default().push(path);
    }

    fn uses(&mut self, public: bool) -> &mut Vec<Named> {
        if public {
            &mut self.reexported
        } else {
            &mut self.used
        }
    }

    fn named(&self, segments: Vec<String>, whole: bool) -> Named {
        Named {
            segments,
            inline: self.inline,
            whole,
        }
    }

    /// Adds the paths in the arguments of a macro or an attribute.
    fn tokens(&mut self, mut at: Cursor<'_>) {
        let mut path = Vec::new();
        let mut colons = 0;
        while !at.eof() {
            if let Some((ident, after)) = at.ident() {
                if colons != 2 {
                    self.path(mem::take(&mut path));
                }
                path.push(ident.to_string());
                colons = 0;
                at = after;
                continue;
            }
            if let Some((punct, after)) = at.punct()
                && punct.as_char() == ':'
            {
                colons += 1;
                at = after;
                continue;
            }
            self.path(mem::take(&mut path));
            colons = 0;
            if let Some((inside, _, _, after)) = at.any_group() {
                self.tokens(inside);
                at = after;
            } else {
                at = at.token_tree().map_or(at, |(_, after)| after);
            }
        }
        self.path(path);
    }

    fn path(&mut self, segments: Vec<String>) {
        if !segments.is_empty() {
            let named = self.named(segments, false);
            self.used.push(named);
        }
    }
}

impl<'ast> Visit<'ast> for Source {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = match item {
            Item::Const(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
            Item::Impl(item) => (&item.attrs, None),
            Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
            Item::Mod(item) => (&item.attrs, Some(&item.ident)),
            Item::Static(item) => (&item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.attrs, Some(&item.ident)),
            Item::Use(item) => (&item.attrs, None),
            _ => return visit::visit_item(self, item),
        };
        if is_for_tests(attributes) {
            return;
        }
        self.defined.extend(name.map(Ident::to_string));
        visit::visit_item(self, item);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !is_for_tests(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.inline += 1;
        visit::visit_item_mod(self, module);
        self.inline -= 1;
    }

    fn visit_item_use(&mut self, import: &'ast ItemUse) {
        let public = !matches!(import.vis, Visibility::Inherited);
        self.import(&import.tree, &mut Vec::new(), public);
    }

    fn visit_item_impl(&mut self, block: &'ast ItemImpl) {
        let outer = self.implemented.take();
        if let Type::Path(path) = &*block.self_ty {
            let of = self.named(names(&path.path), false);
            if block.trait_.is_none() {
                let functions = block.items.iter().filter_map(|item| match item {
                    ImplItem::Fn(function) if !is_for_tests(&function.attrs) => Some(function),
                    _ => None,
                });
                let names = functions.map(|function| (of.clone(), function.sig.ident.to_string()));
                self.methods.extend(names);
            }
            self.implemented = Some(of);
        }
        visit::visit_item_impl(self, block);
        self.implemented = outer;
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        if let Expr::Path(receiver) = &*call.receiver
            && receiver.path.is_ident("self")
            && let Some(of) = &self.implemented
        {
            self.calls.push((of.clone(), call.method.to_string()));
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let mut segments = names(path);
        self.path(segments.clone());
        if let Some(function) = segments.pop() {
            let of = match segments.as_slice() {
                [one] if one == "Self" => self.implemented.clone(),
                [] => None,
                _ => Some(self.named(segments, false)),
            };
            self.calls.extend(of.map(|of| (of, function)));
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.tokens(TokenBuffer::new2(call.tokens.clone()).begin());
        visit::visit_macro(self, call);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.tokens(TokenBuffer::new2(list.tokens.clone()).begin());
        }
    }

    // Ignore visibilities, because the path in `pub(in crate::engine)` is not a use of the module.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

fn names(path: &syn::Path) -> Vec<String> {
    let segments = path.segments.iter();
    segments.map(|one| one.ident.to_string()).collect()
}

/// The strongly connected components of two or more files, by Tarjan's algorithm.
fn circles(uses: &BTreeMap<Vec<String>, Uses>) -> Vec<Vec<&[String]>> {
    struct Search<'a> {
        uses: &'a BTreeMap<Vec<String>, Uses>,
        /// Each file's number, in the order in which the search reaches the files.
        number: BTreeMap<&'a [String], usize>,
        stack: Vec<&'a [String]>,
        found: Vec<Vec<&'a [String]>>,
    }
    impl<'a> Search<'a> {
        /// Visits `file` and the files that it uses. Returns the lowest number on the stack that
        /// can be reached from `file`.
        fn reach(&mut self, file: &'a [String]) -> usize {
            let own = self.number.len();
            self.number.insert(file, own);
            self.stack.push(file);
            let mut lowest = own;
            for to in self.uses[file].keys() {
                if !self.number.contains_key(to.as_slice()) {
                    lowest = lowest.min(self.reach(to));
                } else if self.stack.contains(&to.as_slice()) {
                    lowest = lowest.min(self.number[to.as_slice()]);
                }
            }
            if lowest == own {
                let start = self.stack.iter().position(|one| *one == file).unwrap();
                let component = self.stack.split_off(start);
                if component.len() > 1 {
                    self.found.push(component);
                }
            }
            lowest
        }
    }
    let mut search = Search {
        uses,
        number: BTreeMap::new(),
        stack: Vec::new(),
        found: Vec::new(),
    };
    for file in uses.keys() {
        if !search.number.contains_key(file.as_slice()) {
            search.reach(file);
        }
    }
    search.found
}

/// Whether the files are a module and modules directly below it.
fn is_one_module(circle: &[&[String]]) -> bool {
    let top = circle.iter().min_by_key(|file| file.len()).unwrap();
    let below = |file: &&[String]| file.len() == top.len() + 1 && file.starts_with(top);
    circle.iter().all(|file| file == top || below(file))
}

/// Fails if files of a crate use each other in a cycle.
///
/// Every path is a use of a file: an import, a path in code, a path in the arguments of a macro or
/// an attribute. It is a use of the file that defines the item, even if another file re-exports the
/// item. A module and its submodules are no exception: if a module uses an item of a submodule, and
/// the submodule uses an item of the module, they form a cycle.
///
/// A second pass includes re-exports. In this pass a cycle is allowed if it consists of a module
/// and modules directly below it. The first pass has shown that the module uses none of their
/// items, so it only re-exports them.
///
/// A call of a method on `self` counts as a use of the file that defines the method, which need not
/// be the file of the type.
///
/// This test does not detect calls of methods on other values, because syn does not resolve types.
/// It also does not detect uses of `macro_rules!` macros without a path.
#[test]
fn no_files_of_a_crate_import_each_other_in_a_circle() {
    // Check that an import by an absolute path is found.
    let lane = Sources::of("dunlin-lane").uses(false);
    let file = |path: &str| path.split("::").map(str::to_owned).collect::<Vec<_>>();
    assert!(lane[&file("internals::handshake::relay")].contains_key(&file("internals::policy")));
    // Check that a call of a method counts as a use of the file that defines the method.
    let proto = Sources::of("dunlin-proto").uses(false);
    let (sending, trunk) = (file("stripe::trunk::sending"), file("stripe::trunk"));
    assert!(proto[&sending][&trunk].contains("Trunk::is_over"));
    let mut report = Vec::new();
    for (package, _) in LAYERS {
        let sources = Sources::of(package);
        for reexports in [false, true] {
            let uses = sources.uses(reexports);
            for circle in circles(&uses) {
                if reexports && is_one_module(&circle) {
                    continue;
                }
                report.push(format!("{package}: {} files", circle.len()));
                for file in &circle {
                    for (to, names) in &uses[*file] {
                        if circle.contains(&to.as_slice()) {
                            let (from, to) = (file.join("::"), to.join("::"));
                            report.push(format!("  {from} -> {to}: {names:?}"));
                        }
                    }
                }
            }
        }
    }
    assert!(report.is_empty(), "cycles:\n{}", report.join("\n"));
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

/// Every Rust file of the workspace, tests included, by its path in the workspace.
fn all_files() -> BTreeMap<PathBuf, syn::File> {
    let mut files = Vec::new();
    for part in ["crates", "tests", "xtask", "fuzz"] {
        let before = files.len();
        rust_files(&root().join(part), &mut files);
        assert!(files.len() > before, "{part} has no sources");
    }
    let parsed = files.into_iter().map(|file| {
        let parsed = syn::parse_file(&fs::read_to_string(&file).unwrap()).unwrap();
        (file.strip_prefix(root()).unwrap().to_owned(), parsed)
    });
    parsed.collect()
}

/// Structs, and variants of enums, with too many fields.
#[derive(Default)]
struct Large(Vec<String>);

impl Large {
    fn count(&mut self, name: &Ident, fields: &Fields) {
        if fields.len() > MAX_FIELDS {
            self.0.push(format!("{name} has {} fields", fields.len()));
        }
    }
}

impl<'ast> Visit<'ast> for Large {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.count(&item.ident, &item.fields);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.count(&variant.ident, &variant.fields);
    }
}

#[test]
fn no_struct_and_no_variant_has_more_than_24_fields() {
    for (path, file) in all_files() {
        let mut large = Large::default();
        large.visit_file(&file);
        assert!(large.0.is_empty(), "{}: {:?}", path.display(), large.0);
    }
}

/// Whether a keyword is among the tokens, including those in macros.
fn contains_keyword(mut at: Cursor<'_>, keyword: &str) -> bool {
    while !at.eof() {
        if let Some((ident, after)) = at.ident() {
            if ident == keyword {
                return true;
            }
            at = after;
        } else if let Some((inside, _, _, after)) = at.any_group() {
            if contains_keyword(inside, keyword) {
                return true;
            }
            at = after;
        } else {
            at = at.token_tree().map_or(at, |(_, after)| after);
        }
    }
    false
}

/// Test programs, examples and build scripts are crates of their own and need no `forbid`
/// attribute, so this test searches them too.
#[test]
fn unsafe_is_where_it_is_allowed() {
    let mut unused: BTreeSet<_> = WITH_UNSAFE.into_iter().collect();
    for (path, file) in all_files() {
        if !contains_keyword(TokenBuffer::new2(file.to_token_stream()).begin(), "unsafe") {
            continue;
        }
        let place = WITH_UNSAFE.iter().find(|place| path.starts_with(place));
        let place =
            place.unwrap_or_else(|| panic!("{}: unsafe is not allowed here", path.display()));
        unused.remove(place);
    }
    assert!(
        unused.is_empty(),
        "in WITH_UNSAFE, but without unsafe: {unused:?}"
    );
}

#[test]
fn crates_without_unsafe_forbid_it() {
    let roots = ["src/lib.rs", "src/main.rs"];
    for (path, file) in all_files() {
        if !roots.iter().any(|end| path.ends_with(end)) {
            continue;
        }
        let forbids = file.attrs.iter().any(|attribute| {
            attribute.meta.to_token_stream().to_string() == "forbid (unsafe_code)"
        });
        let directory = path.parent().unwrap();
        let may = WITH_UNSAFE
            .iter()
            .any(|place| Path::new(place).starts_with(directory));
        assert_eq!(
            forbids,
            !may,
            "{}: left: has #![forbid(unsafe_code)]; right: must have it",
            path.display()
        );
    }
}
