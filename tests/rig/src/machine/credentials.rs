//! Certificates in the layout that QEMU and libvirt read.

use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};

use super::{MachineError, at};
use dunlin_test_base::Scratch;

/// The group ffdhe2048 (RFC 7919, appendix A.1). Without a file of Diffie-Hellman parameters, QEMU
/// generates parameters each time it loads the credentials of a server, which takes up to a
/// second.
const DH_PARAMETERS: &str = "-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
";

/// A folder with `ca-cert.pem`, and certificates and keys of a server and a client. Dropping it
/// removes the folder.
#[derive(Debug)]
pub struct Credentials(Scratch);

impl Credentials {
    /// Creates a new authority, and certificates for a server called `server` and a client called
    /// `client`. Both are also valid for 127.0.0.1.
    ///
    /// # Errors
    /// The folder cannot be written.
    ///
    /// # Panics
    /// A name is not a DNS name.
    pub fn new(server: &str, client: &str) -> Result<Self, MachineError> {
        let folder = Scratch::try_new().map_err(at("a scratch folder"))?;
        let authority = Authority::new();
        write(&folder.join("ca-cert.pem"), &authority.certificate)?;
        for (role, name, usage) in [
            ("server", server, ExtendedKeyUsagePurpose::ServerAuth),
            ("client", client, ExtendedKeyUsagePurpose::ClientAuth),
        ] {
            let names = [dns(name), SanType::IpAddress(Ipv4Addr::LOCALHOST.into())];
            let (certificate, key) = authority.issue(name, names.into(), vec![usage]);
            write(&folder.join(format!("{role}-cert.pem")), &certificate)?;
            write(&folder.join(format!("{role}-key.pem")), &key)?;
        }
        write(&folder.join("dh-params.pem"), DH_PARAMETERS)?;
        Ok(Self(folder))
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.0.path().to_path_buf()
    }
}

/// For each of two hosts with these names: the names and contents of its files. A new authority
/// issues both hosts' certificates. Each host has one certificate for both roles.
pub(crate) fn of_hosts(names: [&str; 2]) -> [Vec<(&'static str, String)>; 2] {
    let authority = Authority::new();
    names.map(|name| {
        let usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let (certificate, key) = authority.issue(name, vec![dns(name)], usages);
        vec![
            ("ca-cert.pem", authority.certificate.clone()),
            ("server-cert.pem", certificate.clone()),
            ("server-key.pem", key.clone()),
            ("client-cert.pem", certificate),
            ("client-key.pem", key),
            ("dh-params.pem", DH_PARAMETERS.to_owned()),
        ]
    })
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    fn new() -> Self {
        let mut parameters = parameters("Rig authority");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("the operating system gives random numbers");
        let certificate = parameters
            .self_signed(&key)
            .expect("the parameters are complete")
            .pem();
        Self {
            issuer: Issuer::new(parameters, key),
            certificate,
        }
    }

    /// Issues a certificate. Returns it and its key as PEM.
    fn issue(
        &self,
        name: &str,
        names: Vec<SanType>,
        usages: Vec<ExtendedKeyUsagePurpose>,
    ) -> (String, String) {
        let mut bearer = parameters(name);
        bearer.subject_alt_names = names;
        // QEMU requires keyEncipherment, which TLS 1.3 does not use.
        bearer.key_usages = vec![
            KeyUsagePurpose::DigitalSignature,
            KeyUsagePurpose::KeyEncipherment,
        ];
        bearer.extended_key_usages = usages;
        let key = KeyPair::generate().expect("the operating system gives random numbers");
        let certificate = bearer
            .signed_by(&key, &self.issuer)
            .expect("the parameters are complete");
        (certificate.pem(), key.serialize_pem())
    }
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().expect("the name is a DNS name"))
}

fn parameters(name: &str) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters
}

fn write(path: &Path, text: &str) -> Result<(), MachineError> {
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(at(path))
}
