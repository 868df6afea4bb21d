//! Sockets that a service manager has opened and passed to this process (sd_listen_fds(3)):
//! the descriptors from 3 upwards, with their count and names in the environment.

use std::env;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::fdpass::set_close_on_exec;

/// The first passed descriptor (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;
/// The maximum number of passed sockets. A larger count means that the environment is malformed.
const MOST: usize = 256;

/// A socket that the service manager passed to this process.
#[derive(Debug)]
pub struct Passed {
    /// The socket's name (`FileDescriptorName=` of its unit); "unknown" if the environment has no
    /// names.
    pub name: String,
    /// The socket, with close-on-exec set.
    pub socket: OwnedFd,
}

/// Takes ownership of the sockets that were passed to this process. A second call returns no
/// sockets. Call it before the process opens any descriptor.
///
/// # Errors
/// `InvalidData` if the environment is malformed or contradicts itself, or if a descriptor that it
/// lists is not open.
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
                invalid(format!(
                    "LISTEN_FDS includes descriptor {descriptor}, which is unusable: {error}"
                ))
            })
    });
    taken.collect()
}

/// Returns the names of the descriptors that were passed to this process, which has the process ID
/// `own`.
fn names(
    own: u32,
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
) -> io::Result<Vec<String>> {
    let (Some(pid), Some(count)) = (pid, count) else {
        return Ok(Vec::new());
    };
    // If `pid` is another process, the service manager passed the sockets to that process. This
    // process has only inherited the environment.
    if pid.parse() != Ok(own) {
        return Ok(Vec::new());
    }
    let count = match count.parse::<usize>() {
        Ok(count) if count <= MOST => count,
        _ => {
            return Err(invalid(format!(
                "LISTEN_FDS={count:?} is not a number from 0 to {MOST}"
            )));
        }
    };
    let Some(names) = names else {
        return Ok(vec!["unknown".to_owned(); count]);
    };
    let names: Vec<String> = names.split(':').map(str::to_owned).collect();
    if names.len() != count {
        let names = names.len();
        let text = format!("LISTEN_FDS is {count}, but LISTEN_FDNAMES has {names} names");
        return Err(invalid(text));
    }
    Ok(names)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Takes ownership of a passed descriptor and sets close-on-exec.
fn own(descriptor: RawFd) -> io::Result<OwnedFd> {
    set_close_on_exec(descriptor)?;
    // SAFETY: the call above has shown that the descriptor is open. It was open when this process
    // started, so no descriptor opened by this process has its number, and the service manager
    // passed it to this process only. `take` takes ownership of each number once.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn sockets_passed_to_another_process_are_not_taken() {
        let none = Vec::<String>::new();
        assert_eq!(names(7, None, Some("1"), None).unwrap(), none);
        assert_eq!(names(7, Some("8"), Some("1"), None).unwrap(), none);
        assert_eq!(names(7, Some("7"), None, None).unwrap(), none);
        assert_eq!(names(7, Some("7"), Some("0"), None).unwrap(), none);
    }

    #[test]
    fn i7_a_contradictory_environment_is_an_error() {
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
