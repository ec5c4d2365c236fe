//! One statement and its rows.

use std::sync::Arc;

use arrow::error::ArrowError;
use datafusion::{
    common::{
        TableReference,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    datasource::{
        physical_plan::{FileGroup, FileScanConfig},
        source::DataSourceExec,
    },
    error::{DataFusionError, Result as QueryResult},
    execution::{SendableRecordBatchStream, context::SQLOptions},
    physical_plan::{ExecutionPlan, execute_stream, stream::RecordBatchStreamAdapter},
    prelude::SessionContext,
};
use futures::TryStreamExt;

use super::{
    QueryError,
    catalog::{CATALOG, SCHEMA},
    store_schema,
    version_file::VersionFile,
};

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
    let (rows, plan) = start.await.map_err(|error| explained(session, statement, error))?;
    let schema = rows.schema();
    let rows = rows.or_else(move |error| name_damaged(Arc::clone(&plan), error));
    Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
}

/// The error of a statement that cannot be planned. The engine says of a table that it is not
/// there, but not which one may be meant.
fn explained(session: &SessionContext, statement: &str, error: DataFusionError) -> QueryError {
    no_table(session, statement, &error).unwrap_or_else(|| QueryError::of(error))
}

fn no_table(session: &SessionContext, statement: &str, error: &DataFusionError) -> Option<QueryError> {
    let DataFusionError::Plan(message) = error.find_root() else { return None };
    let state = session.state();
    let parsed = state.sql_to_statement(statement, &state.config_options().sql_parser.dialect).ok()?;
    // The engine's words, so that the name is not read out of a text.
    let is_meant = |table: &TableReference| {
        let resolved = table.clone().resolve(CATALOG, SCHEMA);
        *message == format!("table '{resolved}' not found")
    };
    let table = state.resolve_table_references(&parsed).ok()?.into_iter().find(is_meant)?;
    let schema = session.catalog(CATALOG)?.schema(SCHEMA)?;
    Some(store_schema::no_table(table.table(), &schema.table_names()))
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
            let parts = config.file_groups.iter().flat_map(FileGroup::files);
            files.extend(parts.filter_map(|part| part.extension::<VersionFile>()).cloned());
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(files)
}
