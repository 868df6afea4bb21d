//! Failures caused by a host's state or by contradictory arguments. The tests check what the error
//! messages contain, and that the VM stays where it is.
#![allow(clippy::unwrap_used)]

#[path = "support/host.rs"]
mod host;
mod support;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use dunlin_test_base::kvm;
use host::{after, assert_says, in_own_mounts, pass_on, skip};
use support::{Hosts, Process, assert_at_source, finish, words};

/// Wraps the command in a new mount namespace without /dev/kvm.
fn without_kvm(hosts: &Hosts, command: &Command) -> Option<Command> {
    let kept = hosts.scratch.join("dev");
    let kept = kept.to_str().unwrap();
    let hide = format!(
        "mkdir -p {kept} && mount --bind /dev {kept} && mount -t tmpfs none /dev && \
         for name in null zero urandom; do touch /dev/$name && \
         mount --bind {kept}/$name /dev/$name; done && umount -l {kept}"
    );
    in_own_mounts(&hide, command)
}

#[test]
fn a_port_in_use_a_foreign_address_and_an_unknown_name() {
    let hosts = Hosts::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (listen, says) in [
        (&*address, ["another process listens there", "--listen"]),
        ("192.0.2.77:0", ["not an address of this host", "--listen"]),
        ("nowhere.invalid:1", ["no such address", "--listen"]),
    ] {
        let mut receive = words(&format!("vm receive --listen {listen} --identity"));
        receive.arg(hosts.scratch.join("b"));
        let done = finish(receive).expect(1);
        assert_says(&done.err, &says);
        assert_says(&done.err, &["at fault: configuration", listen]);
    }
    for command in [
        "ipsec serve --ports 24576",
        "handoff accept --sni a.test --to unix:/nowhere",
    ] {
        let mut serve = words(&format!("{command} --listen {address} --identity"));
        serve.arg(hosts.scratch.join("b"));
        let done = finish(serve).expect(1);
        let says = ["another process listens there", "another --listen"];
        assert_says(&done.err, &says);
    }
}

#[test]
fn an_explanation_is_an_object_with_json() {
    let all = finish(words("explain --json")).expect(0).lines();
    let one = finish(words("explain lane-lost --json")).expect(0).last();
    assert!(all.contains(&one), "{one}");
    for entry in all {
        let part = |name: &str| entry[name].as_str().unwrap().to_owned();
        for text in [part("cause"), part("remedy")] {
            assert!(!text.is_empty() && !text.contains('\n'), "{entry}");
            assert!(
                !text.starts_with("Cause") && !text.starts_with("Remedy"),
                "{entry}"
            );
        }
        assert!(!part("code").is_empty());
    }
    let unknown = finish(words("explain nothing --json")).expect(1).last();
    assert_eq!(unknown["event"], "failed");
}

#[test]
fn the_end_of_no_keying_session_is_no_object() {
    let hosts = Hosts::new();
    let mut down = words("ipsec down --json --control");
    down.arg(hosts.scratch.join("control"));
    assert_eq!(finish(down).expect(0).out, "");
    let mut clean = words("ipsec clean --json --state-dir");
    clean.arg(hosts.scratch.join("state"));
    assert_eq!(finish(clean).expect(0).last()["event"], "done");
}

/// With --json, every failure is also a JSON object.
#[test]
fn failures_are_objects_with_json() {
    let hosts = Hosts::new();
    for (command, says) in [
        ("vm status --name no", "no VM answers"),
        ("vm watch --name no", "no VM answers"),
        ("vm set --name no --rate 1M", "no VM answers"),
        (
            "vm migrate --name no --to b.test:1 --identity /nowhere",
            "/nowhere",
        ),
        ("cancel --vm no", "no VM answers"),
        ("tunnel open ram", "no tunnel runs here"),
        ("ipsec status no", "no keying session answers"),
    ] {
        let mut command = words(&format!("{command} --json --control"));
        command.arg(hosts.scratch.join("control"));
        let done = finish(command).expect(1);
        let failed = done.last();
        assert_eq!(failed["event"], "failed", "{done:?}");
        assert_eq!(failed["code"], 1, "{done:?}");
        assert_says(failed["text"].as_str().unwrap(), &[says]);
        // The text for people is also printed, with the fault code that `dunlin explain` accepts.
        assert_says(&done.err, &["dunlin: ", says]);
        let fault = failed["fault"].as_str().unwrap();
        let ends_with_code = done.err.trim_end().ends_with(&format!("[{fault}]"));
        assert_eq!(ends_with_code, fault != "usage", "{done:?}");
    }
}

/// An option that would have no effect is refused, not ignored.
#[test]
fn arguments_that_contradict_each_other_are_refused() {
    for (command, code) in [
        (
            "handoff connect --host localhost --port 1 --send-fd 0 --curves X25519 \
             --ciphers ECDHE-RSA-AES256-GCM-SHA384 --no-verify --peer b.test",
            1,
        ),
        (
            "handoff accept --listen 127.0.0.1:0 --sni a.test --to unix:/nowhere --cert x --key y \
             --verify-clients",
            2,
        ),
    ] {
        let done = finish(words(command)).expect(code);
        assert_says(&done.err, &["cannot be used with"]);
    }
}

#[test]
fn no_process_listens_at_the_destination() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", "--memory 64M --fill zero");
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let mut migrate = words("vm migrate --name vm --peer b.test --json");
    migrate
        .args(["--to", &closed.unwrap().to_string()])
        .arg("--identity")
        .arg(hosts.scratch.join("a"))
        .arg("--control")
        .arg(&source.control);
    let failed = finish(migrate).expect(1).last();
    assert_at_source(&failed, "control-lost", "network");
    let parts = ["cannot reach", "refused"];
    assert_says(failed["text"].as_str().unwrap(), &parts);
    hosts.assert_runs(&source);
}

#[test]
fn the_socket_of_a_dead_process_is_replaced_and_that_of_a_live_one_is_not() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let guest = "--memory 64M --fill zero";
    let source = hosts.run("1", guest);
    let mut again = words(&format!("vm run --name vm {guest} --control"));
    again.arg(&source.control);
    let done = finish(again).expect(1);
    assert_says(
        &done.err,
        &[
            "belongs to a VM that is running",
            "choose another --control",
        ],
    );
    source.kill();
    let source = hosts.run("1", guest);
    hosts.assert_runs(&source);
}

#[test]
fn no_kvm_at_the_destination_is_reported_at_both_sides_and_the_vm_stays() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let run = words("vm run --name vm --memory 64M");
    let Some(run) = without_kvm(&hosts, &run) else {
        return;
    };
    let done = finish(run).expect(1);
    assert_says(&done.err, &["/dev/kvm", "No such file"]);

    let source = hosts.run("1", "--memory 64M --fill zero");
    let mut receive = words("vm receive --listen 127.0.0.1:0 --identity");
    receive.arg(hosts.scratch.join("b"));
    let Some(receive) = without_kvm(&hosts, &receive) else {
        return;
    };
    let mut destination = Process::start(receive, &hosts.scratch.join("2"));
    let listening = destination.wait_for("listening");
    destination.address = listening["address"].as_str().unwrap().to_owned();
    let flags = "--json --peer b.test";
    let failed = finish(hosts.migrate(&source, &destination, "a", flags))
        .expect(1)
        .last();
    assert_at_source(&failed, "description-refused", "configuration");
    let parts = ["/dev/kvm", "load the kvm module"];
    assert_says(failed["text"].as_str().unwrap(), &parts);
    let rejected = destination.wait_for("rejected");
    assert_says(rejected["text"].as_str().unwrap(), &["/dev/kvm"]);
    hosts.assert_runs(&source);
}

#[test]
fn too_little_memory_at_the_destination_is_reported_and_the_vm_stays() {
    let Some(_turn) = kvm() else { return };
    let hosts = Hosts::new();
    let source = hosts.run("1", "--memory 2G --fill zero --fill-size 16M");
    let mut receive = words("vm receive --listen 127.0.0.1:0 --identity");
    receive.arg(hosts.scratch.join("b"));
    // This limit, in KiB of address space, is less than the guest's memory.
    let receive = after("ulimit -v 1500000", &receive);
    let mut destination = Process::start(receive, &hosts.scratch.join("2"));
    let listening = destination.wait_for("listening");
    destination.address = listening["address"].as_str().unwrap().to_owned();
    let flags = "--json --peer b.test";
    let failed = finish(hosts.migrate(&source, &destination, "a", flags))
        .expect(1)
        .last();
    assert_at_source(&failed, "no-memory", "peer");
    assert_says(
        failed["text"].as_str().unwrap(),
        &["Cannot allocate memory"],
    );
    destination.wait_for("rejected");
    hosts.assert_runs(&source);
}

/// Without ESP the server can protect no traffic, so it fails when it starts, not when its first
/// peer connects.
#[test]
fn an_ipsec_server_does_not_start_on_a_kernel_without_esp() {
    let hosts = Hosts::new();
    // To find out whether this kernel has ESP, add an SA that resembles Dunlin's. In a new network
    // namespace it does no harm.
    let key = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223";
    let sa = format!(
        "ip xfrm state add src 192.0.2.1 dst 192.0.2.2 proto esp spi 0x1000 mode transport \
         aead 'rfc4106(gcm(aes))' {key} 128"
    );
    if finish(in_own_network("true", &Command::new("true"))).code != 0 {
        return skip("no network namespaces, which need root");
    }
    let has_esp = finish(in_own_network(&sa, &Command::new("true"))).code == 0;
    println!("this kernel has ESP: {has_esp}");
    let mut serve = words("ipsec serve --ports 24576 --listen 127.0.0.1:0 --identity");
    serve.arg(hosts.scratch.join("b"));
    serve.arg("--state-dir").arg(hosts.scratch.join("state"));
    serve.arg("--control").arg(hosts.scratch.join("control"));
    let mut serve = in_own_network("ip link set lo up", &serve);
    serve.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut serve = serve.spawn().unwrap();
    let mut said = String::new();
    let mut out = BufReader::new(serve.stdout.take().unwrap());
    out.read_line(&mut said).unwrap();
    if has_esp {
        assert!(said.starts_with("listening on"), "{said}");
        serve.kill().unwrap();
        serve.wait().unwrap();
        return;
    }
    let ended = serve.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), &*said), (Some(1), ""), "{ended:?}");
    let why = String::from_utf8(ended.stderr).unwrap();
    assert_says(&why, &["kernel lacks ESP", "load the modules esp4"]);
}

/// Wraps the command in a new network namespace, in which a shell first runs `script`.
fn in_own_network(script: &str, command: &Command) -> Command {
    let mut unshare = Command::new("unshare");
    unshare.arg("--net");
    pass_on(&mut unshare, &after(script, command));
    unshare
}
