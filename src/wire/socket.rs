//! A stream socket of either family.

use std::{
    io::{self, IoSlice, Read, Write},
    net::{Shutdown, TcpStream},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

/// A connected stream socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Calls the same method on whichever socket it is.
macro_rules! either {
    ($socket:expr, $inner:ident => $call:expr) => {
        match $socket {
            Socket::Tcp($inner) => $call,
            Socket::Unix($inner) => $call,
        }
    };
}

impl Socket {
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        retried(|| either!(self, socket => (&*socket).read(buffer)))
    }

    pub fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        retried(|| either!(self, socket => (&*socket).write_vectored(parts)))
    }

    /// From now on reads end at that time.
    pub fn read_until(&self, deadline: Instant) -> io::Result<()> {
        let left = Some(left(deadline)?);
        either!(self, socket => socket.set_read_timeout(left))
    }

    /// From now on writes end at that time.
    pub fn write_until(&self, deadline: Instant) -> io::Result<()> {
        let left = Some(left(deadline)?);
        either!(self, socket => socket.set_write_timeout(left))
    }

    pub fn set_nonblocking(&self) -> io::Result<()> {
        either!(self, socket => socket.set_nonblocking(true))
    }

    /// Ends all reads and writes, those of other threads too.
    pub fn shut_down(&self) {
        // It may have ended already.
        let _ = either!(self, socket => socket.shutdown(Shutdown::Both));
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        either!(self, socket => socket.as_raw_fd())
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // The system takes zero for no end at all, and rounds down.
    Ok(left.max(Duration::from_millis(1)))
}

fn retried(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// A socket whose calls end at a time.
pub(super) struct Until<'a>(pub &'a Socket, pub Instant);

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read_until(self.1)?;
        self.0.read(buffer)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_until(self.1)?;
        self.0.write(&[IoSlice::new(bytes)])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
