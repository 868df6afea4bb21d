//! What an attacker that controls a confined process can call: system calls that ptrace(2) injects
//! into confined commands, and their expected results.
//!
//! `src/confine/tests.rs` applies the same confinement to a test program. Here the commands
//! themselves run, so the tests also notice a command that forgets to confine itself.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

#[path = "support/accept.rs"]
mod accept;
#[path = "support/status.rs"]
mod status;
mod support;
#[path = "support/tunnel.rs"]
mod tunnel;

use std::fs;
use std::io::IoSlice;
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use dunlin_linux::socket::own_user;
use dunlin_test_base::Scratch;
use dunlin_test_base::sockets::TIMEOUT;
use libc::{c_long, user_regs_struct};
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use support::{Hosts, Process, finish, words};

/// The instruction `syscall`.
const SYSCALL: c_long = 0x050f;

/// Size of the area below a thread's stack pointer that its code may use.
const RED_ZONE: u64 = 128;

/// The main thread of a confined process, which is stopped while it waits in a system call.
struct Captive {
    pid: Pid,
    registers: user_regs_struct,
}

impl Captive {
    fn of(pid: u32) -> Self {
        let pid = Pid::from_raw(pid.cast_signed());
        ptrace::seize(pid, Options::empty()).unwrap();
        let until = Instant::now() + TIMEOUT;
        loop {
            ptrace::interrupt(pid).unwrap();
            stopped(pid);
            let registers = ptrace::getregs(pid).unwrap();
            let before = (registers.rip - 2) as ptrace::AddressType;
            if ptrace::read(pid, before).unwrap() & 0xffff == SYSCALL {
                return Self { pid, registers };
            }
            assert!(Instant::now() < until, "the thread makes no system calls");
            ptrace::cont(pid, None).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Makes the process call the kernel; returns the result.
    fn call<const N: usize>(&self, number: c_long, arguments: [u64; N]) -> Result<u64, Errno> {
        let mut all = [0; 6];
        all[..N].copy_from_slice(&arguments);
        let registers = user_regs_struct {
            rip: self.registers.rip - 2,
            rax: number.cast_unsigned(),
            // The kernel must not restart the interrupted call now.
            orig_rax: u64::MAX,
            rdi: all[0],
            rsi: all[1],
            rdx: all[2],
            r10: all[3],
            r8: all[4],
            r9: all[5],
            ..self.registers
        };
        ptrace::setregs(self.pid, registers).unwrap();
        ptrace::step(self.pid, None).unwrap();
        stopped(self.pid);
        let result = ptrace::getregs(self.pid).unwrap().rax.cast_signed();
        match result {
            -4095..0 => Err(Errno::from_raw(-i32::try_from(result).unwrap())),
            _ => Ok(result.cast_unsigned()),
        }
    }

    /// Writes bytes into the memory of the process, where the next call of this function
    /// overwrites them; returns their address.
    fn put(&self, bytes: &[u8]) -> u64 {
        let base = (self.registers.rsp - RED_ZONE - 4096) & !15;
        let there = [RemoteIoVec {
            base: usize::try_from(base).unwrap(),
            len: bytes.len(),
        }];
        let written = process_vm_writev(self.pid, &[IoSlice::new(bytes)], &there);
        assert_eq!(written, Ok(bytes.len()));
        base
    }

    fn put_path(&self, path: &Path) -> u64 {
        self.put(format!("{}\0", path.display()).as_bytes())
    }

    fn socket(&self, domain: i32, kind: i32, protocol: i32) -> Result<u64, Errno> {
        let arguments = [domain, kind, protocol].map(|one| u64::try_from(one).unwrap());
        self.call(libc::SYS_socket, arguments)
    }

    fn open(&self, path: &Path, flags: i32) -> Result<u64, Errno> {
        let path = self.put_path(path);
        let here = i64::from(libc::AT_FDCWD).cast_unsigned();
        let flags = u64::try_from(flags).unwrap();
        self.call(libc::SYS_openat, [here, path, flags, 0o600])
    }

    /// Listens on a TCP socket without an address, for which the kernel chooses a port.
    fn listen(&self) -> Result<u64, Errno> {
        let socket = self.socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        self.call(libc::SYS_listen, [socket, 1])
    }

    /// Binds a TCP socket to a free port of the loopback interface.
    fn bind(&self) -> Result<u64, Errno> {
        let socket = self.socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        let mut address = [0; 16];
        address[0] = 2;
        address[4..8].copy_from_slice(&[127, 0, 0, 1]);
        let at = self.put(&address);
        self.call(libc::SYS_bind, [socket, at, 16])
    }

    /// Creates a file in memory (memfd_create(2)), writes code into it, and maps it as executable.
    fn run_code(&self) -> Result<u64, Errno> {
        let name = self.put(b"code\0");
        let file = self.call(libc::SYS_memfd_create, [name, 0])?;
        let code = self.put(&[0xc3; 64]);
        self.call(libc::SYS_write, [file, code, 64]).unwrap();
        let access = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        let private = libc::MAP_PRIVATE as u64;
        self.call(libc::SYS_mmap, [0, 4096, access, private, file, 0])
    }
}

impl Drop for Captive {
    fn drop(&mut self) {
        // When the process has its old registers again, the kernel restarts the interrupted call.
        let _ = ptrace::setregs(self.pid, self.registers);
        let _ = ptrace::detach(self.pid, None);
    }
}

fn stopped(pid: Pid) {
    match waitpid(pid, None).unwrap() {
        WaitStatus::Stopped(..) | WaitStatus::PtraceEvent(..) => {}
        other => panic!("the process has not stopped: {other:?}"),
    }
}

/// Files outside the directories of a confined process: `read` and `removed`.
fn foreign() -> Scratch {
    let scratch = Scratch::new();
    for name in ["read", "removed"] {
        fs::write(scratch.join(name), "content").unwrap();
    }
    scratch
}

/// Asserts that the process is denied everything that no confined process may do.
fn assert_imprisoned(captive: &Captive, foreign: &Scratch) {
    let parent = u64::from(std::process::id());
    let inet = libc::AF_INET;
    for (protocol, kind) in [
        (libc::IPPROTO_MPTCP, libc::SOCK_STREAM),
        (libc::IPPROTO_SCTP, libc::SOCK_STREAM),
        (libc::IPPROTO_ICMP, libc::SOCK_DGRAM),
        (libc::IPPROTO_RAW, libc::SOCK_RAW),
    ] {
        let made = captive.socket(inet, kind, protocol);
        assert_eq!(made, Err(Errno::ENOSYS), "protocol {protocol}");
    }
    for family in [libc::AF_PACKET, libc::AF_VSOCK, libc::AF_ALG, libc::AF_KEY] {
        let made = captive.socket(family, libc::SOCK_RAW, 0);
        assert_eq!(made, Err(Errno::ENOSYS), "family {family}");
    }
    let filters = captive.socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER);
    assert_eq!(filters, Err(Errno::ENOSYS));

    let program = captive.put(b"/bin/true\0");
    for (what, number, arguments) in [
        ("execve", libc::SYS_execve, [program, 0, 0]),
        ("execveat", libc::SYS_execveat, [u64::MAX, program, 0]),
        ("fork", libc::SYS_fork, [0; 3]),
        ("vfork", libc::SYS_vfork, [0; 3]),
        ("clone", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0]),
        ("clone3", libc::SYS_clone3, [program, 64, 0]),
        ("ptrace", libc::SYS_ptrace, [0x4206, parent, 0]),
        (
            "process_vm_readv",
            libc::SYS_process_vm_readv,
            [parent, 0, 0],
        ),
        ("pidfd_open", libc::SYS_pidfd_open, [parent, 0, 0]),
        ("kill", libc::SYS_kill, [parent, 0, 0]),
        ("tgkill", libc::SYS_tgkill, [parent, parent, 0]),
        ("mount", libc::SYS_mount, [program, program, 0]),
        ("open_tree", libc::SYS_open_tree, [u64::MAX, program, 0]),
        ("chroot", libc::SYS_chroot, [program, 0, 0]),
        (
            "unshare",
            libc::SYS_unshare,
            [libc::CLONE_NEWUSER as u64, 0, 0],
        ),
        ("setns", libc::SYS_setns, [0; 3]),
        ("setuid", libc::SYS_setuid, [12_345, 0, 0]),
        ("capset", libc::SYS_capset, [program, program, 0]),
        ("bpf", libc::SYS_bpf, [0; 3]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [1, program, 0]),
        (
            "perf_event_open",
            libc::SYS_perf_event_open,
            [program, 0, 0],
        ),
        ("keyctl", libc::SYS_keyctl, [0; 3]),
        ("init_module", libc::SYS_init_module, [program, 64, program]),
        (
            "open_by_handle_at",
            libc::SYS_open_by_handle_at,
            [0, program, 0],
        ),
        ("rename", libc::SYS_rename, [program, program, 0]),
        ("link", libc::SYS_link, [program, program, 0]),
        ("symlink", libc::SYS_symlink, [program, program, 0]),
        ("mknod", libc::SYS_mknod, [program, 0o600, 0]),
        ("chown", libc::SYS_chown, [program, 0, 0]),
        ("setrlimit", libc::SYS_setrlimit, [0, program, 0]),
    ] {
        assert_eq!(
            captive.call(number, arguments),
            Err(Errno::ENOSYS),
            "{what}"
        );
    }
    let code = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let mapped = captive.call(libc::SYS_mmap, [0, 4096, code, anonymous, u64::MAX, 0]);
    assert_eq!(mapped, Err(Errno::ENOSYS));
    let stack = captive.registers.rsp & !0xfff;
    let changed = captive.call(libc::SYS_mprotect, [stack, 4096, code]);
    assert_eq!(changed, Err(Errno::ENOSYS));
    assert_eq!(captive.run_code(), Err(Errno::ENOSYS));

    let path = captive.put_path(&foreign.join("removed"));
    let removed = captive.call(libc::SYS_unlink, [path]);
    assert_eq!(removed, Err(Errno::EACCES));
    let written = captive.open(&foreign.join("read"), libc::O_WRONLY);
    assert_eq!(written, Err(Errno::EACCES));
    let made = captive.open(&foreign.join("new"), libc::O_WRONLY | libc::O_CREAT);
    assert_eq!(made, Err(Errno::EACCES));
}

/// Claim H10 of docs/security.
#[test]
fn an_attacker_in_a_process_that_waits_for_a_vm_and_then_has_it() {
    let (hosts, foreign) = (Hosts::new(), foreign());
    let mut receive = words("vm receive --listen 127.0.0.1:0 --confine yes --identity");
    receive.arg(hosts.scratch.join("b"));
    let mut destination = Process::start(receive, &hosts.scratch.join("to"));
    let listening = destination.wait_for("listening");
    destination.address = listening["address"].as_str().unwrap().to_owned();
    let captive = Captive::of(destination.pid());
    assert_imprisoned(&captive, &foreign);
    let read = captive.open(&foreign.join("read"), libc::O_RDONLY);
    assert_eq!(read, Err(Errno::EACCES));
    assert_eq!(captive.bind(), Err(Errno::EACCES));
    // The process has not created its control socket yet, so it may create local sockets.
    assert!(captive.socket(libc::AF_UNIX, libc::SOCK_STREAM, 0).is_ok());
    drop(captive);

    let source = hosts.run("from", "--guest process --memory 64M --fill-size 8M");
    let flags = "--json --peer b.test";
    finish(hosts.migrate(&source, &destination, "a", flags)).expect(0);
    destination.wait_for("received");
    let captive = Captive::of(destination.pid());
    assert_imprisoned(&captive, &foreign);
    let local = captive.socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
    assert_eq!(local, Err(Errno::EACCES));
    assert_eq!(captive.listen(), Err(Errno::EACCES));
    assert_eq!(captive.bind(), Err(Errno::EACCES));
    drop(captive);
    hosts.assert_runs(&destination);
}

/// Claim H10 of docs/security.
#[test]
fn an_attacker_in_a_process_that_runs_a_vm() {
    let (hosts, foreign) = (Hosts::new(), foreign());
    let guest = "--guest process --memory 64M --fill-size 8M";
    let mut run = words(&format!(
        "vm run --name vm --confine yes {guest} --identities"
    ));
    run.arg(hosts.scratch.join("a"));
    let source = Process::start(run, &hosts.scratch.join("from"));
    source.wait_for("started");
    let captive = Captive::of(source.pid());
    assert_imprisoned(&captive, &foreign);
    let local = captive.socket(libc::AF_UNIX, libc::SOCK_STREAM, 0);
    assert_eq!(local, Err(Errno::ENOSYS));
    assert_eq!(captive.listen(), Err(Errno::ENOSYS));
    assert_eq!(captive.bind(), Err(Errno::ENOSYS));
    drop(captive);
    hosts.assert_runs(&source);
}

/// Claim H11 of docs/security.
#[test]
fn an_attacker_in_a_tunnel() {
    let foreign = foreign();
    let scene = tunnel::Scene::new();
    let (near, far) = scene.channel();
    let captive = Captive::of(scene.near.child.id());
    assert_imprisoned(&captive, &foreign);
    // A tunnel must be able to remove its own sockets. Landlock therefore lets it remove other files
    // in their directory, too.
    let own = captive.put_path(&scene.hosts.scratch.join("in"));
    assert!(captive.call(libc::SYS_unlink, [own]).is_ok());
    drop(captive);
    tunnel::exchange(near, far);
}

/// Claim H11 of docs/security.
#[test]
fn an_attacker_in_a_tunnel_that_sets_the_owner_of_its_sockets() {
    let foreign = foreign();
    let hosts = Hosts::new();
    let own = own_user();
    let config = tunnel::near_config(&hosts, "127.0.0.1:9", "ram", "in")
        + &format!("socket_owner = \"{own}\"\n");
    let tunnel = tunnel::Tunnel::start(&hosts, "near", &config);
    let captive = Captive::of(tunnel.child.id());
    assert_imprisoned(&captive, &foreign);
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let file = captive.open(&foreign.join("read"), flags).unwrap();
    let empty = captive.put(b"\0");
    let change = |owner: u32, group: u32, flags: i32| {
        let flags = u64::from(flags.cast_unsigned());
        let arguments = [file, empty, owner.into(), group.into(), flags];
        captive.call(libc::SYS_fchownat, arguments)
    };
    let by_descriptor = libc::AT_EMPTY_PATH;
    // The tunnel may give any file to the configured owner, but may make no other change.
    assert!(change(own, u32::MAX, by_descriptor).is_ok());
    for (owner, group, flags) in [
        (own + 1, u32::MAX, by_descriptor),
        (u32::MAX, own, by_descriptor),
        (own, own, by_descriptor),
        (own, u32::MAX, 0),
    ] {
        assert_eq!(change(owner, group, flags), Err(Errno::ENOSYS));
    }
    let spaces = libc::CLONE_NEWUSER | libc::CLONE_FS;
    let left = captive.call(libc::SYS_unshare, [u64::from(spaces.cast_unsigned())]);
    assert_eq!(left, Err(Errno::ENOSYS));
}

/// Claim H11 of docs/security.
#[test]
fn an_attacker_in_an_acceptor_of_hand_offs() {
    let foreign = foreign();
    let scene = accept::Scene::new();
    let mut accept = scene.start("--confine yes");
    let captive = Captive::of(accept.process.child.id());
    assert_imprisoned(&captive, &foreign);
    let path = captive.put_path(&scene.path("taker"));
    let removed = captive.call(libc::SYS_unlink, [path]);
    assert_eq!(removed, Err(Errno::EACCES));
    drop(captive);
    assert!(accept.process.child.try_wait().unwrap().is_none());
}

/// Claim H18 of docs/security.
#[test]
fn an_attacker_in_the_process_that_serves_the_page() {
    let (scratch, foreign) = (Scratch::new(), foreign());
    let own = scratch.join("own");
    fs::write(&own, "content").unwrap();
    let page = status::Page::start(scratch.path());
    let captive = Captive::of(page.process.child.id());
    assert_imprisoned(&captive, &foreign);
    assert!(captive.open(&own, libc::O_RDONLY).is_ok());
    for (path, flags) in [
        (foreign.join("read"), libc::O_RDONLY),
        (own, libc::O_WRONLY),
        (scratch.join("new"), libc::O_WRONLY | libc::O_CREAT),
    ] {
        let opened = captive.open(&path, flags);
        assert_eq!(opened, Err(Errno::EACCES), "{}", path.display());
    }
    for family in [libc::AF_INET, libc::AF_INET6] {
        let made = captive.socket(family, libc::SOCK_STREAM, 0);
        assert_eq!(made, Err(Errno::ENOSYS), "family {family}");
    }
    for (what, number) in [("bind", libc::SYS_bind), ("listen", libc::SYS_listen)] {
        assert_eq!(captive.call(number, [0; 3]), Err(Errno::ENOSYS), "{what}");
    }
    drop(captive);
    page.get("/");
}

/// A process that listens on a TCP port has TCP sockets, which it could use to connect to other
/// hosts.
///
/// Claim H18 of docs/security.
#[test]
fn an_attacker_in_a_process_that_serves_the_page_over_tcp() {
    let scratch = Scratch::new();
    let mut serve = words("serve-status --confine yes --listen 127.0.0.1:0 --control");
    serve.arg(scratch.path());
    let served = support::process::Process::start(serve);
    served.wait_for("listening on");
    let captive = Captive::of(served.child.id());
    let there = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut address = [0; 16];
    address[0] = 2;
    let port = there.local_addr().unwrap().port();
    address[2..4].copy_from_slice(&port.to_be_bytes());
    address[4..8].copy_from_slice(&[127, 0, 0, 1]);
    let at = captive.put(&address);
    let descriptors = fs::read_dir(format!("/proc/{}/fd", served.child.id())).unwrap();
    let connected: Vec<_> = descriptors
        .map(|one| one.unwrap().file_name().into_string().unwrap())
        .map(|number| captive.call(libc::SYS_connect, [number.parse().unwrap(), at, 16]))
        .collect();
    // EACCES comes from connect(2) on the listening socket. Without the restriction, that error
    // would be EISCONN.
    assert!(connected.contains(&Err(Errno::EACCES)), "{connected:?}");
    assert!(!connected.iter().any(Result::is_ok), "{connected:?}");
}
