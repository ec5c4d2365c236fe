//! Gradients summed over ranks, as compressed as the file asks for.
//!
//! `top_k` sends a fraction of the numbers, the largest in magnitude, and keeps what it leaves out
//! for the next step (error feedback: Stich, Cordonnier and Jaggi, "Sparsified SGD with memory",
//! 2018). What is left out when a rank ends is not in a checkpoint.

use crate::{
    learn::{CommError, Communicator, Wire, shard},
    pipeline::spec::Compression,
};

/// Sums gradients; one per rank.
pub(super) struct Reducer {
    compression: Compression,
    /// What was left out so far; empty unless `top_k`.
    left_out: Vec<f32>,
}

impl Reducer {
    pub fn new(compression: Compression) -> Self {
        Self { compression, left_out: Vec::new() }
    }

    /// How numbers travel that are sent as a whole.
    pub fn wire(&self) -> Wire {
        if self.compression == Compression::Bf16 { Wire::Bf16 } else { Wire::F32 }
    }

    /// Replaces the gradients by their sum over all ranks, or what is sent of it.
    pub fn sum(&mut self, comm: &mut dyn Communicator, gradients: &mut [f32]) -> Result<(), CommError> {
        match self.compression {
            Compression::TopK(fraction) if comm.world_size() > 1 => self.sum_largest(comm, gradients, fraction),
            _ => comm.all_reduce_sum(gradients, self.wire()),
        }
    }

    fn sum_largest(
        &mut self,
        comm: &mut dyn Communicator,
        gradients: &mut [f32],
        fraction: f64,
    ) -> Result<(), CommError> {
        let count = ((gradients.len() as f64 * fraction).ceil() as usize).clamp(1, gradients.len().max(1));
        self.left_out.resize(gradients.len(), 0.0);
        self.left_out.iter_mut().zip(&*gradients).for_each(|(kept, gradient)| *kept += gradient);
        let mut order: Vec<u32> = (0..gradients.len() as u32).collect();
        if count < order.len() {
            let magnitude = |index: u32| self.left_out[index as usize].abs();
            order.select_nth_unstable_by(count, |a, b| magnitude(*b).total_cmp(&magnitude(*a)).then(a.cmp(b)));
            order.truncate(count);
        }
        // Each rank's part: where its numbers stand, as bits, then the numbers.
        let world = comm.world_size();
        let mut all = vec![0.0; 2 * order.len() * world as usize];
        let own = shard(comm.rank(), world, all.len());
        for (place, index) in order.iter().enumerate() {
            all[own.start + place] = f32::from_bits(*index);
            all[own.start + order.len() + place] = std::mem::take(&mut self.left_out[*index as usize]);
        }
        comm.all_gather(&mut all, Wire::F32)?;
        gradients.fill(0.0);
        for part in all.chunks_exact(2 * order.len().max(1)) {
            let (places, numbers) = part.split_at(order.len());
            for (place, number) in places.iter().zip(numbers) {
                // The bits are another rank's; one that is beyond is no place of ours.
                if let Some(gradient) = gradients.get_mut(place.to_bits() as usize) {
                    *gradient += number;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ids::Rank, learn::sync::tests::fleet};

    #[test]
    fn the_largest_are_sent_and_the_rest_follows() {
        let found = fleet(2, |comm| {
            let mut reducer = Reducer::new(Compression::TopK(0.5));
            let mut first = if comm.rank() == Rank(0) { [4.0, 1.0, -3.0, 0.5] } else { [0.0, 2.0, 1.0, 5.0] };
            reducer.sum(comm, &mut first).unwrap();
            let mut second = [0.0; 4];
            reducer.sum(comm, &mut second).unwrap();
            (first, second)
        });
        for (first, second) in found {
            assert_eq!(first, [4.0, 2.0, -3.0, 5.0]);
            assert_eq!(second, [0.0, 1.0, 1.0, 0.5]);
        }
    }

    #[test]
    fn a_sum_that_overflows_is_infinite() {
        for compression in [Compression::None, Compression::Bf16, Compression::TopK(1.0)] {
            let found = fleet(2, |comm| {
                let mut numbers = [f32::MAX; 3];
                Reducer::new(compression).sum(comm, &mut numbers).unwrap();
                numbers
            });
            assert!(found.iter().flatten().all(|number| number.is_infinite()), "{compression:?}");
        }
    }
}
