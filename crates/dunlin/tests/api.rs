//! The public API as text. A new release may add to it, but must not break it.
//!
//! docs/api/ has one file for each of five library crates. This test makes the files from the
//! sources, so no nightly compiler is needed. A file lists every `pub` item that another crate can
//! name without the feature `unstable-internals`: the items of public modules, and what public
//! modules re-export. Items of this workspace are listed in full under the first path that exports
//! them. A line with `use` lists each further path, each item of another crate, and each item made
//! by a macro.
//!
//! `DUNLIN_BLESS=1 cargo test --package dunlin --test api` regenerates the files. If a removed or
//! changed line breaks a caller, CHANGELOG.md must list it.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quote::{ToTokens, quote};
use syn::{
    Attribute, Field, Fields, ImplItem, Item, ItemImpl, ItemMod, TraitItem, Type, UseTree,
    Visibility,
};

/// The lists leave out the items that need this feature.
const UNSTABLE: &str = "unstable-internals";

/// Maximum number of lines in the list of dunlin-lane.
const LANE_MAX: usize = 150;

/// Maximum number of lines in the list of dunlin.
const DUNLIN_MAX: usize = 350;

/// A path within a crate, the crate's name first.
type Names = Vec<String>;

/// All imports of a module, and its items except those for which [`is_left_out`] is true.
#[derive(Default)]
struct Module {
    items: Vec<Item>,
    uses: Vec<Use>,
    /// Whether every module from the crate's root to this one is public.
    is_public: bool,
}

/// One name that a module imports.
struct Use {
    path: Names,
    /// The imported name; `None` if the import is a glob.
    bound: Option<String>,
    is_public: bool,
}

/// The modules of the workspace's crates, by path. A crate is read when a list first refers to it.
#[derive(Default)]
struct Sources {
    modules: BTreeMap<Names, Module>,
}

impl Sources {
    fn add(&mut self, package: &str) {
        let sources = crates().join(package).join("src");
        let root = vec![package.replace('-', "_")];
        if !self.modules.contains_key(&root) {
            self.file(&sources.join("lib.rs"), &sources, root, true);
        }
    }

    /// Adds a file's items. The files of its submodules are in `directory`.
    fn file(&mut self, file: &Path, directory: &Path, path: Names, is_public: bool) {
        let source = fs::read_to_string(file).unwrap();
        let items = syn::parse_file(&source).unwrap().items;
        self.items(items, directory, path, is_public);
    }

    fn items(&mut self, items: Vec<Item>, directory: &Path, path: Names, is_public: bool) {
        let mut module = Module {
            is_public,
            ..Module::default()
        };
        for item in items {
            let is_left_out = is_left_out(attributes(&item));
            // Keep every import, because a stable path may lead through a re-export that other
            // crates cannot name.
            if is_left_out && !matches!(item, Item::Use(_)) {
                continue;
            }
            match item {
                Item::Mod(inner) => self.module(inner, directory, &path, is_public),
                Item::Use(import) => {
                    let is_public = self::is_public(&import.vis) && !is_left_out;
                    let mut before = Vec::new();
                    bind(&import.tree, &mut before, is_public, &mut module.uses);
                }
                item => module.items.push(item),
            }
        }
        self.modules.insert(path, module);
    }

    fn module(&mut self, module: ItemMod, directory: &Path, path: &[String], is_public: bool) {
        let name = module.ident.to_string();
        let is_public = is_public && self::is_public(&module.vis);
        let own = directory.join(&name);
        let beside = directory.join(format!("{name}.rs"));
        let path = below(path, name);
        if let Some((_, items)) = module.content {
            return self.items(items, &own, path, is_public);
        }
        let file = if beside.exists() {
            beside
        } else {
            own.join("mod.rs")
        };
        self.file(&file, &own, path, is_public);
    }

    /// Resolves `path`, as used in the module `from`, to a path from its crate's root. Returns
    /// `None` for crates outside this workspace.
    fn anchored(&mut self, from: &[String], path: &[String]) -> Option<Names> {
        let mut at = from.to_vec();
        let mut rest = path;
        while let Some((first, after)) = rest.split_first() {
            match first.as_str() {
                "crate" => at.truncate(1),
                "self" => {}
                "super" => drop(at.pop()),
                _ => break,
            }
            rest = after;
        }
        if rest.len() == path.len() {
            let package = path[0].replace('_', "-");
            let is_local = self.modules.contains_key(&below(from, path[0].clone()))
                || self.binds(from, &path[0]);
            if !is_local {
                if !crates().join(&package).join("src/lib.rs").exists() {
                    return None;
                }
                self.add(&package);
                at.clear();
            }
        }
        at.extend_from_slice(rest);
        Some(at)
    }

    fn binds(&self, module: &[String], name: &str) -> bool {
        let uses = &self.modules[module].uses;
        uses.iter().any(|one| {
            one.bound.as_deref() == Some(name) && one.path.first().map(String::as_str) != Some(name)
        })
    }

    /// Whether a macro in `module` may define `name`.
    fn makes(&self, module: &[String], name: &str) -> bool {
        let mut items = self.modules[module].items.iter();
        items.any(|item| matches!(item, Item::Macro(_)) && text(item).contains(name))
    }

    /// Follows imports to the definitions of the item or module `path`. One name can have several
    /// definitions, such as a module and a function.
    fn definitions(&mut self, path: &[String], visited: &mut BTreeSet<Names>) -> Vec<Found> {
        if !visited.insert(path.to_vec()) {
            return Vec::new();
        }
        let Some((name, parent)) = path.split_last() else {
            return Vec::new();
        };
        let mut found = Vec::new();
        if parent.is_empty() && self.modules.contains_key(path) {
            found.push(Found::Module(path.to_vec()));
        }
        let parents = if parent.is_empty() {
            Vec::new()
        } else if self.modules.contains_key(parent) {
            vec![parent.to_vec()]
        } else {
            let modules = self.definitions(parent, visited).into_iter();
            let module = |found| match found {
                Found::Module(path) => Some(path),
                _ => None,
            };
            modules.filter_map(module).collect()
        };
        for parent in parents {
            let inner = below(&parent, name.clone());
            if self.modules.contains_key(&inner) {
                found.push(Found::Module(inner));
            }
            let module = &self.modules[&parent];
            if module
                .items
                .iter()
                .any(|item| ident(item).as_ref() == Some(name))
            {
                found.push(Found::Item(parent.clone(), name.clone()));
            }
            let mut paths = Vec::new();
            for one in &module.uses {
                match &one.bound {
                    Some(bound) if bound == name => paths.push((one.path.clone(), false)),
                    Some(_) => {}
                    None => paths.push((below(&one.path, name.clone()), true)),
                }
            }
            for (path, is_glob) in paths {
                match self.anchored(&parent, &path) {
                    Some(path) => found.extend(self.definitions(&path, visited)),
                    None if is_glob => {}
                    None => found.push(Found::Foreign(path.join("::"))),
                }
            }
        }
        found
    }
}

/// What a path names.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Module(Names),
    /// An item, by its module and name.
    Item(Names, String),
    /// An item of a crate outside the workspace.
    Foreign(String),
}

/// The public API of one crate.
#[derive(Default)]
struct Api {
    sources: Sources,
    lines: BTreeSet<String>,
    /// The listed items and modules, each with the path under which it is listed.
    listed: BTreeMap<Found, String>,
}

impl Api {
    fn of(package: &str) -> Self {
        let mut api = Self::default();
        api.sources.add(package);
        let root = package.replace('-', "_");
        api.module(std::slice::from_ref(&root), &root);
        api.implementations();
        api
    }

    /// Lists the public items of the module `at` under the path `shown`.
    fn module(&mut self, at: &[String], shown: &str) {
        let found = Found::Module(at.to_vec());
        if self.listed.insert(found, shown.to_owned()).is_some() {
            return;
        }
        if shown.contains("::") {
            self.lines.insert(format!("mod {shown}"));
        }
        let module = &self.sources.modules[at];
        let items: Vec<_> = module.items.iter().filter_map(ident).collect();
        let uses = module.uses.iter().filter(|one| one.is_public);
        let uses: Vec<(Names, Option<String>)> = uses
            .map(|one| (one.path.clone(), one.bound.clone()))
            .collect();
        for name in items {
            self.item(at, &name, shown);
        }
        for (path, bound) in uses {
            self.reexport(at, &path, bound.as_deref(), shown);
        }
        let inner = self.sources.modules.iter().filter(|(path, module)| {
            path.len() == at.len() + 1 && path.starts_with(at) && module.is_public
        });
        let inner: Vec<Names> = inner.map(|(path, _)| path.clone()).collect();
        for path in inner {
            self.module(&path, &format!("{shown}::{}", path[at.len()]));
        }
    }

    /// Lists the item or module `path`, which the module `at` re-exports, under the path `shown`.
    fn reexport(&mut self, at: &[String], path: &[String], bound: Option<&str>, shown: &str) {
        let bound = bound.expect("a public import is a glob");
        let alias = if path.last().map(String::as_str) == Some(bound) {
            String::new()
        } else {
            format!(" as {bound}")
        };
        let line = |from: &[String]| format!("{shown}: use {}{alias}", from.join("::"));
        let Some(full) = self.sources.anchored(at, path) else {
            self.lines.insert(line(path));
            return;
        };
        let definitions = self.sources.definitions(&full, &mut BTreeSet::new());
        if definitions.is_empty() {
            let (name, module) = full.split_last().unwrap();
            assert!(self.sources.makes(module, name), "{shown}: no {full:?}");
            self.lines.insert(line(&full));
        }
        for found in definitions {
            let module = match &found {
                Found::Module(path) | Found::Item(path, _) => path,
                Found::Foreign(_) => {
                    self.lines.insert(line(path));
                    continue;
                }
            };
            // An item of a public module of this crate is listed in full under that module.
            let has_lines = module[0] == at[0] && self.sources.modules[module].is_public;
            if !alias.is_empty() && matches!(found, Found::Item(..))
                || !has_lines && self.listed.contains_key(&found)
            {
                self.lines.insert(line(&full));
            }
            match &found {
                _ if has_lines => {}
                Found::Item(path, name) => self.item(path, name, shown),
                Found::Module(path) => self.module(path, &format!("{shown}::{bound}")),
                Found::Foreign(_) => {}
            }
        }
    }

    /// Lists the public items `name` of the module `at` under the path `shown`.
    fn item(&mut self, at: &[String], name: &str, shown: &str) {
        let found = Found::Item(at.to_vec(), name.to_owned());
        if self.listed.contains_key(&found) {
            return;
        }
        let items = self.sources.modules[at].items.iter();
        let items = items.filter(|item| ident(item).as_deref() == Some(name));
        for item in items.cloned().collect::<Vec<_>>() {
            self.listed.insert(found.clone(), shown.to_owned());
            self.definition(item, shown);
        }
    }

    fn definition(&mut self, item: Item, path: &str) {
        let derives = derived(attributes(&item));
        let line = match item {
            Item::Fn(one) => text(&one.sig),
            Item::Const(one) => {
                let (name, of) = (&one.ident, &one.ty);
                text(&quote!(const #name: #of))
            }
            Item::Type(one) => {
                let (name, generics, of) = (&one.ident, &one.generics, &one.ty);
                text(&quote!(type #name #generics = #of))
            }
            Item::Struct(one) => {
                let (name, generics) = (&one.ident, &one.generics);
                let head = text(&quote!(struct #name #generics));
                format!("{derives}{head} {}", fields(&one.fields, false))
            }
            Item::Enum(one) => {
                let name = one.ident.to_string();
                for variant in &one.variants {
                    self.lines.insert(format!(
                        "{path}: {name}::{} {}",
                        variant.ident,
                        fields(&variant.fields, true)
                    ));
                }
                format!("{derives}enum {name}{}", text(&one.generics))
            }
            Item::Trait(one) => {
                let name = one.ident.to_string();
                for inner in &one.items {
                    if let TraitItem::Fn(method) = inner
                        && !is_left_out(&method.attrs)
                    {
                        let given = if method.default.is_some() {
                            " (given)"
                        } else {
                            ""
                        };
                        self.lines
                            .insert(format!("{path}: {name}: {}{given}", text(&method.sig)));
                    }
                }
                let bounds = &one.supertraits;
                format!("trait {name}: {}", text(bounds))
            }
            _ => return,
        };
        self.lines.insert(format!("{path}: {line}"));
    }

    /// Lists the methods and traits of the listed types.
    fn implementations(&mut self) {
        let mut blocks = Vec::new();
        for (path, module) in &self.sources.modules {
            for item in &module.items {
                if let Item::Impl(block) = item {
                    blocks.push((path.clone(), block.clone()));
                }
            }
        }
        for (at, block) in blocks {
            let Type::Path(of) = &*block.self_ty else {
                continue;
            };
            let segments = of.path.segments.iter();
            let names: Names = segments.map(|one| one.ident.to_string()).collect();
            let name = names.last().unwrap().clone();
            // A name without a path is defined or imported in this module, or belongs to the
            // language.
            let full = match names.as_slice() {
                [_] => Some(below(&at, name.clone())),
                _ => self.sources.anchored(&at, &names),
            };
            let full = full.unwrap_or_default();
            let found = self.sources.definitions(&full, &mut BTreeSet::new());
            let Some(path) = found.iter().find_map(|one| self.listed.get(one)).cloned() else {
                continue;
            };
            self.implementation(&block, &name, &path);
        }
    }

    fn implementation(&mut self, block: &ItemImpl, name: &str, path: &str) {
        if let Some((_, of_trait, _)) = &block.trait_ {
            let (generics, of) = (text(&block.generics), text(&block.self_ty));
            let of_trait = text(of_trait);
            self.lines
                .insert(format!("{path}: impl{generics} {of_trait} for {of}"));
            return;
        }
        for inner in &block.items {
            match inner {
                ImplItem::Fn(one) if is_public(&one.vis) && !is_left_out(&one.attrs) => {
                    self.lines
                        .insert(format!("{path}: {name}::{}", text(&one.sig)));
                }
                ImplItem::Const(one) if is_public(&one.vis) && !is_left_out(&one.attrs) => {
                    let (constant, of) = (&one.ident, text(&one.ty));
                    self.lines
                        .insert(format!("{path}: {name}::const {constant}: {of}"));
                }
                _ => {}
            }
        }
    }
}

fn crates() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn below(path: &[String], name: String) -> Names {
    let mut path = path.to_vec();
    path.push(name);
    path
}

/// Collects the names that an import binds.
fn bind(tree: &UseTree, before: &mut Names, is_public: bool, uses: &mut Vec<Use>) {
    let (name, bound) = match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            bind(&path.tree, before, is_public, uses);
            before.pop();
            return;
        }
        UseTree::Group(group) => {
            for one in &group.items {
                bind(one, before, is_public, uses);
            }
            return;
        }
        UseTree::Name(one) => (one.ident.to_string(), Some(one.ident.to_string())),
        UseTree::Rename(one) => (one.ident.to_string(), Some(one.rename.to_string())),
        UseTree::Glob(_) => ("self".into(), None),
    };
    let (path, bound) = if name == "self" {
        let bound = bound.map(|bound| match bound.as_str() {
            "self" => before.last().unwrap().clone(),
            _ => bound,
        });
        (before.clone(), bound)
    } else {
        (below(before, name), bound)
    };
    uses.push(Use {
        path,
        bound,
        is_public,
    });
}

/// The name of a public item that a list can contain.
fn ident(item: &Item) -> Option<String> {
    let (visibility, name) = match item {
        Item::Const(one) => (&one.vis, &one.ident),
        Item::Enum(one) => (&one.vis, &one.ident),
        Item::Fn(one) => (&one.vis, &one.sig.ident),
        Item::Struct(one) => (&one.vis, &one.ident),
        Item::Trait(one) => (&one.vis, &one.ident),
        Item::Type(one) => (&one.vis, &one.ident),
        _ => return None,
    };
    is_public(visibility).then(|| name.to_string())
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(one) => &one.attrs,
        Item::Enum(one) => &one.attrs,
        Item::Fn(one) => &one.attrs,
        Item::Impl(one) => &one.attrs,
        Item::Mod(one) => &one.attrs,
        Item::Struct(one) => &one.attrs,
        Item::Trait(one) => &one.attrs,
        Item::Type(one) => &one.attrs,
        Item::Use(one) => &one.attrs,
        _ => &[],
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Whether an item is left out: tests, documentation tests, fuzz entries, and items that need
/// [`UNSTABLE`].
fn is_left_out(attributes: &[Attribute]) -> bool {
    let conditions = attributes.iter().filter(|one| one.path().is_ident("cfg"));
    conditions.map(|one| text(&one.meta)).any(|condition| {
        let is_unstable = condition.contains(UNSTABLE) && !condition.contains("not");
        condition.contains("test") || is_unstable
    })
}

/// The derived traits of a type, and whether it is `non_exhaustive`.
fn derived(attributes: &[Attribute]) -> String {
    let wanted =
        |one: &&Attribute| one.path().is_ident("derive") || one.path().is_ident("non_exhaustive");
    let all = attributes.iter().filter(wanted);
    all.map(|one| format!("{} ", text(&one.meta))).collect()
}

fn fields(all: &Fields, of_variant: bool) -> String {
    let shown = |field: &&Field| of_variant || is_public(&field.vis);
    let mut parts: Vec<String> = all
        .iter()
        .filter(shown)
        .map(|field| match &field.ident {
            Some(name) => format!("{name}: {}", text(&field.ty)),
            None => text(&field.ty),
        })
        .collect();
    if parts.len() < all.len() {
        parts.push("..".into());
    }
    match all {
        Fields::Unit => String::new(),
        Fields::Named(_) => format!("{{ {} }}", parts.join(", ")),
        Fields::Unnamed(_) => format!("({})", parts.join(", ")),
    }
}

/// The text of tokens, spaced as a person would write them.
fn text(tokens: &impl ToTokens) -> String {
    let mut text = tokens.to_token_stream().to_string();
    text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (from, to) in [
        (" :: ", "::"),
        (":: ", "::"),
        (" ::", "::"),
        (" : ", ": "),
        (" , ", ", "),
        (" ,", ","),
        (" < ", "<"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        ("- >", "->"),
        ("->", " ->"),
        ("& ", "&"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        ("[ ", "["),
        (" ]", "]"),
        (" ;", ";"),
        (",)", ")"),
        (", )", ")"),
        ("  ", " "),
    ] {
        text = text.replace(from, to);
    }
    text
}

#[test]
fn the_public_api_is_what_is_written_down() {
    // Each crate comes with an item that its list must contain, so that an empty list does not
    // pass.
    for (package, item) in [
        (
            "dunlin",
            "dunlin::engine::source: Migration::fn run(self) -> Result<Report, MigrateError>",
        ),
        ("dunlin-lane", "dunlin_lane: trait LaneDialer"),
        ("dunlin-tunnel", "dunlin_tunnel: struct Tunnel"),
        ("dunlin-handoff", "dunlin_handoff::connect: fn connect("),
        ("dunlin-ipsec", "dunlin_ipsec: fn up("),
    ] {
        assert_written_down(package, item);
    }
}

#[test]
fn a_list_expands_reexports_and_leaves_out_the_unstable() {
    let (dunlin, lane) = (Api::of("dunlin"), Api::of("dunlin-lane"));
    for (api, most) in [(&lane, LANE_MAX), (&dunlin, DUNLIN_MAX)] {
        assert!(api.lines.len() <= most, "{}", api.lines.len());
    }
    let line = "trait SealedLanes: LaneAcceptor + fmt::Debug";
    for (api, path) in [(&lane, "dunlin_lane"), (&dunlin, "dunlin::lane")] {
        assert!(api.lines.contains(&format!("{path}: {line}")));
        // Items that need the feature `unstable-internals` must not be listed: a module, methods
        // and re-exports.
        for unstable in [
            "::record",
            "DataSender::fn send(",
            "IdentityErrorKind::",
            "SessionJournal",
            "fn records_per_lane(",
        ] {
            let is_listed = |line: &&String| line.contains(unstable);
            assert_eq!(api.lines.iter().find(is_listed), None);
        }
    }
}

/// Checks the public API of a crate against its file, which must contain `item`.
fn assert_written_down(package: &str, item: &str) {
    let api = Api::of(package);
    let now: String = api
        .lines
        .iter()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect();
    let path = crates().join(format!("../docs/api/{package}.txt"));
    if std::env::var_os("DUNLIN_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &now).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    let (before, after): (BTreeSet<_>, BTreeSet<_>) =
        (written.lines().collect(), now.lines().collect());
    let gone: Vec<_> = before.difference(&after).collect();
    let new: Vec<_> = after.difference(&before).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "docs/api/{package}.txt no longer matches the API; if the change is intended, regenerate it with \
         DUNLIN_BLESS=1\ngone: {gone:#?}\nnew: {new:#?}"
    );
    assert!(written.contains(item), "{package} has no {item}");
}
