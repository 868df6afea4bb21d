//! One request to the kernel and its answers, over a netlink socket (netlink(7)).

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_DUMP_INTR, NLM_F_MULTIPART, NetlinkBuffer, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_XFRM};
use zeroize::{Zeroize, Zeroizing};

use super::encode::Request;
use super::error::{Error, Refusal};

const NOOP: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// The words of an error (`NLMSGERR_ATTR_MSG`, include/uapi/linux/netlink.h).
const ERROR_TEXT: u16 = 1;
/// Before its attributes an error has its number and the header of what was asked.
const ERROR_HEAD: usize = 4 + HEADER;
/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Room for what one receive brings: the kernel fills at most half of it when it lists.
const ROOM: usize = 64 << 10;

/// The socket, and the number of the last request.
pub(super) struct Link {
    socket: Socket,
    sequence: u32,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn open() -> Result<Self, Error> {
        const DOING: &str = "opening a netlink socket";
        let failed = |source| Error::Socket {
            doing: DOING,
            source,
        };
        let mut socket = Socket::new(NETLINK_XFRM).map_err(|error| match error.raw_os_error() {
            Some(libc::EPROTONOSUPPORT) => Error::Absent,
            _ => failed(error),
        })?;
        socket.bind_auto().map_err(failed)?;
        socket.connect(&SocketAddr::new(0, 0)).map_err(failed)?;
        socket.set_ext_ack(true).map_err(failed)?;
        // Or an error brings back all that was asked, a key included.
        socket.set_cap_ack(true).map_err(failed)?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends `request` and gives each answer's type and body to `take`, until the kernel says that
    /// there are no more. The kernel has done its work when the send returns, so that an answer
    /// that is not there does not come.
    pub(super) fn exchange(
        &mut self,
        doing: &'static str,
        mut request: Request,
        mut take: impl FnMut(u16, &[u8]) -> Result<(), &'static str>,
    ) -> Result<(), Refusal> {
        self.sequence = self.sequence.wrapping_add(1);
        let failed = |source| Refusal::Socket { doing, source };
        let message = request.finish(self.sequence);
        let sent = until_not_interrupted(|| self.socket.send(message, 0)).map_err(failed)?;
        if sent != message.len() {
            return Err(failed(io::ErrorKind::WriteZero.into()));
        }
        let acknowledged = request.flags() & NLM_F_ACK != 0;
        let mut room = Zeroizing::new(vec![0; ROOM]);
        let mut interrupted = false;
        loop {
            let length = until_not_interrupted(|| {
                let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
                self.socket.recv(&mut &mut room[..], flags)
            })
            .map_err(failed)?;
            let Some(mut rest) = room.get(..length) else {
                return Err(Refusal::Answer {
                    doing,
                    what: "it is longer than it may be",
                });
            };
            while !rest.is_empty() {
                let unreadable = |what| Refusal::Answer { doing, what };
                let one = NetlinkBuffer::new_checked(rest)
                    .map_err(|_| unreadable("a message is cut short"))?;
                if (one.length() as usize) < HEADER {
                    return Err(unreadable("a message is shorter than its header"));
                }
                let (kind, flags, of) = (one.message_type(), one.flags(), one.sequence_number());
                let body = one.payload();
                let whole = (one.length() as usize).next_multiple_of(4);
                rest = rest.get(whole..).unwrap_or_default();
                // An answer to an earlier request that somebody has given up.
                if of != self.sequence {
                    continue;
                }
                interrupted |= flags & NLM_F_DUMP_INTR != 0;
                match kind {
                    NOOP => {}
                    ERROR | DONE => {
                        let code = match body.first_chunk() {
                            Some(code) => i32::from_ne_bytes(*code),
                            None => 0,
                        };
                        if code != 0 {
                            let text = (kind == ERROR && flags & NLM_F_ACK_TLVS != 0)
                                .then(|| text(body))
                                .flatten();
                            let code = code.saturating_neg();
                            return Err(Refusal::Kernel { doing, code, text });
                        }
                        return match interrupted {
                            true => Err(Refusal::Changed),
                            false => Ok(()),
                        };
                    }
                    _ => {
                        take(kind, body).map_err(unreadable)?;
                        if flags & NLM_F_MULTIPART == 0 && !acknowledged {
                            return Ok(());
                        }
                    }
                }
            }
            room[..length].zeroize();
        }
    }
}

/// What the kernel says of an error beside its number.
fn text(error: &[u8]) -> Option<String> {
    NlasIterator::new(error.get(ERROR_HEAD..)?)
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == ERROR_TEXT)
        .map(|attribute| {
            String::from_utf8_lossy(attribute.value())
                .trim_end_matches('\0')
                .to_owned()
        })
}

fn until_not_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
