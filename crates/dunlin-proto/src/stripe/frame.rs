//! Frames on the tunnel's data lanes after *lane open*: pieces of channels, and the end.
//!
//! ```text
//!  either side ──▶ the other, one way only
//!  [header 24][payload]       data
//!  [header 24]                end
//! ```
//!
//! The kinds of frames differ from those on a migration's lanes ([`crate::frame`]), so that a frame
//! of one protocol is invalid in the other.

use crate::limits::{MAX_CHANNEL_OFFSET, MAX_STRIPE_CHUNK_BYTES};
use crate::wire::{DecodeError, Reader, bad_value, over_limit, within};

/// Bytes of a frame's header.
pub const FRAME_HEADER_BYTES: usize = 24;

const KIND_DATA: u16 = 16;
const KIND_END: u16 = 17;

/// A piece of a channel: the position and length of the payload in the channel.
///
/// The bytes at an offset of a channel never change, and channel numbers are never reused. A frame
/// therefore means the same whenever it arrives, and a lost lane needs no fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data {
    channel: u32,
    length: u32,
    offset: u64,
}

impl Data {
    /// `length` bytes of `channel` at `offset`. `None` if `length` is 0 or more than
    /// [`MAX_STRIPE_CHUNK_BYTES`], or if the end exceeds [`MAX_CHANNEL_OFFSET`].
    #[must_use]
    pub fn new(channel: u32, offset: u64, length: u32) -> Option<Self> {
        let end = offset.checked_add(u64::from(length))?;
        let fits = length > 0 && length <= MAX_STRIPE_CHUNK_BYTES && end <= MAX_CHANNEL_OFFSET;
        fits.then_some(Self {
            channel,
            length,
            offset,
        })
    }

    /// The channel.
    #[must_use]
    pub fn channel(&self) -> u32 {
        self.channel
    }

    /// The length of the payload, 1 to [`MAX_STRIPE_CHUNK_BYTES`].
    #[must_use]
    pub fn length(&self) -> u32 {
        self.length
    }

    /// The offset of the piece in the channel.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The offset after the last byte of the piece, at most [`MAX_CHANNEL_OFFSET`].
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }
}

/// What a frame's header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A piece of a channel; the payload follows.
    Data(Data),
    /// This lane ends. An end of file without this frame means that the lane is lost.
    End {
        /// The number of data frames that this lane has carried.
        frames: u64,
    },
}

impl Frame {
    /// Reads a header of exactly [`FRAME_HEADER_BYTES`].
    ///
    /// # Errors
    /// An unknown kind, a value over its limit, or a non-zero field that the kind does not use.
    pub fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let kind = reader.u16("frame kind")?;
        reader.reserved::<2>("frame flags")?;
        let length = reader.u32("payload length")?;
        let offset = reader.u64("offset")?;
        let channel = reader.u32("channel")?;
        reader.reserved::<4>("reserved")?;
        match kind {
            KIND_DATA => {
                let longest = u64::from(MAX_STRIPE_CHUNK_BYTES);
                within("payload length", u64::from(length), longest, 4)?;
                if length == 0 {
                    return Err(bad_value("payload length", 0, 4));
                }
                let last = MAX_CHANNEL_OFFSET - u64::from(length);
                let data = Data::new(channel, offset, length);
                data.map(Self::Data)
                    .ok_or(over_limit("offset", offset, last, 8))
            }
            KIND_END if length != 0 => Err(bad_value("payload length", u64::from(length), 4)),
            KIND_END if channel != 0 => Err(bad_value("channel", u64::from(channel), 16)),
            KIND_END => Ok(Self::End { frames: offset }),
            kind => Err(bad_value("frame kind", u64::from(kind), 0)),
        }
    }

    /// The header in wire format.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; FRAME_HEADER_BYTES] {
        let (kind, length, offset, channel) = match *self {
            Self::Data(data) => (KIND_DATA, data.length, data.offset, data.channel),
            Self::End { frames } => (KIND_END, 0, frames, 0),
        };
        let mut header = [0; FRAME_HEADER_BYTES];
        header[0..2].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[8..16].copy_from_slice(&offset.to_le_bytes());
        header[16..20].copy_from_slice(&channel.to_le_bytes());
        header
    }
}
