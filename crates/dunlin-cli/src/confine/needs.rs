//! What a process still has to do after it is confined.

use std::path::{Path, PathBuf};

use dunlin_ipsec::PortRange;

/// What a process needs after its start.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// The directory of its control socket.
    pub(crate) control: PathBuf,
    /// The directory of its journal.
    pub(crate) journal: PathBuf,
    /// A directory that it removes when it ends.
    pub(crate) scratch: Option<PathBuf>,
    /// An identity that it reloads.
    pub(crate) identity: Option<PathBuf>,
    /// Whether the process still has to create a control socket.
    pub(crate) makes_sockets: bool,
    /// The source ports of its lanes over IPsec.
    pub(crate) ipsec: Option<PortRange>,
}

impl Needs {
    /// The directory of a socket.
    pub(crate) fn directory_of(socket: &Path) -> PathBuf {
        match socket.parent() {
            Some(directory) if directory != "" => directory.into(),
            _ => ".".into(),
        }
    }
}
