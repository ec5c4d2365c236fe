//! A trained model as it is saved: `model.safetensors` (weights that PyTorch loads) and
//! `model.json` (shape, features, fingerprint).

use super::LearnError;
use crate::{
    data::FittedFeatures,
    ids::Fingerprint,
    pipeline::{NetPlan, spec::Loss},
    storage::{Location, Storage},
};

/// A network's shape with its input width.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NetShape {
    /// Features of a row.
    pub features: usize,
    /// The layers.
    pub net: NetPlan,
}

impl NetShape {
    /// How many numbers are trained.
    pub fn parameters(&self) -> usize {
        unimplemented!()
    }
}

/// A trained model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its name in the pipeline file.
    pub name: String,
    /// Its shape.
    pub shape: NetShape,
    /// What was minimised.
    pub loss: Loss,
    /// How rows become numbers.
    pub features: FittedFeatures,
    /// Flat parameters.
    pub parameters: Vec<f32>,
}

impl Model {
    /// SHA-256 over shape, features and weights.
    pub fn fingerprint(&self) -> Fingerprint {
        unimplemented!()
    }

    /// Saves it at `<store>/models/<name>/<fingerprint>/` and gives that folder; saving the same model again changes nothing.
    pub async fn save(&self, storage: &Storage, store: &Location) -> Result<Location, LearnError> {
        let _ = (storage, store);
        unimplemented!()
    }

    /// Loads the model saved in a folder; fails if weights and fingerprint disagree.
    pub async fn load(storage: &Storage, folder: &Location) -> Result<Self, LearnError> {
        let _ = (storage, folder);
        unimplemented!()
    }
}
