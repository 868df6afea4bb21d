//! Control sockets: how the commands of an operator speak to a process that runs.
//!
//! A request is one JSON line, the answer any number of JSON lines, mostly [`Line`]s, after
//! which the connection is closed. The process implements [`Service`]; a command is a
//! [`Client`]. The socket is for its owner alone.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use dunlin_lane::sync::lock;
use dunlin_linux::socket::{is_held, own_user, peer_user};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::code::DONE;
use crate::line::{FailedLine, Line};
use crate::service::start;

/// A request line is at most this long.
const REQUEST_LIMIT_BYTES: u64 = 64 * 1024;

/// The control socket, removed when its owner ends.
pub(crate) struct Socket {
    listener: UnixListener,
    path: PathBuf,
    closed: Arc<AtomicBool>,
}

impl Socket {
    /// Takes the path, unless a process that runs has it; `whose` says what it is
    /// that would have it, such as "a VM".
    pub(crate) fn bind(path: &Path, whose: &str) -> Result<Self> {
        if let Some(directory) = path.parent() {
            // No other user may put anything into it, whatever the umask allows.
            make_directory(directory, 0o755)?;
        }
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            if is_held(path).with_context(|| format!("cannot look at {}", path.display()))? {
                bail!(
                    "{} belongs to {whose} that runs: choose another name or --control",
                    path.display()
                );
            }
            // Left behind by a process that has died.
            let _ = fs::remove_file(path);
        }
        let listener = UnixListener::bind(path)
            .with_context(|| format!("cannot bind the control socket {}", path.display()))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            closed: Arc::default(),
        })
    }

    /// Answers at this socket, each request on a thread of its own, until this is dropped.
    pub(crate) fn serve<S: Service>(&self, service: &Arc<S>) -> Result<()> {
        let listener = self.listener.try_clone()?;
        let closed = Arc::clone(&self.closed);
        let service = Arc::clone(service);
        start("control-socket", move || {
            accept(&listener, &service, &closed)
        })?;
        Ok(())
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts, if there is one.
        let _ = UnixStream::connect(&self.path);
        // Somebody may have removed it before.
        let _ = fs::remove_file(&self.path);
    }
}

/// Makes a directory, and those above it, with at most this mode; one that exists stays as it is.
pub(crate) fn make_directory(directory: &Path, mode: u32) -> Result<()> {
    let mut made = fs::DirBuilder::new();
    made.recursive(true).mode(mode);
    made.create(directory)
        .with_context(|| format!("cannot make {}", directory.display()))
}

/// How long nobody is accepted after descriptors or memory ran out.
const SHORTAGE_REST: Duration = Duration::from_millis(100);

fn accept<S: Service>(listener: &UnixListener, service: &Arc<S>, closed: &AtomicBool) {
    let mut short = false;
    for connection in listener.incoming() {
        if closed.load(Ordering::SeqCst) {
            return;
        }
        let connection = match connection {
            Ok(connection) => connection,
            Err(error) => {
                if !std::mem::replace(&mut short, true) {
                    service.warn(&format!(
                        "no request can be taken: {error}; if it is for want of descriptors, raise \
                         this process's limit of open files (`ulimit -n`)"
                    ));
                }
                std::thread::sleep(SHORTAGE_REST);
                continue;
            }
        };
        short = false;
        // The mode keeps others out from when it is set, a moment after the socket is there.
        let user = peer_user(&connection);
        if !user.is_ok_and(|user| user == own_user() || user == 0) {
            continue;
        }
        let service = Arc::clone(service);
        let spawned = start("control-request", move || answer(&connection, &service));
        if let Err(error) = spawned {
            eprintln!("warning: a request cannot be served: {error}");
        }
    }
}

/// What a process does with the requests at its control socket.
pub(crate) trait Service: Send + Sync + 'static {
    /// What can be asked of it.
    type Request: DeserializeOwned;

    /// Carries one request out and sends the answer; `requests` has what follows it on the
    /// connection.
    fn obey(
        self: &Arc<Self>,
        request: Self::Request,
        requests: BufReader<UnixStream>,
        connection: &UnixStream,
    ) -> Result<()>;

    /// The last line of the answer to a request that failed.
    fn refused(&self, error: &Error) -> FailedLine;

    /// Logs what the operator should know.
    fn warn(&self, text: &str);

    /// The requests whose answers are incomplete.
    fn pending(&self) -> &Pending;
}

fn answer<S: Service>(connection: &UnixStream, service: &Arc<S>) {
    service.pending().add();
    let obeyed = match connection.try_clone().map(BufReader::new) {
        Ok(mut requests) => match read_request(&mut requests) {
            Ok(Some(request)) => service.obey(request, requests, connection),
            // A client that only tests whether a process is here.
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        },
        Err(error) => {
            // The client must have sent the whole request before it reads an answer.
            let _ = read_request::<S::Request>(&mut BufReader::new(connection));
            Err(error).context("the request cannot be carried out")
        }
    };
    if let Err(error) = obeyed {
        // The client may have gone.
        let _ = send(connection, &Line::Failed(service.refused(&error)));
    }
    // A thread that reads may hold the other half.
    let _ = connection.shutdown(Shutdown::Both);
    service.pending().remove();
}

/// How long a process that could end waits for clients that do not read.
const FAREWELL_LIMIT: Duration = Duration::from_secs(5);

/// Counts requests whose answers are incomplete.
#[derive(Default)]
pub(crate) struct Pending {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Pending {
    fn add(&self) {
        *lock(&self.count) += 1;
    }

    fn remove(&self) {
        *lock(&self.count) -= 1;
        self.changed.notify_all();
    }

    /// Waits until every request is answered; a client may be stopped.
    pub(crate) fn farewell(&self) {
        let count = lock(&self.count);
        let _ = self
            .changed
            .wait_timeout_while(count, FAREWELL_LIMIT, |count| *count > 0);
    }
}

/// The next request; none after the client has hung up.
pub(crate) fn read_request<R: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<R>> {
    let mut request = String::new();
    if from.take(REQUEST_LIMIT_BYTES).read_line(&mut request)? == 0 {
        return Ok(None);
    }
    Ok(Some(
        serde_json::from_str(&request).context("that is no request")?,
    ))
}

/// Sends one line of an answer.
pub(crate) fn send(mut connection: &UnixStream, line: &Line) -> Result<()> {
    Ok(writeln!(connection, "{}", line.to_json())?)
}

/// What an answer did that is not one to the request.
const ODD: &str = "answered something else: is it of another release?";

/// One request and the lines that answer it.
pub(crate) struct Client {
    answer: BufReader<UnixStream>,
    whom: &'static str,
}

impl Client {
    /// Asks the process behind a control socket, whose lines each come within
    /// `limit`; `whom` is what it is to an operator: "VM" or "tunnel".
    pub(crate) fn ask(
        socket: &Path,
        whom: &'static str,
        request: &impl Serialize,
        limit: Option<Duration>,
    ) -> Result<Self> {
        let mut stream = UnixStream::connect(socket).map_err(|error| {
            let at = socket.display();
            let what = match error.kind() {
                ErrorKind::PermissionDenied => {
                    format!("{at} is for the {whom}'s owner alone: ask as that user, or as root")
                }
                _ => format!(
                    "no {whom} answers at {at}: is its process running, and is --control the same?"
                ),
            };
            anyhow::Error::new(error).context(what)
        })?;
        stream.set_read_timeout(limit)?;
        writeln!(stream, "{}", serde_json::to_string(request)?)?;
        let answer = BufReader::new(stream);
        Ok(Self { answer, whom })
    }

    /// A connection over which more can be asked while an answer comes.
    pub(crate) fn more(&self) -> Result<UnixStream> {
        Ok(self.answer.get_ref().try_clone()?)
    }

    /// The next line; none when the answer is complete.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut text = String::new();
        let whom = self.whom;
        let read = self
            .answer
            .read_line(&mut text)
            .with_context(|| format!("the {whom}'s process does not answer; is it stopped?"))?;
        if read == 0 {
            return Ok(None);
        }
        let line =
            serde_json::from_str(&text).with_context(|| format!("the {whom}'s process {ODD}"))?;
        Ok(Some(line))
    }

    /// The next line, of which `wanted` takes what was asked for.
    pub(crate) fn expect<T>(&mut self, wanted: impl FnOnce(Line) -> Option<T>) -> Result<T> {
        let whom = self.whom;
        match self.next()? {
            Some(Line::Failed(failed)) => Err(failed.into()),
            Some(line) => wanted(line).with_context(|| format!("the {whom}'s process {ODD}")),
            None => bail!("the {whom}'s process has ended"),
        }
    }

    /// The last line of a request that was carried out, printed with `json`; returns the exit
    /// code.
    pub(crate) fn done(&mut self, json: bool) -> Result<i32> {
        self.expect(|line| matches!(line, Line::Done).then_some(()))?;
        if json {
            Line::Done.print();
        }
        Ok(DONE)
    }
}
