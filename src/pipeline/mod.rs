//! The pipeline file: from text to a checked plan. No I/O beyond the text itself.
//!
//! ```text
//!   text ──document──▶ tree with positions ──params──▶ values ──▶ PipelineSpec ──plan──▶ PipelinePlan
//!                 └───────────── every fault, with line and column, in one `Faults` ─────────────┘
//! ```

mod document;
mod faults;
mod plan;
mod schema;
pub mod spec;

pub use document::Origin;
pub use faults::{Fault, Faults};
pub use plan::{
    EmbeddingPlan, FeaturePlan, ModelPlan, NetPlan, Optimizer, PartitionPlan, PipelinePlan, RunPlan, SourcePlan,
    TrainPlan, TransformPlan,
};
pub use schema::json_schema;
