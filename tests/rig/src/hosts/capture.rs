//! Captures of a link's packets.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{Host, HostsError};

/// The payload of the last datagram of a capture. Packets arrive in order, so all packets sent
/// before this datagram are captured before it.
const END: &[u8] = b"This datagram ends a capture of Dunlin's rig.";

/// The port of the discard service (RFC 863), on which no program listens.
const DISCARD: u16 = 9;

/// How long to wait for the last datagram. If the link is down, the datagram does not arrive.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running tcpdump.
#[derive(Debug)]
pub struct Capture {
    child: Child,
    file: PathBuf,
    /// The socket that sends the last datagram.
    socket: UdpSocket,
    /// Set to make the writer search for the last datagram.
    ending: Arc<AtomicBool>,
    ended: Receiver<()>,
    writer: Option<JoinHandle<io::Result<()>>>,
}

impl Capture {
    /// Starts to write all packets of `interface`, untruncated, to `path` (pcap). `peer` is an
    /// address that is reachable through the interface. Returns when the capture has started.
    pub(super) fn start(
        host: &Host,
        interface: &str,
        peer: IpAddr,
        path: &Path,
    ) -> Result<Self, HostsError> {
        let local = |error| HostsError::Kernel(path.display().to_string(), error);
        let failed = |output: String| HostsError::Command {
            command: "tcpdump".to_owned(),
            output,
        };
        let socket = host.run(|| {
            let any: IpAddr = match peer {
                IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect((peer, DISCARD))?;
            Ok(socket)
        })?;
        let socket = socket.map_err(local)?;
        let file = File::create(path).map_err(local)?;
        let mut child = host
            .command("tcpdump")
            .args(["--interface", interface, "--snapshot-length", "0"])
            .args([
                "--packet-buffered",
                "--immediate-mode",
                "--no-promiscuous-mode",
            ])
            .args(["-w", "-"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let packets = child.stdout.take().expect("the command has a stdout pipe");
        let mut messages =
            BufReader::new(child.stderr.take().expect("the command has a stderr pipe"));
        let (sender, ended) = sync_channel(1);
        let ending = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ending);
        let mut capture = Self {
            child,
            file: path.to_path_buf(),
            socket,
            ending,
            ended,
            writer: Some(thread::spawn(move || write(packets, file, &seen, &sender))),
        };
        let mut said = String::new();
        while !said.contains("listening on") {
            if !matches!(messages.read_line(&mut said), Ok(1..)) {
                return Err(failed(said));
            }
        }
        // tcpdump's further messages are short, so the pipe can buffer them until the capture ends.
        capture.child.stderr = Some(messages.into_inner());
        Ok(capture)
    }

    /// Ends the capture. The file then contains all packets sent before this call, followed by the
    /// datagram that marks the end.
    ///
    /// # Errors
    /// The file could not be written.
    pub fn stop(mut self) -> Result<PathBuf, HostsError> {
        self.ending.store(true, Ordering::Release);
        // If the send fails, the interface is down and no packets are in flight, so there is
        // nothing to wait for.
        if self.socket.send(END).is_ok() {
            let _ = self.ended.recv_timeout(TIMEOUT);
        }
        self.end()
            .map_err(|error| HostsError::Kernel(self.file.display().to_string(), error))?;
        Ok(self.file.clone())
    }

    fn end(&mut self) -> io::Result<()> {
        let _ = self.child.kill();
        let _ = self.child.wait();
        match self.writer.take() {
            Some(writer) => writer
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Copies packets to the file. After `ending` is set, searches the packets for the last datagram,
/// and reports on `ended` when it has found the datagram.
fn write(
    mut from: ChildStdout,
    mut to: File,
    ending: &AtomicBool,
    ended: &SyncSender<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    // Keep the end of the previous data, because the datagram may span two reads.
    let mut seen = Vec::new();
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            return Ok(());
        }
        to.write_all(&buffer[..count])?;
        seen.extend_from_slice(&buffer[..count]);
        // Search only after `ending` is set, because searching takes longer than copying.
        if ending.load(Ordering::Acquire) && seen.windows(END.len()).any(|bytes| bytes == END) {
            let _ = ended.try_send(());
        }
        seen.drain(..seen.len().saturating_sub(END.len() - 1));
    }
}
