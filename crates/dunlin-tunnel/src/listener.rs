//! Listening sockets, which the tunnel creates or which were passed to the process.
//!
//! A listener checks once per second whether the file of its unix socket is still at its path. A
//! hypervisor that listens at the same path for an arriving VM removes the file, and an operator
//! may delete it. Without the check, no connection would arrive after that until the tunnel is
//! restarted.
//!
//! ```text
//!   listens ── file removed, replaced, or with other permissions ──▶ binds the path again
//!      ▲                                                              │           │
//!      └─────────────────────────── ok ───────────────────────────────┘           │ fails
//!      ▲                                                                          ▼
//!      └────────────── ok ──────────────── tries again every second ◀────────── lost
//! ```
//!
//! The check is a call of lstat(2) and not inotify(7): a watch of a directory does not report that
//! the directory itself was replaced, needs the permission to read it, and counts towards a limit
//! per user. A path at which another process listens must be checked repeatedly anyway, because
//! most processes leave the file when they end.

use dunlin_lane::sync::lock;
use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dunlin_linux::local::{self, FileAccess, FileId};
use dunlin_linux::poll::{Interest, Wakeup, poll};
use dunlin_linux::socket::{Accepted, is_held, is_listening};
use dunlin_proto::fault::FaultCode;

use super::event::Event;
use super::failure::{Failure, Lost};
use super::route::Listen;
use super::site::Site;
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

/// The interval of the check of a unix socket's file.
///
/// Drawback: a hypervisor that connects within a second after the file was removed gets an error.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// A listening socket. It becomes non-blocking when a route begins to use it.
#[derive(Debug)]
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// The file of a unix socket. Dropping this value removes the file.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    access: FileAccess,
    /// `None` while the listener is lost, which means that its path could not be bound.
    id: Option<FileId>,
}

/// A listener, and the file of its unix socket if the listener created one.
pub(super) struct LastingListener {
    /// Declared before the listeners, and therefore dropped before them. The file to remove is
    /// identified by its inode. While a listener is open, no socket of another process can have the
    /// same inode.
    file: Option<SocketFile>,
    /// `None` while the listener is lost, which means that its path could not be bound.
    listener: Option<Listener>,
    /// The previous listener, until the connections that had reached it are accepted.
    previous: Option<Listener>,
    checked: Instant,
    lost: Lost,
}

/// Returns a new number for a listener or for a relay's port. The channels of one listener are
/// connected in the order of acceptance.
pub(super) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Listener {
    fn open(
        listen: &mut Listen,
        access: &FileAccess,
        passed: &Sockets,
    ) -> io::Result<(Self, Option<SocketFile>)> {
        let (listener, file) = match listen {
            Listen::Unix(path) => {
                let (listener, id) = bind(path, access)?;
                let file = SocketFile {
                    path: path.clone(),
                    access: *access,
                    id: Some(id),
                };
                (listener, Some(file))
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

    fn interest(&self) -> Interest<'_> {
        match self {
            Self::Unix(listener) => Interest::read(listener),
            Self::Tcp(listener) => Interest::read(listener),
        }
    }

    fn accept(&self) -> Accepted<Stream> {
        let accepted = match self {
            Self::Unix(listener) => listener.accept().and_then(|(one, _)| Stream::unix(one)),
            Self::Tcp(listener) => listener.accept().and_then(|(one, _)| Stream::tcp(one)),
        };
        accepted.into()
    }
}

/// Waits for `wakeup`, `own` or the timeout; returns whether `wakeup` is readable.
fn wait(wakeup: &Wakeup, own: Option<Interest<'_>>, timeout: Option<Duration>) -> io::Result<bool> {
    let interests: Vec<_> = [Some(Interest::read(wakeup)), own]
        .into_iter()
        .flatten()
        .collect();
    Ok(poll(&interests, timeout)?[0])
}

impl LastingListener {
    /// Starts to listen. Replaces port 0 in `listen` with the port that the kernel chose. `access`
    /// applies to a unix socket that this function creates.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(super) fn open(
        listen: &mut Listen,
        access: &FileAccess,
        passed: &Sockets,
    ) -> io::Result<Self> {
        let (listener, file) = Listener::open(listen, access, passed)?;
        Ok(Self {
            file,
            listener: Some(listener),
            previous: None,
            checked: Instant::now(),
            lost: Lost::default(),
        })
    }

    /// Reports in `lost` from now on whether the listener is lost.
    pub(super) fn reporting_to(self, lost: Lost) -> Self {
        Self { lost, ..self }
    }

    /// The reason why the listener is lost; holds `None` while the listener listens. The returned
    /// value stays current after the listener has moved to a thread.
    pub(super) fn lost(&self) -> Lost {
        Arc::clone(&self.lost)
    }

    /// Waits for a connection or for `wakeup`, and returns whether `wakeup` is readable. If
    /// descriptors or memory are `short`, it waits a moment without accepting. It also returns when
    /// the next [`LastingListener::check`] is due.
    ///
    /// # Errors
    /// An error from poll(2).
    pub(super) fn wait(&self, wakeup: &Wakeup, short: bool) -> io::Result<bool> {
        if short {
            return wait(wakeup, None, Some(SHORTAGE_REST));
        }
        let due = match (&self.previous, &self.file) {
            (Some(_), _) => Some(Duration::ZERO),
            (None, Some(_)) => Some(CHECK_EVERY.saturating_sub(self.checked.elapsed())),
            (None, None) => None,
        };
        wait(wakeup, self.listener.as_ref().map(Listener::interest), due)
    }

    pub(super) fn accept(&mut self) -> Accepted<Stream> {
        if let Some(previous) = &self.previous {
            match previous.accept() {
                Accepted::Nothing | Accepted::Failed(_) => self.previous = None,
                accepted => return accepted,
            }
        }
        match &self.listener {
            Some(listener) => listener.accept(),
            None => Accepted::Nothing,
        }
    }

    /// Listens again if the file of the unix socket was removed or replaced, or if it should now
    /// have other permissions. Checks at most once per [`CHECK_EVERY`], and reports changes.
    pub(super) fn check(&mut self, site: &Site, route: &str, access: &FileAccess) {
        let Some(renewed) = self.renew(access) else {
            return;
        };
        let route = route.to_owned();
        let mut lost = lock(&self.lost);
        match renewed {
            Renewed::Listens(listen) => {
                *lost = None;
                site.report(Event::ListenerRestored { route, listen });
            }
            Renewed::Kept(error) => {
                let text = format!("route {route} cannot replace its socket: {error}");
                site.report(Event::Warning(text));
            }
            Renewed::Lost(error) => {
                let text = format!("route {route:?} has lost its socket, and cannot listen again");
                let failure = Failure::new(FaultCode::ListenerLost, text).because(&error);
                // Do not repeat the report every second.
                if lost.as_ref() != Some(&failure) {
                    *lost = Some(failure.clone());
                    site.report(Event::ListenerLost { route, failure });
                }
            }
        }
    }

    /// Binds the path again if that is necessary and a check is due.
    fn renew(&mut self, access: &FileAccess) -> Option<Renewed> {
        let file = self.file.as_mut()?;
        if self.checked.elapsed() < CHECK_EVERY {
            return None;
        }
        self.checked = Instant::now();
        let is_current = file.access == *access;
        file.access = *access;
        if file.is_in_place() {
            if is_current {
                return None;
            }
            if let Err(error) = std::fs::remove_file(&file.path) {
                return Some(Renewed::Kept(error));
            }
        }
        self.previous = self.listener.take().or(self.previous.take());
        file.id = None;
        Some(match bind(&file.path, access) {
            Ok((listener, id)) => {
                self.listener = Some(listener);
                file.id = Some(id);
                Renewed::Listens(Listen::Unix(file.path.clone()))
            }
            Err(error) => Renewed::Lost(error),
        })
    }
}

/// The result of an attempt to bind a listener's path again.
#[derive(Debug)]
enum Renewed {
    Listens(Listen),
    Lost(io::Error),
    /// The socket stays, with its old permissions, because its file could not be removed.
    Kept(io::Error),
}

impl SocketFile {
    /// Whether the socket's file is still at the path, as far as this process can determine.
    fn is_in_place(&self) -> bool {
        match local::file_id(&self.path) {
            Ok(id) => self.id == Some(id),
            Err(error) => {
                let is_gone = matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                );
                self.id.is_some() && !is_gone
            }
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.id.is_some() && self.is_in_place() {
            // This fails if another process has removed the file meanwhile.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens at `path`. Replaces a socket file on which no process listens, but no other file.
fn bind(path: &Path, access: &FileAccess) -> io::Result<(Listener, FileId)> {
    let listen = || -> io::Result<(Listener, FileId)> {
        let (listener, id) = local::listen(path, access)?;
        listener.set_nonblocking(true)?;
        Ok((Listener::Unix(listener), id))
    };
    match listen() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                let text = "a file of this name exists and is not a socket: remove it, or choose another path";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            if is_held(path)? {
                let text = "another process listens there";
                return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
            }
            std::fs::remove_file(path)?;
            listen()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_no_other_file() {
        let scratch = dunlin_test_base::Scratch::new();
        let path = scratch.join("listen");
        let bind = || bind(&path, &FileAccess::default());
        drop(bind().unwrap());
        assert!(local::file_id(&path).is_ok());
        let (listener, _) = bind().unwrap();
        // `bind` does not replace a socket file on which a process listens. The check for such a
        // process leaves no connection in the backlog.
        assert_eq!(bind().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(matches!(listener.accept(), Accepted::Nothing));
        drop(listener);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "a disk").unwrap();
        let refused = bind().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{refused}");
        assert_eq!(std::fs::read(&path).unwrap(), b"a disk");
    }

    fn lasting(path: &Path) -> LastingListener {
        let mut listen = Listen::Unix(path.to_owned());
        let access = FileAccess::default();
        LastingListener::open(&mut listen, &access, &Sockets::default()).unwrap()
    }

    /// Makes a check due, and performs it.
    fn renewed(listener: &mut LastingListener, access: &FileAccess) -> Option<Renewed> {
        listener.checked = Instant::now().checked_sub(CHECK_EVERY).unwrap();
        listener.renew(access)
    }

    fn listens(renewed: Option<Renewed>) -> bool {
        matches!(renewed, Some(Renewed::Listens(_)))
    }

    fn is_taken(renewed: Option<Renewed>) -> bool {
        matches!(renewed, Some(Renewed::Lost(error)) if error.kind() == io::ErrorKind::AddrInUse)
    }

    #[test]
    fn a_removed_socket_is_bound_again_and_keeps_the_connections_that_had_reached_it() {
        let scratch = dunlin_test_base::Scratch::new();
        let path = scratch.join("listen");
        let usual = FileAccess::default();
        let mut listener = lasting(&path);
        assert!(renewed(&mut listener, &usual).is_none());
        let _early = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(listener.renew(&usual).is_none(), "no check is due");
        assert!(listens(renewed(&mut listener, &usual)));
        let _late = UnixStream::connect(&path).unwrap();
        for _ in ["early", "late"] {
            assert!(matches!(listener.accept(), Accepted::Connection(_)));
        }
        assert!(matches!(listener.accept(), Accepted::Nothing));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn another_process_keeps_the_path_until_it_ends() {
        let scratch = dunlin_test_base::Scratch::new();
        let path = scratch.join("listen");
        let usual = FileAccess::default();
        let mut listener = lasting(&path);
        std::fs::remove_file(&path).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        for _ in 0..2 {
            assert!(is_taken(renewed(&mut listener, &usual)));
        }
        let _theirs = UnixStream::connect(&path).unwrap();
        other.accept().unwrap();
        // The other process ends and leaves its file.
        drop(other);
        assert!(listens(renewed(&mut listener, &usual)));
        let _own = UnixStream::connect(&path).unwrap();
        assert!(matches!(listener.accept(), Accepted::Connection(_)));
        // Dropping a lost listener does not remove the socket of the other process.
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        assert!(is_taken(renewed(&mut listener, &usual)));
        drop(listener);
        assert!(path.exists());
    }

    #[test]
    fn a_socket_with_other_permissions_takes_the_place_of_the_first() {
        let scratch = dunlin_test_base::Scratch::new();
        let path = scratch.join("listen");
        let mut listener = lasting(&path);
        let _early = UnixStream::connect(&path).unwrap();
        let access = FileAccess {
            mode: Some(0o640),
            ..FileAccess::default()
        };
        assert!(listens(renewed(&mut listener, &access)));
        let found = std::fs::symlink_metadata(&path).unwrap();
        assert_eq!(found.mode() & 0o777, 0o640);
        assert!(matches!(listener.accept(), Accepted::Connection(_)));
        assert!(renewed(&mut listener, &access).is_none());
    }
}
