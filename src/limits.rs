//! Every bound of the system, each with its reason.

use std::time::Duration;

/// One storage call (open, list, rename, one ranged read): longer than a NameNode's pause for
/// garbage collection, shorter than an operator's patience.
pub const STORAGE_CALL: Duration = Duration::from_secs(30);

/// How often a storage call that may succeed later is tried in all.
pub const STORAGE_ATTEMPTS: u32 = 3;

/// The first wait between two tries; it doubles each time.
pub const STORAGE_BACKOFF: Duration = Duration::from_millis(200);

/// How often a live run renews its lease.
pub const LEASE_RENEWAL: Duration = Duration::from_secs(2);

/// How long a lease must stand still before another start may take the run over: a few
/// renewals, so that one slow write does not cost a live run its lease.
pub const LEASE_EXPIRY: Duration = Duration::from_secs(10);

/// How long an exchange between ranks may take before the late rank is named: the slowest
/// honest step (a wide model on a busy CPU, a cold read of a row group) takes seconds.
pub const COLLECTIVE: Duration = Duration::from_mins(5);

/// From the first byte of a new connection until the caller has proved that it knows the token:
/// a few round trips; strangers may not stay longer.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Payload of a frame of the handshake: a nonce or a proof, versions, a purpose of one line.
pub const HANDSHAKE_BYTES: usize = 512;

/// Callers that may be in the handshake at once; more are sent away, for each holds a thread.
pub const HANDSHAKES: usize = 64;

/// Callers that have proved to know the token and wait to be welcomed; a fleet's worth.
pub const CALLERS_WAITING: usize = 1024;

/// The pause after a caller could not be accepted: files may be closed meanwhile.
pub const ACCEPT_BACKOFF: Duration = Duration::from_millis(10);

/// Characters of a token at least: 64 bits in hexadecimal.
pub const TOKEN_BYTES: usize = 16;

/// Bytes that TLS asks the system for at once: a few records.
pub const TLS_READ_BYTES: usize = 128 << 10;

/// Messages from one rank to another that wait to be taken: a few steps' worth; a sender that is
/// faster waits.
pub const INBOX_MESSAGES: usize = 64;

/// From SIGTERM to the end of the process, checkpoint included; schedulers send SIGKILL
/// 30 seconds after SIGTERM.
pub const SHUTDOWN: Duration = Duration::from_secs(20);

/// Between two heartbeat events of a run.
pub const HEARTBEAT: Duration = Duration::from_secs(10);

/// Batches that the feed assembles ahead of one rank: enough to hide one read.
pub const PREFETCH_BATCHES: usize = 4;

/// Partitions of a data set unless the file says otherwise: as many as the executors that
/// one machine usually has, so that up to this number they all share the work.
pub const PARTITIONS: u32 = 8;

/// Partitions at most: each one holds a buffer.
pub const MAX_PARTITIONS: u32 = 4096;

/// Features of one model at most: the first weight matrix is this wide.
pub const MAX_FEATURES: usize = 1 << 20;

/// Pipeline file at most: larger is surely another file.
pub const PIPELINE_FILE_BYTES: u64 = 4 << 20;

/// Rows of one Arrow batch on its way through scan and encode.
pub const BATCH_ROWS: usize = 8192;

/// Rows of one row group that we write: small enough that several fit a small budget.
pub const ROW_GROUP_ROWS: usize = 65_536;

/// Files of one source that are opened or looked at together: hides the latency of a store
/// without flooding its NameNode.
pub const FILES_AT_ONCE: usize = 32;

/// Bytes at the end of a Parquet file that are read in one request: enough for most footers.
pub const FOOTER_BYTES: usize = 64 << 10;

/// Bytes and rows at the start of a CSV file from which types are guessed.
pub const CSV_SAMPLE_BYTES: usize = 1 << 20;

/// See `CSV_SAMPLE_BYTES`.
pub const CSV_SAMPLE_ROWS: usize = 10_000;

/// Files into which a query's rows are staged side by side. A constant, not the number of
/// cores, for row groups decide how rows are dealt, on any machine alike.
pub const STAGED_FILES: usize = 8;

/// Files of a hash partition that are open for writing at once; more partitions take several
/// passes, for each open file holds a descriptor and an upload's buffer.
pub const OPEN_PARTITIONS: u32 = 256;

/// Memory of a run unless the file says otherwise.
pub const MEMORY_BYTES: u64 = 2 << 30;

/// The least memory a run can be given.
pub const MIN_MEMORY_BYTES: u64 = 64 << 20;

/// Faults of one pipeline file that are printed at most.
pub const FAULTS_SHOWN: usize = 50;

/// Rows that quantiles are taken from: their rank is then right to 0.2% (standard error), and
/// exact where there are no more rows.
pub const SAMPLE_ROWS: usize = 65_536;

/// Values in that sample over all columns that want quantiles: 32 MiB.
pub const SAMPLE_VALUES: usize = 4 << 20;

/// Row groups, decoded, that are read at the same time to learn scaling and fill values, in
/// all (one at least, however large).
pub const FIT_BYTES: u64 = 256 << 20;

/// Numbers tried for a new version of a table when other runs take them at the same time.
pub const VERSIONS_TRIED: u64 = 100;

/// Rows of one file of embeddings: at least one row group, at most what a reader likes to get
/// as one piece of work. In between, a sixteenth of the rows, so that executors share them.
pub const EMBEDDING_FILE_ROWS: std::ops::RangeInclusive<u64> = 65_536..=1 << 20;

/// Files of embeddings unless their bounds say otherwise; whatever the number of executors, so
/// that a rerun gives the same files.
pub const EMBEDDING_FILES: u64 = 16;

/// Parts of one file under way to storage at once: one travels while the next is filled.
pub const UPLOAD_PARTS: usize = 2;
