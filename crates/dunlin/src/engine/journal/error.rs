//! What goes wrong with the journal, and what to do.

use std::io;
use std::path::{Path, PathBuf};

use dunlin_proto::journal::{State, Unreadable};
use dunlin_proto::wire::EncodeError;
use thiserror::Error;

/// What can go wrong with the journal.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JournalError {
    /// An operation of the file system failed: its disk is full or failing, or
    /// it may not be written.
    #[error("the journal {path} cannot be {what}: free space there, or check the disk and the permissions", path = path.display())]
    Io {
        /// What was to be done to it.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Others may read or write the directory.
    #[error("the journal {path} has mode {mode:03o}: others could read it, or change where VMs run; `chmod 700 {path}`", path = path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file does not say what happened.
    #[error("{path} cannot be relied upon; keep it, and find out where the VM is before it is run anywhere", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Unreadable,
    },
    /// Another process has the session.
    #[error("another process has the session {path}: it is the one to ask while it lives", path = path.display())]
    Held {
        /// The file.
        path: PathBuf,
    },
    /// There is a record of this session that a new one must not replace.
    #[error("{path} says of this session: {state}, attempt {attempt}; a new attempt must have a higher number, and begin when the last one is over", path = path.display())]
    Undecided {
        /// The file.
        path: PathBuf,
        /// What it says.
        state: State,
        /// Of which attempt.
        attempt: u32,
    },
    /// An earlier session of the same VM is not over.
    #[error("{path} says that an earlier migration of this VM is undecided ({state}): resolve it first", path = path.display())]
    Unresolved {
        /// The file of the earlier session.
        path: PathBuf,
        /// What it says.
        state: State,
    },
    /// There is no such session here.
    #[error("there is no session {path}", path = path.display())]
    Missing {
        /// The file that would hold it.
        path: PathBuf,
    },
    /// The record does not fit; the engine has made it wrongly.
    #[error("the record cannot be written")]
    Record(#[from] EncodeError),
}

pub(super) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_path_buf();
    move |source| JournalError::Io { what, path, source }
}
