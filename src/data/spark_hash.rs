//! Spark's `hash`: murmur3_x86_32 with seed 42, columns chained, nulls skipped.

use datafusion::logical_expr::ScalarUDF;

/// `spark_hash(column, ...)` for SQL: a 32-bit integer equal to Spark's `hash(column, ...)`.
pub fn spark_hash_udf() -> ScalarUDF {
    unimplemented!()
}
