//! What a process still has to do after it is confined.

use std::path::{Path, PathBuf};

use dunlin_ipsec::PortRange;

/// What a process needs after its start.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// The directory of the process's control socket.
    pub(crate) control: PathBuf,
    /// The directory of the process's journal.
    pub(crate) journal: PathBuf,
    /// The directory of the history, to which the process adds entries.
    pub(crate) history: Option<PathBuf>,
    /// A directory that the process removes when it ends.
    pub(crate) scratch: Option<PathBuf>,
    /// The directory of an identity that the process reloads.
    pub(crate) identity: Option<PathBuf>,
    /// Whether the process still has to create a control socket.
    pub(crate) makes_sockets: bool,
    /// The source ports of the process's lanes over IPsec.
    pub(crate) ipsec: Option<PortRange>,
}

impl Needs {
    pub(crate) fn directory_of(socket: &Path) -> PathBuf {
        match socket.parent() {
            Some(directory) if directory != "" => directory.into(),
            _ => ".".into(),
        }
    }
}
