//! SQL over a store: embeddings, sources, runs.
//!
//! ```text
//!   open ──▶ session ── table named in a query ──▶ StoreSchema
//!                                                    ├─ manifest ──▶ VersionTable (exactly its files)
//!                                                    ├─ run record ──▶ source, as it is now
//!                                                    └─ runs, run_metrics, epochs, own tables and views
//! ```
//!
//! Nothing is opened until a query names it, so one broken table breaks no other query.

mod answer;
mod catalog;
mod error;
mod functions;
mod run_tables;
mod store_schema;
mod version_file;
mod version_table;

pub use answer::run;
pub use catalog::open;
pub use error::QueryError;
pub use functions::register_functions;
