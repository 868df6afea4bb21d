//! A VM migrates over IPsec between confined processes that were started with `--ipsec`.
//! Without this flag at the source, the migration fails and the error names the flag.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, Stdio};

use dunlin_kernel_tests::handoff::Background;
use dunlin_kernel_tests::sealed_lanes::POOL;
use dunlin_kernel_tests::sessions::{
    Capture, HOSTS, captured, connect, credentials, netns, nothing_left,
};
use dunlin_kernel_tests::vm::{Vm, migrate_from_a};
use dunlin_kernel_tests::{Guest, Needs, Under, run};

const NEEDS: Needs = Needs {
    cpus: 4,
    packages: &["iproute2", "tcpdump"],
    dunlin: true,
    limit_seconds: 180,
    under: Under::Newest,
    ..Needs::NOTHING
};

const GUEST: &str = "vm run --name vm --guest process --memory 64M --fill-size 8M --workload idle";
const MIGRATE: &str = "vm migrate --name vm --to 10.0.0.2:7400 --lanes 4 --security ipsec \
                       --downtime-limit 20s --identity host-a --peer host-b.example --json --control run-a";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        connect(guest);
        credentials(guest);
        let capture = Capture::begin("b", "vm.pcap");
        let receive = "vm receive --listen 10.0.0.2:7400 --ipsec --identity host-b --peer \
                       host-a.example";
        let (destination, _) = Vm::start_at("b", "dunlin", receive).until("listening");

        let (unprepared, _) = Vm::start_at("a", "dunlin", GUEST).until("started");
        let said = migrate_from_a("dunlin", MIGRATE);
        assert_eq!(said["event"], "failed", "{said}");
        let text = said["text"].as_str().expect("the event has a text");
        assert!(text.contains("--ipsec"), "{text}");
        drop(unprepared);

        let (source, _) = Vm::start_at("a", "dunlin", &format!("{GUEST} --ipsec")).until("started");
        let said = migrate_from_a("dunlin", &format!("{MIGRATE} --cpus 1,3"));
        assert_eq!(said["event"], "moved", "{said}");
        nothing_left(guest);
        capture.end(guest);
        let seen = |filter: &str| captured(guest, "vm.pcap", filter);
        assert_eq!(
            seen(&format!("tcp portrange {POOL}")),
            0,
            "packets in the clear"
        );
        assert!(seen("esp") > 100);
        for (host, _) in HOSTS {
            assert!(
                dunlin_kernel_tests::sealed_lanes::no_records(host),
                "{host}"
            );
        }
        drop((source, destination));
        if guest.is_soak() {
            lanes_are_measured_between_two_hosts(guest);
        }
    })
}

/// Tests `dunlin bench lanes --security ipsec` with one SA, one SA for each CPU, and one SA for
/// each lane. Does not check the measured figures, which are meaningless in an emulated machine.
fn lanes_are_measured_between_two_hosts(guest: &Guest) {
    let bench = "dunlin bench lanes --security ipsec --size 64M --rounds 1 --lanes 2 --json";
    let at = |host: &str, more: &str| {
        let identity = format!("--identity host-{host} --state-dir bench-{host}");
        let line = format!("{bench} {identity} {more}");
        let mut command = Command::new("ip");
        command.args(netns(host, &line.split_whitespace().collect::<Vec<_>>()));
        command
    };
    let mut listening = at("b", "--listen 10.0.0.2:7401 --peer host-a.example")
        .stderr(Stdio::piped())
        .spawn()
        .expect("ip starts");
    let said = listening.stderr.take().expect("the stream is piped");
    let mut lines = BufReader::new(said).lines().map_while(Result::ok);
    assert!(
        lines.any(|line| line.contains("accepting lanes")),
        "the bench does not listen"
    );
    let listening = Background(listening);
    let measured = at("a", "--to 10.0.0.2:7401 --peer host-b.example")
        .output()
        .expect("ip starts");
    let said = String::from_utf8(measured.stdout).expect("JSON");
    println!("{said}{}", String::from_utf8_lossy(&measured.stderr));
    assert!(measured.status.success());
    for variant in ["tls", "ipsec-one-sa", "ipsec-per-cpu", "ipsec-per-lane"] {
        assert!(
            said.contains(&format!("\"variant\":\"{variant}\"")),
            "{variant}"
        );
    }
    // Check this before the process is killed. If the process had not removed its state by now, the
    // state would stay until the next process removes it.
    nothing_left(guest);
    drop(listening);
}
