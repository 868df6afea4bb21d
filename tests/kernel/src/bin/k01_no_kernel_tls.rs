//! A socket takes keys only while it is connected; a module that is not loaded is nowhere to be seen without CAP_NET_ADMIN.

use std::env;
use std::fs;
use std::net::{Shutdown, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use dunlin_kernel_tests::tls::{Keys, connected, errno, kernels, receive, set};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_sys::ktls::{Direction, attach, installed};
use nix::errno::Errno;

/// What the kernel runs to load a module.
const LOADER: &str = "/proc/sys/kernel/modprobe";

/// Says that this process is the one without privileges.
const UNPRIVILEGED: &str = "RIG_UNPRIVILEGED";

fn main() -> ExitCode {
    run(&Needs::NOTHING, |guest| {
        if let Ok(expected) = env::var(UNPRIVILEGED) {
            let (near, _far) = connected();
            let outcome = attach(&near).map_err(errno);
            assert_eq!(format!("{outcome:?}"), expected);
            return;
        }
        only_while_connected();
        once();
        keys_come_after_it();
        a_module_that_is_not_loaded(guest);
    })
}

fn only_while_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    assert_eq!(attach(&listener).map_err(errno), Err(Errno::ENOTCONN));

    // A peer that has said all it will say has closed the door, though we could still answer.
    let (near, far) = connected();
    far.shutdown(Shutdown::Write).expect("it is open");
    assert_eq!(receive(&near, &mut [0; 8]), Ok((23, 0)));
    assert_eq!(attach(&near).map_err(errno), Err(Errno::ENOTCONN));
}

fn once() {
    let (near, _far) = kernels();
    assert_eq!(attach(&near).map_err(errno), Err(Errno::EEXIST));
    assert!(
        installed(&near, Direction::Sending)
            .expect("known")
            .is_some()
    );
}

fn keys_come_after_it() {
    let (near, _far) = connected();
    let early = set(&near, Direction::Sending, &Keys::new(1));
    assert_eq!(early, Err(Errno::ENOPROTOOPT));
    attach(&near).expect("the kernel has TLS");
    for direction in [Direction::Sending, Direction::Receiving] {
        assert_eq!(installed(&near, direction).expect("known"), None);
    }
}

/// As in a container: the module is there, and nobody inside may have it loaded.
fn a_module_that_is_not_loaded(guest: &Guest) {
    guest.remove_module("tls");
    unprivileged("Err(ENOENT)");
    let loader = fs::read_to_string(LOADER).expect("proc is mounted");
    fs::write(LOADER, "/nowhere").expect("it can be set");
    let (near, _far) = connected();
    assert_eq!(attach(&near).map_err(errno), Err(Errno::ENOENT));
    fs::write(LOADER, loader.trim_end()).expect("it can be set");
    assert_eq!(
        attach(&near).map_err(errno),
        Ok(()),
        "nothing is left of the attempt"
    );
    // Once it is loaded, everybody has it.
    unprivileged("Ok(())");
}

/// Runs this test as nobody, who expects this of a socket.
fn unprivileged(expected: &str) {
    let status = Command::new(env::current_exe().expect("proc is mounted"))
        .env(UNPRIVILEGED, expected)
        .uid(65534)
        .gid(65534)
        .status()
        .expect("it starts");
    assert!(status.success(), "as nobody: not {expected}");
}
