//! The pipeline file: from text to a checked plan. No I/O beyond the text itself.
//!
//! ```text
//!   text ──document──▶ tree with positions ──params──▶ values ──▶ PipelineSpec ──plan──▶ PipelinePlan
//!                 └───────────── every fault, with line and column, in one `Faults` ─────────────┘
//! ```

mod check;
mod decode;
mod document;
mod faults;
mod params;
mod plan;
mod schema;
pub mod spec;
mod sql;

pub use document::Origin;
pub use faults::{Fault, Faults, SqlFile, did_you_mean};
pub use plan::{
    EmbeddingPlan, FeaturePlan, ModelPlan, NetPlan, Optimizer, PartitionPlan, PipelinePlan, RunPlan, SourcePlan,
    TrainPlan, TransformPlan,
};
pub use schema::json_schema;
