//! Reads an identity's PEM files, with a size limit, and checks their permissions.

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
use super::error::{FILE_LIMIT_BYTES, IdentityErrorKind, Warning, bad_item};
use super::options::LoadOptions;

/// Reads a key. Rejects an encrypted key and, unless the options allow it, a file that every user
/// can access.
pub(super) fn read_key(
    path: &Path,
    options: LoadOptions,
    warnings: &mut Vec<Warning>,
) -> Result<Zeroizing<PrivateKeyDer<'static>>, IdentityErrorKind> {
    let (text, mode) = read(path)?;
    let path = path.to_owned();
    if mode & 0o007 != 0 {
        if !options.allow_key_open_to_all {
            return Err(IdentityErrorKind::KeyOpenToAll { path, mode });
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
    // The strings that mark an encrypted key in RFC 7468, section 11, and in RFC 1421, section
    // 4.6.1.1. OpenSSL still writes the second one.
    let marks: [&[u8]; 2] = [b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED"];
    if marks
        .iter()
        .any(|mark| text.windows(mark.len()).any(|part| part == *mark))
    {
        return Err(IdentityErrorKind::KeyEncrypted { path });
    }
    let key = PrivateKeyDer::from_pem_slice(&text);
    key.map(Zeroizing::new).map_err(|source| match source {
        pem::Error::NoItemsFound => IdentityErrorKind::Nothing {
            path,
            wanted: "private key in PEM form: write the certificate's key to it",
        },
        source => IdentityErrorKind::BadPem { path, source },
    })
}

/// Reads the certificates of a file, which must contain at least one.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityErrorKind> {
    items(path, "certificate in PEM form: write one to it")
}

/// Makes every certificate of a file a trust anchor.
pub(super) fn anchors(
    path: &Path,
    authorities: &[CertificateDer<'static>],
) -> Result<RootCertStore, IdentityErrorKind> {
    let mut store = RootCertStore::empty();
    for (position, certificate) in authorities.iter().enumerate() {
        store
            .add(certificate.clone())
            .map_err(bad_item(path, Item::Authority, position))?;
    }
    Ok(store)
}

/// Reads the revocation lists of a file. A file without a list is an error, because it would
/// suggest protection that does not exist.
pub(super) fn revocation_lists(
    path: &Path,
) -> Result<Vec<CertificateRevocationListDer<'static>>, IdentityErrorKind> {
    items(
        path,
        "revocation list in PEM form: add one, or remove the file",
    )
}

/// Parses revocation lists into webpki's form.
pub(super) fn revocations(
    path: &Path,
    lists: &[CertificateRevocationListDer<'static>],
) -> Result<Vec<webpki::CertRevocationList<'static>>, IdentityErrorKind> {
    let decoded = lists.iter().enumerate().map(|(position, list)| {
        OwnedCertRevocationList::from_der(list)
            .map(Into::into)
            .map_err(bad_item(path, Item::RevocationList, position))
    });
    decoded.collect()
}

fn items<T: PemObject>(path: &Path, wanted: &'static str) -> Result<Vec<T>, IdentityErrorKind> {
    let (text, _) = read(path)?;
    let items = T::pem_slice_iter(&text)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| IdentityErrorKind::BadPem {
            path: path.to_owned(),
            source,
        })?;
    if items.is_empty() {
        return Err(IdentityErrorKind::Nothing {
            path: path.to_owned(),
            wanted,
        });
    }
    Ok(items)
}

/// Reads a file and its permission bits through one descriptor, so that the permissions are those
/// of the file that was read. The buffer is wiped on drop because it may hold a key.
pub(super) fn read(path: &Path) -> Result<(Zeroizing<Vec<u8>>, u32), IdentityErrorKind> {
    let unreadable = |source| IdentityErrorKind::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    let mode = metadata.permissions().mode() & 0o7777;
    // Reserve the whole size, because a buffer that grows would leave copies of the key in freed
    // memory. `read_to_end` needs some spare capacity.
    let expected = metadata.len().min(FILE_LIMIT_BYTES) as usize + 64;
    let mut text = Zeroizing::new(Vec::with_capacity(expected));
    file.take(FILE_LIMIT_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > FILE_LIMIT_BYTES {
        return Err(IdentityErrorKind::TooLong {
            path: path.to_owned(),
        });
    }
    Ok((text, mode))
}
