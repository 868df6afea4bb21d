//! An NBD session through a stunnel works over a passed socket with kernel TLS.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::process::{Command, ExitCode, Stdio};

use dunlin_kernel_tests::handoff::{
    Background, certificate, connect, stunnel_to, wait_for_listener,
};
use dunlin_kernel_tests::{Needs, run};
use dunlin_test_base::pattern;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl", "nbdkit"],
    dunlin: true,
    limit_seconds: 240,
    ..Needs::NOTHING
};
/// The size of a block, in bytes. It is not a multiple of a record's size.
const BLOCK: usize = 300 << 10;
const BLOCKS: usize = 24;

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        certificate(guest, "pool");
        certificate(guest, "other");
        let server = Command::new("nbdkit")
            .args("-f -i 127.0.0.1 -p 10809 memory 16M".split(' '))
            .stdin(Stdio::null())
            .spawn()
            .expect("nbdkit starts");
        let _server = Background(server);
        wait_for_listener(10809);
        let target = "127.0.0.1:10809".parse().expect("an address");
        let _stunnel = stunnel_to(guest, 4443, target, "");
        let mut called = connect(4443, &["--cert-bundle-file", "pool.pem"]);
        let socket = called.sockets.pop().unwrap_or_else(|| panic!("{called:?}"));
        let mut disk = Disk::open(socket.into()).expect("the parameters are negotiated");
        assert_eq!(disk.bytes, 16 << 20);
        let content = |number: usize| pattern(BLOCK, number as u64 + 1);
        for number in 0..BLOCKS {
            let at = (number * BLOCK) as u64;
            disk.write(at, &content(number))
                .expect("the data is written");
        }
        for number in (0..BLOCKS).rev() {
            let at = (number * BLOCK) as u64;
            let read = disk.read(at, BLOCK).expect("the data is read");
            assert!(read == content(number), "block {number} differs");
        }
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsTxSw"), 1);
        assert_eq!(guest.counter("/proc/net/tls_stat", "TlsDecryptError"), 0);
    })
}

/// A disk that a server at the other end of the socket exports (the NBD protocol, doc/proto.md of
/// the NBD project). This client waits for the reply to each request.
struct Disk {
    socket: TcpStream,
    bytes: u64,
    next: u64,
}

impl Disk {
    fn open(mut socket: TcpStream) -> io::Result<Self> {
        // The server sends first: two magic numbers, and then its flags.
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Reply with the flags for fixed newstyle without padding, and with option 1, which selects
        // the export without a name.
        let mut words = Vec::new();
        words.extend(3_u32.to_be_bytes());
        words.extend(b"IHAVEOPT");
        words.extend(1_u32.to_be_bytes());
        words.extend(0_u32.to_be_bytes());
        socket.write_all(&words)?;
        let mut export = [0; 10];
        socket.read_exact(&mut export)?;
        let bytes = u64::from_be_bytes(export[..8].try_into().expect("eight of ten"));
        Ok(Self {
            socket,
            bytes,
            next: 0,
        })
    }

    fn request(&mut self, kind: u16, at: u64, bytes: usize, data: &[u8]) -> io::Result<()> {
        self.next += 1;
        let mut request = Vec::with_capacity(28 + data.len());
        request.extend(0x2560_9513_u32.to_be_bytes());
        request.extend(0_u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(self.next.to_be_bytes());
        request.extend(at.to_be_bytes());
        request.extend((bytes as u32).to_be_bytes());
        request.extend(data);
        self.socket.write_all(&request)?;
        let mut reply = [0; 16];
        self.socket.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(reply[4..8], [0; 4], "the server returned an error");
        assert_eq!(reply[8..], self.next.to_be_bytes());
        Ok(())
    }

    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.request(1, at, data.len(), data)
    }

    fn read(&mut self, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
        self.request(0, at, bytes, &[])?;
        let mut data = vec![0; bytes];
        self.socket.read_exact(&mut data)?;
        Ok(data)
    }
}
