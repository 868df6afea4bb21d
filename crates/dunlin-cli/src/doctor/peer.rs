//! What the tunnels of peers report, and the path to each peer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use dunlin::lane::peers::{Peer, Peers};
use dunlin_linux::socket::path_mtu;
use dunlin_proto::fault::FaultCode;
use dunlin_tunnel::{Entrance, Failure, Listen, Mode, Probe, Tunnel, WINDOW_BYTES};

use super::path::Path;
use super::verdict::Verdict;
use crate::line::millis;
use crate::text::{clean, count};
use crate::tunnel::{Config, PEER_PORT, Report, prober, unix};

/// How many bytes a measurement of the path sends.
const MEASURED_BYTES: u64 = 64 << 20;
/// If the clocks of two hosts differ by this time or more, the times in their logs cannot be
/// compared.
const SOME: Duration = Duration::from_secs(2);
/// `dunlin pki` starts the validity of a certificate this long before the time of issue. If the
/// clocks of two hosts differ by more, one host can reject a new certificate as not yet valid.
const MUCH: Duration = Duration::from_secs(60 * 60);
const DAY_S: u64 = 24 * 60 * 60;

/// A peer's answers.
struct Answers {
    path: Result<Probe, Failure>,
    report: Result<(Report, Duration), String>,
    /// This host's clock when the report arrived.
    now: SystemTime,
}

/// Tests the path to the tunnel of each peer and requests the peer's report, with the identity of a
/// configuration. Returns the verdicts and, if `is_measured`, the path to the first peer that
/// answers.
pub(super) fn examine(
    config: &std::path::Path,
    peers: &[String],
    is_measured: bool,
) -> Result<(Vec<Verdict>, Option<Path>)> {
    let (config, tunnel) = prober(config)?;
    let (mut all, mut measured) = (Vec::new(), None);
    for peer in peers {
        let entrance = entrance(&config, peer)?;
        // The first probe opens the trunk, so the second measures the path alone.
        let path = tunnel.probe(&entrance, 1);
        let path = path
            .and_then(|_| tunnel.probe(&entrance, if is_measured { MEASURED_BYTES } else { 1 }));
        if let (Ok(probe), true, None) = (&path, is_measured, &measured) {
            measured = Some(path_of(probe));
        }
        let answers = ask(&tunnel, &entrance, path);
        let of_peer = |mut one: Verdict| {
            one.peer = Some(peer.clone());
            one
        };
        let mtu = mtu(&entrance.to);
        all.extend(judge(&answers).into_iter().chain(mtu).map(of_peer));
    }
    Ok((all, measured))
}

/// The MTU towards a peer; `None` if its address or the MTU cannot be determined. Sends nothing to
/// the peer.
fn mtu(to: &str) -> Option<Verdict> {
    let address = to.to_socket_addrs().ok()?.next()?;
    let own: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((own, 0)).ok()?;
    socket.connect(address).ok()?;
    let bytes = path_mtu(&socket).ok()?;
    let means = "the largest packet in bytes that leaves this host for the peer";
    Some(Verdict::ok("peer.mtu", bytes.to_string(), means))
}

fn ask(tunnel: &Tunnel, entrance: &Entrance, path: Result<Probe, Failure>) -> Answers {
    let report = match &path {
        Ok(_) => tunnel
            .report(entrance)
            .map_err(|failure| match failure.code() {
                FaultCode::UnknownRoute => {
                    "the peer's version sends no reports, or this host may use none of its targets"
                        .to_owned()
                }
                _ => failure.to_string(),
            }),
        Err(_) => Err("the peer's tunnel was not reached".to_owned()),
    };
    let now = SystemTime::now();
    let report = report.and_then(|found| {
        let parsed = Report::parse(&found.text).map_err(|error| error.to_string())?;
        Ok((parsed, found.elapsed))
    });
    Answers { path, report, now }
}

/// The route to a peer, from the configuration. If the configuration has none, returns a route to
/// the port in `peer`, or to the default port. On that route, the peer's certificate must contain
/// the host in `peer`.
fn entrance(config: &Config, peer: &str) -> Result<Entrance> {
    let named = |one: &&Entrance| {
        let host = one.to.rsplit_once(':').map_or(&*one.to, |(host, _)| host);
        one.mode == Mode::Stripe && (one.to == peer || host == peer)
    };
    if let Some(found) = config.routes.entrances().iter().find(named) {
        let listen = Listen::OnDemand;
        return Ok(Entrance {
            listen,
            ..found.clone()
        });
    }
    let split = peer.rsplit_once(':');
    let split = split.filter(|(host, port)| !host.contains(':') && port.parse::<u16>().is_ok());
    let host = split.map_or(peer, |(host, _)| host);
    let name: Peer = host
        .parse()
        .with_context(|| format!("--peer {peer}: write HOST or HOST:PORT"))?;
    Ok(Entrance {
        route: "doctor".to_owned(),
        listen: Listen::OnDemand,
        to: match (split, peer.contains(':')) {
            (Some(_), _) => peer.to_owned(),
            (None, true) => format!("[{peer}]:{PEER_PORT}"),
            (None, false) => format!("{peer}:{PEER_PORT}"),
        },
        peers: Peers::OneOf(vec![name]),
        lanes: 1,
        window_bytes: WINDOW_BYTES,
        mode: Mode::Stripe,
    })
}

/// `first_byte` is two round trips: one opens the channel, one carries the byte there and back.
fn path_of(probe: &Probe) -> Path {
    let seconds = probe.remaining.as_secs_f64().max(1e-9);
    Path {
        bytes_per_s: (probe.bytes as f64 / seconds) as u64,
        round_trip: probe.first_byte / 2,
    }
}

fn judge(answers: &Answers) -> Vec<Verdict> {
    let mut all = vec![match &answers.path {
        Ok(probe) => Verdict::ok(
            "peer.path",
            format!("{:.1} ms", millis(path_of(probe).round_trip)),
            "the peer's tunnel answers",
        ),
        Err(failure) => Verdict::fail(
            "peer.path",
            failure.code().name(),
            failure.text(),
            format!("dunlin explain {}", failure.code().name()),
        ),
    }];
    let (report, elapsed) = match &answers.report {
        Ok((report, elapsed)) => (report, *elapsed),
        Err(why) => {
            let fix =
                "see peer.path; upgrade Dunlin on the peer, or let this host use a target there";
            all.push(Verdict::unknown("peer.report", why, fix));
            return all;
        }
    };
    let text = |field: &Option<String>| clean(field.as_deref().unwrap_or("unknown"));
    let version = text(&report.version);
    all.push(Verdict::ok(
        "peer.report",
        version,
        "the peer's version of Dunlin",
    ));
    let kernel = text(&report.kernel);
    all.push(Verdict::ok("peer.kernel", kernel, "the peer's kernel"));
    all.push(Verdict::ok(
        "peer.records",
        text(&report.records),
        format!("at the peer: {}", text(&report.why)),
    ));
    all.push(Verdict::ok(
        "peer.library",
        text(&report.library),
        "the peer's fastest crypto library",
    ));
    all.extend(
        report
            .clock_ms
            .map(|clock| clock_difference(clock, answers.now, elapsed)),
    );
    let now_s = unix(answers.now).0;
    all.extend(
        report
            .certificate_ends_s
            .map(|ends| certificate(ends, now_s)),
    );
    all.extend(report.rules.as_deref().map(rules));
    if let (Some(receive), Some(send)) = (report.tcp_rmem, report.tcp_wmem) {
        let value = format!("tcp_rmem {receive}, tcp_wmem {send}");
        let means = "the peer's limits of a lane's buffers in bytes: see net.buffers";
        all.push(Verdict::ok("peer.buffers", value, means));
    }
    all
}

/// `theirs` is the peer's clock in milliseconds since 1970. The peer read its clock at most
/// `elapsed` before `now`.
fn clock_difference(theirs: u64, now: SystemTime, elapsed: Duration) -> Verdict {
    let check = "peer.clock";
    let ours = i128::from(unix(now).1) - i128::try_from(elapsed.as_millis() / 2).unwrap_or(0);
    let ahead = i128::from(theirs) - ours;
    let value = format!("{ahead:+} ms");
    let uncertain = format!("accurate to {:.0} ms", millis(elapsed) / 2.0);
    // The smallest difference that the inaccuracy allows.
    let least = ahead.unsigned_abs().saturating_sub(elapsed.as_millis() / 2);
    let fix = "synchronise the clocks of both hosts (chrony, systemd-timesyncd)";
    match least {
        least if least >= MUCH.as_millis() => {
            let means = format!(
                "a new certificate of one host may be not yet valid on the other host; {uncertain}"
            );
            Verdict::fail(check, value, means, fix)
        }
        least if least >= SOME.as_millis() => {
            let means = format!("the times in the hosts' logs cannot be compared; {uncertain}");
            Verdict::warn(check, value, means, fix)
        }
        _ => Verdict::ok(
            check,
            value,
            format!("the difference between the peer's clock and this host's, {uncertain}"),
        ),
    }
}

fn certificate(ends_s: u64, now_s: u64) -> Verdict {
    let check = "peer.certificate";
    let days = ends_s.saturating_sub(now_s) / DAY_S;
    let value = count(days, "day");
    let means = "what expires first of the peer's certificate and authorities";
    match days {
        0..30 => Verdict::warn(check, value, means, "renew it on the peer"),
        _ => Verdict::ok(check, value, means),
    }
}

fn rules(state: &str) -> Verdict {
    let check = "peer.rules";
    let means = "the packet filter's rules of the peer's redirects";
    match state {
        "applied" => Verdict::ok(check, "applied", means),
        "missing" | "different" => {
            Verdict::fail(check, state, means, "run dunlin redirect apply on the peer")
        }
        _ => Verdict::unknown(
            check,
            means,
            "start dunlin-redirect-watch.service on the peer",
        ),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::doctor::verdict::State;

    #[test]
    fn clocks_are_compared_within_the_time_of_the_answer() {
        let now = SystemTime::now();
        let ours = unix(now).1;
        let of = |theirs, milliseconds| {
            clock_difference(theirs, now, Duration::from_millis(milliseconds)).state
        };
        assert_eq!(of(ours, 10), State::Ok);
        assert_eq!(of(ours + 5000, 10), State::Warn);
        assert_eq!(of(ours - 5000, 10), State::Warn);
        // The answer took so long that the clocks may be equal.
        assert_eq!(of(ours - 5000, 20_000), State::Ok);
        assert_eq!(of(ours + 7_200_000, 10), State::Fail);
        assert_eq!(of(u64::MAX, 10), State::Fail);
        assert_eq!(of(0, 10), State::Fail);
    }

    #[test]
    fn i7_a_report_with_any_values_is_judged() {
        let judged = |text: &str| {
            let report = Report::parse(text).unwrap();
            judge(&Answers {
                path: Ok(Probe {
                    first_byte: Duration::ZERO,
                    remaining: Duration::ZERO,
                    bytes: 1,
                }),
                report: Ok((report, Duration::ZERO)),
                now: SystemTime::now(),
            })
        };
        let least = judged("{}");
        assert!(least.iter().all(|one| one.state == State::Ok), "{least:?}");
        let most = judged(
            "{\"kernel\":\"\\u001b[2J\",\"clock_ms\":18446744073709551615,\"rules\":\"x\",\
             \"certificate_ends_s\":18446744073709551615,\"tcp_rmem\":18446744073709551615,\
             \"tcp_wmem\":0,\"more\":[]}",
        );
        assert_eq!(most.len(), least.len() + 4, "{most:?}");
        assert!(
            !most.iter().any(|one| one.value.contains('\u{1b}')),
            "{most:?}"
        );
        for bad in ["", "{\"clock_ms\":-1}", "{\"kernel\":1}", "nonsense"] {
            assert!(Report::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_rest_of_a_report_has_its_verdicts() {
        let states = [(29, State::Warn), (31, State::Ok)];
        for (days, state) in states {
            assert_eq!(certificate(1000 + days * DAY_S, 1000).state, state);
        }
        assert_eq!(certificate(0, 1000).state, State::Warn);
        assert_eq!(rules("applied").state, State::Ok);
        assert_eq!(rules("missing").state, State::Fail);
        assert_eq!(rules("unknown").state, State::Unknown);
    }
}
