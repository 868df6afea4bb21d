//! Whether the socket buffers of a lane are large enough to fill the path to a peer.

use std::str::FromStr;
use std::time::Duration;

use super::verdict::{Verdict, setting};
use crate::line::millis;
use crate::options::{parse_limit, parse_rate};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) bytes_per_s: u64,
    pub(super) round_trip: Duration,
}

/// The value of `--path`.
#[derive(Clone, Copy, Debug)]
pub(super) enum PathFlag {
    Given(Path),
    /// The path to the first peer that answers.
    Measured,
}

impl FromStr for PathFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "measured" => Ok(Self::Measured),
            text => text.parse().map(Self::Given),
        }
    }
}

impl FromStr for Path {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((rate, round_trip)) = text.split_once(',') else {
            return Err(format!(
                "invalid network path {text:?}: write RATE,RTT, such as 3G,20ms for 3 GiB/s and 20 ms"
            ));
        };
        Ok(Self {
            bytes_per_s: parse_rate(rate)?,
            round_trip: parse_limit(round_trip)?,
        })
    }
}

impl Path {
    /// The bandwidth-delay product: the bytes in flight that fill the path.
    fn product(&self) -> u64 {
        let bytes =
            u128::from(self.bytes_per_s).saturating_mul(self.round_trip.as_nanos()) / 1_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// The kernel's limits of socket buffers in bytes.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The third numbers in `net.ipv4.tcp_rmem` and `tcp_wmem`: the sizes up to which the kernel
    /// enlarges the buffers of a lane.
    tcp: [u64; 2],
    /// `net.core.rmem_max` and `wmem_max`, for programs that set sizes themselves.
    fixed: [Option<u64>; 2],
}

pub(super) fn examine(path: Option<Path>) -> Vec<Verdict> {
    let last = |file: &str| setting(file)?.split_whitespace().last()?.parse().ok();
    let read = || {
        Some(Limits {
            tcp: [
                last("/proc/sys/net/ipv4/tcp_rmem")?,
                last("/proc/sys/net/ipv4/tcp_wmem")?,
            ],
            // Before Linux 6.12, only the initial network namespace has these files.
            fixed: ["rmem_max", "wmem_max"].map(|name| last(&format!("/proc/sys/net/core/{name}"))),
        })
    };
    vec![match read() {
        Some(limits) => buffers(limits, path),
        None => Verdict::unknown(
            "net.buffers",
            "cannot read /proc/sys/net/ipv4",
            "let this process read /proc",
        ),
    }]
}

fn buffers(limits: Limits, path: Option<Path>) -> Verdict {
    let check = "net.buffers";
    let [receive, send] = limits.tcp;
    let mut value = format!("tcp_rmem {receive}, tcp_wmem {send}");
    if let [Some(receive), Some(send)] = limits.fixed {
        value.push_str(&format!(", rmem_max {receive}, wmem_max {send}"));
    }
    let lane = receive.min(send);
    let Some(path) = path else {
        return Verdict::unknown(
            check,
            format!(
                "a lane has at most {} KiB in flight: {} MiB/s at a round trip of 10 ms",
                lane >> 10,
                (lane * 100) >> 20
            ),
            "compare with a path: --path RATE,RTT",
        )
        .with_value(value);
    };
    let (product, milliseconds) = (path.product(), millis(path.round_trip));
    let lanes = product.div_ceil(lane.max(1));
    if lanes <= 1 {
        return Verdict::ok(
            check,
            value,
            format!(
                "one lane fills the path with {} KiB in flight",
                product >> 10
            ),
        );
    }
    Verdict::warn(
        check,
        value,
        format!(
            "at a round trip of {milliseconds} ms, {} MiB in flight fill the path, but a lane has \
             at most {:.1} MiB in flight",
            product >> 20,
            lane as f64 / f64::from(1 << 20),
        ),
        format!(
            "use {lanes} lanes or more, or raise the third value of net.ipv4.tcp_rmem and tcp_wmem \
             to {product} on both hosts"
        ),
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    #[test]
    fn a_path_is_a_rate_and_a_round_trip() {
        let path: Path = "1G,20ms".parse().unwrap();
        assert_eq!(path.product(), (1 << 30) / 50);
        for bad in ["", "1G", "1G,", ",1ms", "0,1ms", "1G,0ms", "1G,20"] {
            assert!(bad.parse::<Path>().is_err(), "{bad}");
        }
        let path: Path = "16777215T,9999999h".parse().unwrap();
        assert_eq!(path.product(), u64::MAX);
    }

    #[test]
    fn a_lane_carries_the_smaller_of_both_buffers_per_round_trip() {
        let limits = Limits {
            tcp: [6 << 20, 4 << 20],
            fixed: [None; 2],
        };
        let judge = |path: &str| buffers(limits, Some(path.parse().unwrap()));
        assert_eq!(judge("4M,1s").state, State::Ok);
        let long = judge("10M,1s");
        assert_eq!(long.state, State::Warn);
        assert!(long.fix.starts_with("use 3 lanes"), "{long:?}");
        let none = buffers(limits, None);
        assert_eq!(none.state, State::Unknown);
        assert!(none.means.contains("400 MiB/s"), "{none:?}");
    }
}
