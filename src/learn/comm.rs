//! Communicators: how ranks exchange flat f32 buckets. They know numbers and ranks, not models.

use std::time::Duration;

use crate::{
    ids::Rank,
    remedy::{Remedied, Remedy},
};

/// A rank's end of the exchange. Every call is collective, has a deadline, and fails with the
/// rank to blame.
pub trait Communicator: Send {
    /// This rank.
    fn rank(&self) -> Rank;

    /// How many ranks there are.
    fn world_size(&self) -> u32;

    /// Replaces the bucket by its sum over all ranks; the same bits on every rank, and in
    /// every run (ranks are added in order).
    fn all_reduce_sum(&mut self, bucket: &mut [f32]) -> Result<(), CommError>;

    /// The same in f64, for losses and counts.
    fn all_reduce_sum_f64(&mut self, bucket: &mut [f64]) -> Result<(), CommError>;

    /// Replaces the bucket by that of rank `root`.
    fn broadcast(&mut self, root: Rank, bucket: &mut [f32]) -> Result<(), CommError>;

    /// Waits for all ranks.
    fn barrier(&mut self) -> Result<(), CommError>;
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
}

impl Remedied for CommError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Late { .. } | Self::Gone { .. } => Remedy::TryAgain,
            Self::Mismatch { .. } => Remedy::ReportBug,
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
        broadcast_gives_the_roots_numbers(make);
        operations_follow_each_other(make);
        a_rank_that_ended_is_named_at_once(make);
        a_rank_that_panicked_is_named(make);
        a_late_rank_is_named_by_all(make);
        other_lengths_are_refused(make);
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

    fn sums_have_the_same_bits_everywhere(make: &Make) {
        proptest!(ProptestConfig::with_cases(20), |(world in 1_u32..6, length in 0_usize..40, seed: u32)| {
            let number = |rank: u32, index: usize| {
                let mixed = (rank + 1).wrapping_mul(2_654_435_761) ^ (index as u32).wrapping_mul(40_503) ^ seed;
                (mixed % 10_007) as f32 * 0.1 - 500.0
            };
            let expected: Vec<f32> = (0..length)
                .map(|index| (1..world).fold(number(0, index), |sum, rank| sum + number(rank, index)))
                .collect();
            let wide: Vec<f64> = (0..length)
                .map(|index| (1..world).fold(f64::from(number(0, index)), |sum, rank| sum + f64::from(number(rank, index))))
                .collect();
            let found = fleet(make(world, PATIENT), |mut comm| {
                let mut bucket: Vec<f32> = (0..length).map(|index| number(comm.rank().0, index)).collect();
                let mut precise: Vec<f64> = bucket.iter().map(|number| f64::from(*number)).collect();
                comm.all_reduce_sum(&mut bucket).unwrap();
                comm.all_reduce_sum_f64(&mut precise).unwrap();
                (bucket, precise)
            });
            for rank in found {
                prop_assert_eq!(rank.unwrap(), (expected.clone(), wide.clone()));
            }
        });
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
                comm.all_reduce_sum(&mut bucket).unwrap();
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
            comm.all_reduce_sum(&mut [1.0])
        });
        let error = found[0].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, CommError::Gone { rank: Rank(1), .. }), "{error}");
    }

    fn a_late_rank_is_named_by_all(make: &Make) {
        let mut ranks = make(3, Duration::from_millis(50));
        let late = ranks.remove(1);
        let found = fleet(ranks, |mut comm| comm.all_reduce_sum(&mut [1.0]));
        for rank in found {
            let error = rank.unwrap().unwrap_err();
            assert!(matches!(error, CommError::Late { rank: Rank(1), .. }), "{error}");
        }
        drop(late);
    }

    fn other_lengths_are_refused(make: &Make) {
        let found = fleet(make(3, PATIENT), |mut comm| {
            let length = if comm.rank() == Rank(1) { 5 } else { 4 };
            let result = comm.all_reduce_sum(&mut vec![0.0; length]);
            // A refused exchange leaves the fleet in order.
            comm.barrier().unwrap();
            result
        });
        let error = found[0].as_ref().unwrap().as_ref().unwrap_err();
        assert!(matches!(error, CommError::Mismatch { rank: Rank(1), got: 5, expected: 4, .. }), "{error}");
        assert!(found.into_iter().all(|rank| rank.unwrap().is_err()));
    }
}
