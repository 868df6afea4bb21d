//! One question to the kernel over netlink(7), and its answer: a header and a message's own fixed
//! part, behind which stand attributes, some with others within.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};

/// `nlmsghdr`: length, kind, flags, number, sender.
const HEADER_BYTES: usize = 16;
/// Room for any answer about one thing.
const ANSWER_BYTES: usize = 8192;
/// The kinds of attributes are below their flags.
const KIND_MASK: u16 = 0x3fff;

/// Asks about one thing, and returns the attributes of the answer, which has a fixed part of so many
/// bytes. The kernel answers such a question before write(2) returns, so nothing here waits.
///
/// # Errors
/// What socket(2) says where there may be no netlink sockets, what the kernel answers, and
/// `InvalidData` for an answer that is none.
pub(crate) fn ask(
    protocol: libc::c_int,
    kind: u16,
    content: &[u8],
    fixed_bytes: usize,
) -> io::Result<Vec<u8>> {
    let mut question = Vec::with_capacity(HEADER_BYTES + content.len());
    question.extend(((HEADER_BYTES + content.len()) as u32).to_ne_bytes());
    question.extend(kind.to_ne_bytes());
    question.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // Its number, and that of a sender whom the kernel has still to name.
    question.extend([0; 8]);
    question.extend(content);
    let mut socket = open(protocol)?;
    socket.write_all(&question)?;
    let mut answer = [0; ANSWER_BYTES];
    let count = socket.read(&mut answer)?;
    let message = message(&answer[..count])?;
    let attributes = message.get(fixed_bytes..);
    Ok(attributes.ok_or(io::ErrorKind::InvalidData)?.to_vec())
}

fn open(protocol: libc::c_int) -> io::Result<File> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket takes no pointers.
    let made = unsafe { libc::socket(libc::AF_NETLINK, kind, protocol) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) }.into())
}

/// What stands behind the header of the first message, if that is no error.
pub(crate) fn message(answer: &[u8]) -> io::Result<&[u8]> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let length = number(answer, 0).map(|bytes| u32::from_ne_bytes(bytes) as usize);
    let kind = number(answer, 4).map(u16::from_ne_bytes);
    let content = answer.get(HEADER_BYTES..length.ok_or_else(invalid)?);
    let content = content.ok_or_else(invalid)?;
    if kind != Some(libc::NLMSG_ERROR as u16) {
        return Ok(content);
    }
    Err(match number(content, 0).map(i32::from_ne_bytes) {
        Some(error) if error < 0 => io::Error::from_raw_os_error(error.saturating_neg()),
        _ => invalid(),
    })
}

/// The first attribute of a kind: each has its length, itself included, and its kind in front, and
/// begins at a multiple of four.
pub(crate) fn attribute(mut attributes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(number(attributes, 0)?));
        let kind = u16::from_ne_bytes(number(attributes, 2)?) & KIND_MASK;
        let content = attributes.get(4..length)?;
        if kind == wanted {
            return Some(content);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

/// So many bytes from a place on.
pub(crate) fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<[u8; BYTES]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Attributes as they are sent, for tests and questions.
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

    #[test]
    fn i7_a_message_that_was_cut_or_changed_anywhere_is_no_panic() {
        let mut whole = 44_u32.to_ne_bytes().to_vec();
        whole.resize(HEADER_BYTES, 0);
        whole.extend(attributes(&[(8, &[0]), (19, &attributes(&[(2, &[7; 9])]))]));
        let length = (whole.len() as u32).to_ne_bytes();
        whole[..4].copy_from_slice(&length);
        let nested = |bytes: &[u8]| {
            let outer = attribute(message(bytes).ok()?, 19)?;
            attribute(outer, 2).map(<[u8]>::to_vec)
        };
        assert_eq!(nested(&whole).unwrap(), [7; 9]);
        for end in 0..whole.len() {
            let error = message(&whole[..end]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{end}");
        }
        for at in 0..whole.len() {
            for value in 0..=255 {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = nested(&changed);
            }
        }
    }

    #[test]
    fn an_error_is_the_kernel_s() {
        let mut bytes = 36_u32.to_ne_bytes().to_vec();
        bytes.extend((libc::NLMSG_ERROR as u16).to_ne_bytes());
        bytes.resize(HEADER_BYTES, 0);
        bytes.extend((-libc::ENOENT).to_ne_bytes());
        bytes.resize(36, 0);
        let error = message(&bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
