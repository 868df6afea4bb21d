//! The two ends of a tunnel as processes, and the hypervisors' sockets on either side.

use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use dunlin_test_base::Scratch;

use super::program;

/// The time limit for every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The line that a forwarder prints when it accepts connections.
pub(super) const LISTENING: &str = "listening";

/// The transport under measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Variant {
    /// No tunnel: the sender's socket is connected to the reader's.
    Bare,
    /// Two processes that move bytes without encryption ([`super::forward`]).
    Pipeline,
    Stunnel,
    Relay,
    /// A tunnel in stripe mode with this number of lanes.
    Stripe(u16),
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bare => formatter.write_str("bare"),
            Self::Pipeline => formatter.write_str("pipeline"),
            Self::Stunnel => formatter.write_str("stunnel"),
            Self::Relay => formatter.write_str("relay"),
            Self::Stripe(lanes) => write!(formatter, "stripe-{lanes}"),
        }
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let stripe = text.strip_prefix("stripe-").map(str::parse);
        match (text, stripe) {
            ("bare", _) => Ok(Self::Bare),
            ("pipeline", _) => Ok(Self::Pipeline),
            ("stunnel", _) => Ok(Self::Stunnel),
            ("relay", _) => Ok(Self::Relay),
            (_, Some(Ok(lanes @ 1..=128))) => Ok(Self::Stripe(lanes)),
            _ => Err(format!(
                "there is no variant {text:?}: bare, pipeline, stunnel, relay, stripe-N"
            )),
        }
    }
}

/// The socket type of the hypervisors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    Unix,
    Tcp,
}

impl Ends {
    pub(super) const BOTH: [Self; 2] = [Self::Unix, Self::Tcp];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
        }
    }
}

/// A hypervisor's connection.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub(super) fn shutdown(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Write),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write),
        }
    }

    pub(super) fn set_write_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_write_timeout(limit),
            Self::Tcp(stream) => stream.set_write_timeout(limit),
        }
    }

    fn patient(self) -> io::Result<Self> {
        match &self {
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
            }
        }
        Ok(self)
    }
}

impl Read for &Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).read(bytes),
            Stream::Tcp(stream) => (&*stream).read(bytes),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&*stream).write(bytes),
            Stream::Tcp(stream) => (&*stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// State shared by all variants: certificates, and the far hypervisor's listener.
pub(super) struct Site {
    dunlin: PathBuf,
    scratch: Scratch,
    unix: UnixListener,
    tcp: TcpListener,
}

impl Site {
    pub(super) fn new(dunlin: PathBuf) -> Result<Self> {
        let scratch = Scratch::try_new()?;
        let pki = |words: &[&str]| -> Result<()> {
            let mut command = Command::new(&dunlin);
            command.arg("pki").args(words).current_dir(scratch.path());
            let done = command.output().context("cannot start dunlin")?;
            if !done.status.success() {
                bail!("{}", String::from_utf8_lossy(&done.stderr));
            }
            Ok(())
        };
        pki(&["init", "ca"])?;
        pki(&["issue", "--ca", "ca", "--name", "a.test", "a"])?;
        pki(&["issue", "--ca", "ca", "--name", "b.test", "b"])?;
        let unix = UnixListener::bind(scratch.join("out"))?;
        unix.set_nonblocking(true)?;
        let tcp = TcpListener::bind("127.0.0.1:0")?;
        tcp.set_nonblocking(true)?;
        Ok(Self {
            dunlin,
            scratch,
            unix,
            tcp,
        })
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// The socket of the far QEMU.
    pub(super) fn qemu(&self) -> PathBuf {
        self.path("qemu-out")
    }

    /// Accepts the next connection at the far hypervisor.
    pub(super) fn accept(&self, ends: Ends) -> Result<Stream> {
        let until = Instant::now() + TIMEOUT;
        loop {
            let accepted = match ends {
                Ends::Unix => self.unix.accept().map(|(stream, _)| Stream::Unix(stream)),
                Ends::Tcp => self.tcp.accept().map(|(stream, _)| Stream::Tcp(stream)),
            };
            match accepted {
                Ok(stream) => return Ok(stream.patient()?),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() > until {
                        bail!("nothing comes out at the far side");
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Two processes, and the addresses on which they accept connections.
pub(super) struct Pair {
    pub(super) variant: Variant,
    processes: Vec<Process>,
    unix: PathBuf,
    tcp: SocketAddr,
    pub(super) qemu: PathBuf,
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Pair {
    pub(super) fn start(site: &Site, variant: Variant) -> Result<Self> {
        let mut pair = Self {
            variant,
            processes: Vec::new(),
            unix: site.path(&format!("in-{variant}")),
            tcp: free_port()?,
            qemu: site.path(&format!("qemu-in-{variant}")),
        };
        match variant {
            Variant::Bare => {
                pair.unix = site.path("out");
                pair.tcp = site.tcp.local_addr()?;
                pair.qemu = site.qemu();
            }
            Variant::Pipeline => pair.forwards(site)?,
            Variant::Stunnel => pair.stunnels(site)?,
            Variant::Relay => {
                let ports = [free_port()?, free_port()?, free_port()?];
                let far =
                    |route: usize| format!("mode = \"relay\"\ntls_listen = \"{}\"\n", ports[route]);
                let near = |route: usize| format!("mode = \"relay\"\nto = \"{}\"\n", ports[route]);
                pair.dunlins(site, free_port()?, 4, far, near)?;
            }
            Variant::Stripe(lanes) => {
                let port = free_port()?;
                let near = |_: usize| format!("to = \"{port}\"\nlanes = {lanes}\n");
                pair.dunlins(site, port, lanes, |_| String::new(), near)?;
            }
        }
        Ok(pair)
    }

    /// CPU time of both processes so far, user and system (proc_pid_stat(5)).
    pub(super) fn cpu(&self) -> Result<Duration> {
        let mut ticks = 0;
        for process in &self.processes {
            let stat = fs::read_to_string(format!("/proc/{}/stat", process.0.id()))?;
            // The command's name may contain spaces; utime and stime are fields 14 and 15.
            let (_, rest) = stat.rsplit_once(')').context("no stat of a process")?;
            let fields = rest.split_whitespace().skip(11).take(2);
            for field in fields {
                ticks += field.parse::<u64>()?;
            }
        }
        // USER_HZ, which Linux reports as 100 on every machine.
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Connects to the near end.
    pub(super) fn connect(&self, ends: Ends) -> Result<Stream> {
        let stream = match ends {
            Ends::Unix => Stream::Unix(UnixStream::connect(&self.unix)?),
            Ends::Tcp => Stream::Tcp(TcpStream::connect(self.tcp)?),
        };
        Ok(stream.patient()?)
    }

    fn routes(&self, site: &Site) -> Result<[(&'static str, String, String); 3]> {
        let unix = |path: &Path| format!("unix:{}", path.display());
        Ok([
            ("unix", unix(&self.unix), unix(&site.path("out"))),
            (
                "tcp",
                format!("tcp:{}", self.tcp),
                format!("tcp:{}", site.tcp.local_addr()?),
            ),
            ("qemu", unix(&self.qemu), unix(&site.qemu())),
        ])
    }

    fn dunlins(
        &mut self,
        site: &Site,
        port: SocketAddr,
        lanes: u16,
        far: impl Fn(usize) -> String,
        near: impl Fn(usize) -> String,
    ) -> Result<()> {
        let of = |host: &str, listen: SocketAddr| {
            let identity = site.path(host);
            format!("listen = \"{listen}\"\nidentity = {identity:?}\n[limits]\nlanes = {lanes}\n")
        };
        let mut far_file = of("b", port);
        let mut near_file = of("a", free_port()?);
        for (number, (name, listen, target)) in self.routes(site)?.into_iter().enumerate() {
            far_file += &format!(
                "[route.{name}]\n{}target = {target:?}\nallow = [\"a.test\"]\n",
                far(number)
            );
            near_file += &format!(
                "[route.{name}]\n{}listen = {listen:?}\npeers = [\"b.test\"]\n",
                near(number)
            );
        }
        for (host, text) in [("far", far_file), ("near", near_file)] {
            let file = site.path(&format!("{host}-{}.toml", self.variant));
            fs::write(&file, text)?;
            let mut command = Command::new(&site.dunlin);
            command.args(["tunnel", "run", "--config"]).arg(&file);
            // Does not collide with other tunnels on this host.
            command.arg("--control").arg(site.path("control"));
            let mut child = command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()?;
            let mut said = String::new();
            let stdout = child.stdout.take().context("it was asked for")?;
            let mut stdout = BufReader::new(stdout);
            stdout.read_line(&mut said)?;
            // Discard the remaining lines.
            thread::spawn(move || io::copy(&mut stdout, &mut io::sink()));
            self.processes.push(Process(child));
            if !said.starts_with("listening on ") {
                bail!("dunlin does not run with {}", file.display());
            }
        }
        Ok(())
    }

    fn forwards(&mut self, site: &Site) -> Result<()> {
        let (mut far, mut near) = (Vec::new(), Vec::new());
        for (_, listen, target) in self.routes(site)? {
            let port = free_port()?;
            far.extend([format!("tcp:{port}"), target]);
            near.extend([listen, format!("tcp:{port}")]);
        }
        for places in [far, near] {
            let mut child = Command::new(std::env::current_exe()?)
                .args(["bench", "forward"])
                .args(places)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start this program again")?;
            let stdout = child.stdout.take().context("it was asked for")?;
            self.processes.push(Process(child));
            let mut said = String::new();
            BufReader::new(stdout).read_line(&mut said)?;
            if said.trim_end() != LISTENING {
                bail!("the pipeline does not run");
            }
        }
        Ok(())
    }

    fn stunnels(&mut self, site: &Site) -> Result<()> {
        // stunnel's syntax for the same addresses.
        let place = |text: String| {
            let path = text.strip_prefix("unix:");
            path.or(text.strip_prefix("tcp:"))
                .unwrap_or(&text)
                .to_owned()
        };
        let of = |host: &str| {
            let file = |name: &str| site.path(host).join(name).display().to_string();
            format!(
                "foreground = yes\npid =\ndebug = err\ncert = {}\nkey = {}\nCAfile = {}\n\
                 verifyChain = yes\n",
                file("cert.pem"),
                file("key.pem"),
                file("ca-cert.pem"),
            )
        };
        let (mut far, mut near) = (of("b"), of("a") + "client = yes\n");
        let mut ports = Vec::new();
        for (name, listen, target) in self.routes(site)? {
            let port = free_port()?;
            ports.push(port);
            far += &format!("[{name}]\naccept = {port}\nconnect = {}\n", place(target));
            near += &format!("[{name}]\naccept = {}\nconnect = {port}\n", place(listen));
        }
        for (host, text) in [("far", far), ("near", near)] {
            let file = site.path(&format!("stunnel-{host}.conf"));
            fs::write(&file, text)?;
            let child = program::stunnel()?
                .arg(&file)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .context("cannot start stunnel")?;
            self.processes.push(Process(child));
        }
        wait("stunnel at the far side", || {
            ports.iter().all(|port| TcpStream::connect(port).is_ok())
        })?;
        wait("stunnel at the near side", || {
            self.unix.exists() && self.qemu.exists()
        })?;
        // stunnel creates its sockets before it listens on them.
        thread::sleep(Duration::from_millis(200));
        Ok(())
    }
}

fn wait(what: &str, there: impl Fn() -> bool) -> Result<()> {
    let until = Instant::now() + TIMEOUT;
    while !there() {
        if Instant::now() > until {
            bail!("{what} does not listen");
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn free_port() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}
