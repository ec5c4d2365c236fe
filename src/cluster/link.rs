//! A connection between driver and executor that carries their words as JSON.

use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use super::RunError;
use crate::wire::{self, Connection, Header, Kind, Security, WireError};

/// What an executor comes to a driver for.
const PURPOSE: &str = "executor";

/// The end that hears.
pub(super) struct Link {
    connection: Arc<Connection>,
    buffer: Vec<u8>,
}

/// The end that speaks; any thread may.
#[derive(Clone)]
pub(super) struct Speaker(Arc<Connection>);

impl Link {
    /// To a driver.
    pub fn connect(address: &str, security: &Security) -> Result<Self, RunError> {
        Ok(Self::new(wire::connect(address, security, PURPOSE)?))
    }

    /// With whoever was let in.
    pub fn new(connection: Connection) -> Self {
        Self { connection: Arc::new(connection), buffer: Vec::new() }
    }

    /// The other end.
    pub fn speaker(&self) -> Speaker {
        Speaker(Arc::clone(&self.connection))
    }

    /// `host` of this side, where other processes of the fleet reach it.
    pub fn local_host(&self) -> String {
        let address = self.connection.local_address();
        address.map_or_else(
            || "127.0.0.1".to_owned(),
            |address| match address.ip() {
                std::net::IpAddr::V6(ip) => format!("[{ip}]"),
                ip @ std::net::IpAddr::V4(_) => ip.to_string(),
            },
        )
    }

    /// The next word; whoever is silent for `limits::SILENCE` is gone.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<T, RunError> {
        let header = self.connection.receive(&mut self.buffer)?;
        let peer = || self.connection.peer().to_owned();
        if header.kind != Kind::Control {
            return Err(WireError::Garbage { peer: peer(), what: "no word of a driver or executor" }.into());
        }
        serde_json::from_slice(&self.buffer).map_err(|error| {
            tracing::debug!(%error, "a word that is not understood");
            WireError::Garbage { peer: peer(), what: "a word that is not understood" }.into()
        })
    }
}

impl Speaker {
    /// Says something.
    pub fn send(&self, word: &impl Serialize) -> Result<(), RunError> {
        let bytes = serde_json::to_vec(word).map_err(|error| RunError::Thread(error.into()))?;
        Ok(self.0.send(Header::plain(Kind::Control, bytes.len()), &bytes)?)
    }

    /// Ends both directions now.
    pub fn close(&self) {
        self.0.close();
    }

    /// Lets the other side hear what was said before.
    pub fn finish(&self) {
        self.0.finish();
    }
}
