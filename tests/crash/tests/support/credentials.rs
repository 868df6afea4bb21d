//! A directory of the test's own, and both sides' certificates in it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A directory that goes with its owner. In memory where there is a tmpfs: a
/// killed process loses nothing that it has written, synced or not, so that a
/// disk would only make the runs slower.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dunlin-crash-{}-{number}", std::process::id());
        let memory = Path::new("/dev/shm").join(&name);
        if fs::create_dir(&memory).is_ok() {
            return Self(memory);
        }
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `source` and `destination`, each a directory with an identity.
pub struct Credentials(Scratch);

impl Credentials {
    pub fn new() -> Self {
        let scratch = Scratch::new();
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
            let directory = scratch.0.join(side);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("ca-cert.pem"), &pem).unwrap();
            fs::write(directory.join("cert.pem"), certificate.pem()).unwrap();
            let path = directory.join("key.pem");
            fs::write(&path, key.serialize_pem()).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        Self(scratch)
    }

    /// Puts both into the directory of a run.
    pub fn lend(&self, directory: &Path) {
        for side in ["source", "destination"] {
            std::os::unix::fs::symlink(self.0.0.join(side), directory.join(side)).unwrap();
        }
    }
}
