//! What a pipeline file says, as typed values; nothing here is checked against anything else.
//!
//! The same types give the JSON Schema (`emberflow schema`), so the doc comments below are
//! what an editor shows.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;

/// A pipeline: rows in, learned embeddings out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PipelineSpec {
    /// Version of this file format; 1.
    pub version: u32,
    /// The pipeline's name: lower-case letters, digits and `_`.
    pub name: String,
    /// Folder (path or URL) that receives embeddings, models and run records.
    pub store: String,
    /// Parameters, written `${name}` wherever a value stands, set by `--param name=value`.
    #[serde(default)]
    pub params: BTreeMap<String, ParamSpec>,
    /// How a run of this file is executed.
    #[serde(default)]
    pub run: RunSpec,
    /// Folders or files of rows, by table name.
    pub sources: BTreeMap<String, SourceSpec>,
    /// SQL over sources and other transforms, by table name.
    #[serde(default)]
    pub transforms: BTreeMap<String, TransformSpec>,
    /// Autoencoders to train, by name.
    #[serde(default)]
    pub models: BTreeMap<String, ModelSpec>,
    /// Embedding tables to write, by table name.
    #[serde(default)]
    pub embeddings: BTreeMap<String, EmbeddingSpec>,
}

/// A parameter of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ParamSpec {
    /// What a value may be.
    #[serde(rename = "type")]
    pub kind: ParamType,
    /// The value unless `--param` gives one; without it the parameter is required.
    #[serde(default)]
    pub default: Option<serde_json::Value>,
    /// What the parameter is for.
    #[serde(default)]
    pub description: Option<String>,
}

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ParamType {
    /// Any text.
    String,
    /// A whole number.
    Int,
    /// A number.
    Float,
    /// `true` or `false`.
    Bool,
    /// A day, `YYYY-MM-DD`.
    Date,
    /// A path or URL; a relative default counts from the pipeline file, a relative
    /// `--param` from the working directory.
    Path,
}

/// A value, or `auto`: Emberflow chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<T> {
    /// Emberflow chooses.
    Auto,
    /// This one.
    Fixed(T),
}

impl<T: Default> Default for Choice<T> {
    fn default() -> Self {
        Self::Fixed(T::default())
    }
}

impl<T: Serialize> Serialize for Choice<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Fixed(value) => value.serialize(serializer),
        }
    }
}

/// How a run is executed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunSpec {
    /// Executors that train together, or `auto`: as many as a short measurement finds fastest;
    /// default 1.
    #[serde(deserialize_with = "short::choice")]
    #[schemars(schema_with = "short::choice_schema::<u32>")]
    pub executors: Choice<u32>,
    /// How executors are started; default `in_process`.
    pub launcher: Launcher,
    /// Executors that a run needs to go on when some are lost; default all of them.
    pub min_executors: Option<u32>,
    /// Executors that may take part when more join; default `executors`. With `executors: auto`,
    /// those to choose from; default the processors of this machine.
    pub max_executors: Option<u32>,
    /// Where tensors live: `cpu`, `wgpu` or `cuda`; default `cpu`.
    pub device: DeviceKind,
    /// Memory for data in flight, such as `512MiB` or `4GiB`; default `2GiB`.
    pub memory: String,
    /// Seed of everything random; default 42.
    pub seed: u64,
}

impl Default for RunSpec {
    fn default() -> Self {
        Self {
            executors: Choice::Fixed(1),
            launcher: Launcher::InProcess,
            min_executors: None,
            max_executors: None,
            device: DeviceKind::Cpu,
            memory: "2GiB".to_owned(),
            seed: 42,
        }
    }
}

/// How executors are started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Launcher {
    /// As threads of the run's own process.
    #[default]
    InProcess,
    /// As child processes on this machine.
    Local,
    /// By others (by hand, systemd, Kubernetes, Spark): they join the run's address.
    Static,
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU through Vulkan, Metal or DirectX (cargo feature `wgpu`).
    Wgpu,
    /// An NVIDIA GPU (cargo feature `cuda`).
    Cuda,
}

/// Rows to read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceSpec {
    /// File, folder or glob; path or URL (`hdfs://`, `s3://`, `file://`).
    pub path: String,
    /// File format; by default told from the file names.
    #[serde(default)]
    pub format: Option<FileFormat>,
    /// Columns and their SQL types, for CSV where the types cannot be guessed, such as
    /// `{ id: BIGINT, price: "DECIMAL(10,2)" }`.
    #[serde(default)]
    pub columns: BTreeMap<String, String>,
    /// How CSV is read.
    #[serde(default)]
    pub csv: Option<CsvSpec>,
}

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileFormat {
    /// Apache Parquet.
    Parquet,
    /// Comma-separated values, `.csv`, also compressed (`.csv.gz`, `.csv.bz2`, `.csv.zst`).
    Csv,
    /// Arrow IPC files.
    Arrow,
}

/// How CSV is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CsvSpec {
    /// Whether the first line names the columns; default true.
    pub header: bool,
    /// One character between fields; default `,`.
    pub delimiter: char,
    /// Text that stands for a missing value besides the empty field.
    pub null: Option<String>,
}

impl Default for CsvSpec {
    fn default() -> Self {
        Self { header: true, delimiter: ',', null: None }
    }
}

/// A query whose result is a table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TransformSpec {
    /// The query.
    #[serde(default)]
    pub sql: Option<String>,
    /// A file with the query, relative to the pipeline file; instead of `sql`.
    #[serde(default)]
    pub file: Option<String>,
}

/// An autoencoder and how it is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The source or transform that holds the rows to learn from.
    pub from: String,
    /// Columns that make a row's feature vector, in order.
    pub features: Vec<FeatureSpec>,
    /// How rows are dealt to executors, or `auto`: at random, to as many partitions as any number of
    /// executors that may be chosen can share evenly.
    #[serde(default, deserialize_with = "short::choice")]
    #[schemars(schema_with = "short::choice_schema::<PartitionSpec>")]
    pub partition: Choice<PartitionSpec>,
    /// Widths of the encoder's hidden layers, from the input on; the decoder mirrors them.
    #[serde(default)]
    pub hidden: Vec<usize>,
    /// Width of the embedding.
    pub latent: usize,
    /// Activation of the hidden layers; default `relu`.
    #[serde(default)]
    pub activation: Activation,
    /// Activation of the embedding; default `identity`.
    #[serde(default = "identity")]
    pub latent_activation: Activation,
    /// Activation of the reconstruction; default `identity`, or `sigmoid` where the loss is
    /// `binary_cross_entropy`.
    #[serde(default)]
    pub output_activation: Option<Activation>,
    /// Whether the decoder uses the encoder's weights, transposed; default false.
    #[serde(default)]
    pub tied_weights: bool,
    /// How the model is spread over the executors; default `data`: a replica each.
    #[serde(default, deserialize_with = "short::read")]
    #[schemars(schema_with = "short::schema::<Spread>")]
    pub spread: Spread,
    /// The training.
    #[serde(default)]
    pub train: TrainSpec,
}

fn identity() -> Activation {
    Activation::Identity
}

/// Columns that become features.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FeatureSpec {
    /// One column: a number, boolean, decimal, date, timestamp, or a list of numbers.
    #[serde(default)]
    pub column: Option<String>,
    /// Several columns; `*` stands for any characters. Instead of `column`.
    #[serde(default)]
    pub columns: Vec<String>,
    /// How values are brought to a common range; default `none`.
    #[serde(default)]
    pub scale: Scale,
    /// What happens to NULL and NaN; default `error`.
    #[serde(default)]
    pub missing: Missing,
    /// Whether a further feature tells, by 1, that the value was missing; default false.
    #[serde(default)]
    pub indicator: bool,
}

/// How a feature's values are scaled; fitted over all rows, saved with the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scale {
    /// As they are.
    #[default]
    None,
    /// To 0..1 by the least and greatest value.
    MinMax,
    /// To mean 0 and standard deviation 1.
    Standard,
    /// By the median and the distance between the quartiles.
    Robust,
    /// Divided by a constant.
    Divide(f64),
}

/// What happens to NULL and NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// The run fails and names file, row and column.
    #[default]
    Error,
    /// The row is left out of training and counted; its embedding is left out too.
    Reject,
    /// The mean of the column's other values.
    Mean,
    /// The median of the column's other values.
    Median,
    /// This value, before scaling.
    Constant(f64),
}

/// How rows are dealt to partitions, and partitions to executors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PartitionSpec {
    /// The rule; default `random`.
    pub by: PartitionBy,
    /// Columns to hash, for `hash`.
    pub columns: Vec<String>,
    /// Number of partitions; default 8, or the number of executors if that is larger.
    pub count: Option<u32>,
}

/// The rule that deals rows to partitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PartitionBy {
    /// Row groups dealt by seed, balanced in rows.
    #[default]
    Random,
    /// Rows with equal values in `columns` share a partition: Spark's `pmod(hash(columns), count)`.
    Hash,
    /// Row groups dealt in turn.
    RoundRobin,
}

/// An activation function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// max(0, x).
    #[default]
    Relu,
    /// x, or 0.01 x below 0.
    LeakyRelu,
    /// x Φ(x).
    Gelu,
    /// Hyperbolic tangent.
    Tanh,
    /// 1 / (1 + e^-x).
    Sigmoid,
    /// x.
    Identity,
}

/// How a model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainSpec {
    /// How executors keep one model, or `auto`: what a short measurement finds fastest of
    /// `all_reduce`, `sharded` and `local_sgd`, `compression` included; default `all_reduce`.
    #[serde(deserialize_with = "short::choice")]
    #[schemars(schema_with = "short::choice_schema::<SyncStrategy>")]
    pub sync: Choice<SyncStrategy>,
    /// How gradients travel between executors; default `none`: as they are.
    pub compression: Compression,
    /// Passes over the rows; default 10.
    pub epochs: u32,
    /// Rows of one step, over all executors; default 256.
    pub batch: usize,
    /// What is minimised; default `mse`.
    pub loss: Loss,
    /// The update rule; default `adam`.
    pub optimizer: OptimizerKind,
    /// Step size; default 0.001.
    pub learning_rate: f64,
    /// Momentum of `sgd`, 0 to 1; default 0.
    pub momentum: Option<f64>,
    /// Adam's decay rates of the first and second moment; default `[0.9, 0.999]`.
    pub betas: Option<[f64; 2]>,
    /// Adam's denominator term; default 1e-8.
    pub epsilon: Option<f64>,
    /// Weight decay: decoupled for `adamw`, added to the gradient otherwise; default 0, and
    /// 0.01 for `adamw`.
    pub weight_decay: Option<f64>,
    /// How the step size changes; default `constant`.
    #[serde(deserialize_with = "short::read")]
    #[schemars(schema_with = "short::schema::<Schedule>")]
    pub schedule: Schedule,
    /// Largest L2 norm of the gradient; by default unbounded.
    pub clip_norm: Option<f64>,
    /// Fraction of the rows held out to measure the loss on, 0 to 0.9; default 0.
    pub validation: f64,
    /// Stop when the loss (held-out if there is any) no longer falls.
    pub early_stopping: Option<EarlyStopping>,
    /// Which weights are kept; default `best` where rows are held out, else `last`.
    pub keep: Option<Keep>,
    /// Steps between two checkpoints besides the one after each epoch; by default none.
    pub checkpoint_steps: Option<u64>,
}

impl Default for TrainSpec {
    fn default() -> Self {
        Self {
            sync: Choice::Fixed(SyncStrategy::default()),
            compression: Compression::None,
            epochs: 10,
            batch: 256,
            loss: Loss::Mse,
            optimizer: OptimizerKind::Adam,
            learning_rate: 1e-3,
            momentum: None,
            betas: None,
            epsilon: None,
            weight_decay: None,
            schedule: Schedule::Constant {},
            clip_norm: None,
            validation: 0.0,
            early_stopping: None,
            keep: None,
            checkpoint_steps: None,
        }
    }
}

/// How executors keep one model. Written as a name alone, `sync: local_sgd`, or with settings,
/// `sync: { local_sgd: { steps: 16 } }`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SyncStrategy {
    /// Gradients are summed over all executors, and each makes the same update.
    AllReduce {
        /// Steps whose gradients are added up before they are exchanged; default 1.
        #[serde(default = "one")]
        batches: u32,
    },
    /// The same, but each executor updates its part of the parameters alone and keeps the
    /// optimizer's state of that part only.
    Sharded {},
    /// Servers hold the parameters; executors pull them and push gradients.
    ParameterServer {
        /// Servers, each with a part of the parameters; default 1.
        #[serde(default = "one")]
        servers: u32,
        /// When a gradient is applied; default `sync`.
        #[serde(default)]
        mode: ServerMode,
        /// For `bounded`: steps that the fastest executor may be ahead of the slowest; default 4.
        staleness: Option<u32>,
    },
    /// Each executor makes updates of its own; then parameters are averaged.
    LocalSgd {
        /// Steps between two averages; default 8.
        #[serde(default = "local_steps")]
        steps: u32,
        /// Momentum of the averages' change, 0 to 1; default 0: plain averages.
        #[serde(default)]
        outer_momentum: f64,
        /// What the averages' change is multiplied by; default 1.
        #[serde(default = "outer_learning_rate")]
        outer_learning_rate: f64,
    },
}

impl Default for SyncStrategy {
    fn default() -> Self {
        Self::AllReduce { batches: 1 }
    }
}

fn one() -> u32 {
    1
}

fn local_steps() -> u32 {
    limits::LOCAL_STEPS
}

fn outer_learning_rate() -> f64 {
    1.0
}

/// When a parameter server applies gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServerMode {
    /// All of a step together.
    #[default]
    Sync,
    /// Each at once; no executor gets further ahead than 16 steps.
    Async,
    /// Each at once, but no executor gets further ahead than `staleness` steps.
    Bounded,
}

/// How gradients travel between executors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// As they are, 4 bytes a number.
    #[default]
    None,
    /// Rounded to bfloat16, 2 bytes a number.
    Bf16,
    /// Only this fraction of them, the largest; what is left out is added to the next step's.
    TopK(f64),
}

/// How a model is spread over the executors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Spread {
    /// A replica each; rows are dealt.
    Data {},
    /// Some consecutive layers each; every row passes through all executors.
    Pipeline {
        /// Parts of a batch that are under way at the same time; default 4.
        #[serde(default = "micro_batches")]
        micro_batches: u32,
    },
    /// Some features each, with an encoder and a decoder of their own that meet at the embedding.
    Vertical {
        /// Slices of the features, each a set of columns; default 2.
        #[serde(default = "slices")]
        slices: u32,
    },
}

impl Default for Spread {
    fn default() -> Self {
        Self::Data {}
    }
}

impl Spread {
    /// Executors that find work at most, in a network of so many hidden layers in its encoder.
    pub fn most_executors(self, hidden: usize) -> u32 {
        match self {
            Self::Data {} => u32::MAX,
            Self::Pipeline { .. } => 2 * (hidden as u32 + 1),
            Self::Vertical { slices } => slices,
        }
    }
}

fn micro_batches() -> u32 {
    4
}

fn slices() -> u32 {
    2
}

/// What is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Mean squared error over rows and features.
    #[default]
    Mse,
    /// Binary cross-entropy, mean over rows and features; features must lie in 0..1.
    BinaryCrossEntropy,
}

/// The update rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerKind {
    /// Stochastic gradient descent, with `momentum` if given.
    Sgd,
    /// Adam (Kingma and Ba 2015).
    #[default]
    Adam,
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    Adamw,
}

/// How the step size changes over the training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// Not at all.
    Constant {},
    /// Times `factor` after every `epochs` epochs.
    Step {
        /// Epochs between two changes.
        epochs: u32,
        /// What the step size is multiplied by.
        factor: f64,
    },
    /// Up in a line over `warmup_epochs`, then down along half a cosine to `floor` times the
    /// step size.
    Cosine {
        /// Epochs of the rise; 0 for none.
        #[serde(default)]
        warmup_epochs: u32,
        /// The last step size as a fraction of the first.
        #[serde(default)]
        floor: f64,
    },
}

/// When training ends before its last epoch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EarlyStopping {
    /// Epochs without improvement that are waited for.
    pub patience: u32,
    /// How much lower a loss must be to count.
    #[serde(default)]
    pub min_delta: f64,
}

/// Which weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Those of the epoch with the lowest held-out loss.
    Best,
    /// Those of the last epoch.
    Last,
}

/// An embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingSpec {
    /// The model whose encoder is used.
    pub model: String,
    /// The source or transform whose rows are embedded; default the model's own.
    #[serde(default)]
    pub from: Option<String>,
    /// Columns that tell rows apart; written first.
    #[serde(default)]
    pub key: Vec<String>,
    /// Further columns to carry along.
    #[serde(default)]
    pub columns: Vec<String>,
    /// Whether each row's reconstruction error is written, as column `reconstruction_error`.
    #[serde(default)]
    pub reconstruction_error: bool,
    /// How the vector is encoded; default `list`.
    #[serde(default)]
    pub encoding: VectorEncoding,
    /// Committed versions that are kept; default 3.
    #[serde(default = "versions")]
    pub keep_versions: u32,
}

fn versions() -> u32 {
    3
}

/// How the vector column is encoded in Parquet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VectorEncoding {
    /// A list of floats: read alike by Spark, DuckDB, pyarrow and pandas.
    #[default]
    List,
    /// A fixed-size list, for Arrow readers.
    FixedSizeList,
}

/// Choices with settings, which may be written as a name alone.
mod short {
    use std::{fmt, marker::PhantomData};

    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
    use serde::{
        Deserialize, Deserializer,
        de::{
            Error, IntoDeserializer, MapAccess, Visitor,
            value::{MapAccessDeserializer, MapDeserializer},
        },
    };

    use super::Choice;

    /// Reads `name` as `{ name: {} }`.
    pub(super) fn read<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(Short(PhantomData))
    }

    struct Short<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Short<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a name, or a name with settings")
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<T, E> {
            let none = MapDeserializer::new(std::iter::empty::<(&str, u32)>());
            let named = MapDeserializer::new(std::iter::once((name, none)));
            // Where settings are missing, the name itself is at fault.
            T::deserialize(MapAccessDeserializer::new(named)).or_else(|_: E| T::deserialize(name.into_deserializer()))
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }

    /// The same, or a plain value of `T`, or `auto`.
    pub(super) fn choice<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
        deserializer: D,
    ) -> Result<Choice<T>, D::Error> {
        deserializer.deserialize_any(AutoOr(PhantomData))
    }

    struct AutoOr<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for AutoOr<T> {
        type Value = Choice<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a name, or a name with settings")
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
            if name == "auto" { Ok(Choice::Auto) } else { Short(PhantomData).visit_str(name).map(Choice::Fixed) }
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
            T::deserialize(number.into_deserializer()).map(Choice::Fixed)
        }

        fn visit_i64<E: Error>(self, number: i64) -> Result<Self::Value, E> {
            T::deserialize(number.into_deserializer()).map(Choice::Fixed)
        }

        fn visit_f64<E: Error>(self, number: f64) -> Result<Self::Value, E> {
            T::deserialize(number.into_deserializer()).map(Choice::Fixed)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
            Short(PhantomData).visit_map(map).map(Choice::Fixed)
        }
    }

    /// The schema of `T`, one of its names, or `auto`.
    pub(super) fn choice_schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
        let plain = T::json_schema(generator);
        let value = if plain.get("oneOf").is_some() { schema::<T>(generator) } else { plain };
        json_schema!({ "anyOf": [{ "const": "auto" }, value] })
    }

    /// The schema of `T`, or one of its names that needs no settings.
    pub(super) fn schema<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
        let full = T::json_schema(generator);
        let variants = full.get("oneOf").and_then(|variants| variants.as_array()).cloned().unwrap_or_default();
        let complete = |variant: &serde_json::Value| {
            let name = variant["required"][0].as_str()?;
            variant["properties"][name].get("required").is_none().then(|| name.to_owned())
        };
        let names: Vec<String> = variants.iter().filter_map(complete).collect();
        json_schema!({ "anyOf": [{ "enum": names }, full] })
    }
}
