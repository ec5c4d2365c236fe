//! Arrow IPC files (`.arrow`, Feather 2): footer first, then record batch by record batch.

use std::sync::Arc;

use arrow::{
    array::RecordBatch,
    buffer::Buffer,
    datatypes::{Schema, SchemaRef},
    error::ArrowError,
    ipc::{
        Block, MetadataVersion, convert::fb_to_schema, reader::FileDecoder, reader::read_footer_length, root_as_footer,
    },
};
use futures::{Stream, StreamExt, TryStreamExt, stream};

use super::{DataError, file::SnapshotFile};

/// What the footer of a file tells.
#[derive(Clone, Debug)]
pub(super) struct IpcFooter {
    /// The columns.
    pub(super) schema: SchemaRef,
    version: MetadataVersion,
    dictionaries: Vec<Block>,
    batches: Vec<Block>,
}

/// The last bytes of a file: the footer's length and the magic.
const TRAILER_BYTES: u64 = 10;

/// Reads the footer of a file.
pub(super) async fn footer(file: &SnapshotFile) -> Result<IpcFooter, DataError> {
    let size = file.entry().size_bytes;
    if size == 0 {
        return Err(DataError::EmptyFile { file: file.location().clone(), format: "Arrow IPC" });
    }
    let start = size.checked_sub(TRAILER_BYTES).ok_or_else(|| file.corrupt("too short for an Arrow IPC file"))?;
    let trailer = file.range(start..size).await?;
    let trailer = trailer.as_ref().try_into().map_err(|_| file.corrupt("the file ends early"))?;
    let length = read_footer_length(trailer).map_err(|error| file.corrupt(error))? as u64;
    let from = start.checked_sub(length).ok_or_else(|| file.corrupt("the footer is longer than the file"))?;
    let bytes = file.range(from..start).await?;
    let footer = root_as_footer(&bytes).map_err(|error| file.corrupt(error.to_string()))?;
    let schema = footer.schema().ok_or_else(|| file.corrupt("the footer has no schema"))?;
    let schema: Schema = fb_to_schema(schema);
    Ok(IpcFooter {
        schema: Arc::new(schema),
        version: footer.version(),
        dictionaries: footer.dictionaries().iter().flatten().copied().collect(),
        batches: footer.recordBatches().iter().flatten().copied().collect(),
    })
}

/// The file's record batches in order, with the columns `columns` (by place in the file).
pub(super) fn read(
    file: SnapshotFile,
    footer: IpcFooter,
    columns: Vec<usize>,
) -> impl Stream<Item = Result<RecordBatch, DataError>> + Send + 'static {
    let decoder = async move {
        file.check().await?;
        let mut decoder = FileDecoder::new(footer.schema.clone(), footer.version).with_projection(columns);
        for block in &footer.dictionaries {
            let bytes = block_bytes(&file, block).await?;
            decoder.read_dictionary(block, &bytes).map_err(|error| file.corrupt(error))?;
        }
        let decoder = Arc::new(decoder);
        let batches = stream::iter(footer.batches).then(move |block| {
            let (file, decoder) = (file.clone(), decoder.clone());
            async move {
                let bytes = block_bytes(&file, &block).await?;
                let batch = decoder.read_record_batch(&block, &bytes).map_err(|error| file.corrupt(error))?;
                batch.ok_or_else(|| file.corrupt(ArrowError::IpcError("a record batch is missing".to_owned())))
            }
        });
        Ok::<_, DataError>(batches)
    };
    stream::once(decoder).try_flatten()
}

async fn block_bytes(file: &SnapshotFile, block: &Block) -> Result<Buffer, DataError> {
    let start = u64::try_from(block.offset()).map_err(|error| file.corrupt(error))?;
    let length = u64::try_from(i64::from(block.metaDataLength()) + block.bodyLength()).map_err(|e| file.corrupt(e))?;
    Ok(Buffer::from(file.range(start..start + length).await?))
}
