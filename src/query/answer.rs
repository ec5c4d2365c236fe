//! One statement and its rows.

use std::sync::Arc;

use arrow::error::ArrowError;
use datafusion::{
    common::tree_node::{TreeNode, TreeNodeRecursion},
    datasource::{physical_plan::FileScanConfig, source::DataSourceExec},
    error::{DataFusionError, Result as QueryResult},
    execution::{SendableRecordBatchStream, context::SQLOptions},
    physical_plan::{ExecutionPlan, execute_stream, stream::RecordBatchStreamAdapter},
    prelude::SessionContext,
};
use futures::TryStreamExt;

use super::{QueryError, version_file::VersionFile};

/// Plans a statement and starts it; rows come as they are made. Statements that would write
/// anywhere but into the session are refused.
pub async fn run(session: &SessionContext, statement: &str) -> Result<SendableRecordBatchStream, QueryError> {
    let options = SQLOptions::new().with_allow_dml(false);
    let start = async {
        let answer = session.sql_with_options(statement, options).await?;
        let task = Arc::new(answer.task_ctx());
        let plan = answer.create_physical_plan().await?;
        Ok((execute_stream(Arc::clone(&plan), task)?, plan))
    };
    let (rows, plan) = start.await.map_err(QueryError::of)?;
    let schema = rows.schema();
    let rows = rows.or_else(move |error| name_damaged(Arc::clone(&plan), error));
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
}

/// A decoder does not tell in which file it failed: the files are decoded once more until one
/// of them fails.
async fn name_damaged<T>(plan: Arc<dyn ExecutionPlan>, error: DataFusionError) -> QueryResult<T> {
    if is_of_decoder(&error) {
        for file in files(&plan)? {
            file.decode().await?;
        }
    }
    Err(error)
}

fn is_of_decoder(error: &DataFusionError) -> bool {
    match error.find_root() {
        DataFusionError::ParquetError(_) => true,
        DataFusionError::ArrowError(error, _) => matches!(**error, ArrowError::ParquetError(_)),
        _ => false,
    }
}

/// The files of versions that a plan reads.
fn files(plan: &Arc<dyn ExecutionPlan>) -> QueryResult<Vec<VersionFile>> {
    let mut files = Vec::new();
    plan.apply(|node| {
        let scan = node.downcast_ref::<DataSourceExec>();
        if let Some(config) = scan.and_then(|scan| scan.data_source().downcast_ref::<FileScanConfig>()) {
            let parts = config.file_groups.iter().flat_map(|group| group.files());
            files.extend(parts.filter_map(|part| part.extension::<VersionFile>()).cloned());
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(files)
}
