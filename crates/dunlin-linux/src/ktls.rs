//! Kernel TLS: the kernel seals and opens the records of a TCP socket
//! (Documentation/networking/tls.rst, include/uapi/linux/tls.h).
//!
//! [`attach`] enables it on a connected TCP socket; [`install`] sets the key of one direction.
//! Without a key, even the alerts of a direction are plaintext, so the caller installs both keys
//! before it sends anything. The kernel then seals everything written and opens everything read.
//! Records that are not application data are read with [`receive`] and sent with [`send_record`].

use std::fmt;
use std::io;
use std::mem::offset_of;
use std::os::fd::AsFd;

use vm_memory::VolatileSlice;
use zeroize::Zeroizing;

use crate::{option, vectored};

/// The content type `application_data` (RFC 8446, section 5.1).
const APPLICATION_DATA: u8 = 23;
/// The error of a read when a record fails authentication (errno(3)).
pub const EBADMSG: i32 = libc::EBADMSG;
/// The errors of a read: `EINVAL` if the bytes are not a TLS record, `EMSGSIZE` if a record is too
/// long (`tls_rx_msg_size`, net/tls/tls_sw.c). splice(2) also returns `EINVAL` if the next record
/// is not application data.
pub const NO_RECORD: [i32; 2] = [libc::EINVAL, libc::EMSGSIZE];

/// The TLS version of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// TLS 1.2 (RFC 5246).
    V1_2,
    /// TLS 1.3 (RFC 8446).
    V1_3,
}

/// The cipher of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM; 16 bytes of key.
    Aes128Gcm,
    /// AES-256-GCM; 32 bytes of key.
    Aes256Gcm,
    /// ChaCha20-Poly1305; 32 bytes of key.
    ChaCha20Poly1305,
}

/// The direction of a connection for which a key is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// What this side sends.
    Sending,
    /// What the peer sends.
    Receiving,
}

/// A key, and the record at which the kernel starts to use it.
#[derive(Clone, Copy)]
pub struct Key<'a> {
    /// The version of TLS.
    pub version: Version,
    /// The cipher.
    pub cipher: Cipher,
    /// The key, with the cipher's key length ([`Cipher::key_bytes`]).
    pub key: &'a [u8],
    /// In TLS 1.3, and for ChaCha20 in TLS 1.2: the IV, which is XORed with the record's sequence
    /// number to make the nonce. For AES-GCM in TLS 1.2: the salt (four secret bytes), followed by
    /// the explicit nonce of the kernel's first record. The kernel increments the explicit nonce
    /// with each record, independently of the sequence number. This explicit nonce and all later
    /// ones must be unused, because two records with the same nonce reveal the authentication key.
    pub nonce: [u8; 12],
    /// The sequence number of the next record.
    pub sequence: u64,
}

/// The version and cipher of the key that is installed for a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// `tls_crypto_info.version`: 0x0303 is TLS 1.2, 0x0304 is TLS 1.3.
    pub version: u16,
    /// `tls_crypto_info.cipher_type`: 51 is AES-128-GCM, 52 AES-256-GCM, 54 ChaCha20-Poly1305.
    pub cipher: u16,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes read; zero at the end of the connection.
    pub bytes: usize,
    /// The content type of the records from which the bytes come; `None` for application data. All
    /// bytes of one read come from records of one type.
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

impl fmt::Display for Version {
    /// Formats the version as OpenSSL does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V1_2 => "TLSv1.2",
            Self::V1_3 => "TLSv1.3",
        })
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
    /// Whether the installed key has this version and cipher.
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
    /// The key in the kernel's layout, `tls12_crypto_info_aes_gcm_128` or the structure of another
    /// cipher. These structures consist of version, cipher type and byte arrays, without padding.
    ///
    /// # Errors
    /// `InvalidInput` if the key does not have the cipher's length.
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
        // The vector never grows, so no reallocation leaves a copy of the key behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(64));
        for part in parts {
            bytes.extend_from_slice(part);
        }
        Ok(bytes)
    }
}

/// Enables kernel TLS on a connected TCP socket (`TCP_ULP`). Until a key is installed, the socket
/// behaves as before.
///
/// # Errors
/// `NotFound` if the kernel's TLS module is neither loaded nor loadable by this process,
/// `NotConnected` if the socket is not connected; otherwise an error from setsockopt(2).
pub fn attach(socket: impl AsFd) -> io::Result<()> {
    option::set(socket, libc::IPPROTO_TCP, libc::TCP_ULP, b"tls")
}

/// Installs the key of one direction. If the direction already has a key, the new key replaces it;
/// the kernel supports this for TLS 1.3 since Linux 6.14.
///
/// # Errors
/// `InvalidInput` if the key does not have its cipher's length; otherwise an error from
/// setsockopt(2), such as `EBUSY` if the direction has a key and the kernel cannot replace it.
pub fn install(socket: impl AsFd, direction: Direction, key: &Key<'_>) -> io::Result<()> {
    option::set(socket, libc::SOL_TLS, direction.option(), &key.to_bytes()?)
}

/// The version and cipher of a direction's key, as the kernel reports them; `None` if the direction
/// has no key.
///
/// # Errors
/// An error from getsockopt(2).
pub fn installed(socket: impl AsFd, direction: Direction) -> io::Result<Option<Installed>> {
    // This call reads only the head of the structure, without the key.
    match option::get(socket, libc::SOL_TLS, direction.option()) {
        Ok((head, _)) => {
            let [a, b, c, d] = head;
            let [version, cipher] = [[a, b], [c, d]].map(u16::from_ne_bytes);
            Ok(Some(Installed { version, cipher }))
        }
        Err(error) => match error.raw_os_error() {
            // EBUSY means that kernel TLS is enabled but has no key. The other errors mean that it
            // is not enabled.
            Some(libc::EBUSY | libc::ENOPROTOOPT | libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        },
    }
}

/// Tells the kernel that the peer does not pad TLS 1.3 records, so that the kernel can decrypt
/// directly into the reader's buffer (`TLS_RX_EXPECT_NO_PAD`, Linux 6.0). If a record is padded
/// anyway, the kernel decrypts it a second time and increments the counter `TlsRxNoPadViolation`.
///
/// # Errors
/// An error from setsockopt(2).
pub fn expect_no_padding(socket: impl AsFd) -> io::Result<()> {
    option::set_int(socket, libc::SOL_TLS, libc::TLS_RX_EXPECT_NO_PAD, 1)
}

/// Reads the content of one or more records of one content type.
///
/// # Errors
/// An error from recvmsg(2): `EBADMSG` for a record that fails authentication, `EKEYEXPIRED` after
/// the peer's KeyUpdate until a new key is installed.
pub fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<Received> {
    receive_into(socket, &[VolatileSlice::from(into)])
}

/// Like [`receive`], but fills several pieces of memory in order. Uses at most the first 128.
///
/// # Errors
/// Same as [`receive`].
pub fn receive_into(socket: impl AsFd, into: &[VolatileSlice<'_>]) -> io::Result<Received> {
    let mut control = Control::new();
    let (bytes, written) = vectored::receive_with(socket, into, &mut control.0)?;
    let content_type = control.content_type(written);
    Ok(Received {
        bytes,
        control: content_type.filter(|&content_type| content_type != APPLICATION_DATA),
    })
}

/// Sends one record that is not application data: an alert or a handshake message.
///
/// # Errors
/// `WriteZero` if the kernel accepts only a part of `content`; otherwise an error from sendmsg(2).
pub fn send_record(socket: impl AsFd, content_type: u8, content: &[u8]) -> io::Result<()> {
    let mut content = content.to_vec();
    let piece = VolatileSlice::from(&mut content[..]);
    let sent = vectored::send_with(socket, &[piece], &mut Control::of(content_type).0)?;
    match sent == piece.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// A buffer for one control message with one byte of data, in the layout of cmsg(3).
#[repr(C, align(8))]
struct Control([u8; CONTROL_ROOM]);

// SAFETY: CMSG_SPACE only computes a length from its argument.
const CONTROL_ROOM: usize = unsafe { libc::CMSG_SPACE(1) } as usize;
// SAFETY: CMSG_LEN only computes a length from its argument.
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

    /// The content type in the kernel's control message. `None` if the kernel's `written` bytes
    /// contain no complete control message of that kind.
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
    fn a_key_has_the_layout_of_the_kernels_structure() {
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
    fn a_control_message_encodes_and_decodes_its_content_type() {
        let mut control = Control::of(21);
        assert_eq!(control.content_type(CONTROL_BYTES), None);
        // A control message from the kernel differs from this one only in its type.
        let at = offset_of!(libc::cmsghdr, cmsg_type);
        control.0[at..at + 4].copy_from_slice(&libc::TLS_GET_RECORD_TYPE.to_ne_bytes());
        assert_eq!(control.content_type(CONTROL_BYTES), Some(21));
        assert_eq!(control.content_type(0), None);
    }

    #[test]
    fn k01_a_failed_attach_is_an_error_and_changes_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // `attach` fails because the socket is not connected, and on some kernels because they
        // lack TLS.
        assert!(attach(&listener).is_err());
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(installed(&near, Direction::Sending).unwrap(), None);
        assert_eq!(installed(&near, Direction::Receiving).unwrap(), None);
        // Whether or not the kernel supports TLS, a socket without a key behaves as before.
        let _ = attach(&near);
        let (far, _) = listener.accept().unwrap();
        let sent = vectored::send(&near, &[VolatileSlice::from(&mut b"abc".to_owned()[..])]);
        assert_eq!(sent.unwrap(), 3);
        let mut bytes = [0; 8];
        let received = receive(&far, &mut bytes).unwrap();
        assert_eq!(received.control, None);
        assert_eq!(&bytes[..received.bytes], b"abc");
    }
}
