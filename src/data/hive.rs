//! Columns from `key=value` folders, as Hive and Spark write them.
//!
//! Folders count from the source's path on: a source `/t` with a file `/t/ds=2026-12-01/a.parquet`
//! has the column `ds`, a source `/t/ds=2026-12-01` has not. In a glob they count from its
//! first wildcard on. Values are whole numbers or days where all of them are, else text;
//! `__HIVE_DEFAULT_PARTITION__` is NULL.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::scalar::ScalarValue;

use super::{DataError, file::SnapshotFile};

/// How Hive writes NULL.
const NULL: &str = "__HIVE_DEFAULT_PARTITION__";

/// The partition columns of a source.
#[derive(Debug, Default)]
pub(super) struct PartitionColumns {
    /// The columns, in the order of the folders.
    pub(super) fields: Vec<FieldRef>,
    /// For each file, one value per column.
    pub(super) values: Vec<Vec<ScalarValue>>,
}

/// Reads the folders of `files` below `base`, the source's path within its store.
pub(super) fn partition_columns(
    table: &str,
    base: &str,
    files: &[SnapshotFile],
    declared: &BTreeMap<String, DataType>,
) -> Result<PartitionColumns, DataError> {
    let folders: Vec<Vec<(String, Option<String>)>> =
        files.iter().map(|file| pairs(below(base, file.path().as_ref()))).collect();
    let Some(first) = folders.first() else { return Ok(PartitionColumns::default()) };
    let keys: Vec<String> = first.iter().map(|(key, _)| key.clone()).collect();
    for (file, folder) in files.iter().zip(&folders) {
        if !folder.iter().map(|(key, _)| key).eq(&keys) {
            let other: Vec<String> = folder.iter().map(|(key, _)| key.clone()).collect();
            return Err(DataError::PartitionKeys {
                table: table.to_owned(),
                first: files[0].location().clone(),
                first_keys: keys.join(", "),
                second: file.location().clone(),
                second_keys: other.join(", "),
            });
        }
    }
    let mut columns = PartitionColumns { fields: Vec::new(), values: vec![Vec::new(); files.len()] };
    for (place, key) in keys.iter().enumerate() {
        let texts: Vec<Option<&str>> = folders.iter().map(|folder| folder[place].1.as_deref()).collect();
        let data_type = declared.get(key).cloned().unwrap_or_else(|| guess(&texts));
        for ((file, text), row) in files.iter().zip(&texts).zip(&mut columns.values) {
            row.push(value(*text, &data_type).ok_or_else(|| DataError::PartitionValue {
                table: table.to_owned(),
                column: key.clone(),
                value: text.unwrap_or(NULL).to_owned(),
                data_type: Box::new(data_type.clone()),
                file: file.location().clone(),
            })?);
        }
        columns.fields.push(Arc::new(Field::new(key, data_type, true)));
    }
    Ok(columns)
}

/// The folders of `path` below `base`; `base` may be a glob, or the file itself.
fn below<'a>(base: &str, path: &'a str) -> &'a str {
    let fixed = base.split('/').take_while(|segment| !segment.contains(['*', '?', '[', '{'])).collect::<Vec<_>>();
    let folders = path.rsplit_once('/').map_or("", |(folders, _name)| folders);
    folders.strip_prefix(&fixed.join("/")).unwrap_or("")
}

fn pairs(folders: &str) -> Vec<(String, Option<String>)> {
    folders
        .split('/')
        .filter_map(|folder| folder.split_once('='))
        .map(|(key, value)| (decode(key).into_owned(), (value != NULL).then(|| decode(value).into_owned())))
        .collect()
}

/// Undoes `%xx`; text that is not well encoded stays as it is.
fn decode(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return Cow::Borrowed(text);
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| byte == b'%') {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).map_or(Cow::Borrowed(text), Cow::Owned)
}

fn guess(texts: &[Option<&str>]) -> DataType {
    let all = |fits: &dyn Fn(&str) -> bool| texts.iter().flatten().all(|text| fits(text));
    if texts.iter().flatten().next().is_none() {
        DataType::Utf8
    } else if all(&|text| text.parse::<i64>().is_ok()) {
        DataType::Int64
    } else if all(&|text| text.len() == 10 && chrono::NaiveDate::parse_from_str(text, "%Y-%m-%d").is_ok()) {
        DataType::Date32
    } else {
        DataType::Utf8
    }
}

fn value(text: Option<&str>, data_type: &DataType) -> Option<ScalarValue> {
    match text {
        None => ScalarValue::try_from(data_type).ok(),
        Some(text) => ScalarValue::try_from_string(text.to_owned(), data_type).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_below_the_source() {
        let check = |base: &str, path: &str, expected: &[(&str, Option<&str>)]| {
            let found = pairs(below(base, path));
            let found: Vec<_> = found.iter().map(|(key, value)| (key.as_str(), value.as_deref())).collect();
            assert_eq!(found, expected, "{base} {path}");
        };
        check("t", "t/a.parquet", &[]);
        check("t/a.parquet", "t/a.parquet", &[]);
        check("t", "t/ds=2026-12-01/h=7/a.parquet", &[("ds", Some("2026-12-01")), ("h", Some("7"))]);
        check("t/ds=2026-12-01", "t/ds=2026-12-01/h=7/a.parquet", &[("h", Some("7"))]);
        check("t/ds=*/a.parquet", "t/ds=2026-12-01/a.parquet", &[("ds", Some("2026-12-01"))]);
        check("t", "t/ds=__HIVE_DEFAULT_PARTITION__/a.parquet", &[("ds", None)]);
        check("t", "t/at=10%3A30/x/a.parquet", &[("at", Some("10:30"))]);
        check("t", "t/p=100%/a.parquet", &[("p", Some("100%"))]);
    }

    #[test]
    fn types_fit_all_values() {
        let check = |texts: &[Option<&str>], expected: &DataType| assert_eq!(guess(texts), *expected, "{texts:?}");
        check(&[Some("1"), Some("-2"), None], &DataType::Int64);
        check(&[Some("2026-12-01"), Some("2026-12-02")], &DataType::Date32);
        check(&[Some("2026-12-01"), Some("7")], &DataType::Utf8);
        check(&[None], &DataType::Utf8);
        check(&[Some("2026-13-01")], &DataType::Utf8);
    }
}
