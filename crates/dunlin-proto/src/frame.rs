//! The frames of a data lane after *lane open*: chunks, marks and the end.
//!
//! ```text
//!  source ──▶ destination, one way only
//!  [header 24][range 24]…[payload of range 1][payload of range 2]…   chunk
//!  [header 24]                                                       mark, end
//! ```
//!
//! Parsing yields values that are safe to use: a [`Range`] from [`ChunkHeader::decode_ranges`] lies
//! inside a region of the table, and its payload has the length that its encoding implies. Neither
//! encoding nor decoding allocates per chunk: the lane's thread reuses one vector for ranges and
//! one for bytes.

use crate::control::RegionTable;
use crate::limits::{MAX_CHUNK_PAYLOAD_BYTES, MAX_RANGES_PER_CHUNK, PAGE_BYTES};
use crate::wire::{
    DecodeError, EncodeError, Reader, Writer, bad_value, bounded, inconsistent, invalid, over,
    over_limit, unsupported, wide, within,
};

/// Number of bytes in a frame's header, the same for a chunk, a mark and an end.
pub const FRAME_HEADER_BYTES: usize = 24;

/// Number of bytes that describe one range in a chunk, without the payload.
pub const RANGE_BYTES: usize = 24;

const KIND_CHUNK: u16 = 1;
const KIND_MARK: u16 = 2;
const KIND_END: u16 = 3;

const ENCODING_RAW: u8 = 0;
const ENCODING_ZERO: u8 = 1;

/// A frame, as its header announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A chunk of pages. Its ranges and payload follow the header.
    Chunk(ChunkHeader),
    /// The end of this iteration on this lane (I4).
    Mark {
        /// The iteration that ends, counted from 1.
        iteration: u32,
    },
    /// The end of this lane. An end of file without this frame means that the
    /// lane is lost.
    End {
        /// Number of chunks that this lane has carried.
        chunks: u64,
    },
}

impl Frame {
    /// Reads a header of exactly [`FRAME_HEADER_BYTES`].
    ///
    /// # Errors
    /// An unknown kind, a chunk without ranges, a number over its limit, or a non-zero field that
    /// is reserved or that the kind does not use.
    pub fn decode(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let kind = reader.u16("frame kind")?;
        let range_count = reader.u16("range count")?;
        let payload_bytes = reader.u32("payload length")?;
        let number = reader.u64("number")?;
        let iteration = reader.u32("iteration")?;
        reader.reserved::<4>("reserved")?;

        // A field that the kind does not use must be zero.
        let unused = |what, value: u64, offset| match value {
            0 => Ok(()),
            value => Err(bad_value(what, value, offset)),
        };
        let no_payload = || {
            unused("range count", u64::from(range_count), 2)?;
            unused("payload length", u64::from(payload_bytes), 4)
        };
        match kind {
            KIND_CHUNK => {
                ChunkHeader::checked(number, iteration, range_count, payload_bytes).map(Self::Chunk)
            }
            KIND_MARK => {
                no_payload()?;
                unused("number", number, 8)?;
                Ok(Self::Mark { iteration })
            }
            KIND_END => {
                no_payload()?;
                unused("iteration", u64::from(iteration), 16)?;
                Ok(Self::End { chunks: number })
            }
            kind => Err(bad_value("frame kind", u64::from(kind), 0)),
        }
    }

    /// Appends the header; nothing is allocated while `out` has room.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_bytes());
    }

    /// The header's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; FRAME_HEADER_BYTES] {
        let (kind, range_count, payload_bytes, number, iteration) = match *self {
            Self::Chunk(header) => (
                KIND_CHUNK,
                header.range_count,
                header.payload_bytes,
                header.number,
                header.iteration,
            ),
            Self::Mark { iteration } => (KIND_MARK, 0, 0, 0, iteration),
            Self::End { chunks } => (KIND_END, 0, 0, chunks, 0),
        };
        let mut header = [0; FRAME_HEADER_BYTES];
        header[0..2].copy_from_slice(&kind.to_le_bytes());
        header[2..4].copy_from_slice(&range_count.to_le_bytes());
        header[4..8].copy_from_slice(&payload_bytes.to_le_bytes());
        header[8..16].copy_from_slice(&number.to_le_bytes());
        header[16..20].copy_from_slice(&iteration.to_le_bytes());
        header
    }
}

/// The header of a chunk. Its number of ranges and its payload length are within their limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    number: u64,
    iteration: u32,
    range_count: u16,
    payload_bytes: u32,
}

impl ChunkHeader {
    /// Writes a chunk's header and ranges, and returns the header. The payload
    /// of each raw range follows on the lane, in the order of the ranges.
    ///
    /// # Errors
    /// No range or too many ranges, a payload over its limit, a range without pages or with an
    /// unaligned offset, or a chunk number that an acknowledgement cannot express; `out` is then
    /// unchanged.
    pub fn encode(
        number: u64,
        iteration: u32,
        ranges: &[Range],
        out: &mut Vec<u8>,
    ) -> Result<Self, EncodeError> {
        let range_count = bounded("range count", ranges.len(), MAX_RANGES_PER_CHUNK)?;
        if range_count == 0 {
            return Err(invalid("range count", "a chunk has at least one range"));
        }
        if number == u64::MAX {
            return Err(over("number", number, u64::MAX - 1));
        }
        let total: u64 = ranges
            .iter()
            .map(|range| range.payload_bytes())
            .fold(0, u64::saturating_add);
        let too_long = over("payload length", total, u64::from(MAX_CHUNK_PAYLOAD_BYTES));
        if total > u64::from(MAX_CHUNK_PAYLOAD_BYTES) {
            return Err(too_long);
        }
        let header = Self {
            number,
            iteration,
            range_count,
            payload_bytes: u32::try_from(total).map_err(|_| too_long)?,
        };
        Writer::append(out, |writer| {
            writer.bytes(&Frame::Chunk(header).to_bytes());
            for range in ranges {
                range.encode(writer)?;
            }
            Ok(header)
        })
    }

    /// The chunk's number, counted from 0 over the session. Acknowledgements
    /// refer to it.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The iteration to which the pages belong, counted from 1.
    #[must_use]
    pub fn iteration(&self) -> u32 {
        self.iteration
    }

    /// Number of ranges in the chunk, 1 to [`MAX_RANGES_PER_CHUNK`].
    #[must_use]
    pub fn range_count(&self) -> usize {
        usize::from(self.range_count)
    }

    /// Number of bytes that the ranges take between the header and the payload.
    #[must_use]
    pub fn ranges_bytes(&self) -> usize {
        self.range_count() * RANGE_BYTES
    }

    /// Number of payload bytes after the ranges, at most [`MAX_CHUNK_PAYLOAD_BYTES`].
    #[must_use]
    pub fn payload_bytes(&self) -> u32 {
        self.payload_bytes
    }

    /// Reads the ranges, exactly [`ChunkHeader::ranges_bytes`] bytes, into
    /// `ranges`, which is cleared first. Does not allocate if `ranges` has room for
    /// [`MAX_RANGES_PER_CHUNK`]. After an error, the content of `ranges` is
    /// unspecified.
    ///
    /// # Errors
    /// A range has no pages, is not aligned, lies outside its region or names an unknown region. Or
    /// an encoding is unknown, a reserved field is not zero, or lengths contradict each other. In
    /// each case the peer is at fault, and the chunk must not be used.
    pub fn decode_ranges(
        &self,
        bytes: &[u8],
        regions: &RegionTable,
        ranges: &mut Vec<Range>,
    ) -> Result<(), DecodeError> {
        ranges.clear();
        let mut reader = Reader::new(bytes);
        let mut payload_left = self.payload_bytes;
        for _ in 0..self.range_count {
            let offset = reader.offset();
            let (range, payload_bytes) = Range::decode(&mut reader, regions)?;
            let why = "the payloads of the ranges exceed the payload of the chunk";
            let excess = inconsistent("payload length", why, offset);
            payload_left = payload_left.checked_sub(payload_bytes).ok_or(excess)?;
            ranges.push(range);
        }
        if payload_left != 0 {
            let why = "the payload of the chunk exceeds the payloads of its ranges";
            return Err(inconsistent("payload length", why, reader.offset()));
        }
        reader.finish("ranges")
    }

    fn checked(
        number: u64,
        iteration: u32,
        range_count: u16,
        payload_bytes: u32,
    ) -> Result<Self, DecodeError> {
        if range_count == 0 {
            return Err(bad_value("range count", 0, 2));
        }
        // A larger number could not be acknowledged, because `first + count` would overflow.
        within("number", number, u64::MAX - 1, 8)?;
        within(
            "range count",
            u64::from(range_count),
            wide(MAX_RANGES_PER_CHUNK),
            2,
        )?;
        within(
            "payload length",
            u64::from(payload_bytes),
            u64::from(MAX_CHUNK_PAYLOAD_BYTES),
            4,
        )?;
        Ok(Self {
            number,
            iteration,
            range_count,
            payload_bytes,
        })
    }
}

/// How the pages of a range are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// The content of the pages.
    Raw,
    /// Every byte of every page is zero, so the range has no payload.
    Zero,
}

/// Contiguous pages of one region with the same encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The region's identifier in the region table.
    pub region: u16,
    /// How the pages are sent.
    pub encoding: Encoding,
    /// Number of pages, at least one.
    pub page_count: u32,
    /// Bytes from the start of the region, a multiple of [`PAGE_BYTES`].
    pub offset: u64,
}

impl Range {
    /// Bytes of guest memory that the range covers.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.page_count) * PAGE_BYTES
    }

    /// Bytes of the range in the chunk's payload.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        match self.encoding {
            Encoding::Raw => self.memory_bytes(),
            Encoding::Zero => 0,
        }
    }

    fn encode(&self, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
        if self.page_count == 0 {
            return Err(invalid("page count", "a range needs at least one page"));
        }
        if !self.offset.is_multiple_of(PAGE_BYTES) {
            let why = "a range must start at a page boundary";
            return Err(invalid("offset", why));
        }
        let longest = u64::from(MAX_CHUNK_PAYLOAD_BYTES);
        let payload_bytes = u32::try_from(self.payload_bytes())
            .map_err(|_| over("payload length", self.payload_bytes(), longest))?;
        let encoding = match self.encoding {
            Encoding::Raw => ENCODING_RAW,
            Encoding::Zero => ENCODING_ZERO,
        };
        let mut range = [0; RANGE_BYTES];
        range[0..2].copy_from_slice(&self.region.to_le_bytes());
        range[2] = encoding;
        range[4..8].copy_from_slice(&self.page_count.to_le_bytes());
        range[8..16].copy_from_slice(&self.offset.to_le_bytes());
        range[16..20].copy_from_slice(&payload_bytes.to_le_bytes());
        writer.bytes(&range);
        Ok(())
    }

    /// Reads one range and the length of its payload.
    fn decode(reader: &mut Reader<'_>, regions: &RegionTable) -> Result<(Self, u32), DecodeError> {
        let start = reader.offset();
        let region_id = reader.u16("region")?;
        let encoding = match reader.u8("encoding")? {
            ENCODING_RAW => Encoding::Raw,
            ENCODING_ZERO => Encoding::Zero,
            value => return Err(unsupported("encoding", u64::from(value), start + 2)),
        };
        reader.reserved::<1>("range flags")?;
        let page_count = reader.u32("page count")?;
        let offset = reader.u64("offset")?;
        let payload_bytes = reader.u32("payload length")?;
        reader.reserved::<4>("reserved")?;

        let range = Self {
            region: region_id,
            encoding,
            page_count,
            offset,
        };
        let Some(region) = regions.get(region_id) else {
            return Err(bad_value("region", u64::from(region_id), start));
        };
        if page_count == 0 {
            return Err(bad_value("page count", 0, start + 4));
        }
        if !offset.is_multiple_of(PAGE_BYTES) {
            return Err(bad_value("offset", offset, start + 8));
        }
        // The product cannot overflow, because a 32-bit page count times the page size is below
        // 2^44. The addition is checked.
        let end = offset.checked_add(range.memory_bytes());
        if end.is_none_or(|end| end > region.length) {
            let end = end.unwrap_or(u64::MAX);
            return Err(over_limit("end of range", end, region.length, start + 8));
        }
        if u64::from(payload_bytes) != range.payload_bytes() {
            let why = "it contradicts the encoding and the page count";
            return Err(inconsistent("payload length", why, start + 16));
        }
        Ok((range, payload_bytes))
    }
}

#[cfg(test)]
mod tests;
