//! Packets of a network interface, as the interface sends and receives them (packet(7)).

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// The value of `SO_RCVBUFFORCE` in bytes. The buffer must be large enough for the packets that a
/// test sends before it reads them.
const ROOM: libc::c_int = 128 << 20;
/// The size of the buffer for a frame, in bytes. No frame is longer, even if it is unsegmented.
const LONGEST: usize = 128 << 10;

/// A socket on one interface of the network namespace in which it was opened.
#[derive(Debug)]
pub struct Packets {
    socket: OwnedFd,
    room: Mutex<Vec<u8>>,
}

impl AsFd for Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A frame with its Ethernet header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Whether this host sent the frame. If so, the frame has the form in which the kernel passed
    /// it to the interface, after any encryption and segmentation.
    pub outgoing: bool,
    /// The complete frame.
    pub bytes: Vec<u8>,
}

impl Packets {
    /// Opens a socket that gets all packets of `interface` from now on.
    ///
    /// # Errors
    /// The interface does not exist, or CAP_NET_RAW or CAP_NET_ADMIN is missing.
    pub fn open(interface: &str) -> io::Result<Self> {
        let name = CString::new(interface)?;
        // SAFETY: `name` ends with a zero byte and outlives the call, which only reads it.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        let all = (libc::ETH_P_ALL as u16).to_be();
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: socket(2) takes no pointers. With protocol 0 the socket receives nothing until it
        // is bound.
        let descriptor = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned `descriptor`, which has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let room = ROOM;
        // SAFETY: the pointer and the length describe `room`, an initialised integer that outlives
        // the call and is only read.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                (&raw const room).cast(),
                size_of_val(&room) as libc::socklen_t,
            )
        };
        if set < 0 {
            return Err(io::Error::last_os_error());
        }
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: all,
            sll_ifindex: index.cast_signed(),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: `address` is an initialised address of the given length, outlives the call and is
        // only read; the descriptor is open while `socket` exists.
        let bound = unsafe {
            libc::bind(
                socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        if bound < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            socket,
            room: Mutex::new(vec![0; LONGEST]),
        })
    }

    /// Returns the next frame that was sent or received, if there is one.
    ///
    /// # Errors
    /// An error from recvfrom(2).
    pub fn next_frame(&self) -> io::Result<Option<Frame>> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `sockaddr_ll` consists of integers only, for which all zeros are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        loop {
            // SAFETY: `room` is writable for its length and `address` for `length`; all outlive the
            // call and are borrowed exclusively.
            let received = unsafe {
                libc::recvfrom(
                    self.socket.as_raw_fd(),
                    room.as_mut_ptr().cast(),
                    room.len(),
                    0,
                    (&raw mut address).cast(),
                    &raw mut length,
                )
            };
            let Ok(received) = usize::try_from(received) else {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Ok(None),
                    _ => return Err(error),
                }
            };
            return Ok(Some(Frame {
                outgoing: address.sll_pkttype == libc::PACKET_OUTGOING,
                bytes: room[..received].to_vec(),
            }));
        }
    }

    /// Sends a frame unchanged.
    ///
    /// # Errors
    /// An error from send(2).
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the pointer and the length describe `frame`, which outlives the call and is only
        // read.
        let sent = unsafe {
            libc::send(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
            )
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// The number of frames lost for lack of buffer space since the last call
    /// (`PACKET_STATISTICS`).
    ///
    /// # Errors
    /// An error from getsockopt(2).
    pub fn lost(&self) -> io::Result<u32> {
        // The fields of struct tpacket_stats: packets and drops.
        let mut statistics = [0_u32; 2];
        let mut length = size_of_val(&statistics) as libc::socklen_t;
        // SAFETY: `statistics` and `length` are initialised, outlive the call and are borrowed
        // exclusively; `length` is the size of the buffer, beyond which the kernel does not write.
        let status = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut length,
            )
        };
        if status < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(statistics[1])
    }
}
