//! Distance and similarity functions under the names that people know.

mod kernel;
mod measure;
mod one_model;
mod vectors;

use std::sync::Arc;

use datafusion::{logical_expr::ScalarUDF, prelude::SessionContext};

use measure::{Measure, MeasureFunction};
use one_model::OneModel;

/// Every function, by what it measures. The names are DataFusion's, DuckDB's and Spark's.
const NAMES: [(Measure, &[&str]); 7] = [
    (Measure::Distance, &["array_distance", "list_distance", "vector_l2_distance"]),
    (Measure::SquaredDistance, &["vector_l2_squared_distance"]),
    (Measure::CosineDistance, &["cosine_distance", "array_cosine_distance", "list_cosine_distance"]),
    (
        Measure::CosineSimilarity,
        &["cosine_similarity", "array_cosine_similarity", "list_cosine_similarity", "vector_cosine_similarity"],
    ),
    (
        Measure::InnerProduct,
        &[
            "inner_product",
            "dot_product",
            "array_inner_product",
            "array_dot_product",
            "list_inner_product",
            "list_dot_product",
            "vector_inner_product",
        ],
    ),
    (
        Measure::NegativeInnerProduct,
        &["negative_inner_product", "array_negative_inner_product", "list_negative_inner_product"],
    ),
    (Measure::Norm, &["vector_norm", "vector_l2_norm"]),
];

/// Registers them, in place of DataFusion's own of the same names. Unless `mix_models`, queries
/// are refused in which they would compare vectors that are known to come from different models.
pub fn register_functions(session: &SessionContext, mix_models: bool) {
    for (measure, names) in NAMES {
        for name in names {
            session.register_udf(ScalarUDF::new_from_impl(MeasureFunction::new(name, measure)));
        }
    }
    if !mix_models {
        session.add_analyzer_rule(Arc::new(OneModel));
    }
}
