//! Frames between two processes that know each other, with a deadline for each.

use std::{
    io::{self, IoSlice},
    net::{TcpStream, ToSocketAddrs},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixStream},
    },
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{
    Address, Security, WireError,
    address::machine,
    channel::Channel,
    error::classified,
    frame::{Assembler, Frame, FrameFault, Header, Label, Unread},
    handshake,
    socket::Socket,
};

/// A connection to a process that has proved to know the token.
///
/// It can be shared: one thread may receive while another sends, and any may close.
pub struct Connection {
    channel: Channel,
    peer: String,
    reading: Mutex<Assembler>,
    writing: Mutex<()>,
}

/// Connects to a listener and says what for; waits until the other end has welcomed this one.
///
/// Processes of one machine meet over a Unix socket if they can, without TLS.
pub fn connect(
    address: &Address,
    purpose: &str,
    security: &Security,
    timeout: Duration,
) -> Result<Connection, WireError> {
    let deadline = Instant::now() + timeout;
    let connection = match local(address) {
        Some(socket) => Connection::new(Channel::plain(Socket::Unix(socket)), address.to_string()),
        None => network(address, security, timeout, deadline)?,
    };
    handshake::offer(&connection, &security.token, purpose, deadline)?;
    Ok(connection)
}

/// The way within the machine, if the other end is on it and answers.
fn local(address: &Address) -> Option<UnixStream> {
    let local = address.local.as_ref()?;
    if machine()? != local.machine {
        return None;
    }
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(&local.name).ok()?).ok()
}

fn network(
    address: &Address,
    security: &Security,
    timeout: Duration,
    deadline: Instant,
) -> Result<Connection, WireError> {
    let peer = address.to_string();
    let unusable = |source| WireError::Address { address: peer.clone(), source };
    let mut failure = unusable(io::ErrorKind::NotFound.into());
    for socket_address in address.network.to_socket_addrs().map_err(unusable)? {
        security.check(socket_address.ip(), &peer)?;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = match TcpStream::connect_timeout(&socket_address, left) {
            Ok(stream) => stream,
            Err(error) => {
                failure = classified(&peer, "connecting", timeout, error);
                continue;
            }
        };
        let socket = tcp(stream).map_err(|error| classified(&peer, "connecting", timeout, error))?;
        let channel = match &security.tls {
            Some(tls) => Channel::tls_client(socket, tls, address.host(), &peer, deadline)?,
            None => Channel::plain(socket),
        };
        return Ok(Connection::new(channel, peer));
    }
    Err(failure)
}

/// Small frames leave at once: somebody waits for each of them.
pub(super) fn tcp(stream: TcpStream) -> io::Result<Socket> {
    stream.set_nodelay(true)?;
    Ok(Socket::Tcp(stream))
}

impl Connection {
    pub(super) fn new(channel: Channel, peer: String) -> Self {
        Self { channel, peer, reading: Mutex::new(Assembler::default()), writing: Mutex::new(()) }
    }

    /// The other end's address.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Sends a frame. A frame that could not be sent whole within the time ends the connection:
    /// what follows half a frame cannot be understood.
    pub fn send(&self, label: Label, payload: &[u8], timeout: Duration) -> Result<(), WireError> {
        let length = u32::try_from(payload.len())
            .map_err(|_| self.malformed(FrameFault::Length { length: u32::MAX, limit: u32::MAX as usize }))?;
        let header = Header { label, length }.encode();
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write(&header, payload, Instant::now() + timeout).map_err(|error| {
            self.close();
            classified(&self.peer, "sending", timeout, error)
        })
    }

    fn write(&self, mut header: &[u8], mut payload: &[u8], deadline: Instant) -> io::Result<()> {
        while !header.is_empty() || !payload.is_empty() {
            self.channel.write_until(deadline)?;
            match self.channel.write(&[IoSlice::new(header), IoSlice::new(payload)])? {
                0 => return Err(io::ErrorKind::BrokenPipe.into()),
                sent => {
                    let of_header = sent.min(header.len());
                    header = &header[of_header..];
                    payload = &payload[sent - of_header..];
                }
            }
        }
        self.channel.write_until(deadline)?;
        self.channel.flush()
    }

    /// The next frame, of at most `limit` bytes of payload. After `WireError::Timeout` it may be
    /// asked for again: nothing is lost.
    pub fn receive(&self, limit: usize, timeout: Duration) -> Result<Frame, WireError> {
        let deadline = Instant::now() + timeout;
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let next = reading.next(limit, |buffer| {
            self.channel.read_until(deadline)?;
            self.channel.read(buffer)
        });
        next.map_err(|unread| match unread {
            Unread::Io(error) => classified(&self.peer, "receiving", timeout, error),
            Unread::End { .. } => WireError::Closed { peer: self.peer.clone() },
            Unread::Fault(fault) => self.malformed(fault),
        })
    }

    /// Ends the connection; what another thread does with it fails at once, and the other end
    /// learns of it.
    pub fn close(&self) {
        self.channel.shut_down();
    }

    /// The stream below, for those who talk without waiting. No frame is half read.
    pub(crate) fn into_channel(self) -> Channel {
        self.channel
    }

    fn malformed(&self, source: FrameFault) -> WireError {
        let peer = self.peer.clone();
        match source {
            FrameFault::Protocol(theirs) => handshake::other_protocol(peer, theirs),
            _ => WireError::Malformed { peer, source },
        }
    }
}
