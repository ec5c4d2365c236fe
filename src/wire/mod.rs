//! Connections between Emberflow's processes: frames of bounded length, between peers that have
//! both shown that they know the run's token, encrypted where they leave the machine.
//!
//! ```text
//!   connect ──TCP [TLS]──▶ listener: challenge, answer, welcome (`handshake`) ──▶ Connection ◀── accept
//!
//!   Connection: send and receive, from two threads if need be; every wait has a deadline
//! ```

mod connection;
mod error;
mod frame;
mod handshake;
mod listener;
mod security;
mod stream;
#[cfg(test)]
pub(crate) mod testing;
mod tls;

pub use connection::{Connection, connect, is_of_this_machine};
pub use error::WireError;
pub use frame::{Header, Kind};
pub use listener::Listener;
pub use security::{Security, Tls, Token};
