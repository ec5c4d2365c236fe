//! Where others connect to: hands out those who know the token, whoever else calls.

use std::{
    collections::VecDeque,
    io,
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream},
    },
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Address, Security, WireError,
    address::{Local, machine},
    channel::Channel,
    connection::{Connection, tcp},
    handshake::{self, Offer},
    socket::Socket,
    token::{hex, random},
};
use crate::limits;

/// Listens for other processes. Threads of its own accept them and find out who they are, so a
/// port scanner, or a caller that says nothing, holds up nobody.
pub struct Listener {
    address: Address,
    shared: Arc<Shared>,
    accepting: Vec<(Waker, JoinHandle<()>)>,
}

/// Ends the waiting of a thread for callers, by calling it.
type Waker = Box<dyn Fn() + Send + Sync>;

struct Shared {
    security: Security,
    /// Callers that know the token.
    waiting: Mutex<VecDeque<Incoming>>,
    arrived: Condvar,
    handshakes: AtomicUsize,
    ended: AtomicBool,
}

/// A caller that knows the token and waits for an answer.
pub struct Incoming {
    connection: Connection,
    offer: Offer,
}

impl Incoming {
    /// What the caller wants; it knows the token, so this is no stranger's word.
    pub fn purpose(&self) -> &str {
        &self.offer.purpose
    }

    /// The caller's address.
    pub fn peer(&self) -> &str {
        self.connection.peer()
    }

    /// Lets the caller in.
    pub fn welcome(self) -> Result<Connection, WireError> {
        handshake::welcome(&self.connection, &self.offer)?;
        Ok(self.connection)
    }

    /// Sends the caller away and tells it why.
    pub fn refuse(self, reason: &str) {
        // It may be gone by now.
        let _ = handshake::refuse(&self.connection, reason);
    }
}

impl Listener {
    /// Listens on `host:port`, port 0 for any free one, and on a Unix socket for callers on this
    /// machine.
    pub fn bind(network: &str, security: Security) -> Result<Self, WireError> {
        let unusable = |source| WireError::Address { address: network.to_owned(), source };
        let addresses: Vec<SocketAddr> = network.to_socket_addrs().map_err(unusable)?.collect();
        for address in &addresses {
            security.check(address.ip(), network)?;
        }
        let tcp_listener = TcpListener::bind(&addresses[..]).map_err(unusable)?;
        let bound = tcp_listener.local_addr().map_err(unusable)?;
        let local = local_listener()?;
        let address = Address::network(bound.to_string());
        let shared = Arc::new(Shared {
            security,
            waiting: Mutex::new(VecDeque::new()),
            arrived: Condvar::new(),
            handshakes: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        });
        let mut listener = Self { address, shared, accepting: Vec::new() };
        listener.listen_on_network(tcp_listener, bound);
        if let Some((unix_listener, local)) = local {
            listener.listen_on_machine(unix_listener, &local);
            listener.address.local = Some(local);
        }
        Ok(listener)
    }

    fn listen_on_network(&mut self, listener: TcpListener, bound: SocketAddr) {
        let shared = Arc::clone(&self.shared);
        let accept = move || {
            let (stream, peer) = listener.accept()?;
            Ok((tcp(stream)?, peer.to_string()))
        };
        let thread = thread::spawn(move || shared.accept_all(accept));
        let waker = move || drop(TcpStream::connect_timeout(&reachable(bound), limits::HANDSHAKE));
        self.accepting.push((Box::new(waker), thread));
    }

    fn listen_on_machine(&mut self, listener: UnixListener, local: &Local) {
        let shared = Arc::clone(&self.shared);
        let accept = move || Ok((Socket::Unix(listener.accept()?.0), "a process of this machine".to_owned()));
        let thread = thread::spawn(move || shared.accept_all(accept));
        let name = local.name.clone();
        let waker =
            move || drop(UnixAddress::from_abstract_name(&name).and_then(|name| UnixStream::connect_addr(&name)));
        self.accepting.push((Box::new(waker), thread));
    }

    /// Where others reach this process. Who listens on all addresses must name one of them with
    /// [`Address::with_host`].
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next caller; `None` if none came in time.
    pub fn accept(&self, timeout: Duration) -> Option<Incoming> {
        let deadline = Instant::now() + timeout;
        let mut waiting = self.shared.waiting();
        loop {
            if let Some(incoming) = waiting.pop_front() {
                return Some(incoming);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            waiting = self.shared.arrived.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes a caller wait on, behind the others.
    pub fn put_back(&self, incoming: Incoming) {
        self.shared.add(incoming);
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for (waker, thread) in self.accepting.drain(..) {
            waker();
            // It has no panics to pass on.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<Incoming>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, incoming: Incoming) {
        let mut waiting = self.waiting();
        if waiting.len() < limits::CALLERS_WAITING {
            waiting.push_back(incoming);
        }
        drop(waiting);
        self.arrived.notify_one();
    }

    fn accept_all(self: &Arc<Self>, accept: impl Fn() -> io::Result<(Socket, String)>) {
        loop {
            let accepted = accept();
            if self.ended.load(Ordering::SeqCst) {
                return;
            }
            match accepted {
                Ok((socket, peer)) => self.examine_aside(socket, peer),
                // Too many open files, or a caller that has left again: the next may do better.
                Err(_) => thread::sleep(limits::ACCEPT_BACKOFF),
            }
        }
    }

    /// Finds out on another thread who calls. The thread ends with the handshake's deadline, so
    /// nobody need wait for it.
    fn examine_aside(self: &Arc<Self>, socket: Socket, peer: String) {
        if self.handshakes.fetch_add(1, Ordering::SeqCst) >= limits::HANDSHAKES {
            self.handshakes.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let shared = Arc::clone(self);
        let examine = move || {
            match shared.examine(socket, peer.clone()) {
                Ok(incoming) => shared.add(incoming),
                Err(error) => tracing::debug!(peer, error = &error as &dyn std::error::Error, "caller sent away"),
            }
            shared.handshakes.fetch_sub(1, Ordering::SeqCst);
        };
        if thread::Builder::new().name("handshake".to_owned()).spawn(examine).is_err() {
            self.handshakes.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn examine(&self, socket: Socket, peer: String) -> Result<Incoming, WireError> {
        let deadline = Instant::now() + limits::HANDSHAKE;
        let channel = match (&self.security.tls, &socket) {
            (Some(tls), Socket::Tcp(_)) => Channel::tls_server(socket, tls, &peer, deadline)?,
            _ => Channel::plain(socket),
        };
        let connection = Connection::new(channel, peer);
        let offer = handshake::examine(&connection, &self.security.token, deadline)?;
        Ok(Incoming { connection, offer })
    }
}

/// A socket for callers on this machine, under a name that nobody can guess before; none where
/// the machine has no ID.
fn local_listener() -> Result<Option<(UnixListener, Local)>, WireError> {
    let Some(machine) = machine() else { return Ok(None) };
    let name = format!("emberflow-{}", hex(&random()?));
    let listener = UnixAddress::from_abstract_name(&name).and_then(|name| UnixListener::bind_addr(&name));
    Ok(listener.ok().map(|listener| (listener, Local { machine, name })))
}

/// Who listens on all addresses is reached on this machine's own.
fn reachable(bound: SocketAddr) -> SocketAddr {
    match bound {
        SocketAddr::V4(address) if address.ip().is_unspecified() => ([127, 0, 0, 1], bound.port()).into(),
        SocketAddr::V6(address) if address.ip().is_unspecified() => {
            (std::net::Ipv6Addr::LOCALHOST, bound.port()).into()
        }
        _ => bound,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::wire::{Token, connect, frame::Label, testing};

    const PATIENT: Duration = Duration::from_mins(1);
    const SHORT: Duration = Duration::from_millis(100);

    fn meet(security: &Security, local: bool) -> (Connection, Connection) {
        let listener = Listener::bind("127.0.0.1:0", security.clone()).unwrap();
        let mut address = listener.address().clone();
        assert!(address.local.is_some());
        if !local {
            address.local = None;
        }
        let security = security.clone();
        let calling = thread::spawn(move || connect(&address, "talk", &security, PATIENT).unwrap());
        let incoming = listener.accept(PATIENT).unwrap();
        assert_eq!(incoming.purpose(), "talk");
        let welcomed = incoming.welcome().unwrap();
        (calling.join().unwrap(), welcomed)
    }

    fn plain() -> Security {
        Security::local(Token::random().unwrap())
    }

    /// Over each kind of channel.
    fn everywhere(check: fn(Connection, Connection)) {
        for (security, local) in [(plain(), false), (plain(), true), (testing::tls(), false)] {
            let (one, other) = meet(&security, local);
            check(one, other);
        }
    }

    #[test]
    fn both_ends_talk_at_the_same_time() {
        everywhere(|one, other| {
            let payload: Vec<u8> = (0..3_000_000_u32).map(|index| index as u8).collect();
            let talk = |end: &Connection| {
                thread::scope(|scope| {
                    let sending = scope.spawn(|| {
                        for step in 0..5 {
                            let label = Label { kind: 20, step, ..Label::default() };
                            end.send(label, &payload, PATIENT).unwrap();
                        }
                    });
                    for step in 0..5 {
                        let frame = end.receive(payload.len(), PATIENT).unwrap();
                        assert!(frame.payload == payload && frame.label.step == step);
                    }
                    sending.join().unwrap();
                });
            };
            thread::scope(|scope| {
                scope.spawn(|| talk(&one));
                talk(&other);
            });
            drop(one);
            assert!(matches!(other.receive(9, PATIENT), Err(WireError::Closed { .. })));
        });
    }

    #[test]
    fn a_silent_peer_ends_in_a_timeout_and_may_speak_later() {
        everywhere(|one, other| {
            let error = one.receive(9, SHORT).unwrap_err();
            assert!(matches!(error, WireError::Timeout { .. }), "{error}");
            other.send(Label::default(), b"late", PATIENT).unwrap();
            assert_eq!(one.receive(9, PATIENT).unwrap().payload, b"late");
        });
    }

    #[test]
    fn a_peer_that_stops_reading_ends_in_a_timeout() {
        everywhere(|one, _other| {
            let error = one.send(Label::default(), &vec![0; 64 << 20], SHORT).unwrap_err();
            assert!(matches!(error, WireError::Timeout { .. }), "{error}");
        });
    }

    #[test]
    fn another_thread_ends_a_blocked_read() {
        everywhere(|one, _other| {
            thread::scope(|scope| {
                let reading = scope.spawn(|| one.receive(9, PATIENT));
                one.close();
                let error = reading.join().unwrap().unwrap_err();
                assert!(matches!(error, WireError::Closed { .. }), "{error}");
            });
        });
    }

    #[test]
    fn payloads_larger_than_agreed_are_refused() {
        everywhere(|one, other| {
            one.send(Label::default(), b"0123456789", PATIENT).unwrap();
            assert!(matches!(other.receive(9, PATIENT), Err(WireError::Malformed { .. })));
        });
    }

    #[test]
    fn scanners_hold_up_nobody() {
        let security = plain();
        let listener = Listener::bind("127.0.0.1:0", security.clone()).unwrap();
        let network = listener.address().network.clone();
        let silent: Vec<_> = (0..limits::HANDSHAKES / 2).map(|_| TcpStream::connect(&network).unwrap()).collect();
        let mut rude = TcpStream::connect(&network).unwrap();
        rude.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let stranger = connect(&Address::network(&network), "", &plain(), PATIENT).err().unwrap();
        assert!(matches!(stranger, WireError::Refused { .. }), "{stranger}");
        let calling = thread::spawn(move || connect(&Address::network(network), "", &security, PATIENT));
        let incoming = listener.accept(PATIENT).unwrap();
        incoming.refuse("rank 1 is here already");
        let error = calling.join().unwrap().err().unwrap();
        assert!(error.to_string().ends_with("refused: rank 1 is here already"), "{error}");
        assert!(listener.accept(Duration::ZERO).is_none());
        drop(silent);
    }

    #[test]
    fn without_tls_the_other_end_is_not_understood() {
        let listener = Listener::bind("127.0.0.1:0", testing::tls()).unwrap();
        let address = Address::network(&listener.address().network);
        let error = connect(&address, "", &plain(), PATIENT).err().unwrap();
        assert!(matches!(error, WireError::Malformed { .. } | WireError::Closed { .. }), "{error}");
    }

    #[test]
    fn certificates_of_other_authorities_are_refused() {
        let listener = Listener::bind("127.0.0.1:0", testing::tls()).unwrap();
        let address = Address::network(&listener.address().network);
        let error = connect(&address, "", &testing::tls(), PATIENT).err().unwrap();
        assert!(matches!(error, WireError::Tls { .. }), "{error}");
    }

    #[test]
    fn nobody_listens_to_other_machines_in_the_clear() {
        let error = Listener::bind("0.0.0.0:0", plain()).err().unwrap();
        assert!(matches!(error, WireError::Plain { .. }), "{error}");
        let open = Security::new(Token::random().unwrap(), None, true).unwrap();
        drop(Listener::bind("0.0.0.0:0", open).unwrap());
    }
}
