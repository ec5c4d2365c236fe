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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::wire::{Header, Kind, Token, connect, testing};

    const PATIENCE: Duration = Duration::from_mins(1);
    const SHORT: Duration = Duration::from_millis(100);

    fn plain() -> Security {
        Security::plain(Token::random().unwrap())
    }

    /// Runs a check over each kind of stream; it gets both ends of a connection.
    fn everywhere(check: fn(Connection, Connection)) {
        for (security, local) in [(plain(), false), (plain(), true), (testing::tls(), false)] {
            let listener = Listener::bind("127.0.0.1:0", &security).unwrap();
            let address = if local { listener.address() } else { listener.host_and_port().to_owned() };
            let one = connect(&address, &security, "talk").unwrap();
            let other = listener.accept(PATIENCE).unwrap();
            assert_eq!(other.purpose(), "talk");
            check(one, other);
        }
    }

    #[test]
    fn both_ends_talk_at_the_same_time() {
        everywhere(|one, other| {
            let payload: Vec<u8> = (0..limits::FRAME_BYTES).map(|index| index as u8).collect();
            thread::scope(|scope| {
                for end in [&one, &other] {
                    let payload = &payload;
                    let header = Header::plain(Kind::Chunk, payload.len());
                    scope.spawn(move || (0..50).for_each(|_| end.send(header, payload).unwrap()));
                    scope.spawn(move || {
                        let mut found = Vec::new();
                        for _ in 0..50 {
                            end.receive(&mut found).unwrap();
                            assert!(found == *payload);
                        }
                    });
                }
            });
            drop(one);
            assert!(matches!(other.receive(&mut Vec::new()), Err(WireError::Closed { .. })));
        });
    }

    #[test]
    fn a_silent_peer_ends_in_a_timeout_and_may_speak_later() {
        everywhere(|one, other| {
            let (one, mut found) = (one.set_deadline(SHORT).unwrap(), Vec::new());
            let error = one.receive(&mut found).unwrap_err();
            assert!(matches!(error, WireError::Silent { .. }), "{error}");
            other.send(Header::plain(Kind::Control, 4), b"late").unwrap();
            let one = one.set_deadline(PATIENCE).unwrap();
            one.receive(&mut found).unwrap();
            assert_eq!(found, b"late");
        });
    }

    #[test]
    fn a_peer_that_stops_reading_ends_in_a_timeout() {
        everywhere(|one, _other| {
            let one = one.set_deadline(SHORT).unwrap();
            let payload = vec![0; 64 << 20];
            let error = one.send(Header::plain(Kind::Chunk, payload.len()), &payload).unwrap_err();
            assert!(matches!(error, WireError::Silent { .. }), "{error}");
        });
    }

    #[test]
    fn another_thread_ends_a_blocked_read() {
        everywhere(|one, _other| {
            let one = one.set_deadline(PATIENCE).unwrap();
            thread::scope(|scope| {
                let reading = scope.spawn(|| one.receive(&mut Vec::new()));
                one.close();
                let error = reading.join().unwrap().unwrap_err();
                assert!(matches!(error, WireError::Closed { .. }), "{error}");
            });
        });
    }

    #[test]
    fn absurd_lengths_are_refused() {
        everywhere(|one, other| {
            one.send(Header { length: u32::MAX, ..Header::plain(Kind::Chunk, 0) }, &[]).unwrap();
            let mut found = Vec::new();
            assert!(matches!(other.receive(&mut found), Err(WireError::TooLong { .. })));
            assert_eq!(found.capacity(), 0);
        });
    }

    #[test]
    fn strangers_hold_up_nobody() {
        let security = plain();
        let listener = Listener::bind("127.0.0.1:0", &security).unwrap();
        let address = listener.host_and_port();
        let silent: Vec<_> = (0..50).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut rude = TcpStream::connect(address).unwrap();
        rude.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let error = connect(address, &plain(), "").err().unwrap();
        assert!(matches!(error, WireError::Token { .. }), "{error}");
        connect(address, &security, "welcome").unwrap();
        assert_eq!(listener.accept(PATIENCE).unwrap().purpose(), "welcome");
        assert!(listener.accept(Duration::ZERO).is_none());
        drop(silent);
    }

    #[test]
    fn tls_lets_in_only_those_of_its_authority() {
        let security = testing::tls();
        let listener = Listener::bind("127.0.0.1:0", &security).unwrap();
        let same_token = Security { token: security.token.clone(), ..testing::tls() };
        assert!(connect(listener.host_and_port(), &same_token, "").is_err());
        assert!(connect(listener.host_and_port(), &Security { tls: None, ..security.clone() }, "").is_err());
        connect(listener.host_and_port(), &security, "").unwrap();
        let by_name = format!("localhost:{}", listener.host_and_port().rsplit(':').next().unwrap());
        connect(&by_name, &security, "").unwrap();
    }
}
