//! Why a run failed.

use crate::{
    data::DataError,
    embed::EmbedError,
    ids::{Rank, RunId},
    learn::LearnError,
    pipeline::Faults,
    remedy::{Remedied, Remedy},
    runs::RunsError,
    storage::StorageError,
    telemetry::Ledger,
    wire::WireError,
};

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The pipeline file does not fit the data.
    #[error(transparent)]
    Faults(#[from] Faults),
    /// A store failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The run's state could not be read, written or owned.
    #[error(transparent)]
    Runs(#[from] RunsError),
    /// The rows could not be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Training failed.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// Embeddings could not be written.
    #[error(transparent)]
    Embed(Box<EmbedError>),
    /// The run ID stands for something else.
    #[error(
        "run {run_id} was made from another version of the pipeline file or its parameters; \
         choose another --run-id, or start it anew with --fresh"
    )]
    OtherPipeline {
        /// The run.
        run_id: RunId,
    },
    /// There are no rows.
    #[error("{table} has no rows; --empty skip or --empty ok lets such a run end without a result")]
    Empty {
        /// The source or transform.
        table: String,
    },
    /// Rows are unaccounted for.
    #[error("the rows of {} do not balance: {ledger:?}", ledger.name)]
    Unbalanced {
        /// What was counted.
        ledger: Box<Ledger>,
    },
    /// An executor ended without a result.
    #[error("executor {rank} panicked")]
    Panicked {
        /// Which one.
        rank: Rank,
    },
    /// An executor process failed.
    #[error("{message}")]
    Executor {
        /// Causes included.
        message: String,
        /// What the executor says can be done.
        remedy: Remedy,
    },
    /// Too few executors are left, or have come.
    #[error(
        "{found} executors are there and {needed} are needed (`min_executors`); what was done is kept, the same command \
         resumes"
    )]
    TooFewExecutors {
        /// Those that are there.
        found: usize,
        /// Those that are needed.
        needed: usize,
    },
    /// An executor process could not be started.
    #[error("an executor process could not be started")]
    Launch {
        /// What the system says.
        source: std::io::Error,
    },
    /// Driver and executor could not speak.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Driver and executor do not understand each other.
    #[error("driver and executor disagree: {what}")]
    Protocol {
        /// About what.
        what: &'static str,
    },
    /// A background thread could not be started or ended without a result.
    #[error("a thread could not be run")]
    Thread(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Told to stop; what was done is kept.
    #[error("stopped on request; the same command resumes")]
    Interrupted,
}

impl From<EmbedError> for RunError {
    fn from(error: EmbedError) -> Self {
        Self::Embed(Box::new(error))
    }
}

impl Remedied for RunError {
    fn remedy(&self) -> Remedy {
        match self {
            Self::Faults(error) => error.remedy(),
            Self::Storage(error) => error.remedy(),
            Self::Runs(error) => error.remedy(),
            Self::Data(error) => error.remedy(),
            Self::Learn(error) => error.remedy(),
            Self::Embed(error) => error.remedy(),
            Self::Executor { remedy, .. } => *remedy,
            Self::TooFewExecutors { .. } | Self::Launch { .. } => Remedy::TryAgain,
            Self::Wire(error) => error.remedy(),
            Self::OtherPipeline { .. } => Remedy::FixFile,
            Self::Empty { .. } => Remedy::FixData,
            Self::Unbalanced { .. } | Self::Panicked { .. } | Self::Thread(_) | Self::Protocol { .. } => {
                Remedy::ReportBug
            }
            Self::Interrupted => Remedy::Interrupted,
        }
    }
}
