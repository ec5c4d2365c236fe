//! The JSON Schema of pipeline files.

/// The schema that editors complete and check by.
pub fn json_schema() -> serde_json::Value {
    unimplemented!()
}
