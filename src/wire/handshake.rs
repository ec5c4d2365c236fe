//! Both sides show that they know the token, and neither tells it.
//!
//! ```text
//!   acceptor                              connector
//!     challenge: versions, nonce a ──────▶
//!     ◀────── answer: versions, nonce c, purpose, HMAC("connect", a, c, purpose)
//!     welcome: HMAC("accept", c, a) ─────▶    or a refusal with its reason
//! ```
//!
//! HMAC-SHA256 (RFC 2104). A message has two bytes of length, at most `limits::HANDSHAKE_BYTES`.

use std::{
    io,
    time::{Duration, Instant},
};

use super::{
    WireError,
    security::{Token, random},
    stream::Stream,
};
use crate::limits;

const GREETING: &[u8; 8] = b"emberfl1";

/// This program's version; both sides must be of the same.
const VERSION: &str = env!("CARGO_PKG_VERSION");

const WELCOME: u8 = 1;
const REFUSAL: u8 = 2;

/// The accepting side; gives what the other side came for.
pub(super) fn accept(stream: &Stream, peer: &str, token: &Token) -> Result<String, WireError> {
    let talk = Talk::new(stream, peer);
    let own = random()?;
    talk.send(&[GREETING, &own, VERSION.as_bytes()])?;
    let answer = talk.receive()?;
    let mut answer = Fields { bytes: &answer, peer };
    answer.expect(*GREETING)?;
    let (theirs, proof): ([u8; 32], [u8; 32]) = (answer.array()?, answer.array()?);
    let (version, purpose) = (answer.text()?, answer.text()?);
    if version != VERSION {
        let reason = format!("this is version {VERSION}, that is version {version}");
        talk.send(&[&[REFUSAL], reason.as_bytes()])?;
        return Err(WireError::Refused { peer: "this side".to_owned(), reason });
    }
    if !token.is_proof(&proof, &[b"connect", &own, &theirs, purpose.as_bytes()]) {
        talk.send(&[&[REFUSAL], b"another token"])?;
        return Err(WireError::Token { peer: peer.to_owned() });
    }
    talk.send(&[&[WELCOME], &token.proof(&[b"accept", &theirs, &own])])?;
    Ok(purpose)
}

/// The connecting side; `purpose` is what it comes for.
pub(super) fn connect(stream: &Stream, peer: &str, token: &Token, purpose: &str) -> Result<(), WireError> {
    let talk = Talk::new(stream, peer);
    let challenge = talk.receive()?;
    let mut challenge = Fields { bytes: &challenge, peer };
    challenge.expect(*GREETING)?;
    let theirs: [u8; 32] = challenge.array()?;
    let own = random()?;
    let proof = token.proof(&[b"connect", &theirs, &own, purpose.as_bytes()]);
    let version = [&[VERSION.len() as u8], VERSION.as_bytes()].concat();
    let purpose = [&[purpose.len() as u8], purpose.as_bytes()].concat();
    talk.send(&[GREETING, &own, &proof, &version, &purpose])?;
    let verdict = talk.receive()?;
    let mut verdict = Fields { bytes: &verdict, peer };
    match verdict.array()? {
        [WELCOME] if token.is_proof(&verdict.array()?, &[b"accept", &own, &theirs]) => Ok(()),
        [WELCOME] => Err(WireError::Token { peer: peer.to_owned() }),
        [REFUSAL] if verdict.bytes == b"another token" => Err(WireError::Token { peer: peer.to_owned() }),
        [REFUSAL] => {
            let reason = String::from_utf8_lossy(verdict.bytes).into_owned();
            Err(WireError::Refused { peer: peer.to_owned(), reason })
        }
        _ => Err(verdict.garbage("no answer to a handshake")),
    }
}

/// Short messages, within one deadline for all of them.
struct Talk<'a> {
    stream: &'a Stream,
    peer: &'a str,
    deadline: Instant,
}

impl<'a> Talk<'a> {
    fn new(stream: &'a Stream, peer: &'a str) -> Self {
        Self { stream, peer, deadline: Instant::now() + limits::HANDSHAKE }
    }

    fn send(&self, parts: &[&[u8]]) -> Result<(), WireError> {
        let message = parts.concat();
        let framed = [&(message.len() as u16).to_le_bytes()[..], &message].concat();
        let sent = self.stream.set_write_deadline(self.left()).and_then(|()| self.stream.write_all(&framed));
        sent.map_err(|error| self.failed(error))
    }

    fn receive(&self) -> Result<Vec<u8>, WireError> {
        let mut length = [0; 2];
        self.read(&mut length)?;
        let length = usize::from(u16::from_le_bytes(length));
        if length > limits::HANDSHAKE_BYTES {
            return Err(WireError::Garbage { peer: self.peer.to_owned(), what: "no handshake begins so" });
        }
        let mut message = vec![0; length];
        self.read(&mut message)?;
        Ok(message)
    }

    /// A peer that sends byte by byte does not get more time.
    fn read(&self, mut bytes: &mut [u8]) -> Result<(), WireError> {
        while !bytes.is_empty() {
            self.stream.set_read_deadline(self.left()).map_err(|error| self.failed(error))?;
            match self.stream.read(bytes) {
                Ok(0) => return Err(WireError::Closed { peer: self.peer.to_owned() }),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    fn left(&self) -> Duration {
        // Zero would mean no deadline.
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    fn failed(&self, source: io::Error) -> WireError {
        super::connection::failure(self.peer, limits::HANDSHAKE, source)
    }
}

/// The fields of a message, from its beginning on.
struct Fields<'a> {
    bytes: &'a [u8],
    peer: &'a str,
}

impl Fields<'_> {
    fn garbage(&self, what: &'static str) -> WireError {
        WireError::Garbage { peer: self.peer.to_owned(), what }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let Some((field, rest)) = self.bytes.split_first_chunk() else {
            return Err(self.garbage("a handshake that is too short"));
        };
        self.bytes = rest;
        Ok(*field)
    }

    fn expect(&mut self, greeting: [u8; 8]) -> Result<(), WireError> {
        if self.array()? == greeting { Ok(()) } else { Err(self.garbage("no handshake begins so")) }
    }

    fn text(&mut self) -> Result<String, WireError> {
        let [length] = self.array()?;
        let Some((text, rest)) = self.bytes.split_at_checked(usize::from(length)) else {
            return Err(self.garbage("a handshake that is too short"));
        };
        self.bytes = rest;
        String::from_utf8(text.to_vec()).map_err(|_| self.garbage("a handshake that is no text"))
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread};

    use super::*;

    fn pair() -> (Stream, Stream) {
        let (one, other) = UnixStream::pair().unwrap();
        (Stream::Unix(one), Stream::Unix(other))
    }

    /// Says this to a side that accepts, once it has sent its challenge.
    fn check_answer(parts: &[&[u8]], expected: &str) {
        let (stream, stranger) = pair();
        let token = Token::random().unwrap();
        let accepting = thread::spawn(move || accept(&stream, "peer", &token));
        let talk = Talk::new(&stranger, "peer");
        talk.receive().unwrap();
        talk.send(parts).unwrap();
        let error = accepting.join().unwrap().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn answers_that_make_no_sense_are_refused() {
        check_answer(&[b"GET / HTTP/1.0\r\n\r\n"], "no handshake begins so");
        check_answer(&[&[b'x'; 600]], "no handshake begins so");
        check_answer(&[GREETING, &[0; 63]], "too short");
        check_answer(&[GREETING, &[0; 64], &[9], b"0.0"], "too short");
        check_answer(&[GREETING, &[0; 64], &[1], b"\xff", &[0]], "no text");
        check_answer(&[GREETING, &[0; 64], &[3], b"0.0", &[0]], "that is version 0.0");
        check_answer(&[GREETING, &[0; 64], &[VERSION.len() as u8], VERSION.as_bytes(), &[0]], "another token");
    }

    #[test]
    fn a_listener_that_does_not_know_the_token_is_found_out() {
        let (stream, impostor) = pair();
        let connecting = thread::spawn(move || connect(&stream, "peer", &Token::random().unwrap(), "talk"));
        let talk = Talk::new(&impostor, "peer");
        talk.send(&[GREETING, &[7; 32], VERSION.as_bytes()]).unwrap();
        let answer = talk.receive().unwrap();
        // The other side's own proof does not help.
        talk.send(&[&[WELCOME], &answer[40..72]]).unwrap();
        let error = connecting.join().unwrap().unwrap_err();
        assert!(matches!(error, WireError::Token { .. }), "{error}");
    }
}
