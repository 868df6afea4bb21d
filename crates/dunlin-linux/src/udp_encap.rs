//! ESP within UDP at its receiver (RFC 3948; udp(7), `UDP_ENCAP`).

use std::io;
use std::net::UdpSocket;

use crate::option;

/// `UDP_ENCAP` and `UDP_ENCAP_ESPINUDP` (include/uapi/linux/udp.h).
const UDP_ENCAPSULATION: libc::c_int = 100;
const ESP_IN_UDP: libc::c_int = 2;

/// Gives ESP that comes to this socket to the SA of its SPI, as if it had come without UDP, as long
/// as the socket is open. A packet that is not ESP (its first four bytes are zero) is left for the
/// socket to read. To send ESP within UDP no socket is needed, but one at the same port keeps others
/// off.
///
/// # Errors
/// The error of setsockopt(2): `ENOPROTOOPT` is a kernel without ESP within UDP.
pub fn receive_encapsulated(socket: &UdpSocket) -> io::Result<()> {
    option::set_int(socket, libc::IPPROTO_UDP, UDP_ENCAPSULATION, ESP_IN_UDP)
}
