//! Both ends of kernel TLS: sockets with keys in the kernel, and a peer that encrypts and decrypts
//! records in user space. With this peer, tests can read any record on the wire and send any
//! record.
//!
//! The peer shares no code with the kernel. It uses ring's AES-256-GCM and implements both record
//! formats (RFC 8446, section 5.2; RFC 5288, section 3).

use std::fs;
use std::io::{self, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dunlin_linux::ktls::{self, Cipher, Direction, Key, Version};
use dunlin_linux::poll::{Interest, poll};
use dunlin_linux::socket::unread_bytes;
use nix::errno::Errno;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::Guest;

/// The content type of alerts (RFC 8446, section 5.1).
pub const ALERT: u8 = 21;
/// The content type of handshake messages.
pub const HANDSHAKE: u8 = 22;
/// The content type of application data.
pub const DATA: u8 = 23;

/// The alert that ends a direction: level *warning*, description *close_notify*.
pub const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// A KeyUpdate message that does not request a KeyUpdate in return (RFC 8446, section 4.6.3).
pub const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// The maximum number of content bytes in a record.
pub const RECORD: usize = 1 << 14;

/// The length of a record's header, in bytes.
pub const HEADER: usize = 5;
const TAG: usize = 16;

/// The time limit for an event that is certain to occur. Times are meaningless in this machine, so
/// the limit only stops a test that would hang.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The keys of one direction.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// The TLS version.
    pub version: Version,
    /// The number of the key. Equal numbers mean equal keys.
    pub number: u8,
    /// The sequence number of the first record.
    pub sequence: u64,
    /// In TLS 1.2, the explicit part of the first nonce. In TLS 1.3, the last eight bytes of the
    /// IV.
    pub iv: [u8; 8],
}

impl Keys {
    /// Returns keys for TLS 1.3, starting with sequence number 0.
    #[must_use]
    pub fn new(number: u8) -> Self {
        Self {
            version: Version::V1_3,
            number,
            sequence: 0,
            iv: [number; 8],
        }
    }

    /// Returns four bytes of salt followed by `iv`. In TLS 1.2 this is the first nonce, in TLS 1.3
    /// the write IV.
    fn nonce(&self) -> [u8; 12] {
        let mut nonce = [self.number; 12];
        nonce[4..].copy_from_slice(&self.iv);
        nonce
    }
}

/// Returns the two ends of a TCP connection over the loopback.
///
/// # Panics
/// The loopback is down.
#[must_use]
pub fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let address = listener.local_addr().expect("the listener is bound");
    let near = TcpStream::connect(address).expect("the listener is open");
    let (far, _) = listener.accept().expect("a connection is pending");
    (near, far)
}

/// Returns a socket with keys in the kernel, and a peer with the same keys in this process.
#[must_use]
pub fn kernel_and_peer(seals: Keys, opens: Keys) -> (TcpStream, Peer) {
    let (kernel, far) = connected();
    install(&kernel, &seals, &opens);
    let peer = Peer {
        socket: far,
        seals: Half::new(&opens),
        opens: Half::new(&seals),
    };
    (kernel, peer)
}

/// Returns two connected sockets with keys in the kernel, for TLS 1.3.
#[must_use]
pub fn kernels() -> (TcpStream, TcpStream) {
    let (near, far) = connected();
    install(&near, &Keys::new(1), &Keys::new(2));
    install(&far, &Keys::new(2), &Keys::new(1));
    (near, far)
}

/// Installs keys for both directions in the kernel.
///
/// # Panics
/// The kernel rejects a key.
pub fn install(socket: &TcpStream, seals: &Keys, opens: &Keys) {
    ktls::attach(socket).expect("the kernel has TLS");
    set(socket, Direction::Sending, seals).expect("the kernel accepts the sending key");
    set(socket, Direction::Receiving, opens).expect("the kernel accepts the receiving key");
}

/// Installs the keys of one direction in the kernel.
///
/// # Errors
/// An error from setsockopt(2).
pub fn set(socket: &TcpStream, direction: Direction, keys: &Keys) -> Result<(), Errno> {
    let key = Key {
        version: keys.version,
        cipher: Cipher::Aes256Gcm,
        key: &[keys.number; 32],
        nonce: keys.nonce(),
        sequence: keys.sequence,
    };
    ktls::install(socket, direction, &key).map_err(errno)
}

/// Receives on a socket with kernel TLS. Returns the content type and the number of bytes.
///
/// # Errors
/// An error from recvmsg(2).
pub fn receive(socket: &TcpStream, buffer: &mut [u8]) -> Result<(u8, usize), Errno> {
    let received = ktls::receive(socket, buffer).map_err(errno)?;
    Ok((received.control.unwrap_or(DATA), received.bytes))
}

/// Returns the number of a system call's error.
///
/// # Panics
/// The error is not from a system call.
#[must_use]
pub fn errno(error: io::Error) -> Errno {
    Errno::from_raw(
        error
            .raw_os_error()
            .expect("the error is from a system call"),
    )
}

/// Whether poll(2) reports the socket as readable.
///
/// # Panics
/// poll(2) fails.
#[must_use]
pub fn readable(socket: &TcpStream) -> bool {
    let interest = Interest {
        fd: socket.as_fd(),
        read: true,
        write: false,
    };
    poll(&[interest], Some(Duration::ZERO)).expect("the socket can be polled")[0]
}

/// Waits until the socket's receive queue holds this number of bytes, counted as encrypted bytes on
/// the wire.
///
/// # Panics
/// The bytes do not arrive within the limit.
pub fn await_bytes(socket: &TcpStream, bytes: usize) {
    let begun = Instant::now();
    while unread_bytes(socket).expect("the descriptor is a socket") < bytes as u64 {
        assert!(begun.elapsed() < TIMEOUT, "{bytes} bytes did not arrive");
        std::thread::yield_now();
    }
}

/// Returns a counter of kernel TLS in this network namespace.
#[must_use]
pub fn stat(guest: &Guest, name: &str) -> u64 {
    guest.counter("/proc/net/tls_stat", name)
}

/// Whether this kernel accepts a new key for a socket that already has a key. Such a kernel has
/// counters for new keys.
///
/// # Panics
/// The kernel has no TLS.
#[must_use]
pub fn renews_keys(guest: &Guest) -> bool {
    guest.command("modprobe", &["tls"]);
    let counters = fs::read_to_string("/proc/net/tls_stat").expect("the module is loaded");
    counters.contains("TlsTxRekeyOk")
}

/// A socket. This process encrypts and decrypts its records.
#[derive(Debug)]
pub struct Peer {
    /// The connection.
    pub socket: TcpStream,
    /// The half that encrypts records to send.
    pub seals: Half,
    /// The half that decrypts received records.
    pub opens: Half,
}

impl Peer {
    /// Sends one record.
    ///
    /// # Panics
    /// The connection is broken.
    pub fn send(&mut self, kind: u8, content: &[u8]) {
        use std::io::Write;
        let record = self.seals.seal(kind, content);
        self.socket.write_all(&record).expect("the data is sent");
    }

    /// Receives the next record. Returns `None` at the end of the stream.
    ///
    /// # Panics
    /// The connection is broken, or the record is not encrypted with the expected keys and sequence
    /// number.
    pub fn receive(&mut self) -> Option<(u8, Vec<u8>)> {
        let record = read_record(&mut self.socket).expect("the connection is open")?;
        let opened = self.opens.open(&record);
        Some(opened.expect("the record has the expected keys and number"))
    }

    /// Receives all data until the end of the stream. Returns the data, and the content length of
    /// each record.
    ///
    /// # Panics
    /// As for [`Peer::receive`], or a record does not contain application data.
    pub fn receive_all(&mut self) -> (Vec<u8>, Vec<usize>) {
        let (mut data, mut sizes) = (Vec::new(), Vec::new());
        while let Some((kind, content)) = self.receive() {
            assert_eq!(kind, DATA);
            sizes.push(content.len());
            data.extend(content);
        }
        (data, sizes)
    }
}

/// Reads the next record in its encrypted form. Returns `None` at the end of the stream.
///
/// # Errors
/// An error from read(2), or the stream ends within a record.
pub fn read_record(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut record = vec![0; HEADER];
    if from.read(&mut record[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut record[1..])?;
    let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
    record.resize(HEADER + length, 0);
    from.read_exact(&mut record[HEADER..])?;
    Ok(Some(record))
}

/// Returns the explicit part of the nonce of a TLS 1.2 record.
#[must_use]
pub fn explicit_nonce(record: &[u8]) -> [u8; 8] {
    record[HEADER..HEADER + 8]
        .try_into()
        .expect("the nonce has eight bytes")
}

/// Encrypts or decrypts the records of one direction.
#[derive(Debug)]
pub struct Half {
    key: LessSafeKey,
    keys: Keys,
}

impl Half {
    /// Creates a half. Its next record is the first record of `keys`.
    ///
    /// # Panics
    /// Never: a key of 32 bytes is valid.
    #[must_use]
    pub fn new(keys: &Keys) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, &[keys.number; 32]).expect("the key has 32 bytes");
        Self {
            key: LessSafeKey::new(key),
            keys: *keys,
        }
    }

    /// Encrypts `content` as the next record.
    ///
    /// # Panics
    /// Never for content of up to 16 KiB.
    pub fn seal(&mut self, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut sealed = content.to_vec();
        let (shown, outer, length) = match self.keys.version {
            Version::V1_2 => (self.shown().to_vec(), kind, content.len()),
            Version::V1_3 => {
                sealed.push(kind);
                (Vec::new(), DATA, content.len() + 1 + TAG)
            }
        };
        let aad = self.aad(outer, length);
        let nonce = self.nonce(&shown);
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(aad), &mut sealed)
            .expect("the content is short enough");
        self.keys.sequence = self.keys.sequence.wrapping_add(1);
        let body = shown.len() + sealed.len();
        let mut record = vec![outer, 3, 3, (body >> 8) as u8, body as u8];
        record.extend(shown);
        record.extend(sealed);
        record
    }

    /// Encrypts the next record of TLS 1.3 application data in place. In the buffer, [`HEADER`]
    /// bytes for the header precede the content, and 17 bytes for the content type and the tag
    /// follow it.
    ///
    /// # Panics
    /// The buffer is too short for the header, the content type and the tag.
    pub fn seal_in_place(&mut self, record: &mut [u8]) {
        let length = record.len() - HEADER;
        let (header, body) = record.split_at_mut(HEADER);
        let (content, tag) = body.split_at_mut(length - TAG);
        content[length - TAG - 1] = DATA;
        let aad = self.aad(DATA, length);
        header.copy_from_slice(&aad);
        let sealed = self
            .key
            .seal_in_place_separate_tag(self.nonce(&[]), Aad::from(aad), content)
            .expect("the content is short enough");
        tag.copy_from_slice(sealed.as_ref());
        self.keys.sequence = self.keys.sequence.wrapping_add(1);
    }

    /// Decrypts a record. Returns its type and content, or `None` if it is not the next record of
    /// this direction.
    pub fn open(&mut self, record: &[u8]) -> Option<(u8, Vec<u8>)> {
        let (header, body) = record.split_at_checked(HEADER)?;
        let (shown, sealed, length) = match self.keys.version {
            Version::V1_2 => {
                let (shown, sealed) = body.split_at_checked(8)?;
                (shown, sealed, sealed.len().checked_sub(TAG)?)
            }
            Version::V1_3 => (&[][..], body, body.len()),
        };
        let aad = self.aad(header[0], length);
        let mut opened = sealed.to_vec();
        let content = self
            .key
            .open_in_place(self.nonce(shown), Aad::from(aad), &mut opened)
            .ok()?;
        let content = match self.keys.version {
            Version::V1_2 => (header[0], content.to_vec()),
            Version::V1_3 => {
                let end = content.iter().rposition(|byte| *byte != 0)?;
                (content[end], content[..end].to_vec())
            }
        };
        self.keys.sequence = self.keys.sequence.wrapping_add(1);
        Some(content)
    }

    /// Returns the explicit part of the nonce. In TLS 1.2, a sender may choose any value that it
    /// has not used before; this one uses the sequence number.
    fn shown(&self) -> [u8; 8] {
        self.keys.sequence.to_be_bytes()
    }

    fn nonce(&self, shown: &[u8]) -> Nonce {
        let mut nonce = self.keys.nonce();
        if self.keys.version == Version::V1_2 {
            nonce[4..].copy_from_slice(shown);
        } else {
            for (byte, of_sequence) in nonce[4..].iter_mut().zip(self.keys.sequence.to_be_bytes()) {
                *byte ^= of_sequence;
            }
        }
        Nonce::assume_unique_for_key(nonce)
    }

    /// Returns the additional authenticated data of a record.
    fn aad(&self, kind: u8, length: usize) -> Vec<u8> {
        let mut aad = Vec::new();
        if self.keys.version == Version::V1_2 {
            aad.extend(self.keys.sequence.to_be_bytes());
        }
        aad.extend([kind, 3, 3, (length >> 8) as u8, length as u8]);
        aad
    }
}

/// Creates a file in memory with this content, and removes the file's name.
///
/// # Panics
/// /dev/shm cannot be written.
#[must_use]
pub fn file(content: &[u8]) -> fs::File {
    use std::io::{Seek, Write};
    let path = format!("/dev/shm/content-{}", std::process::id());
    let mut file = fs::File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .expect("/dev/shm can be written");
    fs::remove_file(&path).expect("the file exists");
    file.write_all(content).expect("there is room");
    file.rewind().expect("the descriptor is a file");
    file
}

/// Creates a pipe with a capacity of 1 MiB. Returns the reading end and the writing end.
///
/// # Panics
/// No file descriptors are available.
#[must_use]
pub fn pipe() -> (OwnedFd, OwnedFd) {
    use nix::fcntl::{FcntlArg, fcntl};
    let (from, to) = io::pipe().expect("descriptors are left");
    fcntl(&to, FcntlArg::F_SETPIPE_SZ(1 << 20)).expect("a pipe may hold a mebibyte");
    (from.into(), to.into())
}
