//! A netlink request: a header, a fixed structure, attributes.

use netlink_packet_core::{Emitable, NLM_F_REQUEST, NetlinkHeader};
use zeroize::Zeroizing;

/// The size of `struct nlmsghdr`.
pub(super) const HEADER: usize = 16;
/// The capacity of a request in bytes. It exceeds the longest request: the one that adds an SA with
/// the longest replay window. The vector therefore never reallocates, and never leaves a key in
/// freed memory.
const ROOM: usize = 2048;

/// A request. Its bytes are wiped on drop.
pub(crate) struct Request {
    bytes: Zeroizing<Vec<u8>>,
    kind: u16,
    flags: u16,
}

impl Request {
    pub(crate) fn new(kind: u16, flags: u16) -> Self {
        let mut bytes = Zeroizing::new(Vec::with_capacity(ROOM));
        bytes.resize(HEADER, 0);
        Self {
            bytes,
            kind,
            flags: flags | NLM_F_REQUEST,
        }
    }

    pub(super) fn flags(&self) -> u16 {
        self.flags
    }

    /// Writes the header with this sequence number and returns the whole request.
    pub(crate) fn finish(&mut self, sequence: u32) -> &[u8] {
        let mut header = NetlinkHeader::default();
        header.length = self.bytes.len() as u32;
        header.message_type = self.kind;
        header.flags = self.flags;
        header.sequence_number = sequence;
        header.emit(&mut self.bytes[..HEADER]);
        &self.bytes
    }

    pub(crate) fn put(&mut self, value: &impl Emitable) {
        let at = self.grow(value.buffer_len());
        value.emit(&mut self.bytes[at..]);
    }

    pub(crate) fn put_bytes(&mut self, bytes: &[u8]) {
        let at = self.grow(bytes.len());
        self.bytes[at..].copy_from_slice(bytes);
    }

    fn grow(&mut self, by: usize) -> usize {
        let at = self.bytes.len();
        assert!(at + by <= ROOM, "netlink request longer than ROOM");
        self.bytes.resize(at + by, 0);
        at
    }

    /// Appends an attribute: its length and kind, the bytes that `fill` writes, and zeros up to a
    /// multiple of four.
    pub(crate) fn attribute(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let at = self.grow(4);
        fill(self);
        let length = (self.bytes.len() - at) as u16;
        self.bytes[at..at + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes[at + 2..at + 4].copy_from_slice(&kind.to_ne_bytes());
        let rest = self.bytes.len().next_multiple_of(4) - self.bytes.len();
        self.grow(rest);
    }
}
