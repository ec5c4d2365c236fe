//! Queries whose rows come in the same order each time.
//!
//! A query without joins, groups, sorts, windows, limits and unions gives its rows in the
//! order of its files, however many streams it is cut into. Any other query runs as one
//! stream, and where the engine would merge several inputs as they come (those of a union),
//! they are read one after the other instead.

use std::{fmt, sync::Arc};

use arrow::datatypes::SchemaRef;
use datafusion::{
    common::{
        config::ConfigOptions,
        tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion},
    },
    error::{DataFusionError, Result},
    execution::{SendableRecordBatchStream, SessionState, SessionStateBuilder, TaskContext},
    logical_expr::LogicalPlan,
    physical_expr::{EquivalenceProperties, Partitioning, PhysicalExpr},
    physical_optimizer::PhysicalOptimizerRule,
    physical_plan::{
        DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
        coalesce_partitions::CoalescePartitionsExec, execution_plan::ReplaceChildrenOptions, limit::GlobalLimitExec,
        stream::RecordBatchStreamAdapter, union::UnionExec,
    },
};
use futures::{StreamExt, TryStreamExt, stream};

use super::{DataError, scan::Engine, scan::runtime};
use crate::limits;

/// A query, planned so that each stream's rows come in the same order each time.
pub(super) struct OrderedQuery {
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
}

impl OrderedQuery {
    /// Plans `query` over the tables of `engine`, in a memory of its own, so that what other
    /// queries do cannot change when it spills and with that its order.
    pub(super) async fn plan(
        engine: &Engine,
        table: &str,
        query: LogicalPlan,
        memory_bytes: u64,
    ) -> Result<Self, DataError> {
        let state = engine.session().state();
        let runtime = runtime(memory_bytes, Some(state.runtime_env().as_ref()))?;
        let plan = async {
            let query = state.optimize(&query)?;
            let streams = if is_row_wise(&query)? { limits::STAGED_FILES } else { 1 };
            // A session builds its default catalog anew, over the one with the tables, unless told not to.
            let mut config = state.config().clone().with_target_partitions(streams);
            config = config.with_create_default_catalog_and_schema(false);
            let optimizer = &mut config.options_mut().optimizer;
            optimizer.repartition_file_scans = false;
            optimizer.enable_round_robin_repartition = false;
            config.options_mut().execution.enable_file_stream_work_stealing = false;
            let mut rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> = vec![Arc::new(UnionsInOrder)];
            rules.extend(state.physical_optimizers().iter().cloned());
            rules.push(Arc::new(MergesInOrder));
            let state: SessionState = SessionStateBuilder::new_from_existing(state)
                .with_config(config)
                .with_runtime_env(runtime)
                .with_physical_optimizer_rules(rules)
                .build();
            let plan = state.query_planner().create_physical_plan(&query, &state).await?;
            Ok(Self { plan, context: state.task_ctx() })
        };
        plan.await.map_err(|error| DataError::query(table, error))
    }

    /// The columns.
    pub(super) fn schema(&self) -> SchemaRef {
        self.plan.schema()
    }

    /// The streams, which together, in their order, give the query's rows.
    pub(super) fn streams(&self) -> Result<Vec<SendableRecordBatchStream>> {
        let count = self.plan.output_partitioning().partition_count();
        (0..count).map(|partition| self.plan.execute(partition, self.context.clone())).collect()
    }

    /// All rows as one stream.
    pub(super) fn stream(&self) -> SendableRecordBatchStream {
        in_order(&self.plan, &self.context)
    }
}

/// Whether each row of the result comes from one row of the one table, in its order.
fn is_row_wise(query: &LogicalPlan) -> Result<bool> {
    let mut row_wise = true;
    query.apply_with_subqueries(|node| {
        row_wise &= match node {
            LogicalPlan::TableScan(scan) => scan.fetch.is_none(),
            LogicalPlan::Projection(_) | LogicalPlan::Filter(_) | LogicalPlan::SubqueryAlias(_) => true,
            _ => false,
        };
        Ok(if row_wise { TreeNodeRecursion::Continue } else { TreeNodeRecursion::Stop })
    })?;
    Ok(row_wise)
}

/// The partitions of a plan, one after the other.
fn in_order(plan: &Arc<dyn ExecutionPlan>, context: &Arc<TaskContext>) -> SendableRecordBatchStream {
    let (plan, context, schema) = (plan.clone(), context.clone(), plan.schema());
    let count = plan.output_partitioning().partition_count();
    let streams = stream::iter(0..count).map(move |partition| plan.execute(partition, context.clone()));
    let rows = streams.map_ok(StreamExt::boxed).try_flatten();
    Box::pin(RecordBatchStreamAdapter::new(schema, rows))
}

/// Makes one stream of each union, before the engine plans what to do with several.
#[derive(Debug)]
struct UnionsInOrder;

impl PhysicalOptimizerRule for UnionsInOrder {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _config: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| {
            Ok(if node.is::<UnionExec>() { Transformed::yes(InOrderExec::over(node)) } else { Transformed::no(node) })
        })
        .data()
    }

    fn name(&self) -> &'static str {
        "unions_in_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Puts order into whatever merge the engine planned all the same.
#[derive(Debug)]
struct MergesInOrder;

impl PhysicalOptimizerRule for MergesInOrder {
    fn optimize(&self, plan: Arc<dyn ExecutionPlan>, _config: &ConfigOptions) -> Result<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| {
            let merged = match node.downcast_ref::<CoalescePartitionsExec>() {
                Some(merge) => InOrderExec::over(merge.input().clone()),
                None => return Ok(Transformed::no(node)),
            };
            Ok(Transformed::yes(match node.fetch() {
                Some(rows) => Arc::new(GlobalLimitExec::new(merged, 0, Some(rows))),
                None => merged,
            }))
        })
        .data()
    }

    fn name(&self) -> &'static str {
        "merges_in_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Gives the partitions of its input as one, one after the other.
#[derive(Debug)]
struct InOrderExec {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl InOrderExec {
    fn over(input: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
        Arc::new(Self::new(input))
    }

    fn new(input: Arc<dyn ExecutionPlan>) -> Self {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(input.schema()),
            Partitioning::UnknownPartitioning(1),
            input.pipeline_behavior(),
            input.boundedness(),
        );
        Self { input, properties: Arc::new(properties) }
    }
}

impl DisplayAs for InOrderExec {
    fn fmt_as(&self, _format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InOrderExec")
    }
}

impl ExecutionPlan for InOrderExec {
    fn name(&self) -> &'static str {
        "InOrderExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _visit: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(input), true) => Ok(Self::over(input)),
            _ => Err(DataFusionError::Internal("InOrderExec has one input".to_owned())),
        }
    }

    fn with_new_children(self: Arc<Self>, mut children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(input), true) => Ok(Self::over(input)),
            _ => Err(DataFusionError::Internal("InOrderExec has one input".to_owned())),
        }
    }

    fn execute(&self, _partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        Ok(in_order(&self.input, &context))
    }
}
