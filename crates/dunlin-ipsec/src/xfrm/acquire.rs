//! What the kernel asks a key manager for (`XFRM_MSG_ACQUIRE`), for tests of what it does then.
//! Dunlin adds its SAs before they are needed, and answers nothing.

use std::io;

use netlink_packet_core::{NetlinkBuffer, NlasIterator};
use netlink_packet_xfrm as uapi;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_XFRM};

use super::encode::SA_CPU;

/// Hears what the kernel asks for in one network namespace. While somebody hears it, the kernel
/// waits for an answer.
pub struct Acquires(Socket);

impl std::fmt::Debug for Acquires {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Acquires").finish()
    }
}

impl Acquires {
    /// Opens one in the calling thread's namespace.
    ///
    /// # Errors
    /// What socket(2), bind(2) and setsockopt(2) say.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_XFRM)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        socket.add_membership(uapi::XFRMNLGRP_ACQUIRE)?;
        socket.set_non_blocking(true)?;
        Ok(Self(socket))
    }

    /// For which CPUs SAs were asked since the last call; `None` is an SA of every CPU.
    ///
    /// # Errors
    /// What recv(2) says.
    pub fn asked(&self) -> io::Result<Vec<Option<u32>>> {
        let mut all = Vec::new();
        let mut room = vec![0; 4096];
        loop {
            let length = match self.0.recv(&mut &mut room[..], 0) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(all),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let unreadable = || io::Error::from(io::ErrorKind::InvalidData);
            let message = NetlinkBuffer::new_checked(room.get(..length).ok_or_else(unreadable)?)
                .map_err(|_| unreadable())?;
            if message.message_type() != uapi::XFRM_MSG_ACQUIRE {
                continue;
            }
            let attributes = message
                .payload()
                .get(uapi::XFRM_USER_ACQUIRE_LEN..)
                .ok_or_else(unreadable)?;
            let cpu = NlasIterator::new(attributes)
                .map_while(Result::ok)
                .find(|attribute| attribute.kind() == SA_CPU)
                .and_then(|attribute| attribute.value().first_chunk().copied())
                .map(u32::from_ne_bytes);
            all.push(cpu);
        }
    }
}
