//! Why two processes do not talk.

use std::{io, path::PathBuf, time::Duration};

use crate::remedy::{Remedied, Remedy};

/// Why two processes do not talk.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side closed the connection, or is gone.
    #[error("{peer}: the connection is closed")]
    Closed {
        /// The other side.
        peer: String,
    },
    /// The other side did not send or take anything for too long.
    #[error("{peer}: silent for {} s", deadline.as_secs())]
    Silent {
        /// The other side.
        peer: String,
        /// How long was waited.
        deadline: Duration,
    },
    /// The connection failed.
    #[error("{peer}: the connection failed")]
    Io {
        /// The other side.
        peer: String,
        /// What the system says.
        source: io::Error,
    },
    /// The other side does not speak this protocol.
    #[error("{peer}: {what}; is this an Emberflow process?")]
    Garbage {
        /// The other side.
        peer: String,
        /// What it sent.
        what: &'static str,
    },
    /// The other side has another token.
    #[error("{peer}: it has another token; give both the same `token_file`")]
    Token {
        /// The other side.
        peer: String,
    },
    /// The other side let nobody in, and said why.
    #[error("{peer} refuses: {reason}")]
    Refused {
        /// The other side.
        peer: String,
        /// Why.
        reason: String,
    },
    /// Another machine, without TLS.
    #[error(
        "{address} is not on this machine and there is no TLS; set `tls_certificate`, `tls_key` and `tls_authority`, or \
         `allow_plain: yes`"
    )]
    Plain {
        /// Where.
        address: String,
    },
    /// No such address.
    #[error("{address}: this is no address, such as trainer-1:7400")]
    Address {
        /// As given.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// It cannot listen there.
    #[error("{address}: cannot listen there")]
    Listen {
        /// Where.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// A token or PEM file cannot be used.
    #[error("{}: {reason}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no token.
    #[error("there is no token; set `token_file` to a file with a secret of 16 bytes or more")]
    NoToken,
    /// TLS cannot be set up.
    #[error("TLS cannot be set up: {reason}")]
    Tls {
        /// Why.
        reason: String,
    },
    /// The system has no randomness to give.
    #[error("no random numbers: {reason}")]
    Random {
        /// Why.
        reason: String,
    },
    /// A message that is too long to be one.
    #[error("{peer}: a message of {length} bytes, where at most {limit} are allowed")]
    TooLong {
        /// The other side.
        peer: String,
        /// Its length.
        length: u64,
        /// What is allowed.
        limit: u64,
    },
}

impl Remedied for WireError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Closed { .. } | Self::Silent { .. } | Self::Io { .. } | Self::Random { .. } => Remedy::TryAgain,
            Self::Garbage { .. } | Self::TooLong { .. } | Self::Address { .. } => Remedy::FixCommand,
            Self::Token { .. }
            | Self::Refused { .. }
            | Self::Plain { .. }
            | Self::Listen { .. }
            | Self::File { .. }
            | Self::NoToken
            | Self::Tls { .. } => Remedy::FixFile,
        }
    }
}
