//! A confined child process tries operations that must fail and operations that must work.
//!
//! The child is this test program, started again. Environment variables tell it which parts of the
//! confinement to apply. The file rules and the dropped privileges are also tested alone: if such a
//! part failed to forbid an operation, another part that also forbids it would hide the failure.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use dunlin_linux::epoll::{Epoll, Readiness};
use dunlin_linux::{affinity, clock, poll};
use dunlin_microvm::entries::Entries;
use dunlin_test_base::Scratch;
use dunlin_test_base::need::or_skip;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::ptrace;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::kill;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrIn, socket,
};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::{Uid, execv, setuid};
use vm_memory::FileOffset;
use vm_memory::mmap::{MmapRegion, MmapRegionError};

use super::*;

/// The environment variables that tell the child which parts of the confinement to apply, and which
/// directory to use.
const PARTS: &str = "DUNLIN_TEST_CONFINED";
const DIRECTORY: &str = "DUNLIN_TEST_CONFINED_IN";

/// The outcome of each operation by name: `done`, or the error's name.
type Outcomes = BTreeMap<String, String>;

/// A directory with the files of a VM's process.
fn directory() -> Scratch {
    let scratch = Scratch::new();
    for directory in ["control", "journal", "identity", "route", "elsewhere"] {
        fs::create_dir_all(scratch.join(directory)).unwrap();
    }
    let files = [
        "identity/key.pem",
        "elsewhere/secret",
        "elsewhere/old",
        "journal/old",
        "route/old",
    ];
    for file in files {
        fs::write(scratch.join(file), "content").unwrap();
    }
    scratch
}

/// Runs a child that applies `parts`.
fn confined(parts: &str) -> Outcomes {
    confined_in(&directory(), parts)
}

fn confined_in(scratch: &Scratch, parts: &str) -> Outcomes {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("dunlin-confined-{}-{parts}", std::process::id());
    let abstract_socket = SocketAddr::from_abstract_name(&name).unwrap();
    let _abstract = UnixListener::bind_addr(&abstract_socket).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "confine::tests::inside", "--nocapture"])
        .env(PARTS, parts)
        .env(DIRECTORY, scratch.path())
        .env(
            "DUNLIN_TEST_PORT",
            listener.local_addr().unwrap().to_string(),
        )
        .env("DUNLIN_TEST_ABSTRACT", &name)
        // One of the tests puts a module of name resolution into this directory.
        .env("LD_LIBRARY_PATH", scratch.path())
        .output()
        .unwrap();
    let out = String::from_utf8(child.stdout).unwrap();
    let outcomes: Outcomes = out
        .lines()
        .filter_map(|line| line.strip_prefix("tried "))
        .filter_map(|line| line.split_once(": "))
        .map(|(what, outcome)| (what.to_owned(), outcome.to_owned()))
        .collect();
    println!("{parts}: {outcomes:#?}");
    assert!(
        child.status.success() && !outcomes.is_empty(),
        "{out}{}",
        String::from_utf8_lossy(&child.stderr)
    );
    outcomes
}

fn assert_each(outcomes: &Outcomes, outcome: &str, what: &[&str]) {
    for what in what {
        assert_eq!(outcomes[*what], outcome, "{what}");
    }
}

/// Operations that the normal work of a VM's process needs.
const STILL_WORKS: &[&str] = &[
    "read an identity",
    "read the journal",
    "write the journal",
    "remove from the journal",
    "make a control socket",
    "remove a control socket",
    "read random numbers",
    "read its own page map",
    "connect to a port",
    "wait for sockets",
    "start a thread",
];

/// Claims P12, H8 of docs/security.
#[test]
fn a_confined_process_can_only_do_its_work() {
    let outcomes = confined("all");
    assert_each(&outcomes, "done", STILL_WORKS);
    let by_files = [
        "read elsewhere",
        "read the password file",
        "list a directory",
        "write elsewhere",
        "write an identity",
        "remove an identity",
        "remove elsewhere",
        "make a file in the control directory",
        "listen on a port",
    ];
    assert_each(&outcomes, "EACCES", &by_files);
    assert_each(&outcomes, "ENOSYS", NEVER_CALLED);
    assert_each(
        &outcomes,
        "ENOSYS",
        &["become another user", "execute a file in memory"],
    );
    // These operations fail after a VM has arrived and has its control socket.
    let later = [
        "make a local socket later",
        // Threads that were started before the confinement are restricted too.
        "make a local socket in an older thread",
        "bind a port later",
        "listen later",
    ];
    assert_each(&outcomes, "EACCES", &later);
}

/// Tests `vm run`, which creates its control socket before it is confined. Afterwards it needs no
/// further listening socket.
#[test]
fn a_confined_process_with_a_control_socket_never_listens() {
    let outcomes = confined("run");
    assert_each(&outcomes, "ENOSYS", &["bind a port", "listen"]);
    assert_each(&outcomes, "ENOSYS", NEVER_CALLED);
}

/// Operations that need a forbidden system call. Two kinds of process never make these calls: a
/// VM's process without IPsec, and a tunnel.
const NEVER_CALLED: &[&str] = &[
    "execute a program",
    "start a program",
    "debug its parent",
    "read its parent's memory",
    "signal its parent",
    "mount",
    "change its root",
    "make a user namespace",
    "raise a limit",
    "make a packet socket",
    "make a netlink socket",
    "make a raw socket",
    "make an MPTCP socket",
    "map memory to write and execute",
    "map memory to execute",
    "rename in the journal",
    "open the journal to all",
];

/// Tests a VM's process with lanes over IPsec. In addition to its other work, it sets up IPsec and
/// binds the source ports of the lanes.
#[test]
fn a_process_with_lanes_over_ipsec_keeps_only_what_they_need() {
    let outcomes = confined("ipsec");
    assert_each(&outcomes, "done", STILL_WORKS);
    let kept = [
        "bind a lane's port",
        "bind a lane's port later",
        "ask about connections",
        "make a netlink socket",
        "rename in the journal",
        "keep records of IPsec",
    ];
    assert_each(&outcomes, "done", &kept);
    assert_each(
        &outcomes,
        "EACCES",
        &["listen on a port", "write elsewhere", "listen later"],
    );
    let by_calls = [
        "make a netlink socket for packet filters",
        "make a packet socket",
        "make an MPTCP socket",
        "execute a program",
        "mount",
    ];
    assert_each(&outcomes, "ENOSYS", &by_calls);
    let effective = u64::from_str_radix(&outcomes["privileges"], 16).unwrap();
    assert_eq!(effective & !(1 << 12), 0, "CAP_NET_ADMIN alone");
}

/// Claim H8 of docs/security.
#[test]
fn landlock_alone_restricts_files_ports_and_signals() {
    let outcomes = confined("files");
    assert_each(&outcomes, "done", STILL_WORKS);
    let denied = [
        "read elsewhere",
        "read the password file",
        "list a directory",
        "write elsewhere",
        "write an identity",
        "remove an identity",
        "make a file in the control directory",
        "listen on a port",
        "execute a program",
    ];
    assert_each(&outcomes, "EACCES", &denied);
    let denied = [
        "signal its parent",
        "debug its parent",
        "connect to an abstract socket",
    ];
    assert_each(&outcomes, "EPERM", &denied);
}

/// Claim H8 of docs/security.
#[test]
fn without_capabilities_root_is_an_ordinary_user() {
    let outcomes = confined("privileges");
    let denied = [
        "mount",
        "change its root",
        "make a packet socket",
        "make a raw socket",
    ];
    assert_each(&outcomes, "EPERM", &denied);
    assert_eq!(outcomes["execute a program"], "done");
}

/// `works` lists the normal work of a tunnel, and also operations that the confinement permits and
/// only the tunnel's systemd unit can deny.
#[test]
fn a_confined_tunnel_reads_and_connects_but_changes_nothing() {
    let outcomes = confined("tunnel");
    let works = [
        "read an identity",
        "make a control socket",
        "remove a control socket",
        "connect to a port",
        "wait for sockets",
        "listen on a port",
        "start a thread",
        "make a local socket later",
        "move bytes in the kernel",
        "make and remove a directory in control",
        "remove from a route's directory",
    ];
    assert_each(&outcomes, "done", &works);
    let by_files = [
        "make and remove a directory in elsewhere",
        "write the journal",
        "write elsewhere",
        "write an identity",
        "remove an identity",
        "remove elsewhere",
        "remove from the journal",
        "make a file in the control directory",
    ];
    assert_each(&outcomes, "EACCES", &by_files);
    assert_each(&outcomes, "ENOSYS", NEVER_CALLED);
    assert_eq!(outcomes["connect to an abstract socket"], "EPERM");
}

#[test]
fn a_confined_acceptor_of_hand_offs_reads_and_connects_but_changes_nothing() {
    let outcomes = confined("handoff");
    let works = [
        "read an identity",
        "connect to a port",
        "wait for sockets",
        "start a thread",
        "ask about connections",
        "move bytes in the kernel",
    ];
    assert_each(&outcomes, "done", &works);
    let by_files = [
        "write the journal",
        "write elsewhere",
        "write an identity",
        "remove an identity",
        "remove elsewhere",
        "remove a control socket",
        "make a file in the control directory",
    ];
    assert_each(&outcomes, "EACCES", &by_files);
    // One operation of `NEVER_CALLED` is permitted: a netlink socket for routes, with which
    // `handoff accept` describes the network device.
    let never = NEVER_CALLED.iter().copied();
    let never: Vec<_> = never
        .filter(|call| *call != "make a netlink socket")
        .collect();
    assert_each(&outcomes, "ENOSYS", &never);
    let filters = ["make a netlink socket for packet filters"];
    assert_each(&outcomes, "ENOSYS", &filters);
}

#[test]
fn a_tunnel_with_programs_reports_that_it_is_not_confined() {
    let confining = |confine| ConfiningService { confine };
    let against = Some(("the programs of routes would be confined", "leave them out"));
    let confined = confining(Whether::Auto)
        .tunnel(against, None, &[], &[])
        .unwrap();
    assert!(!is_confined(&confined));
    let text = confined.text().unwrap();
    assert!(text.starts_with("not confined: the programs of routes"));
    let refused = confining(Whether::Yes)
        .tunnel(against, None, &[], &[])
        .unwrap_err()
        .to_string();
    for part in ["at fault: configuration", "--confine auto"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(
        confining(Whether::No)
            .tunnel(None, None, &[], &[])
            .unwrap()
            .text(),
        Some("not confined".to_owned())
    );
}

/// Number of entries into the guest that one process measures.
const ENTRIES: u32 = 200_000;
/// Number of processes with the filter, and of processes without it.
const ROUNDS: usize = 15;

/// Measures how much time the filter of system calls adds to an entry into the guest, which is a
/// call of KVM_RUN. The guest exits to the host at once. Processes with and without the filter take
/// turns.
///
/// `cargo test --release -p dunlin-cli -- --ignored --nocapture the_cost_of_the_filter`
#[test]
#[ignore = "a measurement, which needs a quiet machine"]
fn the_cost_of_the_filter_at_each_entry_into_the_guest() {
    let kinds = ["entries-unfiltered", "entries"];
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (kind, times) in kinds.iter().zip(&mut all) {
            times.push(confined(kind)["entry"].parse::<u64>().unwrap());
        }
    }
    let medians = all.map(|mut times| {
        times.sort_unstable();
        (times[ROUNDS / 2], times[0], times[ROUNDS - 1])
    });
    for (kind, (median, least, most)) in kinds.iter().zip(&medians) {
        println!("{kind}: {median} ns for each entry ({least} to {most})");
    }
    let added = i128::from(medians[1].0) - i128::from(medians[0].0);
    println!("the filter adds {added} ns");
}

#[test]
fn missing_kernel_support_is_reported_or_an_error() {
    // To simulate a kernel with neither Landlock nor filters, a filter forbids both.
    let outcomes = confined("nothing-left");
    let said = &outcomes["auto"];
    for part in [
        "privileges: ",
        "files: this kernel has no Landlock",
        "system calls: ",
    ] {
        assert!(said.contains(part), "{said}");
    }
    let refused = &outcomes["yes"];
    for part in ["at fault: this side", "--confine auto", "privileges: "] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(outcomes["no"], "[] []");
}

/// The body of the child process; does nothing when run as an ordinary test.
#[test]
fn inside() {
    let (Some(parts), Some(directory)) = (std::env::var_os(PARTS), std::env::var_os(DIRECTORY))
    else {
        return;
    };
    let directory = PathBuf::from(directory);
    let needs = Needs {
        control: directory.join("control"),
        journal: directory.join("journal"),
        history: Some(directory.join("history")),
        scratch: None,
        identity: Some(directory.join("identity")),
        makes_sockets: parts != "run",
        ipsec: (parts == "ipsec").then(|| "24576-24639".parse().unwrap()),
    };
    let confining = |confine| Confining {
        confine,
        identities: Vec::new(),
    };
    let older = older_thread();
    match parts.to_str().unwrap() {
        "all" => {
            let confined = confining(Whether::Yes).apply(&needs).unwrap();
            change_root(&directory);
            // The C library changes the user in every thread, and aborts if the result differs
            // between threads. So this also tests that the older thread is restricted.
            report("become another user", setuid(Uid::from_raw(12_345)));
            let unbound = tcp();
            try_everything(&directory);
            make_no_more_sockets(&confined, false).unwrap();
            report("make a local socket later", local_socket());
            report("make a local socket in an older thread", older());
            report("bind a port later", bind(&unbound, 0));
            report("listen later", listen(&unbound));
        }
        "run" => {
            confining(Whether::Yes).apply(&needs).unwrap();
            change_root(&directory);
            let unbound = tcp();
            report("bind a port", bind(&unbound, 0));
            report("listen", listen(&unbound));
            try_everything(&directory);
        }
        "names" => {
            resolve_by_module(&directory);
            confining(Whether::Yes).apply(&needs).unwrap();
            let found = (RESOLVED, 0).to_socket_addrs();
            let address = found.map(|mut found| found.next().unwrap().ip().to_string());
            println!(
                "\ntried resolve: {}",
                address.unwrap_or_else(|error| error.to_string())
            );
        }
        "ipsec" => {
            let confined = confining(Whether::Yes).apply(&needs).unwrap();
            report("bind a lane's port", bind(&tcp(), 24_600));
            let asking = socket(
                AddressFamily::Netlink,
                SockType::Raw,
                SockFlag::empty(),
                SockProtocol::NetlinkSockDiag,
            );
            report("ask about connections", asking.map(drop));
            let record = directory
                .join("journal")
                .join(crate::state::IPSEC_RECORDS)
                .join("new");
            report(
                "keep records of IPsec",
                fs::write(record, "x").map_err(number),
            );
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
            println!("\ntried privileges: {}", set.unwrap().trim());
            let later = tcp();
            try_everything(&directory);
            make_no_more_sockets(&confined, true).unwrap();
            report("bind a lane's port later", bind(&later, 24_600));
            report("listen later", listen(&later));
        }
        "tunnel" => {
            let confining = ConfiningService {
                confine: Whether::Yes,
            };
            let routes = [directory.join("route")];
            confining
                .tunnel(None, Some(&needs.control), &routes, &[])
                .unwrap();
            change_root(&directory);
            try_everything(&directory);
            report("make a local socket later", local_socket());
            report("move bytes in the kernel", moved_in_the_kernel());
            let removed = fs::remove_file(directory.join("route/old"));
            report("remove from a route's directory", removed.map_err(number));
            for parent in ["control", "elsewhere"] {
                let made = directory.join(parent).join("sockets.d");
                let both = fs::create_dir(&made).and_then(|()| fs::remove_dir(&made));
                report(
                    &format!("make and remove a directory in {parent}"),
                    both.map_err(number),
                );
            }
        }
        "handoff" => {
            let confining = ConfiningService {
                confine: Whether::Yes,
            };
            confining.handoff().unwrap();
            change_root(&directory);
            let netlink = |protocol| {
                let (family, kind) = (AddressFamily::Netlink, SockType::Raw);
                socket(family, kind, SockFlag::empty(), protocol).map(drop)
            };
            let asking = netlink(SockProtocol::NetlinkSockDiag);
            report("ask about connections", asking);
            try_everything(&directory);
            report("move bytes in the kernel", moved_in_the_kernel());
        }
        "files" => {
            let identities: Vec<_> = needs.identity.iter().cloned().collect();
            let rules = files::Rules::new(&needs, &identities).unwrap();
            rules.apply().unwrap();
            try_everything(&directory);
        }
        "privileges" => {
            keep_privileges(&[], "no privileges").unwrap();
            change_root(&directory);
            try_everything(&directory);
        }
        "entries" | "entries-unfiltered" => {
            let mut entries = Entries::new().unwrap();
            if parts == "entries" {
                calls::apply(calls::Work::Guest {
                    makes_sockets: false,
                    ipsec: false,
                })
                .unwrap();
            }
            entries.measure(ENTRIES / 10).unwrap();
            let took = entries.measure(ENTRIES).unwrap();
            println!("\ntried entry: {}", took.as_nanos() / u128::from(ENTRIES));
        }
        "nothing-left" => {
            calls::apply(calls::Work::Guest {
                makes_sockets: false,
                ipsec: false,
            })
            .unwrap();
            let Line::Confined { by, lacks } = confining(Whether::Auto).apply(&needs).unwrap()
            else {
                panic!("unexpected line");
            };
            assert!(by.is_empty(), "{by:?}");
            println!("tried auto: {}", lacks.join(", "));
            let refused = confining(Whether::Yes).apply(&needs).unwrap_err();
            println!("tried yes: {refused}");
            let Line::Confined { by, lacks } = confining(Whether::No).apply(&needs).unwrap() else {
                panic!("unexpected line");
            };
            println!("tried no: {by:?} {lacks:?}");
        }
        other => panic!("no such part: {other}"),
    }
}

/// A thread that tries to create a local socket when triggered.
fn older_thread() -> impl FnOnce() -> Result<(), Errno> {
    let (ask, asked) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        asked.recv().unwrap();
        local_socket()
    });
    move || {
        ask.send(()).unwrap();
        thread.join().unwrap()
    }
}

/// Moves a byte from one pipe to another.
fn moved_in_the_kernel() -> Result<(), Errno> {
    let (from, into) = nix::unistd::pipe()?;
    let (_out, to) = nix::unistd::pipe()?;
    nix::unistd::write(&into, b"x")?;
    let flags = nix::fcntl::SpliceFFlags::empty();
    nix::fcntl::splice(from, None, to, None, 1, flags).map(drop)
}

/// Waits with poll and epoll, after reading the monotonic clock and this thread's CPU time.
fn waited() -> std::io::Result<()> {
    let limit = Some(clock::monotonic() + affinity::thread_cpu_time());
    let (waker, wakeup) = poll::waker()?;
    waker.wake();
    let interest = poll::Interest::read(&wakeup);
    assert_eq!(poll::poll(&[interest], limit)?, [true]);
    let epoll = Epoll::new()?;
    epoll.add(&wakeup, 7, Readiness::Read)?;
    let mut ready = Vec::new();
    epoll.wait(&mut ready, limit)?;
    assert_eq!(ready[0].token, 7);
    Ok(())
}

/// An unbound TCP socket.
fn tcp() -> OwnedFd {
    let kind = SockType::Stream;
    socket(AddressFamily::Inet, kind, SockFlag::empty(), None).unwrap()
}

fn bind(socket: &OwnedFd, port: u16) -> Result<(), Errno> {
    let address = SockaddrIn::new(127, 0, 0, 1, port);
    nix::sys::socket::bind(socket.as_raw_fd(), &address)
}

fn listen(socket: &OwnedFd) -> Result<(), Errno> {
    nix::sys::socket::listen(socket, Backlog::new(1).unwrap())
}

/// Maps the memory of `file`, or anonymous memory if there is no file.
fn mapped(file: Option<FileOffset>, access: libc::c_int) -> Result<(), Errno> {
    let anonymous = if file.is_none() {
        libc::MAP_ANONYMOUS
    } else {
        0
    };
    match MmapRegion::<()>::build(file, 4096, access, libc::MAP_PRIVATE | anonymous) {
        Ok(_) => Ok(()),
        Err(MmapRegionError::Mmap(error)) => Err(number(error)),
        Err(other) => panic!("{other}"),
    }
}

/// Writes code into a file in memory, and maps the file as executable.
fn executed_from_memory() -> Result<(), Errno> {
    let mut file = fs::File::from(memfd_create(c"code", MFdFlags::empty())?);
    file.write_all(&[0xc3; 4096]).map_err(number)?;
    let file = FileOffset::new(file, 0);
    mapped(Some(file), libc::PROT_READ | libc::PROT_EXEC)
}

/// A host name that only the module of this test resolves, and its address.
const RESOLVED: &str = "dunlin-test.example";
const RESOLVED_TO: &str = "127.9.8.7";

/// The C source of this test's module of name resolution. Its gethostbyname4_r returns one address
/// for one name.
const MODULE: &str = r#"
    #include <nss.h>
    #include <netdb.h>
    #include <string.h>
    #include <arpa/inet.h>
    enum nss_status _nss_dunlintest_gethostbyname4_r(const char *name, struct gaih_addrtuple **found,
            char *buffer, size_t size, int *error, int *h_error, int32_t *ttl) {
        if (strcmp(name, "dunlin-test.example") != 0 || size < sizeof **found + 64) {
            *h_error = HOST_NOT_FOUND;
            return NSS_STATUS_NOTFOUND;
        }
        if (!*found) *found = (struct gaih_addrtuple *) buffer;
        memset(*found, 0, sizeof **found);
        (*found)->name = (char *) name;
        (*found)->family = AF_INET;
        inet_pton(AF_INET, "127.9.8.7", (*found)->addr);
        return NSS_STATUS_SUCCESS;
    }
"#;

/// Moves this thread into a new mount namespace, in which /etc/nsswitch.conf names this test's
/// module of name resolution.
fn resolve_by_module(directory: &Path) {
    let nsswitch = directory.join("nsswitch.conf");
    fs::write(&nsswitch, "hosts: files [NOTFOUND=continue] dunlintest\n").unwrap();
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(none, "/", none, private, none).unwrap();
    let place = Path::new("/etc/nsswitch.conf");
    mount(Some(&nsswitch), place, none, MsFlags::MS_BIND, none).unwrap();
}

/// Tests that a module of name resolution is loaded before the confinement. Otherwise glibc would
/// load it at the first lookup, when a confined process can no longer load code.
#[test]
fn a_confined_process_resolves_names_with_a_module_outside_the_c_library() {
    let root = Uid::effective().is_root().then_some(()).ok_or("not root");
    if or_skip("a mount namespace", root).is_none() {
        return;
    }
    let scratch = directory();
    let source = scratch.join("module.c");
    fs::write(&source, MODULE).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]);
    cc.arg(scratch.join("libnss_dunlintest.so.2")).arg(source);
    assert!(cc.status().unwrap().success());
    let outcomes = confined_in(&scratch, "names");
    assert_eq!(outcomes["resolve"], RESOLVED_TO);
}

fn local_socket() -> Result<(), Errno> {
    made(AddressFamily::Unix, SockType::Stream)
}

fn made(family: AddressFamily, kind: SockType) -> Result<(), Errno> {
    socket(family, kind, SockFlag::empty(), None).map(drop)
}

fn report(what: &str, outcome: Result<(), Errno>) {
    // Begin a new line, because libtest has not ended the line that it has written.
    match outcome {
        Ok(()) => println!("\ntried {what}: done"),
        Err(error) => println!("\ntried {what}: {error:?}"),
    }
}

fn number(error: std::io::Error) -> Errno {
    error
        .raw_os_error()
        .map_or(Errno::UnknownErrno, Errno::from_raw)
}

fn change_root(to: &Path) {
    let changed = std::os::unix::fs::chroot(to);
    report("change its root", changed.map_err(number));
}

fn try_everything(directory: &Path) {
    let io = |what: &str, outcome: std::io::Result<()>| report(what, outcome.map_err(number));
    let at = |name: &str| directory.join(name);
    let read = |path: &Path| fs::read(path).map(drop);
    let write = |path: &Path| {
        let mut open = fs::OpenOptions::new();
        open.write(true).create(true).open(path)?.write_all(b"x")
    };
    let parent = nix::unistd::getppid();
    let root = Path::new("/");

    io("read an identity", read(&at("identity/key.pem")));
    io("read the journal", fs::read_dir(at("journal")).map(drop));
    io("write the journal", write(&at("journal/new")));
    io(
        "rename in the journal",
        fs::rename(at("journal/new"), at("journal/renamed")),
    );
    io("open the journal to all", {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(at("journal"), PermissionsExt::from_mode(0o777))
    });
    io(
        "remove from the journal",
        fs::remove_file(at("journal/old")),
    );
    let control = at("control/vm.sock");
    io(
        "make a control socket",
        UnixListener::bind(&control).map(drop),
    );
    io("remove a control socket", fs::remove_file(&control));
    io(
        "read random numbers",
        fs::File::open("/dev/urandom").map(drop),
    );
    io(
        "read its own page map",
        fs::File::open("/proc/self/pagemap").map(drop),
    );
    let port = std::env::var("DUNLIN_TEST_PORT").unwrap();
    io("connect to a port", TcpStream::connect(port).map(drop));
    io("wait for sockets", waited());
    let thread = std::thread::Builder::new().spawn(|| ());
    io(
        "start a thread",
        thread.map(|thread| thread.join().unwrap()),
    );

    io("read elsewhere", read(&at("elsewhere/secret")));
    io("read the password file", read(Path::new("/etc/passwd")));
    io("list a directory", fs::read_dir(root).map(drop));
    io("write elsewhere", write(&at("elsewhere/secret")));
    io("write an identity", write(&at("identity/key.pem")));
    io(
        "remove an identity",
        fs::remove_file(at("identity/key.pem")),
    );
    io("remove elsewhere", fs::remove_file(at("elsewhere/old")));
    io(
        "make a file in the control directory",
        write(&at("control/file")),
    );
    io(
        "listen on a port",
        TcpListener::bind("127.0.0.1:0").map(drop),
    );
    io(
        "start a program",
        Command::new("/bin/true").status().map(drop),
    );

    // Unlike attach, a successful seize does not stop the process.
    let seized = ptrace::seize(parent, ptrace::Options::empty());
    report("debug its parent", seized);
    let mut byte = [0];
    let (mut here, there) = (
        [std::io::IoSliceMut::new(&mut byte)],
        [RemoteIoVec {
            base: 0x1000,
            len: 1,
        }],
    );
    report(
        "read its parent's memory",
        process_vm_readv(parent, &mut here, &there).map(drop),
    );
    report("signal its parent", kill(parent, None));
    let none: Option<&str> = None;
    let bind = MsFlags::MS_BIND;
    report(
        "mount",
        mount(Some(directory), &at("elsewhere"), none, bind, none),
    );
    report(
        "raise a limit",
        setrlimit(Resource::RLIMIT_NOFILE, 100, 100),
    );
    report(
        "make a packet socket",
        made(AddressFamily::Packet, SockType::Raw),
    );
    // The default protocol is NETLINK_ROUTE.
    report(
        "make a netlink socket",
        made(AddressFamily::Netlink, SockType::Raw),
    );
    report(
        "make a netlink socket for packet filters",
        socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::empty(),
            SockProtocol::NetlinkNetFilter,
        )
        .map(drop),
    );
    report(
        "make a raw socket",
        socket(
            AddressFamily::Inet,
            SockType::Raw,
            SockFlag::empty(),
            SockProtocol::Icmp,
        )
        .map(drop),
    );
    report(
        "make an MPTCP socket",
        rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            Some(rustix::net::ipproto::MPTCP),
        )
        .map(drop)
        .map_err(|error| Errno::from_raw(error.raw_os_error())),
    );
    let code = libc::PROT_READ | libc::PROT_EXEC;
    report(
        "map memory to write and execute",
        mapped(None, code | libc::PROT_WRITE),
    );
    report("map memory to execute", mapped(None, code));
    report("execute a file in memory", executed_from_memory());
    let name = std::env::var("DUNLIN_TEST_ABSTRACT").unwrap();
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let connected = UnixStream::connect_addr(&address);
    io("connect to an abstract socket", connected.map(drop));
    report("make a user namespace", unshare(CloneFlags::CLONE_NEWUSER));
    // Nothing runs after a successful execv, so this operation is the last, and its success is
    // reported before the call. A failure is reported after the call and replaces that report.
    println!("\ntried execute a program: done");
    let program = c"/bin/true";
    let Err(error) = execv(program, &[program]);
    report("execute a program", Err(error));
}
