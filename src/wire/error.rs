//! Why processes could not talk.

use std::{io, path::PathBuf, time::Duration};

use super::frame::FrameFault;
use crate::remedy::{Remedied, Remedy};

/// Why processes could not talk. `peer` is an address, with the file or name of the other end
/// where it is on the same machine.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The network failed, or the other end broke off.
    #[error("{peer}: {doing} failed")]
    Io {
        /// The other end.
        peer: String,
        /// What was done.
        doing: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The other end is too slow, or says nothing.
    #[error("{peer}: {doing} took longer than {} ms", after.as_millis())]
    Timeout {
        /// The other end.
        peer: String,
        /// What was done.
        doing: &'static str,
        /// How long was waited.
        after: Duration,
    },
    /// The other end has ended the connection, or this end has, from another thread.
    #[error("{peer}: the connection has ended")]
    Closed {
        /// The other end.
        peer: String,
    },
    /// The other end says what nobody should.
    #[error("{peer}: malformed message")]
    Malformed {
        /// The other end.
        peer: String,
        /// What is wrong with it.
        source: FrameFault,
    },
    /// The other end is another version of Emberflow.
    #[error("{peer}: runs {theirs}, not {ours}; install the same version on all machines")]
    Version {
        /// The other end.
        peer: String,
        /// Its version.
        theirs: String,
        /// This version.
        ours: String,
    },
    /// The other end does not know the token.
    #[error("{peer}: has another token")]
    WrongToken {
        /// The other end.
        peer: String,
    },
    /// The other end does not want this one.
    #[error("{peer}: refused: {reason}")]
    Refused {
        /// The other end.
        peer: String,
        /// What it says.
        reason: String,
    },
    /// Neither TLS nor consent to do without.
    #[error("{address}: reaches other machines without TLS; configure TLS, or allow plain connections")]
    Plain {
        /// The address.
        address: String,
    },
    /// TLS failed.
    #[error("{peer}: TLS failed")]
    Tls {
        /// The other end.
        peer: String,
        /// What the library says.
        source: rustls::Error,
    },
    /// Certificates or keys cannot be used.
    #[error("{}: not usable for TLS: {reason}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file cannot be read.
    #[error("{}: cannot be read", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A token can be guessed.
    #[error("a token of {length} characters can be guessed; take {} or more", crate::limits::TOKEN_BYTES)]
    ShortToken {
        /// Its length.
        length: usize,
    },
    /// An address cannot be listened on, or is none.
    #[error("{address}: cannot be used")]
    Address {
        /// The address.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// The system has no randomness.
    #[error("the system gives no random numbers")]
    Random,
}

impl Remedied for WireError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Io { .. } | Self::Timeout { .. } | Self::Closed { .. } | Self::Refused { .. } => Remedy::TryAgain,
            Self::Malformed { .. } | Self::Random => Remedy::ReportBug,
            Self::Version { .. }
            | Self::WrongToken { .. }
            | Self::Plain { .. }
            | Self::Tls { .. }
            | Self::Pem { .. }
            | Self::File { .. }
            | Self::ShortToken { .. }
            | Self::Address { .. } => Remedy::FixFile,
        }
    }
}

/// What an error of a socket means; those of TLS come wrapped in it.
pub(super) fn classified(peer: &str, doing: &'static str, after: Duration, error: io::Error) -> WireError {
    let peer = peer.to_owned();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => WireError::Timeout { peer, doing, after },
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            WireError::Closed { peer }
        }
        _ => match error.downcast::<rustls::Error>() {
            Ok(source) => WireError::Tls { peer, source },
            Err(source) => WireError::Io { peer, doing, source },
        },
    }
}

pub(super) fn tls_failed(peer: &str) -> impl Fn(rustls::Error) -> WireError + '_ {
    |source| WireError::Tls { peer: peer.to_owned(), source }
}
