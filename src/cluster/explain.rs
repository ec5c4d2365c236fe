//! What a run would do, from footers alone: nothing is read beyond them, nothing is written
//! but a probe at the target.

use std::fmt;

use datafusion::physical_plan::displayable;
use serde::Serialize;

use super::RunError;
use crate::{
    data::{self, Dataset, Engine, FeatureLayout, Needs, Snapshot, StepPlan},
    ids::Rank,
    learn::{self, NetShape, Parts},
    pipeline::{
        ModelPlan, PipelinePlan,
        spec::{PartitionBy, Spread},
    },
    runs::{self, DecisionRecord},
    storage::{Location, Storage},
};

/// What a run would do.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The pipeline.
    pub pipeline: String,
    /// Folder of the results.
    pub store: Location,
    /// Why nothing can be written there, if so.
    pub not_writable: Option<String>,
    /// What is read.
    pub sources: Vec<SourceExplanation>,
    /// How DataFusion would make each transform.
    pub transforms: Vec<TransformExplanation>,
    /// What is trained.
    pub models: Vec<ModelExplanation>,
    /// What is written.
    pub embeddings: Vec<EmbeddingExplanation>,
}

/// A source.
#[derive(Clone, Debug, Serialize)]
pub struct SourceExplanation {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub location: Location,
    /// Data files.
    pub files: u64,
    /// Their bytes.
    pub size_bytes: u64,
}

/// A transform.
#[derive(Clone, Debug, Serialize)]
pub struct TransformExplanation {
    /// Its name.
    pub name: String,
    /// What it reads.
    pub inputs: Vec<String>,
    /// DataFusion's physical plan.
    pub physical_plan: String,
}

/// A model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelExplanation {
    /// Its name.
    pub name: String,
    /// The table it learns from.
    pub from: String,
    /// Features of a row; unknown where a list's width only shows in the rows.
    pub features: Option<usize>,
    /// Widths of all layers, from input to output.
    pub widths: Vec<usize>,
    /// Trainable numbers.
    pub parameters: Option<usize>,
    /// Bytes that each rank gives to the others in one step.
    pub exchanged_bytes_per_step: Option<usize>,
    /// Memory for one rank's parameters, gradients and optimizer state.
    pub model_bytes_per_rank: Option<usize>,
    /// What a measurement settles when it runs: `executors`, `sync`, `partition`.
    pub left_open: Vec<&'static str>,
    /// What the last run of this pipeline decided of that.
    pub decision: Option<DecisionRecord>,
    /// How the rows are dealt; unknown where a query or an exchange must run first.
    pub rows: Option<RowsExplanation>,
}

/// How the rows of a model are dealt.
#[derive(Clone, Debug, Serialize)]
pub struct RowsExplanation {
    /// Rows to train on.
    pub train_rows: u64,
    /// Rows held out.
    pub held_out_rows: u64,
    /// Decoded bytes of the needed columns.
    pub size_bytes: u64,
    /// Partitions.
    pub partitions: usize,
    /// Rows of the fullest partition over the mean.
    pub skew: f64,
    /// Steps of one epoch.
    pub steps_per_epoch: u64,
    /// By rank.
    pub ranks: Vec<RankExplanation>,
}

/// One rank's share.
#[derive(Clone, Debug, Serialize)]
pub struct RankExplanation {
    /// The rank.
    pub rank: Rank,
    /// Its partitions.
    pub partitions: usize,
    /// Rows it trains on.
    pub train_rows: u64,
    /// Their bytes as features (f32), where the width is known.
    pub feature_bytes: Option<u64>,
}

/// An embedding table.
#[derive(Clone, Debug, Serialize)]
pub struct EmbeddingExplanation {
    /// Its name.
    pub table: String,
    /// The model.
    pub model: String,
    /// The table whose rows are encoded.
    pub from: String,
    /// Where it is written.
    pub location: Location,
    /// Versions kept.
    pub keep_versions: u32,
}

/// Plans a run without running it.
pub async fn explain(storage: &Storage, plan: &PipelinePlan) -> Result<Explanation, RunError> {
    let snapshot = Snapshot::take(storage, plan).await?;
    if let Some((table, _)) = snapshot.sources.iter().find(|(_, files)| files.is_empty()) {
        return Err(RunError::Empty { table: table.clone() });
    }
    let engine = Engine::open(storage, plan, &snapshot).await?;
    let mut transforms = Vec::new();
    for transform in &plan.transforms {
        transforms.push(TransformExplanation {
            name: transform.name.clone(),
            inputs: transform.inputs.clone(),
            physical_plan: physical_plan(&engine, &transform.name).await?,
        });
    }
    let mut models = Vec::new();
    for model in &plan.models {
        models.push(explain_model(storage, plan, &engine, model).await?);
    }
    Ok(Explanation {
        pipeline: plan.name.clone(),
        store: plan.store.clone(),
        not_writable: storage.check_writable(&plan.store).await.err().map(|error| error.to_string()),
        sources: explain_sources(plan, &snapshot),
        transforms,
        models,
        embeddings: explain_embeddings(plan),
    })
}

fn explain_sources(plan: &PipelinePlan, snapshot: &Snapshot) -> Vec<SourceExplanation> {
    let explain = |(name, files): (&String, &Vec<crate::storage::FileEntry>)| {
        Some(SourceExplanation {
            name: name.clone(),
            location: plan.source(name)?.location.clone(),
            files: files.len() as u64,
            size_bytes: files.iter().map(|file| file.size_bytes).sum(),
        })
    };
    snapshot.sources.iter().filter_map(explain).collect()
}

fn explain_embeddings(plan: &PipelinePlan) -> Vec<EmbeddingExplanation> {
    let explain = |embedding: &crate::pipeline::EmbeddingPlan| EmbeddingExplanation {
        table: embedding.name.clone(),
        model: embedding.model.clone(),
        from: embedding.from.clone(),
        location: plan.store.join(&format!("embeddings/{}", embedding.name)),
        keep_versions: embedding.keep_versions,
    };
    plan.embeddings.iter().map(explain).collect()
}

async fn physical_plan(engine: &Engine, table: &str) -> Result<String, RunError> {
    let plan = async { engine.session().table(table).await?.create_physical_plan().await };
    let plan = plan.await.map_err(|error| data::DataError::query(table, error))?;
    Ok(displayable(plan.as_ref()).indent(false).to_string())
}

async fn explain_model(
    storage: &Storage,
    plan: &PipelinePlan,
    engine: &Engine,
    model: &ModelPlan,
) -> Result<ModelExplanation, RunError> {
    let schema = engine.schema(&model.from).await?;
    let layout = FeatureLayout::resolve(model, &schema, &plan.origin)?;
    let features = layout.width();
    learn::check_spread(model, plan.run.executors)?;
    let shape = net_shape(model, &layout);
    let parameters = shape.as_ref().map(NetShape::parameters);
    let needs = Needs {
        columns: layout.columns(),
        reject_missing: layout.reject_missing(),
        hash: (model.partition.by == PartitionBy::Hash).then(|| model.partition.clone()),
    };
    let left_open = [
        (plan.run.choose_executors, "executors"),
        (model.train.choose_sync, "sync"),
        (model.partition.choose, "partition"),
    ];
    let decision =
        if left_open.iter().any(|(open, _)| *open) { last_decision(storage, plan, model).await? } else { None };
    let dataset = data::in_place(storage, plan, engine, &model.from, &needs).await?;
    let inner = || model.net.hidden.iter().copied();
    let half = || inner().chain([model.net.latent]).chain(inner().rev());
    Ok(ModelExplanation {
        name: model.name.clone(),
        from: model.from.clone(),
        features,
        widths: features.into_iter().chain(half()).chain(features).collect(),
        parameters,
        exchanged_bytes_per_step: shape.as_ref().map(|shape| {
            let numbers = learn::exchanged_numbers(model.spread, shape, plan.run.executors, model.train.batch);
            numbers * size_of::<f32>()
        }),
        // Parameters, gradients and two moments, these of the own part only.
        model_bytes_per_rank: shape.as_ref().map(|shape| {
            let own = Parts::new(model.spread, shape, plan.run.executors).map(|parts| parts.largest());
            2 * (shape.parameters() + own.unwrap_or(shape.parameters())) * size_of::<f32>()
        }),
        left_open: left_open.into_iter().filter_map(|(open, key)| open.then_some(key)).collect(),
        decision,
        rows: dataset.map(|dataset| explain_rows(&dataset, plan, model, shape.as_ref())),
    })
}

/// What was decided in the latest run of this pipeline that left it open.
async fn last_decision(
    storage: &Storage,
    plan: &PipelinePlan,
    model: &ModelPlan,
) -> Result<Option<DecisionRecord>, RunError> {
    let latest_first = runs::list_runs(storage, &plan.store).await?.into_iter();
    let mut decisions = latest_first.filter(|run| run.pipeline == plan.name).flat_map(|run| run.decisions);
    Ok(decisions.find(|decision| decision.model == model.name))
}

/// The network's shape, where it is known before rows are read.
fn net_shape(model: &ModelPlan, layout: &FeatureLayout) -> Option<NetShape> {
    let slices = match model.spread {
        Spread::Vertical { slices } => layout.slices(slices as usize)?,
        Spread::Data {} | Spread::Pipeline { .. } => Vec::new(),
    };
    Some(NetShape { features: layout.width()?, net: model.net.clone(), slices })
}

fn explain_rows(
    dataset: &Dataset,
    plan: &PipelinePlan,
    model: &ModelPlan,
    shape: Option<&NetShape>,
) -> RowsExplanation {
    let partitions = data::deal(dataset, &model.partition, model.train.validation, plan.run.seed);
    let rows: Vec<u64> = partitions.partitions.iter().map(|partition| partition.train_rows).collect();
    let rank = |rank| {
        let (rank, executors) = (Rank(rank), plan.run.executors);
        let owned = learn::partitions_read(&partitions, model.spread, rank, executors);
        let train_rows = owned.iter().map(|id| rows[id.0 as usize]).sum();
        let features = shape.map(|shape| learn::features_read(model.spread, shape, rank, executors));
        let feature_bytes = features.map(|features| train_rows * (features * size_of::<f32>()) as u64);
        RankExplanation { rank, partitions: owned.len(), train_rows, feature_bytes }
    };
    RowsExplanation {
        train_rows: partitions.train_rows(),
        held_out_rows: partitions.held_out_rows(),
        size_bytes: dataset.files.iter().flat_map(|file| &file.row_groups).map(|group| group.size_bytes).sum(),
        partitions: rows.len(),
        skew: partitions.skew(),
        steps_per_epoch: StepPlan::new(&rows, model.train.batch).steps(),
        ranks: (0..plan.run.executors).map(rank).collect(),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "pipeline {}", self.pipeline)?;
        match &self.not_writable {
            None => writeln!(f, "store {} (writable)", self.store)?,
            Some(reason) => writeln!(f, "store {} (NOT WRITABLE: {reason})", self.store)?,
        }
        for source in &self.sources {
            let size = bytes(source.size_bytes);
            writeln!(f, "\nsource {}: {} in {} files, {size}", source.name, source.location, source.files)?;
        }
        for transform in &self.transforms {
            writeln!(f, "\ntransform {} of {}", transform.name, transform.inputs.join(", "))?;
            for line in transform.physical_plan.lines() {
                writeln!(f, "    {line}")?;
            }
        }
        for model in &self.models {
            model.fmt(f)?;
        }
        for table in &self.embeddings {
            writeln!(f, "\nembedding {}: {} encoded by {}", table.table, table.from, table.model)?;
            writeln!(f, "    to {}, the last {} versions kept", table.location, table.keep_versions)?;
        }
        Ok(())
    }
}

impl fmt::Display for ModelExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths.iter().map(ToString::to_string).collect::<Vec<_>>().join("-");
        writeln!(f, "\nmodel {} learns from {}", self.name, self.from)?;
        if let (Some(parameters), Some(memory), Some(exchanged)) =
            (self.parameters, self.model_bytes_per_rank, self.exchanged_bytes_per_step)
        {
            writeln!(f, "    layers {widths}: {parameters} parameters, {} per executor", bytes(memory as u64))?;
            writeln!(f, "    exchanged per step and executor: {}", bytes(exchanged as u64))?;
        } else {
            writeln!(f, "    layers ?-{widths}-?: a list's width is known once its rows are read")?;
        }
        if !self.left_open.is_empty() {
            writeln!(f, "    left to a measurement: {}", self.left_open.join(", "))?;
        }
        if let Some(decision) = &self.decision {
            writeln!(f, "    decided last: {}", decision.why)?;
        }
        let Some(rows) = &self.rows else {
            return writeln!(f, "    rows are counted when the run prepares them (a query or an exchange comes first)");
        };
        let RowsExplanation { train_rows, held_out_rows, partitions, skew, steps_per_epoch, .. } = rows;
        writeln!(f, "    {train_rows} rows to train on, {held_out_rows} held out, {} decoded", bytes(rows.size_bytes))?;
        writeln!(f, "    {partitions} partitions, skew {skew:.2}; {steps_per_epoch} steps per epoch")?;
        for rank in &rows.ranks {
            let size = rank.feature_bytes.map(|size| format!(", {} of features", bytes(size))).unwrap_or_default();
            writeln!(f, "    rank {}: {} partitions, {} rows{size}", rank.rank, rank.partitions, rank.train_rows)?;
        }
        Ok(())
    }
}

/// A size as people write it.
fn bytes(size: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (0..units.len() - 1).find(|unit| size >> (10 * (unit + 1)) == 0).unwrap_or(units.len() - 1);
    if unit == 0 {
        format!("{size} B")
    } else {
        format!("{:.1} {}", size as f64 / (1u64 << (10 * unit)) as f64, units[unit])
    }
}
