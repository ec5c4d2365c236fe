//! The driver: a run's life, from lease to commit, and its executors.
//!
//! ```text
//!   Run::open ── snapshot, run ID
//!   Run::execute
//!     finished before? ──▶ Unchanged
//!     target writable, table ours? lease ──▶ this attempt owns the run
//!     prepare ─▶ fit ─▶ train (fleet: one thread per executor) ─▶ embed ─▶ commit ─▶ record
//! ```
//!
//! What an attempt finishes it writes down; the next attempt goes on from there. Row data
//! never passes through the driver.

mod error;
mod explain;
mod fleet;
mod run;
mod stages;
mod stop;

pub use error::RunError;
pub use explain::{Explanation, explain};
pub use run::{EmptyInput, Outcome, Run, RunOptions, RunOutcome};
pub use stop::Stop;
