//! Connections between the processes of a fleet: framed, authenticated, with deadlines.
//!
//! ```text
//!   connect ──▶ socket ──▶ channel (TLS?) ──▶ handshake: token, versions, purpose ──▶ Connection
//!                 TCP, or Unix on one machine                  ▲
//!   Listener ──▶ a thread for each caller ────────────────────┘──▶ Incoming: welcome or refuse
//! ```
//!
//! # Invariants
//!
//! * Nothing waits for ever: each call has a deadline.
//! * Who does not know the token gets a few hundred bytes of attention and no allocation.
//! * A frame's length is checked before memory is taken for it.
//! * The token itself is never sent.

mod address;
mod channel;
mod connection;
mod error;
mod frame;
mod handshake;
mod listener;
mod security;
mod socket;
#[cfg(test)]
pub(crate) mod testing;
mod token;

pub use address::Address;
pub(crate) use channel::Channel;
pub use connection::{Connection, connect};
pub use error::WireError;
pub use frame::{Frame, FrameFault, HEADER_BYTES, Header, Label};
pub use listener::{Incoming, Listener};
pub use security::{Security, TlsFiles};
pub use token::Token;
