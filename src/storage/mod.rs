//! Where bytes are: local files, HDFS, S3, memory, behind one registry.
//!
//! ```text
//!   Location ──▶ Storage (registry) ──▶ Bounded (deadlines, retries) ──▶ file | hdfs | s3 | memory
//! ```
//!
//! Every call has a deadline and a bounded number of tries; hidden and temporary files are
//! never data; what is published appears whole or not at all.

mod bounded;
mod error;
mod hdfs;
mod listing;
mod local;
mod location;
mod registry;

pub use error::StorageError;
pub use hdfs::HdfsStore;
pub use location::Location;
pub use registry::{FileEntry, Storage};
