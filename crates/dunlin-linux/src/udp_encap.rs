//! ESP within UDP at its receiver (RFC 3948; udp(7), `UDP_ENCAP`).

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

/// `UDP_ENCAP` and `UDP_ENCAP_ESPINUDP` (include/uapi/linux/udp.h).
const UDP_ENCAPSULATION: libc::c_int = 100;
const ESP_IN_UDP: libc::c_int = 2;

/// Gives ESP that comes to this socket to the SA of its SPI, as if it had come without UDP, as long
/// as the socket is open. What is no ESP, four zero bytes first, is the socket's to read as
/// before. To send ESP within UDP no socket is needed, but one at the same port keeps others off.
///
/// # Errors
/// What setsockopt(2) says: `ENOPROTOOPT` is a kernel without ESP within UDP.
pub fn receive_encapsulated(socket: &UdpSocket) -> io::Result<()> {
    let kind = ESP_IN_UDP;
    // SAFETY: the pointer and the length describe `kind`, an initialised integer that lives
    // through the call, which only reads it; the descriptor is open while `socket` is borrowed.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_UDP,
            UDP_ENCAPSULATION,
            (&raw const kind).cast(),
            size_of_val(&kind) as libc::socklen_t,
        )
    };
    match status {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
