//! Run records as tables.

use std::sync::Arc;

use arrow::{
    array::{
        ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray, UInt32Array,
        UInt64Array,
    },
    error::ArrowError,
};
use datafusion::{catalog::TableProvider, datasource::MemTable};

use super::QueryError;
use crate::runs::{RankRecord, RunRecord};

type NamedTable = (&'static str, Arc<dyn TableProvider>);

/// `runs`, `run_metrics`, `epochs` and `ranks`.
pub(super) fn all(runs: &[RunRecord]) -> Result<[NamedTable; 4], QueryError> {
    Ok([
        ("runs", table(runs_batch(runs))?),
        ("run_metrics", table(metrics_batch(runs))?),
        ("epochs", table(epochs_batch(runs))?),
        ("ranks", table(ranks_batch(runs))?),
    ])
}

fn table(batch: Result<RecordBatch, ArrowError>) -> Result<Arc<dyn TableProvider>, QueryError> {
    let batch = batch.map_err(datafusion::error::DataFusionError::from)?;
    Ok(Arc::new(MemTable::try_new(batch.schema(), vec![vec![batch]])?))
}

fn texts<'a, T: Into<Option<&'a str>>>(values: impl Iterator<Item = T>) -> ArrayRef {
    Arc::new(values.map(Into::into).collect::<StringArray>())
}

fn times(values: impl Iterator<Item = Option<i64>>) -> ArrayRef {
    Arc::new(values.collect::<TimestampMillisecondArray>().with_timezone("UTC"))
}

fn floats(values: impl Iterator<Item = Option<f64>>) -> ArrayRef {
    Arc::new(values.collect::<Float64Array>())
}

fn counts(values: impl Iterator<Item = u64>) -> ArrayRef {
    Arc::new(values.collect::<UInt64Array>())
}

fn small_counts(values: impl Iterator<Item = u32>) -> ArrayRef {
    Arc::new(values.collect::<UInt32Array>())
}

fn runs_batch(runs: &[RunRecord]) -> Result<RecordBatch, ArrowError> {
    let elapsed = |run: &RunRecord| run.ended_ms.map(|end| (end - run.started_ms) as f64 / 1e3);
    let exit_codes = runs.iter().map(|run| run.error.as_ref().map(|error| i64::from(error.exit_code)));
    RecordBatch::try_from_iter_with_nullable([
        ("run_id", texts(runs.iter().map(|run| run.run_id.as_str())), false),
        ("pipeline", texts(runs.iter().map(|run| run.pipeline.as_str())), false),
        ("status", texts(runs.iter().map(|run| run.status.as_str())), false),
        ("started", times(runs.iter().map(|run| Some(run.started_ms))), false),
        ("ended", times(runs.iter().map(|run| run.ended_ms)), true),
        ("elapsed_s", floats(runs.iter().map(elapsed)), true),
        ("attempt", small_counts(runs.iter().map(|run| run.attempt.0)), false),
        ("executors", small_counts(runs.iter().map(|run| run.executors)), false),
        ("device", texts(runs.iter().map(|run| run.device.as_str())), false),
        ("host", texts(runs.iter().map(|run| run.host.as_str())), false),
        ("seed", counts(runs.iter().map(|run| run.seed)), false),
        ("file", texts(runs.iter().map(|run| run.file.as_str())), false),
        ("spec_hash", texts(runs.iter().map(|run| run.spec_hash.as_str())), false),
        ("code_version", texts(runs.iter().map(|run| run.code_version.as_str())), false),
        ("rows_trained", counts(runs.iter().map(|run| run.ledgers.iter().map(|ledger| ledger.trained).sum())), false),
        ("rows_embedded", counts(runs.iter().map(|run| run.ledgers.iter().map(|ledger| ledger.embedded).sum())), false),
        ("exit_code", Arc::new(exit_codes.collect::<Int64Array>()), true),
        ("error", texts(runs.iter().map(|run| run.error.as_ref().map(|error| error.message.as_str()))), true),
    ])
}

fn metrics_batch(runs: &[RunRecord]) -> Result<RecordBatch, ArrowError> {
    let metrics = || runs.iter().flat_map(|run| run.metrics.iter().map(move |(name, value)| (run, name, *value)));
    RecordBatch::try_from_iter_with_nullable([
        ("run_id", texts(metrics().map(|(run, ..)| run.run_id.as_str())), false),
        ("metric", texts(metrics().map(|(_, name, _)| name.as_str())), false),
        ("value", floats(metrics().map(|(.., value)| Some(value))), false),
    ])
}

fn epochs_batch(runs: &[RunRecord]) -> Result<RecordBatch, ArrowError> {
    let models = || runs.iter().flat_map(|run| run.models.iter().map(move |model| (run, model)));
    let epochs = || models().flat_map(|(run, model)| model.epochs.iter().map(move |epoch| (run, model, epoch)));
    RecordBatch::try_from_iter_with_nullable([
        ("run_id", texts(epochs().map(|(run, ..)| run.run_id.as_str())), false),
        ("pipeline", texts(epochs().map(|(run, ..)| run.pipeline.as_str())), false),
        ("model", texts(epochs().map(|(_, model, _)| model.name.as_str())), false),
        ("epoch", small_counts(epochs().map(|(.., epoch)| epoch.epoch)), false),
        ("loss", floats(epochs().map(|(.., epoch)| Some(epoch.loss))), false),
        ("held_out_loss", floats(epochs().map(|(.., epoch)| epoch.held_out_loss)), true),
        ("learning_rate", floats(epochs().map(|(.., epoch)| Some(epoch.learning_rate))), false),
        ("rows", counts(epochs().map(|(.., epoch)| epoch.rows)), false),
        ("elapsed_s", floats(epochs().map(|(.., epoch)| Some(epoch.elapsed_s))), false),
    ])
}

fn ranks_batch(runs: &[RunRecord]) -> Result<RecordBatch, ArrowError> {
    let models = || runs.iter().flat_map(|run| run.models.iter().map(move |model| (run, model)));
    let ranks = || models().flat_map(|(run, model)| model.ranks.iter().map(move |rank| (run, model, rank)));
    let seconds = |value: fn(&RankRecord) -> f64| floats(ranks().map(|(.., rank)| Some(value(rank))));
    RecordBatch::try_from_iter_with_nullable([
        ("run_id", texts(ranks().map(|(run, ..)| run.run_id.as_str())), false),
        ("model", texts(ranks().map(|(_, model, _)| model.name.as_str())), false),
        ("rank", small_counts(ranks().map(|(.., rank)| rank.rank)), false),
        ("rows", counts(ranks().map(|(.., rank)| rank.rows)), false),
        ("feed_wait_s", seconds(|rank| rank.feed_wait_s), false),
        ("compute_s", seconds(|rank| rank.compute_s), false),
        ("wait_s", seconds(|rank| rank.wait_s), false),
        ("communicate_s", seconds(|rank| rank.communicate_s), false),
        ("update_s", seconds(|rank| rank.update_s), false),
        ("bytes_sent", counts(ranks().map(|(.., rank)| rank.bytes_sent)), false),
        ("cpu_s", seconds(|rank| rank.cpu_s), false),
        ("peak_memory_bytes", counts(ranks().map(|(.., rank)| rank.peak_memory_bytes)), false),
    ])
}
