//! Listening sockets, which the tunnel creates or which were passed to the process.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dunlin_linux::local::{self, FileAccess, FileId};
use dunlin_linux::poll::{Interest, Wakeup, poll};
use dunlin_linux::socket::{Accepted, is_held, is_listening};

use super::route::Listen;
use super::socket::Stream;

/// The pause in accepting connections after descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);

/// Listening sockets that were passed to the process, by name. A route with [`Listen::Passed`] uses
/// one of them. All stay open until this value is dropped, so a reload may remove a route and a
/// later reload may add it again.
#[derive(Debug, Default)]
pub struct Sockets(BTreeMap<String, Listener>);

impl Sockets {
    /// Adds a socket.
    ///
    /// # Errors
    /// `InvalidInput`: the socket does not listen, is neither a unix nor a TCP socket, or the name
    /// is taken.
    pub fn insert(&mut self, name: &str, socket: OwnedFd) -> io::Result<()> {
        let wrong = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if !is_listening(&socket).unwrap_or(false) {
            return Err(wrong("not a listening socket"));
        }
        let unix = UnixListener::from(socket);
        let listener = if unix.local_addr().is_ok() {
            Listener::Unix(unix)
        } else {
            let tcp = TcpListener::from(OwnedFd::from(unix));
            tcp.local_addr()
                .map_err(|_| wrong("neither a unix nor a TCP socket"))?;
            Listener::Tcp(tcp)
        };
        if self.0.contains_key(name) {
            return Err(wrong("two sockets have this name"));
        }
        self.0.insert(name.to_owned(), listener);
        Ok(())
    }

    /// The TCP socket of this name, for [`super::TunnelBuilder::sockets`].
    ///
    /// # Errors
    /// `NotFound` if there is no such socket, `InvalidInput` if it is not a TCP socket, or an error
    /// from dup(2).
    pub fn tcp(&self, name: &str) -> io::Result<TcpListener> {
        match self.get(name)? {
            Listener::Tcp(listener) => listener.try_clone(),
            Listener::Unix(_) => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a TCP socket: peers connect over TCP",
            )),
        }
    }

    fn get(&self, name: &str) -> io::Result<&Listener> {
        self.0.get(name).ok_or_else(|| {
            let text = "no socket of that name was passed to the process";
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }
}

/// A listening socket, in non-blocking mode once a tunnel uses it.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// The file of a unix socket. Dropping this removes it.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    id: FileId,
}

/// Returns a new number for a listener or for a relay's port. Channels with the same number are
/// connected in the order of acceptance.
pub(super) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Listener {
    /// Starts to listen. Replaces port 0 in `listen` with the port that the kernel chose. `access`
    /// applies to a unix socket that this function creates.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn open(
        listen: &mut Listen,
        access: &FileAccess,
        passed: &Sockets,
    ) -> io::Result<(Self, Option<SocketFile>)> {
        let (listener, file) = match listen {
            Listen::Unix(path) => {
                let (listener, id) = bind(path, access)?;
                let path = path.clone();
                (Self::Unix(listener), Some(SocketFile { path, id }))
            }
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(*address)?;
                *address = listener.local_addr()?;
                (Self::Tcp(listener), None)
            }
            Listen::Passed(name) => (passed.get(name)?.try_clone()?, None),
            Listen::OnDemand | Listen::Redirected { .. } => {
                return Err(io::ErrorKind::Unsupported.into());
            }
        };
        match &listener {
            Self::Unix(listener) => listener.set_nonblocking(true)?,
            Self::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        Ok((listener, file))
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(listener) => Self::Unix(listener.try_clone()?),
            Self::Tcp(listener) => Self::Tcp(listener.try_clone()?),
        })
    }

    /// Waits for a connection or for `wakeup`, and returns whether `wakeup` is readable. If
    /// descriptors or memory are `short`, it waits a moment without accepting.
    ///
    /// # Errors
    /// An error from poll(2).
    pub(super) fn wait(&self, wakeup: &Wakeup, short: bool) -> io::Result<bool> {
        let own = match self {
            Self::Unix(listener) => Interest::read(listener),
            Self::Tcp(listener) => Interest::read(listener),
        };
        let interests = [Interest::read(wakeup), own];
        let (watched, timeout) = match short {
            true => (1, Some(SHORTAGE_REST)),
            false => (2, None),
        };
        Ok(poll(&interests[..watched], timeout)?[0])
    }

    pub(super) fn accept(&self) -> Accepted<Stream> {
        let accepted = match self {
            Self::Unix(listener) => listener.accept().and_then(|(one, _)| Stream::unix(one)),
            Self::Tcp(listener) => listener.accept().and_then(|(one, _)| Stream::tcp(one)),
        };
        accepted.into()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if local::file_id(&self.path).is_ok_and(|id| id == self.id) {
            // Another process may have removed the file.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`. Replaces a socket file on which no process listens, but no other file.
fn bind(path: &Path, access: &FileAccess) -> io::Result<(UnixListener, FileId)> {
    match local::listen(path, access) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                let text = "a file of this name exists and is not a socket";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            if is_held(path)? {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            local::listen(path, access)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_no_other_file() {
        let scratch = dunlin_test_base::Scratch::new();
        let path = scratch.join("listen");
        let bind = || bind(&path, &FileAccess::default());
        drop(bind().unwrap());
        assert!(local::file_id(&path).is_ok());
        let (listener, _) = bind().unwrap();
        // `bind` keeps a socket file on which a process listens, and its check leaves no connection
        // in the backlog.
        assert_eq!(bind().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        listener.set_nonblocking(true).unwrap();
        let accepted = listener.accept().unwrap_err();
        assert_eq!(accepted.kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a disk").unwrap();
        let refused = bind().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a disk");
    }
}
