//! The public API as text: what a new release may add to and not break.
//!
//! docs/api/ has a file for each of five library crates, made from the sources, so that it needs no nightly
//! compiler: every item that is `pub`. Rustc's lint `unreachable_pub`, which is an error
//! in CI, rejects a `pub` item that no other crate can reach. An item is listed under the nearest public module above it.
//!
//! `DUNLIN_BLESS=1 cargo test --package dunlin --test api` writes it anew. A line
//! that went away or changed is a breaking change, and CHANGELOG.md says so.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use quote::{ToTokens, quote};
use syn::{
    Attribute, Field, Fields, ImplItem, Item, ItemImpl, ItemMod, ItemUse, TraitItem, Type, UseTree,
    Visibility,
};

/// What is public, by module.
#[derive(Default)]
struct Api {
    lines: BTreeSet<String>,
    types: BTreeSet<String>,
    /// With the module that contains them.
    impls: Vec<(String, ItemImpl)>,
}

impl Api {
    /// A file's items, which belong to the public module `path`; its own
    /// modules lie in `directory`.
    fn file(&mut self, file: &Path, directory: &Path, path: &str) {
        let source = fs::read_to_string(file).unwrap();
        self.items(syn::parse_file(&source).unwrap().items, directory, path);
    }

    fn items(&mut self, items: Vec<Item>, directory: &Path, path: &str) {
        let modules: BTreeSet<String> = items.iter().filter_map(module_name).collect();
        for item in items {
            if is_for_tests(attributes(&item)) {
                continue;
            }
            match item {
                Item::Mod(module) => self.module(module, directory, path),
                Item::Use(import) => self.import(&import, &modules, path),
                Item::Impl(block) => self.impls.push((path.to_owned(), block)),
                item => self.item(item, path),
            }
        }
    }

    fn module(&mut self, module: ItemMod, directory: &Path, path: &str) {
        let name = module.ident.to_string();
        let path = if is_public(&module.vis) {
            self.lines.insert(format!("mod {path}::{name}"));
            format!("{path}::{name}")
        } else {
            path.to_owned()
        };
        let own = directory.join(&name);
        if let Some((_, items)) = module.content {
            return self.items(items, &own, &path);
        }
        let beside = directory.join(format!("{name}.rs"));
        let file = if beside.exists() {
            beside
        } else {
            own.join("mod.rs")
        };
        self.file(&file, &own, &path);
    }

    /// What other crates define and this one gives out.
    fn import(&mut self, import: &ItemUse, modules: &BTreeSet<String>, path: &str) {
        let UseTree::Path(tree) = &import.tree else {
            return;
        };
        let first = tree.ident.to_string();
        let local = ["crate", "self", "super"].contains(&&*first) || modules.contains(&first);
        if is_public(&import.vis) && !local {
            self.lines
                .insert(format!("{path}: use {}", text(&import.tree)));
        }
    }

    fn item(&mut self, item: Item, path: &str) {
        let derives = derived(attributes(&item));
        let line = match item {
            Item::Fn(one) if is_public(&one.vis) => text(&one.sig),
            Item::Const(one) if is_public(&one.vis) => {
                let (name, of) = (&one.ident, &one.ty);
                text(&quote!(const #name: #of))
            }
            Item::Type(one) if is_public(&one.vis) => {
                let (name, generics, of) = (&one.ident, &one.generics, &one.ty);
                text(&quote!(type #name #generics = #of))
            }
            Item::Struct(one) if is_public(&one.vis) => {
                self.types.insert(one.ident.to_string());
                let (name, generics) = (&one.ident, &one.generics);
                let head = text(&quote!(struct #name #generics));
                format!("{derives}{head} {}", fields(&one.fields, false))
            }
            Item::Enum(one) if is_public(&one.vis) => {
                self.types.insert(one.ident.to_string());
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
            Item::Trait(one) if is_public(&one.vis) => {
                let name = one.ident.to_string();
                for inner in &one.items {
                    if let TraitItem::Fn(method) = inner {
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
        self.lines.insert(format!("{path}: {}", line.trim_end()));
    }

    /// Methods and traits of public types.
    fn implementations(&mut self) {
        for (path, block) in std::mem::take(&mut self.impls) {
            let Type::Path(of) = &*block.self_ty else {
                continue;
            };
            let name = of.path.segments.last().unwrap().ident.to_string();
            if !self.types.contains(&name) {
                continue;
            }
            if let Some((_, of_trait, _)) = &block.trait_ {
                let generics = &block.generics;
                let (of_trait, of) = (text(of_trait), text(of));
                self.lines.insert(format!(
                    "{path}: impl{} {of_trait} for {of}",
                    text(generics)
                ));
                continue;
            }
            for inner in &block.items {
                match inner {
                    ImplItem::Fn(one) if is_public(&one.vis) && !is_for_tests(&one.attrs) => {
                        self.lines
                            .insert(format!("{path}: {name}::{}", text(&one.sig)));
                    }
                    ImplItem::Const(one) if is_public(&one.vis) => {
                        let (constant, of) = (&one.ident, text(&one.ty));
                        self.lines
                            .insert(format!("{path}: {name}::const {constant}: {of}"));
                    }
                    _ => {}
                }
            }
        }
    }
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

fn module_name(item: &Item) -> Option<String> {
    match item {
        Item::Mod(module) => Some(module.ident.to_string()),
        _ => None,
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Tests, documentation tests and fuzz entries.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes
        .iter()
        .any(|one| one.path().is_ident("cfg") && text(&one.meta).contains("test"))
}

/// What a type can do by itself, and whether it may grow.
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

/// Tokens as one would write them.
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
    // With an item each, so that no list can be an empty one of everything.
    for (package, item) in [
        (
            "dunlin",
            "dunlin::engine::source: Migration::fn run(self) -> Result<Report, MigrateError>",
        ),
        ("dunlin-lane", "dunlin_lane::dial: trait LaneDialer"),
        ("dunlin-tunnel", "dunlin_tunnel: struct Tunnel"),
        ("dunlin-handoff", "dunlin_handoff::connect: fn connect("),
        ("dunlin-ipsec", "dunlin_ipsec: fn up("),
    ] {
        assert_written_down(package, item);
    }
}

/// Checks the public API of a crate against its file, in which there is `item`.
fn assert_written_down(package: &str, item: &str) {
    let crates = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let sources = crates.join(package).join("src");
    let mut api = Api::default();
    api.file(
        &sources.join("lib.rs"),
        &sources,
        &package.replace('-', "_"),
    );
    api.implementations();
    let now: String = api
        .lines
        .iter()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect();
    let path = crates.join(format!("../docs/api/{package}.txt"));
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
        "docs/api/{package}.txt is not the API any more; if that is meant, write it anew with \
         DUNLIN_BLESS=1\ngone: {gone:#?}\nnew: {new:#?}"
    );
    assert!(written.contains(item), "{package} has no {item}");
}
