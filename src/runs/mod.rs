//! Runs as they stand on storage, next to their output, so that a retry on another machine
//! finds them.
//!
//! ```text
//!   <store>/embeddings/<table>/v000001/part-00000.parquet, _SUCCESS
//!   <store>/embeddings/<table>/_manifests/000001.json     the highest is the latest version
//!   <store>/models/<model>/<fingerprint>/model.safetensors, model.json
//!   <store>/_runs/<run-id>/record.json                    `RunRecord`
//!   <store>/_runs/<run-id>/snapshot.json                  the input files as first listed
//!   <store>/_runs/<run-id>/attempts/000001.json           who owns the run: the highest
//!   <store>/_runs/<run-id>/lease.json                     rewritten while the owner lives
//!   <store>/_runs/<run-id>/work/                          checkpoints, staged rows; gone at the end
//! ```

mod error;
mod lease;
mod record;

pub use error::RunsError;
pub use lease::{Fence, Lease, Owner, host_name};
pub use record::{
    DecisionRecord, EmbeddingRecord, EpochRecord, ErrorRecord, ExpectedSpeed, ModelRecord, RankRecord, RunRecord,
    RunStatus, SourceRecord, list_runs, read_run, run_folder, write_run,
};
