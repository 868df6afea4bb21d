//! Tests that the examples print what they should. `cargo test` builds the examples with the tests.
//! If the arguments of `cargo test` select single tests, run `cargo build --examples` first.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::Command;

/// Runs an example, which must succeed, and returns what it prints.
fn run(name: &str) -> String {
    // target/debug/deps/examples-… is next to target/debug/examples/.
    let test = std::env::current_exe().unwrap();
    let target = test.parent().and_then(|deps| deps.parent()).unwrap();
    let path: PathBuf = target.join("examples").join(name);
    let output = Command::new(&path)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}; build the examples", path.display()));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {complaints}{printed}");
    assert_eq!(complaints, "", "{name}");
    printed
}

#[test]
fn i3_the_smallest_integration_moves_its_vm() {
    let printed = run("smallest");
    assert!(printed.starts_with("moved in "), "{printed}");
    assert!(
        printed.ends_with("it runs there: true\nmemory is whole: true\n"),
        "{printed}"
    );
}

/// The crate's README contains the example.
#[test]
fn the_readme_has_the_smallest_example() {
    let example = include_str!("../examples/smallest.rs");
    assert!(
        example.lines().count() < 120,
        "the example has 120 lines or more"
    );
    let readme = include_str!("../README.md");
    let (_, block) = readme.split_once("```rust,ignore\n").unwrap();
    let (block, _) = block.split_once("\n```\n").unwrap();
    for (number, (of_readme, of_example)) in block.lines().zip(example.lines()).enumerate() {
        assert_eq!(of_readme, of_example, "line {}", number + 1);
    }
    assert_eq!(block.lines().count(), example.lines().count());
}

#[test]
fn i3_a_vm_with_two_regions_and_two_logs_moves() {
    let printed = run("two_logs");
    assert!(printed.starts_with("pass 1: "), "{printed}");
    assert!(
        printed.ends_with("it runs there: true\nmemory is whole: true\n"),
        "{printed}"
    );
}

#[test]
fn a_vmm_that_may_not_open_sockets_is_given_them() {
    let printed = run("own_sockets");
    assert_eq!(
        printed,
        "connections handed in: 3\nit runs there: true\nmemory is whole: true\n"
    );
}

/// The example replays the guest's steps in a new VM, so memory is equal only if no step was lost
/// at either host.
#[test]
fn i1_i3_a_vm_with_its_own_dirty_bitmap_moves_between_pinned_hosts() {
    let printed = run("page");
    assert_eq!(
        printed,
        "it runs there only: true, digests equal: Some(true), registers equal: true, \
         memory equal: true\n"
    );
}
