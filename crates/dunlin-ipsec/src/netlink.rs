//! Sends one request to the kernel and reads its answers over a netlink socket (netlink(7)).

mod request;

use std::io;

use dunlin_linux::interrupted::until_not_interrupted;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_DUMP_INTR, NLM_F_MULTIPART, NetlinkBuffer, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr};
use zeroize::{Zeroize, Zeroizing};

use self::request::HEADER;
pub(crate) use self::request::Request;

const NOOP: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// The attribute with the text of an error (`NLMSGERR_ATTR_MSG`, include/uapi/linux/netlink.h).
const ERROR_TEXT: u16 = 1;
/// Number of bytes before the attributes of an error: the error number and the request's header.
const ERROR_HEAD: usize = 4 + HEADER;
/// The size of the buffer for one receive. Each part of a list fills at most half of the buffer.
const ROOM: usize = 64 << 10;

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The kernel refused the request. The values are the positive error number (errno(3)) and the
    /// kernel's text.
    Kernel { code: i32, text: Option<String> },
    /// A list changed while it was read.
    Changed,
    /// The socket failed.
    Socket(io::Error),
    /// The kernel's answer is malformed. The value is the reason.
    Answer(&'static str),
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Kernel { code, .. } => Self::from_raw_os_error(code),
            Failure::Socket(error) => error,
            Failure::Changed => Self::new(
                io::ErrorKind::InvalidData,
                "the list changed while it was read",
            ),
            Failure::Answer(what) => Self::new(io::ErrorKind::InvalidData, what),
        }
    }
}

/// A netlink socket and the sequence number of the last request.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Socket,
    sequence: u32,
}

impl Link {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// Errors from the kernel, for example if the process is not allowed to open netlink sockets of
    /// this protocol.
    pub(crate) fn open(protocol: libc::c_int) -> io::Result<Self> {
        let mut socket = Socket::new(protocol as isize)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_ext_ack(true)?;
        // Without this option an error message would contain the whole request, including a key.
        socket.set_cap_ack(true)?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends `request` and passes the type and body of each answer to `take`, until the kernel
    /// marks the last one. The kernel queues its first answers before send(2) returns, and further
    /// parts of a list before recv(2) returns. So this method never waits: an empty queue is an
    /// error, because no answer would arrive later.
    ///
    /// # Errors
    /// Any [`Failure`].
    pub(crate) fn exchange(
        &mut self,
        mut request: Request,
        mut take: impl FnMut(u16, &[u8]) -> Result<(), &'static str>,
    ) -> Result<(), Failure> {
        self.sequence = self.sequence.wrapping_add(1);
        let message = request.finish(self.sequence);
        let sent = until_not_interrupted(|| self.socket.send(message, 0));
        if sent.map_err(Failure::Socket)? != message.len() {
            return Err(Failure::Socket(io::ErrorKind::WriteZero.into()));
        }
        let mut room = Zeroizing::new(vec![0; ROOM]);
        let mut answers = Answers {
            sequence: self.sequence,
            acknowledged: request.flags() & NLM_F_ACK != 0,
            interrupted: false,
        };
        loop {
            let length = until_not_interrupted(|| {
                let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
                self.socket.recv(&mut &mut room[..], flags)
            })
            .map_err(Failure::Socket)?;
            let Some(received) = room.get_mut(..length) else {
                return Err(Failure::Answer("message too long"));
            };
            if answers.read(received, &mut take)? {
                return Ok(());
            }
            received.zeroize();
        }
    }
}

/// The state of reading the answers to one request.
struct Answers {
    sequence: u32,
    /// Whether an acknowledgement marks the end of the answers.
    acknowledged: bool,
    interrupted: bool,
}

impl Answers {
    /// Passes the messages of one receive to `take`; returns whether the last answer was among
    /// them.
    fn read(
        &mut self,
        mut rest: &[u8],
        take: &mut impl FnMut(u16, &[u8]) -> Result<(), &'static str>,
    ) -> Result<bool, Failure> {
        while !rest.is_empty() {
            let one = NetlinkBuffer::new_checked(rest)
                .map_err(|_| Failure::Answer("truncated message"))?;
            if (one.length() as usize) < HEADER {
                return Err(Failure::Answer("message shorter than its header"));
            }
            let (kind, flags, of) = (one.message_type(), one.flags(), one.sequence_number());
            let body = one.payload();
            let whole = (one.length() as usize).next_multiple_of(4);
            rest = rest.get(whole..).unwrap_or_default();
            // Skip an answer to an earlier request that was abandoned.
            if of != self.sequence {
                continue;
            }
            self.interrupted |= flags & NLM_F_DUMP_INTR != 0;
            match kind {
                NOOP => {}
                ERROR | DONE => {
                    let code = body
                        .first_chunk()
                        .map_or(0, |code| i32::from_ne_bytes(*code));
                    if code != 0 {
                        let text = (kind == ERROR && flags & NLM_F_ACK_TLVS != 0)
                            .then(|| text(body))
                            .flatten();
                        let code = code.saturating_neg();
                        return Err(Failure::Kernel { code, text });
                    }
                    return match self.interrupted {
                        true => Err(Failure::Changed),
                        false => Ok(true),
                    };
                }
                _ => {
                    take(kind, body).map_err(Failure::Answer)?;
                    if flags & NLM_F_MULTIPART == 0 && !self.acknowledged {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }
}

/// Sends a query and returns the attributes of its answer, which follow a fixed part of
/// `fixed_bytes` bytes.
///
/// # Errors
/// Errors from socket(2), for example if the process is not allowed to open netlink sockets, and
/// from the kernel; `InvalidData` for a malformed answer.
pub(crate) fn ask(
    protocol: libc::c_int,
    request: Request,
    fixed_bytes: usize,
) -> io::Result<Vec<u8>> {
    let mut attributes = None;
    Link::open(protocol)?.exchange(request, |_, body| {
        let behind = body.get(fixed_bytes..).ok_or("truncated answer")?;
        attributes = Some(behind.to_vec());
        Ok(())
    })?;
    attributes.ok_or(io::ErrorKind::InvalidData.into())
}

/// Returns the value of the first attribute of the kind `wanted`.
pub(crate) fn attribute(attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    let attribute = NlasIterator::new(attributes)
        .map_while(Result::ok)
        .find(|attribute| attribute.kind() == wanted)?;
    let length = attribute.value_length();
    attribute.into_inner().get(4..)?.get(..length)
}

/// Returns `BYTES` bytes at an offset.
pub(crate) fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<[u8; BYTES]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Returns the text of an error.
fn text(error: &[u8]) -> Option<String> {
    let text = attribute(error.get(ERROR_HEAD..)?, ERROR_TEXT)?;
    let text = String::from_utf8_lossy(text);
    Some(text.trim_end_matches('\0').to_owned())
}

/// Encodes attributes as the kernel does.
#[cfg(test)]
pub(crate) fn attributes(of: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, content) in of {
        bytes.extend((4 + content.len() as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(*content);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A message with these header fields, for the request with sequence number 7.
    fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(7_u32.to_ne_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend(body);
        bytes
    }

    /// Returns one nested attribute of each answer, and whether the list is complete.
    fn read(bytes: &[u8], acknowledged: bool) -> Result<(Vec<Vec<u8>>, bool), Failure> {
        let mut answers = Answers {
            sequence: 7,
            acknowledged,
            interrupted: false,
        };
        let mut taken = Vec::new();
        let whole = answers.read(bytes, &mut |_, body| {
            let nested = attribute(body, 19).and_then(|outer| attribute(outer, 2));
            taken.push(nested.ok_or("no such attribute")?.to_vec());
            Ok(())
        })?;
        Ok((taken, whole))
    }

    #[test]
    fn i7_a_truncated_or_changed_message_does_not_panic() {
        let inner = attributes(&[(2, &[7; 9])]);
        // The bit 0x8000 marks a nested attribute (NLA_F_NESTED).
        let whole = message(20, 0, &attributes(&[(8, &[0]), (0x8000 | 19, &inner)]));
        assert_eq!(read(&whole, false).unwrap(), (vec![vec![7; 9]], true));
        for end in 1..whole.len() {
            let error = read(&whole[..end], false).unwrap_err();
            assert!(matches!(error, Failure::Answer(_)), "{end}: {error:?}");
        }
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = read(&changed, false);
            }
        }
    }

    #[test]
    fn a_list_is_complete_when_the_kernel_ends_it_unchanged() {
        let one = message(
            20,
            NLM_F_MULTIPART,
            &attributes(&[(19, &attributes(&[(2, b"1")]))]),
        );
        let two = [&one[..], &one].concat();
        assert_eq!(read(&two, false).unwrap(), (vec![b"1".to_vec(); 2], false));
        let done = message(DONE, NLM_F_MULTIPART, &[0; 4]);
        let all = [&two[..], &done].concat();
        assert_eq!(read(&all, false).unwrap(), (vec![b"1".to_vec(); 2], true));
        let changed = message(DONE, NLM_F_MULTIPART | NLM_F_DUMP_INTR, &[0; 4]);
        let error = read(&[&two[..], &changed].concat(), false).unwrap_err();
        assert!(matches!(error, Failure::Changed), "{error:?}");
        // An answer to an earlier, abandoned request is skipped.
        let mut other = done;
        other[8] = 6;
        assert_eq!(read(&other, false).unwrap(), (vec![], false));
    }

    #[test]
    fn an_error_has_the_kernels_number_and_text() {
        let mut body = (-libc::ENOENT).to_ne_bytes().to_vec();
        body.resize(ERROR_HEAD, 0);
        body.extend(attributes(&[(ERROR_TEXT, b"none such\0")]));
        let said = |flags| match read(&message(ERROR, flags, &body), true).unwrap_err() {
            Failure::Kernel { code, text } => (code, text),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            said(NLM_F_ACK_TLVS),
            (libc::ENOENT, Some("none such".to_owned()))
        );
        assert_eq!(said(0), (libc::ENOENT, None));
        let error = read(&message(ERROR, 0, &body), true).unwrap_err();
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::NotFound);
        // The acknowledgement follows the answer.
        let body = attributes(&[(19, &attributes(&[(2, b"1")]))]);
        let both = [message(20, 0, &body), message(ERROR, 0, &[0; 20])].concat();
        assert_eq!(read(&both, true).unwrap(), (vec![b"1".to_vec()], true));
    }
}
