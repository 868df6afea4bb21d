//! What a session's record tells other processes about the session.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use dunlin_proto::ipsec::Mode;
use dunlin_proto::ipsec::object::NotAnObject;
use dunlin_proto::ipsec::ports::PortRange;

/// The description of a session in its record. `Display` writes the record's line without the
/// leading word `about`, and `FromStr` parses that text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The ID of the process that runs the session on this host.
    pub pid: u32,
    /// The mode of the session.
    pub mode: Mode,
    /// The protected ports.
    pub ports: PortRange,
    /// The local end of the control connection. Its address is also the session's address on this
    /// host.
    pub local: SocketAddr,
    /// The peer's end of the control connection.
    pub peer: SocketAddr,
    /// The peer's name, from its certificate.
    pub name: String,
}

impl Owner {
    /// Compares this session with a second session, which has these ports and addresses. Returns
    /// the port of this session's control connection that the second session would block; `None` if
    /// the second session would block neither port.
    pub(crate) fn port_among(&self, ports: PortRange, local: IpAddr, peer: IpAddr) -> Option<u16> {
        if (self.local.ip(), self.peer.ip()) != (local, peer) {
            return None;
        }
        let ends = [self.local.port(), self.peer.port()];
        ends.into_iter().find(|port| ports.contains(*port))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "pid {} mode {} ports {} control {} {} peer {}",
            self.pid, self.mode, self.ports, self.local, self.peer, self.name
        )
    }
}

impl FromStr for Owner {
    type Err = NotAnObject;

    fn from_str(text: &str) -> Result<Self, NotAnObject> {
        // The peer's name is the rest of the line and may contain spaces.
        let fields: Vec<&str> = text.splitn(11, ' ').collect();
        let [
            "pid",
            pid,
            "mode",
            mode,
            "ports",
            ports,
            "control",
            local,
            peer,
            "peer",
            name,
        ] = fields[..]
        else {
            return Err(NotAnObject);
        };
        let mode = match mode {
            "cpu" => Mode::Cpu,
            "connection" => Mode::Connection,
            _ => return Err(NotAnObject),
        };
        Ok(Self {
            pid: pid.parse().map_err(|_| NotAnObject)?,
            mode,
            ports: ports.parse().map_err(|_| NotAnObject)?,
            local: local.parse().map_err(|_| NotAnObject)?,
            peer: peer.parse().map_err(|_| NotAnObject)?,
            name: name.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const LINE: &str = "pid 7 mode connection ports 49152-49215 control 192.0.2.1:40000 \
                        192.0.2.2:7302 peer CN=host b, 1f2e";

    #[test]
    fn an_owner_is_read_as_it_was_written() {
        let one: Owner = LINE.parse().unwrap();
        assert_eq!(one.name, "CN=host b, 1f2e");
        assert_eq!(one.to_string(), LINE);
        let six = LINE.replace("192.0.2.1:", "[2001:db8::1]:");
        assert_eq!(six.parse::<Owner>().unwrap().to_string(), six);
    }

    #[test]
    fn a_malformed_owner_line_is_rejected() {
        for (from, to) in [
            ("pid 7", "pid -7"),
            ("mode connection", "mode lane"),
            ("49152-49215", "49215-49152"),
            ("192.0.2.1:40000", "192.0.2.1"),
            (" peer CN=host b, 1f2e", ""),
            ("control ", ""),
        ] {
            assert!(LINE.replace(from, to).parse::<Owner>().is_err(), "{to}");
        }
    }

    #[test]
    fn ports_of_a_control_connection_conflict_only_between_the_same_hosts() {
        let one: Owner = LINE.parse().unwrap();
        let (local, peer, other) = ([192, 0, 2, 1], [192, 0, 2, 2], [192, 0, 2, 3]);
        let among = |ports: &str, local: [u8; 4], peer: [u8; 4]| {
            one.port_among(ports.parse().unwrap(), local.into(), peer.into())
        };
        assert_eq!(among("7301-7302", local, peer), Some(7302));
        assert_eq!(among("40000", local, peer), Some(40000));
        assert_eq!(among("7303-39999", local, peer), None);
        // The session's own protected ports do not matter here.
        assert_eq!(among("49152-49215", local, peer), None);
        assert_eq!(among("7302", local, other), None);
        assert_eq!(among("7302", other, peer), None);
    }
}
