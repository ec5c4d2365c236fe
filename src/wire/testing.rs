//! Certificates for tests, by an authority of their own.

use std::{fs, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::{Security, TlsFiles, Token};

/// A token and TLS for `localhost`.
pub(crate) fn tls() -> Security {
    let folder = tempfile::tempdir().unwrap();
    Security::new(Token::random().unwrap(), Some(&tls_files(folder.path())), false).unwrap()
}

/// Writes a certificate for `localhost`, its key and its authority.
pub(crate) fn tls_files(folder: &Path) -> TlsFiles {
    let mut authority = CertificateParams::new([]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    TlsFiles {
        certificates: write("certificate.pem", certificate.pem()),
        key: write("key.pem", key.serialize_pem()),
        authority: write("authority.pem", authority.pem()),
    }
}
