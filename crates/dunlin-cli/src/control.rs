//! Control sockets: how operators' commands reach a running process.
//!
//! A request is one JSON line. The answer is any number of JSON lines, mostly [`Line`]s, after
//! which the server closes the connection. The process implements [`Service`]; a command is a
//! [`Client`]. The socket accepts only root and the user of its process.

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail};
use dunlin_lane::sync::lock;
use dunlin_linux::local;
use dunlin_linux::poll::waker;
use dunlin_linux::socket::{connect_unix, is_held, own_user, peer_user};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::code::DONE;
use crate::line::{FailedLine, Line};
use crate::log::warn;
use crate::service::start;

/// Maximum length of a request line.
const REQUEST_LIMIT_BYTES: u64 = 64 * 1024;

/// A control socket. Dropping it removes its file.
pub(crate) struct Socket {
    listener: UnixListener,
    pub(crate) path: PathBuf,
    closed: Arc<AtomicBool>,
}

impl Socket {
    /// Binds the path, unless a running process listens at the path. `owner` describes that process
    /// in the error, for example "a VM".
    pub(crate) fn bind(path: &Path, owner: &str) -> Result<Self> {
        if let Some(directory) = path.parent() {
            // No other user may write to the directory, whatever the umask.
            make_directory(directory, 0o755)?;
        }
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            if is_held(path).with_context(|| format!("cannot check {}", path.display()))? {
                bail!(
                    "{} belongs to {owner} that is running: choose another --control (or, for a VM \
                     or a tunnel, another name)",
                    path.display()
                );
            }
            // The process that bound this socket has died.
            let _ = fs::remove_file(path);
        }
        let listener = local::listen_private(path)
            .with_context(|| format!("cannot bind the control socket {}", path.display()))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            closed: Arc::default(),
        })
    }

    /// Serves requests, each on its own thread, until the socket is dropped.
    pub(crate) fn serve<S: Service>(&self, service: &Arc<S>) -> Result<()> {
        let listener = self.listener.try_clone()?;
        let closed = Arc::clone(&self.closed);
        let service = Arc::clone(service);
        start("control-socket", move || {
            accept(&listener, &service, &closed)
        })?;
        Ok(())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts, if it exists.
        let _ = UnixStream::connect(&self.path);
        // Another program may have removed the socket.
        let _ = fs::remove_file(&self.path);
    }
}

/// Creates a directory and its parents, with at most this mode; leaves an existing one unchanged.
pub(crate) fn make_directory(directory: &Path, mode: u32) -> Result<()> {
    let mut made = fs::DirBuilder::new();
    made.recursive(true).mode(mode);
    made.create(directory)
        .with_context(|| format!("cannot create {}", directory.display()))
}

/// How long a thread that accepts connections waits after descriptors or memory ran out.
pub(crate) const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);

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
                        "cannot accept requests: {error}; if descriptors ran out, raise this \
                         process's limit of open files (`ulimit -n`)"
                    ));
                }
                std::thread::sleep(SHORTAGE_PAUSE);
                continue;
            }
        };
        short = false;
        // Check the peer's user, because the mode of the socket does not exclude a process with
        // CAP_DAC_OVERRIDE.
        let user = peer_user(&connection);
        if !user.is_ok_and(|user| user == own_user() || user == 0) {
            continue;
        }
        let own = Arc::clone(service);
        let spawned = start("control-request", move || answer(&connection, &own));
        if let Err(error) = spawned {
            service.warn(&format!("cannot serve a request: {error}"));
        }
    }
}

/// A process's handler of requests at its control socket.
pub(crate) trait Service: Send + Sync + 'static {
    type Request: DeserializeOwned;

    /// Carries out one request and sends the answer; `requests` reads later requests on the same
    /// connection.
    fn handle(
        self: &Arc<Self>,
        request: Self::Request,
        requests: BufReader<UnixStream>,
        connection: &UnixStream,
    ) -> Result<()>;

    /// The last line of the answer to a failed request.
    fn refused(&self, error: &Error) -> FailedLine {
        error.into()
    }

    /// Logs a warning for the operator.
    fn warn(&self, text: &str) {
        warn([text.to_owned()]);
    }
}

fn answer<S: Service>(connection: &UnixStream, service: &Arc<S>) {
    *lock(&PENDING) += 1;
    let handled = match connection.try_clone().map(BufReader::new) {
        Ok(mut requests) => match read_request(&mut requests) {
            Ok(Some(request)) => service.handle(request, requests, connection),
            // The client only tested whether the process is alive.
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        },
        Err(error) => {
            // Read the request before sending the error. If bytes of the request stayed unread, the
            // client could fail to send the rest, and it reads the answer only after sending all.
            let _ = read_request::<S::Request>(&mut BufReader::new(connection));
            Err(error).context("cannot carry out the request")
        }
    };
    if let Err(error) = handled {
        // Sending fails if the client has disconnected.
        let _ = send(connection, &Line::Failed(service.refused(&error)));
    }
    // Closing this descriptor would not end the connection if a reading thread holds a clone of it.
    let _ = connection.shutdown(Shutdown::Both);
    *lock(&PENDING) -= 1;
    ANSWERED.notify_all();
}

/// How long an ending process waits for clients that do not read.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// The number of requests that this process has not yet answered completely.
static PENDING: Mutex<usize> = Mutex::new(0);
static ANSWERED: Condvar = Condvar::new();

/// Waits until every request is answered, but at most [`DRAIN_LIMIT`], because a client that is
/// stopped does not read its answer.
pub(crate) fn drain() {
    let pending = lock(&PENDING);
    let _ = ANSWERED.wait_timeout_while(pending, DRAIN_LIMIT, |pending| *pending > 0);
}

/// The next request; `None` after the client hung up.
pub(crate) fn read_request<R: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<R>> {
    let mut request = String::new();
    if from.take(REQUEST_LIMIT_BYTES).read_line(&mut request)? == 0 {
        return Ok(None);
    }
    Ok(Some(
        serde_json::from_str(&request).context("malformed request")?,
    ))
}

/// Sends one line of an answer.
pub(crate) fn send(mut connection: &UnixStream, line: &Line) -> Result<()> {
    Ok(writeln!(connection, "{}", line.to_json())?)
}

/// Maximum length of a line of an answer. The longest is a timeline, of at most a few MiB.
const ANSWER_LINE_BYTES: u64 = 64 << 20;

/// Connects to a control socket. A stopped process accepts nothing, and a plain connect would wait
/// without a limit when the socket's backlog is full.
fn connect_within(socket: &Path, limit: Duration) -> io::Result<UnixStream> {
    let (_waker, stop) = waker()?;
    let stream = connect_unix(socket, Instant::now() + limit, &stop)?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Suffix of the error for an unexpected answer.
const UNEXPECTED: &str = "sent an unexpected answer: it probably runs another release";

/// A request, and the lines of its answer.
pub(crate) struct Client {
    answer: BufReader<UnixStream>,
    owner: &'static str,
}

impl Client {
    /// Sends a request to the process behind a control socket; `limit` applies to each line of the
    /// answer. `owner` is the kind of process for errors, for example "VM".
    pub(crate) fn ask(
        socket: &Path,
        owner: &'static str,
        request: &impl Serialize,
        limit: Option<Duration>,
    ) -> Result<Self> {
        let connected = match limit {
            Some(limit) => connect_within(socket, limit),
            None => UnixStream::connect(socket),
        };
        let mut stream = connected.map_err(|error| {
            let at = socket.display();
            let what = match error.kind() {
                ErrorKind::PermissionDenied => {
                    format!(
                        "{at} accepts only root and the user that runs the {owner}'s process: run \
                         the command as one of these users"
                    )
                }
                _ => format!(
                    "no {owner} answers at {at}: check that its process runs with this --control"
                ),
            };
            anyhow::Error::new(error).context(what)
        })?;
        stream.set_read_timeout(limit)?;
        writeln!(stream, "{}", serde_json::to_string(request)?)?;
        let answer = BufReader::new(stream);
        Ok(Self { answer, owner })
    }

    /// Returns the connection, for later requests while the answer continues.
    pub(crate) fn more(&self) -> Result<UnixStream> {
        Ok(self.answer.get_ref().try_clone()?)
    }

    /// The next line; `None` when the answer is complete.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        let mut text = String::new();
        let owner = self.owner;
        let mut line = (&mut self.answer).take(ANSWER_LINE_BYTES);
        let read = line
            .read_line(&mut text)
            .with_context(|| format!("no answer from the {owner}'s process: it may be stopped"))?;
        if read == 0 {
            return Ok(None);
        }
        let line = serde_json::from_str(&text)
            .with_context(|| format!("the {owner}'s process {UNEXPECTED}"))?;
        Ok(Some(line))
    }

    /// The next line, from which `wanted` extracts the expected answer.
    pub(crate) fn expect<T>(&mut self, wanted: impl FnOnce(Line) -> Option<T>) -> Result<T> {
        let owner = self.owner;
        match self.next()? {
            Some(Line::Failed(failed)) => Err(failed.into()),
            Some(line) => {
                wanted(line).with_context(|| format!("the {owner}'s process {UNEXPECTED}"))
            }
            None => bail!("the {owner}'s process has ended"),
        }
    }

    /// Reads the last line of a successful answer, and prints it if `json`; returns the exit code.
    pub(crate) fn done(&mut self, json: bool) -> Result<i32> {
        self.expect(|line| matches!(line, Line::Done).then_some(()))?;
        if json {
            Line::Done.print();
        }
        Ok(DONE)
    }
}
