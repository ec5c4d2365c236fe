//! The rule that no query compares vectors of different models.
//!
//! A scan of embeddings gives a column whose metadata hold its model's fingerprint. Many plan
//! nodes and expressions drop metadata, so the models of every column are followed from the
//! scans upward:
//!
//! ```text
//!   scan {A} ──▶ join, union, CTE, subquery, CASE, first_value ... ──▶ array_distance(x, y)
//!                                                        models of x and y together: at most one
//! ```
//!
//! A column that cannot be followed is taken to come from all that goes into its node.

use std::collections::{BTreeMap, HashMap};

use arrow::datatypes::{DataType, FieldRef};
use datafusion::{
    common::{
        Column, DFSchema, DFSchemaRef, JoinType, TableReference,
        config::ConfigOptions,
        tree_node::{TreeNode, TreeNodeRecursion},
    },
    error::Result,
    logical_expr::{
        Distinct, Expr, LogicalPlan, LogicalPlanBuilder, Subquery, TableScan,
        expr::{HigherOrderFunction, ScalarFunction},
    },
    optimizer::AnalyzerRule,
};

use super::measure::MeasureFunction;
use crate::{embed::FINGERPRINT_KEY, query::QueryError};

/// Fingerprints of models, each with a table that holds vectors of that model.
type Models = BTreeMap<String, String>;

/// Refuses plans in which a distance function meets vectors of several models.
#[derive(Debug)]
pub(super) struct OneModel;

impl AnalyzerRule for OneModel {
    fn name(&self) -> &'static str {
        "one_model"
    }

    fn analyze(&self, plan: LogicalPlan, _config: &ConfigOptions) -> Result<LogicalPlan> {
        let columns = columns(&plan, None)?;
        stamped(plan, &columns)
    }
}

/// Writes the models of a result's columns into their metadata where expressions dropped them,
/// so that they are known of a table or file that is made of the rows.
fn stamped(plan: LogicalPlan, columns: &[Models]) -> Result<LogicalPlan> {
    let is_lost = |(field, models): (&FieldRef, &Models)| {
        !models.is_empty() && told(field.metadata()).ne(models.keys().map(String::as_str))
    };
    if !plan.schema().fields().iter().zip(columns).any(is_lost) {
        return Ok(plan);
    }
    let column = |((relation, field), models): ((Option<&TableReference>, &FieldRef), &Models)| {
        let column = Expr::Column(Column::new(relation.cloned(), field.name()));
        if !is_lost((field, models)) {
            return column;
        }
        let models: Vec<_> = models.keys().map(String::as_str).collect();
        let metadata = HashMap::from([(FINGERPRINT_KEY.to_owned(), models.join(SEPARATOR))]);
        column.alias_qualified_with_metadata(relation.cloned(), field.name(), Some(metadata.into()))
    };
    let columns: Vec<_> = plan.schema().iter().zip(columns).map(column).collect();
    LogicalPlanBuilder::from(plan).project(columns)?.build()
}

/// Between the fingerprints of a column that comes from several models.
const SEPARATOR: &str = ",";

/// The fingerprints that stand in metadata.
fn told(metadata: &HashMap<String, String>) -> impl Iterator<Item = &str> {
    metadata.get(FINGERPRINT_KEY).into_iter().flat_map(|models| models.split(SEPARATOR))
}

/// What goes into a plan node.
struct Input {
    schema: DFSchemaRef,
    /// Models of each column.
    columns: Vec<Models>,
}

/// What an expression can name.
struct Scope<'a> {
    inputs: &'a [Input],
    /// What is around the subquery.
    outer: Option<&'a Scope<'a>>,
    /// Models of the variables of a lambda.
    variables: Models,
}

/// Checks a plan and gives the models of each of its columns.
fn columns(plan: &LogicalPlan, outer: Option<&Scope<'_>>) -> Result<Vec<Models>> {
    let mut inputs = Vec::new();
    for input in plan.inputs() {
        // What stands before a lateral subquery can be named in it.
        let before = Scope { inputs: &inputs, outer, variables: Models::new() };
        let columns = columns(input, Some(&before))?;
        inputs.push(Input { schema: input.schema().clone(), columns });
    }
    let scope = Scope { inputs: &inputs, outer, variables: Models::new() };
    let mut expressions = Vec::new();
    plan.apply_expressions(|expression| {
        expressions.push(scope.models(expression)?);
        Ok(TreeNodeRecursion::Continue)
    })?;
    let columns = output(plan, &scope, expressions)?;
    let fields = plan.schema().fields();
    let known = columns.len() == fields.len();
    let column = |place: usize| if known { columns[place].clone() } else { scope.all() };
    let carries = |place: usize| can_carry(fields[place].data_type());
    Ok((0..fields.len()).map(|place| if carries(place) { column(place) } else { Models::new() }).collect())
}

/// Models of the columns of a node, by those of its inputs and expressions; of another length
/// where they cannot be told.
fn output(plan: &LogicalPlan, scope: &Scope<'_>, expressions: Vec<Models>) -> Result<Vec<Models>> {
    let input = |place: usize| scope.inputs.get(place).map_or(&[][..], |input| input.columns.as_slice());
    let none = [Models::new()];
    Ok(match plan {
        LogicalPlan::TableScan(scan) => scanned(scan),
        LogicalPlan::Projection(_) | LogicalPlan::Aggregate(_) => expressions,
        LogicalPlan::Window(_) => [input(0), &expressions[..]].concat(),
        LogicalPlan::Distinct(Distinct::On(distinct)) => {
            distinct.select_expr.iter().map(|expression| scope.models(expression)).collect::<Result<_>>()?
        }
        LogicalPlan::Union(_) | LogicalPlan::RecursiveQuery(_) => {
            let merged = |place: usize| {
                let columns = scope.inputs.iter().filter_map(|input| input.columns.get(place));
                columns.flatten().map(|(model, table)| (model.clone(), table.clone())).collect()
            };
            (0..plan.schema().fields().len()).map(merged).collect()
        }
        LogicalPlan::Join(join) => match join.join_type {
            JoinType::LeftSemi | JoinType::LeftAnti => input(0).to_vec(),
            JoinType::RightSemi | JoinType::RightAnti => input(1).to_vec(),
            JoinType::LeftMark => [input(0), &none[..]].concat(),
            JoinType::RightMark => [input(1), &none[..]].concat(),
            JoinType::Inner | JoinType::Left | JoinType::Right | JoinType::Full => [input(0), input(1)].concat(),
        },
        LogicalPlan::Unnest(unnest) => {
            unnest.dependency_indices.iter().filter_map(|&place| input(0).get(place).cloned()).collect()
        }
        _ => input(0).to_vec(),
    })
}

/// The models that stand in the metadata of a table's columns.
fn scanned(scan: &TableScan) -> Vec<Models> {
    let table = scan.table_name.table();
    let models = |metadata| told(metadata).map(|model| (model.to_owned(), table.to_owned())).collect();
    scan.projected_schema.fields().iter().map(|field| models(field.metadata())).collect()
}

/// Whether numbers of a vector may be in values of this type.
fn can_carry(data_type: &DataType) -> bool {
    data_type.is_nested() || data_type.is_floating()
}

impl Scope<'_> {
    /// Checks an expression and gives the models of which vectors may be in its value.
    fn models(&self, expression: &Expr) -> Result<Models> {
        match expression {
            Expr::Column(column) => Ok(self.column(column).cloned().unwrap_or_default()),
            Expr::OuterReferenceColumn(_, column) => Ok(self.outer_column(column).cloned().unwrap_or_default()),
            Expr::LambdaVariable(_) => Ok(self.variables.clone()),
            Expr::ScalarSubquery(subquery) => self.subquery(subquery),
            Expr::InSubquery(test) => self.subquery(&test.subquery).and_then(|_| self.children(expression)),
            Expr::SetComparison(test) => self.subquery(&test.subquery).and_then(|_| self.children(expression)),
            Expr::Exists(test) => self.subquery(&test.subquery).map(|_| Models::new()),
            Expr::Case(case) => {
                // The conditions are checked, but their values go nowhere.
                self.union(case.expr.as_deref())?;
                self.union(case.when_then_expr.iter().map(|(condition, _)| condition.as_ref()))?;
                let values = case.when_then_expr.iter().map(|(_, value)| value.as_ref());
                self.union(values.chain(case.else_expr.as_deref()))
            }
            Expr::AggregateFunction(function) => {
                self.children(expression)?;
                self.union(&function.params.args)
            }
            Expr::WindowFunction(function) => {
                self.children(expression)?;
                self.union(&function.params.args)
            }
            Expr::ScalarFunction(function) => self.function(function),
            Expr::HigherOrderFunction(function) => self.lambdas(function),
            other => self.children(other),
        }
    }

    fn function(&self, function: &ScalarFunction) -> Result<Models> {
        let models = self.union(&function.args)?;
        match function.func.inner().downcast_ref::<MeasureFunction>() {
            None => Ok(models),
            Some(measure) => {
                let mut models = models.iter();
                if measure.compares()
                    && let (Some((first, first_table)), Some((second, second_table))) = (models.next(), models.next())
                {
                    return Err(QueryError::MixedModels {
                        function: measure.name(),
                        first_table: first_table.clone(),
                        first_model: short(first).to_owned(),
                        second_table: second_table.clone(),
                        second_model: short(second).to_owned(),
                    }
                    .into());
                }
                // A distance is a number of no model.
                Ok(Models::new())
            }
        }
    }

    /// The variables of lambdas hold what the function's other arguments hold.
    fn lambdas(&self, function: &HigherOrderFunction) -> Result<Models> {
        let is_lambda = |argument: &&Expr| matches!(argument, Expr::Lambda(_));
        let mut variables = self.union(function.args.iter().filter(|argument| !is_lambda(argument)))?;
        variables.extend(self.variables.clone());
        let within = Scope { inputs: self.inputs, outer: self.outer, variables };
        let mut models = within.union(function.args.iter().filter(is_lambda))?;
        models.extend(within.variables);
        Ok(models)
    }

    fn children(&self, expression: &Expr) -> Result<Models> {
        let mut models = Models::new();
        expression.apply_children(|child| {
            models.extend(self.models(child)?);
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(models)
    }

    fn union<'a>(&self, expressions: impl IntoIterator<Item = &'a Expr>) -> Result<Models> {
        let mut models = Models::new();
        for expression in expressions {
            models.extend(self.models(expression)?);
        }
        Ok(models)
    }

    fn subquery(&self, subquery: &Subquery) -> Result<Models> {
        Ok(columns(&subquery.subquery, Some(self))?.into_iter().next().unwrap_or_default())
    }

    fn column(&self, column: &Column) -> Option<&Models> {
        let place = |schema: &DFSchema| schema.maybe_index_of_column(column);
        self.inputs.iter().find_map(|input| input.columns.get(place(&input.schema)?))
    }

    fn outer_column(&self, column: &Column) -> Option<&Models> {
        let outer = self.outer?;
        outer.column(column).or_else(|| outer.outer_column(column))
    }

    fn all(&self) -> Models {
        self.inputs.iter().flat_map(|input| &input.columns).flatten().map(|(a, b)| (a.clone(), b.clone())).collect()
    }
}

/// Enough of a fingerprint to tell models apart.
fn short(fingerprint: &str) -> &str {
    fingerprint.get(..12).unwrap_or(fingerprint)
}
