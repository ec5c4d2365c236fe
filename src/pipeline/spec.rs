//! What a pipeline file says, as typed values; nothing here is checked against anything else.
//!
//! The same types give the JSON Schema (`emberflow schema`), so the doc comments below are
//! what an editor shows.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

/// How a run is executed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunSpec {
    /// Executors that train together; default 1.
    pub executors: u32,
    /// Where tensors live: `cpu`, `wgpu` or `cuda`; default `cpu`.
    pub device: DeviceKind,
    /// Memory for data in flight, such as `512MiB` or `4GiB`; default `2GiB`.
    pub memory: String,
    /// Seed of everything random; default 42.
    pub seed: u64,
}

impl Default for RunSpec {
    fn default() -> Self {
        Self { executors: 1, device: DeviceKind::Cpu, memory: "2GiB".to_owned(), seed: 42 }
    }
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
    /// How rows are dealt to executors.
    #[serde(default)]
    pub partition: PartitionSpec,
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
            epochs: 10,
            batch: 256,
            loss: Loss::Mse,
            optimizer: OptimizerKind::Adam,
            learning_rate: 1e-3,
            momentum: None,
            betas: None,
            epsilon: None,
            weight_decay: None,
            schedule: Schedule::Constant,
            clip_norm: None,
            validation: 0.0,
            early_stopping: None,
            keep: None,
            checkpoint_steps: None,
        }
    }
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// Not at all.
    #[default]
    Constant,
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
