//! The driver: a run's life, from lease to commit, and its executors.
//!
//! ```text
//!   Run::open ── snapshot, run ID
//!   Run::execute
//!     finished before? ──▶ Unchanged
//!     target writable, table ours? lease ──▶ this attempt owns the run
//!     prepare ─▶ fit ─▶ train (fleet: threads, or processes) ─▶ embed ─▶ commit ─▶ record
//! ```
//!
//! What an attempt finishes it writes down; the next attempt goes on from there. Row data
//! never passes through the driver.

mod aside;
mod choose;
mod cost;
mod error;
mod executor;
mod explain;
mod fleet;
mod link;
mod protocol;
mod run;
mod simulate;
mod stages;
mod stop;
mod training;
mod verify;

pub use aside::Aside;
pub use error::RunError;
pub use executor::execute;
pub use explain::{Explanation, explain};
pub use fleet::executor_security;
pub use run::{EmptyInput, Outcome, Run, RunOptions, RunOutcome};
pub use simulate::{CheckedFleet, Link, SimulateOptions, SimulatedModel, SimulatedWay, Simulation, simulate};
pub use stop::Stop;
pub use verify::{Verification, VerifiedModel, VerifiedStrategy, verify};
