//! Shared parts of the lane tests: a small certificate authority, connections and secured pairs.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dunlin_lane::handshake::{self, HandshakeError, Secured};
use dunlin_lane::identity::{Identity, LoadOptions};
use dunlin_lane::offload::Offload;
use dunlin_lane::peers::Peers;
use dunlin_lane::policy::{ClientTls, ServerTls};
use dunlin_lane::provider::{CipherSuite, Crypto, Provider};
use dunlin_test_base::Scratch;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType, date_time_ymd,
};

pub const SOURCE: &str = "source.test";
pub const DESTINATION: &str = "destination.test";

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// An authority that issues identities in Dunlin's layout.
pub struct Authority {
    pub issuer: Issuer<'static, KeyPair>,
    pem: String,
    scratch: Scratch,
}

impl Authority {
    pub fn new() -> Self {
        Self::named("test authority")
    }

    pub fn named(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
            scratch: Scratch::new(),
        }
    }

    /// Creates the identity of a host with these DNS, IP and URI names. Returns its directory.
    pub fn host(&self, names: &[&str]) -> PathBuf {
        self.host_until(names, 2096)
    }

    /// Issues another certificate with these names for the key of a host. Returns the key and the
    /// certificate, both in PEM.
    pub fn renew(&self, host: &Path, names: &[&str]) -> (String, String) {
        let key = fs::read_to_string(host.join("key.pem")).unwrap();
        let pair = KeyPair::from_pem(&key).unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.not_before = date_time_ymd(2002, 1, 1);
        params.not_after = date_time_ymd(2096, 1, 1);
        let certificate = params.signed_by(&pair, &self.issuer).unwrap();
        (key, certificate.pem())
    }

    /// Like [`Self::host`], with a certificate that expires at the beginning of `year`.
    pub fn host_until(&self, names: &[&str], year: i32) -> PathBuf {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let names = names.iter().map(|name| (*name).to_owned());
        let (uris, others): (Vec<String>, Vec<_>) = names.partition(|name| name.contains("://"));
        let mut params = CertificateParams::new(others).unwrap();
        for uri in uris {
            params
                .subject_alt_names
                .push(SanType::URI(uri.try_into().unwrap()));
        }
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = self.scratch.join(number.to_string());
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("ca-cert.pem"), &self.pem).unwrap();
        fs::write(directory.join("cert.pem"), certificate.pem()).unwrap();
        let key_path = directory.join("key.pem");
        fs::write(&key_path, key.serialize_pem()).unwrap();
        set_mode(&key_path, 0o600);
        directory
    }

    /// Like [`Self::host`], for a host that also trusts the authorities `others`.
    pub fn host_trusting(&self, names: &[&str], others: &[&Self]) -> PathBuf {
        let directory = self.host(names);
        let all: String = others.iter().map(|other| &*other.pem).collect();
        fs::write(directory.join("ca-cert.pem"), self.pem.clone() + &all).unwrap();
        directory
    }

    pub fn identity(&self, names: &[&str]) -> Identity {
        load(&self.host(names))
    }
}

pub fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

pub fn load(directory: &Path) -> Identity {
    Identity::load(directory, LoadOptions::default()).unwrap().0
}

pub fn names(names: &[&str]) -> Peers {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

/// Both ends of a connection over loopback.
pub fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Settings that make this process seal and open records with `provider` and `suite`.
pub fn crypto(provider: Provider, suite: CipherSuite) -> Crypto {
    Crypto {
        provider,
        suites: vec![suite],
        offload: Offload::Process,
    }
}

/// Runs the handshake of a lane over loopback. Returns the results of the client and the server.
pub fn both_ends(
    near: &ClientTls,
    far: &ServerTls,
) -> (
    Result<Secured, HandshakeError>,
    Result<Secured, HandshakeError>,
) {
    let (near_socket, far_socket) = pair();
    thread::scope(|scope| {
        let accept = scope.spawn(|| handshake::server(far_socket, far, soon()));
        let connected = handshake::client(near_socket, near, soon());
        (connected, accept.join().unwrap())
    })
}

/// Returns both ends of a lane after its handshake: first that of the source, then that of
/// the destination.
pub fn secured(crypto: &Crypto) -> (Secured, Secured) {
    let authority = Authority::new();
    let client = authority
        .identity(&[SOURCE])
        .client(crypto, names(&[DESTINATION]))
        .unwrap();
    let server = authority
        .identity(&[DESTINATION])
        .server(crypto, names(&[SOURCE]))
        .unwrap();
    let (near, far) = both_ends(&client, &server);
    (near.unwrap(), far.unwrap())
}

/// Every combination of a built-in provider and a suite.
pub fn combinations() -> impl Iterator<Item = (Provider, CipherSuite)> {
    Provider::built_in()
        .iter()
        .flat_map(|&provider| CipherSuite::ALL.map(|suite| (provider, suite)))
}
