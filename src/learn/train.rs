//! The training loop of one rank.

use std::sync::{Arc, atomic::AtomicBool};

use super::{Checkpoint, Communicator, LearnError, Step};
use crate::{
    data::{Feed, StepPlan},
    pipeline::TrainPlan,
    runs::EpochRecord,
};

/// What a rank trains; the same on every rank but for `feed`, `step` and `comm`.
pub struct TrainJob<'a> {
    /// The training.
    pub plan: &'a TrainPlan,
    /// Steps of an epoch, over all ranks.
    pub steps: StepPlan,
    /// Whether rows are held out (on any rank).
    pub held_out_rows: u64,
    /// Names of the features, to name those to blame.
    pub feature_names: Vec<String>,
    /// Ties a checkpoint to what it belongs to.
    pub identity: String,
    /// Where to go on.
    pub resume: Option<Checkpoint>,
}

/// How the outside speaks to all ranks of this process.
#[derive(Debug, Default)]
pub struct Control {
    /// Set: make a checkpoint after the current step and stop. Ranks vote on it, so all stop
    /// at the same step even if they see it at different times.
    pub stop: Arc<AtomicBool>,
}

/// What rank 0 tells while it trains; calls block the loop.
pub trait Observer: Send {
    /// Steps of the running epoch done so far; called at most every few hundred milliseconds.
    fn progress(&mut self, epoch: u32, step: u64);
    /// An epoch ended.
    fn epoch(&mut self, record: &EpochRecord);
    /// Keep this checkpoint.
    fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<(), LearnError>;
}

/// Where a rank's time went, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Phases {
    /// Waiting for the feed.
    pub feed_wait_s: f64,
    /// Forward and backward.
    pub compute_s: f64,
    /// Exchanging gradients, waiting for other ranks included.
    pub communicate_s: f64,
    /// Updating parameters.
    pub update_s: f64,
}

/// What came of it; the parameters are the same on every rank.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The parameters kept.
    pub parameters: Vec<f32>,
    /// One entry per epoch.
    pub history: Vec<EpochRecord>,
    /// Rows this rank trained on in each epoch of this attempt.
    pub rows_per_epoch: Vec<u64>,
    /// Rows this rank measured the held-out loss on, in one epoch.
    pub held_out_rows: u64,
    /// Where the time went.
    pub phases: Phases,
}

/// Trains on the calling thread until done, stopped (`LearnError::Interrupted`, after a
/// checkpoint) or failed. `observer` is given on rank 0 only.
pub fn train_rank(
    job: &TrainJob<'_>,
    control: &Control,
    feed: &Feed,
    step: &mut dyn Step,
    comm: &mut dyn Communicator,
    observer: Option<&mut dyn Observer>,
) -> Result<Trained, LearnError> {
    let _ = (job, control, feed, step, comm, observer);
    unimplemented!()
}
