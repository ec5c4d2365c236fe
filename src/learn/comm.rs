//! Communicators: how ranks exchange flat f32 buckets. They know numbers and ranks, not models.

use std::{ops::Range, sync::Arc, time::Duration};

use super::bf16;
use crate::{
    ids::{Rank, Step},
    remedy::{Remedied, Remedy},
    wire::WireError,
};

/// A rank's end of the exchange. Collective calls are made by all ranks in the same order; each
/// has a deadline, and fails with the rank to blame. After an error the fleet is of no more use,
/// but for `CommError::Mismatch`.
pub trait Communicator: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world_size(&self) -> u32;

    /// Labels the operations that follow; ranks that meet at different steps fail.
    fn at_step(&mut self, step: Step);

    /// Replaces the bucket by its sum over all ranks; the same bits on every rank, and in
    /// every run (ranks are added in a fixed order).
    fn all_reduce_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError>;

    /// The same in f64, for losses and counts.
    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError>;

    /// The first half of an all-reduce: this rank's `shard` of the bucket becomes the sum over all
    /// ranks. What the rest then holds is left open.
    fn reduce_scatter_sum(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError>;

    /// The second half: every rank gives its `shard` of the bucket to all others.
    fn all_gather(&mut self, bucket: &mut [f32], wire: Wire) -> Result<(), CommError>;

    /// Replaces the bucket by that of rank `root`.
    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError>;

    /// Waits for all ranks.
    fn barrier(&mut self) -> Result<(), CommError>;

    /// Gives a message to another rank; waits only where many are not yet taken.
    fn send(&mut self, to: Rank, message: &[f32]) -> Result<(), CommError>;

    /// The next message from a rank, in place of what the buffer holds.
    fn receive(&mut self, from: Rank, message: &mut Vec<f32>) -> Result<(), CommError>;

    /// The next message from any rank, and that rank.
    fn receive_any(&mut self, message: &mut Vec<f32>) -> Result<Rank, CommError>;

    /// Bytes that this rank has put on the wire so far; 0 where there is none.
    fn bytes_sent(&self) -> u64;

    /// Ends this rank's part in the exchange from another thread.
    fn abort_handle(&self) -> AbortHandle;
}

/// Ends a rank's part in the exchange: what it waits for fails at once with `CommError::Aborted`.
#[derive(Clone)]
pub struct AbortHandle(Arc<dyn Fn() + Send + Sync>);

impl AbortHandle {
    /// A handle that does this; more than once does no harm.
    pub fn new(abort: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(abort))
    }

    /// Ends it.
    pub fn abort(&self) {
        (self.0)();
    }
}

/// How numbers travel. Sums are made in f32 either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wire {
    /// As they are.
    #[default]
    F32,
    /// Rounded to bfloat16: half the bytes, 8 bits of precision. Sums are rounded too, so that all
    /// ranks get the same bits.
    Bf16,
}

impl Wire {
    /// What it does to numbers that travel.
    pub(super) fn round(self, numbers: &mut [f32]) {
        if self == Self::Bf16 {
            bf16::round(numbers);
        }
    }
}

/// The part of a bucket of `length` numbers that a rank owns: one of `world_size` consecutive
/// ranges of about equal length.
pub fn shard(rank: Rank, world_size: u32, length: usize) -> Range<usize> {
    let (rank, world) = (rank.0 as usize, world_size.max(1) as usize);
    length * rank / world..length * (rank + 1) / world
}

/// Why an exchange failed.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// A rank did not come in time.
    #[error("{operation}: rank {rank} did not arrive within {} s", deadline.as_secs())]
    Late {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
        /// How long was waited.
        deadline: Duration,
    },
    /// A rank ended before the others.
    #[error("{operation}: rank {rank} ended")]
    Gone {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
    },
    /// Ranks disagree on what they exchange.
    #[error("{operation}: rank {rank} brought {got} numbers, not {expected}")]
    Mismatch {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
        /// What it brought.
        got: usize,
        /// What this rank brought.
        expected: usize,
    },
    /// Ranks are at different steps.
    #[error("{operation}: rank {rank} is at step {got}, not {expected}")]
    OutOfStep {
        /// The operation.
        operation: &'static str,
        /// The rank to blame.
        rank: Rank,
        /// Where it is.
        got: Step,
        /// Where this rank is.
        expected: Step,
    },
    /// A rank cannot be connected to.
    #[error("rank {rank} cannot be reached")]
    Unreachable {
        /// The rank.
        rank: Rank,
        /// Why.
        source: Box<WireError>,
    },
    /// This rank was told to leave.
    #[error("{operation}: told to leave")]
    Aborted {
        /// The operation.
        operation: &'static str,
    },
}

impl Remedied for CommError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Late { .. } | Self::Gone { .. } | Self::Aborted { .. } => Remedy::TryAgain,
            Self::Unreachable { source, .. } => source.remedy(),
            Self::Mismatch { .. } | Self::OutOfStep { .. } => Remedy::ReportBug,
        }
    }
}

/// What every communicator must do; each implementation's tests call `check`.
#[cfg(test)]
pub(super) mod conformance {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// Makes a fleet of that size with that deadline, by rank.
    pub(in super::super) type Make = dyn Fn(u32, Duration) -> Vec<Box<dyn Communicator>>;

    const PATIENT: Duration = Duration::from_mins(1);

    pub(in super::super) fn check(make: &Make) {
        ranks_are_in_order(make);
        sums_have_the_same_bits_everywhere(make);
        halves_of_an_all_reduce_make_a_whole(make);
        bf16_rounds_alike_everywhere(make);
        messages_arrive_in_order(make);
        broadcast_gives_the_roots_numbers(make);
        operations_follow_each_other(make);
        a_rank_that_ended_is_named_at_once(make);
        a_rank_that_panicked_is_named(make);
        a_late_rank_is_named_by_all(make);
        other_lengths_are_refused(make);
        other_steps_are_refused(make);
        an_aborted_rank_leaves_at_once(make);
    }

    /// Runs `work` on every rank's own thread; results by rank.
    fn fleet<T: Send>(
        ranks: Vec<Box<dyn Communicator>>,
        work: impl Fn(Box<dyn Communicator>) -> T + Sync,
    ) -> Vec<thread::Result<T>> {
        let work = &work;
        thread::scope(|scope| {
            let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        })
    }

    fn ranks_are_in_order(make: &Make) {
        for (index, rank) in make(3, PATIENT).iter().enumerate() {
            assert_eq!((rank.rank(), rank.world_size()), (Rank(index as u32), 3));
        }
    }

    /// Numbers whose sum depends on the order of its terms.
    fn number(rank: u32, index: usize, seed: u32) -> f32 {
        let mixed = (rank + 1).wrapping_mul(2_654_435_761) ^ (index as u32).wrapping_mul(40_503) ^ seed;
        (mixed % 10_007) as f32 * 0.1 - 500.0
    }

    fn bucket(rank: Rank, length: usize, seed: u32) -> Vec<f32> {
        (0..length).map(|index| number(rank.0, index, seed)).collect()
    }

    /// Lengths on both sides of where a communicator may change its way.
    fn any_length() -> impl Strategy<Value = usize> {
        prop_oneof![9 => 0_usize..40, 1 => 50_000_usize..200_000]
    }

    fn sums_have_the_same_bits_everywhere(make: &Make) {
        proptest!(ProptestConfig::with_cases(20), |(world in 1_u32..6, length in any_length(), seed: u32)| {
            let exact = |index| (0..world).map(|rank| f64::from(number(rank, index, seed))).sum::<f64>();
            let sums = || {
                let found = fleet(make(world, PATIENT), |mut comm| {
                    let mut bucket = bucket(comm.rank(), length, seed);
                    let mut precise: Vec<f64> = bucket.iter().map(|number| f64::from(*number)).collect();
                    comm.all_reduce_sum(&mut bucket, Wire::F32).unwrap();
                    comm.all_reduce_sum_f64(&mut precise).unwrap();
                    (bucket, precise)
                });
                found.into_iter().map(Result::unwrap).collect::<Vec<_>>()
            };
            let found = sums();
            prop_assert!(found.iter().all(|rank| *rank == found[0]));
            prop_assert_eq!(&found, &sums());
            for (index, (sum, precise)) in found[0].0.iter().zip(&found[0].1).enumerate() {
                prop_assert!((f64::from(*sum) - exact(index)).abs() < 1e-2);
                prop_assert!((precise - exact(index)).abs() < 1e-9);
            }
        });
    }

    fn halves_of_an_all_reduce_make_a_whole(make: &Make) {
        proptest!(ProptestConfig::with_cases(10), |(world in 1_u32..6, length in any_length(), seed: u32)| {
            let found = fleet(make(world, PATIENT), |mut comm| {
                let mut whole = bucket(comm.rank(), length, seed);
                comm.all_reduce_sum(&mut whole, Wire::F32).unwrap();
                let mut halves = bucket(comm.rank(), length, seed);
                comm.reduce_scatter_sum(&mut halves, Wire::F32).unwrap();
                let own = shard(comm.rank(), world, length);
                let scattered = halves[own.clone()] == whole[own.clone()];
                halves[..own.start].fill(f32::NAN);
                halves[own.end..].fill(f32::NAN);
                comm.all_gather(&mut halves, Wire::F32).unwrap();
                scattered && halves == whole
            });
            prop_assert!(found.into_iter().all(Result::unwrap));
        });
    }

    fn bf16_rounds_alike_everywhere(make: &Make) {
        for length in [1, 1000, 100_000] {
            let found = fleet(make(3, PATIENT), |mut comm| {
                let mut sum = bucket(comm.rank(), length, 1);
                comm.all_reduce_sum(&mut sum, Wire::Bf16).unwrap();
                sum
            });
            let found: Vec<Vec<f32>> = found.into_iter().map(Result::unwrap).collect();
            assert!(found.iter().all(|rank| *rank == found[0]));
            let mut rounded = found[0].clone();
            bf16::round(&mut rounded);
            assert_eq!(rounded, found[0]);
            for (index, sum) in found[0].iter().enumerate() {
                let exact: f32 = (0..3).map(|rank| number(rank, index, 1)).sum();
                let largest: f32 = (0..3).map(|rank| number(rank, index, 1).abs()).sum();
                assert!((sum - exact).abs() <= largest / 64.0, "{sum}, not {exact}");
            }
        }
    }

    fn messages_arrive_in_order(make: &Make) {
        let found = fleet(make(3, PATIENT), |mut comm| {
            let mut message = Vec::new();
            if comm.rank() == Rank(0) {
                for round in 0..100 {
                    for from in [2, 1] {
                        comm.receive(Rank(from), &mut message).unwrap();
                        assert_eq!(message, vec![round as f32; round % 5]);
                    }
                }
                for to in [1, 2] {
                    comm.send(Rank(to), &[to as f32]).unwrap();
                }
                let mut from: Vec<u32> = (0..2).map(|_| comm.receive_any(&mut message).unwrap().0).collect();
                from.sort_unstable();
                assert_eq!(from, [1, 2]);
            } else {
                for round in 0..100 {
                    comm.send(Rank(0), &vec![round as f32; round % 5]).unwrap();
                }
                comm.receive(Rank(0), &mut message).unwrap();
                assert_eq!(message, [comm.rank().0 as f32]);
                comm.send(Rank(0), &[9.0]).unwrap();
            }
            comm.barrier().unwrap();
        });
        found.into_iter().for_each(Result::unwrap);
    }

    fn broadcast_gives_the_roots_numbers(make: &Make) {
        let found = fleet(make(4, PATIENT), |mut comm| {
            let mut bucket = [comm.rank().0 as f32; 3];
            comm.broadcast(Rank(2), &mut bucket).unwrap();
            bucket
        });
        assert!(found.into_iter().all(|bucket| bucket.unwrap() == [2.0; 3]));
    }

    fn operations_follow_each_other(make: &Make) {
        let found = fleet(make(3, PATIENT), |mut comm| {
            let mut total = 0.0;
            for round in 0..200 {
                let mut bucket = vec![round as f32; 1 + round % 7];
                comm.all_reduce_sum(&mut bucket, Wire::F32).unwrap();
                comm.broadcast(Rank(round as u32 % 3), &mut bucket).unwrap();
                comm.barrier().unwrap();
                total += bucket[0];
            }
            total
        });
        assert!(found.into_iter().all(|total| total.unwrap() == (0..200).map(|round| (3 * round) as f32).sum::<f32>()));
    }

    fn a_rank_that_ended_is_named_at_once(make: &Make) {
        let found = fleet(make(3, PATIENT), |mut comm| if comm.rank() == Rank(1) { Ok(()) } else { comm.barrier() });
        for rank in [0, 2] {
            let error = found[rank].as_ref().unwrap().as_ref().unwrap_err();
            assert!(matches!(error, CommError::Gone { rank: Rank(1), .. }), "{error}");
        }
    }

    fn a_rank_that_panicked_is_named(make: &Make) {
        let found = fleet(make(2, PATIENT), |mut comm| {
            // Without the message of an ordinary panic.
            if comm.rank() == Rank(1) {
                std::panic::resume_unwind(Box::new(()));
            }
            comm.all_reduce_sum(&mut [1.0], Wire::F32)
        });
        let error = found[0].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, CommError::Gone { rank: Rank(1), .. }), "{error}");
    }

    fn a_late_rank_is_named_by_all(make: &Make) {
        let mut ranks = make(3, Duration::from_millis(50));
        let late = ranks.remove(1);
        let found = fleet(ranks, |mut comm| comm.all_reduce_sum(&mut [1.0], Wire::F32));
        for rank in found {
            let error = rank.unwrap().unwrap_err();
            assert!(matches!(error, CommError::Late { rank: Rank(1), .. }), "{error}");
        }
        drop(late);
    }

    fn other_lengths_are_refused(make: &Make) {
        let found = fleet(make(3, PATIENT), |mut comm| {
            let length = if comm.rank() == Rank(1) { 5 } else { 4 };
            let result = comm.all_reduce_sum(&mut vec![0.0; length], Wire::F32);
            // A refused exchange leaves the fleet in order.
            comm.barrier().unwrap();
            result
        });
        let error = found[0].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, CommError::Mismatch { rank: Rank(1), got: 5, expected: 4, .. }), "{error}");
        assert!(found.into_iter().all(|rank| rank.unwrap().is_err()));
    }

    fn other_steps_are_refused(make: &Make) {
        let found = fleet(make(2, PATIENT), |mut comm| {
            comm.at_step(Step(7 + u64::from(comm.rank().0)));
            comm.all_reduce_sum(&mut [1.0], Wire::F32)
        });
        let error = found[0].as_ref().unwrap().as_ref().unwrap_err();
        let expected = matches!(error, CommError::OutOfStep { rank: Rank(1), got: Step(8), expected: Step(7), .. });
        assert!(expected, "{error}");
    }

    fn an_aborted_rank_leaves_at_once(make: &Make) {
        let mut ranks = make(2, PATIENT);
        let mut first = ranks.remove(0);
        let abort = first.abort_handle();
        let waiting = thread::spawn(move || first.all_reduce_sum(&mut [1.0], Wire::F32));
        abort.abort();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, CommError::Aborted { .. }), "{error}");
        let error = ranks[0].barrier().unwrap_err();
        assert!(matches!(error, CommError::Gone { rank: Rank(0), .. }), "{error}");
    }
}
