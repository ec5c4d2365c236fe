//! What the reader of an error can do about it.
//!
//! Every error type of the crate answers [`Remedied::remedy`]; the command line turns the
//! answer into its exit code and events into `retryable`.

use std::error::Error;

use serde::{Deserialize, Serialize};

/// The one thing that would make the failed command succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Remedy {
    /// The command line is wrong.
    FixCommand,
    /// The pipeline file or a site setting is wrong.
    FixFile,
    /// The input rows or files are wrong.
    FixData,
    /// The output cannot be created: no space, read-only, quota.
    FixTarget,
    /// The caller may not read or write there.
    AskPermission,
    /// A service is away or busy; the same command may succeed later.
    TryAgain,
    /// Reading or writing failed for a reason that a retry may not mend.
    CheckStorage,
    /// There was nothing to do, and the caller asked to be told so.
    NothingToDo,
    /// The run was told to stop and did.
    Interrupted,
    /// The fault is ours.
    ReportBug,
}

impl Remedy {
    /// The exit code of a command that ends so (sysexits; docs/exit-codes.md). That of an
    /// interrupted command is SIGTERM's; `cluster::Stop` knows whether it was another signal.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::FixCommand => 64,
            Self::FixData => 65,
            Self::ReportBug => 70,
            Self::FixTarget => 73,
            Self::CheckStorage => 74,
            Self::TryAgain => 75,
            Self::AskPermission => 77,
            Self::FixFile => 78,
            Self::NothingToDo => 99,
            Self::Interrupted => 143,
        }
    }

    /// Whether the same command, unchanged, may succeed later.
    pub fn retryable(self) -> bool {
        matches!(self, Self::TryAgain | Self::Interrupted)
    }
}

/// Implemented by every error type of the crate.
pub trait Remedied: std::error::Error {
    /// What the reader can do.
    fn remedy(&self) -> Remedy;
}

/// What an error and its causes say, one text each.
pub fn causes(error: &dyn Error) -> Vec<String> {
    let mut told = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        // Some libraries repeat their cause in their own message.
        if told.last().is_some_and(|last| !last.contains(&message)) {
            told.push(message);
        }
        cause = error.source();
    }
    told
}
