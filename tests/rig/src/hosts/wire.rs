//! Counts the TCP payload on a link by port, and searches it for known bytes.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use dunlin_linux::poll::{Interest, Waker, poll, waker};

use super::{Host, HostsError};
use crate::linux::packet::Packets;

const ETHERNET_BYTES: usize = 14;
const IPV6_BYTES: usize = 40;
const TCP: u8 = 6;
const ICMPV6: u8 = 58;
const HOP_BY_HOP: u8 = 0;

/// A count of the traffic at one end of a link, in both directions. It runs in a thread until it
/// is stopped or dropped.
#[derive(Debug)]
pub struct Wire {
    waker: Waker,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<Traffic>>>,
}

/// What crossed a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of TCP payload by the listener's port. Resent bytes are counted again. If a connection
    /// is older than the count, its lower port is treated as the listener's.
    pub bytes: BTreeMap<u16, u64>,
    /// The number of SYN segments, including resent ones, by destination port.
    pub tried: BTreeMap<u16, u64>,
    /// How often any of the searched words was found in the payload, by the listener's port.
    pub found: BTreeMap<u16, u64>,
    /// Packets that are neither TCP, ARP nor ICMPv6.
    pub others: u64,
}

impl Traffic {
    /// The ports on which payload was carried.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.bytes.keys().copied().collect()
    }
}

impl Wire {
    /// Starts to count. Searches the payload of every packet for `words`, at every offset.
    pub(super) fn start(
        host: &Host,
        interface: &str,
        words: HashSet<u64>,
    ) -> Result<Self, HostsError> {
        let failed = |error| HostsError::Kernel(format!("packets of {interface}"), error);
        let packets = host.run(|| Packets::open(interface))?.map_err(failed)?;
        let (waker, wakeup) = waker().map_err(failed)?;
        let stopped = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stopped);
        let count = move || {
            let mut tally = Tally::new(words);
            loop {
                // Read the flag first: packets that were sent before it was set are still counted.
                let is_last = seen.load(Ordering::Acquire);
                while let Some(frame) = packets.next_frame()? {
                    tally.frame(&frame.bytes);
                }
                if is_last {
                    break;
                }
                poll(&[Interest::read(&packets), Interest::read(&wakeup)], None)?;
            }
            match packets.lost()? {
                0 => Ok(tally.traffic),
                lost => Err(io::Error::other(format!("{lost} packets were not counted"))),
            }
        };
        let thread = thread::Builder::new().name("wire".to_owned()).spawn(count);
        Ok(Self {
            waker,
            stopped,
            thread: Some(thread.map_err(failed)?),
        })
    }

    /// Ends the count, and returns what was sent before this call.
    ///
    /// # Errors
    /// Packets could not be read, or came too fast to be counted.
    pub fn stop(mut self) -> Result<Traffic, HostsError> {
        self.end()
            .map_err(|error| HostsError::Kernel("the count of packets".to_owned(), error))
    }

    fn end(&mut self) -> io::Result<Traffic> {
        self.stopped.store(true, Ordering::Release);
        self.waker.wake();
        match self.thread.take() {
            Some(thread) => thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(Traffic::default()),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

type Connection = [(IpAddr, u16); 2];

struct Tally {
    words: HashSet<u64>,
    /// For each value of 16 bits, whether it equals the lowest bits of one of the words. Most
    /// offsets fail this test, which is much faster than a search for the whole word.
    starts: Vec<bool>,
    /// Connections that began during the count, each with the client's address before the server's.
    opened: HashSet<Connection>,
    traffic: Traffic,
}

impl Tally {
    fn new(words: HashSet<u64>) -> Self {
        let mut starts = vec![false; 1 << 16];
        for word in &words {
            starts[(word & 0xffff) as usize] = true;
        }
        Self {
            words,
            starts,
            opened: HashSet::new(),
            traffic: Traffic::default(),
        }
    }

    fn frame(&mut self, frame: &[u8]) {
        match segment(frame) {
            Packet::Tcp {
                connection,
                is_syn,
                payload,
            } => self.segment(connection, is_syn, payload),
            Packet::Resolution => {}
            Packet::Other => self.traffic.others += 1,
        }
    }

    fn segment(&mut self, connection: Connection, is_syn: bool, payload: &[u8]) {
        let [source, destination] = connection;
        if is_syn {
            self.opened.remove(&[destination, source]);
            self.opened.insert(connection);
            *self.traffic.tried.entry(destination.1).or_default() += 1;
        }
        if payload.is_empty() {
            return;
        }
        let port = if self.opened.contains(&connection) {
            destination.1
        } else if self.opened.contains(&[destination, source]) {
            source.1
        } else {
            source.1.min(destination.1)
        };
        *self.traffic.bytes.entry(port).or_default() += payload.len() as u64;
        if self.words.is_empty() {
            return;
        }
        let found = payload
            .windows(8)
            .filter(|bytes| self.starts[usize::from(bytes[0]) | usize::from(bytes[1]) << 8])
            .filter_map(|bytes| bytes.try_into().ok())
            .filter(|bytes| self.words.contains(&u64::from_le_bytes(*bytes)))
            .count();
        if found > 0 {
            *self.traffic.found.entry(port).or_default() += found as u64;
        }
    }
}

enum Packet<'a> {
    Tcp {
        /// The source and the destination.
        connection: Connection,
        /// Whether this segment opens the connection.
        is_syn: bool,
        payload: &'a [u8],
    },
    /// ARP or ICMPv6.
    Resolution,
    Other,
}

fn segment(frame: &[u8]) -> Packet<'_> {
    let number = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let ip = ETHERNET_BYTES;
    let parse = || {
        let (protocol, addresses, header, end) = match number(12)? {
            0x0800 => {
                let address =
                    |at| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap_or_default());
                frame.get(ip..ip + 20)?;
                (
                    frame[ip + 9],
                    [address(ip + 12), address(ip + 16)],
                    usize::from(frame[ip] & 15) * 4,
                    usize::from(number(ip + 2)?),
                )
            }
            0x86dd => {
                let address = |at| {
                    IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap_or_default())
                };
                frame.get(ip..ip + IPV6_BYTES)?;
                (
                    frame[ip + 6],
                    [address(ip + 8), address(ip + 24)],
                    IPV6_BYTES,
                    IPV6_BYTES + usize::from(number(ip + 4)?),
                )
            }
            0x0806 => return Some(Packet::Resolution),
            _ => return None,
        };
        // A host announces its multicast groups in ICMPv6 after an extension header.
        let is_group = protocol == HOP_BY_HOP && frame.get(ip + header) == Some(&ICMPV6);
        if protocol == ICMPV6 || is_group {
            return Some(Packet::Resolution);
        }
        if protocol != TCP {
            return None;
        }
        let tcp = ip + header;
        let ports = [number(tcp)?, number(tcp + 2)?];
        let data = tcp + usize::from(*frame.get(tcp + 12)? >> 4) * 4;
        // The payload ends where the length field says, because short frames are padded. If the
        // field is zero, the packet is not segmented (BIG TCP) and fills the frame.
        let end = if end == header || end == 0 {
            frame.len()
        } else {
            ip + end
        };
        Some(Packet::Tcp {
            connection: [(addresses[0], ports[0]), (addresses[1], ports[1])],
            is_syn: frame.get(tcp + 13)? & 0x12 == 0x02,
            payload: frame.get(data..end)?,
        })
    };
    parse().unwrap_or(Packet::Other)
}
