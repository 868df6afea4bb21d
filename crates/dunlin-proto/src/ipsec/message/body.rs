//! The fixed part of every message. The tables of docs/wire.md say the same in the
//! same order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Header, Kind, Message, Terms};
use crate::fault::FaultCode;
use crate::ipsec::plan::{UDP_SOURCE_PORTS, Udp};
use crate::ipsec::ports::PortRange;
use crate::ipsec::{LEAST_SPI, Mode, Sender, Slot};
use crate::limits::{MAX_IPSEC_BODY_BYTES, MAX_SAS, MAX_SLOTS, MAX_TEXT_BYTES};
use crate::wire::message::{encode_fault, invalid};
use crate::wire::{
    DecodeError, DecodeReason, EncodeError, Reader, Start, Writer, bad_value, within,
};

const SLOT_BYTES: usize = 9;
const SPI_BYTES: usize = 8;
const INDEX_BYTES: usize = 4;

impl Message {
    /// Appends header and body. Every message of version 1 must be understood, and
    /// says so in its header.
    ///
    /// # Errors
    /// Something that a peer would refuse; `out` is then unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = self.kind().to_wire();
        Start::write(
            out,
            kind,
            MAX_IPSEC_BODY_BYTES,
            |_| (),
            |writer| encode_body(self, writer),
        )
    }

    /// Reads the body that follows `header`; `None` is a message that this release
    /// does not know and may skip.
    ///
    /// # Errors
    /// [`DecodeError`]; a body that is not exactly as long as announced is one.
    pub fn decode(header: &Header, bytes: &[u8]) -> Result<Option<Self>, DecodeError> {
        header.start.decode(bytes, Kind::from_wire, decode_body)
    }
}

/// Appends a message's body.
fn encode_body(message: &Message, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    match message {
        Message::Terms(terms) => encode_terms(terms, writer)?,
        Message::Want { epoch, slots } => {
            encode_epoch(*epoch, writer)?;
            ascending(slots.iter().map(|slot| slot.index))?;
            writer.count("SA count", slots.len(), MAX_SLOTS)?;
            slots
                .iter()
                .try_for_each(|slot| encode_slot(slot, writer))?;
        }
        Message::Granted { epoch, spis } => {
            encode_epoch(*epoch, writer)?;
            ascending(spis.iter().map(|(index, _)| *index))?;
            writer.count("SA count", spis.len(), MAX_SLOTS)?;
            for (index, spi) in spis {
                if *spi < LEAST_SPI {
                    return Err(invalid("SPI", "those below 256 are set aside"));
                }
                writer.u32(*index);
                writer.u32(*spi);
            }
        }
        Message::Ready => {}
        Message::Retire { epoch } => encode_epoch(*epoch, writer)?,
        Message::Release { indices } => {
            ascending(indices.iter().copied())?;
            writer.count("SA count", indices.len(), MAX_SLOTS)?;
            for index in indices {
                writer.u32(*index);
            }
        }
        Message::End { fault, text } => {
            encode_fault(*fault, text, writer)?;
        }
    }
    Ok(())
}

/// Reads the body of a message of this kind to its end.
fn decode_body(kind: Kind, mut body: Reader<'_>) -> Result<Message, DecodeError> {
    let reader = &mut body;
    let message = match kind {
        Kind::Terms => Message::Terms(decode_terms(reader)?),
        Kind::Want => {
            let epoch = decode_epoch(reader)?;
            let offset = reader.offset();
            let count = reader.count("SA count", MAX_SLOTS, SLOT_BYTES)?;
            let slots = (0..count).map(|_| decode_slot(reader));
            let slots = slots.collect::<Result<Vec<_>, _>>()?;
            in_order(slots.iter().map(|slot| slot.index), offset)?;
            Message::Want { epoch, slots }
        }
        Kind::Granted => {
            let epoch = decode_epoch(reader)?;
            let offset = reader.offset();
            let count = reader.count("SA count", MAX_SLOTS, SPI_BYTES)?;
            let spis = (0..count).map(|_| {
                let index = reader.u32("index")?;
                let offset = reader.offset();
                match reader.u32("SPI")? {
                    spi @ LEAST_SPI.. => Ok((index, spi)),
                    spi => Err(bad_value("SPI", u64::from(spi), offset)),
                }
            });
            let spis = spis.collect::<Result<Vec<_>, _>>()?;
            in_order(spis.iter().map(|(index, _)| *index), offset)?;
            Message::Granted { epoch, spis }
        }
        Kind::Ready => Message::Ready,
        Kind::Retire => Message::Retire {
            epoch: decode_epoch(reader)?,
        },
        Kind::Release => {
            let offset = reader.offset();
            let count = reader.count("SA count", MAX_SLOTS, INDEX_BYTES)?;
            let indices = (0..count).map(|_| reader.u32("index"));
            let indices = indices.collect::<Result<Vec<_>, _>>()?;
            in_order(indices.iter().copied(), offset)?;
            Message::Release { indices }
        }
        Kind::End => Message::End {
            fault: FaultCode::from_wire(reader.u16("fault")?),
            text: reader.text("text", MAX_TEXT_BYTES)?.to_owned(),
        },
    };
    body.fields(|_, _| Ok(false))?;
    Ok(message)
}

fn encode_terms(terms: &Terms, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    if terms.sas_max == 0 || terms.sas_max > MAX_SAS {
        return Err(invalid(
            "number of SAs",
            "there is at least one, and a limit",
        ));
    }
    if terms.own.is_ipv4() != terms.other.is_ipv4() {
        return Err(invalid("address", "both are of one family"));
    }
    writer.u8(match terms.mode {
        Mode::Cpu => 1,
        Mode::Connection => 2,
    });
    writer.u8(if terms.own.is_ipv4() { 4 } else { 6 });
    writer.u16(terms.sas_max);
    writer.u16(terms.ports.first());
    writer.u16(terms.ports.last());
    if terms.udp.is_some_and(|udp| !is_udp(udp)) {
        return Err(invalid(
            "UDP ports",
            "neither is zero, and 1024 follow the source port",
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
                return Err(invalid("address", "an IPv4 address is written as one"));
            }
            IpAddr::V6(address) => address.octets(),
        };
        writer.bytes(&bytes);
    }
    Ok(())
}

fn decode_terms(reader: &mut Reader<'_>) -> Result<Terms, DecodeError> {
    let offset = reader.offset();
    let mode = match reader.u8("mode")? {
        1 => Mode::Cpu,
        2 => Mode::Connection,
        0 => return Err(bad_value("mode", 0, offset)),
        value => {
            let value = u64::from(value);
            return Err(DecodeError {
                what: "mode",
                why: DecodeReason::Unsupported { value },
                offset,
            });
        }
    };
    let offset = reader.offset();
    let family = reader.u8("address family")?;
    if !matches!(family, 4 | 6) {
        return Err(bad_value("address family", u64::from(family), offset));
    }
    let offset = reader.offset();
    let sas_max = reader.u16("number of SAs")?;
    if sas_max == 0 {
        return Err(bad_value("number of SAs", 0, offset));
    }
    within(
        "number of SAs",
        u64::from(sas_max),
        u64::from(MAX_SAS),
        offset,
    )?;
    let offset = reader.offset();
    let (first, last) = (reader.u16("first port")?, reader.u16("last port")?);
    let ports = PortRange::new(first, last).ok_or(DecodeError {
        what: "ports",
        why: DecodeReason::Inconsistent("this is no range of ports"),
        offset,
    })?;
    let offset = reader.offset();
    let udp = Udp {
        listener: reader.u16("UDP port")?,
        first_source: reader.u16("first UDP source port")?,
    };
    let none = udp.listener == 0 && udp.first_source == 0;
    if !none && !is_udp(udp) {
        return Err(DecodeError {
            what: "UDP ports",
            why: DecodeReason::Inconsistent("these are no ports for ESP in UDP"),
            offset,
        });
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
        return Err(DecodeError {
            what: WHAT,
            why: DecodeReason::Inconsistent("an IPv4 address is written as one"),
            offset,
        });
    }
    Ok(address.into())
}

fn encode_slot(slot: &Slot, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    writer.u32(slot.index);
    let (kind, value) = match slot.sender {
        Sender::Fallback => (1, 0),
        Sender::Cpu(cpu) => (2, cpu),
        Sender::Connection { from, to } => {
            if from == 0 || to == 0 {
                return Err(invalid("port", "a connection has two"));
            }
            (3, u32::from(from) | u32::from(to) << 16)
        }
    };
    writer.u8(kind);
    writer.u32(value);
    Ok(())
}

fn decode_slot(reader: &mut Reader<'_>) -> Result<Slot, DecodeError> {
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

fn encode_epoch(epoch: u32, writer: &mut Writer<'_>) -> Result<(), EncodeError> {
    if epoch == 0 {
        return Err(invalid("epoch", "they are counted from 1"));
    }
    writer.u32(epoch);
    Ok(())
}

fn decode_epoch(reader: &mut Reader<'_>) -> Result<u32, DecodeError> {
    let offset = reader.offset();
    match reader.u32("epoch")? {
        0 => Err(bad_value("epoch", 0, offset)),
        epoch => Ok(epoch),
    }
}

fn ascending(mut indices: impl Iterator<Item = u32>) -> Result<(), EncodeError> {
    let mut last = None;
    if indices.all(|index| last.replace(index).is_none_or(|last| last < index)) && last.is_some() {
        return Ok(());
    }
    Err(invalid("indices", "there are some, and they ascend"))
}

fn in_order(indices: impl Iterator<Item = u32>, offset: usize) -> Result<(), DecodeError> {
    ascending(indices).map_err(|_| DecodeError {
        what: "indices",
        why: DecodeReason::Inconsistent("there are some, and they ascend"),
        offset,
    })
}
