//! What a confined process still needs.

use std::path::{Path, PathBuf};

use dunlin_ipsec::PortRange;

/// What a process goes on needing.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// The directory of its control socket.
    pub(crate) control: PathBuf,
    /// The directory of its journal.
    pub(crate) journal: PathBuf,
    /// A directory that goes with it.
    pub(crate) scratch: Option<PathBuf>,
    /// An identity that it reads again.
    pub(crate) identity: Option<PathBuf>,
    /// Whether it still has a control socket to make.
    pub(crate) makes_sockets: bool,
    /// The ports from which its lanes may go over IPsec.
    pub(crate) ipsec: Option<PortRange>,
}

impl Needs {
    /// The directory in which a socket is made.
    pub(crate) fn directory_of(socket: &Path) -> PathBuf {
        match socket.parent() {
            Some(directory) if directory != "" => directory.into(),
            _ => ".".into(),
        }
    }
}
