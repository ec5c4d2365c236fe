//! Communicators between the threads of one process, over shared memory.
//!
//! ```text
//!   every rank:  bucket ─copy─▶ brought[rank]   ── meet ──▶ sums[rank] = Σ brought[..], its slice only
//!                bucket ◀─copy─ sums[..]        ◀─ meet ──┘
//! ```
//!
//! Each rank adds up one slice, in the order of ranks, so the sum costs each of them the same
//! and has the same bits everywhere. A meeting ends when all have come, when one has ended, or
//! at the deadline; the first failure sticks, so that every rank blames the same one.

use std::{
    collections::VecDeque,
    ops::{AddAssign, Range},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use super::comm::{AbortHandle, CommError, Communicator, Wire, shard};
use crate::{
    ids::{Rank, Step},
    limits,
};

/// Communicators between threads, by rank. A rank that is dropped, by an error or a panic,
/// fails the exchanges of the others at once.
pub fn in_process(world_size: u32, deadline: Duration) -> Vec<Box<dyn Communicator>> {
    let world = world_size as usize;
    let shared = Arc::new(Shared {
        deadline,
        meeting: Mutex::new(Meeting {
            number: 0,
            came: vec![None; world],
            last: Vec::new(),
            failure: None,
            inboxes: (0..world).map(|_| VecDeque::new()).collect(),
        }),
        changed: Condvar::new(),
        f32: Exchange::new(world),
        f64: Exchange::new(world),
    });
    let end = |rank| {
        Box::new(InProcess { rank: Rank(rank), step: Step(0), shared: Arc::clone(&shared) }) as Box<dyn Communicator>
    };
    (0..world_size).map(end).collect()
}

struct InProcess {
    rank: Rank,
    step: Step,
    shared: Arc<Shared>,
}

struct Shared {
    deadline: Duration,
    meeting: Mutex<Meeting>,
    changed: Condvar,
    f32: Exchange<f32>,
    f64: Exchange<f64>,
}

/// Where ranks wait for each other.
struct Meeting {
    /// Counts the meetings that ended well.
    number: u64,
    /// Who has come to the running meeting, and with what.
    came: Vec<Option<Purpose>>,
    /// What each brought to the last one.
    last: Vec<Purpose>,
    /// Why no further meeting can end well.
    failure: Option<Failure>,
    /// Messages not yet taken, by receiver, each with its sender.
    inboxes: Vec<VecDeque<(Rank, Vec<f32>)>>,
}

/// An operation, at which step, and how many numbers a rank brings to it.
#[derive(Clone, Copy, PartialEq)]
struct Purpose {
    operation: &'static str,
    step: Step,
    length: usize,
}

#[derive(Clone, Copy)]
enum Failure {
    Late(Rank),
    Gone(Rank),
    Aborted(Rank),
}

impl Communicator for InProcess {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.shared.world() as u32
    }

    fn at_step(&mut self, step: Step) {
        self.step = step;
    }

    fn all_reduce_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        self.round(wire, bucket);
        self.sum("all-reduce", &self.shared.f32, bucket)?;
        self.round(wire, bucket);
        Ok(())
    }

    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError> {
        self.sum("all-reduce of f64", &self.shared.f64, bucket)
    }

    fn reduce_scatter_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        let purpose = self.purpose("reduce-scatter", bucket.len());
        let exchange = &self.shared.f32;
        let own = exchange.slice(self.index(), bucket.len());
        if self.shared.world() > 1 {
            self.round(wire, bucket);
            exchange.bring(self.index(), bucket);
            self.shared.meet(self.rank, purpose)?;
            exchange.add_up(self.index(), bucket.len());
            exchange.take_slice(self.index(), &mut bucket[own]);
            // No rank may bring the next bucket while another adds this one up.
            self.shared.meet(self.rank, purpose)?;
        }
        Ok(())
    }

    fn all_gather(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError> {
        let purpose = self.purpose("all-gather", bucket.len());
        let exchange = &self.shared.f32;
        let own = exchange.slice(self.index(), bucket.len());
        if self.shared.world() > 1 {
            self.round(wire, &mut bucket[own.clone()]);
            replace(&exchange.sums[self.index()], &bucket[own]);
            self.shared.meet(self.rank, purpose)?;
            exchange.take(bucket);
            self.shared.meet(self.rank, purpose)?;
        }
        Ok(())
    }

    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError> {
        let purpose = self.purpose("broadcast", bucket.len());
        let exchange = &self.shared.f32;
        if self.rank == root {
            exchange.bring(self.index(), bucket);
        }
        self.shared.meet(self.rank, purpose)?;
        if self.rank != root {
            bucket.copy_from_slice(&exchange.brought[root.0 as usize].read().unwrap_or_else(PoisonError::into_inner));
        }
        // The root must not bring the next bucket while this one is read.
        self.shared.meet(self.rank, purpose)
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.shared.meet(self.rank, self.purpose("barrier", 0))
    }

    fn send(&mut self, to: Rank, message: &[f32]) -> Result<(), CommError> {
        let rank = self.rank;
        // Counted by sender: a receiver may wait for one while another is ahead.
        let room = |meeting: &mut Meeting| {
            let own = meeting.inboxes[to.0 as usize].iter().filter(|(sender, _)| *sender == rank);
            (own.count() < limits::INBOX_MESSAGES).then_some(())
        };
        let mut room = self.shared.wait("send", rank, to, room)?.0;
        room.inboxes[to.0 as usize].push_back((self.rank, message.to_vec()));
        drop(room);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn receive(&mut self, from: Rank, message: &mut Vec<f32>) -> Result<(), CommError> {
        let index = self.index();
        let next = |meeting: &mut Meeting| {
            let inbox = &mut meeting.inboxes[index];
            inbox.iter().position(|(sender, _)| *sender == from).and_then(|place| inbox.remove(place))
        };
        *message = self.shared.wait("receive", self.rank, from, next)?.1.1;
        self.shared.changed.notify_all();
        Ok(())
    }

    fn receive_any(&mut self, message: &mut Vec<f32>) -> Result<Rank, CommError> {
        let index = self.index();
        let blamed = Rank(u32::from(index == 0));
        let next = |meeting: &mut Meeting| meeting.inboxes[index].pop_front();
        let (sender, found) = self.shared.wait("receive", self.rank, blamed, next)?.1;
        self.shared.changed.notify_all();
        *message = found;
        Ok(sender)
    }

    fn bytes_sent(&self) -> u64 {
        0
    }

    fn abort_handle(&self) -> AbortHandle {
        let (shared, rank) = (Arc::clone(&self.shared), self.rank);
        AbortHandle::new(move || shared.fail(Failure::Aborted(rank)))
    }
}

impl InProcess {
    fn index(&self) -> usize {
        self.rank.0 as usize
    }

    fn purpose(&self, operation: &'static str, length: usize) -> Purpose {
        Purpose { operation, step: self.step, length }
    }

    /// What the wire would do to the numbers; a rank alone has none.
    fn round(&self, wire: Wire, numbers: &mut [f32]) {
        if self.shared.world() > 1 {
            wire.round(numbers);
        }
    }

    fn sum<T: Number>(&self, operation: &'static str, all: &Exchange<T>, bucket: &mut [T]) -> Result<(), CommError> {
        if self.shared.world() == 1 {
            return Ok(());
        }
        let purpose = self.purpose(operation, bucket.len());
        all.bring(self.index(), bucket);
        self.shared.meet(self.rank, purpose)?;
        all.add_up(self.index(), bucket.len());
        self.shared.meet(self.rank, purpose)?;
        all.take(bucket);
        Ok(())
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.shared.fail(Failure::Gone(self.rank));
    }
}

impl Shared {
    fn world(&self) -> usize {
        self.f32.brought.len()
    }

    fn meeting(&self) -> MutexGuard<'_, Meeting> {
        // No code panics while it holds the lock.
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes why no further meeting can end well; the first reason stays.
    fn fail(&self, failure: Failure) {
        self.meeting().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    fn error(&self, operation: &'static str, this: Rank, failure: Failure) -> CommError {
        match failure {
            Failure::Late(rank) => CommError::Late { operation, rank, deadline: self.deadline },
            Failure::Aborted(rank) if rank == this => CommError::Aborted { operation },
            Failure::Gone(rank) | Failure::Aborted(rank) => CommError::Gone { operation, rank },
        }
    }

    /// Waits until `ready` gives something; `awaited` is to blame if it never does.
    fn wait<T>(
        &self,
        operation: &'static str,
        this: Rank,
        awaited: Rank,
        mut ready: impl FnMut(&mut Meeting) -> Option<T>,
    ) -> Result<(MutexGuard<'_, Meeting>, T), CommError> {
        let deadline = Instant::now() + self.deadline;
        let mut meeting = self.meeting();
        loop {
            // What was sent before a rank ended still counts.
            if let Some(found) = ready(&mut meeting) {
                return Ok((meeting, found));
            }
            if let Some(failure) = meeting.failure {
                return Err(self.error(operation, this, failure));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                meeting.failure = Some(Failure::Late(awaited));
                self.changed.notify_all();
                continue;
            }
            meeting = self.changed.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until every rank has come for the same purpose.
    fn meet(&self, rank: Rank, purpose: Purpose) -> Result<(), CommError> {
        let operation = purpose.operation;
        let deadline = Instant::now() + self.deadline;
        let mut meeting = self.meeting();
        if let Some(failure) = meeting.failure {
            return Err(self.error(operation, rank, failure));
        }
        let number = meeting.number;
        meeting.came[rank.0 as usize] = Some(purpose);
        if meeting.came.iter().all(Option::is_some) {
            meeting.last = meeting.came.iter_mut().filter_map(Option::take).collect();
            meeting.number += 1;
            self.changed.notify_all();
        }
        // A meeting that all came to ended well, even if a rank has ended since.
        while meeting.number == number {
            if let Some(failure) = meeting.failure {
                return Err(self.error(operation, rank, failure));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let late = meeting.came.iter().position(Option::is_none).unwrap_or_default();
                meeting.failure = Some(Failure::Late(Rank(late as u32)));
                self.changed.notify_all();
                continue;
            }
            meeting = self.changed.wait_timeout(meeting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        // No rank can come to the end of the next meeting before this one has left, so `last`
        // is still of this meeting.
        match meeting.last.iter().position(|other| *other != purpose) {
            Some(other) if meeting.last[other].step != purpose.step => Err(CommError::OutOfStep {
                operation,
                rank: Rank(other as u32),
                got: meeting.last[other].step,
                expected: purpose.step,
            }),
            Some(other) => Err(CommError::Mismatch {
                operation,
                rank: Rank(other as u32),
                got: meeting.last[other].length,
                expected: purpose.length,
            }),
            None => Ok(()),
        }
    }
}

/// Buffers of one type of number, by rank. Meetings keep writers and readers of a buffer
/// apart; the locks only prove it to the compiler.
struct Exchange<T> {
    brought: Vec<RwLock<Vec<T>>>,
    sums: Vec<RwLock<Vec<T>>>,
}

trait Number: Copy + AddAssign {}
impl Number for f32 {}
impl Number for f64 {}

impl<T: Number> Exchange<T> {
    fn new(world: usize) -> Self {
        let buffers = || (0..world).map(|_| RwLock::new(Vec::new())).collect();
        Self { brought: buffers(), sums: buffers() }
    }

    fn bring(&self, rank: usize, bucket: &[T]) {
        replace(&self.brought[rank], bucket);
    }

    /// Adds up this rank's slice of what all brought.
    fn add_up(&self, rank: usize, length: usize) {
        let slice = self.slice(rank, length);
        let mut sum = self.sums[rank].write().unwrap_or_else(PoisonError::into_inner);
        sum.clear();
        for brought in &self.brought {
            let brought = brought.read().unwrap_or_else(PoisonError::into_inner);
            let numbers = &brought[slice.clone()];
            if sum.is_empty() {
                sum.extend_from_slice(numbers);
            } else {
                sum.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += *number);
            }
        }
    }

    fn take(&self, bucket: &mut [T]) {
        for rank in 0..self.sums.len() {
            let slice = self.slice(rank, bucket.len());
            self.take_slice(rank, &mut bucket[slice]);
        }
    }

    fn take_slice(&self, rank: usize, slice: &mut [T]) {
        slice.copy_from_slice(&self.sums[rank].read().unwrap_or_else(PoisonError::into_inner));
    }

    fn slice(&self, rank: usize, length: usize) -> Range<usize> {
        shard(Rank(rank as u32), self.brought.len() as u32, length)
    }
}

fn replace<T: Copy>(buffer: &RwLock<Vec<T>>, numbers: &[T]) {
    let mut buffer = buffer.write().unwrap_or_else(PoisonError::into_inner);
    buffer.clear();
    buffer.extend_from_slice(numbers);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::comm::conformance;

    #[test]
    fn it_conforms() {
        conformance::check(&in_process);
    }

    #[test]
    fn the_first_failure_is_everyones() {
        let mut ranks = in_process(3, Duration::from_mins(1));
        drop(ranks.remove(1));
        for rank in &mut ranks {
            let error = rank.barrier().unwrap_err();
            assert!(matches!(error, CommError::Gone { rank: Rank(1), .. }), "{error}");
        }
        drop(ranks.remove(0));
        let error = ranks[0].barrier().unwrap_err();
        assert!(matches!(error, CommError::Gone { rank: Rank(1), .. }), "{error}");
    }
}
