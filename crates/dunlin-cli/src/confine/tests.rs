//! A confined child process tries operations that must fail and operations that must work.
//!
//! The child is this test program, started again with the parts to apply in its environment. Each
//! part is also tested alone, because another part that forbids the same operation would hide a
//! failure.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use dunlin_linux::epoll::{Epoll, Readiness};
use dunlin_linux::{affinity, clock, poll};
use dunlin_test_base::Scratch;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::ptrace;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::kill;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::{Uid, execv, setuid};
use vm_memory::mmap::{MmapRegion, MmapRegionError};

use super::*;

/// Parts that the child applies, and its directory.
const PARTS: &str = "DUNLIN_TEST_CONFINED";
const DIRECTORY: &str = "DUNLIN_TEST_CONFINED_IN";

/// The outcome of each operation by name: `done`, or the error's name.
type Outcomes = BTreeMap<String, String>;

/// A directory with the files of a VM's process.
fn directory() -> Scratch {
    let scratch = Scratch::new();
    for directory in ["control", "journal", "identity", "elsewhere"] {
        fs::create_dir_all(scratch.join(directory)).unwrap();
    }
    for file in ["identity/key.pem", "elsewhere/secret", "journal/old"] {
        fs::write(scratch.join(file), "content").unwrap();
    }
    scratch
}

/// Runs a child that applies `parts`.
fn confined(parts: &str) -> Outcomes {
    let scratch = directory();
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

/// Operations of a VM's normal work.
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
        "make a file in the control directory",
        "listen on a port",
    ];
    assert_each(&outcomes, "EACCES", &by_files);
    let by_calls = [
        "execute a program",
        "start a program",
        "debug its parent",
        "read its parent's memory",
        "signal its parent",
        "mount",
        "change its root",
        "become another user",
        "make a user namespace",
        "raise a limit",
        "make a packet socket",
        "make a netlink socket",
        "make a raw socket",
        "map memory to write and execute",
        "rename in the journal",
        "open the journal to all",
    ];
    assert_each(&outcomes, "ENOSYS", &by_calls);
    assert_eq!(outcomes["make a local socket later"], "EACCES");
    // Threads that already ran are restricted too.
    assert_eq!(outcomes["make a local socket in an older thread"], "EACCES");
}

/// In addition to its other work, the process sets up IPsec and binds the source ports of
/// its lanes.
#[test]
fn a_process_with_lanes_over_ipsec_keeps_only_what_they_need() {
    let outcomes = confined("ipsec");
    assert_each(&outcomes, "done", STILL_WORKS);
    let kept = [
        "bind a lane's port",
        "ask about connections",
        "make a netlink socket",
        "rename in the journal",
        "keep records of IPsec",
    ];
    assert_each(&outcomes, "done", &kept);
    assert_each(
        &outcomes,
        "EACCES",
        &["listen on a port", "write elsewhere"],
    );
    let by_calls = [
        "make a netlink socket for packet filters",
        "make a packet socket",
        "execute a program",
        "mount",
    ];
    assert_each(&outcomes, "ENOSYS", &by_calls);
    let effective = u64::from_str_radix(&outcomes["privileges"], 16).unwrap();
    assert_eq!(effective & !(1 << 12), 0, "CAP_NET_ADMIN alone");
}

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

/// The tunnel's normal work, and operations that only its systemd unit can deny.
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
    ];
    assert_each(&outcomes, "done", &works);
    let by_files = [
        "make and remove a directory in elsewhere",
        "write the journal",
        "write elsewhere",
        "write an identity",
        "make a file in the control directory",
    ];
    assert_each(&outcomes, "EACCES", &by_files);
    let by_calls = [
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
        "map memory to write and execute",
        "rename in the journal",
        "open the journal to all",
    ];
    assert_each(&outcomes, "ENOSYS", &by_calls);
    assert_eq!(outcomes["connect to an abstract socket"], "EPERM");
}

#[test]
fn a_tunnel_with_programs_reports_that_it_is_not_confined() {
    let confining = |confine| ConfiningTunnel { confine };
    let against = Some(("the programs of routes would be confined", "leave them out"));
    let confined = confining(Whether::Auto).apply(against, None).unwrap();
    assert!(!is_confined(&confined));
    let text = confined.text().unwrap();
    assert!(text.starts_with("not confined: the programs of routes"));
    let refused = confining(Whether::Yes)
        .apply(against, None)
        .unwrap_err()
        .to_string();
    for part in ["at fault: configuration", "--confine auto"] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(
        confining(Whether::No).apply(None, None).unwrap().text(),
        Some("not confined".to_owned())
    );
}

#[test]
fn missing_kernel_support_is_reported_or_an_error() {
    // A filter that forbids Landlock and further filters simulates a kernel that has neither.
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
        scratch: None,
        identity: Some(directory.join("identity")),
        makes_sockets: true,
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
            // between threads.
            report("become another user", setuid(Uid::from_raw(12_345)));
            try_everything(&directory);
            make_no_more_sockets(&confined).unwrap();
            report("make a local socket later", local_socket());
            report("make a local socket in an older thread", older());
        }
        "ipsec" => {
            confining(Whether::Yes).apply(&needs).unwrap();
            let bound = TcpListener::bind("127.0.0.1:24600").map(drop);
            report("bind a lane's port", bound.map_err(number));
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
            try_everything(&directory);
        }
        "tunnel" => {
            let confining = ConfiningTunnel {
                confine: Whether::Yes,
            };
            confining.apply(None, Some(&needs.control)).unwrap();
            change_root(&directory);
            try_everything(&directory);
            report("make a local socket later", local_socket());
            report("move bytes in the kernel", moved_in_the_kernel());
            for parent in ["control", "elsewhere"] {
                let made = directory.join(parent).join("sockets.d");
                let both = fs::create_dir(&made).and_then(|()| fs::remove_dir(&made));
                report(
                    &format!("make and remove a directory in {parent}"),
                    both.map_err(number),
                );
            }
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

/// Waits with poll and epoll, after reading a thread's clocks.
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

fn local_socket() -> Result<(), Errno> {
    made(AddressFamily::Unix, SockType::Stream)
}

fn made(family: AddressFamily, kind: SockType) -> Result<(), Errno> {
    socket(family, kind, SockFlag::empty(), None).map(drop)
}

fn report(what: &str, outcome: Result<(), Errno>) {
    // libtest has an unfinished line.
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
    // Its protocol is NETLINK_ROUTE.
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
    let both = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let mapped = MmapRegion::<()>::build(None, 4096, both, anonymous);
    report(
        "map memory to write and execute",
        match mapped {
            Ok(_) => Ok(()),
            Err(MmapRegionError::Mmap(error)) => Err(number(error)),
            Err(other) => panic!("{other}"),
        },
    );
    let name = std::env::var("DUNLIN_TEST_ABSTRACT").unwrap();
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let connected = UnixStream::connect_addr(&address);
    io("connect to an abstract socket", connected.map(drop));
    report("make a user namespace", unshare(CloneFlags::CLONE_NEWUSER));
    // Last: if it succeeds, nothing runs after it.
    println!("\ntried execute a program: done");
    let program = c"/bin/true";
    let Err(error) = execv(program, &[program]);
    report("execute a program", Err(error));
}
