//! Why training failed.

use super::comm::CommError;
use crate::{
    data::DataError,
    ids::Rank,
    pipeline::spec::DeviceKind,
    remedy::{Remedied, Remedy},
    runs::RunsError,
    storage::{Location, StorageError},
};

/// Why training failed.
#[derive(Debug, thiserror::Error)]
pub enum LearnError {
    /// The rows could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A rank did not answer.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A checkpoint or model could not be read or written.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Another attempt owns the run.
    #[error(transparent)]
    Runs(#[from] RunsError),
    /// A checkpoint or model is there, but is not what was written.
    #[error("{location}: not a readable {what}: {reason}; remove it and run again")]
    Unreadable {
        /// The file.
        location: Location,
        /// `checkpoint` or `model`.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A checkpoint or model could not be turned into bytes.
    #[error("could not encode a {what}")]
    Encode {
        /// `checkpoint` or `model`.
        what: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// This build cannot use the kind of device.
    #[error("this build has no {} support; build with `--features {}`, or set `device: cpu`", label(*kind), feature(*kind))]
    NotBuilt {
        /// The kind.
        kind: DeviceKind,
    },
    /// The machine has too few devices.
    #[error("{}", missing(*kind, *found, *wanted))]
    NoDevice {
        /// The kind.
        kind: DeviceKind,
        /// How many there are.
        found: usize,
        /// How many are needed: one per executor.
        wanted: u32,
    },
    /// A device failed at work.
    #[error("the device failed")]
    Device {
        /// What it says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The ranks together did not get the rows that were planned.
    #[error("epoch {epoch}, step {step}: {got} rows arrived, and {expected} were planned")]
    Rows {
        /// From 1.
        epoch: u32,
        /// Within the epoch, from 1.
        step: u64,
        /// What came.
        got: u64,
        /// What was to come.
        expected: u64,
    },
    /// Every row is held out.
    #[error("all {held_out} rows are held out and none is left to train on; lower `validation`, or use more rows")]
    NoRows {
        /// Rows held out.
        held_out: u64,
    },
    /// More executors than a spread model has parts for.
    #[error(
        "model `{model}` has more executors than {parts}, {executors} for {most}; set `executors: {most}`, or use \
         `spread: data`"
    )]
    TooManyExecutors {
        /// The model.
        model: String,
        /// `layers` or `slices`.
        parts: &'static str,
        /// How many there are.
        most: u32,
        /// Executors of the run.
        executors: u32,
    },
    /// A feature outside 0..1 under cross-entropy.
    #[error(
        "feature {feature} is {value}, and `loss: binary_cross_entropy` needs 0 to 1; scale it (`scale: min_max`), or \
         use `loss: mse`"
    )]
    BeyondCrossEntropy {
        /// The feature.
        feature: String,
        /// Its value, scaled.
        value: f32,
    },
    /// The loss or a gradient is not finite.
    #[error("rank {rank}, epoch {epoch}, step {step}: the loss is not finite{}{blame}", if blame.is_empty() { "" } else { "; " })]
    NotFinite {
        /// Where it showed first.
        rank: Rank,
        /// From 1.
        epoch: u32,
        /// Within the epoch, from 1.
        step: u64,
        /// Feature columns to blame, or what else to look at; empty on the ranks that only
        /// heard of it.
        blame: String,
    },
    /// Left, so that the fleet can form anew.
    #[error("the fleet forms anew")]
    Regroup,
    /// Told to stop; a checkpoint is on storage.
    #[error("stopped on request; the same command resumes")]
    Interrupted,
}

fn label(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "CPU",
        DeviceKind::Wgpu => "wgpu",
        DeviceKind::Cuda => "CUDA",
    }
}

fn feature(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "default",
        DeviceKind::Wgpu => "wgpu",
        DeviceKind::Cuda => "cuda",
    }
}

fn missing(kind: DeviceKind, found: usize, wanted: u32) -> String {
    let label = label(kind);
    match found {
        0 => format!("no {label} device found; set `device: cpu`"),
        _ => format!("{found} {label} devices found for {wanted} executors; set `executors: {found}` or `device: cpu`"),
    }
}

impl Remedied for LearnError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Data(error) => error.remedy(),
            Self::Comm(error) => error.remedy(),
            Self::Storage(error) => error.remedy(),
            Self::Runs(error) => error.remedy(),
            Self::Unreadable { .. } => Remedy::CheckStorage,
            Self::NotBuilt { .. }
            | Self::NoDevice { .. }
            | Self::NoRows { .. }
            | Self::TooManyExecutors { .. }
            | Self::BeyondCrossEntropy { .. } => Remedy::FixFile,
            Self::NotFinite { .. } => Remedy::FixData,
            Self::Regroup => Remedy::TryAgain,
            Self::Interrupted => Remedy::Interrupted,
            Self::Encode { .. } | Self::Device { .. } | Self::Rows { .. } => Remedy::ReportBug,
        }
    }
}
