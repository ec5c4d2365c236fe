//! How gradients meet: synchronous all-reduce.
//!
//! Each step makes two exchanges. The first, a few numbers, carries losses, rows and votes: who
//! wants to stop, and who met a number that is not finite; in that case nobody goes on to the
//! second, the gradients, and no parameter has changed anywhere.

use super::{Communicator, LearnError, Wire};
use crate::ids::Rank;

/// What one rank brings to a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Account {
    /// Sum over rows of the mean over features.
    pub loss: f64,
    pub rows: u64,
    /// Wants to stop after this step.
    pub stop: bool,
    /// Whether its loss and gradient are finite.
    pub finite: bool,
}

/// What all ranks together brought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Total {
    pub loss: f64,
    pub rows: u64,
    pub stop: bool,
    /// The first rank that met a number that is not finite.
    pub not_finite: Option<Rank>,
}

/// Adds up the ranks' accounts; the same total on every rank.
pub(super) fn add_accounts(comm: &mut dyn Communicator, account: &Account) -> Result<Total, LearnError> {
    // The loss, rows, votes to stop, then one number per rank: 1 where it is not finite.
    let mut bucket = vec![0.0; 3 + comm.world_size() as usize];
    // One rank's NaN would make the sum NaN; its vote tells enough.
    bucket[0] = if account.finite { account.loss } else { 0.0 };
    bucket[1] = account.rows as f64;
    bucket[2] = f64::from(account.stop);
    bucket[3 + comm.rank().0 as usize] = f64::from(!account.finite);
    comm.all_reduce_sum_f64(&mut bucket)?;
    let not_finite = bucket[3..].iter().position(|vote| *vote > 0.0).map(|rank| Rank(rank as u32));
    Ok(Total { loss: bucket[0], rows: bucket[1] as u64, stop: bucket[2] > 0.0, not_finite })
}

/// Sums the gradients over ranks, divides them by the step's rows and cuts them to `clip_norm`
/// if they are longer. Gives whether the result is finite: finite summands can overflow.
pub(super) fn average_gradients(
    comm: &mut dyn Communicator,
    gradients: &mut [f32],
    rows: u64,
    clip_norm: Option<f64>,
) -> Result<bool, LearnError> {
    comm.all_reduce_sum(gradients, Wire::F32)?;
    if !all_finite(gradients) {
        return Ok(false);
    }
    let mut scale = 1.0 / rows.max(1) as f64;
    if let Some(most) = clip_norm {
        let norm = l2_norm(gradients) * scale;
        // As PyTorch's clip_grad_norm_.
        scale *= (most / (norm + 1e-6)).min(1.0);
    }
    let scale = scale as f32;
    for gradient in gradients {
        *gradient *= scale;
    }
    Ok(true)
}

/// Whether no number is NaN or infinite. Looks at all of them: without an early exit the loop
/// vectorises.
pub(super) fn all_finite(numbers: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    numbers.iter().fold(true, |finite, number| finite & (number.to_bits() & EXPONENT != EXPONENT))
}

/// In f64, in lanes that the compiler can vectorise; the same order on every rank.
fn l2_norm(numbers: &[f32]) -> f64 {
    let (chunks, rest) = numbers.as_chunks::<8>();
    let mut lanes = [0.0_f64; 8];
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*number) * f64::from(*number);
        }
    }
    let rest: f64 = rest.iter().map(|number| f64::from(*number).powi(2)).sum();
    (lanes.iter().sum::<f64>() + rest).sqrt()
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use super::*;
    use crate::learn::in_process;

    fn fleet<T: Send>(world: u32, work: impl Fn(&mut dyn Communicator) -> T + Sync) -> Vec<T> {
        let work = &work;
        thread::scope(|scope| {
            let ranks = in_process(world, Duration::from_mins(1));
            let threads: Vec<_> = ranks.into_iter().map(|mut rank| scope.spawn(move || work(rank.as_mut()))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn accounts_add_up_and_name_the_first_rank_that_is_not_finite() {
        let check = |nan: &[u32], stop: &[u32], expected: Total| {
            let totals = fleet(4, |comm| {
                let rank = comm.rank().0;
                let finite = !nan.contains(&rank);
                let loss = if finite { f64::from(rank) } else { f64::NAN };
                let account = Account { loss, rows: 10, stop: stop.contains(&rank), finite };
                add_accounts(comm, &account).unwrap()
            });
            assert!(totals.iter().all(|total| *total == expected), "{totals:?}");
        };
        check(&[], &[], Total { loss: 6.0, rows: 40, stop: false, not_finite: None });
        check(&[3, 2], &[1], Total { loss: 1.0, rows: 40, stop: true, not_finite: Some(Rank(2)) });
    }

    #[test]
    fn gradients_are_averaged_then_clipped() {
        let check = |clip_norm: Option<f64>, expected: [f32; 2]| {
            let found = fleet(2, |comm| {
                let mut gradients = if comm.rank() == Rank(0) { [3.0, 8.0] } else { [3.0, 0.0] };
                assert!(average_gradients(comm, &mut gradients, 2, clip_norm).unwrap());
                gradients
            });
            for gradients in found {
                assert!(gradients.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-5), "{gradients:?}");
            }
        };
        check(None, [3.0, 4.0]);
        check(Some(10.0), [3.0, 4.0]);
        check(Some(0.5), [0.3, 0.4]);
    }

    #[test]
    fn a_sum_that_overflows_is_not_finite() {
        let found = fleet(2, |comm| average_gradients(comm, &mut [f32::MAX; 3], 2, None).unwrap());
        assert_eq!(found, [false, false]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!all_finite(&[0.0, bad, 1.0]));
        }
        assert!(all_finite(&[f32::MAX, f32::MIN, f32::MIN_POSITIVE / 2.0]));
    }

    #[test]
    fn the_norm_takes_every_number() {
        let numbers: Vec<f32> = (0..19).map(|number| number as f32).collect();
        let expected = (0..19).map(|number| f64::from(number * number)).sum::<f64>().sqrt();
        assert!((l2_norm(&numbers) - expected).abs() < 1e-12);
    }
}
