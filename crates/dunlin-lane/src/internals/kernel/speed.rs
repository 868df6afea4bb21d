//! The speed of the kernel's TLS on this processor.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use dunlin_linux::ktls::Direction;

use super::{PROBE_LIMIT, Refused, Version, attach, failed, loopback_pair, refused, try_give};
use crate::internals::provider::CipherSuite;

/// Bytes of one run.
const RUN_BYTES: usize = 2 << 20;
/// One record. It fits into the smallest buffers of a connection, so that one thread can write and
/// then read it.
const PIECE_BYTES: usize = 16 << 10;
/// The maximum number of runs, and the time after which no further run begins.
const RUNS: u32 = 8;
const LONGEST: Duration = Duration::from_millis(150);

/// Measures how many bytes per second one core seals and opens with the kernel's TLS. Sends the
/// same bytes over two connections to this host, one with keys and one without, and subtracts the
/// times. Returns `None` if the times do not differ measurably.
///
/// # Errors
/// [`Refused`].
pub fn speed(suite: CipherSuite) -> Result<Option<f64>, Refused> {
    let pair = || loopback_pair().map_err(failed);
    let (plain, sealed) = (pair()?, pair()?);
    for end in [&sealed.0, &sealed.1] {
        attach(end)?;
    }
    // A fixed key is safe here, because both ends of the connection are in this process.
    let key = [4; 32];
    for (end, direction) in [
        (&sealed.0, Direction::Sending),
        (&sealed.1, Direction::Receiving),
    ] {
        let key = (suite, &key[..suite.key_bytes()], [0; 12]);
        try_give(end, direction, key, 0, Version::V1_3)
            .map_err(|error| refused(direction, &error))?;
    }
    // Use the fastest run without keys and the fastest with keys, because other load on this host
    // slows down some of the runs.
    let (mut without, mut with) = (Duration::MAX, Duration::MAX);
    let begin = Instant::now();
    for _ in 0..RUNS {
        without = without.min(run(&plain).map_err(failed)?);
        with = with.min(run(&sealed).map_err(failed)?);
        if begin.elapsed() > LONGEST {
            break;
        }
    }
    let cost = with.saturating_sub(without).as_secs_f64();
    Ok((cost > 0.0).then(|| RUN_BYTES as f64 / cost))
}

/// The time in which a connection carries the bytes of a run.
fn run((near, far): &(TcpStream, TcpStream)) -> io::Result<Duration> {
    near.set_write_timeout(Some(PROBE_LIMIT))?;
    let mut piece = vec![0; PIECE_BYTES];
    let begin = Instant::now();
    for _ in 0..RUN_BYTES / PIECE_BYTES {
        (&*near).write_all(&piece)?;
        (&*far).read_exact(&mut piece)?;
    }
    Ok(begin.elapsed())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::internals::kernel::abilities;

    #[test]
    fn the_speed_is_measured_where_the_kernel_has_tls() {
        let measured = speed(CipherSuite::Aes256Gcm);
        match abilities(CipherSuite::Aes256Gcm) {
            Ok(_) => assert!(measured.unwrap().is_none_or(|speed| speed > 1e6)),
            Err(refused) => assert_eq!(measured.unwrap_err(), refused),
        }
        let plain = loopback_pair().unwrap();
        assert!(run(&plain).unwrap() > Duration::ZERO);
    }
}
