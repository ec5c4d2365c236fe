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
    ops::{AddAssign, Range},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use super::comm::{CommError, Communicator};
use crate::ids::Rank;

/// Communicators between threads, by rank. A rank that is dropped, by an error or a panic,
/// fails the exchanges of the others at once.
pub fn in_process(world_size: u32, deadline: Duration) -> Vec<Box<dyn Communicator>> {
    let world = world_size as usize;
    let shared = Arc::new(Shared {
        deadline,
        meeting: Mutex::new(Meeting { number: 0, came: vec![None; world], last: Vec::new(), failure: None }),
        changed: Condvar::new(),
        f32: Exchange::new(world),
        f64: Exchange::new(world),
    });
    let end = |rank| Box::new(InProcess { rank: Rank(rank), shared: Arc::clone(&shared) }) as Box<dyn Communicator>;
    (0..world_size).map(end).collect()
}

struct InProcess {
    rank: Rank,
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
}

/// An operation and how many numbers a rank brings to it.
#[derive(Clone, Copy, PartialEq)]
struct Purpose {
    operation: &'static str,
    length: usize,
}

#[derive(Clone, Copy)]
enum Failure {
    Late(Rank),
    Gone(Rank),
}

impl Communicator for InProcess {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.shared.world() as u32
    }

    fn all_reduce_sum(&mut self, bucket: &mut [f32]) -> Result<(), CommError> {
        self.sum("all-reduce", &self.shared.f32, bucket)
    }

    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError> {
        self.sum("all-reduce of f64", &self.shared.f64, bucket)
    }

    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError> {
        let purpose = Purpose { operation: "broadcast", length: bucket.len() };
        let exchange = &self.shared.f32;
        if self.rank == root {
            exchange.bring(root.0 as usize, bucket);
        }
        self.shared.meet(self.rank, purpose)?;
        if self.rank != root {
            bucket.copy_from_slice(&exchange.brought[root.0 as usize].read().unwrap_or_else(PoisonError::into_inner));
        }
        // The root must not bring the next bucket while this one is read.
        self.shared.meet(self.rank, purpose)
    }

    fn barrier(&mut self) -> Result<(), CommError> {
        self.shared.meet(self.rank, Purpose { operation: "barrier", length: 0 })
    }
}

impl InProcess {
    fn sum<T: Number>(&self, operation: &'static str, all: &Exchange<T>, bucket: &mut [T]) -> Result<(), CommError> {
        if self.shared.world() == 1 {
            return Ok(());
        }
        let purpose = Purpose { operation, length: bucket.len() };
        let rank = self.rank.0 as usize;
        all.bring(rank, bucket);
        self.shared.meet(self.rank, purpose)?;
        all.add_up(rank, bucket.len());
        self.shared.meet(self.rank, purpose)?;
        all.take(bucket);
        Ok(())
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        let mut meeting = self.shared.meeting();
        meeting.failure.get_or_insert(Failure::Gone(self.rank));
        drop(meeting);
        self.shared.changed.notify_all();
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

    /// Waits until every rank has come for the same purpose.
    fn meet(&self, rank: Rank, purpose: Purpose) -> Result<(), CommError> {
        let operation = purpose.operation;
        let deadline = Instant::now() + self.deadline;
        let mut meeting = self.meeting();
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
                return Err(match failure {
                    Failure::Late(rank) => CommError::Late { operation, rank, deadline: self.deadline },
                    Failure::Gone(rank) => CommError::Gone { operation, rank },
                });
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
        for (rank, sum) in self.sums.iter().enumerate() {
            let slice = self.slice(rank, bucket.len());
            bucket[slice].copy_from_slice(&sum.read().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn slice(&self, rank: usize, length: usize) -> Range<usize> {
        let world = self.brought.len();
        length * rank / world..length * (rank + 1) / world
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
