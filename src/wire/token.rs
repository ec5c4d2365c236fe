//! The secret that the processes of a run share.

use std::{fmt, fs, path::Path};

use ring::{
    hmac,
    rand::{SecureRandom, SystemRandom},
};

use super::WireError;
use crate::limits;

/// A secret that both ends of a connection know; it is never sent, nor printed.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A new one of 32 bytes, from the system's source of randomness.
    pub fn random() -> Result<Self, WireError> {
        Ok(Self(hex(&random()?)))
    }

    /// This text, without blanks around it; refused if it is short enough to be guessed.
    pub fn new(text: &str) -> Result<Self, WireError> {
        let text = text.trim();
        if text.len() < limits::TOKEN_BYTES {
            return Err(WireError::ShortToken { length: text.len() });
        }
        Ok(Self(text.to_owned()))
    }

    /// What a file says, as [`Token::new`].
    pub fn from_file(path: &Path) -> Result<Self, WireError> {
        let text = fs::read_to_string(path).map_err(|source| WireError::File { path: path.to_owned(), source })?;
        Self::new(&text)
    }

    /// The token as text that [`Token::new`] takes, for the environment of a process that is to
    /// know it.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// Proves knowledge of the token to somebody who sent part of `said`.
    pub(super) fn prove(&self, said: &[&[u8]]) -> [u8; 32] {
        let mut context = hmac::Context::with_key(&self.key());
        said.iter().for_each(|part| context.update(part));
        let mut proof = [0; 32];
        proof.copy_from_slice(context.sign().as_ref());
        proof
    }

    /// Whether that is the proof of somebody who knows the token; takes the same time for all
    /// wrong ones.
    pub(super) fn proves(&self, said: &[&[u8]], proof: &[u8]) -> bool {
        hmac::verify(&self.key(), &said.concat(), proof).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, self.0.as_bytes())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// 32 bytes that nobody has seen.
pub(super) fn random() -> Result<[u8; 32], WireError> {
    let mut bytes = [0; 32];
    SystemRandom::new().fill(&mut bytes).map_err(|_| WireError::Random)?;
    Ok(bytes)
}

/// Two digits for each byte.
pub(super) fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_token_and_one_talk() {
        let (token, other) = (Token::random().unwrap(), Token::random().unwrap());
        let proof = token.prove(&[b"a", b"b"]);
        assert!(token.proves(&[b"a", b"b"], &proof));
        assert!(!other.proves(&[b"a", b"b"], &proof));
        assert!(!token.proves(&[b"a", b"c"], &proof));
        assert!(!token.proves(&[b"a", b"b"], &proof[..31]));
    }

    #[test]
    fn tokens_come_from_files_and_do_not_leak() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, " 0123456789abcdef\n").unwrap();
        let token = Token::from_file(&path).unwrap();
        assert_eq!(token.reveal(), "0123456789abcdef");
        assert_eq!(format!("{token:?}"), "Token");
        assert_eq!(Token::random().unwrap().reveal().len(), 64);
        fs::write(&path, "short").unwrap();
        assert!(matches!(Token::from_file(&path), Err(WireError::ShortToken { length: 5 })));
        assert!(matches!(Token::from_file(folder.path()), Err(WireError::File { .. })));
    }
}
