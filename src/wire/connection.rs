//! A connection to another process that knows the token.

use std::{
    io,
    net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs},
    os::{linux::net::SocketAddrExt, unix::net},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::{
    Header, Security, WireError, frame::HEADER_BYTES, handshake, listener::Address, stream::Stream, tls::TlsStream,
};
use crate::limits;

/// A connection; one thread may receive while others send.
pub struct Connection {
    stream: Stream,
    peer: String,
    purpose: String,
    /// How long one read or write may wait.
    deadline: Duration,
    /// Held while a frame is sent, so that frames do not mix.
    sending: Mutex<()>,
}

/// Whether a listener on this machine gave the address itself: it listens already, or is gone.
pub fn is_of_this_machine(address: &str) -> bool {
    Address::parse(address).local_name().is_some()
}

/// Connects to a listener; `purpose` tells it what for.
pub fn connect(address: &str, security: &Security, purpose: &str) -> Result<Connection, WireError> {
    let address = Address::parse(address);
    if let Some(name) = address.local_name()
        && let Ok(name) = net::SocketAddr::from_abstract_name(name)
        && let Ok(stream) = net::UnixStream::connect_addr(&name)
    {
        return Connection::new(Stream::Unix(stream), address.tcp.clone(), security, Some(purpose));
    }
    let host = &address.tcp;
    let no_address = |source| WireError::Address { address: host.clone(), source };
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for socket in host.to_socket_addrs().map_err(no_address)? {
        security.check(host, socket.ip())?;
        match TcpStream::connect_timeout(&socket, limits::HANDSHAKE) {
            Ok(tcp) => {
                let name = host.rsplit_once(':').map_or(host.as_str(), |(name, _)| name);
                return Connection::new(secure(tcp, security, Some(name))?, host.clone(), security, Some(purpose));
            }
            Err(error) => last = error,
        }
    }
    Err(WireError::Io { peer: host.clone(), source: last })
}

/// TCP, or TLS over it; `host` is the name to check where this side connects.
pub(super) fn secure(tcp: TcpStream, security: &Security, host: Option<&str>) -> Result<Stream, WireError> {
    let peer = tcp.peer_addr().map_or_else(|_| "a peer".to_owned(), |address| address.to_string());
    let set_up = || {
        tcp.set_nonblocking(false)?;
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(limits::HANDSHAKE))?;
        tcp.set_write_timeout(Some(limits::HANDSHAKE))
    };
    set_up().map_err(|error| failure(&peer, limits::HANDSHAKE, error))?;
    let stream = match (&security.tls, host) {
        (None, _) => return Ok(Stream::Tcp(tcp)),
        (Some(tls), Some(host)) => TlsStream::client(tls, tcp, host.trim_matches(['[', ']'])),
        (Some(tls), None) => TlsStream::server(tls, tcp),
    };
    Ok(Stream::Tls(Box::new(stream.map_err(|error| failure(&peer, limits::HANDSHAKE, error))?)))
}

/// What a failed read or write means.
pub(super) fn failure(peer: &str, deadline: Duration, source: io::Error) -> WireError {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, TimedOut, UnexpectedEof, WouldBlock,
    };
    let peer = peer.to_owned();
    match source.kind() {
        WouldBlock | TimedOut => WireError::Silent { peer, deadline },
        UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe | NotConnected => WireError::Closed { peer },
        _ => WireError::Io { peer, source },
    }
}

impl Connection {
    /// Shakes hands, as the side that connects if there is a purpose.
    pub(super) fn new(
        stream: Stream,
        peer: String,
        security: &Security,
        purpose: Option<&str>,
    ) -> Result<Self, WireError> {
        let purpose = if let Some(purpose) = purpose {
            handshake::connect(&stream, &peer, &security.token, purpose)?;
            purpose.to_owned()
        } else {
            handshake::accept(&stream, &peer, &security.token)?
        };
        let connection = Self { stream, peer, purpose, deadline: limits::SILENCE, sending: Mutex::new(()) };
        connection.set_deadline(limits::SILENCE)
    }

    /// The same, with another bound for how long one read or write may wait.
    pub fn set_deadline(mut self, deadline: Duration) -> Result<Self, WireError> {
        let set = self.stream.set_read_deadline(deadline).and_then(|()| self.stream.set_write_deadline(deadline));
        set.map_err(|error| failure(&self.peer, deadline, error))?;
        self.deadline = deadline;
        Ok(self)
    }

    /// The other side, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What the connecting side came for.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// This side's address.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.stream.local_address()
    }

    /// Sends a frame; `header.length` is that of the payload.
    pub fn send(&self, header: Header, payload: &[u8]) -> Result<(), WireError> {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let header = header.to_bytes();
        let sent = if payload.len() <= SMALL {
            self.stream.write_all(&[&header[..], payload].concat())
        } else {
            self.stream.write_all(&header).and_then(|()| self.stream.write_all(payload))
        };
        sent.map_err(|error| failure(&self.peer, self.deadline, error))
    }

    /// The next frame; its payload replaces what the buffer holds.
    pub fn receive(&self, payload: &mut Vec<u8>) -> Result<Header, WireError> {
        let mut header = [0; HEADER_BYTES];
        let count = loop {
            match self.stream.read(&mut header) {
                Ok(0) => return Err(WireError::Closed { peer: self.peer.clone() }),
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failure(&self.peer, self.deadline, error)),
            }
        };
        // Silence in the middle of a frame is no pause.
        let failed = |error| match failure(&self.peer, self.deadline, error) {
            WireError::Silent { peer, .. } => WireError::Closed { peer },
            error => error,
        };
        self.stream.read_exact(&mut header[count..]).map_err(failed)?;
        let header = Header::from_bytes(&self.peer, &header)?;
        // Nothing is set aside for a length before bytes arrive, but what is there already.
        payload.truncate(header.length as usize);
        let mut read = 0;
        while read < header.length as usize {
            let end = (header.length as usize).min((read + STRIDE).max(payload.len()));
            payload.resize(end, 0);
            self.stream.read_exact(&mut payload[read..]).map_err(failed)?;
            read = end;
        }
        Ok(header)
    }

    /// Ends whatever waits on this connection, here and there.
    pub fn close(&self) {
        self.stream.shut_down(Shutdown::Both);
    }

    /// Lets the other side read to the end, and know that there is no more.
    pub fn finish(&self) {
        self.stream.shut_down(Shutdown::Write);
    }
}

/// Payloads up to this many bytes are sent in one piece with their header.
const SMALL: usize = 4096;

/// Memory is set aside in pieces of this many bytes while a payload arrives.
const STRIDE: usize = 1 << 20;

impl Drop for Connection {
    fn drop(&mut self) {
        // The descriptor may be held by a thread that reads.
        self.finish();
    }
}
