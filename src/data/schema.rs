//! One schema for the files of a source whose writers changed over time.
//!
//! Columns go by name. The result does not depend on the order in which types are met: all
//! types of a column are collected first, then joined from the widest kind down. Missing
//! columns read as NULL.

use std::collections::{BTreeMap, HashMap};

use arrow::datatypes::{DataType, Field, FieldRef, Schema, TimeUnit};

use super::DataError;
use crate::storage::Location;

/// The types of one column over all files, each with the first file that has it.
struct Column<'a> {
    field: FieldRef,
    types: Vec<(DataType, &'a Location)>,
}

/// The common schema: columns in the order of the first file, extras in the order of later
/// files, all nullable. `declared` types win. Where types are `guessed` (CSV), columns whose
/// guesses do not meet are text.
pub(super) fn merge<'a>(
    table: &str,
    files: impl Iterator<Item = (&'a Location, &'a Schema)>,
    declared: &BTreeMap<String, DataType>,
    guessed: bool,
) -> Result<Schema, DataError> {
    let mut columns: Vec<Column<'a>> = Vec::new();
    let mut places: HashMap<&'a str, usize> = HashMap::new();
    let mut last: Option<&'a Schema> = None;
    for (file, schema) in files {
        // Files of one writer have equal schemas; thousands of them should cost one merge.
        if last.is_some_and(|last| last.fields == schema.fields) {
            continue;
        }
        last = Some(schema);
        for field in &schema.fields {
            let place = *places.entry(field.name()).or_insert_with(|| {
                columns.push(Column { field: field.clone(), types: Vec::new() });
                columns.len() - 1
            });
            let types = &mut columns[place].types;
            if !types.iter().any(|(known, _)| known == field.data_type()) {
                types.push((field.data_type().clone(), file));
            }
        }
    }
    let fields = columns.into_iter().map(|column| {
        let name = column.field.name().clone();
        let data_type = match declared.get(&name) {
            Some(data_type) => data_type.clone(),
            None => join(&column.types, guessed).map_err(|(a, b)| drift(table, &name, &column.types, a, b))?,
        };
        Ok(Field::new(name, data_type, true).with_metadata(column.field.metadata().clone()))
    });
    Ok(Schema::new(fields.collect::<Result<Vec<_>, DataError>>()?))
}

fn drift(table: &str, column: &str, types: &[(DataType, &Location)], a: usize, b: usize) -> DataError {
    let (first_type, first) = &types[a];
    let (second_type, second) = &types[b];
    DataError::Drift {
        table: table.to_owned(),
        column: column.to_owned(),
        first_type: Box::new(first_type.clone()),
        first: (*first).clone(),
        second_type: Box::new(second_type.clone()),
        second: (*second).clone(),
    }
}

/// The one type that holds all, or the indices of two that do not meet.
fn join(types: &[(DataType, &Location)], guessed: bool) -> Result<DataType, (usize, usize)> {
    let mut order: Vec<usize> = (0..types.len()).collect();
    order.sort_by_key(|&i| rank(&types[i].0));
    let mut joined = DataType::Null;
    for &i in &order {
        match common(&joined, &types[i].0) {
            Some(wider) => joined = wider,
            None if guessed => return Ok(DataType::Utf8),
            None => return Err(conflict(types, i)),
        }
    }
    if guessed && joined == DataType::Null { Ok(DataType::Utf8) } else { Ok(joined) }
}

/// A pair to show: the last type and the first other that it does not meet directly.
fn conflict(types: &[(DataType, &Location)], last: usize) -> (usize, usize) {
    let against = (0..types.len()).find(|&i| common(&types[i].0, &types[last].0).is_none()).unwrap_or(0);
    (against.min(last), against.max(last))
}

/// Floats first: they take in any integer, while integers alone may not meet each other.
fn rank(data_type: &DataType) -> u8 {
    match data_type {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => rank(item.data_type()),
        DataType::Dictionary(_, values) => rank(values),
        other if other.is_floating() => 0,
        _ => 1,
    }
}

/// The narrowest type that holds the values of both, or `None`.
fn common(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType::{
        Binary, BinaryView, Decimal128, Dictionary, LargeBinary, LargeUtf8, Null, Timestamp, Utf8, Utf8View,
    };
    if a == b {
        return Some(a.clone());
    }
    match (a, b) {
        (Null, other) | (other, Null) => Some(other.clone()),
        (Dictionary(_, values), other) | (other, Dictionary(_, values)) => common(values, other),
        (a, b) if is_number(a) && is_number(b) => number(a, b),
        (Utf8 | Utf8View | LargeUtf8, Utf8 | Utf8View | LargeUtf8) => Some(LargeUtf8),
        (Binary | BinaryView | LargeBinary, Binary | BinaryView | LargeBinary) => Some(LargeBinary),
        (&Decimal128(p, s), &Decimal128(q, t)) => decimal(p, s, q, t),
        (Timestamp(a, zone), Timestamp(b, other)) if zone == other => Some(Timestamp(finer(*a, *b), zone.clone())),
        (a, b) => list(a, b),
    }
}

fn is_number(data_type: &DataType) -> bool {
    data_type.is_integer() || data_type.is_floating()
}

fn number(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType::{Float32, Float64, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64};
    let bits = |t: &DataType| t.primitive_width().unwrap_or(0) * 8;
    if a.is_floating() && b.is_floating() {
        return Some(if bits(a).max(bits(b)) == 64 { Float64 } else { Float32 });
    }
    if a.is_floating() || b.is_floating() {
        return Some(Float64);
    }
    // An unsigned type needs a signed one of twice its width.
    let signed_bits = |t: &DataType| if t.is_unsigned_integer() { bits(t) * 2 } else { bits(t) };
    let both_unsigned = a.is_unsigned_integer() && b.is_unsigned_integer();
    let width = if both_unsigned { bits(a).max(bits(b)) } else { signed_bits(a).max(signed_bits(b)) };
    Some(match (both_unsigned, width) {
        (true, 8) => UInt8,
        (true, 16) => UInt16,
        (true, 32) => UInt32,
        (true, 64) => UInt64,
        (false, 8) => Int8,
        (false, 16) => Int16,
        (false, 32) => Int32,
        (false, 64) => Int64,
        _ => return None,
    })
}

fn decimal(p: u8, s: i8, q: u8, t: i8) -> Option<DataType> {
    let scale = s.max(t);
    let whole = (i16::from(p) - i16::from(s)).max(i16::from(q) - i16::from(t));
    let precision = u8::try_from(whole + i16::from(scale)).ok()?;
    (precision <= 38).then_some(DataType::Decimal128(precision, scale))
}

fn finer(a: TimeUnit, b: TimeUnit) -> TimeUnit {
    let order = [TimeUnit::Nanosecond, TimeUnit::Microsecond, TimeUnit::Millisecond];
    order.into_iter().find(|unit| *unit == a || *unit == b).unwrap_or(TimeUnit::Second)
}

/// Lists meet if their items do; a fixed size is kept only if it is the same.
fn list(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType::{FixedSizeList, LargeList, List};
    let (List(x) | LargeList(x) | FixedSizeList(x, _)) = a else { return None };
    let (List(y) | LargeList(y) | FixedSizeList(y, _)) = b else { return None };
    let item = Field::new("item", common(x.data_type(), y.data_type())?, true);
    Some(match (a, b) {
        (FixedSizeList(_, m), FixedSizeList(_, n)) if m == n => FixedSizeList(item.into(), *m),
        (LargeList(_), _) | (_, LargeList(_)) => LargeList(item.into()),
        _ => List(item.into()),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn location(name: &str) -> Location {
        Location::parse(name, std::path::Path::new("/t")).unwrap()
    }

    fn joined(types: &[DataType], guessed: bool) -> Option<DataType> {
        let file = location("a");
        let types: Vec<_> = types.iter().map(|data_type| (data_type.clone(), &file)).collect();
        join(&types, guessed).ok()
    }

    fn list_of(item: DataType) -> DataType {
        DataType::new_list(item, true)
    }

    #[test]
    fn types_meet() {
        use DataType::{
            Boolean, Decimal128, Float32, Float64, Int8, Int32, Int64, LargeUtf8, Null, UInt8, UInt32, UInt64, Utf8,
        };
        let check =
            |types: &[DataType], expected: Option<DataType>| assert_eq!(joined(types, false), expected, "{types:?}");
        check(&[Int32, Int64], Some(Int64));
        check(&[Float32, Float64], Some(Float64));
        check(&[Int32, Float32], Some(Float64));
        check(&[UInt8, Int8], Some(DataType::Int16));
        check(&[UInt32, Int32], Some(Int64));
        check(&[UInt64, Int32], None);
        check(&[UInt64, Int32, Float32], Some(Float64));
        check(&[Null, Int32], Some(Int32));
        check(&[Utf8, LargeUtf8], Some(LargeUtf8));
        check(&[Decimal128(10, 2), Decimal128(12, 4)], Some(Decimal128(12, 4)));
        check(&[Decimal128(38, 0), Decimal128(38, 10)], None);
        check(&[list_of(Float32), list_of(Float64)], Some(list_of(Float64)));
        check(&[DataType::new_fixed_size_list(Float32, 2, true), list_of(Float32)], Some(list_of(Float32)));
        check(&[Int32, Utf8], None);
        check(&[Boolean, Int32], None);
        assert_eq!(joined(&[Int64, Utf8], true), Some(Utf8));
        assert_eq!(joined(&[Null], true), Some(Utf8));
    }

    #[test]
    fn columns_go_by_name_and_declared_types_win() {
        let (a, b) = (location("a"), location("b"));
        let first = Schema::new(vec![Field::new("x", DataType::Int32, false), Field::new("y", DataType::Utf8, false)]);
        let second = Schema::new(vec![Field::new("z", DataType::Utf8, true), Field::new("x", DataType::Utf8, true)]);
        let files = || [(&a, &first), (&b, &second)].into_iter();
        let error = merge("t", files(), &BTreeMap::new(), false).unwrap_err().to_string();
        for named in ["`t`", "`x`", "Int32", "/t/a", "Utf8", "/t/b"] {
            assert!(error.contains(named), "{error}");
        }
        let declared = BTreeMap::from([("x".to_owned(), DataType::Float64)]);
        let merged = merge("t", files(), &declared, false).unwrap();
        let columns: Vec<_> = merged.fields().iter().map(|field| (field.name().as_str(), field.data_type())).collect();
        assert_eq!(columns, [("x", &DataType::Float64), ("y", &DataType::Utf8), ("z", &DataType::Utf8)]);
    }

    fn any_type() -> impl Strategy<Value = DataType> {
        use DataType::{
            Boolean, Float32, Float64, Int8, Int16, Int32, Int64, LargeUtf8, Null, UInt8, UInt16, UInt32, UInt64, Utf8,
        };
        let simple = prop::sample::select(vec![
            Null,
            Boolean,
            Int8,
            Int16,
            Int32,
            Int64,
            UInt8,
            UInt16,
            UInt32,
            UInt64,
            Float32,
            Float64,
            Utf8,
            LargeUtf8,
            DataType::Decimal128(10, 2),
            DataType::Decimal128(20, 0),
            DataType::Date32,
        ]);
        (simple, 0..3).prop_map(|(item, kind)| match kind {
            0 => item,
            1 => list_of(item),
            _ => DataType::new_fixed_size_list(item, 2, true),
        })
    }

    proptest! {
        #[test]
        fn the_order_of_files_does_not_matter(mut types in prop::collection::vec(any_type(), 1..6), turn in 0_usize..6) {
            types.dedup();
            let forward = joined(&types, false);
            let turn = turn % types.len();
            types.rotate_left(turn);
            prop_assert_eq!(&joined(&types, false), &forward);
            types.reverse();
            prop_assert_eq!(&joined(&types, false), &forward);
        }
    }
}
