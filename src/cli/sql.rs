//! `emberflow sql`.

use std::{
    fs::File,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    sync::Arc,
};

use arrow::{
    array::{Array, ArrayRef, RecordBatch, StringArray},
    datatypes::{DataType, Field, Schema, SchemaRef},
    error::ArrowError,
    util::{
        display::{ArrayFormatter, FormatOptions},
        pretty::pretty_format_batches,
    },
};
use clap::ValueEnum;
use datafusion::{error::DataFusionError, execution::SendableRecordBatchStream, prelude::SessionContext};
use futures::StreamExt;

use super::{Context, Failure, pipeline_args::working_folder, shell};
use crate::{
    config::env_vars,
    query::{self, QueryError},
    remedy::Remedy,
    storage::Location,
};

/// Arguments of `sql`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    db: DbArg,
    /// The query; without one, and without --file, an interactive shell.
    query: Option<String>,
    /// A file of queries, separated by `;`.
    #[arg(long, short, value_name = "FILE", conflicts_with = "query")]
    file: Option<PathBuf>,
    /// How rows are printed.
    #[arg(long, value_enum, default_value = "table")]
    format: RowFormat,
    /// Write rows to a file instead of stdout.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Let vectors of different models be compared.
    #[arg(long)]
    mix_models: bool,
}

/// The store that a command looks at.
#[derive(Debug, clap::Args)]
pub(super) struct DbArg {
    /// The store of a pipeline: its `store:`, a path or URL.
    #[arg(long, env = env_vars::EMBERFLOW_DB, value_name = "STORE", default_value = "out")]
    db: String,
}

impl DbArg {
    /// The store's place.
    pub(super) fn location(&self) -> Result<Location, Failure> {
        Ok(Location::parse(&self.db, &working_folder()?)?)
    }
}

/// How rows are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RowFormat {
    /// Aligned columns.
    Table,
    /// Comma-separated values with a heading.
    Csv,
    /// One JSON array.
    Json,
    /// One JSON object per line.
    Ndjson,
    /// A Parquet file (with --out).
    Parquet,
}

/// Answers queries.
pub(super) async fn run(context: &Context, args: Args) -> Result<u8, Failure> {
    let session = query::open(&context.storage, &args.db.location()?, args.mix_models).await?;
    let text = match (&args.query, &args.file) {
        (Some(query), _) => query.clone(),
        (None, Some(file)) => read(file)?,
        (None, None) if io::stdin().is_terminal() => return shell::run(session).await,
        (None, None) => io::read_to_string(io::stdin()).map_err(|error| Failure::io("stdin", error))?,
    };
    let mut sink: Box<dyn Write + Send> = match &args.out {
        Some(file) => Box::new(File::create(file).map_err(|error| Failure::target(file.display(), &error))?),
        None if args.format == RowFormat::Parquet => return Err(Failure::usage("--format parquet needs --out FILE")),
        None => Box::new(io::stdout()),
    };
    for statement in statements(&text)? {
        answer(&session, &statement, args.format, &mut sink).await?;
    }
    Ok(0)
}

fn read(file: &std::path::Path) -> Result<String, Failure> {
    std::fs::read_to_string(file).map_err(|error| Failure::io(file.display(), error).with_remedy(Remedy::FixCommand))
}

/// The statements of a text.
pub(super) fn statements(text: &str) -> Result<Vec<String>, Failure> {
    use datafusion::sql::parser::DFParser;
    let parsed = DFParser::parse_sql(text).map_err(QueryError::of)?;
    match parsed.len() {
        0 => Err(Failure::usage("there is no query")),
        // As it was written, for printing may lose what the engine would refuse.
        1 => Ok(vec![text.to_owned()]),
        _ => Ok(parsed.iter().map(ToString::to_string).collect()),
    }
}

/// Runs one statement and writes its rows.
pub(super) async fn answer(
    session: &SessionContext,
    statement: &str,
    format: RowFormat,
    sink: &mut (dyn Write + Send),
) -> Result<(), Failure> {
    let rows = query::run(session, statement).await?;
    let mut sink = Sink { inner: sink, failed: None };
    let written = write_rows(rows, format, &mut sink).await;
    match sink.failed {
        // A reader that closed the pipe has seen enough.
        Some(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Some(error) => Err(Failure::target("output", &error)),
        None => written.map_err(|error| QueryError::of(error).into()),
    }
}

/// Remembers why it could not be written; the formats' own errors are text by then.
struct Sink<'a> {
    inner: &'a mut (dyn Write + Send),
    failed: Option<io::Error>,
}

impl Sink<'_> {
    fn noted<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            let kind = error.kind();
            // An interrupted write is tried again.
            self.failed = (kind != io::ErrorKind::Interrupted).then_some(error);
            kind.into()
        })
    }
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes);
        self.noted(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        let flushed = self.inner.flush();
        self.noted(flushed)
    }
}

async fn write_rows(
    mut rows: SendableRecordBatchStream,
    format: RowFormat,
    sink: &mut Sink<'_>,
) -> Result<(), DataFusionError> {
    let schema = rows.schema();
    match format {
        RowFormat::Table => {
            let mut batches = vec![RecordBatch::new_empty(Arc::clone(&schema))];
            while let Some(batch) = rows.next().await {
                batches.push(batch?);
            }
            // A statement that defines something answers nothing.
            if !schema.fields().is_empty() {
                writeln!(sink, "{}", pretty_format_batches(&batches)?)?;
            }
        }
        RowFormat::Csv => {
            let mut writer = arrow::csv::Writer::new(&mut *sink);
            writer.write(&flat(&RecordBatch::new_empty(schema))?)?;
            while let Some(batch) = rows.next().await {
                writer.write(&flat(&batch?)?)?;
            }
        }
        RowFormat::Json => {
            let mut writer = arrow::json::ArrayWriter::new(&mut *sink);
            while let Some(batch) = rows.next().await {
                writer.write(&batch?)?;
            }
            writer.finish()?;
            drop(writer);
            writeln!(sink)?;
        }
        RowFormat::Ndjson => {
            let mut writer = arrow::json::LineDelimitedWriter::new(&mut *sink);
            while let Some(batch) = rows.next().await {
                writer.write(&batch?)?;
            }
            writer.finish()?;
        }
        RowFormat::Parquet => {
            let mut writer = parquet::arrow::ArrowWriter::try_new(&mut *sink, schema, None)?;
            while let Some(batch) = rows.next().await {
                writer.write(&batch?)?;
            }
            writer.close()?;
        }
    }
    Ok(sink.flush()?)
}

/// CSV has no lists: nested columns become text.
fn flat(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let options = FormatOptions::default();
    let mut fields = Vec::new();
    let mut columns: Vec<ArrayRef> = Vec::new();
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        if field.data_type().is_nested() {
            let texts = ArrayFormatter::try_new(column, &options)?;
            let text = |row| column.is_valid(row).then(|| texts.value(row).to_string());
            columns.push(Arc::new((0..column.len()).map(text).collect::<StringArray>()));
            fields.push(Field::new(field.name(), DataType::Utf8, true));
        } else {
            columns.push(Arc::clone(column));
            fields.push(field.as_ref().clone());
        }
    }
    let schema: SchemaRef = Arc::new(Schema::new(fields));
    RecordBatch::try_new(schema, columns)
}

/// Writes to stdout, for the shell.
pub(super) async fn answer_on_stdout(session: &SessionContext, statement: &str) -> Result<(), Failure> {
    answer(session, statement, RowFormat::Table, &mut io::stdout()).await
}

/// Names of the tables of a session, sorted.
pub(super) fn tables(session: &SessionContext) -> Vec<String> {
    let mut names: Vec<String> = (session.catalog_names().iter())
        .filter_map(|catalog| session.catalog(catalog))
        .flat_map(|catalog| {
            let schemas = catalog.schema_names();
            schemas
                .into_iter()
                .filter(|name| name != "information_schema")
                .filter_map(move |name| catalog.schema(&name))
        })
        .flat_map(|schema| schema.table_names())
        .collect();
    names.sort();
    names.dedup();
    names
}
