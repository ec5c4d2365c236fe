//! Faults of a pipeline file, all together, each with line, column, excerpt and fix.

use std::{fmt, ops::Range, sync::Arc};

use crate::remedy::{Remedied, Remedy};

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong, in one line.
    pub message: String,
    /// Bytes of the file to mark; empty where the file as a whole is meant.
    pub span: Range<usize>,
    /// The way out, if there is one to name.
    pub help: Option<String>,
}

/// All faults of one file; `Display` gives them with marked excerpts.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The file's path, as the user wrote it.
    pub file: String,
    /// The file's text; empty if it could not be read.
    pub text: Arc<str>,
    /// At least one, in the order of the file.
    pub faults: Vec<Fault>,
}

impl fmt::Display for Faults {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        unimplemented!()
    }
}

impl std::error::Error for Faults {}

impl Remedied for Faults {
    fn remedy(&self) -> Remedy {
        Remedy::FixFile
    }
}
