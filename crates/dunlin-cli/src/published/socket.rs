//! Status sockets. A process writes its status to each client and closes the connection. It reads
//! nothing from clients, so a client cannot change anything.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_linux::local::{self, FileAccess};
use dunlin_linux::poll::waker;
use dunlin_linux::socket::{connect_unix, is_held, wait_readable};

use crate::control::make_directory;
use crate::log;
use crate::options::ControlPath;
use crate::service::start;
use crate::text::chained;

/// Subdirectory of the control directory for status sockets.
pub(crate) const STATUS: &str = "status";

/// Pause after each client. Serving a client takes less than 100 µs, so clients can take at most
/// 0.5 % of a CPU from the process.
const PAUSE: Duration = Duration::from_millis(20);

/// How long one write may wait for a client that does not read. The status of most processes fits
/// the buffer of the socket, so that the write does not wait.
const WRITE_LIMIT: Duration = Duration::from_secs(1);

/// Maximum length of a status.
const STATUS_LIMIT_BYTES: usize = 8 << 20;

/// The status socket of a process, if the process has one. Dropping it removes its file.
pub(crate) struct StatusSocket(Option<Bound>);

struct Bound {
    listener: UnixListener,
    path: PathBuf,
}

impl StatusSocket {
    /// Binds a status socket of this process. `kind` is `vm`, `tunnel`, `ipsec` or `handoff`; in a
    /// process with several VMs, those after the first use `vm-2`, `vm-3` and so on. If the bind
    /// fails, this function logs a warning, and the process has no status socket. It also has none
    /// if the control path names a socket instead of a directory.
    pub(crate) fn bind(control: &ControlPath, kind: &str) -> Self {
        let Some(directory) = control.directory() else {
            return Self(None);
        };
        let directory = directory.join(STATUS);
        let bound = Bound::new(&directory, kind).with_context(|| {
            format!(
                "cannot create a socket in {}: `dunlin serve-status` does not show this process",
                directory.display()
            )
        });
        Self(bound.map_err(|error| log::warn([chained(&error)])).ok())
    }

    /// From now on, writes to each client the text that `report` returns; one client at a time.
    pub(crate) fn serve(&self, report: impl Fn() -> String + Send + 'static) -> Result<()> {
        let Some(bound) = &self.0 else {
            return Ok(());
        };
        let listener = bound.listener.try_clone()?;
        start("status-socket", move || {
            loop {
                if let Ok((mut client, _)) = listener.accept() {
                    let limited = client.set_write_timeout(Some(WRITE_LIMIT));
                    // The client may be gone.
                    let _ = limited.and_then(|()| client.write_all(report().as_bytes()));
                }
                thread::sleep(PAUSE);
            }
        })?;
        Ok(())
    }
}

impl Bound {
    fn new(directory: &Path, kind: &str) -> Result<Self> {
        if let Some(control) = directory.parent() {
            make_directory(control, 0o755)?;
        }
        make_directory(directory, 0o750)?;
        remove_dead(directory)?;
        let path = directory.join(format!("{kind}-{}.sock", std::process::id()));
        // The socket's group gets the rights that the directory's group has to the directory. If
        // the directory has the set-group-ID bit, the two groups are the same. The mode is set
        // without chmod(2), which would follow a link that a member of the group put there.
        let access = FileAccess {
            mode: Some(0o600 | fs::metadata(directory)?.mode() & 0o060),
            ..FileAccess::default()
        };
        let (listener, _) = local::listen(&path, &access)?;
        Ok(Self { listener, path })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // If this fails, the next process that binds a status socket removes the file.
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes the sockets of processes that were killed.
fn remove_dead(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if matches!(is_held(&path), Ok(false)) {
            // Another process may have removed the file.
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Reads the status behind a status socket; `None` if its process has died.
///
/// # Errors
/// The socket cannot be read, or the status is too long, not UTF-8, or not complete within `limit`.
pub(crate) fn read(socket: &Path, limit: Duration) -> Result<Option<String>> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound, WouldBlock};
    let deadline = Instant::now() + limit;
    let (_waker, stop) = waker()?;
    let mut stream: UnixStream = match connect_unix(socket, deadline, &stop) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), ConnectionRefused | NotFound) => return Ok(None),
        Err(error) => return Err(error).context("cannot connect"),
    };
    let (mut text, mut part) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        if !wait_readable(&stream, deadline)? {
            bail!("no answer: perhaps the process is suspended (SIGSTOP)");
        }
        match stream.read(&mut part) {
            Ok(0) => return Ok(Some(String::from_utf8(text)?)),
            Ok(length) => text.extend_from_slice(&part[..length]),
            Err(error) if error.kind() == WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if text.len() > STATUS_LIMIT_BYTES {
            bail!("the status is longer than {STATUS_LIMIT_BYTES} bytes");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use dunlin_test_base::Scratch;

    use super::*;

    fn bound(scratch: &Scratch) -> (StatusSocket, PathBuf) {
        let control = ControlPath {
            control: Some(scratch.path().to_owned()),
        };
        let socket = StatusSocket::bind(&control, "vm");
        let name = format!("{STATUS}/vm-{}.sock", std::process::id());
        (socket, scratch.join(name))
    }

    /// The status is longer than the buffer of a socket, so a client that does not read blocks the
    /// write.
    #[test]
    fn i8_a_client_that_never_reads_delays_the_next_one_for_a_limited_time() {
        let scratch = Scratch::new();
        let (socket, path) = bound(&scratch);
        let status = "x".repeat(4 << 20);
        let reported = status.clone();
        socket.serve(move || reported.clone()).unwrap();
        let never_reads = UnixStream::connect(&path).unwrap();
        let began = Instant::now();
        let limit = WRITE_LIMIT + Duration::from_secs(20);
        assert!(read(&path, limit).unwrap().as_ref() == Some(&status));
        assert!(began.elapsed() >= WRITE_LIMIT / 2, "{:?}", began.elapsed());
        drop(never_reads);
    }

    #[test]
    fn the_sockets_of_dead_processes_are_removed() {
        let scratch = Scratch::new();
        let directory = scratch.join(STATUS);
        fs::create_dir(&directory).unwrap();
        let (dead, alive) = (directory.join("vm-1.sock"), directory.join("vm-2.sock"));
        drop(UnixListener::bind(&dead).unwrap());
        let _alive = UnixListener::bind(&alive).unwrap();
        let (socket, path) = bound(&scratch);
        assert_eq!(
            [&dead, &alive, &path].map(|path| path.exists()),
            [false, true, true]
        );
        drop(socket);
        assert!(!path.exists());
    }
}
