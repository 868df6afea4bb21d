//! The kernel seals the lanes between confined VM processes.

use std::env;
use std::process::{Command, ExitCode};

use dunlin_kernel_tests::vm::Vm;
use dunlin_kernel_tests::{Guest, Needs, run};
use serde_json::Value;

const NEEDS: Needs = Needs {
    dunlin: true,
    limit_seconds: 180,
    ..Needs::NOTHING
};

const GUEST: &str = "vm run --name vm --guest process --memory 64M --fill-size 8M";

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        guest.command("modprobe", &["aesni-intel"]);
        guest.command("modprobe", &["tls"]);
        for words in [
            "pki init ca",
            "pki issue --ca ca --name a.test a",
            "pki issue --ca ca --name b.test b",
        ] {
            guest.command("dunlin", &words.split(' ').collect::<Vec<_>>());
        }
        let destination = start(
            "to",
            "vm receive --listen 127.0.0.1:0 --identity b --peer a.test",
        );
        let (destination, said) = destination.until("listening");
        let to = said["address"]
            .as_str()
            .expect("the event has an address")
            .to_owned();
        let (source, _) = start("from", GUEST).until("started");

        let before = sealed(guest);
        let line = format!(
            "vm migrate --name vm --to {to} --lanes 2 --identity a --peer b.test --json \
             --control from"
        );
        let said = guest.output("dunlin", &line.split_whitespace().collect::<Vec<_>>());
        println!("{said}");
        let records = event(&said, "records");
        assert_eq!(records["by"], "kernel", "{records}");
        let driver = &records["driver"];
        assert!(driver["priority"].as_u64() >= Some(400), "{records}");
        assert!(driver["asynchronous"].is_boolean(), "{records}");
        event(&said, "moved");
        // Both ends of the two lanes use kernel TLS.
        assert_eq!(sealed(guest) - before, 4);
        drop((source, destination));
    })
}

fn start(directory: &str, line: &str) -> Vm {
    let here = env::current_dir().expect("the runner created the folder");
    let mut command = Command::new("dunlin");
    command.args(line.split(' ')).args(["--control", directory]);
    Vm::start(
        command
            .arg("--state-dir")
            .arg(here.join(format!("{directory}-state"))),
    )
}

/// Returns the first event with this name.
fn event(said: &str, name: &str) -> Value {
    said.lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a JSON object"))
        .find(|event| event["event"] == name)
        .unwrap_or_else(|| panic!("no event {name}"))
}

/// Returns the number of connections for which a sending key has been installed in the kernel.
fn sealed(guest: &Guest) -> u64 {
    guest.counter("/proc/net/tls_stat", "TlsTxSw")
}
