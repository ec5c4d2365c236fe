//! A store that a small pipeline really wrote, and a session of it.

use std::{
    error::Error,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    datatypes::{DataType, Float32Type, Float64Type},
    util::display::{ArrayFormatter, FormatOptions},
};
use datafusion::prelude::SessionContext;
use emberflow::{
    config::SiteConfig,
    query::{self, QueryError},
    storage::{Location, Storage},
};
use futures::TryStreamExt;
use sqllogictest::{AsyncDB, DBOutput, DefaultColumnType};

use crate::command::{emberflow, wave, write_features};

/// Three models over the same rows: `vectors` and `others` have the same width, `wides` has
/// another one. `vectors` has two versions.
const PIPELINE: &str = r#"
version: 1
name: small
store: out
params: { epochs: { type: int, default: 1 } }
sources:
  points: { path: points.parquet }
  labels: { path: LABELS.CSV, columns: { zip: VARCHAR }, csv: { delimiter: ";", "null": NA } }
transforms:
  labelled: { sql: "SELECT points.id, f0, f1, f2, label, zip FROM points JOIN labels ON points.id = labels.id" }
models:
  tiny:
    from: labelled
    features: [{ columns: ["f*"] }]
    latent: 2
    train: { epochs: "${epochs}", batch: 16 }
  twin:
    from: labelled
    features: [{ columns: ["f*"] }]
    hidden: [4]
    latent: 2
    train: { epochs: 1, batch: 16 }
  wide:
    from: labelled
    features: [{ columns: ["f*"] }]
    latent: 3
    train: { epochs: 1, batch: 16 }
embeddings:
  vectors: { model: tiny, key: [id], columns: [label] }
  others: { model: twin, key: [id], encoding: fixed_size_list }
  wides: { model: wide, key: [id] }
"#;

/// Rows of each table.
pub(crate) const ROWS: usize = 40;

/// The store, in a folder of its own.
pub(crate) struct SmallStore {
    folder: tempfile::TempDir,
}

impl SmallStore {
    /// Runs the pipeline twice, so that there are two versions.
    pub(crate) fn make() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_features(&folder.path().join("points.parquet"), ROWS, wave);
        let mut labels = "id;label;zip\n".to_owned();
        for row in 0..ROWS {
            let label = if row % 10 == 9 { "NA" } else { ["red", "green", "blue"][row % 3] };
            writeln!(labels, "{row};{label};0{row:04}").unwrap();
        }
        std::fs::write(folder.path().join("LABELS.CSV"), labels).unwrap();
        let file = folder.path().join("small.yaml");
        std::fs::write(&file, PIPELINE).unwrap();
        for epochs in ["epochs=1", "epochs=2"] {
            emberflow(&["run", &file.display().to_string(), "--param", epochs, "--run-id", &epochs.replace('=', "-")])
                .expect(0);
        }
        Self { folder }
    }

    /// The pipeline's folder.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The value of `--db`.
    pub(crate) fn db(&self) -> String {
        self.folder.path().join("out").display().to_string()
    }

    /// The folder of a version.
    pub(crate) fn version(&self, table: &str, version: u64) -> PathBuf {
        self.folder.path().join(format!("out/embeddings/{table}/v{version:06}"))
    }

    /// A session.
    pub(crate) async fn open(&self, mix_models: bool) -> Session {
        let store = Location::parse(&self.db(), Path::new("/")).unwrap();
        Session(query::open(&Storage::new(&SiteConfig::default()), &store, mix_models).await.unwrap())
    }
}

/// A session of a store.
pub(crate) struct Session(SessionContext);

impl Session {
    /// The rows of a query.
    pub(crate) async fn rows(&self, sql: &str) -> Result<Vec<RecordBatch>, QueryError> {
        query::run(&self.0, sql).await?.try_collect().await.map_err(QueryError::of)
    }

    /// The rows as text, the cells of each.
    pub(crate) async fn texts(&self, sql: &str) -> Result<Vec<Vec<String>>, QueryError> {
        let mut rows = Vec::new();
        for batch in self.rows(sql).await? {
            let columns: Vec<Vec<String>> = batch.columns().iter().map(texts).collect();
            rows.extend((0..batch.num_rows()).map(|row| columns.iter().map(|column| column[row].clone()).collect()));
        }
        Ok(rows)
    }
}

/// Values as the `.slt` files write them: numbers to six digits behind the point.
fn texts(column: &ArrayRef) -> Vec<String> {
    let options = FormatOptions::default();
    let other = ArrayFormatter::try_new(column, &options).unwrap();
    let number = |row: usize| match column.data_type() {
        DataType::Float64 => Some(column.as_primitive::<Float64Type>().value(row)),
        DataType::Float32 => Some(f64::from(column.as_primitive::<Float32Type>().value(row))),
        _ => None,
    };
    let text = |row: usize| match number(row) {
        _ if column.is_null(row) => "NULL".to_owned(),
        // Without a sign of zero.
        Some(number) => ((number * 1e6).round() / 1e6 + 0.0).to_string(),
        None => Some(other.value(row).to_string()).filter(|text| !text.is_empty()).unwrap_or("(empty)".to_owned()),
    };
    (0..column.len()).map(text).collect()
}

/// An error with all its causes.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        write!(text, "\n{error}").unwrap();
        cause = error.source();
    }
    text
}

/// What a `.slt` file is told of an error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Told(String);

#[async_trait::async_trait]
impl AsyncDB for Session {
    type Error = Told;
    type ColumnType = DefaultColumnType;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<DefaultColumnType>, Told> {
        let rows = self.texts(sql).await.map_err(|error| Told(chain(&error)))?;
        let Some(first) = rows.first() else { return Ok(DBOutput::StatementComplete(0)) };
        Ok(DBOutput::Rows { types: vec![DefaultColumnType::Any; first.len()], rows })
    }

    async fn shutdown(&mut self) {}
}
