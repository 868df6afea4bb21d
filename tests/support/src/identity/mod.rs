//! Shared parts of the identity tests: authorities that issue many kinds of certificates, and peers
//! that verify nothing.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dunlin_lane::handshake::HandshakeError;
use dunlin_lane::identity::{DENIED_FILE, Identity, LoadOptions};
use dunlin_lane::peers::Pin;
use dunlin_lane::provider::Crypto;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CrlDistributionPoint,
    CrlIssuingDistributionPoint, CrlScope, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

use crate::lane::set_mode;
use dunlin_test_base::Scratch;

/// A certificate authority: a root or an intermediate.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
    /// The serial number of the authority's certificate.
    pub serial: u64,
}

/// A certificate and its key, as PEM.
pub struct Issued {
    pub certificate: String,
    pub key: String,
    pub serial: u64,
}

/// The properties of a certificate to be issued.
#[derive(Clone, Copy)]
pub struct Wish<'a> {
    pub names: &'a [&'a str],
    /// The certificate is valid from the beginning of the first year to the beginning of the second
    /// year.
    pub years: (i32, i32),
    pub for_clients: bool,
    pub for_servers: bool,
}

pub fn wish<'a>(names: &'a [&'a str]) -> Wish<'a> {
    Wish {
        names,
        years: (2001, 2096),
        for_clients: true,
        for_servers: true,
    }
}

fn authority_params(name: &str, serial: u64) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.serial_number = Some(SerialNumber::from(serial));
    params
}

fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn params(wish: &Wish<'_>, serial: u64) -> CertificateParams {
    let names = wish.names.iter().map(|name| (*name).to_owned());
    let (uris, others): (Vec<String>, Vec<_>) = names.partition(|name| name.contains("://"));
    let mut params = CertificateParams::new(others).unwrap();
    let uris = uris
        .into_iter()
        .map(|uri| SanType::URI(uri.try_into().unwrap()));
    params.subject_alt_names.extend(uris);
    params.not_before = date_time_ymd(wish.years.0, 1, 1);
    params.not_after = date_time_ymd(wish.years.1, 1, 1);
    params.serial_number = Some(SerialNumber::from(serial));
    for (wished, usage) in [
        (wish.for_clients, ExtendedKeyUsagePurpose::ClientAuth),
        (wish.for_servers, ExtendedKeyUsagePurpose::ServerAuth),
    ] {
        if wished {
            params.extended_key_usages.push(usage);
        }
    }
    params
}

impl Ca {
    pub fn root(name: &str) -> Self {
        let serial = next_serial();
        let params = authority_params(name, serial);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self {
            issuer,
            pem,
            serial,
        }
    }

    pub fn under(&self, name: &str) -> Self {
        let serial = next_serial();
        let params = authority_params(name, serial);
        let key = KeyPair::generate().unwrap();
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self {
            issuer,
            pem,
            serial,
        }
    }

    pub fn issue(&self, wish: &Wish<'_>) -> Issued {
        let serial = next_serial();
        let key = KeyPair::generate().unwrap();
        let certificate = params(wish, serial).signed_by(&key, &self.issuer).unwrap();
        Issued {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            serial,
        }
    }

    /// A revocation list with its next update due at the beginning of `next_year`.
    pub fn revoke(&self, serials: &[u64], next_year: i32) -> String {
        self.revoke_in(2024, serials, next_year)
    }

    /// Like [`Self::revoke`], for a list that is issued at the beginning of `year`.
    pub fn revoke_in(&self, year: i32, serials: &[u64], next_year: i32) -> String {
        self.revoke_for(year, serials, next_year, None)
    }

    /// Like [`Self::revoke_in`]. If `point` is given, the list applies only to that distribution
    /// point.
    pub fn revoke_for(
        &self,
        year: i32,
        serials: &[u64],
        next_year: i32,
        point: Option<(&str, CrlScope)>,
    ) -> String {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(year, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(year, 1, 1),
            next_update: date_time_ymd(next_year, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: point.map(|(uri, scope)| CrlIssuingDistributionPoint {
                distribution_point: CrlDistributionPoint {
                    uris: vec![uri.to_owned()],
                },
                scope: Some(scope),
            }),
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}

pub fn self_signed(wish: &Wish<'_>) -> Issued {
    let serial = next_serial();
    let key = KeyPair::generate().unwrap();
    let certificate = params(wish, serial).self_signed(&key).unwrap();
    Issued {
        certificate: certificate.pem(),
        key: key.serialize_pem(),
        serial,
    }
}

/// A host's directory in Dunlin's layout.
pub struct Host(pub Scratch);

impl Host {
    /// Writes `own`, with `appended` after its certificate, and the other files. No file is written
    /// for an empty text.
    pub fn new(own: &Issued, appended: &str, authorities: &str, revocations: &str) -> Self {
        let host = Self(Scratch::new());
        host.put("cert.pem", &(own.certificate.clone() + appended));
        host.put("key.pem", &own.key);
        set_mode(&host.path("key.pem"), 0o600);
        host.put("ca-cert.pem", authorities);
        host.put("ca-crl.pem", revocations);
        host
    }

    pub fn put(&self, name: &str, text: &str) {
        let path = self.path(name);
        let _ = fs::remove_file(&path);
        if !text.is_empty() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn directory(&self) -> &Path {
        self.0.path()
    }

    pub fn load(&self) -> Identity {
        Identity::load(self.directory(), LoadOptions::default())
            .unwrap()
            .0
    }
}

/// Accepts any certificate.
#[derive(Debug)]
pub struct AcceptAnyServer;

impl ServerCertVerifier for AcceptAnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let provider = Crypto::auto().rustls().unwrap();
        provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

pub fn chain(host: &Host) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_file_iter(host.path("cert.pem"))
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

fn key(host: &Host) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_file(host.path("key.pem")).unwrap()
}

/// A TLS client that accepts any server and does not check its own certificate.
pub fn careless_client(host: &Host, protocols: &[&[u8]]) -> rustls::ClientConfig {
    let provider = Crypto::auto().rustls().unwrap();
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyServer))
        .with_client_auth_cert(chain(host), key(host))
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    config
}

/// A TLS server that accepts any client and does not check its own certificate.
pub fn careless_server(host: &Host, protocols: &[&[u8]]) -> rustls::ServerConfig {
    let provider = Crypto::auto().rustls().unwrap();
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain(host), key(host))
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    config
}

/// Runs TLS on a connection and waits until the other side, which runs Dunlin's code, rejects it.
/// Returns the text with which Dunlin reports the rejection.
pub fn drive_client(config: rustls::ClientConfig, mut stream: TcpStream) -> String {
    let name = "destination.test".try_into().unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let mut lane = rustls::Stream::new(&mut connection, &mut stream);
    let result = lane
        .write_all(b"GET / HTTP/1.1\r\n\r\n")
        .and_then(|()| lane.read_exact(&mut [0]));
    in_our_words(result.unwrap_err())
}

/// Like [`drive_client`], on the accepting side.
pub fn drive_server(config: rustls::ServerConfig, mut stream: TcpStream) -> String {
    let mut connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let mut lane = rustls::Stream::new(&mut connection, &mut stream);
    in_our_words(lane.read_exact(&mut [0]).unwrap_err())
}

fn in_our_words(error: std::io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref()) {
        Some(tls) => HandshakeError::from(rustls::Error::clone(tls)).to_string(),
        None => error.to_string(),
    }
}

/// Writes a list of denied keys to a host's identity.
pub fn denies(host: &Host, pins: &[Pin]) {
    let lines: String = pins.iter().map(|pin| format!("{pin}\n")).collect();
    host.put(DENIED_FILE, &("# denied here\n".to_owned() + &lines));
}

/// The pin of the key in a PEM certificate.
pub fn key_pin(pem: &str) -> Pin {
    let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    Pin::of_key(&certificate).unwrap()
}
