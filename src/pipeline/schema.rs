//! The JSON Schema of pipeline files.

use schemars::SchemaGenerator;
use serde_json::{Map, Value, json};

use super::spec::PipelineSpec;

/// The schema that editors complete and check by.
pub fn json_schema() -> Value {
    let schema = SchemaGenerator::default().into_root_schema_for::<PipelineSpec>();
    let mut schema = Value::from(schema);
    allow_parameters(&mut schema);
    if let Some(definitions) = schema.get_mut("$defs").and_then(Value::as_object_mut) {
        // Within `params` nothing is filled in.
        let fixed = ["ParamSpec", "ParamType"];
        for (_, definition) in definitions.iter_mut().filter(|(name, _)| !fixed.contains(&name.as_str())) {
            allow_parameters(definition);
        }
    }
    let mut titled = Map::from_iter([
        ("$schema".to_owned(), schema["$schema"].take()),
        ("title".to_owned(), json!("Emberflow pipeline")),
    ]);
    titled
        .extend(schema.as_object().cloned().unwrap_or_default().into_iter().filter(|(key, _)| !key.starts_with("$s")));
    titled.into()
}

/// Where a number, a boolean or one of some choices stands, `${name}` may stand too; text
/// takes it anyway.
fn allow_parameters(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    if is_choice(object) || has_type(object, &["integer", "number", "boolean"]) {
        let notes = ["title", "description", "default"];
        let (kept, mut original): (Map<_, _>, Map<_, _>) =
            std::mem::take(object).into_iter().partition(|(key, _)| notes.contains(&key.as_str()));
        // Choices with a value: it may be a parameter, the choice itself is text.
        let choices = original.get_mut("oneOf").and_then(Value::as_array_mut);
        choices.into_iter().flatten().filter(|choice| choice["type"] == "object").for_each(allow_parameters);
        *object = kept;
        object.insert("anyOf".to_owned(), json!([original, { "type": "string", "pattern": "\\$\\{.+\\}" }]));
        return;
    }
    for key in ["properties", "items", "additionalProperties", "prefixItems"] {
        match object.get_mut(key) {
            Some(Value::Object(children)) if key == "properties" => children.values_mut().for_each(allow_parameters),
            Some(Value::Array(children)) => children.iter_mut().for_each(allow_parameters),
            Some(child) => allow_parameters(child),
            None => {}
        }
    }
}

/// Whether this is an enumeration, with or without values.
fn is_choice(schema: &Map<String, Value>) -> bool {
    schema.contains_key("oneOf") || schema.contains_key("enum")
}

fn has_type(schema: &Map<String, Value>, types: &[&str]) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => types.contains(&kind.as_str()),
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind.as_str().is_some_and(|kind| types.contains(&kind))),
        _ => false,
    }
}
