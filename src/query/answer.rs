//! One statement and its rows.

use datafusion::{
    error::DataFusionError,
    execution::{SendableRecordBatchStream, context::SQLOptions},
    prelude::SessionContext,
};

use super::QueryError;

/// Plans a statement and starts it; rows come as they are made. Statements that would write
/// anywhere but into the session are refused.
pub async fn run(session: &SessionContext, statement: &str) -> Result<SendableRecordBatchStream, QueryError> {
    let options = SQLOptions::new().with_allow_dml(false);
    let rows = async { session.sql_with_options(statement, options).await?.execute_stream().await };
    rows.await.map_err(QueryError::of)
}

impl QueryError {
    /// An error of the engine: ours where ours is at its root.
    pub fn of(error: DataFusionError) -> Self {
        match error {
            DataFusionError::External(error) => match error.downcast::<Self>() {
                Ok(own) => *own,
                Err(error) => Self::Statement(Box::new(DataFusionError::External(error))),
            },
            DataFusionError::Context(_, error) | DataFusionError::Diagnostic(_, error) => Self::of(*error),
            error => Self::Statement(Box::new(error)),
        }
    }
}
