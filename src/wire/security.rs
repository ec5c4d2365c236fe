//! Who may talk, and whether it is encrypted.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    version::TLS13,
};

use super::{Token, WireError};

/// What a process needs to talk to others, and asks of them.
#[derive(Clone, Debug)]
pub struct Security {
    pub(super) token: Token,
    pub(super) tls: Option<Tls>,
    pub(super) allow_plain: bool,
}

/// PEM files for TLS. Both ends of a connection show a certificate that the authority signed;
/// that of the end that was connected to names its host.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// This machine's certificate, then those between it and the authority's.
    pub certificates: PathBuf,
    /// The key of this machine's certificate.
    pub key: PathBuf,
    /// The authority's certificate.
    pub authority: PathBuf,
}

/// TLS for connections in both directions.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    pub client: Arc<ClientConfig>,
    pub server: Arc<ServerConfig>,
}

impl Security {
    /// A token alone: connections stay on this machine.
    pub fn local(token: Token) -> Self {
        Self { token, tls: None, allow_plain: false }
    }

    /// A token, TLS if there are files for it, and without them the consent to send rows'
    /// gradients to other machines in the clear.
    pub fn new(token: Token, tls: Option<&TlsFiles>, allow_plain: bool) -> Result<Self, WireError> {
        Ok(Self { token, tls: tls.map(Tls::load).transpose()?, allow_plain })
    }

    /// Refuses to reach another machine in the clear.
    pub(super) fn check(&self, ip: IpAddr, address: &str) -> Result<(), WireError> {
        if self.tls.is_some() || self.allow_plain || ip.to_canonical().is_loopback() {
            return Ok(());
        }
        Err(WireError::Plain { address: address.to_owned() })
    }
}

impl Tls {
    fn load(files: &TlsFiles) -> Result<Self, WireError> {
        let chain = certificates(&files.certificates)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&files.key)?).map_err(unusable(&files.key))?;
        let mut authority = RootCertStore::empty();
        for certificate in certificates(&files.authority)? {
            authority.add(certificate).map_err(unusable(&files.authority))?;
        }
        let authority = Arc::new(authority);
        let provider = Arc::new(ring::default_provider());

        let callers = WebPkiClientVerifier::builder_with_provider(Arc::clone(&authority), Arc::clone(&provider))
            .build()
            .map_err(unusable(&files.authority))?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable(&files.certificates))?
            .with_client_cert_verifier(callers)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(unusable(&files.certificates))?;
        // Connections last; there is nothing to resume.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});

        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(unusable(&files.certificates))?
            .with_root_certificates(authority)
            .with_client_auth_cert(chain, key)
            .map_err(unusable(&files.certificates))?;
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, WireError> {
    let bytes = read(path)?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&bytes).collect::<Result<_, _>>().map_err(unusable(path))?;
    if found.is_empty() {
        return Err(WireError::Pem { path: path.to_owned(), reason: "no certificate in it".to_owned() });
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<u8>, WireError> {
    fs::read(path).map_err(|source| WireError::File { path: path.to_owned(), source })
}

/// For libraries whose errors have many types.
fn unusable<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> WireError + '_ {
    |error| WireError::Pem { path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::testing;

    #[test]
    fn other_machines_need_tls_or_consent() {
        let token = || Token::random().unwrap();
        let away: IpAddr = "10.0.0.1".parse().unwrap();
        let here: IpAddr = "::ffff:127.0.0.1".parse().unwrap();
        let local = Security::local(token());
        assert!(matches!(local.check(away, "a:1"), Err(WireError::Plain { .. })));
        local.check(here, "a:1").unwrap();
        Security::new(token(), None, true).unwrap().check(away, "a:1").unwrap();
        testing::tls().check(away, "a:1").unwrap();
    }

    #[test]
    fn files_that_are_no_certificates_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let good = testing::tls_files(folder.path());
        let check = |files: TlsFiles, named: &Path| {
            let error = Security::new(Token::random().unwrap(), Some(&files), false).unwrap_err();
            assert!(error.to_string().contains(named.to_str().unwrap()), "{error}");
        };
        check(TlsFiles { certificates: good.key.clone(), ..good.clone() }, &good.key);
        check(TlsFiles { key: good.authority.clone(), ..good.clone() }, &good.authority);
        check(TlsFiles { authority: "/nowhere".into(), ..good }, Path::new("/nowhere"));
    }
}
