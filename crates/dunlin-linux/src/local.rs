//! Unix sockets that listen at a path with a given owner, group and mode. The steps of [`listen`]
//! with an owner and a mode:
//!
//! ```text
//!   socket ─▶ bind, in a thread with the umask of the mode ─▶ change the owner ─▶ listen
//! ```
//!
//! The kernel refuses connections until the socket listens, so no process connects before the file
//! has its owner and mode. The mode is set by the umask of a short-lived thread, and not by
//! chmod(2), so that a confined process needs no permission to change the modes of files.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::socket::own_user;

/// The number of connections that may wait to be accepted. The kernel limits it to
/// `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// The permissions of a socket's file. `None` leaves the kernel's default; the default mode has all
/// permissions that the umask does not remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileAccess {
    /// The user ID of the owner.
    pub owner: Option<u32>,
    /// The group ID.
    pub group: Option<u32>,
    /// The mode, at most 0777.
    pub mode: Option<u32>,
}

impl FileAccess {
    /// Returns `other`, with each field that is `None` replaced by that of `self`.
    #[must_use]
    pub fn replaced_by(&self, other: &Self) -> Self {
        Self {
            owner: other.owner.or(self.owner),
            group: other.group.or(self.group),
            mode: other.mode.or(self.mode),
        }
    }

    /// Whether the owner or the group changes.
    #[must_use]
    pub fn changes_owner(&self) -> bool {
        self.owner.is_some() || self.group.is_some()
    }
}

/// The device and the inode of a file.
pub type FileId = (u64, u64);

/// The identity of the file at `path`. For a symbolic link, this is the identity of the link
/// itself.
///
/// # Errors
/// An error from lstat(2).
pub fn file_id(path: &Path) -> io::Result<FileId> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Listens at `path`, which must not exist. Returns the listener and the identity of its file.
///
/// # Errors
/// `AddrInUse` if the path exists; `InvalidInput` if the path is too long; `PermissionDenied`
/// without the privilege to change the owner (`CAP_CHOWN`), or if another process has replaced the
/// file; otherwise an error of the kernel. After an error that follows bind(2), the file at `path`
/// is removed if the process may remove it.
pub fn listen(path: &Path, access: &FileAccess) -> io::Result<(UnixListener, FileId)> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path).map_err(|_| io::ErrorKind::InvalidInput)?;
    match access.mode {
        Some(mode) => bind_with_mode(&socket, &address, mode)?,
        None => rustix::net::bind(&socket, &address)?,
    }
    let found = own_file(path, access).and_then(|(file, found)| {
        change_owner(&file, access)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok((found.st_dev, found.st_ino))
    });
    match found {
        Ok(id) => Ok((UnixListener::from(socket), id)),
        Err(error) => {
            // Ignore an error, because the process may lack the permission to remove files.
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

/// Listens at `path`, which must not exist, with mode 0600. The mode is set on the socket before
/// the socket is bound (unix(7)). So the socket's file never has a wider mode, and no file that
/// another process puts in its place gets this mode.
///
/// # Errors
/// `AddrInUse` if the path exists; `InvalidInput` if the path is too long; otherwise an error of the
/// kernel.
pub fn listen_private(path: &Path) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let address = SocketAddrUnix::new(path).map_err(|_| io::ErrorKind::InvalidInput)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Binds in a thread that shares its umask with no other thread.
fn bind_with_mode(socket: &OwnedFd, address: &SocketAddrUnix, mode: u32) -> io::Result<()> {
    let bind = || {
        // SAFETY: `FS` gives the thread its own umask, root and working directory, and leaves the
        // table of descriptors shared.
        unsafe { unshare_unsafe(UnshareFlags::FS)? };
        rustix::process::umask(Mode::from_raw_mode(!mode & 0o777));
        Ok(rustix::net::bind(socket, address)?)
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("dunlin-bind".to_owned());
        let bound = thread.spawn_scoped(scope, bind)?.join();
        bound.unwrap_or_else(|_| Err(io::Error::other("the thread that binds has panicked")))
    })
}

/// Opens the file at `path` if it has the type, the owner and the mode of the socket that this
/// process has just bound. A process that may write to the directory could have replaced the
/// socket's file with a link to another file. Without this check, the other file would get the new
/// owner.
fn own_file(path: &Path, access: &FileAccess) -> io::Result<(OwnedFd, Stat)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&file)?;
    let mode = found.st_mode & 0o777;
    let is_own = FileType::from_raw_mode(found.st_mode) == FileType::Socket
        && found.st_uid == own_user()
        && access.mode.is_none_or(|wanted| wanted == mode);
    if !is_own {
        let text = "another process has replaced the new socket";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok((file, found))
}

fn change_owner(file: impl AsFd, access: &FileAccess) -> io::Result<()> {
    if !access.changes_owner() {
        return Ok(());
    }
    let owner = access.owner.map(Uid::from_raw);
    let group = access.group.map(Gid::from_raw);
    rustix::fs::chownat(file, "", owner, group, AtFlags::EMPTY_PATH).map_err(|error| {
        let error = io::Error::from(error);
        let text = format!("cannot change the socket's owner, which needs CAP_CHOWN: {error}");
        io::Error::new(error.kind(), text)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixStream;

    use dunlin_test_base::Scratch;

    use super::*;

    #[test]
    fn a_socket_has_its_mode_whatever_the_umask_which_stays() {
        let scratch = Scratch::new();
        let usual = scratch.join("usual");
        listen(&usual, &FileAccess::default()).unwrap();
        let mode = |path: &Path| std::fs::symlink_metadata(path).unwrap().mode() & 0o7777;
        for wanted in [0o600, 0o660, 0o666, 0o777, 0] {
            let path = scratch.join(format!("{wanted:o}"));
            let access = FileAccess {
                mode: Some(wanted),
                ..FileAccess::default()
            };
            let (_listener, id) = listen(&path, &access).unwrap();
            assert_eq!(mode(&path), wanted);
            assert_eq!(id, file_id(&path).unwrap());
        }
        let again = scratch.join("again");
        listen(&again, &FileAccess::default()).unwrap();
        assert_eq!(mode(&again), mode(&usual));
        let taken = listen(&again, &FileAccess::default()).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_private_socket_has_its_mode_from_the_start() {
        let scratch = Scratch::new();
        let path = scratch.join("socket");
        let bind = || {
            // SAFETY: `FS` gives the thread its own umask, and leaves everything else shared.
            unsafe { unshare_unsafe(UnshareFlags::FS).unwrap() };
            rustix::process::umask(Mode::empty());
            listen_private(&path).unwrap()
        };
        let _listener = thread::scope(|scope| scope.spawn(bind).join().unwrap());
        let found = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!(found.mode() & 0o7777, 0o600);
        UnixStream::connect(&path).unwrap();
        let taken = listen_private(&path).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        let other = scratch.join("other");
        symlink(&path, &other).unwrap();
        let taken = listen_private(&other).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_socket_has_its_owner_before_it_listens() {
        let scratch = Scratch::new();
        let path = scratch.join("socket");
        let access = FileAccess {
            owner: Some(12_345),
            group: Some(54_321),
            mode: Some(0o640),
        };
        if own_user() != 0 {
            // Only root may change owners.
            let refused = listen(&path, &access).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            assert!(!path.exists());
            return;
        }
        let (listener, _) = listen(&path, &access).unwrap();
        let found = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!((found.uid(), found.gid()), (12_345, 54_321));
        assert_eq!(found.mode() & 0o777, 0o640);
        UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
    }

    /// Another process that may write to the directory puts another file in place of the socket.
    /// The file is rejected.
    #[test]
    fn i7_the_owner_of_no_other_file_is_changed() {
        let scratch = Scratch::new();
        let path = scratch.join("socket");
        let secret = scratch.join("secret");
        std::fs::write(&secret, "secret").unwrap();
        let access = FileAccess {
            mode: Some(0o660),
            ..FileAccess::default()
        };
        let is_refused = || {
            let refused = own_file(&path, &access).unwrap_err();
            std::fs::remove_file(&path).unwrap();
            refused.kind() == io::ErrorKind::PermissionDenied
        };
        symlink(&secret, &path).unwrap();
        assert!(is_refused());
        std::fs::hard_link(&secret, &path).unwrap();
        assert!(is_refused());
        // A socket with another mode is not the socket that was just bound.
        let other = FileAccess {
            mode: Some(0o600),
            ..FileAccess::default()
        };
        let _listener = listen(&path, &other).unwrap();
        assert!(is_refused());
        let _listener = listen(&path, &access).unwrap();
        assert!(own_file(&path, &access).is_ok());
    }
}
