//! Everything that a run needs to go on bit for bit, in one file that is replaced atomically.

use super::LearnError;
use crate::{
    runs::EpochRecord,
    storage::{Location, Storage},
};

/// The state between two steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// What it belongs to: spec hash, snapshot and model; another file's checkpoint is refused.
    pub identity: String,
    /// The epoch to go on with, from 0.
    pub epoch: u32,
    /// The step to go on with within the epoch, from 0.
    pub step: u64,
    /// Updates made so far, over all epochs.
    pub updates: u64,
    /// Sum of the losses and rows of the epoch so far.
    pub epoch_loss: f64,
    pub epoch_rows: u64,
    /// Flat parameters.
    pub parameters: Vec<f32>,
    /// The optimizer's flat buffers, in its own order.
    pub moments: Vec<Vec<f32>>,
    /// The best epoch so far: its loss and parameters.
    pub best: Option<(f64, Vec<f32>)>,
    /// Epochs without improvement.
    pub stale_epochs: u32,
    /// The loss that early stopping compares with.
    pub reference_loss: Option<f64>,
    /// One entry per finished epoch.
    pub history: Vec<EpochRecord>,
}

impl Checkpoint {
    /// Writes it, whole, over the one before.
    pub async fn save(&self, storage: &Storage, location: &Location) -> Result<(), LearnError> {
        let _ = (storage, location);
        unimplemented!()
    }

    /// The checkpoint there, or `None` if there is none or it belongs to something else.
    pub async fn load(storage: &Storage, location: &Location, identity: &str) -> Result<Option<Self>, LearnError> {
        let _ = (storage, location, identity);
        unimplemented!()
    }
}
