//! One boot of a virtual machine: starts QEMU, records its output, and kills it if it hangs.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_rig::debian::{Kernel, Qemu};

use super::verdict::{Record, Said};

/// A boot takes 10 to 20 seconds on an idle host. The limit allows for a parallel build.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// Time limit for the next report of the runner, which runs the tests inside the guest. While a
/// test runs, the test's own limit is added. Normally the runner enforces that limit itself.
const GRACE: Duration = Duration::from_secs(30);

/// The factor for every time limit if the guest's clock counts instructions. With such a clock, a
/// second of the guest takes longer than a real second.
const COUNTING_FACTOR: u32 = 10;

/// What to boot, with which hardware and arguments.
#[derive(Debug)]
pub struct Machine<'a> {
    /// The emulator.
    pub qemu: &'a Qemu,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The initramfs archive.
    pub initramfs: &'a Path,
    /// Virtual CPUs, 1 to 5.
    pub cpus: u32,
    /// Whether the guest's clock counts instructions.
    pub counting: bool,
    /// The folder for the console log and the tests' files.
    pub folder: &'a Path,
    /// Additional arguments for QEMU.
    pub qemu_arguments: Vec<String>,
    /// Additional kernel parameters.
    pub kernel_arguments: Vec<String>,
    /// The time limit for the start.
    pub boot_limit: Duration,
}

enum Event {
    Console(String),
    Said(Said),
    /// The console was closed, because QEMU has exited.
    Ended,
}

impl<'a> Machine<'a> {
    /// A machine without additional arguments.
    #[must_use]
    pub fn new(
        qemu: &'a Qemu,
        kernel: &'a Kernel,
        initramfs: &'a Path,
        folder: &'a Path,
        cpus: u32,
    ) -> Self {
        Self {
            qemu,
            kernel,
            initramfs,
            cpus,
            counting: false,
            folder,
            qemu_arguments: Vec::new(),
            kernel_arguments: Vec::new(),
            boot_limit: BOOT_LIMIT,
        }
    }

    /// Boots, runs the tests and returns the record. `limit` returns a test's time limit;
    /// `progress` receives each report of the guest as it arrives.
    ///
    /// # Errors
    /// QEMU does not start, or the folder cannot be written. A failing guest is not an error.
    pub fn run(
        &self,
        limit: impl Fn(&str) -> Duration,
        mut progress: impl FnMut(&Said),
    ) -> Result<Record> {
        static BOOTS: AtomicU32 = AtomicU32::new(0);
        let number = BOOTS.fetch_add(1, Ordering::Relaxed);
        // Distinguishes the runner's lines from the output of a test.
        let token = format!("rig-{}-{number}:", std::process::id());
        fs::create_dir_all(self.folder)?;
        let report = Channel::new(&token, "report")?;
        let files = Channel::new(&token, "files")?;
        let errors_at = self.folder.join("qemu.log");

        let mut command = self.command(&token);
        for channel in [&report, &files] {
            channel.add_to(&mut command);
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors_at)?)
            .spawn()
            .context("cannot start setpriv (of util-linux), which starts QEMU")?;
        let console = child.stdout.take().expect("the command has a stdout pipe");

        let (events, heard) = mpsc::channel();
        let files_at = self.folder.join("files.tar");
        let log = File::create(self.folder.join("console.log"))?;
        let factor = if self.counting { COUNTING_FACTOR } else { 1 };
        let record = thread::scope(|scope| -> Result<Record> {
            let of_console = events.clone();
            scope.spawn(move || read_console(console, log, &of_console));
            let reported =
                scope.spawn(|| report.accept(|stream| read_report(stream, &token, &events)));
            let saved = scope.spawn(|| {
                files.accept(|stream| {
                    // Ignore an error: it means that the guest has ended. Keep the files that have
                    // arrived.
                    let _ = io::copy(&mut &stream, &mut File::create(&files_at)?);
                    Ok(())
                })
            });
            let mut record = Record {
                token: token.clone(),
                ..Record::default()
            };
            let next_limit = |said: &Said| match said {
                Said::Begin(name) => factor * (limit(name) + GRACE),
                _ => factor * GRACE,
            };
            let limit = factor * self.boot_limit;
            listen(
                &heard,
                &mut child,
                &mut record,
                limit,
                next_limit,
                &mut progress,
            );
            // If QEMU did not start, it has connected to neither channel, and both threads still
            // wait.
            report.wake();
            files.wake();
            reported.join().expect("the thread does not panic")?;
            saved.join().expect("the thread does not panic")?;
            // The console may close before the last report has been read.
            for event in heard.try_iter() {
                record.hear(event, &mut progress);
            }
            Ok(record)
        })?;
        child.wait()?;
        let complaints = fs::read_to_string(&errors_at)?;
        if record.console.is_empty() && !complaints.is_empty() {
            bail!("QEMU does not start: {complaints}");
        }
        unpack(&files_at, self.folder)?;
        Ok(record)
    }

    /// Opens a shell on the console, attached to this terminal, until the guest powers off.
    ///
    /// # Errors
    /// QEMU does not start.
    pub fn shell(&self) -> Result<()> {
        let status = self
            .command("rig")
            .args(["-chardev", "null,id=report", "-chardev", "null,id=files"])
            .status()?;
        if !status.success() {
            bail!("QEMU exited with {status}");
        }
        Ok(())
    }

    fn command(&self, token: &str) -> Command {
        let qemu = self.qemu.command();
        // setpriv sets the parent-death signal, so that QEMU ends with this process.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]);
        command.arg(qemu.get_program()).args(qemu.get_args());
        for (name, value) in qemu.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let (accelerator, clock): (_, &[&str]) = if self.counting {
            // One instruction takes one nanosecond of guest time, regardless of the host's load.
            ("tcg,thread=single", &["-icount", "shift=0,sleep=off"])
        } else {
            ("tcg,thread=multi", &[])
        };
        let mut arguments = vec![
            // With these options the kernel panics and resets after an oops; QEMU exits at the
            // reset.
            "console=ttyS0 ignore_loglevel printk.devkmsg=on oops=panic panic=-1".to_owned(),
            // An emulated CPU on a busy host can stall for seconds. This is not a fault of the
            // kernel.
            "rcupdate.rcu_cpu_stall_timeout=120 watchdog_thresh=60 tsc=reliable".to_owned(),
            format!("rdinit=/rig/init rig.token={token}"),
        ];
        if self.counting {
            arguments.push("rig.counting".to_owned());
        }
        if std::env::var_os("DUNLIN_SOAK").is_some_and(|soak| soak == "1") {
            arguments.push("rig.soak".to_owned());
        }
        arguments.extend(self.kernel_arguments.iter().cloned());
        command
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .args(["-accel", accelerator])
            .args(clock)
            .args(["-cpu", "max", "-m", "1536"])
            // The PIT keeps counting while the CPU is stalled. On a busy host, calibration against
            // the PIT can therefore yield a third of the TSC's true rate. The guest's clock, and
            // with it every limit, would then run three times too fast. Without a PIT the kernel
            // calibrates against the HPET, which is not affected.
            .args(["-machine", "pit=off"])
            .args(["-smp", &self.cpus.to_string()])
            .args(["-serial", "stdio"])
            .args(["-device", "virtio-serial-pci"])
            .args(["-device", "virtserialport,chardev=report,name=report"])
            .args(["-device", "virtserialport,chardev=files,name=files"])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(self.initramfs)
            .args(["-append", &arguments.join(" ")])
            .args(&self.qemu_arguments);
        command
    }
}

/// Records output until QEMU exits. Kills QEMU if the runner reports nothing within the limit,
/// whatever the console and the tests print.
fn listen(
    heard: &mpsc::Receiver<Event>,
    child: &mut Child,
    record: &mut Record,
    boot_limit: Duration,
    next_limit: impl Fn(&Said) -> Duration,
    progress: &mut impl FnMut(&Said),
) {
    let mut since = Instant::now();
    let mut limit = boot_limit;
    loop {
        match heard.recv_timeout(limit.saturating_sub(since.elapsed())) {
            Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(event) => {
                if let Event::Said(said) = &event
                    && !matches!(said, Said::Output(_))
                {
                    limit = next_limit(said);
                    since = Instant::now();
                }
                record.hear(event, progress);
            }
            Err(RecvTimeoutError::Timeout) => {
                record.hung = Some(limit);
                // Ignore an error: QEMU may have just exited. The console closes in either case.
                let _ = child.kill();
                limit = Duration::MAX / 2;
            }
        }
    }
}

impl Record {
    fn hear(&mut self, event: Event, progress: &mut impl FnMut(&Said)) {
        match event {
            Event::Console(line) => self.console.push(line),
            Event::Said(said) => {
                progress(&said);
                self.said.push(said);
            }
            Event::Ended => {}
        }
    }
}

/// The socket that QEMU connects to for one of the guest's ports. An abstract address leaves no
/// file.
struct Channel {
    name: &'static str,
    address: String,
    listener: UnixListener,
}

impl Channel {
    fn new(token: &str, name: &'static str) -> Result<Self> {
        let address = format!("dunlin-{token}{name}");
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&address)?)?;
        Ok(Self {
            name,
            address,
            listener,
        })
    }

    fn add_to(&self, command: &mut Command) {
        let Self { name, address, .. } = self;
        command.args([
            "-chardev",
            &format!("socket,id={name},path={address},abstract=on"),
        ]);
    }

    fn accept(&self, read: impl FnOnce(UnixStream) -> Result<()>) -> Result<()> {
        let (stream, _) = self.listener.accept()?;
        read(stream)
    }

    fn wake(&self) {
        // If QEMU has connected, no thread is in accept() and this connection stays in the queue.
        let _ = SocketAddr::from_abstract_name(&self.address)
            .and_then(|address| UnixStream::connect_addr(&address));
    }
}

fn read_console(console: impl Read, mut log: File, events: &Sender<Event>) {
    let mut lines = BufReader::new(console);
    let mut line = Vec::new();
    while lines
        .read_until(b'\n', &mut line)
        .is_ok_and(|read| read > 0)
    {
        // Ignore an error: the log is only for people. The verdict uses the lines that this thread
        // sends to `events`.
        let _ = log.write_all(&line);
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if events.send(Event::Console(text)).is_err() {
            return;
        }
        line.clear();
    }
    let _ = events.send(Event::Ended);
}

fn read_report(stream: UnixStream, token: &str, events: &Sender<Event>) -> Result<()> {
    let mut lines = BufReader::new(stream);
    let mut line = Vec::new();
    while lines
        .read_until(b'\n', &mut line)
        .is_ok_and(|read| read > 0)
    {
        for said in Said::parse(&String::from_utf8_lossy(&line), token) {
            if events.send(Event::Said(said)).is_err() {
                return Ok(());
            }
        }
        line.clear();
    }
    Ok(())
}

/// Unpacks the archives that the guest sends, one for each test that left files.
fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    if fs::metadata(archive).map_or(true, |data| data.len() == 0) {
        return Ok(());
    }
    let done = Command::new("tar")
        .args(["--extract", "--ignore-zeros", "--no-same-owner", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(folder)
        .output()
        .context("cannot start tar")?;
    if !done.status.success() {
        // The machine may have ended while it was sending.
        eprintln!(
            "the tests' files are incomplete: {}",
            String::from_utf8_lossy(&done.stderr).trim()
        );
    }
    fs::remove_file(archive)?;
    Ok(())
}
