//! Reception of ESP in UDP (RFC 3948; udp(7), `UDP_ENCAP`).

use std::io;
use std::net::UdpSocket;

use crate::option;

/// `UDP_ENCAP` and `UDP_ENCAP_ESPINUDP` (include/uapi/linux/udp.h).
const UDP_ENCAPSULATION: libc::c_int = 100;
const ESP_IN_UDP: libc::c_int = 2;

/// Makes the kernel process each ESP packet that arrives at this socket as if the packet had
/// arrived without UDP. The packet's SPI selects the SA. This lasts until the socket is closed. The
/// socket can still read packets that are not ESP (their first four bytes are zero). Sending ESP in
/// UDP needs no socket, but a socket bound to the source port keeps other programs from using that
/// port.
///
/// # Errors
/// An error from setsockopt(2): `ENOPROTOOPT` if the kernel lacks ESP in UDP.
pub fn receive_encapsulated(socket: &UdpSocket) -> io::Result<()> {
    option::set_int(socket, libc::IPPROTO_UDP, UDP_ENCAPSULATION, ESP_IN_UDP)
}
