//! A stream of bytes to another process, read and written at the same time.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    time::Duration,
};

use super::tls::TlsStream;

pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream>),
}

impl Stream {
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&mut &*stream).read(bytes),
            Self::Unix(stream) => (&mut &*stream).read(bytes),
            Self::Tls(stream) => stream.read(bytes),
        }
    }

    pub fn read_exact(&self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.read(bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => bytes = &mut bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => (&mut &*stream).write_all(bytes),
            Self::Unix(stream) => (&mut &*stream).write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes),
        }
    }

    /// How long one read may wait.
    pub fn set_read_deadline(&self, deadline: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(Some(deadline)),
            Self::Unix(stream) => stream.set_read_timeout(Some(deadline)),
            Self::Tls(stream) => stream.tcp().set_read_timeout(Some(deadline)),
        }
    }

    /// How long one write may wait.
    pub fn set_write_deadline(&self, deadline: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_write_timeout(Some(deadline)),
            Self::Unix(stream) => stream.set_write_timeout(Some(deadline)),
            Self::Tls(stream) => stream.tcp().set_write_timeout(Some(deadline)),
        }
    }

    pub fn local_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.local_addr().ok(),
            Self::Unix(_) => None,
            Self::Tls(stream) => stream.tcp().local_addr().ok(),
        }
    }

    /// Ends reads and writes that wait, here and there.
    pub fn shut_down(&self, how: Shutdown) {
        // One that is down already is as well.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
            Self::Tls(stream) => stream.tcp().shutdown(how),
        };
    }
}
