//! The events of a run. As JSON lines (`--events`) they are a public format: docs/events.md.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::ids::RunId;

/// Something that happened in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A run starts, or goes on after a stop (`resumed`).
    RunStarted { pipeline: String, attempt: u32, resumed: bool, executors: u32, device: String },
    /// A stage starts. `kind` is `prepare`, `fit`, `train`, `embed` or `commit`; `name` the
    /// table or model it works on; `total` what it will count up to, in `unit`s.
    StageStarted { kind: String, name: String, total: Option<u64>, unit: String },
    /// How far the running stage is, in its unit. At most a few times per second.
    Progress { kind: String, name: String, done: u64 },
    /// An epoch ended. Losses are means over rows and features.
    Epoch {
        model: String,
        /// From 1.
        epoch: u32,
        epochs: u32,
        loss: f64,
        held_out_loss: Option<f64>,
        learning_rate: f64,
        rows: u64,
        rows_per_s: f64,
    },
    /// A checkpoint is on storage.
    Checkpoint { model: String, epoch: u32, step: u64 },
    /// A stage ended.
    StageFinished { kind: String, name: String, elapsed_s: f64 },
    /// The rows of one model or embedding, all accounted for.
    Ledger(Ledger),
    /// A version of an embedding table was published.
    Committed { table: String, version: u64, rows: u64, location: String, fingerprint: String },
    /// The run is alive.
    Heartbeat { elapsed_s: f64, peak_memory_bytes: Option<u64> },
    /// Something worth knowing that does not stop the run.
    Warning { message: String },
    /// The run fails.
    Error { message: String, exit_code: u8, retryable: bool },
    /// The last event: `succeeded`, `unchanged` (it was finished before), `skipped`,
    /// `interrupted` or `failed`.
    RunFinished { status: String, elapsed_s: f64 },
}

/// Where the rows of one model or one embedding table went; it balances when
/// `input = trained + held_out + embedded + rejected`, where a model trains and an embedding
/// embeds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// The model or table.
    pub name: String,
    /// Rows of the input.
    pub input: u64,
    /// Rows of each epoch.
    pub trained: u64,
    /// Rows held out.
    pub held_out: u64,
    /// Rows written with an embedding.
    pub embedded: u64,
    /// Rows left out, by reason.
    pub rejected: BTreeMap<String, u64>,
}

impl Ledger {
    /// Whether every row is accounted for.
    pub fn balances(&self) -> bool {
        let rejected: u64 = self.rejected.values().sum();
        self.input == self.trained + self.held_out + self.embedded + rejected
    }
}

/// Called with every event, from any thread; must not block for long.
pub type Listener = Box<dyn Fn(&RunId, &Event) + Send + Sync>;

/// The stream of one run's events. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    run_id: RunId,
    listeners: Arc<Vec<Listener>>,
}

impl Events {
    /// A stream that these listeners hear.
    pub fn new(run_id: RunId, listeners: Vec<Listener>) -> Self {
        Self { run_id, listeners: Arc::new(listeners) }
    }

    /// Tells every listener.
    pub fn emit(&self, event: &Event) {
        for listener in self.listeners.iter() {
            listener(&self.run_id, event);
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("run_id", &self.run_id).finish_non_exhaustive()
    }
}
