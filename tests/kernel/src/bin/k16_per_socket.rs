//! Every user can see which sockets use kernel TLS; counters cover a whole network namespace.

use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;

use dunlin_ipsec::sock_diag::{RecordEngine, RecordEngines, record_engines};
use dunlin_kernel_tests::handoff::{Stunnel, certificate, connect_as, stunnel};
use dunlin_kernel_tests::tls::{Keys, connected, kernels, set, stat};
use dunlin_kernel_tests::{Guest, Needs, run};
use dunlin_linux::ktls::{Direction, attach};
use serde_json::Value;

const NEEDS: Needs = Needs {
    packages: &["stunnel4", "openssl", "ethtool"],
    dunlin: true,
    limit_seconds: 120,
    ..Needs::NOTHING
};

/// User ids: root and an unprivileged user.
const USERS: [u32; 2] = [0, 65_534];

fn main() -> ExitCode {
    run(&NEEDS, |guest| {
        guest.command("modprobe", &["tls"]);
        the_kernel_reports_each_socket();
        certificate(guest, "pool");
        certificate(guest, "other");
        let stunnel = stunnel(guest, 4443, "");
        for user in USERS {
            the_hand_off_reports_driver_device_and_counters(guest, &stunnel, user);
        }
    })
}

fn the_kernel_reports_each_socket() {
    let of = |socket: &TcpStream| record_engines(socket).expect("this kernel has inet_diag");
    let (near, far) = kernels();
    let both = RecordEngines {
        sending: Some(RecordEngine::Software),
        receiving: Some(RecordEngine::Software),
    };
    assert_eq!((of(&near), of(&far)), (Some(both), Some(both)));
    let (near, far) = connected();
    assert_eq!(of(&near), None);
    attach(&near).expect("the kernel has TLS");
    set(&near, Direction::Sending, &Keys::new(1)).expect("the kernel accepts the sending key");
    let half = RecordEngines {
        receiving: None,
        ..both
    };
    assert_eq!(of(&near), Some(half));
    assert_eq!(of(&far), None);
    // Repeat the test with a connection over IPv6.
    let listener = TcpListener::bind("[::1]:0").expect("the loopback is up");
    let address = listener.local_addr().expect("the listener is bound");
    let near = TcpStream::connect(address).expect("the listener is open");
    assert_eq!(of(&near), None);
    attach(&near).expect("the kernel has TLS");
    set(&near, Direction::Sending, &Keys::new(1)).expect("the kernel accepts the sending key");
    assert_eq!(of(&near), Some(half));
}

fn the_hand_off_reports_driver_device_and_counters(guest: &Guest, stunnel: &Stunnel, user: u32) {
    let called = connect_as(user, stunnel.port, &["--no-verify", "--json"]);
    assert_eq!(called.code, Some(0), "{called:?}");
    println!("{user}: {}", called.out);
    let features = guest.output("ethtool", &["--show-features", "lo"]);
    let line: Value = serde_json::from_str(&called.out).expect("a JSON object");
    assert!(line["driver"]["priority"].is_u64(), "{line}");
    for direction in ["sending", "receiving"] {
        assert_eq!(line["acceleration"][direction], "software", "{line}");
    }
    assert_eq!(line["device"]["name"], "lo", "{line}");
    for flag in ["tls-hw-tx-offload", "tls-hw-rx-offload"] {
        // The line for `flag` in ethtool's output. On the loopback its value is "off [fixed]".
        let words = features.lines().find(|line| line.contains(flag));
        let is_on = words.expect("ethtool lists it").contains(": on");
        assert_eq!(line["device"][flag], is_on, "{line}");
    }
    let counted = line["tls_stat"].as_object().expect("the kernel reports it");
    for (name, count) in counted {
        assert_eq!(count, stat(guest, name), "{name}");
    }
    for name in ["TlsTxDevice", "TlsRxDevice", "TlsDecryptError"] {
        assert_eq!(counted[name], 0, "{line}");
    }
    // The hand-off reports counters of failures and of network cards. It leaves out the counters of
    // connections that the kernel seals itself.
    assert!(!counted.contains_key("TlsTxSw"), "{line}");
    assert!(
        stat(guest, "TlsTxSw") > 1,
        "no other connections were counted"
    );
}
