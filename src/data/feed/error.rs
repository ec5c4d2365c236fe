//! Why a feed gave out.

use tokio::task::JoinError;

use crate::{
    ids::PartitionId,
    remedy::{Remedied, Remedy},
};

/// Why a feed gave out; none of these is the data's fault.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    /// Reading gave another number of rows than was planned.
    #[error("partition {partition}: {found} rows were read where {expected} were planned")]
    Lost {
        /// The partition.
        partition: PartitionId,
        /// Rows read.
        found: u64,
        /// Rows planned.
        expected: u64,
    },
    /// The task that assembles batches ended too early.
    #[error("the feed stopped with {left} batches to go")]
    Stopped {
        /// Batches not given.
        left: u64,
    },
    /// The task that decodes a partition ended without a result.
    #[error("partition {partition}: decoding stopped in mid-work")]
    Decode {
        /// The partition.
        partition: PartitionId,
        /// How it ended.
        #[source]
        source: JoinError,
    },
}

impl Remedied for FeedError {
    fn remedy(&self) -> Remedy {
        Remedy::ReportBug
    }
}
