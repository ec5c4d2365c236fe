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

/// What an epoch must gain by it before a slow rank hands partitions over: sums are then taken in
/// another order, and short epochs are worth more the same to the last digit.
pub const REBALANCING: Duration = Duration::from_secs(1);

/// How long a trial of a training measures: tens of steps of a small model, and a few of a wide one.
pub const TRIAL: Duration = Duration::from_millis(700);

/// Executors of a fleet that is only simulated: ten times what anyone trains an autoencoder on.
pub const SIMULATED_EXECUTORS: u32 = 100_000;

/// Steps that executors take alone with `sync: local_sgd`, unless the file says otherwise.
pub const LOCAL_STEPS: u32 = 8;

/// Between two signs of life of a driver or an executor.
pub const ALIVE: Duration = Duration::from_secs(1);

/// How long a driver or an executor may be silent before it counts as lost: several signs of
/// life, so that a machine that is short of processors for a moment loses nobody.
pub const SILENCE: Duration = Duration::from_secs(10);

/// How long the first executors are waited for once there are enough to go on with.
pub const JOIN_PATIENCE: Duration = Duration::from_secs(10);

/// How long executors are waited for while there are fewer than needed; then the run ends, to be
/// started again.
pub const EXECUTORS_WAIT: Duration = Duration::from_mins(1);

/// Between two tries of an executor to join a run that does not listen yet.
pub const KNOCK: Duration = Duration::from_millis(200);

/// How long ranks take to connect to each other: a few round trips, and the accepting side may
/// still be reading files.
pub const MESH: Duration = Duration::from_secs(30);

/// How often, in one run, executor processes that ended are started again: a crash that comes
/// back each time must come to an end.
pub const RESTARTS: usize = 3;

/// How long executor processes have to end by themselves at the end of a run.
pub const GOODBYE: Duration = Duration::from_secs(3);

/// How long a stranger who connects may take to show that it knows the token.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// Strangers that a listener talks to at once: a port scanner may bring many.
pub const STRANGERS: usize = 256;

/// Bytes of one message of a handshake, before anything is known of the other side.
pub const HANDSHAKE_BYTES: usize = 512;

/// Bytes of one word between driver and executor: the work of a stage names all its files.
pub const CONTROL_BYTES: u32 = 256 << 20;

/// Bytes of a bucket or message that travel as one frame: they stay in a core's cache between
/// the network and the sum.
pub const FRAME_BYTES: usize = 256 << 10;

/// Buckets of at most this many bytes are sent to every rank as a whole: one round trip counts
/// for more than their bytes.
pub const DIRECT_BYTES: usize = 16 << 10;

/// Bytes that one rank may send ahead to another before it has to wait.
pub const INBOX_BYTES: usize = 64 << 20;

/// Messages from one rank to another that wait to be taken: a few steps' worth; a sender that is
/// faster waits.
pub const INBOX_MESSAGES: usize = 64;

/// Steps that an executor may be ahead of the slowest with asynchronous parameter servers: enough
/// to hide a slow step, few enough that all come to one step soon when they are to stop.
pub const STEPS_AHEAD: u32 = 16;

/// The same with `mode: bounded` unless the file says otherwise.
pub const STALENESS: u32 = 4;

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
