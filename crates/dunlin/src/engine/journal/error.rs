//! Errors of the journal. The messages advise the operator.

use std::io;
use std::path::{Path, PathBuf};

use dunlin_lane::fault::fault_behind;
use dunlin_proto::fault::FaultCode;
use dunlin_proto::journal::{State, Unreadable};
use dunlin_proto::wire::EncodeError;
use thiserror::Error;

/// An error of the journal.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JournalError {
    /// A file system operation failed: the disk is full or failing, or permission is
    /// missing.
    #[error("journal {path} cannot be {what}: free space there, or check the disk and the permissions", path = path.display())]
    Io {
        /// The failed operation, as a participle such as `written`.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The directory's mode grants access to other users, or another user owns the directory.
    #[error("journal {path} has mode {mode:03o} and belongs to user {owner}: other users could read it, or change where VMs run; run `chmod 700 {path}`, and give it to the user of this process with `chown`", path = path.display())]
    Exposed {
        /// The directory.
        path: PathBuf,
        /// The directory's permission bits.
        mode: u32,
        /// The directory's owner, a user ID.
        owner: u32,
    },
    /// The file's content is not valid.
    #[error("{path} cannot be relied upon; keep this file, and find out where the VM is before you run the VM anywhere", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file's content.
        source: Unreadable,
    },
    /// Another process holds the session. In a journal without files, another thread of this
    /// process holds it.
    #[error("another process, or another thread of this one, holds the session {path}; until the holder ends, only the holder can settle the session", path = path.display())]
    Held {
        /// The file.
        path: PathBuf,
    },
    /// A call would remove the session's record, or replace it with that of a new attempt. The
    /// recorded attempt must end before that, with the VM at the source.
    #[error("{path} records attempt {attempt} of this session as {state}: a record with an open outcome cannot be removed; a new attempt needs a number above {attempt}, and can begin only after the recorded attempt has ended with the VM at the source", path = path.display())]
    Undecided {
        /// The file.
        path: PathBuf,
        /// The recorded state.
        state: State,
        /// The recorded attempt.
        attempt: u32,
    },
    /// An earlier session of the same VM is undecided.
    #[error("an earlier migration of this VM is undecided ({path}: {state}): resolve it first", path = path.display())]
    Unresolved {
        /// The file of the earlier session.
        path: PathBuf,
        /// The recorded state.
        state: State,
    },
    /// The journal has no such session.
    #[error("session {path} does not exist", path = path.display())]
    Missing {
        /// The file in which the session would be recorded.
        path: PathBuf,
    },
    /// A text in the record is too long.
    #[error("cannot encode the record")]
    Record(#[from] EncodeError),
}

impl JournalError {
    /// The fault code. It is [`FaultCode::Journal`], unless a lack of memory or of file descriptors
    /// caused the error: such a lack has a code of its own.
    #[must_use]
    pub fn code(&self) -> FaultCode {
        fault_behind(self).unwrap_or(FaultCode::Journal)
    }
}

pub(super) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_path_buf();
    move |source| JournalError::Io { what, path, source }
}
