//! The certificates of both sides.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use dunlin_test_base::Scratch;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// The identities of both sides, in the directories `source` and `destination`.
pub struct Credentials(Scratch);

impl Credentials {
    pub fn new() -> Self {
        let scratch = Scratch::in_memory();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority
            .distinguished_name
            .push(DnType::CommonName, "the crash tests' authority");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = authority.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(authority, key);
        for side in ["source", "destination"] {
            let bearer = CertificateParams::new(vec![format!("{side}.test")]).unwrap();
            let key = KeyPair::generate().unwrap();
            let certificate = bearer.signed_by(&key, &issuer).unwrap();
            let directory = scratch.join(side);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("ca-cert.pem"), &pem).unwrap();
            fs::write(directory.join("cert.pem"), certificate.pem()).unwrap();
            let path = directory.join("key.pem");
            fs::write(&path, key.serialize_pem()).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        Self(scratch)
    }

    /// Links both identities into the directory of a run.
    pub fn lend(&self, directory: &Path) {
        for side in ["source", "destination"] {
            std::os::unix::fs::symlink(self.0.join(side), directory.join(side)).unwrap();
        }
    }
}
