//! TLS for tests, by an authority of its own.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::{Security, Tls, Token};

/// A new token, and certificates for this machine.
pub(crate) fn tls() -> Security {
    let mut authority = CertificateParams::new([]).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let names = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    let certificate = CertificateParams::new(names).unwrap().signed_by(&key, &authority).unwrap();

    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let file = folder.path().join(name);
        fs::write(&file, text).unwrap();
        file
    };
    let tls = Tls::from_files(
        &write("certificate.pem", certificate.pem()),
        &write("key.pem", key.serialize_pem()),
        &write("authority.pem", authority.pem()),
    );
    Security { token: Token::random().unwrap(), tls: Some(tls.unwrap()), allow_plain: false }
}
