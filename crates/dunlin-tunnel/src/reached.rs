//! The unix sockets to which channels are connected now.
//!
//! A path may be shared by several VMs: the hypervisor that waits for a second VM removes the
//! socket of the first one and binds the path again. A later channel of the first VM would then
//! reach the hypervisor of the second one. The tunnel cannot tell which VM a channel belongs to.
//! But it records the inode of the socket to which the open channels of a path are connected. The
//! kernel does not use that inode again while one of these channels is open. Until all of them have
//! ended, further channels to the path are connected to the same socket or refused.
//!
//! ```text
//!   channel 1 ─▶ /run/in.sock, inode 7 ─▶ QEMU of VM 1     open
//!                /run/in.sock, inode 9 ─▶ QEMU of VM 2     binds the path again
//!   channel 2 ─▶ refused, whichever VM it belongs to, until channel 1 has ended
//! ```
//!
//! Channels of one migration are not refused, because they reach one listening socket. Channels to
//! a server with many clients, such as an NBD server, are not refused either, because it keeps its
//! socket.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use dunlin_linux::local::FileId;
use dunlin_proto::fault::FaultCode;

use super::failure::Failure;
use super::meter::{Ending, Tally};

/// For each path, the socket to which its channels are connected, and their number.
type InUse = Mutex<BTreeMap<PathBuf, (FileId, usize)>>;

#[derive(Debug, Default)]
pub(super) struct ReachedSockets(Arc<InUse>);

/// A channel that is connected, or is being connected, to the socket at a path.
#[derive(Debug)]
pub(super) struct Reached {
    all: Arc<InUse>,
    path: PathBuf,
    id: FileId,
}

impl ReachedSockets {
    /// Adds a channel to the socket at `path`, before the channel connects.
    ///
    /// # Errors
    /// The path has a new socket while channels to its earlier socket are open, or stat(2) fails,
    /// for example because there is no file.
    pub(super) fn enter(&self, route: &str, path: &Path) -> Result<Reached, Failure> {
        let id = id_of(path).map_err(|error| {
            let text = format!("route {route:?}: unix:{} cannot be reached", path.display());
            Failure::new(FaultCode::TargetUnreachable, text).because(&error)
        })?;
        let mut in_use = lock(&self.0);
        let (current, count) = in_use.entry(path.to_owned()).or_insert((id, 0));
        if *current != id {
            return Err(replaced(route, path));
        }
        *count += 1;
        Ok(Reached {
            all: Arc::clone(&self.0),
            path: path.to_owned(),
            id,
        })
    }
}

impl Reached {
    /// Checks, after the channel has connected, that no other process has bound the path since
    /// [`ReachedSockets::enter`].
    ///
    /// # Errors
    /// Another process has bound the path.
    pub(super) fn check(&self, route: &str) -> Result<(), Failure> {
        match id_of(&self.path) {
            Ok(id) if id != self.id => Err(replaced(route, &self.path)),
            // A listener that expects no more connections may have removed its file.
            _ => Ok(()),
        }
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        let mut in_use = lock(&self.all);
        if let Some((_, count)) = in_use.get_mut(&self.path) {
            *count -= 1;
            if *count == 0 {
                in_use.remove(&self.path);
            }
        }
    }
}

/// A connection owns a [`Tally`] and drops it at its end. `Reached` implements the trait only for
/// this drop: until the connection ends, the channel counts as connected to the socket.
impl Tally for Reached {
    fn begins(&self) {}

    fn ends(&self, _: Ending) {}
}

fn id_of(path: &Path) -> io::Result<FileId> {
    let found = std::fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

fn replaced(route: &str, path: &Path) -> Failure {
    let path = path.display();
    let text = format!(
        "route {route:?}: another process has bound {path}, while channels are connected to the \
         process that had bound it before"
    );
    Failure::new(FaultCode::TargetReplaced, text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::net::UnixListener;

    use dunlin_test_base::Scratch;

    use super::*;

    #[test]
    fn i3_channels_reach_one_socket_of_a_path_at_a_time() {
        let scratch = Scratch::new();
        let (path, other) = (scratch.join("in"), scratch.join("other"));
        let all = ReachedSockets::default();
        let missing = all.enter("ram", &path).unwrap_err();
        assert_eq!(missing.code(), FaultCode::TargetUnreachable);
        let _web = UnixListener::bind(&path).unwrap();
        let _disk = UnixListener::bind(&other).unwrap();
        let first = all.enter("ram", &path).unwrap();
        let second = all.enter("ram", &path).unwrap();
        let disk = all.enter("disk", &other).unwrap();
        std::fs::remove_file(&path).unwrap();
        // A listener that expects no more connections removes its file.
        first.check("ram").unwrap();
        let _db = UnixListener::bind(&path).unwrap();
        for channel in [first, second] {
            let late = channel.check("ram").unwrap_err();
            assert_eq!(late.code(), FaultCode::TargetReplaced);
            let refused = all.enter("ram", &path).unwrap_err();
            assert_eq!(refused.code(), FaultCode::TargetReplaced);
            disk.check("disk").unwrap();
            all.enter("disk", &other).unwrap();
        }
        let next = all.enter("ram", &path).unwrap();
        next.check("ram").unwrap();
        drop((next, disk));
        assert!(lock(&all.0).is_empty());
    }
}
