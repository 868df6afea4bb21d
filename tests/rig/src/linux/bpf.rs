//! Programs that the kernel runs on what a socket receives or sends (bpf(2)), put together by hand:
//! a few instructions each, for which no compiler is needed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE: libc::c_int = 2;
const PROGRAM_LOAD: libc::c_int = 5;
const PROGRAM_ATTACH: libc::c_int = 8;
const SOCKET_MAP: u32 = 15;

/// What a program is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Bytes that were received, for whoever asks (`BPF_PROG_TYPE_SOCKET_FILTER`).
    Filter = 1,
    /// What the sockets of a map receive (`BPF_PROG_TYPE_SK_SKB`).
    Received = 14,
    /// What the sockets of a map are given to send (`BPF_PROG_TYPE_SK_MSG`).
    Sent = 16,
}

/// What a program does for the sockets of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Task {
    /// Says where a message ends (`BPF_SK_SKB_STREAM_PARSER`).
    Parse = 4,
    /// Says where a message goes (`BPF_SK_SKB_STREAM_VERDICT`).
    Judge = 5,
    /// Says where what is sent goes (`BPF_SK_MSG_VERDICT`).
    JudgeSent = 7,
}

/// One instruction (the kernel's Documentation/bpf/standardization/instruction-set.rst).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Instruction {
    code: u8,
    /// The destination in the lower half, the source in the upper.
    registers: u8,
    offset: i16,
    value: i32,
}

const fn instruction(code: u8, to: u8, from: u8, value: i32) -> Instruction {
    Instruction {
        code,
        registers: to | from << 4,
        offset: 0,
        value,
    }
}

const EXIT: Instruction = instruction(0x95, 0, 0, 0);

/// Messages begin with the length of their rest, four bytes in network order: answers with the
/// whole length, or 0 where those bytes have not all come.
#[must_use]
pub fn length_prefix() -> Vec<Instruction> {
    vec![
        // r6 = r1, from where the next one loads.
        instruction(0xbf, 6, 1, 0),
        // r0 = the first four bytes. Where there are fewer, the program ends with 0.
        instruction(0x20, 0, 0, 0),
        // r0 += 4
        instruction(0x07, 0, 0, 4),
        EXIT,
    ]
}

/// Every message is of so many bytes.
#[must_use]
pub fn of_one_size(bytes: i32) -> Vec<Instruction> {
    // r0 = so many.
    vec![instruction(0xb7, 0, 0, bytes), EXIT]
}

/// Whatever has come is a message.
#[must_use]
pub fn whatever_has_come() -> Vec<Instruction> {
    // r0 = the first field of what r1 leads to, the length.
    vec![instruction(0x61, 0, 1, 0), EXIT]
}

/// Everything goes to the socket at `index` of the map, to be sent there.
#[must_use]
pub fn redirect(kind: Kind, map: &SocketMap, index: u32) -> Vec<Instruction> {
    let helper = match kind {
        Kind::Sent => 60,
        Kind::Filter | Kind::Received => 52,
    };
    vec![
        // r2 = the map, in two instructions.
        instruction(0x18, 2, 1, map.0.as_raw_fd()),
        instruction(0, 0, 0, 0),
        instruction(0xb7, 3, 0, index.cast_signed()),
        instruction(0xb7, 4, 0, 0),
        instruction(0x85, 0, 0, helper),
        EXIT,
    ]
}

/// Gives the kernel a program.
///
/// # Errors
/// What bpf(2) says.
pub fn load(kind: Kind, program: &[Instruction]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
    }
    let mut request = Load {
        kind: kind as u32,
        count: program.len() as u32,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
    };
    // SAFETY: the request is the head of `union bpf_attr` for this command and has no padding; its
    // addresses are those of `count` instructions and of a text that ends with a zero byte, which
    // live through the call and are only read.
    unsafe { descriptor(PROGRAM_LOAD, &mut request) }
}

/// Sockets that programs can name (`BPF_MAP_TYPE_SOCKMAP`).
#[derive(Debug)]
pub struct SocketMap(OwnedFd);

impl SocketMap {
    /// With room for so many.
    ///
    /// # Errors
    /// What bpf(2) says.
    pub fn new(sockets: u32) -> io::Result<Self> {
        // Type, bytes of a key, bytes of a value, entries.
        let mut request = [SOCKET_MAP, 4, 4, sockets];
        // SAFETY: the request is the head of `union bpf_attr` for this command, and has no pointers.
        unsafe { descriptor(MAP_CREATE, &mut request) }.map(Self)
    }

    /// Puts a socket into the map, with the programs that the map has by then.
    ///
    /// # Errors
    /// What bpf(2) says.
    pub fn put(&self, index: u32, socket: impl AsFd) -> io::Result<()> {
        #[repr(C)]
        struct Update {
            map: u32,
            padding: u32,
            key: u64,
            value: u64,
            flags: u64,
        }
        let socket = socket.as_fd().as_raw_fd();
        let mut request = Update {
            map: self.0.as_raw_fd().cast_unsigned(),
            padding: 0,
            key: &raw const index as u64,
            value: &raw const socket as u64,
            flags: 0,
        };
        // SAFETY: the request is the head of `union bpf_attr` for this command; its addresses are
        // those of the four bytes each that the map was made for, which live through the call and
        // are only read.
        unsafe { call(MAP_UPDATE, &mut request) }.map(drop)
    }

    /// Gives the map a program, for the sockets that come into it afterwards.
    ///
    /// # Errors
    /// What bpf(2) says.
    pub fn attach(&self, task: Task, program: impl AsFd) -> io::Result<()> {
        let mut request = [
            self.0.as_raw_fd().cast_unsigned(),
            program.as_fd().as_raw_fd().cast_unsigned(),
            task as u32,
            0,
        ];
        // SAFETY: the request is the head of `union bpf_attr` for this command, and has no pointers.
        unsafe { call(PROGRAM_ATTACH, &mut request) }.map(drop)
    }
}

/// As [`call`], for a command that answers with a new descriptor.
///
/// # Safety
/// As [`call`].
unsafe fn descriptor<T>(command: libc::c_int, request: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's.
    let made = unsafe { call(command, request) }?;
    // SAFETY: the kernel has just made it, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

/// # Safety
/// The request is a beginning of `union bpf_attr` as `command` wants it, initialised throughout,
/// and what it points to is as `command` wants it and lives through the call.
unsafe fn call<T>(command: libc::c_int, request: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the caller vouches for the request; its true size is passed with it, beyond which
    // the kernel reads nothing.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *request, size_of::<T>()) };
    match libc::c_int::try_from(answer) {
        Ok(answer) if answer >= 0 => Ok(answer),
        _ => Err(io::Error::last_os_error()),
    }
}
