//! A virtual machine under libvirt, with the bare guest.

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use super::{LibvirtError, Pair, Side, TIMEOUT, at};
use crate::guest::{Content, Line, Workload, bare_image};
use dunlin_test_base::pattern;

/// A virtual machine. Its files are in `/srv` of both hosts.
#[derive(Clone, Debug)]
pub struct Vm {
    /// The domain's name.
    pub name: String,
    /// What its guest does.
    pub workload: Workload,
    /// The size of its disk in bytes; `None` for no disk. The guest does not use the disk.
    pub disk: Option<usize>,
}

impl Vm {
    /// A VM of 48 MiB without a disk. Its guest has a hot set of 4 MiB, and writes each page of
    /// that set twice a second.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let seed = name
            .bytes()
            .fold(7, |seed, byte| seed * 31 + u64::from(byte));
        Self {
            name: name.to_owned(),
            workload: Workload {
                memory_mib: 48,
                pages: 8_000,
                hot: 1_000,
                rate: Some(2_000),
                content: Content::Random,
                seed,
            },
            disk: None,
        }
    }

    /// The content of its disk.
    #[must_use]
    pub fn disk_content(&self) -> Vec<u8> {
        pattern(self.disk.unwrap_or(0), self.workload.seed)
    }

    /// Words that identify the guest's memory and disk. Elsewhere they occur only by chance. Each
    /// page with a non-zero initial content and each 4 KiB block of the disk contributes one word.
    #[must_use]
    pub fn words(&self) -> HashSet<u64> {
        let mut words = self.workload.words();
        for block in self.disk_content().chunks_exact(4096) {
            let word = block.first_chunk().copied().map(u64::from_le_bytes);
            words.extend(word);
        }
        words
    }

    fn file(&self, kind: &str) -> String {
        format!("/srv/{}.{kind}", self.name)
    }

    /// The domain's description. `accelerator` is "kvm" or "qemu".
    fn xml(&self, accelerator: &str) -> String {
        let [kernel, serial, console, disk] =
            ["elf", "serial", "console", "disk"].map(|kind| self.file(kind));
        let (name, memory) = (&self.name, self.workload.memory_mib);
        let disk = self.disk.map_or_else(String::new, |_| {
            format!(
                "<disk type='file' device='disk'><driver name='qemu' type='raw'/>\
                 <source file='{disk}'/><target dev='vda' bus='virtio'/></disk>"
            )
        });
        format!(
            "<domain type='{accelerator}'>\n<name>{name}</name>\n\
             <memory unit='MiB'>{memory}</memory>\n<vcpu>1</vcpu>\n\
             <os><type arch='x86_64' machine='pc'>hvm</type>\
             <loader readonly='yes' type='rom'>/usr/share/qemu/qboot.rom</loader>\
             <kernel>{kernel}</kernel></os>\n\
             <on_crash>destroy</on_crash>\n<devices>\n\
             <emulator>/usr/bin/qemu-system-x86_64</emulator>\n{disk}\
             <controller type='usb' model='none'/>\n<memballoon model='none'/>\n\
             <serial type='unix'><source mode='bind' path='{serial}'/>\
             <log file='{console}' append='on'/></serial>\n\
             </devices>\n</domain>\n"
        )
    }
}

impl Pair {
    /// Defines a VM on a host, starts it, and waits until its guest writes.
    ///
    /// # Errors
    /// libvirt or QEMU refuses, or the guest does not start.
    pub fn create(&self, side: Side, vm: &Vm) -> Result<(), LibvirtError> {
        let accelerator = if fs::File::open("/dev/kvm").is_ok() {
            "kvm"
        } else {
            "qemu"
        };
        for at_side in [side, side.other()] {
            let daemon = self.on(at_side);
            let write = |kind, content: &[u8]| {
                let path = daemon.path(&vm.file(kind));
                fs::write(&path, content).map_err(at(&path))
            };
            write("elf", &bare_image(&vm.workload))?;
            write("xml", vm.xml(accelerator).as_bytes())?;
            match vm.disk {
                Some(_) if at_side == side => write("disk", &vm.disk_content())?,
                Some(bytes) => write("disk", &vec![0; bytes])?,
                None => {}
            }
        }
        self.must(side, &format!("define {}", vm.file("xml")))?;
        self.must(side, &format!("start {}", vm.name))?;
        self.visits(side, vm).map(drop)
    }

    /// Runs virsh on a host, and expects its success. Returns what it printed.
    ///
    /// # Errors
    /// virsh failed.
    pub fn must(&self, side: Side, words: &str) -> Result<String, LibvirtError> {
        let ended = self.on(side).virsh(words)?;
        if ended.is_ok() {
            return Ok(ended.said);
        }
        Err(LibvirtError::Virsh(words.to_owned(), ended.said))
    }

    /// The state of a VM and the reason, as `virsh domstate` prints them; `None` if the host does
    /// not have the VM.
    ///
    /// # Errors
    /// virsh cannot be run.
    pub fn state(&self, side: Side, vm: &Vm) -> Result<Option<String>, LibvirtError> {
        let ended = self
            .on(side)
            .virsh(&format!("domstate --reason {}", vm.name))?;
        Ok(ended.is_ok().then(|| ended.said.trim().to_owned()))
    }

    /// Waits for the guest's next report. Returns the number of its visits so far.
    ///
    /// # Errors
    /// The guest does not run on this host, or has found a wrong page.
    pub fn visits(&self, side: Side, vm: &Vm) -> Result<u64, LibvirtError> {
        self.ask(side, vm, "", |line| match line {
            Line::Beat { visits, .. } => Some(visits),
            _ => None,
        })
    }

    /// Lets the guest check all of its pages.
    ///
    /// # Errors
    /// The guest does not run on this host, or has found a wrong page.
    pub fn check(&self, side: Side, vm: &Vm) -> Result<(), LibvirtError> {
        let pages = self.ask(side, vm, "c\n", |line| match line {
            Line::Checked { pages, .. } => Some(pages),
            _ => None,
        })?;
        if pages == vm.workload.pages {
            return Ok(());
        }
        let said = format!("{pages} of {} pages", vm.workload.pages);
        Err(LibvirtError::Guest(
            "has checked too few pages".to_owned(),
            said,
        ))
    }

    /// The content of a VM's disk on a host.
    ///
    /// # Errors
    /// The VM has no disk.
    pub fn disk(&self, side: Side, vm: &Vm) -> Result<Vec<u8>, LibvirtError> {
        let path = self.on(side).path(&vm.file("disk"));
        fs::read(&path).map_err(at(&path))
    }

    /// What the guest has printed on a host.
    #[must_use]
    pub fn console(&self, side: Side, vm: &Vm) -> String {
        let text = fs::read(self.on(side).path(&vm.file("console"))).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Sends `input` to the guest, and waits for a line that `wanted` accepts.
    fn ask(
        &self,
        side: Side,
        vm: &Vm,
        input: &str,
        wanted: impl Fn(Line) -> Option<u64>,
    ) -> Result<u64, LibvirtError> {
        let path = self.on(side).path(&vm.file("serial"));
        let mut stream = UnixStream::connect(&path).map_err(at(&path))?;
        stream.set_read_timeout(Some(TIMEOUT)).map_err(at(&path))?;
        stream.write_all(input.as_bytes()).map_err(at(&path))?;
        // A guest that has found a wrong page reports that and stops. The report may have been
        // printed before this connection, so search the earlier output for it.
        let wrong = |text: &str| matches!(Line::parse(text), Some(Line::Wrong { .. }));
        if let Some(line) = self.console(side, vm).lines().find(|text| wrong(text)) {
            return Err(LibvirtError::Guest(
                "found a wrong page".to_owned(),
                line.to_owned(),
            ));
        }
        let deadline = Instant::now() + TIMEOUT;
        let mut lines = BufReader::new(stream).lines();
        while Instant::now() < deadline {
            let Some(Ok(text)) = lines.next() else { break };
            match Line::parse(&text) {
                Some(Line::Wrong { .. }) => {
                    return Err(LibvirtError::Guest("found a wrong page".to_owned(), text));
                }
                Some(line) => {
                    if let Some(number) = wanted(line) {
                        return Ok(number);
                    }
                }
                None => {}
            }
        }
        let said = self.console(side, vm);
        let last = said.len().saturating_sub(400);
        let last = said.get(last..).unwrap_or_default().to_owned();
        Err(LibvirtError::Guest(
            "is silent; its last lines".to_owned(),
            last,
        ))
    }
}
