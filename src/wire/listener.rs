//! Where other processes connect.

use std::{
    collections::VecDeque,
    io,
    net::{TcpListener, TcpStream, ToSocketAddrs},
    os::{linux::net::SocketAddrExt, unix::net},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use super::{Connection, Security, WireError, connection::secure, security::random, stream::Stream};
use crate::limits;

/// Lets in whoever knows the token; all others are turned away, each in its own time.
pub struct Listener {
    address: Address,
    shared: Arc<Shared>,
}

/// Where a listener is: for other machines, and for this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// `host:port`.
    pub tcp: String,
    /// The machine, and the name of a socket that only it has.
    local: Option<(String, String)>,
}

impl Address {
    pub fn parse(text: &str) -> Self {
        let mut parts = text.splitn(3, '|').map(str::to_owned);
        let tcp = parts.next().unwrap_or_default();
        Self { tcp, local: parts.next().zip(parts.next()) }
    }

    fn to_text(&self) -> String {
        let Self { tcp, local } = self;
        local.as_ref().map_or_else(|| tcp.clone(), |(machine, name)| format!("{tcp}|{machine}|{name}"))
    }

    /// The name of the local socket, on its own machine.
    pub fn local_name(&self) -> Option<&str> {
        self.local.as_ref().filter(|(machine, _)| *machine == this_machine()).map(|(_, name)| name.as_str())
    }
}

/// Tells this boot and network namespace of the machine from all others.
fn this_machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

struct Shared {
    security: Security,
    closing: AtomicBool,
    /// Strangers who are being talked to.
    strangers: AtomicUsize,
    accepted: Mutex<VecDeque<Connection>>,
    changed: Condvar,
}

impl Listener {
    /// Listens at `host:port`; port 0 is a free one.
    pub fn bind(address: &str, security: &Security) -> Result<Self, WireError> {
        let failed = |source| WireError::Listen { address: address.to_owned(), source };
        let sockets = address.to_socket_addrs();
        let sockets = sockets.map_err(|source| WireError::Address { address: address.to_owned(), source })?;
        let sockets: Vec<_> = sockets.collect();
        for socket in &sockets {
            security.check(address, socket.ip())?;
        }
        let tcp = TcpListener::bind(&sockets[..]).map_err(failed)?;
        let bound = tcp.local_addr().map_err(failed)?;
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let name = random()?.iter().fold("emberflow-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
        let unix = net::SocketAddr::from_abstract_name(&name).and_then(|name| net::UnixListener::bind_addr(&name));
        let unix = unix.map_err(failed)?;
        let address = Address { tcp: format!("{host}:{}", bound.port()), local: Some((this_machine(), name)) };
        let shared = Arc::new(Shared {
            security: security.clone(),
            closing: AtomicBool::new(false),
            strangers: AtomicUsize::new(0),
            accepted: Mutex::default(),
            changed: Condvar::new(),
        });
        let (for_tcp, for_unix) = (Arc::clone(&shared), Arc::clone(&shared));
        thread::spawn(move || {
            let security = for_tcp.security.clone();
            let next = || tcp.accept().map(|(stream, address)| (stream, address.to_string()));
            for_tcp.attend(next, move |stream| secure(stream, &security, None));
        });
        thread::spawn(move || {
            let next = || unix.accept().map(|(stream, _)| (stream, "a process of this machine".to_owned()));
            for_unix.attend(next, |stream| Ok(Stream::Unix(stream)));
        });
        Ok(Self { address, shared })
    }

    /// For `connect`.
    pub fn address(&self) -> String {
        self.address.to_text()
    }

    /// `host:port`, for people.
    pub fn host_and_port(&self) -> &str {
        &self.address.tcp
    }

    /// The next one who was let in, if one comes in time.
    pub fn accept(&self, patience: Duration) -> Option<Connection> {
        self.accept_where(patience, |_| true)
    }

    /// The same, but leaves those waiting that do not fit.
    pub fn accept_where(&self, patience: Duration, fits: impl Fn(&Connection) -> bool) -> Option<Connection> {
        let deadline = Instant::now() + patience;
        let mut accepted = self.shared.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(place) = accepted.iter().position(&fits) {
                return accepted.remove(place);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            accepted = self.shared.changed.wait_timeout(accepted, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Turns those away who wait and are not wanted.
    pub fn forget(&self, unwanted: impl Fn(&Connection) -> bool) {
        let mut accepted = self.shared.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        accepted.retain(|connection| !unwanted(connection));
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        // Wakes those who wait for the next one to come.
        let _ = TcpStream::connect(&self.address.tcp);
        if let Some(name) = self.address.local_name() {
            let _ = net::SocketAddr::from_abstract_name(name).and_then(|name| net::UnixStream::connect_addr(&name));
        }
    }
}

impl Shared {
    /// Talks to all who come, each on a thread of its own, so that nobody waits for a slow one.
    fn attend<S: Send + 'static>(
        self: Arc<Self>,
        next: impl Fn() -> io::Result<(S, String)>,
        open: impl Fn(S) -> Result<Stream, WireError> + Clone + Send + 'static,
    ) {
        while !self.closing.load(Ordering::Relaxed) {
            let Ok((stream, peer)) = next() else {
                // Out of descriptors, perhaps; not a reason to spin.
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            if self.strangers.fetch_add(1, Ordering::Relaxed) >= limits::STRANGERS {
                self.strangers.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (shared, open) = (Arc::clone(&self), open.clone());
            thread::spawn(move || {
                shared.meet(&peer, || open(stream));
                shared.strangers.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    fn meet(&self, peer: &str, open: impl FnOnce() -> Result<Stream, WireError>) {
        match open().and_then(|stream| Connection::new(stream, peer.to_owned(), &self.security, None)) {
            Ok(connection) => {
                self.accepted.lock().unwrap_or_else(PoisonError::into_inner).push_back(connection);
                self.changed.notify_all();
            }
            Err(error) => tracing::info!(%peer, %error, "turned away"),
        }
    }
}
