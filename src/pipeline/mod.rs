//! The pipeline file: from text to a checked plan. No I/O beyond the text itself.
//!
//! ```text
//!   text ──document──▶ tree with positions ──params──▶ values ──decode──▶ PipelineSpec ──check──▶ PipelinePlan
//!                 └────────────────── every fault, with line and column, in one `Faults` ──────────────┘
//! ```
//!
//! Each step goes on behind a fault as far as that makes sense, and reports no consequence of
//! a fault that it has reported already.

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
pub use faults::{Elsewhere, Fault, Faults, SqlFile, did_you_mean};
pub use plan::{
    EmbeddingPlan, FeaturePlan, ModelPlan, NetPlan, Optimizer, PartitionPlan, PipelinePlan, RunPlan, SourcePlan,
    TrainPlan, TransformPlan,
};
pub use schema::json_schema;
