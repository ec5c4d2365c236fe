//! How two processes make sure of each other before anything else is said.
//!
//! ```text
//!   caller                                    listener
//!     ── HELLO: nonce, version, purpose ──▶
//!     ◀────────── CHALLENGE: nonce, version ──
//!     ── PROOF: HMAC("caller", both) ───────▶   knows the token, the purpose is the caller's
//!     ◀── WELCOME: HMAC("listener", both) ───   or REFUSED: a reason, at any time
//! ```
//!
//! "both" is HELLO and CHALLENGE as they were sent: a proof is good for one conversation only,
//! and for its purpose. The words of the two ends differ, so that none can be sent back to its
//! author (RFC 2104 for HMAC; the scheme is that of SCRAM, RFC 5802, with a random secret).

use std::time::{Duration, Instant};

use super::{
    Token, WireError,
    connection::Connection,
    frame::{FrameFault, Label, PROTOCOL},
    token::random,
};
use crate::limits;

const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const PROOF: u8 = 3;
const WELCOME: u8 = 4;
const REFUSED: u8 = 5;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const NONCE_BYTES: usize = 32;

/// The caller's side: proves to know the token, and waits to be welcomed.
pub(super) fn offer(connection: &Connection, token: &Token, purpose: &str, deadline: Instant) -> Result<(), WireError> {
    let hello = introduction(purpose)?;
    send(connection, HELLO, &hello, deadline)?;
    let challenge = receive(connection, CHALLENGE, deadline)?;
    same_version(connection, &challenge)?;
    send(connection, PROOF, &token.prove(&[b"caller", &hello, &challenge]), deadline)?;
    let welcome = receive(connection, WELCOME, deadline)?;
    if token.proves(&[b"listener", &hello, &challenge], &welcome) {
        Ok(())
    } else {
        Err(WireError::WrongToken { peer: connection.peer().to_owned() })
    }
}

/// A caller that knows the token and waits for an answer.
pub(super) struct Offer {
    pub purpose: String,
    welcome: [u8; 32],
}

/// The listener's side: finds out who calls and what for. Who is turned away is told why, if it
/// speaks the protocol.
pub(super) fn examine(connection: &Connection, token: &Token, deadline: Instant) -> Result<Offer, WireError> {
    let offer = try_examine(connection, token, deadline);
    if let Err(error) = &offer {
        let reason = match error {
            WireError::Version { theirs, ours, .. } => format!("this end runs {ours}, not {theirs}"),
            WireError::WrongToken { .. } => "the token is another".to_owned(),
            WireError::Timeout { .. } => "too slow".to_owned(),
            _ => return offer,
        };
        // It may be gone by now.
        let _ = refuse(connection, &reason);
    }
    offer
}

fn try_examine(connection: &Connection, token: &Token, deadline: Instant) -> Result<Offer, WireError> {
    let hello = receive(connection, HELLO, deadline)?;
    let purpose = same_version(connection, &hello)?;
    let challenge = introduction("")?;
    send(connection, CHALLENGE, &challenge, deadline)?;
    let proof = receive(connection, PROOF, deadline)?;
    if !token.proves(&[b"caller", &hello, &challenge], &proof) {
        return Err(WireError::WrongToken { peer: connection.peer().to_owned() });
    }
    Ok(Offer { purpose, welcome: token.prove(&[b"listener", &hello, &challenge]) })
}

/// Lets a caller in.
pub(super) fn welcome(connection: &Connection, offer: &Offer) -> Result<(), WireError> {
    send(connection, WELCOME, &offer.welcome, Instant::now() + limits::HANDSHAKE)
}

/// Tells a caller why it is not let in.
pub(super) fn refuse(connection: &Connection, reason: &str) -> Result<(), WireError> {
    let mut end = reason.len().min(limits::HANDSHAKE_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    send(connection, REFUSED, &reason.as_bytes()[..end], Instant::now() + limits::HANDSHAKE)
}

pub(super) fn other_protocol(peer: String, theirs: u16) -> WireError {
    WireError::Version { peer, theirs: format!("protocol {theirs}"), ours: format!("{VERSION}, protocol {PROTOCOL}") }
}

/// A nonce, the version with its length, and a purpose.
fn introduction(purpose: &str) -> Result<Vec<u8>, WireError> {
    Ok([&random()?[..], &[VERSION.len() as u8], VERSION.as_bytes(), purpose.as_bytes()].concat())
}

/// The purpose of an introduction by the same version.
fn same_version(connection: &Connection, introduction: &[u8]) -> Result<String, WireError> {
    let peer = || connection.peer().to_owned();
    let senseless = || WireError::Malformed { peer: peer(), source: FrameFault::Payload };
    let rest = introduction.get(NONCE_BYTES..).ok_or_else(senseless)?;
    let (length, rest) = rest.split_first().ok_or_else(senseless)?;
    let (version, purpose) = rest.split_at_checked(*length as usize).ok_or_else(senseless)?;
    if version != VERSION.as_bytes() {
        let theirs = String::from_utf8_lossy(version).into_owned();
        return Err(WireError::Version { peer: peer(), theirs, ours: VERSION.to_owned() });
    }
    String::from_utf8(purpose.to_vec()).map_err(|_| senseless())
}

fn send(connection: &Connection, kind: u8, payload: &[u8], deadline: Instant) -> Result<(), WireError> {
    connection.send(Label { kind, ..Label::default() }, payload, left(deadline))
}

fn receive(connection: &Connection, kind: u8, deadline: Instant) -> Result<Vec<u8>, WireError> {
    let frame = connection.receive(limits::HANDSHAKE_BYTES, left(deadline))?;
    let peer = || connection.peer().to_owned();
    match frame.label.kind {
        found if found == kind => Ok(frame.payload),
        REFUSED => {
            Err(WireError::Refused { peer: peer(), reason: String::from_utf8_lossy(&frame.payload).into_owned() })
        }
        _ => Err(WireError::Malformed { peer: peer(), source: FrameFault::Payload }),
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::unix::net::UnixStream, thread};

    use super::*;
    use crate::wire::{channel::Channel, frame::Header, socket::Socket};

    const SHORT: Duration = Duration::from_millis(100);

    fn pair() -> (Connection, Connection) {
        let (one, other) = UnixStream::pair().unwrap();
        let connection = |socket| Connection::new(Channel::plain(Socket::Unix(socket)), "peer".to_owned());
        (connection(one), connection(other))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn those_who_know_the_token_meet() {
        let (caller, listener) = pair();
        let token = Token::random().unwrap();
        let same = token.clone();
        let calling = thread::spawn(move || offer(&caller, &same, "rank 3 of 4", soon()));
        let offer = examine(&listener, &token, soon()).unwrap();
        assert_eq!(offer.purpose, "rank 3 of 4");
        welcome(&listener, &offer).unwrap();
        calling.join().unwrap().unwrap();
    }

    #[test]
    fn a_caller_with_another_token_is_told() {
        let (caller, listener) = pair();
        let calling = thread::spawn(move || offer(&caller, &Token::random().unwrap(), "", soon()));
        let error = examine(&listener, &Token::random().unwrap(), soon()).err().unwrap();
        assert!(matches!(error, WireError::WrongToken { .. }), "{error}");
        let error = calling.join().unwrap().unwrap_err();
        assert!(matches!(&error, WireError::Refused { reason, .. } if reason.contains("token")), "{error}");
    }

    #[test]
    fn a_listener_without_the_token_is_found_out() {
        let (caller, listener) = pair();
        let calling = thread::spawn(move || offer(&caller, &Token::random().unwrap(), "", soon()));
        receive(&listener, HELLO, soon()).unwrap();
        send(&listener, CHALLENGE, &introduction("").unwrap(), soon()).unwrap();
        let proof = receive(&listener, PROOF, soon()).unwrap();
        // Sending the caller's own proof back does not help either.
        send(&listener, WELCOME, &proof, soon()).unwrap();
        let error = calling.join().unwrap().unwrap_err();
        assert!(matches!(error, WireError::WrongToken { .. }), "{error}");
    }

    #[test]
    fn other_versions_are_told_apart() {
        let (caller, listener) = pair();
        let hello = [&[0; NONCE_BYTES][..], &[3], b"0.0", b"purpose"].concat();
        send(&caller, HELLO, &hello, soon()).unwrap();
        let error = examine(&listener, &Token::random().unwrap(), soon()).err().unwrap();
        assert!(matches!(&error, WireError::Version { theirs, .. } if theirs == "0.0"), "{error}");
        let error = receive(&caller, CHALLENGE, soon()).unwrap_err();
        assert!(error.to_string().contains(VERSION), "{error}");
    }

    /// Says these bytes to a listener, which must find the fault and answer or not.
    fn check_stranger(bytes: &[u8], expected: fn(&WireError) -> bool, answered: bool) {
        let (mut stranger, socket) = UnixStream::pair().unwrap();
        let listener = Connection::new(Channel::plain(Socket::Unix(socket)), "peer".to_owned());
        stranger.write_all(bytes).unwrap();
        let error = examine(&listener, &Token::random().unwrap(), Instant::now() + SHORT).err().unwrap();
        assert!(expected(&error), "{error}");
        drop(listener);
        let stranger = Connection::new(Channel::plain(Socket::Unix(stranger)), "peer".to_owned());
        let refused = receive(&stranger, CHALLENGE, soon()).unwrap_err();
        assert_eq!(matches!(refused, WireError::Refused { .. }), answered, "{refused}");
    }

    #[test]
    fn strangers_are_sent_away() {
        let too_long = Header { label: Label { kind: HELLO, ..Label::default() }, length: 600 }.encode();
        let mut other = too_long;
        other[4] = 77;
        let malformed = |error: &WireError| matches!(error, WireError::Malformed { .. });
        check_stranger(b"GET / HTTP/1.0\r\n\r\n", malformed, false);
        check_stranger(&too_long, malformed, false);
        check_stranger(&other, |error| matches!(error, WireError::Version { .. }), true);
        check_stranger(b"", |error| matches!(error, WireError::Timeout { .. }), true);
        check_stranger(&other[..4], |error| matches!(error, WireError::Timeout { .. }), true);
    }
}
