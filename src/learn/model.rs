//! A trained model as it is saved: `model.safetensors` (weights that PyTorch loads) and
//! `model.json` (shape, features, fingerprint), written last.
//!
//! The weights' names are those of `encoder = nn.Sequential(Linear, activation, Linear, ..)` and
//! `decoder` likewise: `encoder.0.weight` `[outputs, inputs]`, `encoder.0.bias`,
//! `encoder.2.weight` and so on. Tied decoder weights are written out too, so that they load
//! alike.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    LearnError, NetShape,
    shape::{Linear, Weight},
    tensor_file::{self, Array, TensorFile, Values, unreadable},
};
use crate::{
    data::FittedFeatures,
    ids::Fingerprint,
    pipeline::spec::Loss,
    storage::{Location, Storage, StorageError},
};

const WEIGHTS_FILE: &str = "model.safetensors";
const DESCRIPTION_FILE: &str = "model.json";

/// Version of both files' format.
const FORMAT: u32 = 1;

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

/// `model.json`.
#[derive(Serialize, Deserialize)]
struct Description {
    format: u32,
    name: String,
    fingerprint: Fingerprint,
    shape: NetShape,
    loss: Loss,
    features: FittedFeatures,
}

/// What the weights' file says of itself.
#[derive(Serialize)]
struct About<'a> {
    format: u32,
    fingerprint: &'a Fingerprint,
    /// Decoder weights are the encoder's, transposed.
    tied_weights: bool,
}

impl Model {
    /// SHA-256 over shape, loss, features (as JSON with sorted keys) and weights (little-endian,
    /// in flat order). The name is left out: it does not change the vectors.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut meaning = serde_json::json!({ "shape": self.shape, "loss": self.loss, "features": self.features });
        meaning.sort_all_objects();
        let mut hash = Sha256::new();
        hash.update(meaning.to_string());
        for parameter in &self.parameters {
            hash.update(parameter.to_le_bytes());
        }
        Fingerprint(format!("{:x}", hash.finalize()))
    }

    /// Saves it at `<store>/models/<name>/<fingerprint>/` and gives that folder; saving the same model again changes nothing.
    pub async fn save(&self, storage: &Storage, store: &Location) -> Result<Location, LearnError> {
        let fingerprint = self.fingerprint();
        let folder = store.join(&format!("models/{}/{fingerprint}", self.name));
        let about = About { format: FORMAT, fingerprint: &fingerprint, tied_weights: self.shape.net.tied_weights };
        let weights = tensor_file::write("model", &self.arrays(), &about)?;
        create(storage, &folder.join(WEIGHTS_FILE), weights).await?;

        let description = Description {
            format: FORMAT,
            name: self.name.clone(),
            fingerprint,
            shape: self.shape.clone(),
            loss: self.loss,
            features: self.features.clone(),
        };
        let description = serde_json::to_vec_pretty(&description)
            .map_err(|error| LearnError::Encode { what: "model", source: Box::new(error) })?;
        create(storage, &folder.join(DESCRIPTION_FILE), description).await?;
        Ok(folder)
    }

    /// Loads the model saved in a folder; fails if weights and fingerprint disagree.
    pub async fn load(storage: &Storage, folder: &Location) -> Result<Self, LearnError> {
        let location = folder.join(DESCRIPTION_FILE);
        let description = storage.read(&location).await?;
        let description: Description =
            serde_json::from_slice(&description).map_err(|error| unreadable(&location, "model", &error))?;
        if description.format != FORMAT {
            let reason = format!("its format is {}, and this version reads {FORMAT}", description.format);
            return Err(unreadable(&location, "model", &reason));
        }
        let Description { name, fingerprint, shape, loss, features, .. } = description;

        let location = folder.join(WEIGHTS_FILE);
        let bytes = storage.read(&location).await?;
        let file = TensorFile::new(&location, "model", &bytes)?;
        let mut parameters = Vec::with_capacity(shape.parameters());
        for (module, layer) in modules(&shape) {
            if let Weight::Own(_) = layer.weight {
                parameters.extend(file.f32(&format!("{module}.weight"))?);
            }
            parameters.extend(file.f32(&format!("{module}.bias"))?);
        }
        let model = Self { name, shape, loss, features, parameters };
        if model.fingerprint() == fingerprint {
            Ok(model)
        } else {
            Err(file.unreadable(&"its weights do not match the fingerprint in model.json"))
        }
    }

    fn arrays(&self) -> Vec<Array<'_>> {
        let layers = self.shape.layers();
        let mut arrays = Vec::with_capacity(2 * layers.len());
        for (module, layer) in modules(&self.shape) {
            let weight = match &layer.weight {
                Weight::Own(range) => Cow::Borrowed(&self.parameters[range.clone()]),
                Weight::Tied(other) => Cow::Owned(self.transposed(&layers[*other])),
            };
            arrays.push(Array {
                name: format!("{module}.weight"),
                shape: vec![layer.outputs, layer.inputs],
                values: Values::F32(weight),
            });
            arrays.push(Array {
                name: format!("{module}.bias"),
                shape: vec![layer.outputs],
                values: Values::F32(Cow::Borrowed(&self.parameters[layer.bias])),
            });
        }
        arrays
    }

    /// A layer's own weight as `[inputs, outputs]`.
    fn transposed(&self, layer: &Linear) -> Vec<f32> {
        let Weight::Own(range) = &layer.weight else { return Vec::new() };
        let weight = &self.parameters[range.clone()];
        let inputs = 0..layer.inputs;
        inputs.flat_map(|input| (0..layer.outputs).map(move |output| weight[output * layer.inputs + input])).collect()
    }
}

/// Each layer with its name in PyTorch: activations take the odd places.
fn modules(shape: &NetShape) -> impl Iterator<Item = (String, Linear)> {
    let layers = shape.layers();
    let depth = layers.len() / 2;
    layers.into_iter().enumerate().map(move |(index, layer)| {
        let side = if index < depth { "encoder" } else { "decoder" };
        (format!("{side}.{}", 2 * (index % depth)), layer)
    })
}

/// Creates a file whose content its place determines: one that is there is the same.
async fn create(storage: &Storage, location: &Location, content: Vec<u8>) -> Result<(), LearnError> {
    match storage.create(location, content.into()).await {
        Ok(()) | Err(StorageError::AlreadyExists(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
