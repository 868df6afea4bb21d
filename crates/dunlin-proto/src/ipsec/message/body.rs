//! The body of every message, without its extension fields, in the order of the tables in
//! docs/wire/ipsec.md.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Header, Message, Terms};
use crate::ipsec::plan::{UDP_SOURCE_PORTS, Udp};
use crate::ipsec::ports::PortRange;
use crate::ipsec::{LEAST_SPI, Mode, Sender, Slot};
use crate::limits::{MAX_IPSEC_BODY_BYTES, MAX_SAS, MAX_SLOTS, MAX_TEXT_BYTES};
use crate::wire::codec::{Codec, Fields, Layout, List, NOT_ZERO, OneOf, Plain, Text, Within};
use crate::wire::message::messages;
use crate::wire::{
    DecodeError, EncodeError, Encoded, Reader, Writer, bad_value, inconsistent, invalid,
};

const NOT_ASCENDING: &str = "must be ascending and not empty";
const MAPPED: &str = "IPv4-mapped address, must use the IPv4 form";

const SLOTS: Ascending<Slot, Fields> = Ascending {
    list: List {
        most: MAX_SLOTS,
        item_bytes: 9,
        each: "SA",
        item: Fields,
    },
    index: |slot| slot.index,
};
const SPIS: Ascending<(u32, u32), Fields> = Ascending {
    list: List {
        most: MAX_SLOTS,
        item_bytes: 8,
        each: "SPI",
        item: Fields,
    },
    index: |(index, _)| *index,
};
const INDICES: Ascending<u32, Plain> = Ascending {
    list: List {
        most: MAX_SLOTS,
        item_bytes: 4,
        each: "index",
        item: Plain,
    },
    index: |index| *index,
};
const MODE: OneOf<u8, Mode> = OneOf {
    rows: &[(1, Mode::Cpu), (2, Mode::Connection)],
    grows: true,
};
const SAS: Within = Within(1..=MAX_SAS as u64);
/// Smaller SPIs are reserved.
const SPI: Within = Within(LEAST_SPI as u64..=u32::MAX as u64);

impl Message {
    /// Appends header and body. The header marks every message of version 1 as required: a receiver
    /// must not skip it as an unknown kind.
    ///
    /// # Errors
    /// The message has a value that a peer would reject; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.append(out, MAX_IPSEC_BODY_BYTES, |_| ())
    }
}

messages! {
    Terms = 129, "terms" (terms: "terms" as Fields);
    Want = 130, "want" { epoch: "epoch" as NOT_ZERO, slots: "SA count" as SLOTS };
    Granted = 131, "granted" { epoch: "epoch" as NOT_ZERO, spis: "SA count" as SPIS };
    Ready = 132, "ready";
    Retire = 133, "retire" { epoch: "epoch" as NOT_ZERO };
    Release = 134, "release" { indices: "SA count" as INDICES };
    End = 135, "end" { fault: "fault" as Fields, text: "text" as Text(MAX_TEXT_BYTES) };
}

/// A non-empty list of SAs with ascending indices.
struct Ascending<T, C> {
    list: List<C>,
    index: fn(&T) -> u32,
}

impl<T, C: Codec<T>> Codec<Vec<T>> for Ascending<T, C> {
    fn encode(&self, what: &'static str, value: &Vec<T>, writer: &mut Writer<'_>) -> Encoded {
        if !self.is_in_order(value) {
            return Err(invalid("indices", NOT_ASCENDING));
        }
        self.list.encode(what, value, writer)
    }

    fn decode(&self, what: &'static str, reader: &mut Reader<'_>) -> Result<Vec<T>, DecodeError> {
        let offset = reader.offset();
        let items = self.list.decode(what, reader)?;
        if self.is_in_order(&items) {
            return Ok(items);
        }
        Err(inconsistent("indices", NOT_ASCENDING, offset))
    }
}

impl<T, C> Ascending<T, C> {
    fn is_in_order(&self, items: &[T]) -> bool {
        !items.is_empty() && items.is_sorted_by(|one, next| (self.index)(one) < (self.index)(next))
    }
}

/// The index and SPI of an SA.
impl Layout for (u32, u32) {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        writer.u32(self.0);
        SPI.encode("SPI", &self.1, writer)
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok((reader.u32("index")?, SPI.decode("SPI", reader)?))
    }
}

impl Layout for Terms {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        let terms = self;
        if terms.own.is_ipv4() != terms.other.is_ipv4() {
            return Err(invalid("address", "both must be IPv4, or both IPv6"));
        }
        MODE.encode("mode", &terms.mode, writer)?;
        writer.u8(if terms.own.is_ipv4() { 4 } else { 6 });
        SAS.encode("number of SAs", &terms.sas_max, writer)?;
        writer.u16(terms.ports.first());
        writer.u16(terms.ports.last());
        if terms.udp.is_some_and(|udp| !is_udp(udp)) {
            return Err(invalid(
                "UDP ports",
                "must not be zero, and the first of 1024 source ports must be at most 64512",
            ));
        }
        writer.u16(terms.udp.map_or(0, |udp| udp.listener));
        writer.u16(terms.udp.map_or(0, |udp| udp.first_source));
        for address in [terms.own, terms.other] {
            let bytes = match address {
                IpAddr::V4(address) => {
                    let mut bytes = [0; 16];
                    bytes[..4].copy_from_slice(&address.octets());
                    bytes
                }
                IpAddr::V6(address) if address.to_ipv4_mapped().is_some() => {
                    return Err(invalid("address", MAPPED));
                }
                IpAddr::V6(address) => address.octets(),
            };
            writer.bytes(&bytes);
        }
        Ok(())
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mode = MODE.decode("mode", reader)?;
        let offset = reader.offset();
        let family = reader.u8("address family")?;
        if !matches!(family, 4 | 6) {
            return Err(bad_value("address family", u64::from(family), offset));
        }
        let sas_max = SAS.decode("number of SAs", reader)?;
        let offset = reader.offset();
        let (first, last) = (reader.u16("first port")?, reader.u16("last port")?);
        let ports = PortRange::new(first, last);
        let ports = ports.ok_or(inconsistent("ports", "not a range of ports", offset))?;
        let offset = reader.offset();
        let udp = Udp {
            listener: reader.u16("UDP port")?,
            first_source: reader.u16("first UDP source port")?,
        };
        let none = udp.listener == 0 && udp.first_source == 0;
        if !none && !is_udp(udp) {
            let why = "invalid ports for ESP in UDP";
            return Err(inconsistent("UDP ports", why, offset));
        }
        Ok(Terms {
            mode,
            ports,
            own: decode_address(family, reader)?,
            other: decode_address(family, reader)?,
            sas_max,
            udp: (!none).then_some(udp),
        })
    }
}

fn is_udp(udp: Udp) -> bool {
    let last = udp.first_source.checked_add(UDP_SOURCE_PORTS - 1);
    udp.listener != 0 && udp.first_source != 0 && last.is_some()
}

fn decode_address(family: u8, reader: &mut Reader<'_>) -> Result<IpAddr, DecodeError> {
    const WHAT: &str = "address";
    if family == 4 {
        let octets: [u8; 4] = reader.array(WHAT)?;
        reader.reserved::<12>(WHAT)?;
        return Ok(Ipv4Addr::from(octets).into());
    }
    let offset = reader.offset();
    let address = Ipv6Addr::from(reader.array::<16>(WHAT)?);
    if address.to_ipv4_mapped().is_some() {
        return Err(inconsistent(WHAT, MAPPED, offset));
    }
    Ok(address.into())
}

impl Layout for Slot {
    fn encode_fields(&self, writer: &mut Writer<'_>) -> Encoded {
        let slot = self;
        writer.u32(slot.index);
        let (kind, value) = match slot.sender {
            Sender::Fallback => (1, 0),
            Sender::Cpu(cpu) => (2, cpu),
            Sender::Connection { from, to } => {
                if from == 0 || to == 0 {
                    return Err(invalid("port", "must not be zero"));
                }
                (3, u32::from(from) | u32::from(to) << 16)
            }
        };
        writer.u8(kind);
        writer.u32(value);
        Ok(())
    }

    fn decode_fields(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let index = reader.u32("index")?;
        let offset = reader.offset();
        let (kind, value) = (reader.u8("kind of SA")?, reader.u32("CPU or ports")?);
        let sender = match kind {
            1 if value == 0 => Sender::Fallback,
            2 => Sender::Cpu(value),
            3 => Sender::Connection {
                from: value as u16,
                to: (value >> 16) as u16,
            },
            _ => return Err(bad_value("kind of SA", u64::from(kind), offset)),
        };
        if let Sender::Connection { from: 0, .. } | Sender::Connection { to: 0, .. } = sender {
            return Err(bad_value("ports", u64::from(value), offset));
        }
        Ok(Slot { index, sender })
    }
}
