//! Every bound of the protocol, with its reason.
//!
//! A number from a peer is compared with one of these bounds before it sizes or indexes anything
//! (I7). Lengths of buffers are `usize`, or have the type of their field on the wire. Lengths and
//! offsets of guest memory are `u64`, because they exceed the address space of a 32-bit build. The
//! relations that the codecs rely on are asserted at compile time at the end of the file.

/// Bytes of a guest page, the unit of dirty tracking and of every range.
///
/// Formula: the smallest page of x86-64 and the usual page of AArch64.
/// Drawback: a host with 64 KiB pages tracks more bits than it has pages.
/// Alternative: a negotiated size. *describe* already has a field for it, so
/// a later version can allow other sizes.
pub const PAGE_BYTES: u64 = 4096;

/// Maximum number of data lanes of one session that are alive at the same time.
///
/// Four times the largest number of lanes that a published measurement needed to saturate 100
/// Gbit/s. The limit bounds threads and per-lane buffers. Lane *numbers* may be larger, because a
/// replaced lane's number is never used again (I4).
pub const MAX_LANES: u16 = 128;

/// Maximum number of memory regions of one VM.
///
/// KVM allows more memory slots, but not every slot needs a region: holes and aliases need none.
/// 1024 covers a VM with a region for every DIMM and every device memory.
pub const MAX_REGIONS: usize = 1024;

/// Bytes of the name of a VM, a region or a state section.
///
/// Linux has the same limit for file names, and toolstacks use these names as file names.
pub const MAX_NAME_BYTES: usize = 255;

/// Bytes of the VMM's opaque description in *describe*.
///
/// A generous libvirt domain XML with CPU features is under 32 KiB.
pub const MAX_DESCRIPTION_BYTES: usize = 256 * 1024;

/// Bytes of a control message after its header. The receiver buffers all of them.
pub const MAX_CONTROL_BODY_BYTES: usize = 1024 * 1024;

/// Bytes of one state section's content. The section, its name and future extension
/// fields together fit the body of one control message.
///
/// Larger state travels as a state-stream region over the lanes.
pub const MAX_SECTION_BYTES: usize = MAX_CONTROL_BODY_BYTES - EXTENSION_ROOM_BYTES;

/// Maximum number of state sections of one migration attempt.
pub const MAX_SECTIONS: u32 = 4096;

/// Total bytes of all state sections of one migration attempt.
///
/// [`MAX_SECTIONS`] and [`MAX_SECTION_BYTES`] alone would allow 4 GiB. A receiver keeps the
/// sections until *final* arrives. With this limit it stays within its memory bound of
/// 64 MiB (I8).
pub const MAX_STATE_BYTES: usize = 32 * 1024 * 1024;

/// Maximum number of ranges in one chunk's header.
///
/// Formula: 24 + 448 × 24 = 10 776 bytes, which fits the record that carries
/// a chunk's header ([`MAX_CHUNK_HEADER_BYTES`]).
/// Drawback: more than 448 scattered zero ranges need a second chunk.
/// Alternative: several header records. They gain nothing, because the payload
/// of a chunk is full after 256 single scattered raw pages.
pub const MAX_RANGES_PER_CHUNK: usize = 448;

/// Bytes of a chunk's header with its ranges. Together they must fit one TLS record, which has at
/// most 16 384 bytes of plaintext (RFC 8446 section 5.1).
pub const MAX_CHUNK_HEADER_BYTES: usize = 12 * 1024;

/// Payload bytes of one chunk.
///
/// This limit bounds each lane's buffer.
pub const MAX_CHUNK_PAYLOAD_BYTES: u32 = 1024 * 1024;

/// The number of pages that Dunlin's source puts into a chunk: 64 pages are 256 KiB. The protocol
/// allows up to [`MAX_CHUNK_PAYLOAD_BYTES`].
///
/// Formula: the pages of one frame of a data lane. A frame is sealed and written in one piece, and
/// stays in a core's second-level cache during that time. Drawback: a header and an acknowledgement
/// for each 256 KiB. Alternative: several frames per chunk. Measurements showed no difference
/// beyond noise.
pub const CHUNK_PAGES: u64 = 64;

/// Pages that a lane of Dunlin's source reads for one chunk, zero pages included: 8192
/// pages are 32 MiB. Zero pages have no payload, so a lane that finds zero pages adds the
/// next pending pages to the chunk.
///
/// Formula: large enough that one header covers 32 MiB of zero pages, even if each 2 MiB contains
/// one page that is not zero. Small enough to be read in a few milliseconds, because the lane sends
/// nothing while it reads. Drawback: the loss of a lane returns up to 32 MiB to the schedule for
/// each of its unacknowledged chunks. Alternative: no added pages, so that each 256 KiB of zeros
/// costs a header and an acknowledgement ([`CHUNK_PAGES`]).
pub const MAX_PAGES_LOOKED_AT: u64 = 8192;

/// The source forms no chunk while at least this many page ranges are in flight, that is, assigned
/// to a lane and not acknowledged. The last chunk can exceed the limit by up to
/// [`MAX_RANGES_PER_CHUNK`] ranges.
///
/// Formula: a range takes 24 bytes of memory, so this many ranges take 6 MiB. They cover 64 GiB of
/// guest memory if each range is a whole chunk. They cover only 1 GiB if each range is a single
/// page, which is the worst case. A path of 100 Gbit/s with a round trip of 80 ms holds less than
/// 1 GiB. Drawback: if the destination does not acknowledge, the source stops at this limit.
/// Alternative: none needed, because such a destination has stalled.
pub const MAX_IN_FLIGHT_RANGES: usize = 256 * 1024;

/// Maximum number of sets of chunk numbers in one acknowledgement.
///
/// The chunks of a lane arrive nearly in order, so an acknowledgement has about one set per
/// lane. The limit leaves room for a new control lane, on which the destination acknowledges
/// all chunks again.
pub const MAX_ACK_SETS: usize = 4096;

/// Maximum number of gaps in the numbers of the chunks that have arrived.
///
/// A lost lane leaves at most as many gaps as it had chunks in flight, a few
/// hundred. The limit has room for hundreds of lost lanes and costs at most 3
/// MiB.
pub const MAX_CHUNK_GAPS: usize = 64 * 1024;

/// Maximum number of addresses that a destination offers for data lanes.
pub const MAX_ENDPOINTS: usize = 16;

/// Bytes of one address for data lanes: the port, and either a DNS name of 253 bytes or an
/// IPv6 address with a scope of 15 bytes.
pub const MAX_ENDPOINT_BYTES: usize = 272;

/// Bytes of the path of a unix socket: `sun_path` of unix(7) has 108 bytes, of which the
/// last is zero.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Bytes of the name under which a journal records a session's peer. A name of this length fits the
/// journal's peer block, and usual names are shorter: a DNS name has at most 253 bytes, and a
/// SPIFFE ID usually fewer than 255. A peer with a longer name is recorded by its certificate.
pub const MAX_PRINCIPAL_NAME_BYTES: usize = 768;

/// Maximum number of journal files that a destination keeps for one peer after sessions in which
/// the VM did not run at the destination. There is one file for each VM. The peer can still ask
/// about these sessions.
///
/// The limit suffices, because a host does not migrate that many VMs at the same time. Each file
/// takes 12 KiB.
pub const MAX_RECORDS_OF_A_PEER: usize = 256;

/// Bytes of the text for operators that accompanies a fault.
pub const MAX_TEXT_BYTES: usize = 1024;

/// Bytes of one region: the limit of physical addresses on x86-64.
pub const MAX_REGION_BYTES: u64 = 1 << 52;

/// Total bytes of all regions; a VM cannot address more.
///
/// Before a destination allocates memory in proportion to the total, it also
/// compares the total with its own limit.
pub const MAX_MEMORY_BYTES: u64 = 1 << 52;

/// Bytes of a session's identifier.
pub const SESSION_ID_BYTES: usize = 16;

/// Bytes of the secret with which lanes prove that they belong to a session:
/// the length of a SHA-256 hash, as RFC 2104, section 3, recommends for HMAC keys.
pub const SESSION_SECRET_BYTES: usize = 32;

/// Bytes of a lane's proof: a whole HMAC-SHA-256 (RFC 6234).
pub const LANE_MAC_BYTES: usize = 32;

/// Bytes of the digest of guest memory that both sides compare if verification was
/// negotiated.
pub const DIGEST_BYTES: usize = 16;

/// Bytes after the prelude of an opening message.
///
/// The limit bounds the bytes that a peer can make this side buffer before the peer is
/// authenticated.
pub const MAX_OPENING_BODY_BYTES: usize = 4096;

/// Payload bytes of one frame of the tunnel.
///
/// Formula: the bytes that a data lane seals and writes in one piece.
/// Drawback: a small piece of another channel waits for one such frame.
/// Alternative: smaller frames. Below 128 KiB they cost more per byte.
pub const MAX_STRIPE_CHUNK_BYTES: u32 = 256 * 1024;

/// Maximum number of channels of one trunk that are alive at the same time. No
/// configuration can raise it.
///
/// QEMU's multifd has at most 255 channels for a VM, so the limit has room for sixteen
/// such VMs between one pair of hosts.
pub const MAX_CHANNELS: usize = 4096;

/// Maximum number of channels of one trunk if the configuration does not set it.
pub const DEFAULT_CHANNELS: usize = 512;

/// Maximum number of chunks of one channel that are not confirmed as delivered.
///
/// The limit bounds the receiver's bookkeeping if a sender writes byte by byte: 1024 entries
/// of about a hundred bytes are 100 KiB, less than the smallest window. Drawback: on a long
/// round trip, small pieces reach this limit before the window is full. Further bytes then
/// wait in the socket and are sent as larger pieces.
pub const MAX_CHANNEL_CHUNKS: usize = 1024;

/// Maximum number of bytes at the end of a channel that its consumer may leave unread, if the other
/// side has ended the channel. If more bytes are unread, the channel counts as aborted. The limit
/// has room for eight TLS alerts.
///
/// A program that has received all data closes its connection without reading the
/// *close_notify* of the peer's TLS, one record of 24 to 31 bytes. Drawback: a consumer
/// that dies within the last 256 bytes looks like one that has finished. Bytes that the
/// consumer's socket has accepted count as read, because after a reset no system call
/// reports whether the consumer has read them. Alternative: zero, which counts every
/// migration with QEMU's own TLS and multifd as aborted.
pub const MAX_UNREAD_BYTES: u64 = 256;

/// The smallest window of a channel: one chunk, so the channel can always make progress (I8).
pub const LEAST_WINDOW_BYTES: u64 = MAX_STRIPE_CHUNK_BYTES as u64;

/// The initial window of a channel, if the peer's limit allows it. The channel's rate is not
/// known yet. At 1 GiB/s and a round trip of 1 ms, this many bytes are in flight.
pub const START_WINDOW_BYTES: u64 = 1024 * 1024;

/// The largest window of a channel if its route does not set one (I8).
///
/// Formula: 10 Gbit/s over a round trip of 13 ms. Drawback: a longer path needs a larger
/// window in the configuration of the route. Alternative: only the limit for the peer
/// ([`DEFAULT_PEER_BYTES`]). One channel with a slow consumer would then fill that limit, and
/// the hypervisor would mistake the buffered bytes for bandwidth.
pub const DEFAULT_WINDOW_BYTES: u64 = 16 * 1024 * 1024;

/// Maximum bytes of all channels of a peer that may wait on one side, if the
/// configuration does not set another limit (I8).
///
/// Formula: a path of 100 Gbit/s with a round trip of 10 ms holds 125 MB. With a reserve of a
/// quarter these are 156 MB. The remaining bytes are for the minimum windows of other channels.
pub const DEFAULT_PEER_BYTES: u64 = 256 * 1024 * 1024;

/// The maximum length of a channel in bytes: far more than a hypervisor sends, and so small that an
/// offset plus a length does not overflow.
pub const MAX_CHANNEL_OFFSET: u64 = 1 << 62;

/// Maximum number of channels in one *credit* message.
pub const MAX_CREDITS: usize = 1024;

/// Bytes of a message of the tunnel after its header. The receiver buffers all of
/// them.
pub const MAX_TUNNEL_BODY_BYTES: usize = 64 * 1024;

/// Bytes of a ClientHello, with its header, that are searched for the server
/// name.
///
/// Formula: four times the 4 KiB of a hello with X25519MLKEM768, a post-quantum signature list, an
/// encrypted inner hello and a session ticket. Drawback: longer hellos, which TLS allows, are
/// refused. Alternative: none needed until clients send them.
pub const MAX_CLIENT_HELLO_BYTES: usize = 16 * 1024;

/// Bytes of the TLS records that carry a ClientHello, with their headers. The client is not
/// authenticated yet.
///
/// Formula: two and a half times the limit of a hello, for clients that split it into records of a
/// few bytes. Records of one byte would need six times the limit of a hello. Drawback: hellos of
/// more than 6 KiB must not be split into one-byte records. Alternative: six times, which no honest
/// client needs.
pub const MAX_CLIENT_FLIGHT_BYTES: usize = 40 * 1024;

/// Bytes of a server name: the longest DNS name has 253 bytes, and OpenSSL accepts 255.
pub const MAX_SERVER_NAME_BYTES: usize = 255;

/// Maximum number of SAs that one side of a keying session installs for the other
/// side's traffic, in one epoch.
///
/// This is more than the CPUs of a host that carry lanes, and more than the connections of a host
/// that need an SA of their own. The SAs of two epochs use 3 MiB of kernel memory. Traffic without
/// an SA of its own uses the fallback SA.
pub const MAX_SAS: u16 = 1024;

/// Maximum number of SAs in one message: all SAs of an epoch, so that one exchange renews all
/// keys.
pub const MAX_SLOTS: usize = MAX_SAS as usize;

/// Bytes of a message of a keying session after its header.
pub const MAX_IPSEC_BODY_BYTES: usize = 16 * 1024;

/// Bytes that the largest messages leave free in their body, for extension fields of
/// later versions.
pub const EXTENSION_ROOM_BYTES: usize = 4096;

// A `usize` holds every 32-bit number from the wire.
const _: () = assert!(usize::BITS >= 32);
const _: () = assert!(PAGE_BYTES.is_power_of_two());
const _: () = assert!(MAX_REGION_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(MAX_REGION_BYTES <= MAX_MEMORY_BYTES);
// The offset of the end of any page, in bytes, does not overflow.
const _: () = assert!(MAX_MEMORY_BYTES <= u64::MAX / 2);
const _: () = assert!(24 + MAX_RANGES_PER_CHUNK * 24 <= MAX_CHUNK_HEADER_BYTES);
const _: () = assert!(MAX_CHUNK_HEADER_BYTES <= 16 * 1024);
const _: () = assert!(MAX_RANGES_PER_CHUNK < MAX_IN_FLIGHT_RANGES);
const _: () = assert!((MAX_CHUNK_PAYLOAD_BYTES as u64).is_multiple_of(PAGE_BYTES));
const _: () = assert!(CHUNK_PAGES * PAGE_BYTES <= MAX_CHUNK_PAYLOAD_BYTES as u64);
// A chunk of single scattered raw pages reaches its payload limit before its range limit.
const _: () = assert!(MAX_CHUNK_PAYLOAD_BYTES as u64 / PAGE_BYTES <= MAX_RANGES_PER_CHUNK as u64);
// The largest *describe* fits a control body: its fixed part, the VM's name, the description,
// and the regions with their names.
const _: () = assert!(
    64 + MAX_NAME_BYTES + MAX_DESCRIPTION_BYTES + MAX_REGIONS * (32 + MAX_NAME_BYTES)
        <= MAX_CONTROL_BODY_BYTES - EXTENSION_ROOM_BYTES
);
const _: () = assert!(32 + MAX_NAME_BYTES <= EXTENSION_ROOM_BYTES);
const _: () = assert!(MAX_SECTION_BYTES <= MAX_STATE_BYTES);
const _: () = assert!(
    8 + MAX_ACK_SETS * 12 + MAX_LANES as usize * 6 <= MAX_CONTROL_BODY_BYTES - EXTENSION_ROOM_BYTES
);
const _: () = assert!(
    64 + MAX_ENDPOINTS * (2 + MAX_ENDPOINT_BYTES) <= MAX_CONTROL_BODY_BYTES - EXTENSION_ROOM_BYTES
);
const _: () = assert!(8 + MAX_TEXT_BYTES <= MAX_OPENING_BODY_BYTES / 2);
const _: () = assert!(MAX_OPENING_BODY_BYTES <= u16::MAX as usize);
// Counts and short lengths are 16 bits on the wire.
const _: () = assert!(MAX_REGIONS <= u16::MAX as usize);
const _: () = assert!(MAX_RANGES_PER_CHUNK <= u16::MAX as usize);
const _: () = assert!(MAX_ACK_SETS <= u16::MAX as usize);
const _: () = assert!(MAX_NAME_BYTES <= u16::MAX as usize);
const _: () = assert!(MAX_ENDPOINT_BYTES <= u16::MAX as usize);
const _: () = assert!(MAX_TEXT_BYTES <= u16::MAX as usize);
// The tunnel's largest messages (open, credits, acknowledgements, refused) each fit a body.
const _: () = assert!(
    64 + 2 * MAX_NAME_BYTES + MAX_CHANNELS * 12 <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES
);
const _: () = assert!(2 + MAX_CREDITS * 20 <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(2 + MAX_LANES as usize * 10 <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(16 + MAX_TEXT_BYTES <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(MAX_CHANNELS <= u16::MAX as usize);
const _: () = assert!(MAX_CREDITS <= u16::MAX as usize);
// The default limit of a peer suffices for the smallest window of every channel and the default
// window of one channel (I8).
const _: () = assert!(
    DEFAULT_CHANNELS as u64 * LEAST_WINDOW_BYTES + DEFAULT_WINDOW_BYTES <= DEFAULT_PEER_BYTES
);
const _: () = assert!(DEFAULT_CHANNELS <= MAX_CHANNELS);
const _: () = assert!(LEAST_WINDOW_BYTES <= START_WINDOW_BYTES);
// The largest *want* of IPsec fits a body: an epoch, a count, and 9 bytes for each SA.
const _: () = assert!(6 + MAX_SLOTS * 9 <= MAX_IPSEC_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(8 + MAX_TEXT_BYTES <= MAX_IPSEC_BODY_BYTES - EXTENSION_ROOM_BYTES);
// The largest hello stays within the limit for records even if each record has only a few bytes.
const _: () = assert!(MAX_CLIENT_HELLO_BYTES * 5 / 2 <= MAX_CLIENT_FLIGHT_BYTES);
const _: () = assert!(MAX_SERVER_NAME_BYTES < MAX_CLIENT_HELLO_BYTES);
const _: () = assert!(START_WINDOW_BYTES <= DEFAULT_WINDOW_BYTES);
