//! The memories of two guests, and lanes between them. The threads do the work of an engine's lane
//! threads, without the engine.

use std::net::{TcpListener, TcpStream};
use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use dunlin::engine::memory::{MappedMemory, digest};
use dunlin::engine::vmm::GuestMemory;
use dunlin::lane::data::{
    BATCH_BYTES, DataReceiver, DataSender, PAGE_BYTES, PlainConsent, STALL_LIMIT,
};
use dunlin::lane::handshake;
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{Crypto, Provider};
use dunlin_bench::process::stolen_s;
use dunlin_linux::affinity::thread_cpu_time;
use dunlin_linux::mapping::{advise_huge_pages, allocate_flat};

use crate::identity::allowed_peers;
use crate::process::Scratch;

/// Size of a header: a chunk's offset and length.
const HEADER_BYTES: usize = 16;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// The time that a transfer took.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    pub(super) wall_s: f64,
    /// CPU time of both ends together.
    pub(super) cpu_s: f64,
    /// CPU time that the hypervisor of this host took from it.
    pub(super) stolen_s: f64,
}

impl Add for Spent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            wall_s: self.wall_s + other.wall_s,
            cpu_s: self.cpu_s + other.cpu_s,
            stolen_s: self.stolen_s + other.stolen_s,
        }
    }
}

/// Source memory and destination memory, filled with different content.
pub(super) struct Rig {
    pub(super) source: MappedMemory,
    pub(super) target: MappedMemory,
    pub(super) bytes: u64,
    scratch: Scratch,
}

impl Rig {
    pub(super) fn new(bytes: u64) -> Result<Self> {
        let scratch = Scratch::with_identities("bench")?;
        Ok(Self {
            source: memory(bytes, 1)?,
            target: memory(bytes, 2)?,
            bytes,
            scratch,
        })
    }

    pub(super) fn gibibytes(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 30)
    }

    /// Fills destination memory again, so that it differs from source memory.
    pub(super) fn refill(&self) -> Result<()> {
        fill(&self.target, 2)
    }

    /// Fails unless source memory and destination memory are equal.
    pub(super) fn verify(&self) -> Result<()> {
        ensure!(
            digest(&self.source, 2)? == digest(&self.target, 2)?,
            "destination memory differs from source memory: all figures are invalid"
        );
        Ok(())
    }

    /// Sends the first `bytes` of source memory over `lanes` lanes. The lanes use the TLS of
    /// `provider`, or are plain if `provider` is `None`. Each lane is limited to `rate` bytes per
    /// second. The lanes are open before the measurement starts.
    pub(super) fn transfer(
        &self,
        provider: Option<Provider>,
        lanes: usize,
        bytes: u64,
        rate: Option<u64>,
    ) -> Result<Spent> {
        let tls = provider.map(|provider| self.tls(provider)).transpose()?;
        let mut ends = Vec::with_capacity(lanes);
        for _ in 0..lanes {
            let (sender, receiver) = lane(tls.as_ref())?;
            sender.set_rate(rate)?;
            ends.push((sender, receiver));
        }
        let next = AtomicU64::new(0);
        let mut work: Vec<Work> = Vec::new();
        for (sender, receiver) in ends {
            let next = &next;
            work.push(Box::new(move || send(&self.source, bytes, next, sender)));
            work.push(Box::new(move || receive(&self.target, receiver)));
        }
        in_step(work)
    }

    fn tls(&self, provider: Provider) -> Result<(ClientTls, ServerTls)> {
        let load = |name| Identity::load(&self.scratch.join(name), LoadOptions::default());
        let crypto = Crypto::with(provider);
        let client = load("source")?
            .0
            .client(&crypto, allowed_peers(&["destination.bench".into()])?)?;
        let server = load("destination")?
            .0
            .server(&crypto, allowed_peers(&["source.bench".into()])?)?;
        Ok((client, server))
    }
}

/// The work of one thread.
pub(super) type Work<'a> = Box<dyn FnOnce() -> Result<()> + Send + 'a>;

/// Runs every piece of work on its own thread; returns the time that all of them took. All threads
/// start at the same time. The wall time is from the first thread's start to the last thread's end.
/// The threads themselves read the clock for this: the kernel sometimes resumes the calling thread
/// long after the other threads have started.
pub(super) fn in_step(work: Vec<Work>) -> Result<Spent> {
    let barrier = Barrier::new(work.len() + 1);
    thread::scope(|scope| {
        let threads: Vec<_> = work
            .into_iter()
            .map(|work| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let (began, before) = (Instant::now(), thread_cpu_time());
                    work().map(|()| (began, Instant::now(), thread_cpu_time() - before))
                })
            })
            .collect();
        let stolen_before = stolen_s()?;
        barrier.wait();
        let mut cpu = Duration::ZERO;
        let mut times: Option<(Instant, Instant)> = None;
        for thread in threads {
            let (began, ended, used) = thread
                .join()
                .map_err(|_| anyhow!("a thread of the bench panicked"))??;
            cpu += used;
            times = Some(match times {
                Some((first, last)) => (first.min(began), last.max(ended)),
                None => (began, ended),
            });
        }
        let wall = times.map_or(Duration::ZERO, |(first, last)| last - first);
        Ok(Spent {
            wall_s: wall.as_secs_f64(),
            cpu_s: cpu.as_secs_f64(),
            stolen_s: stolen_s()? - stolen_before,
        })
    })
}

/// Two ends of a loopback connection.
pub(super) fn connection() -> Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    Ok((near, listener.accept()?.0))
}

/// Both ends of a new lane, ready for data.
fn lane(tls: Option<&(ClientTls, ServerTls)>) -> Result<(DataSender, DataReceiver)> {
    let (near, far) = connection()?;
    let Some((client, server)) = tls else {
        let consent =
            PlainConsent::both(true, true).context("plain lanes need the consent of both sides")?;
        return Ok((
            DataSender::plain(near, consent, STALL_LIMIT)?,
            DataReceiver::plain(far, consent, STALL_LIMIT)?,
        ));
    };
    let deadline = Instant::now() + HANDSHAKE_LIMIT;
    let (near, far) = thread::scope(|scope| {
        let far = scope.spawn(|| handshake::server(far, server, deadline));
        let near = handshake::client(near, client, deadline);
        (near, far.join())
    });
    let far = far.map_err(|_| anyhow!("the handshake's thread panicked"))?;
    Ok((
        DataSender::tls(near?, STALL_LIMIT)?,
        DataReceiver::tls(far?, STALL_LIMIT)?,
    ))
}

/// The work of a lane's thread at the source. All lanes share `next`, the offset of the next chunk.
/// The thread sends chunks until `next` reaches `bytes`.
pub(super) fn send(
    memory: &MappedMemory,
    bytes: u64,
    next: &AtomicU64,
    mut sender: DataSender,
) -> Result<()> {
    loop {
        let offset = next.fetch_add(BATCH_BYTES as u64, Ordering::Relaxed);
        if offset >= bytes {
            sender.finish()?;
            return Ok(());
        }
        let length = usize::try_from(bytes - offset)?.min(BATCH_BYTES);
        let slice = memory.slice(0, offset, length)?;
        let mut frame = sender.frame();
        for at in (0..length).step_by(PAGE_BYTES) {
            let kept = frame.guest_page(&slice.subslice(at, PAGE_BYTES)?)?;
            ensure!(kept, "zero page in the bench's memory");
        }
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&offset.to_le_bytes());
        header[8..].copy_from_slice(&(length as u64).to_le_bytes());
        frame.finish(&header)?;
    }
}

/// The work of a lane's thread at the destination. It receives chunks until the lane ends.
pub(super) fn receive(memory: &MappedMemory, mut receiver: DataReceiver) -> Result<()> {
    let mut header = [0; HEADER_BYTES];
    while receiver.next(&mut header, None)? {
        let [offset, length] = [0, 8].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        });
        let target = memory.slice(0, offset, usize::try_from(length)?)?;
        receiver.payload_into(std::iter::once(target))?;
    }
    Ok(())
}

/// Returns new memory, every page of which is filled.
pub(super) fn memory(bytes: u64, seed: u64) -> Result<MappedMemory> {
    let mapped = fresh_memory(bytes)?;
    fill(&mapped, seed)?;
    Ok(mapped)
}

/// Returns memory as a new VM has it: the kernel is advised to use huge pages, and no page is
/// populated.
pub(super) fn fresh_memory(bytes: u64) -> Result<MappedMemory> {
    let memory = allocate_flat(bytes)?;
    advise_huge_pages(&memory);
    Ok(MappedMemory::new(Arc::new(memory), PAGE_BYTES as u32))
}

/// Fills memory with pages that all differ and are not zero.
fn fill(memory: &MappedMemory, seed: u64) -> Result<()> {
    let mut state = seed;
    let mut piece = vec![0_u8; 1 << 20];
    let length = memory
        .regions()
        .iter()
        .map(|region| region.length)
        .sum::<u64>();
    for offset in (0..length).step_by(piece.len()) {
        for word in piece.chunks_exact_mut(8) {
            // SplitMix64, a pseudo-random number generator with few operations per word.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes());
        }
        memory.slice(0, offset, piece.len())?.copy_from(&piece);
    }
    Ok(())
}
