//! The clients of `cargo xtask bench status`, in a process of their own. A process of hostile
//! clients has the scheduling policy `SCHED_IDLE`: it runs only on CPUs that are otherwise idle.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

/// The numbers of hostile clients of each kind: clients that ask for metrics, that send random
/// bytes, that send a wrong `Host`, and that do not read the answer.
const HOSTILE: [usize; 4] = [8, 4, 4, 20];
/// The time limit for connecting, and for each read and write.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a client that does not read keeps its end of the connection open. `serve-status` closes
/// its own end earlier.
const STAY: Duration = Duration::from_secs(15);
/// The pause after a failed connection.
const RETRY: Duration = Duration::from_millis(1);

/// Arguments of the process with the clients.
#[derive(Args, Debug)]
pub struct ClientsOptions {
    /// Runs many clients that ask without pauses, do not read, or send what is not a request.
    /// Without this flag, one client reads metrics and JSON once a second.
    #[arg(long)]
    hostile: bool,
    /// The address of `dunlin serve-status`.
    address: SocketAddr,
    /// The directory with the status sockets.
    statuses: PathBuf,
}

/// The number of answers of `serve-status`. The two answers that [`scrape`] reads count as one.
static ANSWERS: AtomicU64 = AtomicU64::new(0);
/// The number of answers of status sockets.
static STATUSES: AtomicU64 = AtomicU64::new(0);

/// Starts the clients. For each line on standard input, prints [`ANSWERS`] and [`STATUSES`].
/// Returns at the end of the input.
pub(super) fn run(options: &ClientsOptions) -> Result<()> {
    match options.hostile {
        false => scrape(options.address),
        true => {
            flood(options.address);
            for entry in fs::read_dir(&options.statuses)? {
                let path = entry?.path();
                repeat(1, &STATUSES, move || status(&path));
            }
        }
    }
    for line in io::stdin().lines() {
        line?;
        let counts = [&ANSWERS, &STATUSES].map(|count| count.load(Ordering::Relaxed));
        println!("{counts:?}");
    }
    Ok(())
}

/// Connects again and again on each of several threads, and counts the connections with an answer.
/// `connect` returns the length of the answer.
fn repeat(
    threads: usize,
    counter: &'static AtomicU64,
    connect: impl Fn() -> io::Result<u64> + Clone + Send + 'static,
) {
    for _ in 0..threads {
        let connect = connect.clone();
        thread::spawn(move || {
            loop {
                match connect() {
                    Ok(0) => {}
                    Ok(_) => _ = counter.fetch_add(1, Ordering::Relaxed),
                    Err(_) => thread::sleep(RETRY),
                }
            }
        });
    }
}

fn scrape(to: SocketAddr) {
    repeat(1, &ANSWERS, move || {
        thread::sleep(Duration::from_secs(1));
        ask(to, &get("/metrics", "localhost"))?;
        ask(to, &get("/status.json", "localhost"))
    });
}

fn flood(to: SocketAddr) {
    let [metrics, random, wrong_host, not_reading] = HOSTILE;
    let request = get("/metrics", "localhost");
    repeat(metrics, &ANSWERS, move || ask(to, &request));
    repeat(random, &ANSWERS, move || {
        let mut bytes = [0; 4096];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        ask(to, &bytes)
    });
    // A request with a wrong `Host`. A browser sends one if the name of a foreign web site resolves
    // to this host's address.
    let request = get("/", "evil.example");
    repeat(wrong_host, &ANSWERS, move || ask(to, &request));
    let request = get("/status.json", "localhost");
    repeat(not_reading, &ANSWERS, move || {
        let _open = send(to, &request)?;
        thread::sleep(STAY);
        Ok(0)
    });
}

fn get(path: &str, host: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes()
}

fn send(to: SocketAddr, request: &[u8]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&to, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    stream.write_all(request)?;
    Ok(stream)
}

fn ask(to: SocketAddr, request: &[u8]) -> io::Result<u64> {
    io::copy(&mut send(to, request)?, &mut io::sink())
}

fn status(path: &Path) -> io::Result<u64> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(LIMIT))?;
    io::copy(&mut stream, &mut io::sink())
}

/// The process with the clients. Dropping it kills the process. The process also ends with its
/// parent.
pub(super) struct Clients {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Clients {
    pub(super) fn start(hostile: bool, to: SocketAddr, statuses: &Path) -> Result<Self> {
        let own = std::env::current_exe()?;
        let mut command = Command::new(if hostile {
            Path::new("chrt")
        } else {
            own.as_path()
        });
        if hostile {
            // Let hostile clients run only on idle CPUs. Real ones run on other hosts, and take no
            // CPU time from this host.
            command.args(["--idle", "0"]).arg(&own);
        }
        command.args(["bench", "clients", &to.to_string()]);
        command.arg(statuses).args(hostile.then_some("--hostile"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn();
        let mut child = child.with_context(|| format!("cannot start {command:?}"))?;
        let output = child.stdout.take();
        let output = BufReader::new(output.context("the clients have no output pipe")?);
        Ok(Self { child, output })
    }

    /// The numbers of answers of `serve-status` and of status sockets so far.
    pub(super) fn counts(&mut self) -> Result<[u32; 2]> {
        let input = self.child.stdin.as_mut();
        writeln!(input.context("the clients have no input pipe")?)?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).context("the clients have ended")
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        // Ignore an error: kill(2) fails only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_client_sends_its_request_and_reads_the_whole_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let mut request = [0; 64];
            let (mut stream, _) = listener.accept().unwrap();
            let count = stream.read(&mut request).unwrap();
            stream.write_all(b"HTTP/1.1 421 ").unwrap();
            stream.write_all(b"Misdirected\r\n\r\n").unwrap();
            request[..count].to_vec()
        });
        assert_eq!(ask(to, &get("/", "evil.example")).unwrap(), 28);
        let request = server.join().unwrap();
        assert_eq!(request, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n");
        ask(to, b"").unwrap_err();
    }
}
