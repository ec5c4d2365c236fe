//! From files to counted f32 rows.
//!
//! ```text
//!   files ──scan──▶ DataFusion tables ──prepare──▶ Dataset (Parquet, row groups known)
//!                                                   │ features: fitted once over all rows
//!                                                   │ partition: row ranges dealt by rule and seed
//!                                                   ▼
//!                                                  feed ──▶ one f32 batch per step and rank
//! ```
//!
//! A data set's rows have a fixed order: files in their order, row groups in theirs. A row's
//! place in it is its identity; partition, hold-out and shuffle are functions of that and the seed.

mod csv;
mod error;
mod features;
mod feed;
mod file;
mod hive;
mod in_order;
mod ipc;
mod parquet;
mod partition;
mod prepare;
mod read;
mod scan;
mod schema;
mod shuffle;
mod source;
mod spark_hash;
mod stage;

pub use error::DataError;
pub use features::{FeatureError, FeatureLayout, FittedFeatures, fit};
pub use feed::{Batch, EpochFeed, Feed, FeedError, FeedPlan};
pub use partition::{Partition, Partitions, Split, StepPlan, balance, consecutive, deal, is_held_out, owned};
pub use prepare::{DataFile, Dataset, DatasetFiles, Needs, RowGroup, in_place, prepare};
pub use read::{Rows, all_splits, read};
pub use scan::{Engine, Snapshot, open_source};
pub use source::source_format;
pub use spark_hash::spark_hash_udf;
