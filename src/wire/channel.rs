//! A stream of bytes between two processes, through TLS or not.
//!
//! ```text
//!   write ──▶ session ──▶ outbound ──▶ socket        read ◀── session ◀── inbound ◀── socket
//! ```
//!
//! Both directions work at the same time, from two threads: the session is locked only while
//! it turns bytes into others, never while the socket waits.

use std::{
    io::{self, IoSlice, Write},
    os::fd::{AsRawFd, RawFd},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use rustls::{ClientConnection, ServerConnection, pki_types::ServerName};

use super::{
    WireError,
    error::{classified, tls_failed},
    security::Tls,
    socket::{Socket, Until},
};
use crate::limits;

/// A stream of bytes to another process; blocks or not as its socket does.
pub(crate) struct Channel {
    socket: Socket,
    tls: Option<Sealed>,
}

/// TLS between the caller and the socket.
struct Sealed {
    session: Mutex<rustls::Connection>,
    inbound: Mutex<Inbound>,
    /// Sealed bytes that the socket has not yet taken.
    outbound: Mutex<Vec<u8>>,
}

/// Sealed bytes that the session has not yet taken.
struct Inbound {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Channel {
    pub(super) fn plain(socket: Socket) -> Self {
        Self { socket, tls: None }
    }

    /// TLS as the end that connects; the other shows a certificate for `host`.
    pub(super) fn tls_client(
        socket: Socket,
        tls: &Tls,
        host: &str,
        peer: &str,
        deadline: Instant,
    ) -> Result<Self, WireError> {
        let name = ServerName::try_from(host.to_owned()).map_err(|error| WireError::Address {
            address: peer.to_owned(),
            source: io::Error::new(io::ErrorKind::InvalidInput, error),
        })?;
        let session = ClientConnection::new(tls.client.clone(), name).map_err(tls_failed(peer))?;
        Self::shake_hands(socket, session.into(), peer, deadline)
    }

    /// TLS as the end that was connected to.
    pub(super) fn tls_server(socket: Socket, tls: &Tls, peer: &str, deadline: Instant) -> Result<Self, WireError> {
        let session = ServerConnection::new(tls.server.clone()).map_err(tls_failed(peer))?;
        Self::shake_hands(socket, session.into(), peer, deadline)
    }

    fn shake_hands(
        socket: Socket,
        mut session: rustls::Connection,
        peer: &str,
        deadline: Instant,
    ) -> Result<Self, WireError> {
        while session.is_handshaking() {
            if let Err(error) = session.complete_io(&mut Until(&socket, deadline)) {
                return Err(classified(peer, "the TLS handshake", limits::HANDSHAKE, error));
            }
        }
        let inbound = Inbound { bytes: vec![0; limits::TLS_READ_BYTES], start: 0, end: 0 };
        let sealed =
            Sealed { session: Mutex::new(session), inbound: Mutex::new(inbound), outbound: Mutex::new(Vec::new()) };
        Ok(Self { socket, tls: Some(sealed) })
    }

    pub fn set_nonblocking(&self) -> io::Result<()> {
        self.socket.set_nonblocking()
    }

    /// From now on reads end at that time.
    pub(super) fn read_until(&self, deadline: Instant) -> io::Result<()> {
        self.socket.read_until(deadline)
    }

    /// From now on writes end at that time.
    pub(super) fn write_until(&self, deadline: Instant) -> io::Result<()> {
        self.socket.write_until(deadline)
    }

    /// Ends all reads and writes, those of other threads too.
    pub fn shut_down(&self) {
        self.socket.shut_down();
    }

    /// Some bytes; 0 at the end of the stream.
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match &self.tls {
            None => self.socket.read(buffer),
            Some(sealed) => sealed.read(&self.socket, buffer),
        }
    }

    /// Takes some of the bytes. Whoever has written all there is must [`Channel::flush`].
    pub fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.tls {
            None => self.socket.write(parts),
            Some(sealed) => sealed.write(&self.socket, parts),
        }
    }

    /// Sends what was taken and not yet sent.
    pub fn flush(&self) -> io::Result<()> {
        match &self.tls {
            None => Ok(()),
            Some(sealed) => sealed.flush(&self.socket, &mut locked(&sealed.outbound)),
        }
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Sealed {
    fn read(&self, socket: &Socket, buffer: &mut [u8]) -> io::Result<usize> {
        let mut inbound = locked(&self.inbound);
        loop {
            match io::Read::read(&mut locked(&self.session).reader(), buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The other end has ended without a goodbye; frames tell whether that is well.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                result => return result,
            }
            let Inbound { bytes, start, end } = &mut *inbound;
            if start == end {
                (*start, *end) = (0, socket.read(bytes)?);
            }
            let mut session = locked(&self.session);
            *start += session.read_tls(&mut &bytes[*start..*end])?;
            session.process_new_packets().map_err(io::Error::other)?;
        }
    }

    fn write(&self, socket: &Socket, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut outbound = locked(&self.outbound);
        self.flush(socket, &mut outbound)?;
        let taken = locked(&self.session).writer().write_vectored(parts)?;
        // Taken is taken, even if the socket is busy now.
        match self.flush(socket, &mut outbound) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(taken),
        }
    }

    fn flush(&self, socket: &Socket, outbound: &mut Vec<u8>) -> io::Result<()> {
        let mut session = locked(&self.session);
        while session.wants_write() {
            session.write_tls(outbound)?;
        }
        drop(session);
        let mut sent = 0;
        let result = loop {
            if sent == outbound.len() {
                break Ok(());
            }
            match socket.write(&[IoSlice::new(&outbound[sent..])]) {
                Ok(bytes) => sent += bytes,
                Err(error) => break Err(error),
            }
        };
        outbound.drain(..sent);
        result
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
