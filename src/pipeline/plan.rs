//! What is true of a pipeline file: every name resolved, every number in range, the stages in
//! an order in which each finds its inputs done. Later stages check nothing of this again.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use sha2::{Digest, Sha256};

use super::{
    check::{Checker, read_text},
    decode::{Mended, decode},
    document::{self, Origin},
    faults::{Fault, Faults},
    params::{self, Params},
    spec::{
        Activation, Choice, Compression, CsvSpec, DeviceKind, EarlyStopping, FileFormat, Keep, Launcher, Loss, Missing,
        PartitionBy, PipelineSpec, RunSpec, Scale, Schedule, Spread, SyncStrategy, TransformSpec, VectorEncoding,
    },
};
use crate::storage::Location;

/// Executors of one run at most: each is a thread or a process of its own.
pub(super) const MAX_EXECUTORS: u32 = 1024;

/// A checked pipeline file.
#[derive(Clone, Debug)]
pub struct PipelinePlan {
    /// The pipeline's name.
    pub name: String,
    /// SHA-256 (hex) of the file's meaning, parameters filled in; how many executors there are and
    /// how they are started is left out, for the result does not depend on it.
    pub spec_hash: String,
    /// The parameters' values as text.
    pub params: BTreeMap<String, String>,
    /// Folder of embeddings, models and run records.
    pub store: Location,
    /// How the file is executed.
    pub run: RunPlan,
    /// All sources.
    pub sources: Vec<SourcePlan>,
    /// All transforms, each after its inputs.
    pub transforms: Vec<TransformPlan>,
    /// All models.
    pub models: Vec<ModelPlan>,
    /// All embedding tables.
    pub embeddings: Vec<EmbeddingPlan>,
    /// The file itself, so that a fault found later still points into it.
    pub origin: Arc<Origin>,
}

impl PipelinePlan {
    /// Reads and checks a file; `overrides` are the `--param` pairs, `working_dir` is what
    /// relative overrides of type `path` count from. Reads the file and the SQL files that it
    /// names, nothing else. Gives back all faults together.
    pub fn read(file: &Path, overrides: &[(String, String)], working_dir: &Path) -> Result<Self, Faults> {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let working_dir = absolute(working_dir);
        let path = working_dir.join(file);
        let name = file.display().to_string();
        let text: Arc<str> = read_text(&path)
            .map_err(|message| {
                let fault = Fault { message, span: 0..0, help: None, elsewhere: None };
                Faults { file: name.clone(), text: "".into(), faults: vec![fault] }
            })?
            .into();
        let folder = path.parent().unwrap_or(&working_dir);
        let (root, mut faults) = document::parse(&text);
        let Some(root) = root else { return Err(Faults { file: name, text, faults }) };
        let mut origin = Origin::new(name, text, root);
        let plan = Self::check(&mut origin, overrides, folder, &working_dir, &mut faults);
        match plan {
            Some(plan) if faults.is_empty() => Ok(Self { origin: Arc::new(origin), ..plan }),
            _ => {
                if faults.is_empty() {
                    faults.push(Fault {
                        message: "this is no pipeline file".into(),
                        span: 0..0,
                        help: None,
                        elsewhere: None,
                    });
                }
                faults.sort_by_key(|fault| (fault.elsewhere.is_some(), fault.span.start, fault.span.end));
                faults.dedup();
                Err(origin.into_faults(faults))
            }
        }
    }

    /// The plan of a tree, as far as it can be made; it holds only if there are no faults.
    fn check(
        origin: &mut Origin,
        overrides: &[(String, String)],
        folder: &Path,
        working_dir: &Path,
        faults: &mut Vec<Fault>,
    ) -> Option<Self> {
        let params = Params::declare(origin, overrides, folder, working_dir, faults);
        let (value, unfilled, broken) = params::fill(origin, &params);
        faults.extend(unfilled);
        let mut mended = Mended::default();
        for path in broken {
            mended.insert(path);
        }
        let spec = decode(value, origin, &mut mended, faults)?;
        let mut checker = Checker { origin, params: &params, mended: &mended, folder, faults: Vec::new() };
        checker.names(&spec);
        let store = checker.store(&spec.store);
        let run = checker.run(&spec.run);
        let sources: Vec<_> = spec.sources.iter().filter_map(|(name, spec)| checker.source(name, spec)).collect();
        let transforms = checker.transforms(&spec.transforms);
        let models: Vec<_> = spec.models.iter().map(|(name, spec)| checker.model(name, spec, &run)).collect();
        let embeddings = spec.embeddings.iter().map(|(name, embedding)| {
            let from = spec.models.get(&embedding.model).map(|model| model.from.as_str());
            checker.embedding(name, embedding, from)
        });
        let embeddings = embeddings.collect();
        faults.append(&mut checker.faults);
        let mut plan = Self {
            name: spec.name.clone(),
            spec_hash: String::new(),
            params: params.texts(),
            store: store?,
            run,
            sources,
            transforms,
            models,
            embeddings,
            origin: Arc::new(origin.clone()),
        };
        plan.spec_hash = plan.hash(spec);
        Some(plan)
    }

    /// SHA-256 over the file's meaning as canonical JSON: paths absolute, SQL by content,
    /// the number of partitions settled.
    fn hash(&self, mut spec: PipelineSpec) -> String {
        spec.params.clear();
        spec.run =
            RunSpec { device: spec.run.device, memory: spec.run.memory, seed: spec.run.seed, ..RunSpec::default() };
        self.store.as_str().clone_into(&mut spec.store);
        for source in &self.sources {
            spec.sources
                .entry(source.name.clone())
                .and_modify(|spec| source.location.as_str().clone_into(&mut spec.path));
        }
        for transform in &self.transforms {
            let by_content = TransformSpec { sql: Some(transform.sql.clone()), file: None };
            spec.transforms.insert(transform.name.clone(), by_content);
        }
        for model in &self.models {
            spec.models.entry(model.name.clone()).and_modify(|spec| {
                if let Choice::Fixed(partition) = &mut spec.partition {
                    partition.count = Some(model.partition.count);
                }
            });
        }
        let mut value = serde_json::to_value(spec).unwrap_or_default();
        value.sort_all_objects();
        format!("{:x}", Sha256::digest(value.to_string()))
    }

    /// The source of that name.
    pub fn source(&self, name: &str) -> Option<&SourcePlan> {
        self.sources.iter().find(|source| source.name == name)
    }

    /// The model of that name.
    pub fn model(&self, name: &str) -> Option<&ModelPlan> {
        self.models.iter().find(|model| model.name == name)
    }
}

/// How the file is executed.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RunPlan {
    /// Executors, at least 1; those to choose from, where `choose_executors`.
    pub executors: u32,
    /// Whether a measurement is to choose how many of them take part.
    pub choose_executors: bool,
    /// How they are started.
    pub launcher: Launcher,
    /// Executors that the run needs to go on, 1 to `executors`.
    pub min_executors: u32,
    /// Executors that may take part, `executors` or more.
    pub max_executors: u32,
    /// Where tensors live.
    pub device: DeviceKind,
    /// Memory for data in flight, at least `limits::MIN_MEMORY_BYTES`.
    pub memory_bytes: u64,
    /// Seed of everything random.
    pub seed: u64,
}

impl RunPlan {
    /// The same with another number of executors or launcher: how this start differs from what
    /// the file says.
    #[must_use]
    pub fn started_with(mut self, executors: Option<Choice<u32>>, launcher: Option<Launcher>) -> Self {
        if executors == Some(Choice::Auto) {
            self = self.choosing();
        }
        if let Some(Choice::Fixed(executors)) = executors {
            self.choose_executors = false;
            // A minimum that the file does not give is all of them.
            let all = self.min_executors == self.executors;
            self.min_executors = if all { executors } else { self.min_executors.min(executors) };
            self.max_executors =
                if self.max_executors == self.executors { executors } else { self.max_executors.max(executors) };
            self.executors = executors;
        }
        self.launcher = launcher.unwrap_or(self.launcher);
        self
    }

    /// The same, but a measurement is to choose the number of executors: of as many as the file
    /// allows, else of as many as this machine has processors.
    fn choosing(mut self) -> Self {
        if !self.choose_executors {
            let all = if self.max_executors > 1 { self.max_executors } else { cores() };
            let min = if self.min_executors == self.executors { 1 } else { self.min_executors };
            (self.executors, self.max_executors, self.min_executors) = (all, all, min);
            self.choose_executors = true;
        }
        self
    }
}

/// The processors of this machine, as executors.
pub(super) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32).min(MAX_EXECUTORS)
}

/// Rows to read.
#[derive(Clone, Debug)]
pub struct SourcePlan {
    /// Table name.
    pub name: String,
    /// File, folder or glob.
    pub location: Location,
    /// Format, if the file says so.
    pub format: Option<FileFormat>,
    /// Declared columns: name and SQL type, checked to parse.
    pub columns: BTreeMap<String, String>,
    /// How CSV is read.
    pub csv: CsvSpec,
}

/// A query whose result is a table.
#[derive(Clone, Debug)]
pub struct TransformPlan {
    /// Table name.
    pub name: String,
    /// The query: one SELECT.
    pub sql: String,
    /// Sources and transforms that it reads.
    pub inputs: Vec<String>,
}

/// An autoencoder to train.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct ModelPlan {
    /// Model name.
    pub name: String,
    /// The source or transform to learn from.
    pub from: String,
    /// Feature columns in order, patterns not yet resolved.
    pub features: Vec<FeaturePlan>,
    /// How rows are dealt.
    pub partition: PartitionPlan,
    /// The network's shape, but for its input width.
    pub net: NetPlan,
    /// How the model is spread over the executors.
    pub spread: Spread,
    /// The training.
    pub train: TrainPlan,
}

/// One entry of `features:`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct FeaturePlan {
    /// Column names or patterns with `*`, at least one.
    pub columns: Vec<String>,
    /// Scaling.
    pub scale: Scale,
    /// What happens to NULL and NaN.
    pub missing: Missing,
    /// Whether an indicator feature is added.
    pub indicator: bool,
}

/// How rows are dealt.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PartitionPlan {
    /// The rule.
    pub by: PartitionBy,
    /// Columns to hash; empty unless `by` is hash.
    pub columns: Vec<String>,
    /// Number of partitions, at least 1: as written, else the larger of
    /// `limits::PARTITIONS` and the number of executors.
    pub count: u32,
    /// Whether the count is chosen once the rows are known.
    pub choose: bool,
}

/// The network's shape, but for its input width.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NetPlan {
    /// Widths of the encoder's hidden layers.
    pub hidden: Vec<usize>,
    /// Width of the embedding.
    pub latent: usize,
    /// Of the hidden layers.
    pub activation: Activation,
    /// Of the embedding.
    pub latent_activation: Activation,
    /// Of the reconstruction.
    pub output_activation: Activation,
    /// Whether the decoder uses the encoder's weights, transposed.
    pub tied_weights: bool,
}

/// The training, all defaults filled in.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TrainPlan {
    /// How executors keep one model.
    pub sync: SyncStrategy,
    /// Whether a measurement is to choose `sync` and `compression`.
    pub choose_sync: bool,
    /// How gradients travel.
    pub compression: Compression,
    /// Passes over the rows, at least 1.
    pub epochs: u32,
    /// Rows of one step over all executors, at least 1.
    pub batch: usize,
    /// What is minimised.
    pub loss: Loss,
    /// The update rule.
    pub optimizer: Optimizer,
    /// Step size, above 0.
    pub learning_rate: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// How the step size changes.
    pub schedule: Schedule,
    /// Largest L2 norm of the gradient.
    pub clip_norm: Option<f64>,
    /// Fraction of the rows held out, 0 to 0.9.
    pub validation: f64,
    /// When training ends early.
    pub early_stopping: Option<EarlyStopping>,
    /// Which weights are kept.
    pub keep: Keep,
    /// Steps between two checkpoints besides the one after each epoch.
    pub checkpoint_steps: Option<u64>,
}

/// The update rule with its constants.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Optimizer {
    /// Stochastic gradient descent.
    Sgd {
        /// 0 to 1.
        momentum: f64,
    },
    /// Adam; weight decay is added to the gradient.
    Adam {
        /// Decay rates of the first and second moment.
        betas: [f64; 2],
        /// Added to the denominator.
        epsilon: f64,
    },
    /// Adam; weight decay is decoupled.
    Adamw {
        /// Decay rates of the first and second moment.
        betas: [f64; 2],
        /// Added to the denominator.
        epsilon: f64,
    },
}

impl Optimizer {
    /// Numbers that it keeps of each parameter between updates: momentum, or first and second moment.
    pub fn moments(self) -> usize {
        match self {
            Self::Sgd { momentum: 0.0 } => 0,
            Self::Sgd { .. } => 1,
            Self::Adam { .. } | Self::Adamw { .. } => 2,
        }
    }
}

/// An embedding table to write.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct EmbeddingPlan {
    /// Table name.
    pub name: String,
    /// The model whose encoder is used.
    pub model: String,
    /// The source or transform whose rows are embedded.
    pub from: String,
    /// Key columns, written first.
    pub key: Vec<String>,
    /// Further columns to carry along.
    pub columns: Vec<String>,
    /// Whether each row's reconstruction error is written.
    pub reconstruction_error: bool,
    /// How the vector is encoded.
    pub encoding: VectorEncoding,
    /// Committed versions that are kept, at least 1.
    pub keep_versions: u32,
}
