//! The events of a run. As JSON lines (`--events`) they are a public format: docs/events.md.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::ids::RunId;

/// Something that happened in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A run starts, or goes on after a stop (`resumed`).
    RunStarted {
        /// The pipeline's name.
        pipeline: String,
        /// From 1.
        attempt: u32,
        /// Whether an earlier attempt began it.
        resumed: bool,
        /// How many share the work.
        executors: u32,
        /// `cpu`, `wgpu` or `cuda`.
        device: String,
    },
    /// A stage starts.
    StageStarted {
        /// `prepare`, `fit`, `measure`, `train`, `embed` or `commit`.
        kind: String,
        /// The table or model that it works on.
        name: String,
        /// What it will count up to, where that is known.
        total: Option<u64>,
        /// What it counts.
        unit: String,
    },
    /// What the file leaves open (`auto`) was measured and decided.
    Decision {
        /// The model.
        model: String,
        /// Executors that train it.
        executors: u32,
        /// How they keep one model.
        sync: String,
        /// How gradients travel.
        compression: String,
        /// The reason.
        why: String,
    },
    /// How far the running stage is. At most a few times per second.
    Progress {
        /// The stage's kind.
        kind: String,
        /// The stage's table or model.
        name: String,
        /// In the stage's unit.
        done: u64,
    },
    /// An epoch ended. Losses are means over rows and features.
    Epoch {
        /// The model.
        model: String,
        /// From 1.
        epoch: u32,
        /// Epochs of the training in all.
        epochs: u32,
        /// Of the rows trained on.
        loss: f64,
        /// Of the rows held out, if there are any.
        held_out_loss: Option<f64>,
        /// Step size at the epoch's end.
        learning_rate: f64,
        /// Rows trained on.
        rows: u64,
        /// Those rows over the epoch's time.
        rows_per_s: f64,
    },
    /// A checkpoint is on storage.
    Checkpoint {
        /// The model.
        model: String,
        /// The epoch to go on with.
        epoch: u32,
        /// The step to go on with.
        step: u64,
    },
    /// A stage ended.
    StageFinished {
        /// The stage's kind.
        kind: String,
        /// The stage's table or model.
        name: String,
        /// Seconds.
        elapsed_s: f64,
    },
    /// The rows of one model or embedding, all accounted for.
    Ledger(Ledger),
    /// A version of an embedding table was published.
    Committed {
        /// The table.
        table: String,
        /// Its version.
        version: u64,
        /// Its rows.
        rows: u64,
        /// The version's folder.
        location: String,
        /// The model's fingerprint.
        fingerprint: String,
    },
    /// The run is alive.
    Heartbeat {
        /// Seconds since the attempt started.
        elapsed_s: f64,
        /// The most memory held so far, where the system tells.
        peak_memory_bytes: Option<u64>,
    },
    /// Something worth knowing that does not stop the run.
    Warning {
        /// What.
        message: String,
    },
    /// The run fails.
    Error {
        /// Why, causes included.
        message: String,
        /// The process will exit with this.
        exit_code: u8,
        /// Whether the same command may succeed later.
        retryable: bool,
    },
    /// The last event of an attempt.
    RunFinished {
        /// `succeeded`, `unchanged` (it was finished before), `skipped`, `interrupted` or
        /// `failed`.
        status: String,
        /// Seconds since the attempt started.
        elapsed_s: f64,
    },
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
