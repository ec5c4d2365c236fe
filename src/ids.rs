//! Newtypes for the numbers and names that must not be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// An executor's place in the fleet, `0..world_size`.
    Rank(u32)
);
number!(
    /// A partition of a data set, `0..count`; a rank owns several.
    PartitionId(u32)
);
number!(
    /// One exchange of gradients and one update, counted from 0 over all epochs.
    Step(u64)
);
number!(
    /// One formation of the fleet: a new one begins whenever an executor is lost or joins.
    Generation(u32)
);
number!(
    /// The n-th attempt at a run; a later attempt fences an earlier one.
    Attempt(u32)
);
number!(
    /// A committed version of an embedding table, from 1.
    Version(u64)
);

/// Names one run of a pipeline; a rerun with the same ID is a no-op or resumes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(String);

impl RunId {
    /// At most 128 characters of `A-Z a-z 0-9 . _ + : -`, not starting with a dot; `/` and
    /// blanks, which schedulers put into their IDs, become `_`. `None` for anything else.
    pub fn new(text: &str) -> Option<Self> {
        let text: String = text.chars().map(|c| if c == '/' || c == ' ' { '_' } else { c }).collect();
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._+:-".contains(c);
        let fits = !text.is_empty() && text.len() <= 128 && !text.starts_with('.') && text.chars().all(allowed);
        fits.then_some(Self(text))
    }

    /// The ID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// SHA-256 over a model's architecture, fitted features and weights, as 64 hex digits: two
/// embeddings can be compared only if their fingerprints are equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(pub String);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
