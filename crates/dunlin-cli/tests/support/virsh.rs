//! A virsh of two hosts without libvirt. A VM is a file with its name: `HOST/UUID` in a directory.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::support::Scratch;

/// Runs each command of a line, as virsh does. The URI decides which host answers: a local one is host
/// `a`. A VM moves when no file `hold/UUID` is left.
const SCRIPT: &str = r#"#!/bin/sh
case $2 in qemu:///*) host=a ;; *) host=b ;; esac
shift 2
answer() {
    case $1 in
    echo) echo "$2" ;;
    list)
        for vm in "$root/$host"/*; do
            [ ! -e "$vm" ] || echo "${vm##*/}"
        done
        ;;
    nodememstats) printf 'total: 67108864 KiB\nfree: 67108864 KiB\n' ;;
    dominfo)
        [ -e "$root/$host/$2" ] || return 1
        read -r name <"$root/$host/$2"
        printf 'Name: %s\nState: running\nMax memory: 8192 KiB\nPersistent: yes\n' "$name"
        ;;
    domstate)
        [ -e "$root/$host/$3" ] || return 1
        echo 'running (booted)'
        ;;
    domjobinfo)
        case $2 in
        --completed) printf 'Job type: 3\noperation: 5\ndata_processed: 8388608\ndowntime: 5\n' ;;
        *) echo 'Job type: None' ;;
        esac
        ;;
    migrate)
        while [ "$1" != --domain ]; do shift; done
        while [ -e "$root/hold/$2" ]; do sleep 0.02; done
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
        for folder in ["a", "b", "hold", "bin"] {
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

    /// The migration of a VM does not end before [`Self::release`].
    pub fn hold(&self, number: usize) {
        fs::write(self.scratch.join("hold").join(uuid(number)), "").unwrap();
    }

    pub fn release(&self, number: usize) {
        fs::remove_file(self.scratch.join("hold").join(uuid(number))).unwrap();
    }

    /// The number of VMs on a host.
    pub fn count(&self, host: &str) -> usize {
        fs::read_dir(self.scratch.join(host)).unwrap().count()
    }
}

fn uuid(number: usize) -> String {
    format!("00000000-0000-4000-8000-{number:012x}")
}
