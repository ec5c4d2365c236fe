//! SQL over a store: embeddings, sources, runs.

mod catalog;
mod functions;

pub use catalog::{QueryError, open};
pub use functions::register_functions;
