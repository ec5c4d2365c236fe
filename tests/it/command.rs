//! The built binary, its answers, and tables to feed it.

use std::{
    fs::File,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
};

use arrow::{
    array::{ArrayRef, Float32Array, Int64Array, RecordBatch},
    datatypes::{Field, Schema},
};
use parquet::arrow::ArrowWriter;

/// What a command answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    /// The last line of stdout as JSON: the result of `run --output json`.
    pub(crate) fn result(&self) -> serde_json::Value {
        let line = self.stdout.lines().last().unwrap_or_else(|| panic!("no output: {self:?}"));
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Fails with all that was said unless the code is this.
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }
}

impl From<Output> for Answer {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// The binary, free of the caller's settings.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_emberflow"));
    command.args(args).stdin(Stdio::null());
    let own = ["EMBERFLOW_DB", "EMBERFLOW_CONF", "EMBERFLOW_LOG"];
    let others = ["HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_USER_NAME", "NO_COLOR", "COLUMNS"];
    for name in own.iter().chain(&others) {
        command.env_remove(name);
    }
    command
}

/// Runs it to its end.
pub(crate) fn emberflow(args: &[&str]) -> Answer {
    command(args).output().unwrap().into()
}

/// Starts it, its output kept for `wait_with_output`.
pub(crate) fn spawn(args: &[&str]) -> Child {
    command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The pipelines folder of the repository.
pub(crate) fn pipelines() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines")
}

/// Writes columns as one Parquet file.
pub(crate) fn write_parquet(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let fields: Vec<_> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns.into_iter().map(|(_, array)| array).collect());
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), schema, None).unwrap();
    writer.write(&batch.unwrap()).unwrap();
    writer.close().unwrap();
}

/// `id` and features `f0`, `f1`, `f2` of `rows` rows; `value(row, feature)` fills them.
pub(crate) fn write_features(path: &Path, rows: usize, value: impl Fn(usize, usize) -> Option<f32>) {
    let mut columns: Vec<(&str, ArrayRef)> =
        vec![("id", Arc::new((0..rows as i64).collect::<Int64Array>()) as ArrayRef)];
    for (feature, name) in ["f0", "f1", "f2"].into_iter().enumerate() {
        columns.push((name, Arc::new((0..rows).map(|row| value(row, feature)).collect::<Float32Array>())));
    }
    write_parquet(path, columns);
}

/// A feature value for tests that do not care which, as `write_features` takes it.
#[allow(clippy::unnecessary_wraps)]
pub(crate) fn wave(row: usize, feature: usize) -> Option<f32> {
    Some(((row * (feature + 2)) as f32 * 0.37).sin())
}

/// A list column of `u8`, one list per row, widths as given.
pub(crate) fn lists(widths: &[usize]) -> ArrayRef {
    let rows = widths.iter().map(|width| Some((0..*width).map(|i| Some(i as u8)).collect::<Vec<_>>()));
    Arc::new(arrow::array::ListArray::from_iter_primitive::<arrow::datatypes::UInt8Type, _, _>(rows))
}

/// A small pipeline over `data`, written to `folder/pipeline.yaml`; `features` and `extra`
/// are YAML for the model.
pub(crate) fn write_pipeline(folder: &Path, data: &Path, features: &str, extra: &str) -> String {
    let file = folder.join("pipeline.yaml");
    let text = format!(
        "version: 1\nname: small\nstore: out\nsources:\n  rows: {{ path: {:?} }}\nmodels:\n  tiny:\n    \
         from: rows\n    features: {features}\n    latent: 2\n    train: {{ epochs: 2, batch: 16 }}\n{extra}\
         embeddings:\n  vectors: {{ model: tiny, key: [id] }}\n",
        data.display().to_string()
    );
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}
