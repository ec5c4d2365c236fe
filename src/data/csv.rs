//! CSV files: columns by their header names, types guessed from a sample or declared.
//!
//! A guess that a later line belies is an error that names file, line and column and says how
//! to declare the type; it never becomes NULL or text in silence.

use std::sync::Arc;

use arrow::{
    array::RecordBatch,
    csv::{ReaderBuilder, reader::Decoder, reader::Format},
    datatypes::{DataType, Field, Schema, SchemaRef},
    error::ArrowError,
};
use bytes::{Buf, Bytes};
use datafusion::{
    common::parsers::CompressionTypeVariant, datasource::file_format::file_compression_type::FileCompressionType,
    error::DataFusionError,
};
use futures::{Stream, StreamExt, TryStreamExt, stream, stream::BoxStream};

use super::{DataError, file::SnapshotFile};
use crate::{limits, pipeline::spec::CsvSpec};

/// Endings of compressed files.
const COMPRESSIONS: [(&str, CompressionTypeVariant); 4] = [
    (".gz", CompressionTypeVariant::GZIP),
    (".bz2", CompressionTypeVariant::BZIP2),
    (".zst", CompressionTypeVariant::ZSTD),
    (".xz", CompressionTypeVariant::XZ),
];

/// The name without the ending of its compression.
pub(super) fn uncompressed_name(name: &str) -> &str {
    COMPRESSIONS.iter().find_map(|(ending, _)| name.strip_suffix(ending)).unwrap_or(name)
}

/// The columns with types guessed from the first `sample_bytes` of the file; none if the file
/// is empty.
pub(super) async fn columns(
    table: &str,
    file: &SnapshotFile,
    csv: &CsvSpec,
    sample_bytes: usize,
) -> Result<Schema, DataError> {
    let mut text = text(file).await?;
    let mut sample = Vec::new();
    let mut whole = true;
    while let Some(bytes) = text.try_next().await? {
        sample.extend_from_slice(&bytes);
        if sample.len() > sample_bytes {
            whole = false;
            break;
        }
    }
    let records = if whole { sample.len() } else { whole_records(&sample) };
    if records == 0 {
        return Ok(Schema::empty());
    }
    let (schema, _) = format(csv)
        .infer_schema(&sample[..records], Some(limits::CSV_SAMPLE_ROWS))
        .map_err(|error| line_error(table, file, &Schema::empty(), error))?;
    for (place, field) in schema.fields().iter().enumerate() {
        if schema.fields().iter().take(place).any(|other| other.name() == field.name()) {
            return Err(DataError::DuplicateColumn { file: file.location().clone(), column: field.name().clone() });
        }
    }
    Ok(schema)
}

/// Bytes up to the end of the last record that is surely whole: a line break outside quotes.
fn whole_records(sample: &[u8]) -> usize {
    let mut quoted = false;
    let mut end = 0;
    for (place, &byte) in sample.iter().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            b'\n' if !quoted => end = place + 1,
            _ => {}
        }
    }
    end
}

fn format(csv: &CsvSpec) -> Format {
    let format = Format::default().with_header(csv.header).with_delimiter(u8::try_from(csv.delimiter).unwrap_or(b','));
    // The library takes missing text as a pattern only; letters, digits and `_` need no escape.
    let escaped = csv.null.iter().flat_map(|text| text.chars()).fold(String::new(), |mut pattern, letter| {
        if letter.is_ascii() && !letter.is_ascii_alphanumeric() && letter != '_' {
            pattern.push('\\');
        }
        pattern.push(letter);
        pattern
    });
    match format!("^(?:{escaped})?$").parse() {
        Ok(pattern) if csv.null.is_some() => format.with_null_regex(pattern),
        _ => format,
    }
}

/// The file's rows, with the columns `names` (all of them in the file) in that order; types as
/// in `table_schema`.
pub(super) fn read(
    table: Arc<str>,
    file: SnapshotFile,
    columns: &Schema,
    table_schema: &Schema,
    names: &[String],
    csv: &CsvSpec,
) -> impl Stream<Item = Result<RecordBatch, DataError>> + Send + 'static {
    let typed = columns.fields().iter().map(|field| {
        let data_type = table_schema.field_with_name(field.name()).map_or(DataType::Utf8, |f| f.data_type().clone());
        Field::new(field.name(), data_type, true)
    });
    let schema: SchemaRef = Arc::new(Schema::new(typed.collect::<Vec<_>>()));
    let projection = names.iter().filter_map(|name| schema.index_of(name).ok()).collect();
    let decoder = ReaderBuilder::new(schema.clone())
        .with_format(format(csv))
        .with_batch_size(limits::BATCH_ROWS)
        .with_projection(projection)
        .build_decoder();
    let batches = async move {
        file.check().await?;
        let text = text(&file).await?;
        let state = Decoding { table, file, schema, decoder, text, bytes: Bytes::new() };
        Ok::<_, DataError>(stream::try_unfold(state, Decoding::next))
    };
    stream::once(batches).try_flatten()
}

/// A file on its way through the decoder.
struct Decoding {
    table: Arc<str>,
    file: SnapshotFile,
    schema: SchemaRef,
    decoder: Decoder,
    text: BoxStream<'static, Result<Bytes, DataError>>,
    bytes: Bytes,
}

impl Decoding {
    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>, DataError> {
        loop {
            if self.bytes.is_empty() {
                // At the end the decoder gets an empty slice, which ends its last record.
                self.bytes = self.text.try_next().await?.unwrap_or_default();
            }
            match self.decoder.decode(&self.bytes) {
                Ok(0) => break,
                Ok(read) => self.bytes.advance(read),
                Err(error) => return Err(line_error(&self.table, &self.file, &self.schema, error)),
            }
        }
        let batch = self.decoder.flush().map_err(|error| line_error(&self.table, &self.file, &self.schema, error))?;
        Ok(batch.map(|batch| (batch, self)))
    }
}

/// The file's bytes, decompressed by its name, without a byte order mark.
async fn text(file: &SnapshotFile) -> Result<BoxStream<'static, Result<Bytes, DataError>>, DataError> {
    let name = file.location().name();
    let variant = COMPRESSIONS
        .iter()
        .find_map(|(ending, variant)| name.ends_with(ending).then_some(*variant))
        .unwrap_or(CompressionTypeVariant::UNCOMPRESSED);
    let bytes = file.stream().await?.map_err(|error| DataFusionError::External(Box::new(error))).boxed();
    let owner = file.clone();
    let bytes = FileCompressionType::from(variant)
        .convert_stream(bytes)
        .map_err(|error| file.corrupt(error))?
        .map_err(move |error| decompress_error(&owner, error));
    let unmarked = bytes.enumerate().map(|(place, bytes)| {
        bytes.map(|mut bytes: Bytes| {
            if place == 0 && bytes.starts_with(b"\xef\xbb\xbf") {
                bytes.advance(3);
            }
            bytes
        })
    });
    Ok(unmarked.boxed())
}

/// Errors of reading come back through the decompressor wrapped as I/O errors.
fn decompress_error(file: &SnapshotFile, error: DataFusionError) -> DataError {
    match error {
        DataFusionError::External(error) => file.corrupt(error),
        DataFusionError::IoError(error) => match error.downcast::<DataFusionError>() {
            Ok(error) => decompress_error(file, error),
            Err(error) => file.corrupt(error),
        },
        error => file.corrupt(error),
    }
}

/// The library's message with the file, the true line, the column's name and the way out.
fn line_error(table: &str, file: &SnapshotFile, schema: &Schema, error: ArrowError) -> DataError {
    let (message, first_line) = match &error {
        // These count records from 0, the others lines from 1.
        ArrowError::ParseError(message) => (message, 1),
        ArrowError::CsvError(message) => (message, 0),
        _ => return file.corrupt(error),
    };
    let message = message.split(". Row data:").next().unwrap_or(message);
    let Some(line) = number_after(message, "line ") else { return file.corrupt(error) };
    let column = number_after(message, "column ").and_then(|place| schema.fields().get(place as usize));
    let message = match column {
        Some(field) => {
            let value = message.split_once("value '").and_then(|(_, rest)| rest.split_once("' as type"));
            let value = value.map_or_else(|| "a value".to_owned(), |(value, _)| format!("`{value}`"));
            format!(
                "column `{name}`: {value} is not of the type {data_type}, which the file's first lines or \
                 `sources.{table}.columns` gave it; declare it, such as `{name}: VARCHAR`, in `sources.{table}.columns`",
                name = field.name(),
                data_type = field.data_type()
            )
        }
        None => message.to_owned(),
    };
    DataError::CsvLine { file: file.location().clone(), line: line + first_line, message }
}

fn number_after(message: &str, word: &str) -> Option<u64> {
    let (_, rest) = message.rsplit_once(word)?;
    let digits = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().ok()
}
