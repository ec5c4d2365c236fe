//! `emberflow schema`.

use super::{Failure, output};
use crate::pipeline;

/// Prints the JSON Schema of pipeline files.
pub(super) fn run() -> Result<u8, Failure> {
    output::print_json(&pipeline::json_schema())?;
    Ok(0)
}
