//! Encoded rows as versioned Parquet tables.
//!
//! ```text
//!   Dataset ──features──▶ Step::encode ──▶ <work>/embed/<table>/part-*.parquet (aside)
//!                                              │ rename
//!   <store>/embeddings/<table>/v000007/  ◀─────┘   then _manifests/000007.json: published
//! ```

mod commit;
mod cut;
mod encoder;
mod error;
mod manifest;
mod write;

pub use commit::{check_target, commit, prune};
pub use error::EmbedError;
pub use manifest::{Manifest, ManifestFile, latest_manifest, list_manifests, list_tables, read_manifest};
pub use write::{EmbedJob, Embedder, Written, WrittenPart, embed, gather, parts};

/// The Parquet and Arrow metadata key (file level, and on the embedding field) that holds the
/// model's fingerprint.
pub const FINGERPRINT_KEY: &str = "emberflow.fingerprint";

/// The vector column.
pub const EMBEDDING_COLUMN: &str = "embedding";

/// The reconstruction error's column.
pub const ERROR_COLUMN: &str = "reconstruction_error";
