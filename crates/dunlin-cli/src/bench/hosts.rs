//! `dunlin bench lanes --security ipsec`: lane throughput between two hosts. One host is not
//! enough, because packets from a host to itself bypass IPsec.
//!
//! ```text
//!  --to                                                  --listen
//!   number of lanes ─ control connection (TLS) ────────▶ accepts the lanes, reads each to its end
//!   lanes: TLS, one SA, one per CPU, one per lane ══════▶
//!   ◀──────────────────── CPU time of the receiver ───── when all lanes have ended
//! ```

use dunlin_lane::sync::lock;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use dunlin::engine::memory::MappedMemory;
use dunlin::lane::accept::{Arrival, LaneSocket, accept};
use dunlin::lane::admit::{LaneAcceptor, TlsAcceptor};
use dunlin::lane::control::{self, ControlStream};
use dunlin::lane::data::DataSender;
use dunlin::lane::dial::{
    Connector, DialCancel, LaneDialer, LaneRequest, StandardConnector, TlsDialer,
};
use dunlin::lane::peers::PeerIdentity;
use dunlin::lane::policy::ClientTls;
use dunlin::lane::security::SealedLanes;
use dunlin_bench::Results;
use dunlin_ipsec::lanes::IpsecLanes;
use dunlin_linux::poll::waker;
use dunlin_proto::negotiate::{
    Features, LaneDirection, LaneOpen, LaneSecurity, Offer, Opening, SessionSecret, VERSIONS,
};

use super::rig::{memory, receive, send};
use crate::identity::{Accepting, Common, Reading, client_tls};
use crate::ipsec::ModeName;
use crate::log::warn;
use crate::options::{IpsecFlags, ipsec_lanes};
use crate::state::StatePath;

/// Time limit for a handshake, and for the receiving host's answer. The receiving host waits 60
/// times as long for a request.
const LIMIT: Duration = Duration::from_secs(60);
const SESSION: [u8; 16] = *b"dunlin bench ---";

/// Lanes between two hosts.
#[derive(Debug, Args)]
pub(super) struct BetweenHosts {
    /// Listen at this address for lanes from another host, until killed.
    #[arg(
        long,
        value_name = "ADDR",
        requires = "identity",
        conflicts_with = "to"
    )]
    listen: Option<String>,
    /// Send lanes to a host that runs with --listen.
    #[arg(long, value_name = "HOST:PORT", requires = "identity")]
    to: Option<String>,
    /// Directory with this host's certificates, for lanes between two hosts.
    #[arg(long, value_name = "DIR")]
    identity: Option<PathBuf>,
    /// A name that the other host's certificate must contain [default: the host in --to; with
    /// --listen, any certificate of the authority].
    #[arg(long, value_name = "NAME|PIN")]
    peer: Vec<String>,
    #[command(flatten)]
    ipsec: IpsecFlags,
    #[command(flatten)]
    state: StatePath,
}

/// The measured variants: TLS; IPsec with one SA for all CPUs; IPsec with one SA for each CPU;
/// IPsec with one SA for each lane.
const VARIANTS: [(&str, Option<(ModeName, bool)>); 4] = [
    ("tls", None),
    ("ipsec-one-sa", Some((ModeName::Cpu, false))),
    ("ipsec-per-cpu", Some((ModeName::Cpu, true))),
    ("ipsec-per-lane", Some((ModeName::Connection, true))),
];

impl BetweenHosts {
    /// Runs one end of the bench.
    ///
    /// # Errors
    /// A flag is missing, or the other host or the kernel failed.
    pub(super) fn run(&self, counts: &[usize], bench: &super::common::Common) -> Result<()> {
        let identity = self.identity.as_deref().context(
            "IPsec needs two hosts: give --listen on one, --to on the other, and --identity on both",
        )?;
        let common = Common::new(identity, self.peer.clone(), &Reading::default());
        match (&self.listen, &self.to) {
            (Some(listen), None) => self.take(listen, &common, bench.size),
            (None, Some(to)) => self.measure(to, &common, counts, bench),
            _ => bail!("give --listen on one host, and --to on the other"),
        }
    }

    fn ipsec_lanes(&self, mode: ModeName, per_cpu: bool) -> Result<IpsecLanes> {
        let mut options = self.ipsec.options(self.state.ipsec_records()?)?;
        options.mode = mode.into();
        if !per_cpu {
            options.cpus.clear();
        }
        ipsec_lanes(options, |text| warn([text]))
    }

    fn measure(
        &self,
        to: &str,
        common: &Common,
        counts: &[usize],
        bench: &super::common::Common,
    ) -> Result<()> {
        let (rounds, bytes) = (bench.rounds, bench.size);
        let (tls, warnings) = client_tls(common, to)?;
        warn(warnings);
        let source = memory(bytes, 1)?;
        let gibibytes = bytes as f64 / f64::from(1 << 30);
        let connected = TcpStream::connect(to).with_context(|| format!("cannot reach {to}"))?;
        let control = control::client(connected, &tls, Instant::now() + LIMIT)?;
        let mut offer = Vec::new();
        Offer {
            versions: VERSIONS,
            optional: Features::NONE,
            required: Features::NONE,
            security: LaneSecurity::Ipsec,
            session: SESSION,
            attempt: 1,
            epoch: 1,
        }
        .encode(&mut offer)?;
        control.send(&offer)?;
        let mut results = Results::default();
        let steps = (rounds + 1) * counts.len() * VARIANTS.len();
        let mut progress = bench.output.progress(steps)?;
        for round in 0..=rounds {
            for &lanes in counts {
                for (variant, ipsec) in VARIANTS {
                    progress.step(&format!("{variant}, lanes: {lanes}"));
                    let sealed = ipsec.map(|(mode, per_cpu)| self.ipsec_lanes(mode, per_cpu));
                    let sealed = sealed.transpose()?;
                    let dialer: Arc<dyn LaneDialer> = match &sealed {
                        None => Arc::new(TlsDialer),
                        Some(lanes) => lanes.dialer(),
                    };
                    let run = Run {
                        to,
                        tls: &tls,
                        control: &control,
                        dialer,
                    };
                    let (wall_s, busy_s) = run.once(&source, bytes, lanes)?;
                    if round == 0 {
                        continue;
                    }
                    results
                        .line("lanes", variant)
                        .with("lanes", lanes)
                        .with("guest_bytes", bytes)
                        .with("content", "random")
                        .figure("gib_per_s", gibibytes / wall_s)
                        .figure("busy_cpu_s_per_gib", busy_s / gibibytes)
                        .add();
                }
            }
        }
        drop(progress);
        bench.output.print(&results)
    }

    fn take(&self, listen: &str, common: &Common, bytes: u64) -> Result<()> {
        let (accepting, warnings) = Accepting::load(common)?;
        warn(warnings);
        let own = self.ipsec_lanes(ModeName::Connection, true)?;
        let target = Arc::new(memory(bytes, 2)?);
        let listener =
            TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
        eprintln!("accepting lanes on {}", listener.local_addr()?);
        // This host accepts lanes until the process is killed, so no code uses the waker.
        let (_waker, stop) = waker()?;
        let measured = Mutex::<Option<Measured>>::default();
        accept(&listener, &accepting.tls, &stop, |arrival| {
            let Some(arrival) = own.take(arrival) else {
                return;
            };
            let taken = admit(arrival, &own, &target, &measured);
            if let Err(error) = taken {
                eprintln!("rejected: {error:#}");
            }
        })?;
        Ok(())
    }
}

/// The control connection of the host that measures, and a channel for the results of its lanes.
struct Measured {
    control: Arc<ControlStream>,
    ended: Sender<Result<()>>,
}

fn admit(
    arrival: Arrival,
    sealed: &IpsecLanes,
    target: &Arc<MappedMemory>,
    measured: &Mutex<Option<Measured>>,
) -> Result<()> {
    let mut measured = lock(measured);
    match arrival {
        Arrival::Control {
            stream,
            opening: Opening::Offer(_),
        } => {
            let (ended, ends) = channel();
            let control = Arc::new(stream);
            let own = Arc::clone(&control);
            thread::Builder::new().spawn(move || {
                // Ignore the error. If a lane failed, its error has been printed. Otherwise the
                // host that measures has disconnected or sends no more requests.
                let _ = answer(&own, &ends);
            })?;
            *measured = Some(Measured { control, ended });
            Ok(())
        }
        Arrival::Lane { socket, .. } => {
            let known = measured
                .as_ref()
                .context("a lane arrived before its control connection")?;
            let peer = known.control.peer();
            let is_peer = |other: &PeerIdentity| other.is(&peer.principal());
            let receiver = match socket {
                LaneSocket::Tls(_) => TlsAcceptor.admit(socket, &is_peer)?,
                LaneSocket::Plain(_) => sealed.admit(socket, &is_peer)?,
            };
            let (target, ended) = (Arc::clone(target), known.ended.clone());
            thread::Builder::new().spawn(move || {
                // Sending fails if the thread that counts ended lanes has itself ended.
                let _ = ended.send(receive(&target, receiver));
            })?;
            Ok(())
        }
        Arrival::Control { .. } => bail!("a control connection must begin with an offer"),
        Arrival::Rejected { from, reason } => bail!("{from}: {reason}"),
        Arrival::Starved(error) => Err(error.into()),
    }
}

/// Answers requests. A request is a number of lanes. When that many lanes have ended, the answer is
/// the CPU time that this host has used since the request.
fn answer(control: &ControlStream, ends: &Receiver<Result<()>>) -> Result<()> {
    loop {
        let mut lanes = [0; 2];
        control.receive_exact(&mut lanes, Instant::now() + 60 * LIMIT)?;
        let before = busy()?;
        for _ in 0..u16::from_le_bytes(lanes) {
            ends.recv()?
                .inspect_err(|error| eprintln!("a lane failed: {error:#}"))?;
        }
        let busy = busy()?.saturating_sub(before);
        control.send(&u64::try_from(busy.as_nanos())?.to_le_bytes())?;
    }
}

/// The connections and the TLS settings of one transfer.
struct Run<'a> {
    to: &'a str,
    tls: &'a ClientTls,
    control: &'a ControlStream,
    dialer: Arc<dyn LaneDialer>,
}

impl Run<'_> {
    /// Transfers `bytes` over `lanes` lanes. Returns the wall time from when all lanes are open
    /// until the other host has answered, and the busy time of the CPUs of both hosts. The CPU time
    /// of the bench's threads is not used, because it would not include encryption by the kernel.
    fn once(&self, source: &MappedMemory, bytes: u64, lanes: usize) -> Result<(f64, f64)> {
        self.control.send(&u16::try_from(lanes)?.to_le_bytes())?;
        let (next, barrier) = (AtomicU64::new(0), Barrier::new(lanes + 1));
        let (wall, own) = thread::scope(|scope| -> Result<_> {
            let threads: Vec<_> = (1..=lanes)
                .map(|lane| {
                    let (next, barrier) = (&next, &barrier);
                    scope.spawn(move || -> Result<()> {
                        let lane = self.lane(u16::try_from(lane)?);
                        barrier.wait();
                        send(source, bytes, next, lane?)
                    })
                })
                .collect();
            barrier.wait();
            let (began, before) = (Instant::now(), busy()?);
            for thread in threads {
                thread
                    .join()
                    .map_err(|_| anyhow!("a thread of the bench panicked"))??;
            }
            let mut far = [0; 8];
            self.control
                .receive_exact(&mut far, Instant::now() + LIMIT)?;
            let wall = began.elapsed();
            let far = Duration::from_nanos(u64::from_le_bytes(far));
            Ok((wall, busy()?.saturating_sub(before) + far))
        })?;
        Ok((wall.as_secs_f64(), own.as_secs_f64()))
    }

    fn lane(&self, lane: u16) -> Result<DataSender> {
        let connector: Arc<dyn Connector> = Arc::new(StandardConnector);
        let mut sender = self.dialer.dial(&LaneRequest {
            endpoint: self.to,
            peer: &self.control.peer().principal(),
            tls: self.tls,
            deadline: Instant::now() + LIMIT,
            cancel: &DialCancel::new()?,
            connector: &connector,
        })?;
        // The other host does not check the proof, so any secret is valid.
        let secret = SessionSecret([0; 32]);
        let from_here = LaneDirection::FromDialer;
        let open = LaneOpen::unproved(VERSIONS.max, SESSION, lane, from_here);
        sender.present(&secret, &open)?;
        Ok(sender)
    }
}

/// Busy time of this host's CPUs, including interrupts (proc_stat(5)).
fn busy() -> Result<Duration> {
    /// USER_HZ, which is the same on all current architectures.
    const TICKS_PER_S: u64 = 100;
    let stat = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let line = stat
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "));
    let fields = line.context("/proc/stat does not begin with the line `cpu`")?;
    let fields: Vec<u64> = fields
        .split_whitespace()
        .map_while(|one| one.parse().ok())
        .collect();
    // The fields are user, nice, system, idle, iowait, irq and softirq. Idle and iowait are not
    // busy time.
    let ticks: u64 = [0, 1, 2, 5, 6]
        .iter()
        .filter_map(|at| fields.get(*at))
        .sum();
    Ok(Duration::from_millis(ticks * 1000 / TICKS_PER_S))
}
