//! Creates the files that an operator prepares once per host: a certificate, its key,
//! and the certificate of the authority.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use dunlin::engine::vmm::VmmError;
use dunlin::lane::{ClientTls, Crypto, Identity, LoadOptions, ServerTls};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

const SOURCE: &str = "source.example";
const DESTINATION: &str = "destination.example";

/// TLS settings of a source and a destination that accept only each other.
pub(crate) fn two_hosts() -> Result<(ClientTls, ServerTls), VmmError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let authority = params.self_signed(&key)?.pem();
    let issuer = Issuer::new(params, key);
    let identity = |name: &str| -> Result<Identity, VmmError> {
        let directory = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new([name.to_owned()])?.signed_by(&key, &issuer)?;
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("ca-cert.pem"), &authority)?;
        fs::write(directory.join("cert.pem"), certificate.pem())?;
        fs::write(directory.join("key.pem"), key.serialize_pem())?;
        fs::set_permissions(directory.join("key.pem"), fs::Permissions::from_mode(0o600))?;
        let (identity, _) = Identity::load(&directory, LoadOptions::default())?;
        fs::remove_dir_all(directory)?;
        Ok(identity)
    };
    let crypto = Crypto::auto();
    let only = |name: &str| Ok::<_, VmmError>([name.parse()?].into_iter().collect());
    let client = identity(SOURCE)?.client(&crypto, only(DESTINATION)?)?;
    let server = identity(DESTINATION)?.server(&crypto, only(SOURCE)?)?;
    Ok((client, server))
}
