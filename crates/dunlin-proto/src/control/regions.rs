//! The regions of a VM's memory, as listed in *describe*. The table is fixed for the session, and
//! every range of every chunk is checked against it.

use thiserror::Error;

use crate::limits::{MAX_MEMORY_BYTES, MAX_NAME_BYTES, MAX_REGION_BYTES, MAX_REGIONS, PAGE_BYTES};
use crate::wire::codec::{Layout, OneOf, Plain, Text, layout};
use crate::wire::{
    DecodeError, EncodeError, Reader, Writer, bad_value, inconsistent, over_limit, unsupported,
    wide,
};

/// Bytes of a region on the wire, without its name.
const REGION_BYTES: usize = 30;

/// The mask of the flags that a receiver ignores if it does not support them. A receiver rejects a
/// region with any other unknown flag.
const IGNORABLE_FLAGS: u32 = 0x0000_ffff;

/// The purpose of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionKind {
    /// The guest's main memory.
    Ram,
    /// Firmware, which the guest does not write.
    Rom,
    /// Memory of a device, such as a frame buffer.
    DeviceMemory,
    /// Device state that is too large for sections. It is not guest memory.
    StateStream,
}

const KIND: OneOf<u16, RegionKind> = OneOf {
    rows: &[
        (1, RegionKind::Ram),
        (2, RegionKind::Rom),
        (3, RegionKind::DeviceMemory),
        (4, RegionKind::StateStream),
    ],
    grows: false,
};

/// One region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The identifier, by which the ranges of chunks refer to the region. Identifiers are unique
    /// and need not be consecutive.
    pub id: u16,
    /// The region's purpose.
    pub kind: RegionKind,
    /// Version 1 defines no flags. A receiver ignores unknown bits among the low 16, but
    /// rejects a region with an unknown bit among the high 16.
    pub flags: u32,
    /// Size of the pages that back the region at the source, in bytes: a power
    /// of two, at least [`PAGE_BYTES`]. A hint for the destination.
    pub backing_page_bytes: u32,
    /// Length in bytes: a multiple of [`PAGE_BYTES`], at least one page.
    pub length: u64,
    /// Guest-physical address, for information only.
    pub guest_physical: u64,
    /// The VMM's name for the region, at most [`MAX_NAME_BYTES`].
    pub name: String,
}

impl Region {
    /// Pages of [`PAGE_BYTES`] in the region.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.length / PAGE_BYTES
    }

    fn check(&self) -> Result<(), RegionError> {
        let id = self.id;
        if self.length == 0
            || !self.length.is_multiple_of(PAGE_BYTES)
            || self.length > MAX_REGION_BYTES
        {
            return Err(RegionError::Length {
                id,
                length: self.length,
            });
        }
        let backing = self.backing_page_bytes;
        if !backing.is_power_of_two() || u64::from(backing) < PAGE_BYTES {
            return Err(RegionError::BackingPage { id, bytes: backing });
        }
        if self.flags & !IGNORABLE_FLAGS != 0 {
            return Err(RegionError::Flags {
                id,
                flags: self.flags,
            });
        }
        if self.name.len() > MAX_NAME_BYTES {
            return Err(RegionError::Name {
                id,
                bytes: self.name.len(),
            });
        }
        Ok(())
    }
}

layout! { Region {
    id: "region id" as Plain,
    kind: "region kind" as KIND,
    flags: "region flags" as Plain,
    backing_page_bytes: "backing page length" as Plain,
    length: "region length" as Plain,
    guest_physical: "guest-physical address" as Plain,
    name: "region name" as Text(MAX_NAME_BYTES),
} }

/// An invalid region table. The side that sent the description is at fault.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionError {
    /// No region, or more than [`MAX_REGIONS`].
    #[error("region count {0} out of range (1–{MAX_REGIONS})")]
    Count(usize),
    /// Two regions with one identifier.
    #[error("region {id} is described twice")]
    Duplicate {
        /// The identifier.
        id: u16,
    },
    /// The length is zero, not a multiple of the page size, or over the limit.
    #[error(
        "region {id} has invalid length {length} (must be a positive multiple of {PAGE_BYTES}, at most {MAX_REGION_BYTES})"
    )]
    Length {
        /// The region.
        id: u16,
        /// The region's length in bytes.
        length: u64,
    },
    /// The total exceeds the limit.
    #[error("total region length exceeds {MAX_MEMORY_BYTES} bytes")]
    Total,
    /// The backing page size is not a power of two, or below the page size.
    #[error(
        "region {id} has invalid backing page size {bytes} (must be a power of two, at least {PAGE_BYTES})"
    )]
    BackingPage {
        /// The region.
        id: u16,
        /// The region's backing page size in bytes.
        bytes: u32,
    },
    /// The region has an unknown flag that a receiver must not ignore.
    #[error("region {id} has unknown flags (flags {flags:#x})")]
    Flags {
        /// The region.
        id: u16,
        /// The region's flags.
        flags: u32,
    },
    /// The name is too long.
    #[error("name of region {id} has {bytes} bytes (limit {MAX_NAME_BYTES})")]
    Name {
        /// The region.
        id: u16,
        /// Bytes of its name.
        bytes: usize,
    },
}

impl RegionError {
    fn into_decode(self, offset: usize) -> DecodeError {
        match self {
            Self::Count(count) => {
                over_limit("region count", wide(count), wide(MAX_REGIONS), offset)
            }
            Self::Duplicate { .. } => {
                inconsistent("region id", "identifiers must ascend strictly", offset)
            }
            Self::Length { length, .. } if length > MAX_REGION_BYTES => {
                over_limit("region length", length, MAX_REGION_BYTES, offset)
            }
            Self::Length { length, .. } => bad_value("region length", length, offset),
            Self::Total => over_limit("memory length", u64::MAX, MAX_MEMORY_BYTES, offset),
            Self::BackingPage { bytes, .. } => {
                bad_value("backing page length", u64::from(bytes), offset)
            }
            Self::Flags { flags, .. } => unsupported("region flags", u64::from(flags), offset),
            Self::Name { bytes, .. } => {
                over_limit("region name", wide(bytes), wide(MAX_NAME_BYTES), offset)
            }
        }
    }
}

/// The regions of a VM, ordered by identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionTable {
    regions: Vec<Region>,
    total_bytes: u64,
}

impl RegionTable {
    /// Checks and sorts the regions.
    ///
    /// # Errors
    /// [`RegionError`] if a region, the number of regions or their total length is invalid.
    pub fn new(mut regions: Vec<Region>) -> Result<Self, RegionError> {
        for region in &regions {
            region.check()?;
        }
        regions.sort_by_key(|region| region.id);
        if let Some([region, _]) = regions
            .array_windows()
            .find(|[region, next]| region.id == next.id)
        {
            return Err(RegionError::Duplicate { id: region.id });
        }
        Self::of_sorted(regions)
    }

    /// Creates the table from regions that are valid and have ascending identifiers.
    fn of_sorted(regions: Vec<Region>) -> Result<Self, RegionError> {
        if regions.is_empty() || regions.len() > MAX_REGIONS {
            return Err(RegionError::Count(regions.len()));
        }
        // The sum is at most MAX_REGIONS × MAX_REGION_BYTES, which is 2^62, so it does not
        // overflow.
        let total_bytes = regions.iter().map(|region| region.length).sum();
        if total_bytes > MAX_MEMORY_BYTES {
            return Err(RegionError::Total);
        }
        Ok(Self {
            regions,
            total_bytes,
        })
    }

    /// The region with this identifier.
    #[must_use]
    pub fn get(&self, id: u16) -> Option<&Region> {
        let position = self
            .regions
            .binary_search_by_key(&id, |region| region.id)
            .ok()?;
        self.regions.get(position)
    }

    /// All regions, ordered by identifier.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Bytes of all regions together. A destination compares this with its limit before it
    /// allocates memory in proportion to the total.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

impl Layout for RegionTable {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
        writer.count("region count", self.regions.len(), MAX_REGIONS)?;
        for region in &self.regions {
            region.encode_fields(writer)?;
        }
        Ok(())
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let start = reader.offset();
        let count = reader.count("region count", MAX_REGIONS, REGION_BYTES)?;
        let mut regions: Vec<Region> = Vec::with_capacity(count);
        for _ in 0..count {
            let offset = reader.offset();
            let region = Region::decode_fields(reader)?;
            region.check().map_err(|error| error.into_decode(offset))?;
            // The regions must be sorted on the wire, so that a table has only one encoding. On
            // the wire, `Duplicate` also reports a wrong order.
            if regions.last().is_some_and(|last| region.id <= last.id) {
                return Err(RegionError::Duplicate { id: region.id }.into_decode(offset));
            }
            regions.push(region);
        }
        Self::of_sorted(regions).map_err(|error| error.into_decode(start))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn region(id: u16, length: u64) -> Region {
        Region {
            id,
            kind: RegionKind::Ram,
            flags: 0,
            backing_page_bytes: 4096,
            length,
            guest_physical: 0,
            name: String::new(),
        }
    }

    #[test]
    fn a_region_is_found_by_its_identifier() {
        let table = RegionTable::new(vec![region(7, 8192), region(2, 4096)]).unwrap();
        assert_eq!(table.get(2).unwrap().length, 4096);
        assert_eq!(table.get(7).unwrap().pages(), 2);
        assert_eq!(table.get(3), None);
        assert_eq!(table.total_bytes(), 3 * PAGE_BYTES);
        assert_eq!(table.regions()[0].id, 2);
    }

    #[test]
    fn i7_invalid_regions_are_rejected() {
        let table = |regions| RegionTable::new(regions).unwrap_err();
        assert_eq!(table(vec![]), RegionError::Count(0));
        let many = (0..=MAX_REGIONS).map(|id| region(u16::try_from(id).unwrap(), 4096));
        assert_eq!(table(many.collect()), RegionError::Count(MAX_REGIONS + 1));
        for length in [0, 1, 4095, 4097, MAX_REGION_BYTES + PAGE_BYTES, u64::MAX] {
            assert_eq!(
                table(vec![region(1, length)]),
                RegionError::Length { id: 1, length }
            );
        }
        assert_eq!(
            table(vec![region(1, 4096), region(1, 4096)]),
            RegionError::Duplicate { id: 1 }
        );
        assert_eq!(
            table(vec![region(1, MAX_REGION_BYTES), region(2, 4096)]),
            RegionError::Total
        );
        for bytes in [0, 2048, 4097] {
            let odd = Region {
                backing_page_bytes: bytes,
                ..region(1, 4096)
            };
            assert_eq!(table(vec![odd]), RegionError::BackingPage { id: 1, bytes });
        }
        let flagged = Region {
            flags: 0x1_0000,
            ..region(1, 4096)
        };
        assert_eq!(
            table(vec![flagged]),
            RegionError::Flags {
                id: 1,
                flags: 0x1_0000
            }
        );
        let named = Region {
            name: "n".repeat(MAX_NAME_BYTES + 1),
            ..region(1, 4096)
        };
        assert_eq!(table(vec![named]), RegionError::Name { id: 1, bytes: 256 });
    }

    #[test]
    fn flags_that_may_be_ignored_are_kept() {
        let flagged = Region {
            flags: 0x8001,
            ..region(1, 4096)
        };
        let table = RegionTable::new(vec![flagged]).unwrap();
        assert_eq!(table.get(1).unwrap().flags, 0x8001);
    }
}
