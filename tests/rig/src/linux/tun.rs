//! TUN devices (Documentation/networking/tuntap.rst): a network interface with a descriptor as its
//! other end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

/// The size of the largest packet of a [`Tun`] with its header.
pub const PACKET_BYTES: usize = 10 + 65536 + 256;

/// A network interface. Dropping it removes the interface.
///
/// A packet on the descriptor consists of a `struct virtio_net_hdr` of 10 bytes and an IP packet.
/// The IP packet may be an unsegmented TCP packet of up to 64 KiB without a checksum. Another
/// [`Tun`] accepts such a packet unchanged.
#[derive(Debug)]
pub struct Tun(File);

impl Tun {
    /// Creates the interface `name` in the calling thread's network namespace.
    ///
    /// # Errors
    /// Privileges are missing, the name is longer than 15 bytes or in use, or the kernel has no
    /// TUN.
    pub fn open(name: &str) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open("/dev/net/tun")?;
        let mut request = libc::ifreq {
            ifr_name: [0; libc::IFNAMSIZ],
            ifr_ifru: libc::__c_anonymous_ifr_ifru {
                ifru_flags: (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short,
            },
        };
        if name.len() >= libc::IFNAMSIZ {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *place = byte as libc::c_char;
        }
        // SAFETY: TUNSETIFF reads and writes one ifreq, which outlives the call and ends its name
        // with a zero byte.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let set = unsafe {
            libc::ioctl(
                file.as_raw_fd(),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(offloads),
            )
        };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(file))
    }

    /// Receives a packet that the host has sent. Returns its length.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; otherwise an error from read(2).
    pub fn receive(&self, buffer: &mut [u8; PACKET_BYTES]) -> io::Result<usize> {
        (&self.0).read(buffer)
    }

    /// Passes a packet to the host.
    ///
    /// # Errors
    /// An error from write(2), for instance if the interface is down.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        (&self.0).write(packet).map(drop)
    }
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
