//! Who may connect: whoever knows the token; from another machine, through TLS.

use std::{
    fmt::{self, Write},
    fs,
    net::IpAddr,
    path::Path,
    sync::Arc,
};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{WireError, tls};

/// What two processes must have in common to talk.
#[derive(Clone, Debug)]
pub struct Security {
    /// The secret of the run.
    pub token: Token,
    /// Encryption, and who the other side is.
    pub tls: Option<Tls>,
    /// Whether other machines may do without TLS.
    pub allow_plain: bool,
}

/// TLS in both roles; both sides show a certificate of the same authority.
#[derive(Clone)]
pub struct Tls {
    pub(super) client: Arc<rustls::ClientConfig>,
    pub(super) server: Arc<rustls::ServerConfig>,
}

impl Tls {
    /// From PEM files: the certificate chain, its key, and the authority of the other side's.
    pub fn from_files(certificate: &Path, key: &Path, authority: &Path) -> Result<Self, WireError> {
        tls::from_files(certificate, key, authority)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// A secret that a run and its executors share.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Vec<u8>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Bytes of a secret at least: fewer can be tried out.
const TOKEN_BYTES: usize = 16;

impl Token {
    /// A new one.
    pub fn random() -> Result<Self, WireError> {
        Ok(Self(hex(&random()?).into_bytes()))
    }

    /// What a file holds, without blanks around it.
    pub fn from_file(file: &Path) -> Result<Self, WireError> {
        let unusable = |reason: String| WireError::File { file: file.to_owned(), reason };
        let text = fs::read(file).map_err(|error| unusable(error.to_string()))?;
        let text = text.trim_ascii();
        if text.len() < TOKEN_BYTES {
            return Err(unusable(format!("a token has {TOKEN_BYTES} bytes or more, this one has {}", text.len())));
        }
        Ok(Self(text.to_vec()))
    }

    /// From `to_text`.
    pub fn from_text(text: &str) -> Self {
        Self(text.as_bytes().to_vec())
    }

    /// For a child process.
    pub fn to_text(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// Shows that the token is known, without telling it.
    pub(super) fn proof(&self, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(parts).map_or([0; 32], |mac| mac.finalize().into_bytes().into())
    }

    /// Whether a proof is one; takes the same time whichever byte is wrong.
    pub(super) fn is_proof(&self, proof: &[u8; 32], parts: &[&[u8]]) -> bool {
        self.mac(parts).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    fn mac(&self, parts: &[&[u8]]) -> Option<Hmac<Sha256>> {
        // Takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        for part in parts {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        Some(mac)
    }
}

impl Security {
    /// For processes of this machine.
    pub fn plain(token: Token) -> Self {
        Self { token, tls: None, allow_plain: false }
    }

    /// Refuses another machine that would be spoken to in the open.
    pub(super) fn check(&self, address: &str, ip: IpAddr) -> Result<(), WireError> {
        let fits = self.tls.is_some() || self.allow_plain || ip.is_loopback();
        if fits { Ok(()) } else { Err(WireError::Plain { address: address.to_owned() }) }
    }
}

pub(super) fn random() -> Result<[u8; 32], WireError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| WireError::Random { reason: error.to_string() })?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_told_apart_and_not_shown() {
        let (one, other) = (Token::random().unwrap(), Token::random().unwrap());
        assert_ne!(one, other);
        let proof = one.proof(&[b"a", b"b"]);
        assert!(one.is_proof(&proof, &[b"a", b"b"]));
        assert!(Token::from_text(&one.to_text()).is_proof(&proof, &[b"a", b"b"]));
        assert!(!other.is_proof(&proof, &[b"a", b"b"]));
        assert!(!one.is_proof(&proof, &[b"ab", b""]));
        assert_eq!(format!("{:?}", Security::plain(one)), "Security { token: Token, tls: None, allow_plain: false }");
    }

    #[test]
    fn a_short_token_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "  short\n").unwrap();
        let error = Token::from_file(file.path()).unwrap_err().to_string();
        assert!(error.contains("16 bytes or more, this one has 5"), "{error}");
        fs::write(file.path(), "0123456789abcdef\n").unwrap();
        assert_eq!(Token::from_file(file.path()).unwrap(), Token::from_text("0123456789abcdef"));
    }

    #[test]
    fn other_machines_need_tls() {
        let security = Security::plain(Token::from_text("x"));
        assert!(security.check("here", [127, 0, 0, 1].into()).is_ok());
        let error = security.check("there:1", [10, 0, 0, 1].into()).unwrap_err().to_string();
        assert!(error.starts_with("there:1 is not on this machine and there is no TLS"), "{error}");
        assert!(Security { allow_plain: true, ..security }.check("there", [10, 0, 0, 1].into()).is_ok());
    }
}
