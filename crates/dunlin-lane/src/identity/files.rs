//! Reading an identity's files: bounded, with their permissions, as PEM.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use webpki::OwnedCertRevocationList;
use zeroize::Zeroizing;

use super::dated::Item;
use super::error::{FILE_LIMIT_BYTES, IdentityError, Warning};
use super::options::LoadOptions;

/// The key of a file, unless others can read it or it is encrypted.
pub(super) fn read_key(
    path: &Path,
    options: LoadOptions,
    warnings: &mut Vec<Warning>,
) -> Result<Zeroizing<PrivateKeyDer<'static>>, IdentityError> {
    let (text, mode) = read(path)?;
    let path = path.to_owned();
    if mode & 0o007 != 0 {
        if !options.allow_key_open_to_all {
            return Err(IdentityError::KeyOpenToAll { path, mode });
        }
        warnings.push(Warning::KeyOpenToAll {
            path: path.clone(),
            mode,
        });
    } else if mode & 0o070 != 0 {
        warnings.push(Warning::KeyOpenToGroup {
            path: path.clone(),
            mode,
        });
    }
    // RFC 7468, section 11, and RFC 1421, section 4.6.1.1, as OpenSSL still writes it.
    let marks: [&[u8]; 2] = [b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED"];
    if marks
        .iter()
        .any(|mark| text.windows(mark.len()).any(|part| part == *mark))
    {
        return Err(IdentityError::KeyEncrypted { path });
    }
    let key = PrivateKeyDer::from_pem_slice(&text);
    key.map(Zeroizing::new).map_err(|source| match source {
        pem::Error::NoItemsFound => IdentityError::Nothing {
            path,
            wanted: "private key: write one there as PEM",
        },
        source => IdentityError::BadPem { path, source },
    })
}

/// The certificates of a file, at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    items(path, "certificate: write one or more there as PEM")
}

/// The authorities among those of a file: all of them.
pub(super) fn anchors(
    path: &Path,
    authorities: &[CertificateDer<'static>],
) -> Result<RootCertStore, IdentityError> {
    let mut store = RootCertStore::empty();
    for (position, certificate) in authorities.iter().enumerate() {
        store
            .add(certificate.clone())
            .map_err(|error| IdentityError::BadItem {
                path: path.to_owned(),
                what: Item::Authority,
                position,
                reason: error.to_string(),
            })?;
    }
    Ok(store)
}

/// The revocation lists of a file, at least one: a file without would look like safety.
pub(super) fn revocation_lists(
    path: &Path,
) -> Result<Vec<CertificateRevocationListDer<'static>>, IdentityError> {
    items(
        path,
        "revocation list: write one or more there as PEM, or remove the file",
    )
}

/// A revocation list as it is asked.
pub(super) fn revocations(
    path: &Path,
    lists: &[CertificateRevocationListDer<'static>],
) -> Result<Vec<webpki::CertRevocationList<'static>>, IdentityError> {
    let decoded = lists.iter().enumerate().map(|(position, list)| {
        OwnedCertRevocationList::from_der(list)
            .map(Into::into)
            .map_err(|error| IdentityError::BadItem {
                path: path.to_owned(),
                what: Item::RevocationList,
                position,
                reason: error.to_string(),
            })
    });
    decoded.collect()
}

fn items<T: PemObject>(path: &Path, wanted: &'static str) -> Result<Vec<T>, IdentityError> {
    let (text, _) = read(path)?;
    let items = T::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| IdentityError::BadPem {
            path: path.to_owned(),
            source,
        })?;
    if items.is_empty() {
        return Err(IdentityError::Nothing {
            path: path.to_owned(),
            wanted,
        });
    }
    Ok(items)
}

/// The content of a file and its permission bits, both from one descriptor, so that the bits are
/// those of the bytes. They may be a key's, and are wiped.
pub(super) fn read(path: &Path) -> Result<(Zeroizing<Vec<u8>>, u32), IdentityError> {
    let unreadable = |source| IdentityError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    let mode = metadata.permissions().mode() & 0o7777;
    // A buffer that grew would leave what it held in the one before. Reading to the end asks for
    // some bytes beyond it.
    let expected = metadata.len().min(FILE_LIMIT_BYTES) as usize + 64;
    let mut text = Zeroizing::new(Vec::with_capacity(expected));
    file.take(FILE_LIMIT_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > FILE_LIMIT_BYTES {
        return Err(IdentityError::TooLong {
            path: path.to_owned(),
        });
    }
    Ok((text, mode))
}
