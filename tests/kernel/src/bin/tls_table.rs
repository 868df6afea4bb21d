//! sendfile(2) with kernel TLS takes fewer instructions than sealing a file in the process.
//! The test counts the system calls and the instructions of nine ways to send a file.

use std::fs::{self, File};
use std::io::{IoSlice, Read, Seek, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;

use dunlin_kernel_tests::counting::Count;
use dunlin_kernel_tests::tls::{HEADER, Half, Keys, Peer, RECORD, connected, file, install, pipe};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::vectored;
use dunlin_test_base::pattern;
use nix::fcntl::{SpliceFFlags, splice, vmsplice};
use nix::libc;
use nix::sys::sendfile::sendfile;
use nix::sys::socket::{MsgFlags, recv};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

const MIB: usize = 1 << 20;
/// The amount of data that one measurement sends, in MiB.
const MIBS: usize = 4;
const BYTES: usize = MIBS * MIB;

/// The length of a full record on the wire in bytes, and the number of records per MiB.
const SEALED: usize = HEADER + RECORD + 1 + 16;
const RECORDS: usize = MIB / RECORD;

/// The module with AES-GCM that uses the processor's instructions. An installed system loads it
/// when it starts.
const MODULE: &str = "aesni_intel";

/// System calls that move the file's bytes, by their numbers on x86-64.
const MOVING: [u32; 9] = [
    libc::SYS_read as u32,
    libc::SYS_write as u32,
    libc::SYS_readv as u32,
    libc::SYS_writev as u32,
    libc::SYS_sendto as u32,
    libc::SYS_sendmsg as u32,
    libc::SYS_sendfile as u32,
    libc::SYS_splice as u32,
    libc::SYS_vmsplice as u32,
];

type Way = (&'static str, Sealed, fn(&mut Sender));

/// Where the sender's records are sealed. With `Nowhere`, the data is sent in the clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sealed {
    Nowhere,
    InProcess,
    InKernel,
}

const WAYS: [Way; 9] = [
    (
        "in the clear: mmap, write 1 MiB",
        Sealed::Nowhere,
        Sender::map_send,
    ),
    ("in the clear: sendfile", Sealed::Nowhere, Sender::sendfile),
    (
        "process: read, seal, write 16 KiB",
        Sealed::InProcess,
        Sender::read_seal_write,
    ),
    (
        "process: mmap, seal, write 1 MiB",
        Sealed::InProcess,
        Sender::map_seal_write,
    ),
    (
        "process: mmap, seal, vmsplice, splice",
        Sealed::InProcess,
        Sender::map_seal_vmsplice,
    ),
    (
        "kernel: read, write 16 KiB",
        Sealed::InKernel,
        Sender::read_write,
    ),
    (
        "kernel: mmap, send 1 MiB",
        Sealed::InKernel,
        Sender::map_send,
    ),
    ("kernel: sendfile", Sealed::InKernel, Sender::sendfile),
    (
        "kernel: splice, splice",
        Sealed::InKernel,
        Sender::splice_splice,
    ),
];

fn main() -> ExitCode {
    let needs = Needs {
        limit_seconds: 300,
        ..Needs::NOTHING
    };
    run(&needs, |guest| {
        {
            let _unloaded = guest.without_module(MODULE);
            let _unasked = guest.without_loader();
            // Even without the module, some kernels have a cipher in their library or in generic
            // modules.
            let crypto = fs::read_to_string("/proc/crypto").expect("proc is mounted");
            let gcm = |line: &str| {
                line.split_once(": ")
                    .is_some_and(|(_, of)| of == "gcm(aes)")
            };
            if crypto.lines().any(gcm) {
                cost(
                    guest,
                    (
                        "kernel: sendfile, a cipher without the processor's instructions",
                        Sealed::InKernel,
                        Sender::sendfile,
                    ),
                );
            }
        }
        guest.command("modprobe", &[MODULE]);
        for way in WAYS {
            arrives(way);
        }
        let costs = WAYS.map(|way| cost(guest, way));
        let calls = costs.each_ref().map(|cost| cost.0);
        let [
            ..,
            read_seal,
            map_seal,
            spliced,
            read,
            mapped,
            sent,
            splices,
        ] = calls;
        // A send that has to wait may return early, so that another call is needed.
        let takes = |calls: f64, least: f64, most: f64| {
            assert!(
                (least..=most).contains(&calls),
                "{calls} calls, not {least} to {most}"
            );
        };
        takes(read_seal, 128.0, 130.0);
        takes(read, 128.0, 130.0);
        takes(map_seal, 1.0, 2.0);
        takes(mapped, 1.0, 2.0);
        takes(sent, 0.25, 1.0);
        takes(splices, 2.0, 4.0);
        takes(spliced, 4.0, 8.0);
        if let [.., Some(of_process), _, _, _, _, Some(of_sendfile), _] = costs.map(|cost| cost.1) {
            assert!(
                of_sendfile < of_process,
                "{of_sendfile} and {of_process} instructions"
            );
        }
    })
}

/// Asserts that the received bytes equal the bytes that were sent. Does not check data that is sent
/// in the clear.
fn arrives((what, sealed, send): Way) {
    let (mut sender, far) = Sender::new(sealed);
    if sealed == Sealed::Nowhere {
        return;
    }
    let mut peer = Peer {
        socket: far,
        seals: Half::new(&Keys::new(2)),
        opens: Half::new(&Keys::new(1)),
    };
    let receiver = thread::spawn(move || peer.receive_all());
    send(&mut sender);
    sender
        .socket
        .shutdown(Shutdown::Write)
        .expect("the socket is open");
    let (data, sizes) = receiver.join().expect("every record is authentic");
    assert!(data == pattern(BYTES, 1), "{what}");
    assert_eq!(sizes.len(), MIBS * RECORDS, "{what}");
}

/// Returns two numbers for each MiB: the system calls, and the instructions in thousands. The
/// receiver discards the bytes without reading them, at a cost that does not depend on the sender.
fn cost(guest: &Guest, (what, sealed, send): Way) -> (f64, Option<u64>) {
    let (mut sender, far) = Sender::new(sealed);
    let (arrived, arrivals) = mpsc::channel();
    let receiver = thread::spawn(move || {
        let mib = match sealed {
            Sealed::Nowhere => MIB,
            Sealed::InProcess | Sealed::InKernel => RECORDS * SEALED,
        };
        let mut unused = vec![0; MIBS * mib];
        let flags = MsgFlags::MSG_WAITALL | MsgFlags::MSG_TRUNC;
        while let Ok(dropped @ 1..) = recv(far.as_raw_fd(), &mut unused, flags) {
            assert_eq!(dropped, unused.len());
            arrived.send(()).expect("the sender waits");
        }
    });
    let mut all = || {
        send(&mut sender);
        arrivals.recv().expect("the data arrives");
    };
    // The first run includes work that is done only once, so do not count it.
    all();
    let Count {
        instructions,
        system_calls,
        ..
    } = guest.count(what, all);
    drop(sender);
    receiver.join().expect("the receiver does not panic");
    let calls: u64 = MOVING
        .iter()
        .filter_map(|call| system_calls.get(call))
        .sum();
    let calls = calls as f64 / MIBS as f64;
    let thousands = instructions.map(|count| {
        [count.count, count.error].map(|number| (number / 1000.0 / MIBS as f64).round() as u64)
    });
    match thousands {
        Some([count, error]) => println!(
            "count of a MiB, {what}: {calls} system calls, {count} ± {error} thousand instructions"
        ),
        None => println!("count of a MiB, {what}: {calls} system calls"),
    }
    let thousands = thousands.map(|[count, _]| count);
    (calls, thousands)
}

/// A sender that sends the same file repeatedly.
struct Sender {
    socket: TcpStream,
    file: File,
    mapped: MmapRegion,
    pipe: (OwnedFd, OwnedFd),
    seals: Half,
    /// The records of each MiB. There is one buffer for each MiB, because memory that is passed to
    /// vmsplice must not change until its data has arrived.
    records: [Vec<u8>; MIBS],
}

impl Sender {
    fn new(sealed: Sealed) -> (Self, TcpStream) {
        let (socket, far) = connected();
        if sealed == Sealed::InKernel {
            install(&socket, &Keys::new(1), &Keys::new(2));
        }
        let file = file(&pattern(BYTES, 1));
        let twin = file.try_clone().expect("there are descriptors");
        let mapped =
            MmapRegion::from_file(FileOffset::new(twin, 0), BYTES).expect("the memory is mapped");
        let sender = Self {
            socket,
            file,
            mapped,
            pipe: pipe(),
            seals: Half::new(&Keys::new(1)),
            records: std::array::from_fn(|_| vec![0; RECORDS * SEALED]),
        };
        (sender, far)
    }

    fn read_seal_write(&mut self) {
        self.file.rewind().expect("the descriptor is a file");
        let record = &mut self.records[0][..SEALED];
        for _ in 0..BYTES / RECORD {
            let content = &mut record[HEADER..HEADER + RECORD];
            self.file
                .read_exact(content)
                .expect("the file is long enough");
            self.seals.seal_in_place(record);
            self.socket.write_all(record).expect("the data is sent");
        }
    }

    fn seal_mapped(&mut self, mib: usize) {
        for (at, record) in self.records[mib].chunks_mut(SEALED).enumerate() {
            let content = self.mapped.as_volatile_slice();
            let content = content.subslice(mib * MIB + at * RECORD, RECORD);
            let content = content.expect("the range is inside the memory");
            content.copy_to(&mut record[HEADER..HEADER + RECORD]);
            self.seals.seal_in_place(record);
        }
    }

    fn map_seal_write(&mut self) {
        for mib in 0..MIBS {
            self.seal_mapped(mib);
            self.socket
                .write_all(&self.records[mib])
                .expect("the data is sent");
        }
    }

    fn map_seal_vmsplice(&mut self) {
        for mib in 0..MIBS {
            self.seal_mapped(mib);
            let mut rest = &self.records[mib][..];
            while !rest.is_empty() {
                let parts = [IoSlice::new(rest)];
                let held = vmsplice(&self.pipe.1, &parts, SpliceFFlags::empty());
                let held = held.expect("the data is accepted");
                self.empty_pipe(held);
                rest = &rest[held..];
            }
        }
    }

    fn read_write(&mut self) {
        self.file.rewind().expect("the descriptor is a file");
        let content = &mut self.records[0][..RECORD];
        for _ in 0..BYTES / RECORD {
            self.file
                .read_exact(content)
                .expect("the file is long enough");
            self.socket.write_all(content).expect("the data is sent");
        }
    }

    fn map_send(&mut self) {
        for mib in 0..MIBS {
            let content = self.mapped.as_volatile_slice();
            let mut content = content
                .subslice(mib * MIB, MIB)
                .expect("the range is inside the memory");
            while !content.is_empty() {
                let sent = vectored::send(&self.socket, &[content]).expect("the data is sent");
                content = content
                    .offset(sent)
                    .expect("the range is inside the memory");
            }
        }
    }

    fn sendfile(&mut self) {
        let mut at = 0;
        while at < BYTES as i64 {
            let rest = BYTES - at as usize;
            sendfile(&self.socket, &self.file, Some(&mut at), rest).expect("the data is sent");
        }
    }

    fn splice_splice(&mut self) {
        let mut at = 0;
        while at < BYTES as i64 {
            let flags = SpliceFFlags::empty();
            let held = splice(&self.file, Some(&mut at), &self.pipe.1, None, MIB, flags);
            self.empty_pipe(held.expect("the data is read"));
        }
    }

    fn empty_pipe(&self, mut held: usize) {
        while held > 0 {
            let flags = SpliceFFlags::empty();
            held -= splice(&self.pipe.0, None, &self.socket, None, held, flags)
                .expect("the data is sent");
        }
    }
}
