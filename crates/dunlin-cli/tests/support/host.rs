//! Simulates hosts that lack something: runs commands in separate namespaces and under resource
//! limits.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::process::Command;

use crate::support::finish;

/// Asserts that `text` contains each of `parts`.
pub fn assert_says(text: &str, parts: &[&str]) {
    println!("{text}");
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

/// Reports that this host cannot run a test; in CI that is a failure.
pub fn skip(what: &str) {
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "CI must be able to test this: {what}"
    );
    println!("skipped: {what}");
}

/// Wraps the command in a shell that runs `first` and then execs the command.
pub fn after(first: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{first} && exec \"$@\""), "sh"]);
    pass_on(&mut shell, command);
    shell
}

/// Wraps the command in a new mount namespace, in which a shell first runs `script`. Without the
/// permission to create the namespace, returns `None`, or panics in CI.
pub fn in_own_mounts(script: &str, command: &Command) -> Option<Command> {
    let inside = |command: &Command| {
        let mut unshare = Command::new("unshare");
        unshare.arg("--mount");
        pass_on(&mut unshare, &after(script, command));
        unshare
    };
    let tried = finish(inside(&Command::new("true")));
    if tried.code != 0 {
        skip(&format!("no mount namespaces, which need root: {tried:?}"));
        return None;
    }
    Some(inside(command))
}

/// Passes the command with its arguments and environment as arguments of another command.
pub fn pass_on(to: &mut Command, command: &Command) {
    to.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}
