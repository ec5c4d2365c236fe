//! Safetensors files in memory: named arrays of numbers and one line of JSON about them.

use std::{borrow::Cow, collections::HashMap};

use safetensors::{Dtype, SafeTensors, View, serialize};
use serde::{Serialize, de::DeserializeOwned};

use super::LearnError;
use crate::storage::Location;

/// The one metadata key that we write: with several, their order, and so the file's bytes,
/// would differ from run to run.
const METADATA_KEY: &str = "emberflow";

/// A named array to write.
pub(super) struct Array<'a> {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Values<'a>,
}

/// Its numbers.
pub(super) enum Values<'a> {
    F32(Cow<'a, [f32]>),
    F64(Cow<'a, [f64]>),
}

/// A file's bytes. `what` is what it holds, for errors.
pub(super) fn write(what: &'static str, arrays: &[Array<'_>], about: &impl Serialize) -> Result<Vec<u8>, LearnError> {
    let about = serde_json::to_string(about).map_err(|error| LearnError::Encode { what, source: Box::new(error) })?;
    let metadata = HashMap::from([(METADATA_KEY.to_owned(), about)]);
    serialize(arrays.iter().map(|array| (&array.name, array)), Some(metadata))
        .map_err(|error| LearnError::Encode { what, source: Box::new(error) })
}

/// A file as read; errors name it.
pub(super) struct TensorFile<'a> {
    location: &'a Location,
    what: &'static str,
    bytes: &'a [u8],
    arrays: SafeTensors<'a>,
}

impl<'a> TensorFile<'a> {
    pub fn new(location: &'a Location, what: &'static str, bytes: &'a [u8]) -> Result<Self, LearnError> {
        let arrays = SafeTensors::deserialize(bytes).map_err(|error| unreadable(location, what, &error))?;
        Ok(Self { location, what, bytes, arrays })
    }

    /// The JSON about the arrays.
    pub fn about<T: DeserializeOwned>(&self) -> Result<T, LearnError> {
        let (_, metadata) = SafeTensors::read_metadata(self.bytes).map_err(|error| self.unreadable(&error))?;
        let about = metadata.metadata().as_ref().and_then(|metadata| metadata.get(METADATA_KEY));
        let about = about.ok_or_else(|| self.unreadable(&"it was not written by Emberflow"))?;
        serde_json::from_str(about).map_err(|error| self.unreadable(&error))
    }

    pub fn f32(&self, name: &str) -> Result<Vec<f32>, LearnError> {
        Ok(self.data(name, Dtype::F32)?.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    pub fn f64(&self, name: &str) -> Result<Vec<f64>, LearnError> {
        Ok(self.data(name, Dtype::F64)?.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
    }

    fn data(&self, name: &str, dtype: Dtype) -> Result<&'a [u8], LearnError> {
        let view = self.arrays.tensor(name).map_err(|error| self.unreadable(&error))?;
        if view.dtype() == dtype {
            Ok(view.data())
        } else {
            Err(self.unreadable(&format!("{name} is of type {:?}, not {dtype:?}", view.dtype())))
        }
    }

    pub fn unreadable(&self, reason: &dyn std::fmt::Display) -> LearnError {
        unreadable(self.location, self.what, reason)
    }
}

/// The file at `location` is not a readable `what`.
pub(super) fn unreadable(location: &Location, what: &'static str, reason: &dyn std::fmt::Display) -> LearnError {
    LearnError::Unreadable { location: location.clone(), what, reason: reason.to_string() }
}

impl View for &Array<'_> {
    fn dtype(&self) -> Dtype {
        match self.values {
            Values::F32(_) => Dtype::F32,
            Values::F64(_) => Dtype::F64,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(match &self.values {
            Values::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Values::F64(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        })
    }

    fn data_len(&self) -> usize {
        match &self.values {
            Values::F32(values) => size_of_val(&**values),
            Values::F64(values) => size_of_val(&**values),
        }
    }
}
