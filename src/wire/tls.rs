//! TLS 1.3 where both sides show a certificate of one authority.
//!
//! Reading and writing go on at the same time: what is on the socket is waited for without the
//! lock of the session, and what is to be sent is encrypted under it but sent without.

use std::{
    fs,
    io::{self, Read, Write},
    net::TcpStream,
    ops::Range,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustls::{
    ClientConfig, Connection, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};

use super::{Tls, WireError};

/// Bytes taken off a socket at once: a few records.
const SOCKET_BYTES: usize = 1 << 16;

pub(super) fn from_files(certificate: &Path, key: &Path, authority: &Path) -> Result<Tls, WireError> {
    let tls = |error: &dyn std::fmt::Display| WireError::Tls { reason: error.to_string() };
    let chain = certificates(certificate)?;
    let private = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|error| WireError::File { file: key.to_owned(), reason: format!("no PEM key: {error:?}") })?;
    let mut roots = RootCertStore::empty();
    for root in certificates(authority)? {
        roots.add(root).map_err(|error| tls(&error))?;
    }
    let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
    let clients: Arc<dyn ClientCertVerifier> =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|error| tls(&error))?;
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| tls(&error))?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain.clone(), private.clone_key())
        .map_err(|error| tls(&error))?;
    // No session is ever resumed.
    server.send_tls13_tickets = 0;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| tls(&error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, private)
        .map_err(|error| tls(&error))?;
    Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
}

fn read(file: &Path) -> Result<Vec<u8>, WireError> {
    fs::read(file).map_err(|error| WireError::File { file: file.to_owned(), reason: error.to_string() })
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, WireError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(file)?).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(WireError::File { file: file.to_owned(), reason: "no PEM certificate in it".to_owned() }),
        Err(error) => Err(WireError::File { file: file.to_owned(), reason: format!("no PEM certificates: {error:?}") }),
    }
}

/// What came off the socket and is still to be decrypted: a session takes no more while decrypted
/// bytes wait to be read from it.
struct Incoming {
    encrypted: Vec<u8>,
    left: Range<usize>,
}

/// An encrypted stream.
pub(super) struct TlsStream {
    tcp: TcpStream,
    session: Mutex<Connection>,
    /// Held by whoever receives.
    incoming: Mutex<Incoming>,
    /// Held by whoever sends, so that records go out in the order in which they were made.
    sending: Mutex<()>,
}

impl TlsStream {
    pub fn client(tls: &Tls, tcp: TcpStream, host: &str) -> io::Result<Self> {
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let session = rustls::ClientConnection::new(Arc::clone(&tls.client), name).map_err(io::Error::other)?;
        Self::begin(tcp, session.into())
    }

    pub fn server(tls: &Tls, tcp: TcpStream) -> io::Result<Self> {
        let session = rustls::ServerConnection::new(Arc::clone(&tls.server)).map_err(io::Error::other)?;
        Self::begin(tcp, session.into())
    }

    fn begin(tcp: TcpStream, mut session: Connection) -> io::Result<Self> {
        while session.is_handshaking() {
            session.complete_io(&mut &tcp)?;
        }
        let incoming = Incoming { encrypted: vec![0; SOCKET_BYTES], left: 0..0 };
        Ok(Self { tcp, session: Mutex::new(session), incoming: Mutex::new(incoming), sending: Mutex::new(()) })
    }

    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    fn session(&self) -> MutexGuard<'_, Connection> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        let Incoming { encrypted, left } = &mut *incoming;
        loop {
            let mut session = self.session();
            match session.reader().read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
            if left.start == left.end {
                drop(session);
                *left = 0..(&self.tcp).read(encrypted)?;
                session = self.session();
            }
            // At the end of the stream there is nothing, which tells the session so.
            left.start += session.read_tls(&mut &encrypted[left.clone()])?;
            session.process_new_packets().map_err(io::Error::other)?;
        }
    }

    pub fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut encrypted = Vec::new();
        while !bytes.is_empty() {
            encrypted.clear();
            let mut session = self.session();
            let count = session.writer().write(bytes)?;
            bytes = &bytes[count..];
            while session.wants_write() {
                session.write_tls(&mut encrypted)?;
            }
            drop(session);
            (&self.tcp).write_all(&encrypted)?;
        }
        Ok(())
    }
}
