//! Load for a tunnel: bulk data and round trips.

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::ends::{Ends, Site, Stream};
use super::pair::Pair;

/// The number of bytes of one write and one read.
const PART_BYTES: usize = 256 << 10;
/// If a stalled channel accepts no byte for this time, it counts as full.
const FULL: Duration = Duration::from_millis(300);

/// The rate and the cost of a bulk transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    pub(super) gib_per_s: f64,
    /// CPU time of both ends.
    pub(super) cpu_s_per_gib: f64,
}

/// Opens channels. Each has carried one byte, which proves that it is open.
fn open(site: &Site, pair: &Pair, ends: Ends, streams: usize) -> Result<Vec<(Stream, Stream)>> {
    let mut open = Vec::new();
    for _ in 0..streams {
        let near = pair.connect(ends)?;
        (&near).write_all(b"x")?;
        let far = site.accept(ends)?;
        (&far).read_exact(&mut [0])?;
        open.push((near, far));
    }
    Ok(open)
}

/// Sends `bytes` bytes in total, in equal parts over `streams` channels simultaneously. Measures
/// from the first byte until all streams have ended.
pub(super) fn bulk(
    site: &Site,
    pair: &Pair,
    ends: Ends,
    streams: usize,
    bytes: u64,
) -> Result<Moved> {
    let channels = open(site, pair, ends, streams)?;
    let each = bytes / streams as u64;
    let content = random(PART_BYTES);
    let cpu_s = pair.cpu_s()?;
    let begin = Instant::now();
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (near, far) in &channels {
            threads.push(scope.spawn(|| send(near, &content, each)));
            threads.push(scope.spawn(move || receive(far, each)));
        }
        threads
            .into_iter()
            .try_for_each(|one| one.join().unwrap_or_else(|_| bail!("a thread panicked")))
    })?;
    let seconds = begin.elapsed().as_secs_f64();
    let cpu_s = pair.cpu_s()? - cpu_s;
    for (near, far) in channels {
        drop(far);
        // Wait for the end of stream from the far side: until it arrives, the channel is open.
        (&near)
            .read_to_end(&mut Vec::new())
            .context("cannot read the end of the stream")?;
    }
    let gib = (each * streams as u64) as f64 / f64::from(1 << 30);
    Ok(Moved {
        gib_per_s: gib / seconds,
        cpu_s_per_gib: cpu_s / gib,
    })
}

fn send(mut stream: &Stream, content: &[u8], bytes: u64) -> Result<()> {
    let mut left = bytes;
    while left > 0 {
        let count = content.len().min(usize::try_from(left)?);
        stream.write_all(&content[..count])?;
        left -= count as u64;
    }
    Ok(stream.shutdown()?)
}

fn receive(mut stream: &Stream, bytes: u64) -> Result<()> {
    let mut buffer = vec![0; PART_BYTES];
    let mut came = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 if came == bytes => return Ok(()),
            0 => bail!("only {came} of {bytes} bytes arrived"),
            count => came += count as u64,
        }
    }
}

/// Measures the duration of each of `count` round trips.
pub(super) fn trips(
    site: &Site,
    pair: &Pair,
    ends: Ends,
    bytes: usize,
    count: usize,
) -> Result<Vec<Duration>> {
    let mut channels = open(site, pair, ends, 1)?;
    let (near, far) = channels.pop().context("no channel was opened")?;
    thread::scope(|scope| {
        let echo = scope.spawn(|| -> Result<()> {
            let mut message = vec![0; bytes];
            for _ in 0..count {
                (&far).read_exact(&mut message)?;
                (&far).write_all(&message)?;
            }
            Ok(())
        });
        let mut message = random(bytes);
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let begin = Instant::now();
            (&near).write_all(&message)?;
            (&near).read_exact(&mut message)?;
            times.push(begin.elapsed());
        }
        echo.join()
            .unwrap_or_else(|_| bail!("the echo thread panicked"))?;
        Ok(times)
    })
}

/// A channel that is full because its far side does not read.
pub(super) struct Stalled {
    _near: Stream,
    _far: Stream,
}

impl Stalled {
    pub(super) fn new(site: &Site, pair: &Pair, ends: Ends) -> Result<Self> {
        let mut channels = open(site, pair, ends, 1)?;
        let (near, far) = channels.pop().context("no channel was opened")?;
        near.set_write_timeout(Some(FULL))?;
        let content = random(PART_BYTES);
        while (&near).write(&content).is_ok() {}
        Ok(Self {
            _near: near,
            _far: far,
        })
    }
}

/// Incompressible bytes.
fn random(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..bytes).map(|_| next()).collect()
}
