//! Everything that a run needs to go on bit for bit, in one file that is replaced atomically.
//!
//! The file is in the safetensors format. Numbers that must come back with the same bits stand
//! in arrays; the header holds only text and integers.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::{
    Communicator, LearnError,
    tensor_file::{self, Array, TensorFile, Values},
};
use crate::{
    ids::Rank,
    pipeline::spec::Keep,
    runs::EpochRecord,
    storage::{Location, Storage, StorageError},
};

/// The state between two steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// What it belongs to: spec hash, snapshot and model; another file's checkpoint is refused.
    pub identity: String,
    /// The epoch to go on with, from 0.
    pub epoch: u32,
    /// The step to go on with within the epoch, from 0.
    pub step: u64,
    /// Updates made so far, over all epochs.
    pub updates: u64,
    /// Sum of the losses (over rows, mean over features) of the epoch so far.
    pub epoch_loss: f64,
    /// Rows of the epoch so far.
    pub epoch_rows: u64,
    /// Seconds spent on the epoch so far.
    pub epoch_elapsed_s: f64,
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

/// The file's header.
#[derive(Serialize, Deserialize)]
struct Header {
    identity: String,
    epoch: u32,
    step: u64,
    updates: u64,
    epoch_rows: u64,
    moments: usize,
    stale_epochs: u32,
}

/// Numbers of a state besides its buffers and history.
const HEAD: usize = 10;

/// Numbers of one finished epoch in the `history` array.
const RECORD: usize = 6;

impl Checkpoint {
    /// The parameters that become the model.
    pub fn kept(&self, keep: Keep) -> &[f32] {
        match &self.best {
            Some((_, best)) if keep == Keep::Best => best,
            _ => &self.parameters,
        }
    }

    /// Makes every rank's state that of rank `source`; the buffers' sizes must agree already.
    pub(super) fn share(&mut self, comm: &mut dyn Communicator, source: Rank) -> Result<(), LearnError> {
        if comm.world_size() == 1 {
            return Ok(());
        }
        let mine = comm.rank() == source;
        let mut head = if mine { self.numbers() } else { vec![0.0; HEAD] };
        comm.all_reduce_sum_f64(&mut head)?;
        let mut history = vec![0.0; head[HEAD - 1] as usize * RECORD];
        if mine {
            history = self.history.iter().flat_map(numbers).collect();
        }
        comm.all_reduce_sum_f64(&mut history)?;
        self.take_numbers(&head, &history);
        comm.broadcast(source, &mut self.parameters)?;
        for moment in &mut self.moments {
            comm.broadcast(source, moment)?;
        }
        if let Some((_, best)) = &mut self.best {
            best.resize(self.parameters.len(), 0.0);
            comm.broadcast(source, best)?;
        }
        Ok(())
    }

    /// All but the buffers, as numbers.
    fn numbers(&self) -> Vec<f64> {
        let best = self.best.as_ref().map(|(loss, _)| *loss);
        vec![
            f64::from(self.epoch),
            self.step as f64,
            self.updates as f64,
            self.epoch_loss,
            self.epoch_rows as f64,
            self.epoch_elapsed_s,
            best.unwrap_or(f64::NAN),
            f64::from(self.stale_epochs),
            self.reference_loss.unwrap_or(f64::NAN),
            self.history.len() as f64,
        ]
    }

    fn take_numbers(&mut self, head: &[f64], history: &[f64]) {
        let [epoch, step, updates, epoch_loss, epoch_rows, epoch_elapsed_s, best, stale_epochs, reference_loss, _] =
            head
        else {
            return;
        };
        let some = |number: &f64| Some(*number).filter(|number| !number.is_nan());
        self.epoch = *epoch as u32;
        self.step = *step as u64;
        self.updates = *updates as u64;
        self.epoch_loss = *epoch_loss;
        self.epoch_rows = *epoch_rows as u64;
        self.epoch_elapsed_s = *epoch_elapsed_s;
        let parameters = self.best.take().map(|(_, parameters)| parameters).unwrap_or_default();
        self.best = some(best).map(|loss| (loss, parameters));
        self.stale_epochs = *stale_epochs as u32;
        self.reference_loss = some(reference_loss);
        self.history = history.as_chunks().0.iter().map(record).collect();
    }

    /// Writes it, whole, over the one before.
    pub async fn save(&self, storage: &Storage, location: &Location) -> Result<(), LearnError> {
        Ok(storage.replace(location, self.to_bytes()?.into()).await?)
    }

    /// The checkpoint there, or `None` if there is none or it belongs to something else.
    pub async fn load(storage: &Storage, location: &Location, identity: &str) -> Result<Option<Self>, LearnError> {
        match storage.read(location).await {
            Ok(bytes) => Self::from_bytes(location, &bytes, identity),
            Err(StorageError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn to_bytes(&self) -> Result<Vec<u8>, LearnError> {
        let header = Header {
            identity: self.identity.clone(),
            epoch: self.epoch,
            step: self.step,
            updates: self.updates,
            epoch_rows: self.epoch_rows,
            moments: self.moments.len(),
            stale_epochs: self.stale_epochs,
        };
        let mut arrays = vec![f32_array("parameters".to_owned(), &self.parameters)];
        let moments = self.moments.iter().enumerate();
        arrays.extend(moments.map(|(index, moment)| f32_array(moment_name(index), moment)));
        arrays.extend(self.best.iter().map(|(_, parameters)| f32_array("best".to_owned(), parameters)));
        // Losses are finite, or training would have ended: NaN is free to mean none.
        let best_loss = self.best.as_ref().map_or(f64::NAN, |(loss, _)| *loss);
        let reference_loss = self.reference_loss.unwrap_or(f64::NAN);
        let losses = vec![self.epoch_loss, self.epoch_elapsed_s, best_loss, reference_loss];
        arrays.push(f64_array("losses", losses, vec![4]));
        let history = self.history.iter().flat_map(numbers).collect();
        arrays.push(f64_array("history", history, vec![self.history.len(), RECORD]));
        tensor_file::write("checkpoint", &arrays, &header)
    }

    fn from_bytes(location: &Location, bytes: &[u8], identity: &str) -> Result<Option<Self>, LearnError> {
        let file = TensorFile::new(location, "checkpoint", bytes)?;
        let header: Header = file.about()?;
        if header.identity != identity {
            return Ok(None);
        }
        let [epoch_loss, epoch_elapsed_s, best_loss, reference_loss] = file.f64("losses")?[..] else {
            return Err(file.unreadable(&"`losses` are not four"));
        };
        let some = |number: f64| Some(number).filter(|number| !number.is_nan());
        Ok(Some(Self {
            identity: header.identity,
            epoch: header.epoch,
            step: header.step,
            updates: header.updates,
            epoch_loss,
            epoch_rows: header.epoch_rows,
            epoch_elapsed_s,
            parameters: file.f32("parameters")?,
            moments: (0..header.moments).map(|index| file.f32(&moment_name(index))).collect::<Result<_, _>>()?,
            best: some(best_loss).map(|loss| Ok::<_, LearnError>((loss, file.f32("best")?))).transpose()?,
            stale_epochs: header.stale_epochs,
            reference_loss: some(reference_loss),
            history: file.f64("history")?.as_chunks().0.iter().map(record).collect(),
        }))
    }
}

fn moment_name(index: usize) -> String {
    format!("moment.{index}")
}

fn f32_array(name: String, values: &[f32]) -> Array<'_> {
    Array { name, shape: vec![values.len()], values: Values::F32(Cow::Borrowed(values)) }
}

fn f64_array(name: &str, values: Vec<f64>, shape: Vec<usize>) -> Array<'static> {
    Array { name: name.to_owned(), shape, values: Values::F64(Cow::Owned(values)) }
}

fn numbers(record: &EpochRecord) -> [f64; RECORD] {
    let EpochRecord { epoch, loss, held_out_loss, learning_rate, rows, elapsed_s } = record;
    [f64::from(*epoch), *loss, held_out_loss.unwrap_or(f64::NAN), *learning_rate, *rows as f64, *elapsed_s]
}

fn record([epoch, loss, held_out_loss, learning_rate, rows, elapsed_s]: &[f64; RECORD]) -> EpochRecord {
    EpochRecord {
        epoch: *epoch as u32,
        loss: *loss,
        held_out_loss: Some(*held_out_loss).filter(|loss| !loss.is_nan()),
        learning_rate: *learning_rate,
        rows: *rows as u64,
        elapsed_s: *elapsed_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> Checkpoint {
        let epoch = |epoch, held_out_loss| EpochRecord {
            epoch,
            loss: 0.1 + 0.2,
            held_out_loss,
            learning_rate: 1e-3 / 3.0,
            rows: 1 << 40,
            elapsed_s: std::f64::consts::PI,
        };
        Checkpoint {
            identity: "a/b \"c\"".to_owned(),
            epoch: 2,
            step: 7,
            updates: u64::MAX,
            epoch_loss: 1.0 / 3.0,
            epoch_rows: 1792,
            epoch_elapsed_s: 0.1,
            parameters: vec![0.1, -0.0, f32::MIN_POSITIVE / 2.0, f32::MAX],
            moments: vec![vec![1e-30; 4], vec![0.3; 4]],
            best: Some((0.7, vec![1.0; 4])),
            stale_epochs: 1,
            reference_loss: Some(0.7),
            history: vec![epoch(1, None), epoch(2, Some(0.7))],
        }
    }

    #[test]
    fn it_comes_back_bit_for_bit() {
        let location = Location::parse("memory:///checkpoint", std::path::Path::new("/")).unwrap();
        let check = |checkpoint: Checkpoint| {
            let bytes = checkpoint.to_bytes().unwrap();
            assert_eq!(bytes, checkpoint.to_bytes().unwrap(), "the same state has the same bytes");
            let again = Checkpoint::from_bytes(&location, &bytes, &checkpoint.identity).unwrap().unwrap();
            let bits = |checkpoint: &Checkpoint| checkpoint.parameters.iter().map(|p| p.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&again), bits(&checkpoint));
            assert_eq!(again, checkpoint);
            assert_eq!(Checkpoint::from_bytes(&location, &bytes, "another").unwrap(), None);
            for cut in [0, 8, bytes.len() / 2, bytes.len() - 1] {
                let error = Checkpoint::from_bytes(&location, &bytes[..cut], "another").unwrap_err();
                assert!(error.to_string().contains("not a readable checkpoint"), "{error}");
            }
        };
        check(checkpoint());
        check(Checkpoint {
            best: None,
            reference_loss: None,
            history: Vec::new(),
            moments: Vec::new(),
            ..checkpoint()
        });
    }
}
