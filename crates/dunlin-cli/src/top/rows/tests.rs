use serde_json::{Value, from_value, json};

use super::*;
use crate::watch::{Session, Snapshot};

/// A session; its process reports a migration in `phase`.
fn session(role: &str, phase: &str, progress: &Value) -> Value {
    let migration = json!({"role": role, "peer": "b:4444", "phase": phase, "seconds": 5.0,
        "rate": 1 << 20, "throttle": 20, "progress": progress});
    let live = json!({"name": "web", "uuid": "01", "pid": 7, "state": "running",
        "memory_bytes": 1 << 30, "pages_checked": 0, "beats": 0, "full_passes": 0,
        "downtime_ms": null, "largest_gap_ms": 0.0, "migration": migration});
    json!({"session": "0123456789", "role": role, "phase": "migrating", "vm": "web", "uuid": "01",
        "peer": "b:4444", "attempt": 1, "process": "lives", "owner": "/run/web.sock",
        "started_ms": 0, "recorded_ms": 0, "resolvable": false, "live": live})
}

/// Progress in the second iteration.
fn progress(bytes_per_s: u64, dirty_pages_per_s: u64) -> Value {
    json!({"iteration": 2, "bytes_per_s": bytes_per_s, "remaining_bytes": 4096,
        "dirty_pages_per_s": dirty_pages_per_s, "predicted_downtime_ms": 12.5,
        "lanes": [[1, 300], [2, 100]]})
}

fn tunnel(name: &str, route: &Value, peers: &Value) -> Value {
    json!({"name": name, "pid": 9, "control": "/run/tunnels/t.sock", "address": "[::]:18300",
        "running_s": 10.0, "over_ms": 250.0, "routes": [route], "listeners": [], "peers": peers})
}

fn route(name: &str) -> Value {
    json!({"route": name, "channels": 1, "closed": 0, "failed": 0, "read_bytes": 0,
        "written_bytes": 0, "read_bytes_per_s": 1024.0, "written_bytes_per_s": 2.0})
}

fn snapshot(sessions: Vec<Value>, tunnels: Vec<Value>) -> Snapshot {
    let session = |line| Session {
        line: from_value(line).unwrap(),
        recorded: None,
    };
    Snapshot {
        sessions: sessions.into_iter().map(session).collect(),
        tunnels: tunnels
            .into_iter()
            .map(|line| from_value(line).unwrap())
            .collect(),
        ..Snapshot::empty()
    }
}

fn one(line: Value) -> Row {
    let mut rows = rows(&snapshot(vec![line], Vec::new()), None);
    assert_eq!(rows.len(), 1);
    rows.remove(0)
}

#[test]
fn a_migration_has_figures_shares_and_notes() {
    let row = one(session("source", "pre-copy", &progress(4096, 2)));
    assert_eq!(
        (row.what.as_str(), row.state.as_str()),
        ("VM web to b", "pre-copy 2")
    );
    let figures = Figures {
        sent: Some(4096.0),
        received: None,
        limit: Some(1 << 20),
        left: Some(4096),
        dirty: Some(8192.0),
        downtime_ms: Some(12.5),
    };
    assert_eq!(row.figures, figures);
    let shares: Vec<(u16, f64)> = row
        .lanes
        .iter()
        .map(|lane| (lane.number, lane.share))
        .collect();
    assert_eq!(shares, [(1, 0.75), (2, 0.25)]);
    // The migration does not converge, and the guest is throttled.
    assert_eq!(row.troubles.len(), 2);
    assert_eq!(row.attention(), Attention::Note);
    let converges = one(session("source", "pre-copy", &progress(8192, 2)));
    assert_eq!(converges.troubles.len(), 1);
}

#[test]
fn a_row_offers_only_requests_that_its_process_accepts() {
    let can = |row: &Row| (row.cancel.is_ok(), row.limit.is_ok());
    let running = progress(4096, 1);
    let source = one(session("source", "pre-copy", &running));
    let socket = PathBuf::from("/run/web.sock");
    assert_eq!(source.limit, Ok(Limited::Session(socket)));
    let then = source.cancel.unwrap().then;
    assert!(then.contains("keeps running here, at the source"), "{then}");
    let destination = one(session("destination", "pre-copy", &Value::Null));
    assert_eq!(can(&destination), (true, false));
    let then = destination.cancel.unwrap().then;
    assert!(
        then.contains("keeps running at its source, b:4444"),
        "{then}"
    );
    assert_eq!(
        can(&one(session("source", "committed", &running))),
        (false, false)
    );
    let mut other = session("source", "pre-copy", &running);
    other["role"] = "destination".into();
    let other = one(other);
    assert_eq!((can(&other), other.active), ((false, false), false));
    let mut unowned = session("source", "pre-copy", &running);
    unowned["owner"] = "".into();
    assert_eq!(can(&one(unowned)), (false, false));
}

#[test]
fn what_is_wrong_comes_first_and_then_what_is_active() {
    let (mut idle, mut lost) = (route("a"), route("b"));
    idle["channels"] = 0.into();
    lost["lost"] = "removed".into();
    lost["trouble"] = "refused".into();
    let lane = |number, way, bytes| {
        json!({"lane": number, "direction": way, "bytes": bytes,
        "retransmits": 0})
    };
    let by_lane = [
        lane(0, "sent", 1),
        lane(1, "sent", 3),
        lane(0, "received", 9),
    ];
    let peer = json!({"peer": "DNS b (sha256 01…)", "selector": "b", "at": "192.0.2.1:18300",
        "by_lane": by_lane, "channels": 1, "lanes": 3, "held_bytes": 0, "unacknowledged_bytes": 0});
    let mut first = tunnel("x", &idle, &json!([peer]));
    first["routes"]
        .as_array_mut()
        .unwrap()
        .extend([lost, route("c")]);
    let mut snapshot = snapshot(
        vec![session("source", "connecting", &Value::Null)],
        vec![first],
    );
    let whats = |snapshot: &Snapshot| {
        let rows = rows(snapshot, None).into_iter();
        rows.map(|row| row.what).collect::<Vec<_>>()
    };
    let expected = [
        "route b",
        "VM web to b",
        "tunnel x",
        "route c",
        "peer b",
        "route a",
    ];
    assert_eq!(whats(&snapshot), expected);
    let found = rows(&snapshot, None);
    assert_eq!(found[0].troubles.len(), 2);
    assert_eq!(found[3].figures.sent, Some(1024.0));
    let socket = PathBuf::from("/run/tunnels/t.sock");
    assert_eq!(
        found[3].limit,
        Ok(Limited::Route(socket.clone(), "c".into()))
    );
    assert_eq!(found[4].limit, Ok(Limited::Peer(socket, "b".into())));
    let lanes: Vec<_> = found[4]
        .lanes
        .iter()
        .map(|lane| (lane.way, lane.share))
        .collect();
    assert_eq!(lanes, [("sent", 0.25), ("sent", 0.75), ("received", 1.0)]);
    snapshot
        .tunnels
        .push(from_value(tunnel("y", &route("d"), &json!([]))).unwrap());
    assert!(whats(&snapshot).contains(&"y: route d".to_owned()));
}

#[test]
fn i7_texts_of_peers_do_not_control_the_terminal() {
    let mut line = session("source", "connecting", &Value::Null);
    let harmful = "\u{1b}[2J\u{202e}\n";
    for field in ["vm", "peer", "uuid", "owner", "phase"] {
        line[field] = harmful.into();
    }
    line["live"]["migration"]["phase"] = harmful.into();
    let row = one(line);
    let cancel = row.cancel.clone().unwrap();
    let mut texts = vec![&row.what, &row.state, &cancel.what, &cancel.then];
    texts.extend(row.troubles.iter().map(|(_, text)| text));
    texts.extend(row.facts.iter().map(|(_, text)| text));
    for text in texts {
        assert!(!text.contains(dunlin_proto::text::is_harmful), "{text:?}");
    }
}

#[test]
fn sizes_have_at_most_five_characters() {
    for (bytes, text) in [
        (0.0, "0"),
        (999.0, "999"),
        (1000.0, "1.0K"),
        (10.0 * 1024.0, "10K"),
        (1023.0 * 1024.0 * 1024.0, "1.0G"),
        (512.0 * 1024.0 * 1024.0, "512M"),
    ] {
        assert_eq!(size(bytes), text);
    }
}
