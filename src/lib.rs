//! Emberflow: a declarative dataflow from rows in HDFS to learned embeddings.
//!
//! # The map
//!
//! Data flows one way; each layer uses only the layers above it in this list
//! (`tests/tidy.rs` holds it: an upward import or a cycle fails the test).
//!
//! ```text
//!   remedy ids limits   what a reader of an error can do; newtypes; every bound with its reason
//!   telemetry           events (JSON lines), progress, memory readings
//!   config              a site's settings from conf/ and the environment, checked
//!   wire                connections between processes: frames, token, TLS, deadlines
//!   storage             file, hdfs, s3, memory: one registry, deadlines, retries, atomic publish
//!   pipeline            spec (YAML to typed) and plan (checked DAG); no I/O
//!   runs                run records and leases, next to the output
//!   data                scan, prepare, features, partition, feed: files to f32 rows, counted
//!   learn               model, comm, sync, train, checkpoint
//!   embed               encode, write Parquet aside, commit a version
//!   query               SQL over embeddings, sources and runs
//!   cluster             the driver: a run's life, its record, its lease, its executors
//!   cli                 one file per subcommand, exit table, printer
//! ```
//!
//! # Invariants
//!
//! * A partition is a pure function of the input snapshot, the pipeline file and the seed.
//! * The number of executors never changes which rows meet in a step, only who computes them.
//! * The step plan is fixed before the first step; every wait has a deadline.
//! * Every row is counted: trained, held out, embedded, or rejected with a reason.
//! * Readers follow manifests; a manifest is published last, in one atomic step.

pub mod cli;
pub mod cluster;
pub mod config;
pub mod data;
pub mod embed;
pub mod ids;
pub mod learn;
pub mod limits;
pub mod pipeline;
pub mod query;
pub mod remedy;
pub mod runs;
pub mod storage;
pub mod telemetry;
pub mod wire;
