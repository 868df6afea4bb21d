//! TLS records sealed and opened by the kernel (its Documentation/networking/tls.rst,
//! include/uapi/linux/tls.h).
//!
//! [`attach`] makes a connected TCP socket one that can; [`install`] gives it a key for a
//! direction. A direction without a key goes in the clear, alerts included, so whoever installs
//! one installs both before anything is sent. From then on what is written is sealed and what is
//! read is opened; records that are no data come through [`receive`] and go by [`send_record`].

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd};

use vm_memory::VolatileSlice;
use zeroize::Zeroizing;

use crate::option;

/// The content type of a record with data (RFC 8446, section 5.1).
const APPLICATION_DATA: u8 = 23;
/// Pieces of memory that a call uses, at most. A frame of a lane has half as many.
const PIECES_LIMIT: usize = 128;
/// What reading says of a record that does not open (errno(3)).
pub const EBADMSG: i32 = libc::EBADMSG;
/// What it says of bytes that are no record of TLS, or one that is too long (`tls_rx_msg_size`,
/// net/tls/tls_sw.c). The first of them splice(2) says of a record that is no data, too.
pub const NO_RECORD: [i32; 2] = [libc::EINVAL, libc::EMSGSIZE];

/// The version of TLS that a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// TLS 1.2.
    V1_2,
    /// TLS 1.3.
    V1_3,
}

/// The cipher that a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM; 16 bytes of key.
    Aes128Gcm,
    /// AES-256-GCM; 32 bytes of key.
    Aes256Gcm,
    /// ChaCha20-Poly1305; 32 bytes of key.
    ChaCha20Poly1305,
}

/// What of a connection a key is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// What this side sends.
    Sending,
    /// What the peer sends.
    Receiving,
}

/// A key, and where in its use the kernel takes it over.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    /// The version of TLS.
    pub version: Version,
    /// The cipher.
    pub cipher: Cipher,
    /// The key, as long as the cipher wants it.
    pub key: &'a [u8],
    /// TLS 1.3 and ChaCha20: what the record's number is added to, to make a nonce. AES-GCM of TLS
    /// 1.2: four secret bytes, then the nonce that the kernel's first record will bear, from which
    /// it counts up whatever the sequence number is. No earlier record may have borne it, or one
    /// that follows: two records with one nonce give the key away.
    pub nonce: [u8; 12],
    /// The number of the next record.
    pub sequence: u64,
}

/// What a socket says of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// As in `tls_crypto_info`: 0x0303 is TLS 1.2, 0x0304 is TLS 1.3.
    pub version: u16,
    /// As in `tls_crypto_info`: 51 is AES-128-GCM, 52 AES-256-GCM, 54 ChaCha20-Poly1305.
    pub cipher: u16,
}

/// What came of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// How many bytes; zero at the connection's end.
    pub bytes: usize,
    /// The content type of the record that they are of; all of one read are of one type. `None` is
    /// data.
    pub control: Option<u8>,
}

impl Version {
    const fn number(self) -> u16 {
        match self {
            Self::V1_2 => 0x0303,
            Self::V1_3 => 0x0304,
        }
    }
}

impl Cipher {
    const fn number(self) -> u16 {
        match self {
            Self::Aes128Gcm => libc::TLS_CIPHER_AES_GCM_128,
            Self::Aes256Gcm => libc::TLS_CIPHER_AES_GCM_256,
            Self::ChaCha20Poly1305 => libc::TLS_CIPHER_CHACHA20_POLY1305,
        }
    }

    /// The length of a key in bytes.
    #[must_use]
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Aes128Gcm => 16,
            Self::Aes256Gcm | Self::ChaCha20Poly1305 => 32,
        }
    }
}

impl Direction {
    const fn option(self) -> libc::c_int {
        match self {
            Self::Sending => libc::TLS_TX,
            Self::Receiving => libc::TLS_RX,
        }
    }
}

impl Installed {
    /// Whether the kernel has a key of this kind.
    #[must_use]
    pub fn is(&self, version: Version, cipher: Cipher) -> bool {
        *self
            == Self {
                version: version.number(),
                cipher: cipher.number(),
            }
    }
}

impl Key<'_> {
    /// The key as the kernel takes it: `tls12_crypto_info_aes_gcm_128` and its kin, which consist
    /// of the two numbers and byte arrays, and have no padding.
    ///
    /// # Errors
    /// `InvalidInput`: the key has not the cipher's length.
    fn to_bytes(self) -> io::Result<Zeroizing<Vec<u8>>> {
        if self.key.len() != self.cipher.key_bytes() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (salt, explicit) = match self.cipher {
            Cipher::Aes128Gcm | Cipher::Aes256Gcm => self.nonce.split_at(4),
            Cipher::ChaCha20Poly1305 => (&[][..], &self.nonce[..]),
        };
        let parts = [
            &self.version.number().to_ne_bytes()[..],
            &self.cipher.number().to_ne_bytes(),
            explicit,
            self.key,
            salt,
            &self.sequence.to_be_bytes(),
        ];
        // As long as it will be, so that no copy is left behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(64));
        for part in parts {
            bytes.extend_from_slice(part);
        }
        Ok(bytes)
    }
}

/// Makes a connected TCP socket one that takes keys (`TCP_ULP`). Until it has some, nothing about
/// it changes.
///
/// # Errors
/// `NotFound` where the kernel has no module for it, `NotConnected` where the socket is not
/// connected any more or yet, and what else setsockopt(2) says.
pub fn attach(socket: impl AsFd) -> io::Result<()> {
    option::set(socket, libc::IPPROTO_TCP, libc::TCP_ULP, b"tls")
}

/// Gives the kernel the key of one direction, or the next where it has one and can change it
/// (Linux 6.14 in TLS 1.3).
///
/// # Errors
/// `InvalidInput` for a key that has not its cipher's length; what else setsockopt(2) says, `EBUSY`
/// where there is a key that cannot be changed.
pub fn install(socket: impl AsFd, direction: Direction, key: &Key<'_>) -> io::Result<()> {
    option::set(socket, libc::SOL_TLS, direction.option(), &key.to_bytes()?)
}

/// What key the kernel has for a direction, by its own word; `None` if it has none.
///
/// # Errors
/// What getsockopt(2) says.
pub fn installed(socket: impl AsFd, direction: Direction) -> io::Result<Option<Installed>> {
    // Asked for no more than its head, the kernel keeps the key to itself.
    match option::get(socket, libc::SOL_TLS, direction.option()) {
        Ok((head, _)) => {
            let [a, b, c, d] = head;
            let [version, cipher] = [[a, b], [c, d]].map(u16::from_ne_bytes);
            Ok(Some(Installed { version, cipher }))
        }
        Err(error) => match error.raw_os_error() {
            // Attached and without a key; not attached.
            Some(libc::EBUSY | libc::ENOPROTOOPT | libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        },
    }
}

/// Promises that the peer pads no record of TLS 1.3, with which the kernel opens them where the
/// reader wants them (`TLS_RX_EXPECT_NO_PAD`, Linux 6.0). A record that is padded all the same is
/// opened twice, and counted.
///
/// # Errors
/// What setsockopt(2) says.
pub fn expect_no_padding(socket: impl AsFd) -> io::Result<()> {
    option::set_int(socket, libc::SOL_TLS, libc::TLS_RX_EXPECT_NO_PAD, 1)
}

/// Reads what has been opened, of one or more records of one type, and tells the type.
///
/// # Errors
/// What recvmsg(2) says: `EBADMSG` for a record that does not open, `EKEYEXPIRED` behind a key
/// update of the peer's until there is a new key.
pub fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<Received> {
    receive_into(socket, &[VolatileSlice::from(into)])
}

/// The same, into several pieces of memory one after the other, of which at most 128
/// are used.
///
/// # Errors
/// As [`receive`].
pub fn receive_into(socket: impl AsFd, into: &[VolatileSlice<'_>]) -> io::Result<Received> {
    let mut pieces = [EMPTY; PIECES_LIMIT];
    let count = fill(&mut pieces, into);
    let mut control = Control::new();
    let mut message = message(&mut pieces[..count], Some(&mut control));
    // SAFETY: `message` names `count` pieces, each of which is mapped and writable for as long as
    // its `VolatileSlice` in `into` lives, so through the call, and a control buffer with its true
    // length. The kernel writes to nothing else. Bytes of a guest may be written to by others
    // meanwhile, which is why nothing in Rust refers to them.
    let status = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, 0) };
    let bytes = usize::try_from(status).map_err(|_| io::Error::last_os_error())?;
    let content_type = control.content_type(message.msg_controllen);
    Ok(Received {
        bytes,
        control: content_type.filter(|&content_type| content_type != APPLICATION_DATA),
    })
}

/// Writes what lies in several pieces of memory, at most 128 of them; returns how many
/// bytes were taken. The last of them end a record.
///
/// # Errors
/// The error of sendmsg(2).
pub fn send_from(socket: impl AsFd, from: &[VolatileSlice<'_>]) -> io::Result<usize> {
    send(socket, from, None)
}

/// Sends a record of its own that is not data: an alert, a handshake message.
///
/// # Errors
/// The error of sendmsg(2).
pub fn send_record(socket: impl AsFd, content_type: u8, content: &[u8]) -> io::Result<()> {
    let mut content = content.to_vec();
    let piece = VolatileSlice::from(&mut content[..]);
    let sent = send(socket, &[piece], Some(&mut Control::of(content_type)))?;
    match sent == piece.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

fn send(
    socket: impl AsFd,
    from: &[VolatileSlice<'_>],
    control: Option<&mut Control>,
) -> io::Result<usize> {
    let mut pieces = [EMPTY; PIECES_LIMIT];
    let count = fill(&mut pieces, from);
    let message = message(&mut pieces[..count], control);
    // SAFETY: `message` names `count` pieces, each of which is mapped and readable for as long as
    // its `VolatileSlice` in `from` lives, so through the call, which only reads them, and a control
    // buffer, if any, with its true length. The pieces may change meanwhile: the kernel seals what
    // it reads once.
    let status = unsafe {
        libc::sendmsg(
            socket.as_fd().as_raw_fd(),
            &raw const message,
            libc::MSG_NOSIGNAL,
        )
    };
    usize::try_from(status).map_err(|_| io::Error::last_os_error())
}

const EMPTY: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

fn fill(pieces: &mut [libc::iovec; PIECES_LIMIT], slices: &[VolatileSlice<'_>]) -> usize {
    for (piece, slice) in pieces.iter_mut().zip(slices) {
        let guard = slice.ptr_guard_mut();
        *piece = libc::iovec {
            // The guard does nothing on Linux, so the address outlives it.
            iov_base: guard.as_ptr().cast(),
            iov_len: slice.len(),
        };
    }
    slices.len().min(PIECES_LIMIT)
}

fn message(pieces: &mut [libc::iovec], control: Option<&mut Control>) -> libc::msghdr {
    // SAFETY: `msghdr` consists of integers and pointers, for all of which zero is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    if let Some(Control(room)) = control {
        message.msg_control = room.as_mut_ptr().cast();
        message.msg_controllen = room.len() as _;
    }
    message
}

/// Room for one control message of one byte, as cmsg(3) lays it out.
#[repr(C, align(8))]
struct Control([u8; CONTROL_ROOM]);

// SAFETY: both compute from their argument alone.
const CONTROL_ROOM: usize = unsafe { libc::CMSG_SPACE(1) } as usize;
// SAFETY: as above.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_LEN(1) } as usize;
const CONTENT_TYPE_AT: usize = CONTROL_BYTES - 1;
const _: () = assert!(size_of::<libc::cmsghdr>() <= CONTENT_TYPE_AT);
const _: () = assert!(align_of::<libc::cmsghdr>() <= align_of::<Control>());

impl Control {
    fn new() -> Self {
        Self([0; CONTROL_ROOM])
    }

    fn of(content_type: u8) -> Self {
        let mut bytes = [0; CONTROL_ROOM];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(
            offset_of!(libc::cmsghdr, cmsg_len),
            &CONTROL_BYTES.to_ne_bytes(),
        );
        put(
            offset_of!(libc::cmsghdr, cmsg_level),
            &libc::SOL_TLS.to_ne_bytes(),
        );
        put(
            offset_of!(libc::cmsghdr, cmsg_type),
            &libc::TLS_SET_RECORD_TYPE.to_ne_bytes(),
        );
        put(CONTENT_TYPE_AT, &[content_type]);
        Self(bytes)
    }

    /// The type that the kernel has written, if `written` bytes hold it.
    fn content_type(&self, written: usize) -> Option<u8> {
        let number = |at: usize| {
            let bytes = self.0.get(at..at + 4)?;
            bytes.try_into().ok().map(i32::from_ne_bytes)
        };
        let is_type = written >= CONTROL_BYTES
            && number(offset_of!(libc::cmsghdr, cmsg_level)) == Some(libc::SOL_TLS)
            && number(offset_of!(libc::cmsghdr, cmsg_type)) == Some(libc::TLS_GET_RECORD_TYPE);
        is_type.then(|| self.0[CONTENT_TYPE_AT])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_key_is_laid_out_as_the_kernel_has_it() {
        let key = [9; 16];
        let bytes = Key {
            version: Version::V1_2,
            cipher: Cipher::Aes128Gcm,
            key: &key,
            nonce: [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2],
            sequence: 3,
        }
        .to_bytes()
        .unwrap();
        let mut expected = vec![3, 3, 51, 0];
        expected.extend([2; 8]);
        expected.extend([9; 16]);
        expected.extend([1; 4]);
        expected.extend([0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(*bytes, expected);
        assert_eq!(
            bytes.len(),
            size_of::<libc::tls12_crypto_info_aes_gcm_128>()
        );
        for (cipher, length) in [
            (
                Cipher::Aes256Gcm,
                size_of::<libc::tls12_crypto_info_aes_gcm_256>(),
            ),
            (
                Cipher::ChaCha20Poly1305,
                size_of::<libc::tls12_crypto_info_chacha20_poly1305>(),
            ),
        ] {
            let key = Key {
                version: Version::V1_3,
                cipher,
                key: &[7; 32],
                nonce: [1; 12],
                sequence: 0,
            };
            assert_eq!(key.to_bytes().unwrap().len(), length);
            let short = Key {
                key: &[7; 31],
                ..key
            };
            assert_eq!(
                short.to_bytes().unwrap_err().kind(),
                io::ErrorKind::InvalidInput
            );
        }
    }

    #[test]
    fn a_control_message_says_its_type_again() {
        let mut control = Control::of(21);
        assert_eq!(control.content_type(CONTROL_BYTES), None);
        // What the kernel answers with differs in one number.
        let at = offset_of!(libc::cmsghdr, cmsg_type);
        control.0[at..at + 4].copy_from_slice(&libc::TLS_GET_RECORD_TYPE.to_ne_bytes());
        assert_eq!(control.content_type(CONTROL_BYTES), Some(21));
        assert_eq!(control.content_type(0), None);
    }

    #[test]
    fn k01_what_cannot_be_attached_is_an_error_and_changes_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Neither connected nor, on some kernels, known of at all.
        assert!(attach(&listener).is_err());
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(installed(&near, Direction::Sending).unwrap(), None);
        assert_eq!(installed(&near, Direction::Receiving).unwrap(), None);
        // Without the kernel's help the socket is as before; with it, too.
        let _ = attach(&near);
        let (far, _) = listener.accept().unwrap();
        let sent = send_from(&near, &[VolatileSlice::from(&mut b"abc".to_owned()[..])]);
        assert_eq!(sent.unwrap(), 3);
        let mut bytes = [0; 8];
        let received = receive(&far, &mut bytes).unwrap();
        assert_eq!(received.control, None);
        assert_eq!(&bytes[..received.bytes], b"abc");
    }
}
