//! Batches of rows to bytes of a Parquet file: features, encoder network, columns, Parquet.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Float32Array, ListArray, RecordBatch},
    buffer::OffsetBuffer,
    compute::cast,
    datatypes::{DataType, Field, FieldRef, Schema, SchemaRef},
    error::ArrowError,
};
use bytes::Bytes;
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, ZstdLevel},
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties},
    },
    schema::types::ColumnPath,
};
use sha2::{Digest, Sha256};

use super::{EMBEDDING_COLUMN, ERROR_COLUMN, EmbedError, FINGERPRINT_KEY};
use crate::{
    data::{FittedFeatures, Rows},
    ids::Fingerprint,
    learn::Step,
    limits,
    pipeline::{EmbeddingPlan, spec::VectorEncoding},
    storage::Location,
};

/// File metadata key of the model's name.
const MODEL_KEY: &str = "emberflow.model";

/// File metadata key of the table's name.
const TABLE_KEY: &str = "emberflow.table";

/// What the files of a table have in common.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) table: String,
    /// Columns carried from the input: the keys, then the others.
    pub(super) carried: Vec<String>,
    /// Columns of a file.
    pub(super) schema: SchemaRef,
    /// Width of the embedding.
    pub(super) latent: usize,
    pub(super) features: FittedFeatures,
    reconstruction_error: bool,
    properties: WriterProperties,
}

impl Layout {
    /// `input` holds the carried columns.
    pub(super) fn new(
        plan: &EmbeddingPlan,
        input: &Schema,
        features: FittedFeatures,
        latent: usize,
        fingerprint: &Fingerprint,
    ) -> Result<Self, EmbedError> {
        let mut carried: Vec<String> = Vec::new();
        for column in plan.key.iter().chain(&plan.columns) {
            if column == EMBEDDING_COLUMN || (plan.reconstruction_error && column == ERROR_COLUMN) {
                return Err(EmbedError::ReservedColumn { table: plan.name.clone(), column: column.clone() });
            }
            if !carried.contains(column) {
                carried.push(column.clone());
            }
        }
        let mut fields: Vec<FieldRef> = Vec::new();
        for column in &carried {
            let field = input.field_with_name(column).map_err(|error| parquet_error(plan, error))?;
            fields.push(Arc::new(field.clone().with_data_type(plain(field.data_type()))));
        }
        let metadata = [(FINGERPRINT_KEY.to_owned(), fingerprint.to_string())];
        let embedding = Field::new(EMBEDDING_COLUMN, vector_type(plan.encoding, latent), false);
        fields.push(Arc::new(embedding.with_metadata(metadata.into())));
        if plan.reconstruction_error {
            fields.push(Arc::new(Field::new(ERROR_COLUMN, DataType::Float32, false)));
        }
        Ok(Self {
            table: plan.name.clone(),
            carried,
            schema: Arc::new(Schema::new(fields)),
            latent,
            features,
            reconstruction_error: plan.reconstruction_error,
            properties: properties(plan, fingerprint),
        })
    }
}

fn parquet_error(plan: &EmbeddingPlan, error: ArrowError) -> EmbedError {
    let (table, source) = (plan.name.clone(), error.into());
    EmbedError::Columns { table, source }
}

fn properties(plan: &EmbeddingPlan, fingerprint: &Fingerprint) -> WriterProperties {
    let pair = |key: &str, value: &str| KeyValue::new(key.to_owned(), value.to_owned());
    let pairs = vec![pair(FINGERPRINT_KEY, &fingerprint.0), pair(MODEL_KEY, &plan.model), pair(TABLE_KEY, &plan.name)];
    // No two vectors have a number in common: a dictionary or bounds of them are of no use.
    let numbers = ColumnPath::from(vec![EMBEDDING_COLUMN.to_owned(), "list".to_owned(), "element".to_owned()]);
    WriterProperties::builder()
        .set_created_by(concat!("emberflow ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_max_row_group_row_count(Some(limits::ROW_GROUP_ROWS))
        .set_column_dictionary_enabled(numbers.clone(), false)
        .set_column_statistics_enabled(numbers, EnabledStatistics::None)
        .set_key_value_metadata(Some(pairs))
        .build()
}

/// The type in which a column is written: encodings that only Arrow knows become what they
/// encode.
fn plain(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Dictionary(_, values) => plain(values),
        DataType::RunEndEncoded(_, values) => plain(values.data_type()),
        DataType::Utf8View => DataType::Utf8,
        DataType::BinaryView => DataType::Binary,
        other => other.clone(),
    }
}

/// Lists are named as the Parquet format wants it (`list`, `element`), so that all readers
/// take them for lists of numbers.
fn vector_type(encoding: VectorEncoding, latent: usize) -> DataType {
    match encoding {
        VectorEncoding::List => DataType::List(element()),
        VectorEncoding::FixedSizeList => DataType::FixedSizeList(element(), latent as i32),
    }
}

fn element() -> FieldRef {
    Arc::new(Field::new("element", DataType::Float32, false))
}

/// One file while it is encoded. Gives its bytes away as they come.
pub(super) struct Encoder {
    layout: Arc<Layout>,
    file: Location,
    writer: ArrowWriter<Vec<u8>>,
    rows: u64,
    size_bytes: u64,
    digest: Sha256,
}

impl Encoder {
    pub(super) fn new(layout: Arc<Layout>, file: Location) -> Result<Self, EmbedError> {
        let writer = ArrowWriter::try_new(Vec::new(), Arc::clone(&layout.schema), Some(layout.properties.clone()))
            .map_err(|source| EmbedError::Parquet { location: file.clone(), source })?;
        Ok(Self { layout, file, writer, rows: 0, size_bytes: 0, digest: Sha256::new() })
    }

    /// Rows so far.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes given away so far.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// SHA-256 of the bytes given away so far.
    pub(super) fn digest(self) -> [u8; 32] {
        self.digest.finalize().into()
    }

    /// Encodes some rows, which come from the input file `from`. `x` is a buffer to work in.
    pub(super) fn encode(
        &mut self,
        step: &mut dyn Step,
        rows: &Rows,
        from: &str,
        x: &mut Vec<f32>,
    ) -> Result<Bytes, EmbedError> {
        let (count, latent) = (rows.batch.num_rows(), self.layout.latent);
        x.clear();
        self.layout.features.encode(&rows.batch, from, rows.row_in_file, x)?;
        let mut embeddings = Vec::with_capacity(count * latent);
        let mut errors = Vec::with_capacity(count);
        step.encode(x, count, &mut embeddings, self.layout.reconstruction_error.then_some(&mut errors))?;
        let expected_errors = if self.layout.reconstruction_error { count } else { 0 };
        for (got, expected) in [(embeddings.len(), count * latent), (errors.len(), expected_errors)] {
            if got != expected {
                return Err(EmbedError::Width { table: self.layout.table.clone(), rows: count, got, expected });
            }
        }
        let batch = self.columns(&rows.batch, embeddings, errors).map_err(|error| self.failed(error.into()))?;
        self.writer.write(&batch).map_err(|error| self.failed(error))?;
        self.rows += count as u64;
        Ok(self.take())
    }

    /// The file's end.
    pub(super) fn finish(&mut self) -> Result<Bytes, EmbedError> {
        self.writer.finish().map_err(|error| self.failed(error))?;
        Ok(self.take())
    }

    fn take(&mut self) -> Bytes {
        let bytes = std::mem::take(self.writer.inner_mut());
        self.size_bytes += bytes.len() as u64;
        self.digest.update(&bytes);
        bytes.into()
    }

    fn columns(&self, input: &RecordBatch, embeddings: Vec<f32>, errors: Vec<f32>) -> Result<RecordBatch, ArrowError> {
        let schema = &self.layout.schema;
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(schema.fields().len());
        for (name, field) in self.layout.carried.iter().zip(schema.fields()) {
            let index = input.schema_ref().index_of(name)?;
            columns.push(cast(input.column(index), field.data_type())?);
        }
        columns.push(self.vectors(input.num_rows(), embeddings)?);
        if self.layout.reconstruction_error {
            columns.push(Arc::new(Float32Array::from(errors)));
        }
        RecordBatch::try_new(Arc::clone(schema), columns)
    }

    fn vectors(&self, rows: usize, embeddings: Vec<f32>) -> Result<ArrayRef, ArrowError> {
        let (latent, numbers) = (self.layout.latent, Arc::new(Float32Array::from(embeddings)));
        match self.layout.schema.field_with_name(EMBEDDING_COLUMN)?.data_type() {
            DataType::FixedSizeList(element, width) => {
                Ok(Arc::new(FixedSizeListArray::try_new(Arc::clone(element), *width, numbers, None)?))
            }
            _ => {
                let offsets = OffsetBuffer::from_lengths(std::iter::repeat_n(latent, rows));
                Ok(Arc::new(ListArray::try_new(element(), offsets, numbers, None)?))
            }
        }
    }

    fn failed(&self, source: parquet::errors::ParquetError) -> EmbedError {
        EmbedError::Parquet { location: self.file.clone(), source }
    }
}
