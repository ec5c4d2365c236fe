//! The one integration-test binary; a module per room.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, missing_docs)]

mod bad_input;
mod cli;
mod command;
mod data;
mod data_feed;
mod embed;
mod explain;
mod hdfs;
mod hdfs_cluster;
mod learn;
mod pipeline;
mod query;
mod run;
mod server;
mod storage;
mod strategies;
mod training;
