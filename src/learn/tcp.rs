//! Communicators between processes, over a connection for each pair of ranks.
//!
//! ```text
//!   every operation:  Enter (what, at which step, how long) ──▶ all others ── all have come? ──▶ go
//!     small buckets   travel with it to every rank, and are added in the order of ranks
//!     large ones      go round a ring in chunks: N-1 times a rank's part is passed on and added,
//!                     N-1 times a sum is passed on (Patarasuk and Yuan, 2009)
//! ```
//!
//! One thread per peer reads frames into that peer's inbox; so a peer that ends is noticed at
//! once, whatever is waited for, and two ranks that send to each other never block. A rank that
//! gives up tells the others whom it blames before it closes.

use std::{
    collections::VecDeque,
    mem,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    bf16,
    comm::{AbortHandle, CommError, Communicator, Wire, shard},
};
use crate::{
    ids::{Generation, Rank, Step},
    limits,
    wire::{self, Connection, Header, Kind, Listener, Security, WireError},
};

/// A rank's place among the processes of a generation.
#[derive(Clone, Copy)]
pub struct TcpPlace<'a> {
    /// This rank.
    pub rank: Rank,
    /// The formation of the fleet; connections of another one are turned away.
    pub generation: Generation,
    /// Where this rank listens.
    pub listener: &'a Listener,
    /// Where each rank listens, by rank.
    pub peers: &'a [String],
    /// What the ranks share.
    pub security: &'a Security,
    /// How long an exchange may take.
    pub deadline: Duration,
}

/// Connects all ranks of a generation with each other, within `limits::MESH`. `on_start` gets the
/// way to end whatever waits, from the first connection on.
pub fn tcp(place: TcpPlace<'_>, on_start: impl FnOnce(AbortHandle)) -> Result<Box<dyn Communicator>, CommError> {
    let world = place.peers.len();
    let shared = Arc::new(Shared {
        rank: place.rank,
        generation: place.generation,
        deadline: place.deadline,
        state: Mutex::new(State { failure: None, inboxes: (0..world).map(|_| Inbox::default()).collect() }),
        changed: Condvar::new(),
        links: Mutex::new((0..world).map(|_| None).collect()),
    });
    let aborting = Arc::clone(&shared);
    let abort = AbortHandle::new(move || {
        aborting.fail(Failure::Aborted);
        aborting.close();
    });
    on_start(abort.clone());
    let mesh = Mesh { place, shared: &shared, deadline: Instant::now() + limits::MESH };
    let result = mesh.connect();
    if result.is_err() {
        shared.close();
    }
    result?;
    let links = shared.links().iter().map(Clone::clone).collect();
    Ok(Box::new(Tcp {
        rank: place.rank,
        generation: place.generation,
        step: Step(0),
        operation: 0,
        links,
        shared,
        abort,
        bytes_sent: 0,
        spare: Vec::new(),
    }))
}

/// Connections on their way to be made.
struct Mesh<'a> {
    place: TcpPlace<'a>,
    shared: &'a Arc<Shared>,
    deadline: Instant,
}

impl Mesh<'_> {
    /// Each rank connects to those before it and is connected to by those behind it.
    fn connect(&self) -> Result<(), CommError> {
        let TcpPlace { rank, generation, listener, peers, .. } = self.place;
        for peer in (0..rank.0).map(Rank) {
            let connection = self.reach(peer, &peers[peer.0 as usize])?;
            self.take(peer, connection)?;
        }
        let older = |connection: &Connection| purpose(connection).is_some_and(|(number, _)| number < generation.0);
        listener.forget(older);
        let mut missing: Vec<Rank> = (rank.0 + 1..peers.len() as u32).map(Rank).collect();
        while let Some(first) = missing.first().copied() {
            self.shared.check("connect")?;
            let late = CommError::Late { operation: "connect", rank: first, deadline: limits::MESH };
            if Instant::now() >= self.deadline {
                return Err(late);
            }
            let ours = |connection: &Connection| purpose(connection).is_some_and(|(number, _)| number == generation.0);
            let Some(connection) = listener.accept_where(Duration::from_millis(50), ours) else { continue };
            let Some((_, peer)) = purpose(&connection) else { continue };
            if let Some(index) = missing.iter().position(|rank| *rank == peer) {
                missing.remove(index);
                self.take(peer, connection)?;
            } else {
                let reason = format!("rank {peer} is taken, or none of this fleet");
                // Whoever it is gets to know, if it listens.
                let _ = connection.send(Header::plain(Kind::Refusal, reason.len()), reason.as_bytes());
            }
        }
        Ok(())
    }

    fn reach(&self, peer: Rank, address: &str) -> Result<Connection, CommError> {
        let purpose = format!("{PURPOSE} {} {}", self.place.generation, self.place.rank);
        loop {
            self.shared.check("connect")?;
            match wire::connect(address, self.place.security, &purpose) {
                Ok(connection) => return Ok(connection),
                Err(error) if Instant::now() >= self.deadline => {
                    return Err(CommError::Unreachable { rank: peer, source: Box::new(error) });
                }
                Err(WireError::Io { .. } | WireError::Closed { .. } | WireError::Silent { .. }) => {
                    thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(CommError::Unreachable { rank: peer, source: Box::new(error) }),
            }
        }
    }

    fn take(&self, peer: Rank, connection: Connection) -> Result<(), CommError> {
        // A quiet peer is not a lost one: exchanges have deadlines of their own.
        let connection = connection.set_deadline(self.place.deadline);
        let connection = connection.map_err(|error| CommError::Unreachable { rank: peer, source: Box::new(error) })?;
        let connection = Arc::new(connection);
        self.shared.links()[peer.0 as usize] = Some(Arc::clone(&connection));
        let shared = Arc::clone(self.shared);
        thread::spawn(move || shared.read(peer, &connection));
        Ok(())
    }
}

/// What ranks come to each other for: generation and rank follow.
const PURPOSE: &str = "rank";

fn purpose(connection: &Connection) -> Option<(u32, Rank)> {
    let mut words = connection.purpose().strip_prefix(PURPOSE)?.split_whitespace();
    Some((words.next()?.parse().ok()?, Rank(words.next()?.parse().ok()?)))
}

struct Tcp {
    rank: Rank,
    generation: Generation,
    step: Step,
    /// Collective operations so far.
    operation: u32,
    /// By rank; none for this one.
    links: Vec<Option<Arc<Connection>>>,
    shared: Arc<Shared>,
    abort: AbortHandle,
    bytes_sent: u64,
    /// A buffer for bytes on their way out.
    spare: Vec<u8>,
}

/// What the threads that read share with the one that works.
struct Shared {
    rank: Rank,
    generation: Generation,
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
    links: Mutex<Vec<Option<Arc<Connection>>>>,
}

struct State {
    /// Why no further operation can end well; the first reason stays.
    failure: Option<Failure>,
    /// By rank.
    inboxes: Vec<Inbox>,
}

/// What has come from a rank and is not yet taken.
#[derive(Default)]
struct Inbox {
    frames: VecDeque<(Header, Vec<u8>)>,
    messages: VecDeque<Vec<f32>>,
    /// Of a message whose end has not come.
    part: Vec<f32>,
    bytes: usize,
    /// Buffers to be used again.
    spare: Vec<Vec<u8>>,
    /// Whether there is no more to come.
    closed: bool,
}

#[derive(Clone, Copy)]
enum Failure {
    Late(Rank),
    Gone(Rank),
    Aborted,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> MutexGuard<'_, Vec<Option<Arc<Connection>>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, failure: Failure) {
        self.state().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    fn close(&self) {
        self.links().iter().flatten().for_each(|link| link.close());
    }

    fn check(&self, operation: &'static str) -> Result<(), CommError> {
        self.state().failure.map_or(Ok(()), |failure| Err(self.error(operation, failure)))
    }

    fn error(&self, operation: &'static str, failure: Failure) -> CommError {
        match failure {
            Failure::Late(rank) => CommError::Late { operation, rank, deadline: self.deadline },
            Failure::Gone(rank) => CommError::Gone { operation, rank },
            Failure::Aborted => CommError::Aborted { operation },
        }
    }

    /// Takes in what a peer sends, until it ends; what comes after a failure too, so that the peer
    /// is never left waiting for room.
    fn read(&self, peer: Rank, connection: &Connection) {
        let mut payload = Vec::new();
        loop {
            match connection.receive(&mut payload) {
                // A quiet peer is not a lost one; but who has left need not wait for it.
                Err(WireError::Silent { .. }) if self.state().failure.is_none() => {}
                Ok(header) if header.generation == self.generation.0 => self.put(peer, header, &mut payload),
                Ok(_) | Err(_) => break,
            }
        }
        let mut state = self.state();
        state.inboxes[peer.0 as usize].closed = true;
        drop(state);
        self.changed.notify_all();
    }

    /// Keeps a frame, and waits where too much is kept.
    fn put(&self, peer: Rank, header: Header, payload: &mut Vec<u8>) {
        let mut state = self.state();
        while state.inboxes[peer.0 as usize].bytes > limits::INBOX_BYTES && state.failure.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.failure.is_some() {
            return;
        }
        let inbox = &mut state.inboxes[peer.0 as usize];
        match header.kind {
            Kind::Enter | Kind::Chunk => {
                inbox.bytes += payload.len();
                let next = inbox.spare.pop().unwrap_or_default();
                inbox.frames.push_back((header, mem::replace(payload, next)));
            }
            Kind::Message | Kind::MessagePart => {
                inbox.part.extend(numbers(payload));
                inbox.bytes += payload.len();
                if header.kind == Kind::Message {
                    let message = mem::take(&mut inbox.part);
                    inbox.messages.push_back(message);
                }
            }
            Kind::Blame => {
                let failure = match payload[..] {
                    [0, a, b, c, d] => Failure::Gone(Rank(u32::from_le_bytes([a, b, c, d]))),
                    [1, a, b, c, d] => Failure::Late(Rank(u32::from_le_bytes([a, b, c, d]))),
                    _ => Failure::Gone(peer),
                };
                state.failure.get_or_insert(failure);
            }
            Kind::Control | Kind::Refusal => {
                state.failure.get_or_insert(Failure::Gone(peer));
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until `ready` gives something. `awaited` tells whether it is a rank that is waited for:
    /// one whose connection has ended, or the first one at the deadline, is to blame.
    fn wait<T>(
        &self,
        operation: &'static str,
        mut ready: impl FnMut(&mut State) -> Option<T>,
        awaited: impl Fn(&State, usize) -> bool,
    ) -> Result<T, CommError> {
        let deadline = Instant::now() + self.deadline;
        let mut state = self.state();
        loop {
            if let Some(found) = ready(&mut state) {
                drop(state);
                self.changed.notify_all();
                return Ok(found);
            }
            let missing = |rank: &usize| awaited(&state, *rank);
            let gone = (0..state.inboxes.len()).filter(missing).find(|rank| state.inboxes[*rank].closed);
            let late = (0..state.inboxes.len()).find(missing).filter(|_| Instant::now() >= deadline);
            let gone = gone.map(|rank| Failure::Gone(Rank(rank as u32)));
            let failure = state.failure.or(gone).or(late.map(|rank| Failure::Late(Rank(rank as u32))));
            if let Some(failure) = failure {
                state.failure.get_or_insert(failure);
                drop(state);
                self.changed.notify_all();
                self.blame(failure);
                return Err(self.error(operation, failure));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells the others whom to blame, so that they do not blame this rank.
    fn blame(&self, failure: Failure) {
        let (kind, rank) = match failure {
            Failure::Gone(rank) => (0, rank),
            Failure::Late(rank) => (1, rank),
            Failure::Aborted => (0, self.rank),
        };
        let payload = [&[kind][..], &rank.0.to_le_bytes()].concat();
        for link in self.links().iter().flatten() {
            // One that does not hear it has its own troubles.
            let header = Header { generation: self.generation.0, ..Header::plain(Kind::Blame, payload.len()) };
            let _ = link.send(header, &payload);
        }
    }
}

/// An operation as all ranks must know it.
#[derive(Clone, Copy, PartialEq)]
struct Purpose {
    name: &'static str,
    code: u8,
    length: usize,
}

impl Communicator for Tcp {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.links.len() as u32
    }

    fn at_step(&mut self, step: Step) {
        self.step = step;
    }

    fn all_reduce_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        let purpose = Purpose { name: "all-reduce", code: 1, length: bucket.len() };
        if self.links.len() == 1 {
            return Ok(());
        }
        if size_of_val(bucket) <= limits::DIRECT_BYTES {
            return self.sum_directly(purpose, bucket, wire);
        }
        self.enter(purpose, &[])?;
        self.ring_reduce(bucket, wire)?;
        self.ring_gather(bucket, wire)
    }

    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError> {
        if self.links.len() == 1 {
            return Ok(());
        }
        let per_frame = (limits::FRAME_BYTES - HEAD) / size_of::<f64>();
        // Few numbers: one frame at most, in all uses; more take several turns.
        for part in bucket.chunks_mut(per_frame) {
            let purpose = Purpose { name: "all-reduce of f64", code: 2, length: part.len() };
            let all = self.enter(purpose, bytemuck::cast_slice(part))?;
            part.fill(0.0);
            for (rank, bytes) in all.iter().enumerate() {
                let bytes = if rank == self.index() { &self.spare } else { bytes };
                let numbers = bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
                part.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
            }
        }
        Ok(())
    }

    fn reduce_scatter_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        if self.links.len() == 1 {
            return Ok(());
        }
        let purpose = Purpose { name: "reduce-scatter", code: 3, length: bucket.len() };
        if size_of_val(bucket) <= limits::DIRECT_BYTES {
            return self.sum_directly(purpose, bucket, wire);
        }
        self.enter(purpose, &[])?;
        self.ring_reduce(bucket, wire)
    }

    fn all_gather(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        if self.links.len() == 1 {
            return Ok(());
        }
        let own = self.own(bucket.len());
        wire.round(&mut bucket[own]);
        self.enter(Purpose { name: "all-gather", code: 4, length: bucket.len() }, &[])?;
        self.ring_gather(bucket, wire)
    }

    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError> {
        self.enter(Purpose { name: "broadcast", code: 5 + root.0 as u8 % 200, length: bucket.len() }, &[])?;
        let (world, index) = (self.links.len(), self.index());
        // Along the ring, chunk by chunk.
        let from = (index + world - 1) % world;
        let to = (index + 1) % world;
        for part in chunks(0..bucket.len()) {
            if index != root.0 as usize {
                self.take_chunk("broadcast", from, &mut bucket[part.clone()], Wire::F32, false)?;
            }
            if to != root.0 as usize {
                self.send_chunk("broadcast", to, &bucket[part], Wire::F32)?;
            }
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.enter(Purpose { name: "barrier", code: 0, length: 0 }, &[]).map(|_| ())
    }

    fn send(&mut self, to: Rank, message: &[f32]) -> Result<(), CommError> {
        let bytes: &[u8] = bytemuck::cast_slice(message);
        let mut parts = bytes.chunks(limits::FRAME_BYTES).peekable();
        if parts.peek().is_none() {
            return self.put("send", to.0 as usize, Kind::Message, &[]);
        }
        while let Some(part) = parts.next() {
            let kind = if parts.peek().is_some() { Kind::MessagePart } else { Kind::Message };
            self.put("send", to.0 as usize, kind, part)?;
        }
        Ok(())
    }

    fn receive(&mut self, from: Rank, message: &mut Vec<f32>) -> Result<(), CommError> {
        let place = from.0 as usize;
        let next = |state: &mut State| state.inboxes[place].message();
        *message = self.shared.wait("receive", next, |_, rank| rank == place)?;
        Ok(())
    }

    fn receive_any(&mut self, message: &mut Vec<f32>) -> Result<Rank, CommError> {
        let own = self.index();
        let next = |state: &mut State| {
            let mut inboxes = state.inboxes.iter_mut().enumerate();
            inboxes.find_map(|(rank, inbox)| Some((Rank(rank as u32), inbox.message()?)))
        };
        let (from, found) = self.shared.wait("receive", next, |_, rank| rank != own)?;
        *message = found;
        Ok(from)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent
    }

    fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }
}

impl Inbox {
    fn message(&mut self) -> Option<Vec<f32>> {
        let message = self.messages.pop_front()?;
        self.bytes = self.bytes.saturating_sub(size_of_val(&message[..]));
        Some(message)
    }

    fn frame(&mut self) -> Option<(Header, Vec<u8>)> {
        let frame = self.frames.pop_front()?;
        self.bytes = self.bytes.saturating_sub(frame.1.len());
        Some(frame)
    }
}

impl Tcp {
    fn index(&self) -> usize {
        self.rank.0 as usize
    }

    fn own(&self, length: usize) -> Range<usize> {
        shard(self.rank, self.world_size(), length)
    }

    /// Comes to an operation with a few bytes for everyone, and waits for all others; gives what
    /// they brought, by rank. This rank's own bytes are in `spare`.
    fn enter(&mut self, purpose: Purpose, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.operation = self.operation.wrapping_add(1);
        let mut payload = vec![purpose.code];
        payload.extend((purpose.length as u64).to_le_bytes());
        payload.extend_from_slice(bytes);
        self.spare.clear();
        self.spare.extend_from_slice(bytes);
        let own = self.index();
        for rank in (0..self.links.len()).filter(|rank| *rank != own) {
            self.put(purpose.name, rank, Kind::Enter, &payload)?;
        }
        let world = self.links.len();
        let here = |state: &State, rank: usize| {
            rank == own || state.inboxes[rank].frames.front().is_some_and(|(header, _)| header.kind == Kind::Enter)
        };
        let all = |state: &mut State| {
            let all_here = (0..world).all(|rank| here(state, rank));
            all_here.then(|| state.inboxes.iter_mut().map(Inbox::frame).collect::<Vec<_>>())
        };
        let came = self.shared.wait(purpose.name, all, |state, rank| !here(state, rank))?;
        let mut brought = Vec::with_capacity(world);
        for (rank, frame) in came.into_iter().enumerate() {
            let Some((header, mut bytes)) = frame else {
                brought.push(Vec::new());
                continue;
            };
            self.agree(purpose, Rank(rank as u32), header, &bytes)?;
            bytes.drain(..HEAD.min(bytes.len()));
            brought.push(bytes);
        }
        Ok(brought)
    }

    /// Every rank gets every bucket, and adds them in the order of ranks.
    fn sum_directly(&mut self, purpose: Purpose, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        wire.round(bucket);
        let all = self.enter(purpose, bytemuck::cast_slice(bucket))?;
        bucket.fill(0.0);
        for (rank, bytes) in all.iter().enumerate() {
            let bytes = if rank == self.index() { &self.spare } else { bytes };
            pairs(bucket, bytes).for_each(|(sum, number)| *sum += number);
        }
        wire.round(bucket);
        Ok(())
    }

    /// Whether another rank came for the same.
    fn agree(&self, purpose: Purpose, rank: Rank, header: Header, bytes: &[u8]) -> Result<(), CommError> {
        let operation = purpose.name;
        if header.step != self.step.0 {
            let (got, expected) = (Step(header.step), self.step);
            return Err(CommError::OutOfStep { operation, rank, got, expected });
        }
        let length = bytes.get(1..HEAD).and_then(|length| length.try_into().ok()).map(u64::from_le_bytes);
        let same = bytes.first() == Some(&purpose.code) && length == Some(purpose.length as u64);
        if same && header.operation == self.operation {
            return Ok(());
        }
        let got = length.unwrap_or_default() as usize;
        Err(CommError::Mismatch { operation, rank, got, expected: purpose.length })
    }

    /// Round the ring: each part of the bucket ends, summed, with the rank that owns it.
    fn ring_reduce(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        let (world, index) = (self.links.len(), self.index());
        for turn in 1..world {
            let (out, incoming) = ((index + world - turn) % world, (index + 2 * world - turn - 1) % world);
            self.ring_turn("all-reduce", bucket, out, incoming, wire, true)?;
        }
        Ok(())
    }

    /// Round the ring: each rank's part of the bucket comes to all.
    fn ring_gather(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        let (world, index) = (self.links.len(), self.index());
        for turn in 0..world - 1 {
            let (out, incoming) = ((index + world - turn) % world, (index + world - turn - 1) % world);
            self.ring_turn("all-gather", bucket, out, incoming, wire, false)?;
        }
        Ok(())
    }

    /// Sends a part of the bucket to the next rank while another comes from the one before.
    fn ring_turn(
        &mut self,
        operation: &'static str,
        bucket: &mut [f32],
        out: usize,
        incoming: usize,
        wire: Wire,
        add: bool,
    ) -> Result<(), CommError> {
        let (world, index) = (self.links.len(), self.index());
        let (to, from) = ((index + 1) % world, (index + world - 1) % world);
        let part = |of: usize| shard(Rank(of as u32), world as u32, bucket.len());
        let (mut sends, mut takes) = (chunks(part(out)), chunks(part(incoming)));
        loop {
            let (send, take) = (sends.next(), takes.next());
            if send.is_none() && take.is_none() {
                return Ok(());
            }
            if let Some(send) = send {
                self.send_chunk(operation, to, &bucket[send], wire)?;
            }
            if let Some(take) = take {
                self.take_chunk(operation, from, &mut bucket[take], wire, add)?;
            }
        }
    }

    fn send_chunk(&mut self, operation: &'static str, to: usize, numbers: &[f32], wire: Wire) -> Result<(), CommError> {
        if wire == Wire::F32 {
            return self.put(operation, to, Kind::Chunk, bytemuck::cast_slice(numbers));
        }
        let mut bytes = mem::take(&mut self.spare);
        bytes.clear();
        bf16::append(numbers, &mut bytes);
        let result = self.put(operation, to, Kind::Chunk, &bytes);
        self.spare = bytes;
        result
    }

    fn take_chunk(
        &mut self,
        operation: &'static str,
        from: usize,
        numbers: &mut [f32],
        wire: Wire,
        add: bool,
    ) -> Result<(), CommError> {
        let next = |state: &mut State| state.inboxes[from].frame();
        let rank = Rank(from as u32);
        let (header, bytes) = self.shared.wait(operation, next, |_, rank| rank == from)?;
        let size = if wire == Wire::F32 { size_of::<f32>() } else { size_of::<u16>() };
        if header.kind != Kind::Chunk || bytes.len() != numbers.len() * size {
            return Err(CommError::Mismatch { operation, rank, got: bytes.len() / size, expected: numbers.len() });
        }
        match (wire, add) {
            (Wire::F32, true) => pairs(numbers, &bytes).for_each(|(own, number)| *own += number),
            (Wire::F32, false) => pairs(numbers, &bytes).for_each(|(own, number)| *own = number),
            (Wire::Bf16, true) => bf16::add(numbers, &bytes),
            (Wire::Bf16, false) => bf16::replace(numbers, &bytes),
        }
        self.shared.state().inboxes[from].spare.push(bytes);
        Ok(())
    }

    fn put(&mut self, operation: &'static str, to: usize, kind: Kind, bytes: &[u8]) -> Result<(), CommError> {
        let Some(link) = &self.links[to] else {
            let rank = Rank(to as u32);
            return Err(CommError::Mismatch { operation, rank, got: bytes.len(), expected: 0 });
        };
        let (generation, step, length) = (self.generation.0, self.step.0, bytes.len() as u32);
        let header = Header { kind, generation, operation: self.operation, step, length };
        match link.send(header, bytes) {
            Ok(()) => {
                self.bytes_sent += bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                let rank = Rank(to as u32);
                // Somebody may have told whom to blame for it.
                let told = self.shared.state().failure;
                let own = match error {
                    WireError::Silent { .. } => Failure::Late(rank),
                    _ => Failure::Gone(rank),
                };
                let failure = told.unwrap_or(own);
                self.shared.fail(failure);
                self.shared.blame(failure);
                Err(self.shared.error(operation, failure))
            }
        }
    }
}

/// Bytes of an `Enter` before what it carries: the operation's code and length.
const HEAD: usize = 9;

/// A range of numbers in pieces that travel as one frame each.
fn chunks(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let size = limits::FRAME_BYTES / size_of::<f32>();
    let end = range.end;
    range.step_by(size).map(move |start| start..end.min(start + size))
}

/// Own numbers and those that came.
fn pairs<'a>(own: &'a mut [f32], bytes: &'a [u8]) -> impl Iterator<Item = (&'a mut f32, f32)> {
    own.iter_mut().zip(numbers(bytes))
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // The others read what was sent before; the threads here end with their connections.
        self.shared.fail(Failure::Aborted);
        for link in self.links.iter().flatten() {
            link.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        learn::comm::conformance,
        wire::{Token, testing},
    };

    fn make_with(security: &Security, world: u32, deadline: Duration) -> Vec<Box<dyn Communicator>> {
        let listeners: Vec<_> = (0..world).map(|_| Listener::bind("127.0.0.1:0", security).unwrap()).collect();
        // Half of the pairs over TCP, the others over sockets of this machine; with TLS, all over it.
        let address = |(rank, listener): (usize, &Listener)| {
            let local = rank % 2 == 0 && security.tls.is_none();
            if local { listener.address() } else { listener.host_and_port().to_owned() }
        };
        let peers: Vec<String> = listeners.iter().enumerate().map(address).collect();
        let peers = &peers;
        thread::scope(|scope| {
            let join = |(rank, listener)| {
                scope.spawn(move || {
                    let (rank, generation) = (Rank(rank), Generation(3));
                    tcp(TcpPlace { rank, generation, listener, peers, security, deadline }, |_| {}).unwrap()
                })
            };
            let threads: Vec<_> = (0..).zip(&listeners).map(join).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn it_conforms() {
        let security = Security::plain(Token::random().unwrap());
        conformance::check(&move |world, deadline| make_with(&security, world, deadline));
    }

    #[test]
    fn it_conforms_through_tls() {
        let security = testing::tls();
        conformance::check(&move |world, deadline| make_with(&security, world, deadline));
    }

    #[test]
    fn a_second_claim_to_a_rank_is_turned_away() {
        let security = Security::plain(Token::random().unwrap());
        let (own, other) =
            (Listener::bind("127.0.0.1:0", &security).unwrap(), Listener::bind("127.0.0.1:0", &security).unwrap());
        let peers = [own.address(), other.address()];
        let first = wire::connect(&own.address(), &security, "rank 1 1").unwrap();
        let older = wire::connect(&own.address(), &security, "rank 0 1").unwrap();
        let place = TcpPlace {
            rank: Rank(0),
            generation: Generation(1),
            listener: &own,
            peers: &peers,
            security: &security,
            deadline: Duration::from_secs(10),
        };
        let comm = tcp(place, |_| {}).unwrap();
        assert_eq!(comm.world_size(), 2);
        let mut payload = Vec::new();
        assert!(older.receive(&mut payload).is_err(), "a connection of an older generation is closed");
        drop(first);
    }
}
