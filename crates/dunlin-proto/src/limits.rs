//! Every bound of the protocol, with its reason.
//!
//! A number from a peer is compared with one of these before it sizes or
//! indexes anything (I7). Lengths that count bytes of a buffer are `usize`;
//! lengths and offsets of guest memory are `u64`, since they exceed the
//! address space of a 32-bit build. The relations that the codecs rely on are
//! asserted at compile time at the end of the file.

/// Bytes of a guest page, the unit of dirty tracking and of every range.
///
/// Formula: the smallest page of x86-64 and the usual one of AArch64.
/// Drawback: a host with 64 KiB pages tracks more bits than it has pages.
/// Alternative: a negotiated size; *describe* already carries the number, so
/// that a later version can allow others.
pub const PAGE_BYTES: u64 = 4096;

/// Lanes of one session that are alive at the same time, control included.
///
/// Four times the most lanes that any published measurement needed to saturate 100 Gbit/s.
/// The limit bounds threads and per-lane buffers. Lane *numbers* go beyond it, because a
/// replaced lane's number is never used again (I4).
pub const MAX_LANES: u16 = 128;

/// Regions of one VM.
///
/// KVM allows more slots, but a slot is not a region: holes and aliases need no region.
/// 1024 covers a VM with a region for every DIMM and every device memory.
pub const MAX_REGIONS: usize = 1024;

/// Bytes of a name: of a VM, a region or a state section.
///
/// The longest file name, because toolstacks use these names as file names.
pub const MAX_NAME_BYTES: usize = 255;

/// Bytes of the VMM's opaque description in *describe*.
///
/// A generous libvirt domain XML with CPU features is under 32 KiB.
pub const MAX_DESCRIPTION_BYTES: usize = 256 * 1024;

/// Bytes of a control message after its header: what the receiver buffers.
pub const MAX_CONTROL_BODY_BYTES: usize = 1024 * 1024;

/// Bytes of one state section's content, so that the section with its name
/// and room for extension fields fits one control body.
///
/// Larger state travels as a state-stream region over the lanes.
pub const MAX_SECTION_BYTES: usize = MAX_CONTROL_BODY_BYTES - EXTENSION_ROOM_BYTES;

/// Sections of one attempt.
pub const MAX_SECTIONS: u32 = 4096;

/// Total bytes of all sections of one attempt.
///
/// Number and size limits alone would allow 4 GiB. A receiver that keeps
/// sections until *final* counts their bytes against this limit, to stay within
/// its bound of 64 MiB (I8).
pub const MAX_STATE_BYTES: usize = 32 * 1024 * 1024;

/// Ranges in one chunk's header.
///
/// Formula: 24 + 448 × 24 = 10 776 bytes, which fits the record that carries
/// a chunk's header ([`MAX_CHUNK_HEADER_BYTES`]).
/// Drawback: more than 448 scattered zero ranges need a second chunk.
/// Alternative: several header records; nothing gains from them, since a
/// chunk of single scattered raw pages ends at 256 ranges.
pub const MAX_RANGES_PER_CHUNK: usize = 448;

/// Bytes of a chunk's header with its ranges. They are part of one TLS record, and a
/// record's plaintext is at most 16 384 bytes (RFC 8446 section 5.1).
pub const MAX_CHUNK_HEADER_BYTES: usize = 12 * 1024;

/// Payload bytes of one chunk.
///
/// It bounds each lane's buffer, and the data resent after the loss of a lane.
pub const MAX_CHUNK_PAYLOAD_BYTES: u32 = 1024 * 1024;

/// Pages of a chunk that this source cuts: 256 KiB.
///
/// Formula: the pages of one frame of a data lane, which is sealed and written in one piece
/// and stays in a core's second-level cache during that time. Drawback: a header and an
/// acknowledgement for each 256 KiB. Alternative: several frames for a chunk; measurements
/// showed no difference beyond noise.
pub const CHUNK_PAGES: u64 = 64;

/// Upper limit on the pages of a chunk at this source: 32 MiB. Zero pages have
/// no payload, so a lane that finds some fills up the chunk with the next
/// pending pages.
///
/// Formula: large enough that memory with one non-zero page in each 2 MiB costs one header for 16
/// such pages, and populated memory that is all zero costs one header for 32 MiB; small enough that
/// reading resident pages, during which the lane sends nothing, takes a few milliseconds. Drawback:
/// a lost lane returns up to 32 MiB to the schedule. Alternative: none ([`CHUNK_PAGES`]): a header
/// and an acknowledgement for each 256 KiB of zeros.
pub const MAX_PAGES_LOOKED_AT: u64 = 8192;

/// Page ranges in flight at the source: assigned to a lane and not acknowledged.
///
/// Formula: 24 bytes each, so 6 MiB; 256 Ki ranges are 128 GiB in flight if each is a whole
/// chunk, and 1 GiB in the worst case of single scattered pages, which is more than any
/// path holds (100 Gbit/s over 80 ms). Drawback: a destination that does not acknowledge
/// stops the source there. Alternative: none needed; that destination has stalled.
pub const MAX_IN_FLIGHT_RANGES: usize = 256 * 1024;

/// Sets of chunk numbers in one acknowledgement.
///
/// Chunks of one lane are acknowledged nearly in order, so a batch has about as many sets
/// as there are lanes; 4096 leaves room for a new control lane that repeats all of them.
pub const MAX_ACK_SETS: usize = 4096;

/// Gaps in the numbers of the chunks that have arrived.
///
/// A lost lane leaves at most as many gaps as it had chunks in flight, a few
/// hundred. The limit has room for hundreds of lost lanes and costs at most 3
/// MiB.
pub const MAX_CHUNK_GAPS: usize = 64 * 1024;

/// Addresses that a destination names for lanes.
pub const MAX_ENDPOINTS: usize = 16;

/// Bytes of one address for lanes: a DNS name of 253 bytes, or an IPv6 address with a scope
/// of 15 bytes, and the port.
pub const MAX_ENDPOINT_BYTES: usize = 272;

/// Bytes of the path of a unix socket: `sun_path` of unix(7) has 108 bytes, of which the
/// last is zero.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Bytes of the name under which a journal records a session's peer: a DNS name
/// has at most 253 bytes, a SPIFFE ID usually fewer than 255. A peer with a
/// longer name is recorded by its certificate.
pub const MAX_PRINCIPAL_NAME_BYTES: usize = 768;

/// Records of sessions of one peer that ended before the VM ran here and about
/// which the peer may still ask, one for each of its VMs.
///
/// More VMs than a host migrates at the same time; each record takes 12 KiB.
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

/// Bytes of a session's identity.
pub const SESSION_ID_BYTES: usize = 16;

/// Bytes of the secret with which lanes prove that they belong to a session:
/// as many as the output of the hash of its HMAC (RFC 2104 section 3).
pub const SESSION_SECRET_BYTES: usize = 32;

/// Bytes of a lane's proof: a whole HMAC-SHA-256 (RFC 6234).
pub const LANE_MAC_BYTES: usize = 32;

/// Bytes of the digest that compares memory when verification was negotiated.
pub const DIGEST_BYTES: usize = 16;

/// Bytes after the prelude of an opening message.
///
/// The peer may not be authenticated yet, so this bounds what it can make this side buffer.
pub const MAX_OPENING_BODY_BYTES: usize = 4096;

/// Payload bytes of one frame of the tunnel.
///
/// Formula: what a data lane seals and writes in one piece.
/// Drawback: a small piece of another channel waits for one such frame.
/// Alternative: smaller ones; below 128 KiB they cost more per byte.
pub const MAX_STRIPE_CHUNK_BYTES: u32 = 256 * 1024;

/// Channels of one trunk that are alive at the same time, whatever its
/// configuration says.
///
/// QEMU's multifd has at most 255 channels for a VM: this is room for sixteen
/// such VMs between one pair of hosts.
pub const MAX_CHANNELS: usize = 4096;

/// Channels of one trunk unless the configuration says otherwise.
pub const DEFAULT_CHANNELS: usize = 512;

/// Chunks of one channel that are not confirmed as delivered.
///
/// It bounds the receiver's bookkeeping if a sender writes byte by byte: 1024 entries of
/// about a hundred bytes are 100 KiB, less than the smallest window. Drawback: on a long
/// round trip, small pieces reach this limit before the window is full; they then wait in
/// the socket and are sent as larger pieces.
pub const MAX_CHANNEL_CHUNKS: usize = 1024;

/// Bytes at the end of a channel that its consumer may leave unread after the other side
/// has ended, before that counts as an abort: eight TLS alerts.
///
/// A program that has received all data closes its connection without reading the
/// *close_notify* of the peer's TLS, one record of 24 to 31 bytes. Drawback: a consumer
/// that dies that close to the end looks like one that has finished. Bytes that its socket
/// had accepted count as read, because no system call reports them after the reset.
/// Alternative: zero, which counts every migration with QEMU's own TLS and multifd as
/// aborted.
pub const MAX_UNREAD_BYTES: u64 = 256;

/// The smallest window of a channel: one chunk, so it can always make progress (I8).
pub const LEAST_WINDOW_BYTES: u64 = MAX_STRIPE_CHUNK_BYTES as u64;

/// The initial window of a channel if the peer's limit allows it: the channel's rate is not
/// known yet, and this many bytes are in flight at 1 GiB/s over a round trip of 1 ms.
pub const START_WINDOW_BYTES: u64 = 1024 * 1024;

/// The largest window of a channel unless its route says otherwise (I8).
///
/// Formula: 10 Gbit/s over a round trip of 13 ms. Drawback: a longer path needs the route's
/// own number. Alternative: only the peer's limit; but then one channel with a slow
/// consumer would use all of it, and the hypervisor would mistake the buffered bytes for
/// bandwidth.
pub const DEFAULT_WINDOW_BYTES: u64 = 16 * 1024 * 1024;

/// Bytes of all channels of a peer that may wait on one side, unless the
/// configuration says otherwise (I8).
///
/// Formula: 10 ms at 100 Gbit/s, plus a quarter, are 156 MB; the rest is for the minimum
/// windows of the other channels.
pub const DEFAULT_PEER_BYTES: u64 = 256 * 1024 * 1024;

/// The maximum length of a channel in bytes: far more than a hypervisor sends, and far
/// below an overflow.
pub const MAX_CHANNEL_OFFSET: u64 = 1 << 62;

/// Channels in one message of credits.
pub const MAX_CREDITS: usize = 1024;

/// Bytes of a message of the tunnel after its header: what its receiver
/// buffers.
pub const MAX_TUNNEL_BODY_BYTES: usize = 64 * 1024;

/// Bytes of a ClientHello, with its header, that are searched for the server
/// name.
///
/// Formula: with X25519MLKEM768, a post-quantum signature list, an encrypted inner hello
/// and a session ticket, a hello takes 4 KiB; the limit is four times that. Drawback:
/// longer hellos, which TLS allows, are refused. Alternative: none needed until clients
/// send them.
pub const MAX_CLIENT_HELLO_BYTES: usize = 16 * 1024;

/// Bytes of the records that carry a ClientHello: the limit for an unknown
/// client.
///
/// Formula: two and a half times the limit of a hello, for clients that split it into
/// records of a few bytes; one-byte records would take six times. Drawback: hellos of more
/// than 6 KiB must not be split into one-byte records. Alternative: six times, which no
/// honest client needs.
pub const MAX_CLIENT_FLIGHT_BYTES: usize = 40 * 1024;

/// Bytes of a server name: the longest DNS name is 253, and OpenSSL takes 255.
pub const MAX_SERVER_NAME_BYTES: usize = 255;

/// SAs that one side of a keying session installs for the other side's traffic,
/// in one epoch.
///
/// More than the CPUs of a host that carry lanes, or the connections that deserve their own
/// SA. Two epochs use 3 MiB of kernel memory. The rest of the peer's traffic uses the
/// fallback SA.
pub const MAX_SAS: u16 = 1024;

/// SAs in one message: the maximum, so one exchange replaces an epoch's keys.
pub const MAX_SLOTS: usize = MAX_SAS as usize;

/// Bytes of a message of a keying session after its header.
pub const MAX_IPSEC_BODY_BYTES: usize = 16 * 1024;

/// Bytes left in the largest control bodies for extension fields of later
/// versions.
pub const EXTENSION_ROOM_BYTES: usize = 4096;

// A 32-bit number from the wire, once bounded, indexes memory without loss.
const _: () = assert!(usize::BITS >= 32);
const _: () = assert!(PAGE_BYTES.is_power_of_two());
const _: () = assert!(MAX_REGION_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(MAX_REGION_BYTES <= MAX_MEMORY_BYTES);
// The end of any page, in bytes, is far below an overflow.
const _: () = assert!(MAX_MEMORY_BYTES <= u64::MAX / 2);
const _: () = assert!(24 + MAX_RANGES_PER_CHUNK * 24 <= MAX_CHUNK_HEADER_BYTES);
const _: () = assert!(MAX_CHUNK_HEADER_BYTES <= 16 * 1024);
const _: () = assert!(MAX_RANGES_PER_CHUNK < MAX_IN_FLIGHT_RANGES);
const _: () = assert!((MAX_CHUNK_PAYLOAD_BYTES as u64).is_multiple_of(PAGE_BYTES));
const _: () = assert!(CHUNK_PAGES * PAGE_BYTES <= MAX_CHUNK_PAYLOAD_BYTES as u64);
// A chunk of scattered raw pages is full before its list of ranges.
const _: () = assert!(MAX_CHUNK_PAYLOAD_BYTES as u64 / PAGE_BYTES <= MAX_RANGES_PER_CHUNK as u64);
// The largest describe: fixed part, name, description, regions with names.
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
// The tunnel's largest messages (open, credits, acknowledgements, reset) each fit a body.
const _: () = assert!(
    64 + 2 * MAX_NAME_BYTES + MAX_CHANNELS * 12 <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES
);
const _: () = assert!(2 + MAX_CREDITS * 20 <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(2 + MAX_LANES as usize * 10 <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(16 + MAX_TEXT_BYTES <= MAX_TUNNEL_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(MAX_CHANNELS <= u16::MAX as usize);
const _: () = assert!(MAX_CREDITS <= u16::MAX as usize);
// The memory of a peer suffices for the smallest window of every channel and the default window of
// one (I8).
const _: () = assert!(
    DEFAULT_CHANNELS as u64 * LEAST_WINDOW_BYTES + DEFAULT_WINDOW_BYTES <= DEFAULT_PEER_BYTES
);
const _: () = assert!(DEFAULT_CHANNELS <= MAX_CHANNELS);
const _: () = assert!(LEAST_WINDOW_BYTES <= START_WINDOW_BYTES);
// The largest *want* of IPsec: an epoch, a count, and 9 bytes an SA.
const _: () = assert!(6 + MAX_SLOTS * 9 <= MAX_IPSEC_BODY_BYTES - EXTENSION_ROOM_BYTES);
const _: () = assert!(8 + MAX_TEXT_BYTES <= MAX_IPSEC_BODY_BYTES - EXTENSION_ROOM_BYTES);
// The largest hello fits the flight limit even in records of a few bytes.
const _: () = assert!(MAX_CLIENT_HELLO_BYTES * 5 / 2 <= MAX_CLIENT_FLIGHT_BYTES);
const _: () = assert!(MAX_SERVER_NAME_BYTES < MAX_CLIENT_HELLO_BYTES);
const _: () = assert!(START_WINDOW_BYTES <= DEFAULT_WINDOW_BYTES);
