//! Sockets that accept connections: made here, or passed to the process by its parent.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dunlin_linux::poll::{Interest, Wakeup, poll};
use dunlin_linux::socket::{is_held, is_listening};

use super::route::Listen;
use super::socket::Stream;

/// How long nothing is accepted when descriptors or memory are short.
const SHORTAGE_REST: Duration = Duration::from_millis(100);

/// Sockets that listen already and were passed to the process, by name: a tunnel
/// uses them where a route says [`Listen::Passed`]. They stay open as long as this,
/// so that a route may be taken away and come back.
#[derive(Debug, Default)]
pub struct Sockets(BTreeMap<String, Listener>);

impl Sockets {
    /// Adds one.
    ///
    /// # Errors
    /// `InvalidInput`: it does not listen, is neither a unix nor a TCP socket, or
    /// another has its name.
    pub fn insert(&mut self, name: &str, socket: OwnedFd) -> io::Result<()> {
        let wrong = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if !is_listening(&socket).unwrap_or(false) {
            return Err(wrong("it is no socket that listens for connections"));
        }
        let unix = UnixListener::from(socket);
        let listener = if unix.local_addr().is_ok() {
            Listener::Unix(unix)
        } else {
            let tcp = TcpListener::from(OwnedFd::from(unix));
            tcp.local_addr()
                .map_err(|_| wrong("it is neither a unix nor a TCP socket"))?;
            Listener::Tcp(tcp)
        };
        if self.0.contains_key(name) {
            return Err(wrong("two sockets have this name"));
        }
        self.0.insert(name.to_owned(), listener);
        Ok(())
    }

    /// The names, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The TCP socket of a name, for [`super::Tunnel::start`].
    ///
    /// # Errors
    /// `NotFound`, or `InvalidInput` where it is no TCP socket; what dup(2) says.
    pub fn tcp(&self, name: &str) -> io::Result<TcpListener> {
        match self.get(name)? {
            Listener::Tcp(listener) => listener.try_clone(),
            Listener::Unix(_) => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is a unix socket, and peers come over TCP",
            )),
        }
    }

    fn get(&self, name: &str) -> io::Result<&Listener> {
        self.0.get(name).ok_or_else(|| {
            let text = "no socket of that name was passed to this process";
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }
}

/// A socket that listens, in non-blocking mode once a tunnel has it.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// The file that a unix socket has made; removed with it.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    id: FileId,
}

/// Numbers listeners: channels are connected in the order in which one listener
/// has accepted them.
pub(super) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Listener {
    /// Listens, and says in `listen` where: a port of 0 becomes the one that the
    /// kernel chose.
    ///
    /// # Errors
    /// It cannot listen there.
    pub(super) fn open(
        listen: &mut Listen,
        passed: &Sockets,
    ) -> io::Result<(Self, Option<SocketFile>)> {
        let (listener, file) = match listen {
            Listen::Unix(path) => {
                let listener = bind(path)?;
                let id = file_id(path)?;
                let path = path.clone();
                (Self::Unix(listener), Some(SocketFile { path, id }))
            }
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(*address)?;
                *address = listener.local_addr()?;
                (Self::Tcp(listener), None)
            }
            Listen::Passed(name) => (passed.get(name)?.try_clone()?, None),
            Listen::OnDemand => return Err(io::ErrorKind::Unsupported.into()),
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

    /// Waits until there is a connection to accept or `wakeup` is used, and returns whether it is.
    /// When descriptors or memory are `short`, connections wait for a moment.
    ///
    /// # Errors
    /// What poll(2) returns.
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

    pub(super) fn accept(&self) -> Accepted {
        let accepted = match self {
            Self::Unix(listener) => listener.accept().and_then(|(one, _)| Stream::unix(one)),
            Self::Tcp(listener) => listener.accept().and_then(|(one, _)| Stream::tcp(one)),
        };
        match accepted {
            Ok(stream) => Accepted::Connection(stream),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                | io::ErrorKind::ConnectionAborted => Accepted::Nothing,
                _ => Accepted::Short(error),
            },
        }
    }
}

/// What accepting has returned.
pub(super) enum Accepted {
    Connection(Stream),
    Nothing,
    /// Descriptors or memory are short; others may free some.
    Short(io::Error),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if file_id(&self.path).is_ok_and(|id| id == self.id) {
            // Another process may have removed it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Device and inode.
type FileId = (u64, u64);

fn file_id(path: &Path) -> io::Result<FileId> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Listens at `path`, where nobody does: a socket that a tunnel has left behind
/// is replaced, and nothing else.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                let text = "there is a file of that name, which is no socket";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            if is_held(path)? {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_socket_that_is_left_behind_is_replaced_and_no_other_file() {
        let name = format!("dunlin-listen-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        drop(bind(&path).unwrap());
        assert!(file_id(&path).is_ok());
        let listener = bind(&path).unwrap();
        // Somebody listens, and hears nothing of it.
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        listener.set_nonblocking(true).unwrap();
        let nobody = listener.accept().unwrap_err();
        assert_eq!(nobody.kind(), io::ErrorKind::WouldBlock);
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a disk").unwrap();
        let refused = bind(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a disk");
        std::fs::remove_file(&path).unwrap();
    }
}
