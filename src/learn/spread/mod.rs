//! One model spread over the executors, instead of a replica on each.
//!
//! ```text
//!   pipeline   rank 0: rows ─▶ layers 0, 1 ──activations──▶ rank 1: layers 2, 3 ─▶ loss   every row passes all
//!                                          ◀──gradients───
//!   vertical   rank 0: columns a, b ─▶ encoder ─▶ ┐                 ┌─▶ decoder ─▶ loss of a, b
//!              rank 1: columns c, d ─▶ encoder ─▶ ┴ Σ = embedding ──┴─▶ decoder ─▶ loss of c, d
//! ```
//!
//! All ranks take part in every step with the same rows; rank 0 counts them. Flat buffers stay
//! those of the whole network, so that checkpoints and models are as without a spread; a rank fills
//! in and updates only its part of them.

mod slices;
mod stage;

use std::{ops::Range, sync::Arc};

use self::{slices::Slices, stage::Stage};
use super::{
    Communicator, LearnError, NetShape, SharedComm, Step, burn_step,
    comm::shard,
    shape::{Linear, Weight},
    slice,
};
use crate::{
    data::{FeedPlan, FittedFeatures, Partitions, consecutive},
    ids::{PartitionId, Rank},
    pipeline::{ModelPlan, RunPlan, spec::Spread},
};

/// Fails where more executors are to train a model than it can be spread over.
pub fn check_spread(model: &ModelPlan, executors: u32) -> Result<(), LearnError> {
    let most = model.spread.most_executors(model.net.hidden.len());
    if executors <= most {
        return Ok(());
    }
    let parts = if matches!(model.spread, Spread::Vertical { .. }) { "slices" } else { "layers" };
    Err(LearnError::TooManyExecutors { model: model.name.clone(), parts, most, executors })
}

/// What a rank reads, of the plan to read everything: its partitions, and its columns of them.
pub fn share_of_rows(whole: FeedPlan, spread: Spread, rank: Rank, world_size: u32) -> FeedPlan {
    let owned = partitions_read(&whole.partitions, spread, rank, world_size);
    match spread {
        Spread::Data {} => FeedPlan { owned, ..whole },
        Spread::Pipeline { .. } => {
            let reads = rank == Rank(0) || rank.0 + 1 == world_size;
            let features = if reads { Arc::clone(&whole.features) } else { Arc::new(FittedFeatures::concat(&[])) };
            // The first and the last rank each hold all rows; by any number of ranks, so that the
            // order of rows is the same.
            FeedPlan { owned, features, memory_bytes: whole.memory_bytes / 2, ..whole }
        }
        Spread::Vertical { slices } => {
            let own = &whole.features.slices(slices as usize)[shard(rank, world_size, slices as usize)];
            FeedPlan { owned, features: Arc::new(FittedFeatures::concat(own)), ..whole }
        }
    }
}

/// The partitions whose rows a rank takes part in training on: of a model that is spread, all.
pub fn partitions_read(partitions: &Partitions, spread: Spread, rank: Rank, world_size: u32) -> Vec<PartitionId> {
    match spread {
        Spread::Data {} => partitions.owned_by(rank, world_size),
        Spread::Pipeline { .. } | Spread::Vertical { .. } => partitions.owned_by(Rank(0), 1),
    }
}

/// Features of a row that a rank reads.
pub fn features_read(spread: Spread, shape: &NetShape, rank: Rank, world_size: u32) -> usize {
    match spread {
        Spread::Pipeline { .. } if rank != Rank(0) && rank.0 + 1 != world_size => 0,
        Spread::Vertical { .. } => shape.slices[shard(rank, world_size, shape.slices.len())].iter().sum(),
        Spread::Data {} | Spread::Pipeline { .. } => shape.features,
    }
}

/// Numbers that a rank gives to the others in a step of so many rows, at most.
pub fn exchanged_numbers(spread: Spread, shape: &NetShape, world_size: u32, rows: usize) -> usize {
    match spread {
        _ if world_size == 1 => 0,
        Spread::Data {} => shape.parameters(),
        Spread::Pipeline { .. } => {
            let (layers, stages) = (shape.layers(), stages(shape, world_size));
            // Gradients to the rank before, activations to the one behind.
            let width = |own: &Range<usize>| {
                let before = if own.start > 0 { layers[own.start].inputs } else { 0 };
                before + if own.end < layers.len() { layers[own.end].inputs } else { 0 }
            };
            rows * stages.iter().map(width).max().unwrap_or(0)
        }
        // The embedding and its gradient.
        Spread::Vertical { .. } => 2 * rows * shape.net.latent,
    }
}

/// What a rank trains with, on the device of its number: a replica, or its part of the model.
pub fn replica(
    model: &ModelPlan,
    shape: &NetShape,
    run: &RunPlan,
    comm: &SharedComm,
) -> Result<Box<dyn Step>, LearnError> {
    let (loss, rank, world) = (model.train.loss, comm.rank(), comm.world_size());
    let (device, index) = (run.device, rank.0 as usize);
    match model.spread {
        Spread::Data {} => burn_step(shape, loss, device, index, run.seed),
        Spread::Pipeline { micro_batches } => {
            let layers = stages(shape, world);
            let mut stage = Stage::open(shape, loss, (device, index), layers, micro_batches, comm.clone())?;
            stage.write_parameters(&shape.initial_parameters(run.seed));
            Ok(Box::new(stage))
        }
        Spread::Vertical { .. } => {
            let own = shard(rank, world, shape.slices.len());
            let mut slices = Slices::open(shape, loss, (device, index), own, comm.clone())?;
            slices.write_parameters(&shape.initial_parameters(run.seed));
            Ok(Box::new(slices))
        }
    }
}

/// Which numbers of a model's flat buffers each rank keeps and updates; the rest, weights between
/// slices, stay zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts(Vec<Vec<Range<usize>>>);

impl Parts {
    /// The parts of a model, by rank; none where every rank has a replica.
    pub fn new(spread: Spread, shape: &NetShape, world_size: u32) -> Option<Self> {
        let layers = shape.layers();
        match spread {
            Spread::Data {} => None,
            Spread::Pipeline { .. } => {
                let part = |own: Range<usize>| vec![numbers(&layers[own])];
                Some(Self(stages(shape, world_size).into_iter().map(part).collect()))
            }
            Spread::Vertical { .. } => {
                let slices = |rank| shard(Rank(rank), world_size, shape.slices.len());
                let place = |slice| slice::places(shape, slice).into_iter().map(|place| place.whole);
                Some(Self((0..world_size).map(|rank| slices(rank).flat_map(place).collect()).collect()))
            }
        }
    }

    /// Numbers of the rank that has most of them.
    pub fn largest(&self) -> usize {
        (0..self.0.len() as u32).map(|rank| self.len(Rank(rank))).max().unwrap_or(0)
    }

    /// A rank's numbers of a flat buffer.
    pub(super) fn take(&self, rank: Rank, whole: &[f32]) -> Vec<f32> {
        let mut part = Vec::with_capacity(self.len(rank));
        self.0[rank.0 as usize].iter().for_each(|range| part.extend_from_slice(&whole[range.clone()]));
        part
    }

    /// Puts a rank's numbers into a flat buffer.
    pub(super) fn put(&self, rank: Rank, mut part: &[f32], whole: &mut [f32]) {
        for range in &self.0[rank.0 as usize] {
            let (here, rest) = part.split_at(range.len());
            whole[range.clone()].copy_from_slice(here);
            part = rest;
        }
    }

    /// How many numbers a rank has.
    pub(super) fn len(&self, rank: Rank) -> usize {
        self.0[rank.0 as usize].iter().map(Range::len).sum()
    }
}

/// Each rank's layers: consecutive, and about as many numbers on each.
fn stages(shape: &NetShape, world_size: u32) -> Vec<Range<usize>> {
    let sizes: Vec<u64> =
        shape.layers().iter().map(|layer| numbers(std::slice::from_ref(layer)).len() as u64).collect();
    consecutive(&sizes, world_size as usize)
}

/// Where the numbers of consecutive layers stand.
fn numbers(layers: &[Linear]) -> Range<usize> {
    let start = layers.first().map_or(0, |first| match &first.weight {
        Weight::Own(range) => range.start,
        Weight::Tied(_) => first.bias.start,
    });
    start..layers.last().map_or(start, |last| last.bias.end)
}
