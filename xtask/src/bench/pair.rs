//! The two ends of a tunnel as processes.

use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dunlin_bench::process;

use super::ends::{Ends, Site, Stream, TIMEOUT, Variant};
use super::program;

/// The line that an end prints as soon as it listens.
pub(super) const LISTENING: &str = "listening";

/// The text that `sshd` logs on standard error as soon as it listens.
const SSHD_LISTENING: &str = "Server listening on ";

/// The cipher of OpenSSH's connection.
const SSH_CIPHER: &str = "aes256-gcm@openssh.com";

/// The processes of a variant, and the addresses to which the near hypervisor connects.
pub(super) struct Pair {
    pub(super) variant: Variant,
    /// The versions of the programs, for those that are not Dunlin's and change the result.
    pub(super) version: Option<String>,
    processes: Vec<Process>,
    unix: PathBuf,
    tcp: SocketAddr,
    pub(super) qemu: PathBuf,
}

/// A process of an end. Dropping it kills the process.
pub(super) struct Process(pub(super) Child);

/// The output stream on which a process reports that it listens.
#[derive(Clone, Copy)]
pub(super) enum Report {
    Stdout,
    Stderr,
}

impl Process {
    /// Starts a process and waits until a line of its output begins with `ready`.
    pub(super) fn start(mut command: Command, report: Report, ready: &str) -> Result<Self> {
        command.stdin(Stdio::null());
        match report {
            Report::Stdout => command.stdout(Stdio::piped()),
            Report::Stderr => command.stdout(Stdio::null()).stderr(Stdio::piped()),
        };
        let child = command.spawn();
        let mut process = Self(child.with_context(|| format!("cannot start {command:?}"))?);
        let output: Option<Box<dyn Read + Send>> = match report {
            Report::Stdout => process.0.stdout.take().map(|it| Box::new(it) as _),
            Report::Stderr => process.0.stderr.take().map(|it| Box::new(it) as _),
        };
        let mut output = BufReader::new(output.context("the process has no output pipe")?);
        let mut said = String::new();
        let mut line = 0;
        while !said[line..].starts_with(ready) {
            line = said.len();
            if output.read_line(&mut said)? == 0 {
                bail!("{command:?} does not listen; its output is {said:?}");
            }
        }
        // Discard the remaining lines, because a full pipe would stop the process.
        thread::spawn(move || io::copy(&mut output, &mut io::sink()));
        Ok(process)
    }

    /// Starts stunnel with the identity in a folder, and writes its configuration with these
    /// services. Returns before stunnel listens.
    pub(super) fn stunnel(identity: &Path, config: &Path, services: &str) -> Result<Self> {
        let file = |name: &str| identity.join(name).display().to_string();
        let text = format!(
            "foreground = yes\npid =\ndebug = err\ncert = {}\nkey = {}\nCAfile = {}\n\
             verifyChain = yes\n{services}",
            file("cert.pem"),
            file("key.pem"),
            file("ca-cert.pem"),
        );
        fs::write(config, text)?;
        let child = program::stunnel()?
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start stunnel")?;
        Ok(Self(child))
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The process and its descendants, because `sshd` serves a connection in a child. The function
    /// finds only children that the first thread of their parent has started.
    fn family(&self) -> Result<Vec<u32>> {
        let mut family = vec![self.id()];
        let mut next = 0;
        while let Some(id) = family.get(next) {
            let path = format!("/proc/{id}/task/{id}/children");
            let children = fs::read_to_string(&path).with_context(|| path)?;
            for child in children.split_whitespace() {
                family.push(child.parse()?);
            }
            next += 1;
        }
        Ok(family)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Ignore an error: kill(2) fails only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Pair {
    pub(super) fn start(site: &Site, variant: Variant) -> Result<Self> {
        let mut pair = Self {
            variant,
            version: None,
            processes: Vec::new(),
            unix: site.path(&format!("in-{variant}")),
            tcp: free_port()?,
            qemu: site.path(&format!("qemu-in-{variant}")),
        };
        match variant {
            Variant::Bare | Variant::QemuTls => {
                pair.unix = site.path("out");
                pair.tcp = site.tcp.local_addr()?;
                pair.qemu = site.qemu();
            }
            Variant::Floor => {
                pair.forwards(site, [&["--sealed", "listen"], &["--sealed", "target"]])?;
            }
            Variant::Pipeline => pair.forwards(site, [&[], &[]])?,
            Variant::Stunnel => pair.stunnels(site)?,
            Variant::OpenSsh => pair.openssh(site)?,
            Variant::GoProxy => pair.go_proxies(site)?,
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

    /// CPU time of both ends so far, user and system, in steps of 10 ms.
    pub(super) fn cpu_s(&self) -> Result<f64> {
        let mut seconds = 0.0;
        for process in &self.processes {
            for id in process.family()? {
                seconds += process::cpu_s(id)?;
            }
        }
        Ok(seconds)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.processes.iter().map(Process::id)
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
            // Use a separate control directory, because a socket in the default one may belong to
            // another tunnel on this host.
            command.arg("--control").arg(site.path("control"));
            command.stderr(Stdio::null());
            let process = Process::start(command, Report::Stdout, "listening on ")?;
            self.processes.push(process);
        }
        Ok(())
    }

    /// Runs this program's forwarder at both ends, with the arguments for the far end and the
    /// near end.
    fn forwards(&mut self, site: &Site, arguments: [&[&str]; 2]) -> Result<()> {
        for (places, arguments) in self.places(site)?.into_iter().zip(arguments) {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["bench", "forward"]).args(arguments);
            command.args(places);
            let process = Process::start(command, Report::Stdout, LISTENING)?;
            self.processes.push(process);
        }
        Ok(())
    }

    fn go_proxies(&mut self, site: &Site) -> Result<()> {
        let proxy = site.path("go-proxy");
        program::build_go_proxy(&proxy)?;
        let peers: [(&str, &[&str]); 2] = [("b", &[]), ("a", &["-peer", "b.test"])];
        for (places, (host, peer)) in self.places(site)?.into_iter().zip(peers) {
            let mut command = Command::new(&proxy);
            command.arg("-identity").arg(site.path(host)).args(peer);
            command.args(places);
            let process = Process::start(command, Report::Stdout, LISTENING)?;
            self.processes.push(process);
        }
        Ok(())
    }

    /// The arguments of the far end and of the near end: for each route, the address on which the
    /// end listens, followed by the address to which it connects.
    fn places(&self, site: &Site) -> Result<[Vec<String>; 2]> {
        let (mut far, mut near) = (Vec::new(), Vec::new());
        for (_, listen, target) in self.routes(site)? {
            let middle = format!("tcp:{}", free_port()?);
            far.extend([middle.clone(), target]);
            near.extend([listen, middle]);
        }
        Ok([far, near])
    }

    fn openssh(&mut self, site: &Site) -> Result<()> {
        let folder = site.path("openssh");
        fs::create_dir(&folder)?;
        let file = |name: &str| folder.join(name).display().to_string();
        let programs = program::openssh(&folder)?;
        for key in ["host", "user"] {
            let mut keygen = Command::new(&programs.keygen);
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &file(key)]);
            let done = keygen.output().context("cannot start ssh-keygen")?;
            ensure!(done.status.success(), "ssh-keygen failed: {done:?}");
        }
        let address = free_port()?;
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let key = fs::read_to_string(file("host.pub"))?;
        fs::write(file("known"), format!("[{host}]:{port} {key}"))?;
        let config = format!(
            "{}ListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nCiphers {SSH_CIPHER}\n",
            programs.config,
            file("host"),
            file("user.pub"),
        );
        fs::write(file("sshd_config"), config)?;
        let (mut server, user) = program::as_ssh_user(&programs.sshd)?;
        server.args(["-D", "-e", "-f", &file("sshd_config")]);
        let server = Process::start(server, Report::Stderr, SSHD_LISTENING)?;
        self.processes.push(server);

        let mut client = Command::new(&programs.ssh);
        client.args(["-N", "-F", "none", "-c", SSH_CIPHER]);
        client.args(["-p", &port, "-l", &user, "-i", &file("user")]);
        for option in [
            &*format!("UserKnownHostsFile={}", file("known")),
            "GlobalKnownHostsFile=/dev/null",
            "StrictHostKeyChecking=yes",
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "ExitOnForwardFailure=yes",
            // ssh runs this command as soon as its forwarded sockets listen.
            "PermitLocalCommand=yes",
            &*format!("LocalCommand=echo {LISTENING}"),
        ] {
            client.args(["-o", option]);
        }
        for (_, listen, target) in self.routes(site)? {
            client.arg("-L");
            client.arg(format!("{}:{}", untyped(&listen), untyped(&target)));
        }
        client.arg(host);
        let client = Process::start(client, Report::Stdout, LISTENING)?;
        self.processes.push(client);
        Ok(())
    }

    fn stunnels(&mut self, site: &Site) -> Result<()> {
        self.version = Some(program::stunnel_version()?);
        let (mut far, mut near) = (String::new(), "client = yes\n".to_owned());
        let mut ports = Vec::new();
        for (name, listen, target) in self.routes(site)? {
            let port = free_port()?;
            ports.push(port);
            let (listen, target) = (untyped(&listen), untyped(&target));
            far += &format!("[{name}]\naccept = {port}\nconnect = {target}\n");
            near += &format!("[{name}]\naccept = {listen}\nconnect = {port}\n");
        }
        for (side, host, services) in [("far", "b", far), ("near", "a", near)] {
            let config = site.path(&format!("stunnel-{side}.conf"));
            let process = Process::stunnel(&site.path(host), &config, &services)?;
            self.processes.push(process);
        }
        wait("stunnel at the far side", || {
            ports.iter().all(|port| TcpStream::connect(port).is_ok())
        })?;
        wait("stunnel at the near side", || {
            self.unix.exists() && self.qemu.exists()
        })?;
        // Wait before connecting, because stunnel creates its sockets before it listens on them.
        thread::sleep(Duration::from_millis(200));
        Ok(())
    }
}

/// An address without its type, as stunnel and OpenSSH write it.
fn untyped(address: &str) -> &str {
    let path = address.strip_prefix("unix:");
    path.or(address.strip_prefix("tcp:")).unwrap_or(address)
}

pub(super) fn wait(what: &str, there: impl Fn() -> bool) -> Result<()> {
    let until = Instant::now() + TIMEOUT;
    while !there() {
        if Instant::now() > until {
            bail!("{what} does not listen after {TIMEOUT:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

pub(super) fn free_port() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lose_their_type_only() {
        assert_eq!(untyped("unix:/run/tcp:x"), "/run/tcp:x");
        assert_eq!(untyped("tcp:127.0.0.1:1"), "127.0.0.1:1");
    }

    fn shell(script: &str, report: Report) -> Result<Process> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::start(command, report, LISTENING)
    }

    #[test]
    fn a_process_is_ready_when_it_says_so() {
        shell("echo first; echo listening; sleep 60", Report::Stdout).unwrap();
        shell("echo listening now >&2; sleep 60", Report::Stderr).unwrap();
        let error = shell("echo the cause", Report::Stdout).err().unwrap();
        assert!(error.to_string().contains("the cause"), "{error}");
    }

    #[test]
    fn the_family_includes_grandchildren() {
        let script = "sh -c 'sleep 1 & echo listening; wait' & wait";
        let process = shell(script, Report::Stdout).unwrap();
        assert_eq!(process.family().unwrap().len(), 3);
    }
}
