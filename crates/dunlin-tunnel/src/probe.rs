//! Probes of the path to a peer, and requests for a peer's report. A probe sends bytes to the peer
//! and back, to test the path before a VM depends on it. The peer's side is in `echo` and `report`.

use dunlin_lane::sync::{self, lock};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_proto::fault::FaultCode;

use super::carriers::Carriers;
use super::echo::{ECHO_ROUTE, MAX_PROBE_BYTES, TIMEOUT};
use super::failure::{Failure, OrFailure};
use super::listener::next_number;
use super::meter::{Count, Ending, Tally};
use super::options::{Entrance, Mode};
use super::report::{MAX_REPORT_BYTES, REPORT_ROUTE, too_long};
use super::socket::Stream;

const PIECE_BYTES: usize = 256 << 10;
/// How long a report may take to arrive in full.
const REPORT_LIMIT: Duration = Duration::from_secs(20);

/// The result of [`super::Tunnel::probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The time until the trunk and a channel to the peer were open and the first byte had
    /// returned.
    pub first_byte: Duration,
    /// The time in which the remaining bytes went to the peer and back.
    pub remaining: Duration,
    /// Bytes that went to the peer and came back unchanged.
    pub bytes: u64,
}

/// A peer's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The text, at most [`MAX_REPORT_BYTES`]. The peer chose it.
    pub text: String,
    /// The time from the request to the end of the text. The peer made the report within this time.
    pub elapsed: Duration,
}

/// Sends `bytes` through a channel to the peer of `entrance` and reads them back.
///
/// # Errors
/// The relay's port cannot be reached, the channel was refused or failed, or the peer returned
/// other bytes.
pub(super) fn run(carriers: &Carriers, entrance: &Entrance, bytes: u64) -> Result<Probe, Failure> {
    let bytes = bytes.clamp(1, MAX_PROBE_BYTES);
    if let Mode::RelayAt(_) = entrance.mode {
        carriers.relays.test(entrance)?;
    }
    let channel = Channel::open(carriers, entrance, ECHO_ROUTE)?;
    exchange(&channel.stream, bytes, channel.began).map_err(|error| {
        let text = format!(
            "the test bytes did not return from the peer at {}",
            entrance.to
        );
        channel.failure(text, &error)
    })
}

/// Asks the peer of `entrance` for its report.
///
/// # Errors
/// The reason why the channel was refused or failed, or [`FaultCode::Malformed`] for a report that
/// is too long or is not text.
pub(super) fn ask(carriers: &Carriers, entrance: &Entrance) -> Result<Report, Failure> {
    let channel = Channel::open(carriers, entrance, REPORT_ROUTE)?;
    let until = channel.began + REPORT_LIMIT;
    let what = format!("the peer at {} sent no report", entrance.to);
    match read(&channel.stream, until) {
        Ok(text) => Ok(Report {
            text,
            elapsed: channel.began.elapsed(),
        }),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(Failure::new(FaultCode::Malformed, what).because(&error))
        }
        Err(error) => Err(channel.failure(what, &error)),
    }
}

/// A channel with its local end in this process.
struct Channel {
    stream: UnixStream,
    outcome: Arc<Outcome>,
    began: Instant,
}

impl Channel {
    /// Opens a channel of `route` to the peer of `entrance`.
    fn open(carriers: &Carriers, entrance: &Entrance, route: &str) -> Result<Self, Failure> {
        let outcome = Arc::new(Outcome::default());
        let what = "cannot create a local connection";
        let (near, far) = UnixStream::pair().or_failure(FaultCode::Kernel, what)?;
        let stream = Stream::unix(near).or_failure(FaultCode::Kernel, what)?;
        let tally = Arc::clone(&outcome) as Arc<dyn Tally>;
        // A relay does not carry the routes of the echo and the report. The trunk to the same peer
        // does.
        let mode = match entrance.mode {
            Mode::RelayAt(_) => Mode::Stripe,
            mode => mode,
        };
        let entrance = Entrance {
            route: route.to_owned(),
            mode,
            ..entrance.clone()
        };
        let count = Count::new(carriers.site.meter(route), Some(tally));
        let began = Instant::now();
        carriers.carry(
            &entrance,
            next_number(),
            String::new(),
            stream.counted(count),
        );
        Ok(Self {
            stream: far,
            outcome,
            began,
        })
    }

    /// Ends the channel after `error`. Returns the reason for the channel's end. If no reason is
    /// reported, returns `text` with `error`.
    fn failure(self, text: String, error: &io::Error) -> Failure {
        drop(self.stream);
        let failure = self.outcome.failure(TIMEOUT);
        failure.unwrap_or_else(|| Failure::new(FaultCode::ChannelBroken, text).because(error))
    }
}

/// Reads a report until its end.
fn read(mut stream: &UnixStream, until: Instant) -> io::Result<String> {
    stream.shutdown(Shutdown::Write)?;
    let mut bytes = vec![0; MAX_REPORT_BYTES + 1];
    let mut length = 0;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes.get_mut(length..).unwrap_or_default())? {
            0 if length == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            0 => break,
            count => length += count,
        }
        if length > MAX_REPORT_BYTES {
            return Err(too_long());
        }
    }
    bytes.truncate(length);
    let not_text = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    String::from_utf8(bytes).map_err(not_text)
}

/// Writes `bytes` bytes to a connection, and at the same time reads the returning bytes from it.
fn exchange(stream: &UnixStream, bytes: u64, began: Instant) -> io::Result<Probe> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut first = [FIRST];
    (&*stream).write_all(&first)?;
    (&*stream).read_exact(&mut first)?;
    let first_byte = began.elapsed();
    if first != [FIRST] {
        return Err(other_bytes());
    }
    let began = Instant::now();
    let rest = bytes - 1;
    thread::scope(|scope| {
        let writer = thread::Builder::new().name("dunlin-probe".to_owned());
        let writer = writer.spawn_scoped(scope, || {
            let sent = send(stream, rest);
            stream.shutdown(Shutdown::Write).and(sent)
        })?;
        let received = receive(stream, rest);
        if received.is_err() {
            // Ends the writer. Fails only if the connection is closed.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let sent = writer
            .join()
            .unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
        received.and(sent)
    })?;
    Ok(Probe {
        first_byte,
        remaining: began.elapsed(),
        bytes,
    })
}

const FIRST: u8 = 0xd1;

/// The test data from `offset` on. Its period does not divide a frame's length, so frames in the
/// wrong order are detected.
fn piece(offset: u64) -> Vec<u8> {
    let of = |at: u64| u8::try_from((offset + at) % 251).unwrap_or(0);
    (0..PIECE_BYTES as u64).map(of).collect()
}

fn send(mut stream: &UnixStream, bytes: u64) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes {
        let data = piece(sent);
        let now = data
            .len()
            .min(usize::try_from(bytes - sent).unwrap_or(data.len()));
        stream.write_all(data.get(..now).unwrap_or(&data))?;
        sent += now as u64;
    }
    Ok(())
}

fn receive(mut stream: &UnixStream, bytes: u64) -> io::Result<()> {
    let mut received = 0;
    let mut data = vec![0; PIECE_BYTES];
    while received < bytes {
        let expected = piece(received);
        let now = data
            .len()
            .min(usize::try_from(bytes - received).unwrap_or(data.len()));
        let (data, expected) = (data.get_mut(..now), expected.get(..now));
        let (Some(data), Some(expected)) = (data, expected) else {
            return Err(other_bytes());
        };
        stream.read_exact(data)?;
        if *data != *expected {
            return Err(other_bytes());
        }
        received += now as u64;
    }
    match stream.read(&mut [0])? {
        0 => Ok(()),
        _ => Err(other_bytes()),
    }
}

fn other_bytes() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "other bytes arrived instead")
}

/// How the probe's channel ended.
#[derive(Debug, Default)]
struct Outcome {
    ended: Mutex<Option<Option<Failure>>>,
    changed: Condvar,
}

impl Outcome {
    /// The reason for the end of the channel, if it ends within `limit`.
    fn failure(&self, limit: Duration) -> Option<Failure> {
        let deadline = Instant::now() + limit;
        let mut ended = lock(&self.ended);
        while ended.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            ended = sync::wait(&self.changed, ended, Some(left));
        }
        ended.clone().flatten()
    }
}

impl Tally for Outcome {
    fn begins(&self) {}

    fn ends(&self, ending: Ending) {
        *lock(&self.ended) = Some(match ending {
            Ending::Badly(why) => why,
            Ending::Well | Ending::LeftUnread => None,
        });
        self.changed.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn i7_a_report_is_bounded_in_length_and_in_time() {
        let of = |bytes: &[u8]| {
            let (near, far) = UnixStream::pair().unwrap();
            (&far).write_all(bytes).unwrap();
            drop(far);
            read(&near, Instant::now() + REPORT_LIMIT)
        };
        let longest = "x".repeat(MAX_REPORT_BYTES);
        assert_eq!(of(longest.as_bytes()).unwrap(), longest);
        let kind = |bytes: &[u8]| of(bytes).unwrap_err().kind();
        assert_eq!(
            kind(format!("{longest}y").as_bytes()),
            io::ErrorKind::InvalidData
        );
        assert_eq!(kind(&[0xff]), io::ErrorKind::InvalidData);
        assert_eq!(kind(b""), io::ErrorKind::UnexpectedEof);
        // The text never ends.
        let (near, far) = UnixStream::pair().unwrap();
        (&far).write_all(b"x").unwrap();
        let waited = read(&near, Instant::now() + Duration::from_millis(20));
        let kind = waited.unwrap_err().kind();
        assert!(matches!(
            kind,
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
        ));
    }
}
