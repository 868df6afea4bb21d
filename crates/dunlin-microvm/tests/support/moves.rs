//! Functions shared by tests that migrate a machine with the engine: certificates, and a migration
//! between two threads of the process over loopback.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use dunlin::engine::destination::Received;
use dunlin::engine::source;
use dunlin::engine::vmm::{Builder, SourceVm};
use dunlin::engine::{Cancel, Event, Host, MigrateError, Report, StandardHost};
use dunlin::lane::identity::{Identity, LoadOptions};
use dunlin::lane::policy::{ClientTls, ServerTls};
use dunlin::lane::provider::{Crypto, Provider};
use dunlin::{Incoming, Migration};
use dunlin_microvm::{Config, MachineBuilder, Movable};
use dunlin_test_base::Scratch;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use super::running;

const SOURCE: &str = "source.test";
const DESTINATION: &str = "destination.test";

/// The TLS configuration of both sides, with certificates from a new authority.
pub struct Tls {
    pub client: ClientTls,
    pub server: ServerTls,
}

impl Tls {
    pub fn new() -> Self {
        let scratch = Scratch::new();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let host = |name: &str| {
            let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &issuer).unwrap().pem();
            let directory = scratch.join(name);
            identity(&directory, &pem, &certificate, &key.serialize_pem())
        };
        let crypto = Crypto::with(Provider::built_in()[0]);
        let peer = |name: &str| [name.parse().unwrap()].into_iter().collect();
        Self {
            client: host(SOURCE).client(&crypto, peer(DESTINATION)).unwrap(),
            server: host(DESTINATION).server(&crypto, peer(SOURCE)).unwrap(),
        }
    }
}

fn identity(directory: &Path, authority: &str, certificate: &str, key: &str) -> Identity {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("ca-cert.pem"), authority).unwrap();
    fs::write(directory.join("cert.pem"), certificate).unwrap();
    let path: PathBuf = directory.join("key.pem");
    fs::write(&path, key).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    Identity::load(directory, LoadOptions::default()).unwrap().0
}

/// Creates a filled, running machine that can be migrated.
pub fn movable(config: Config) -> Arc<Movable> {
    Movable::new(Arc::new(running(config)))
}

/// Returns options with `lanes` lanes, for a migration that compares digests.
pub fn verified(lanes: u16) -> source::Options {
    source::Options::builder()
        .lanes(lanes)
        .verify(true)
        .build()
        .unwrap()
}

/// The results of a migration on both sides.
pub struct Moved {
    pub source: Result<Report, MigrateError>,
    pub destination: Result<Received, MigrateError>,
    pub events: Vec<Event>,
}

/// Returns options with two lanes, for a migration that does not compare digests.
pub fn unverified() -> source::Options {
    source::Options::builder().lanes(2).build().unwrap()
}

/// Migrates `vm` to the machine that `builder` builds. `on_event` is called on the source's
/// threads.
pub fn attempt<V: SourceVm + 'static>(
    vm: &Arc<V>,
    tls: &Tls,
    options: &source::Options,
    builder: &mut dyn Builder,
    on_event: &(dyn Fn(&Event) + Send + Sync),
) -> Moved {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let _host: Arc<dyn Host> = Arc::new(StandardHost);
    let give_up = Cancel::new();
    let events = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            Incoming::builder(listener, &tls.server)
                .cancel(&give_up)
                .run(builder)
        });
        let source: Arc<dyn SourceVm> = Arc::clone(vm) as _;
        let observe = |event: &Event| {
            events.lock().unwrap().push(event.clone());
            on_event(event);
        };
        let result = Migration::builder(source, to, &tls.client)
            .options(options.clone())
            .observer(&observe)
            .run();
        if result.is_err() {
            // If the source failed before it reached the destination, the destination would wait
            // forever.
            give_up.cancel();
        }
        let destination = receiving.join().unwrap();
        let events = events.lock().unwrap().clone();
        Moved {
            source: result,
            destination,
            events,
        }
    })
}

/// Migrates `vm`, panics if the migration fails, and returns the machine at the destination.
pub fn relocate(
    vm: &Arc<Movable>,
    tls: &Tls,
    options: &source::Options,
) -> (Arc<Movable>, Report, Received) {
    relocate_while(vm, tls, options, &|_| ())
}

/// Does the same as [`relocate`], and calls `on_event` for the source's events.
pub fn relocate_while(
    vm: &Arc<Movable>,
    tls: &Tls,
    options: &source::Options,
    on_event: &(dyn Fn(&Event) + Send + Sync),
) -> (Arc<Movable>, Report, Received) {
    let mut builder = MachineBuilder::default();
    let moved = attempt(vm, tls, options, &mut builder, on_event);
    let report = moved
        .source
        .unwrap_or_else(|error| panic!("the source: {error}; {:?}", vm.vm().state()));
    let received = moved.destination.unwrap();
    (builder.take().unwrap(), report, received)
}
