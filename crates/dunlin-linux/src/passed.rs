//! Sockets that a service manager has opened and passed to this process
//! (sd_listen_fds(3)): descriptors from 3 on, counted and named by the environment.

use std::env;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::fdpass::keep_from_programs;

/// The first descriptor behind standard error.
const FIRST: RawFd = 3;
/// More are not passed by anybody who means it.
const MOST: usize = 256;

/// A socket that was passed.
#[derive(Debug)]
pub struct Passed {
    /// Its name (`FileDescriptorName=` of its unit); "unknown" where it has none.
    pub name: String,
    /// The socket. Programs that this process starts do not get it.
    pub socket: OwnedFd,
}

/// Takes what was passed to this process, once; a second call finds nothing. Call it
/// before the process opens anything.
///
/// # Errors
/// `InvalidData`: the environment and the descriptors do not fit together.
pub fn take() -> io::Result<Vec<Passed>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    let of = |name| env::var(name).ok();
    let names = names(
        std::process::id(),
        of("LISTEN_PID").as_deref(),
        of("LISTEN_FDS").as_deref(),
        of("LISTEN_FDNAMES").as_deref(),
    )?;
    let all = FIRST..;
    let taken = all.zip(names).map(|(descriptor, name)| {
        own(descriptor)
            .map(|socket| Passed { name, socket })
            .map_err(|error| {
                wrong(format!(
                    "descriptor {descriptor} was said to be passed: {error}"
                ))
            })
    });
    taken.collect()
}

/// The names of the descriptors that are this process's.
fn names(
    own: u32,
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
) -> io::Result<Vec<String>> {
    let (Some(pid), Some(count)) = (pid, count) else {
        return Ok(Vec::new());
    };
    // They were passed to a parent, which has left its environment behind.
    if pid.parse() != Ok(own) {
        return Ok(Vec::new());
    }
    let count = match count.parse::<usize>() {
        Ok(count) if count <= MOST => count,
        _ => {
            return Err(wrong(format!(
                "LISTEN_FDS={count:?} is no number of sockets"
            )));
        }
    };
    let Some(names) = names else {
        return Ok(vec!["unknown".to_owned(); count]);
    };
    let names: Vec<String> = names.split(':').map(str::to_owned).collect();
    if names.len() != count {
        let text = format!("{count} sockets were passed, with {} names", names.len());
        return Err(wrong(text));
    }
    Ok(names)
}

fn wrong(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Makes a descriptor this process's own, and no child's.
fn own(descriptor: RawFd) -> io::Result<OwnedFd> {
    keep_from_programs(descriptor)?;
    // SAFETY: it is open, as the call above has shown. It was open when this process
    // began, so that nothing that the process has opened can have its number, and
    // whoever passed it has given it to us alone; `take` does this once.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_was_passed_to_another_process_is_left_alone() {
        let none = Vec::<String>::new();
        assert_eq!(names(7, None, Some("1"), None).unwrap(), none);
        assert_eq!(names(7, Some("8"), Some("1"), None).unwrap(), none);
        assert_eq!(names(7, Some("7"), None, None).unwrap(), none);
        assert_eq!(names(7, Some("7"), Some("0"), None).unwrap(), none);
    }

    #[test]
    fn i7_an_environment_that_contradicts_itself_is_an_error() {
        let ours = Some("7");
        assert_eq!(names(7, ours, Some("2"), Some("a:b")).unwrap(), ["a", "b"]);
        assert_eq!(names(7, ours, Some("1"), None).unwrap(), ["unknown"]);
        for (count, named) in [
            ("x", None),
            ("-1", None),
            ("257", None),
            ("2", Some("a")),
            ("1", Some("a:b")),
            ("0", Some("a")),
        ] {
            let error = names(7, ours, Some(count), named).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{count}");
        }
    }
}
