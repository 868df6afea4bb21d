//! A script that replaces virsh and simulates two hosts without libvirt. Each VM is a file: a VM on
//! host `a` is the file `a/UUID` in the script's directory.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::support::{Scratch, words};

/// Runs each command of a line, as virsh does. The URI decides which host answers: host `a` for a
/// local URI. A migration waits while the file `hold/UUID` exists, and then moves the VM. If the
/// file `fail/UUID` exists, the migration fails instead. Other files set the state of the VM: with
/// `off/UUID`, the VM is off at host `a`. With `leaving/UUID`, a migration of the VM is under way.
/// With `lands/UUID`, the VM arrives at host `b` when a host is asked for its free memory. With
/// `paused/UUID`, the VM is paused.
const SCRIPT: &str = r#"#!/bin/sh
case $2 in qemu:///* | *//a/*) host=a ;; *) host=b ;; esac
shift 2
answer() {
    case $1 in
    echo) echo "$2" ;;
    capabilities) echo "<host><uuid>$host</uuid></host>" ;;
    list)
        [ "$host $2" != "b --all" ] || : >"$root/asked"
        for vm in "$root/$host"/*; do
            [ ! -e "$vm" ] || echo "${vm##*/}"
        done
        [ "$host $2" = "a --all" ] || return 0
        for vm in "$root/off"/*; do
            [ ! -e "$vm" ] || echo "${vm##*/}"
        done
        ;;
    nodememstats)
        printf 'total: 67108864 KiB\nfree: 67108864 KiB\n'
        for vm in "$root/lands"/*; do
            [ ! -e "$vm" ] || mv "$root/a/${vm##*/}" "$root/b"
        done
        ;;
    dominfo)
        [ -e "$root/$host/$2" ] || return 1
        read -r name <"$root/$host/$2"
        printf 'Name: %s\nState: running\nMax memory: 8192 KiB\nPersistent: yes\n' "$name"
        ;;
    domstate)
        if [ "$host" = a ] && [ -e "$root/off/$3" ]; then
            echo 'shut off (shutdown)'
            return
        fi
        [ -e "$root/$host/$3" ] || return 1
        if [ -e "$root/paused/$3" ]; then echo 'paused (user)'; else echo 'running (booted)'; fi
        ;;
    domjobinfo)
        case $2 in
        --completed) printf 'Job type: 3\noperation: 5\ndata_processed: 8388608\ndowntime: 5\n' ;;
        *)
            [ ! -e "$root/leaving/$3" ] || printf 'Job type: 2\noperation: 5\n'
            [ -e "$root/leaving/$3" ] || echo 'Job type: None'
            ;;
        esac
        ;;
    migrate-setspeed | migrate-getspeed) echo 1 ;;
    domjobabort)
        : >"$root/fail/$2"
        rm "$root/hold/$2"
        ;;
    suspend)
        : >"$root/suspending"
        while [ ! -e "$root/asked" ]; do sleep 0.02; done
        : >"$root/paused/$2"
        : >"$root/suspended"
        ;;
    resume) rm "$root/paused/$2" ;;
    migrate)
        while [ "$1" != --domain ]; do shift; done
        : >"$root/migrating-$2"
        while [ -e "$root/hold/$2" ]; do sleep 0.02; done
        if [ -e "$root/fail/$2" ] || [ ! -e "$root/a/$2" ]; then
            echo 'error: operation failed' >&2
            return 1
        fi
        mv "$root/a/$2" "$root/b/$2"
        ;;
    *)
        echo "error: no command $1" >&2
        return 1
        ;;
    esac
}
if [ $# -gt 1 ]; then
    answer "$@"
    exit
fi
IFS=';'
set -- $1
unset IFS
for line; do answer $line; done
"#;

pub struct Virsh {
    scratch: Scratch,
}

impl Virsh {
    /// Host `a` has this number of VMs, and host `b` has none.
    pub fn new(count: usize) -> Self {
        let virsh = Self {
            scratch: Scratch::in_memory(),
        };
        for folder in [
            "a", "b", "hold", "fail", "off", "leaving", "lands", "paused", "bin",
        ] {
            fs::create_dir(virsh.scratch.join(folder)).unwrap();
        }
        for number in 0..count {
            let file = virsh.scratch.join("a").join(uuid(number));
            fs::write(file, format!("vm{number}\n")).unwrap();
        }
        let (first, rest) = SCRIPT.split_once('\n').unwrap();
        let root = virsh.scratch.path().display();
        let program = virsh.scratch.join("bin/virsh");
        fs::write(&program, format!("{first}\nroot='{root}'\n{rest}")).unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        virsh
    }

    /// The value of `PATH` with which programs find this virsh.
    pub fn path(&self) -> String {
        let path = std::env::var("PATH").unwrap();
        format!("{}:{path}", self.scratch.join("bin").display())
    }

    pub fn state(&self) -> PathBuf {
        self.scratch.join("state")
    }

    /// `dunlin evacuate` of host `a`.
    pub fn evacuate(&self, flags: &str) -> Command {
        let mut command =
            words("evacuate --from qemu:///system --to qemu+tcp://b/system --state-dir");
        command
            .arg(self.state())
            .args(flags.split_whitespace())
            .env("PATH", self.path());
        command
    }

    /// The migration of a VM does not end before [`Self::release`].
    pub fn hold(&self, number: usize) {
        self.mark(number, "hold");
    }

    pub fn release(&self, number: usize) {
        self.unmark(number, "hold");
    }

    /// Makes a file for a VM in a directory.
    pub fn mark(&self, number: usize, folder: &str) {
        fs::write(self.file(number, folder), "").unwrap();
    }

    pub fn unmark(&self, number: usize, folder: &str) {
        fs::remove_file(self.file(number, folder)).unwrap();
    }

    fn file(&self, number: usize, folder: &str) -> PathBuf {
        self.scratch.join(folder).join(uuid(number))
    }

    /// Moves a VM to another directory, such as `b` or `off`.
    pub fn put(&self, number: usize, folder: &str) {
        fs::rename(self.file(number, "a"), self.file(number, folder)).unwrap();
    }

    /// Whether a file of a VM is in a directory.
    pub fn is_in(&self, number: usize, folder: &str) -> bool {
        self.file(number, folder).exists()
    }

    /// Waits for a file of the script.
    pub fn wait_for(&self, file: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.scratch.join(file).exists() {
            assert!(Instant::now() < deadline, "no {file}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The number of VMs on a host.
    pub fn count(&self, host: &str) -> usize {
        fs::read_dir(self.scratch.join(host)).unwrap().count()
    }
}

pub fn uuid(number: usize) -> String {
    format!("00000000-0000-4000-8000-{number:012x}")
}
