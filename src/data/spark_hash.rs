//! Spark's `hash`: murmur3_x86_32 with seed 42, columns chained, nulls skipped.
//!
//! Source: `org.apache.spark.sql.catalyst.expressions.Murmur3Hash` and
//! `org.apache.spark.unsafe.hash.Murmur3_x86_32.hashUnsafeBytes`, whose tail differs from the
//! published murmur3: each byte left over is mixed in as a signed integer of its own.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanArray, Int32Array, Int64Array, OffsetSizeTrait, PrimitiveArray},
    datatypes::{
        ArrowPrimitiveType, DataType, Date32Type, Date64Type, Decimal128Type, Float32Type, Float64Type, TimeUnit,
        TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt64Type,
    },
};
use datafusion::{
    error::{DataFusionError, Result},
    logical_expr::{
        ColumnarValue, ScalarFunctionImplementation, ScalarUDF, Signature, SimpleScalarUDF, TypeSignature, Volatility,
    },
    scalar::ScalarValue,
};

/// Spark's seed of `hash`.
const SEED: u32 = 42;

/// `spark_hash(column, ...)` for SQL: a 32-bit integer equal to Spark's `hash(column, ...)`.
pub fn spark_hash_udf() -> ScalarUDF {
    let hash: ScalarFunctionImplementation = Arc::new(|arguments| {
        let columns = ColumnarValue::values_to_arrays(arguments)?;
        result(arguments, Arc::new(Int32Array::from_iter_values(hash_rows(&columns)?)))
    });
    let signature = Signature::one_of(vec![TypeSignature::VariadicAny], Volatility::Immutable);
    ScalarUDF::from(SimpleScalarUDF::new_with_signature("spark_hash", signature, DataType::Int32, hash))
}

/// `pmod(number, divisor)` for SQL, as in Spark: the remainder that is never negative; NULL for
/// a divisor of 0.
pub(super) fn pmod_udf() -> ScalarUDF {
    let pmod: ScalarFunctionImplementation = Arc::new(|arguments| {
        let columns = ColumnarValue::values_to_arrays(arguments)?;
        let (numbers, divisors): (&Int64Array, &Int64Array) = (columns[0].as_primitive(), columns[1].as_primitive());
        let rows = numbers.iter().zip(divisors);
        let rest = rows.map(|(number, divisor)| positive_remainder(number?, divisor?));
        result(arguments, Arc::new(rest.collect::<Int64Array>()))
    });
    let signature = Signature::exact(vec![DataType::Int64; 2], Volatility::Immutable);
    ScalarUDF::from(SimpleScalarUDF::new_with_signature("pmod", signature, DataType::Int64, pmod))
}

/// Spark's rule for negative divisors too: `((a % n) + n) % n`.
fn positive_remainder(number: i64, divisor: i64) -> Option<i64> {
    let rest = number.checked_rem(divisor)?;
    if rest < 0 { rest.wrapping_add(divisor).checked_rem(divisor) } else { Some(rest) }
}

fn result(arguments: &[ColumnarValue], rows: ArrayRef) -> Result<ColumnarValue> {
    let all_scalar = arguments.iter().all(|argument| matches!(argument, ColumnarValue::Scalar(_)));
    Ok(if all_scalar {
        ColumnarValue::Scalar(ScalarValue::try_from_array(&rows, 0)?)
    } else {
        ColumnarValue::Array(rows)
    })
}

/// The partition of each row: Spark's `pmod(hash(columns), count)`.
pub(super) fn partitions(columns: &[ArrayRef], count: u32) -> Result<Vec<u32>> {
    let count = i64::from(count.max(1));
    Ok(hash_rows(columns)?.into_iter().map(|hash| i64::from(hash).rem_euclid(count) as u32).collect())
}

/// Spark's `hash` of each row.
fn hash_rows(columns: &[ArrayRef]) -> Result<Vec<i32>> {
    let mut hashes = vec![SEED; columns.first().map_or(0, |column| column.len())];
    for column in columns {
        let hash = hasher(column)?;
        for (row, state) in hashes.iter_mut().enumerate() {
            *state = hash(row, *state);
        }
    }
    Ok(hashes.into_iter().map(|hash| hash as i32).collect())
}

/// From a row and the hash so far to the hash with that row's value.
type Hasher<'a> = Box<dyn Fn(usize, u32) -> u32 + 'a>;

/// The rule of a column's type, chosen once per column; null values leave the hash as it is.
fn hasher(column: &dyn Array) -> Result<Hasher<'_>> {
    let hash = not_null_hasher(column)?;
    Ok(match column.logical_nulls() {
        Some(nulls) => Box::new(move |row, seed| if nulls.is_null(row) { seed } else { hash(row, seed) }),
        None => hash,
    })
}

fn not_null_hasher(column: &dyn Array) -> Result<Hasher<'_>> {
    use arrow::datatypes::{Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type};
    Ok(match column.data_type() {
        DataType::Null => Box::new(|_, seed| seed),
        DataType::Boolean => {
            let values: &BooleanArray = column.as_boolean();
            Box::new(|row, seed| hash_int(i32::from(values.value(row)), seed))
        }
        DataType::Int8 => int::<Int8Type>(column, i32::from),
        DataType::Int16 => int::<Int16Type>(column, i32::from),
        DataType::Int32 => int::<Int32Type>(column, |value| value),
        DataType::Int64 => long::<Int64Type>(column, |value| value),
        // Spark reads unsigned columns as the next larger signed type.
        DataType::UInt8 => int::<UInt8Type>(column, i32::from),
        DataType::UInt16 => int::<UInt16Type>(column, i32::from),
        DataType::UInt32 => long::<UInt32Type>(column, i64::from),
        DataType::UInt64 => {
            let values: &PrimitiveArray<UInt64Type> = column.as_primitive();
            Box::new(|row, seed| hash_unscaled(i128::from(values.value(row)), seed))
        }
        // Adding 0 turns -0 into 0; all NaN are one.
        DataType::Float32 => {
            int::<Float32Type>(
                column,
                |value| {
                    if value.is_nan() { 0x7fc0_0000 } else { (value + 0.0).to_bits() as i32 }
                },
            )
        }
        DataType::Float64 => long::<Float64Type>(column, |value| {
            if value.is_nan() { 0x7ff8_0000_0000_0000 } else { (value + 0.0).to_bits() as i64 }
        }),
        DataType::Date32 => int::<Date32Type>(column, |days| days),
        DataType::Date64 => int::<Date64Type>(column, |millis| millis.div_euclid(86_400_000) as i32),
        DataType::Timestamp(unit, _) => match unit {
            TimeUnit::Second => long::<TimestampSecondType>(column, |value| value.wrapping_mul(1_000_000)),
            TimeUnit::Millisecond => long::<TimestampMillisecondType>(column, |value| value.wrapping_mul(1_000)),
            TimeUnit::Microsecond => long::<TimestampMicrosecondType>(column, |value| value),
            TimeUnit::Nanosecond => long::<TimestampNanosecondType>(column, |value| value.div_euclid(1_000)),
        },
        DataType::Decimal128(precision, _) => {
            let values: &PrimitiveArray<Decimal128Type> = column.as_primitive();
            match precision {
                0..=18 => Box::new(|row, seed| hash_long(values.value(row) as i64, seed)),
                _ => Box::new(|row, seed| hash_unscaled(values.value(row), seed)),
            }
        }
        DataType::Utf8 => text(column.as_string::<i32>(), |array, row| array.value(row).as_bytes()),
        DataType::LargeUtf8 => text(column.as_string::<i64>(), |array, row| array.value(row).as_bytes()),
        DataType::Utf8View => text(column.as_string_view(), |array, row| array.value(row).as_bytes()),
        DataType::Binary => text(column.as_binary::<i32>(), |array, row| array.value(row)),
        DataType::LargeBinary => text(column.as_binary::<i64>(), |array, row| array.value(row)),
        DataType::BinaryView => text(column.as_binary_view(), |array, row| array.value(row)),
        DataType::FixedSizeBinary(_) => text(column.as_fixed_size_binary(), |array, row| array.value(row)),
        _ => nested_hasher(column)?,
    })
}

/// Lists and structs are hashed value by value; a dictionary stands for its values.
fn nested_hasher(column: &dyn Array) -> Result<Hasher<'_>> {
    match column.data_type() {
        DataType::List(_) => list::<i32>(column),
        DataType::LargeList(_) => list::<i64>(column),
        DataType::FixedSizeList(_, width) => {
            let width = usize::try_from(*width).unwrap_or(0);
            let array = column.as_fixed_size_list();
            let hash = hasher(array.values())?;
            Ok(Box::new(move |row, seed| (row * width..(row + 1) * width).fold(seed, |seed, item| hash(item, seed))))
        }
        DataType::Struct(_) => {
            let fields: Vec<Hasher<'_>> =
                column.as_struct().columns().iter().map(|field| hasher(field)).collect::<Result<_>>()?;
            Ok(Box::new(move |row, seed| fields.iter().fold(seed, |seed, hash| hash(row, seed))))
        }
        DataType::Dictionary(_, _) => {
            let dictionary = column.as_any_dictionary();
            let (keys, hash) = (dictionary.normalized_keys(), hasher(dictionary.values())?);
            Ok(Box::new(move |row, seed| hash(keys[row], seed)))
        }
        other => Err(DataFusionError::Execution(format!("spark_hash: Spark has no hash of the type {other}"))),
    }
}

fn list<O: OffsetSizeTrait>(column: &dyn Array) -> Result<Hasher<'_>> {
    let array = column.as_list::<O>();
    let (offsets, hash) = (array.value_offsets(), hasher(array.values())?);
    Ok(Box::new(move |row, seed| {
        (offsets[row].as_usize()..offsets[row + 1].as_usize()).fold(seed, |seed, item| hash(item, seed))
    }))
}

fn int<'a, T: ArrowPrimitiveType>(column: &'a dyn Array, bits: impl Fn(T::Native) -> i32 + 'a) -> Hasher<'a> {
    let values = column.as_primitive::<T>().values();
    Box::new(move |row, seed| hash_int(bits(values[row]), seed))
}

fn long<'a, T: ArrowPrimitiveType>(column: &'a dyn Array, bits: impl Fn(T::Native) -> i64 + 'a) -> Hasher<'a> {
    let values = column.as_primitive::<T>().values();
    Box::new(move |row, seed| hash_long(bits(values[row]), seed))
}

fn text<'a, A: Array>(array: &'a A, value: impl Fn(&'a A, usize) -> &'a [u8] + 'a) -> Hasher<'a> {
    Box::new(move |row, seed| hash_bytes(value(array, row), seed))
}

fn hash_int(value: i32, seed: u32) -> u32 {
    finish(mix_hash(seed, mix_word(value as u32)), 4)
}

fn hash_long(value: i64, seed: u32) -> u32 {
    let low = mix_hash(seed, mix_word(value as u32));
    finish(mix_hash(low, mix_word((value >> 32) as u32)), 8)
}

/// The fewest big-endian two's-complement bytes, as Java's `BigInteger` gives them.
fn hash_unscaled(value: i128, seed: u32) -> u32 {
    let bytes = value.to_be_bytes();
    let sign = if value < 0 { 0xff } else { 0 };
    let needless = |pair: &[u8]| pair[0] == sign && (pair[1] ^ sign) & 0x80 == 0;
    let skipped = bytes.windows(2).take_while(|pair| needless(pair)).count();
    hash_bytes(&bytes[skipped..], seed)
}

fn hash_bytes(bytes: &[u8], seed: u32) -> u32 {
    let (words, tail) = bytes.as_chunks::<4>();
    let hash = words.iter().fold(seed, |hash, word| mix_hash(hash, mix_word(u32::from_le_bytes(*word))));
    let hash = tail.iter().fold(hash, |hash, &byte| mix_hash(hash, mix_word(i32::from(byte as i8) as u32)));
    finish(hash, bytes.len() as u32)
}

fn mix_word(word: u32) -> u32 {
    word.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593)
}

fn mix_hash(hash: u32, word: u32) -> u32 {
    (hash ^ word).rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
}

fn finish(hash: u32, length: u32) -> u32 {
    let hash = hash ^ length;
    let hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use arrow::array::{
        Date32Array, Decimal128Array, Float32Array, Float64Array, Int8Array, Int16Array, StringArray, StringViewArray,
        TimestampMicrosecondArray, TimestampNanosecondArray, UInt64Array,
    };

    use super::*;

    fn hashes(columns: &[ArrayRef]) -> Vec<i32> {
        hash_rows(columns).unwrap()
    }

    #[test]
    fn values_that_spark_gives() {
        let check = |column: ArrayRef, expected: &[i32]| {
            assert_eq!(hashes(std::slice::from_ref(&column)), expected, "{column:?}");
        };
        check(Arc::new(Int32Array::from(vec![Some(1), Some(0), None])), &[-559_580_957, 933_211_791, 42]);
        check(Arc::new(Int8Array::from(vec![1])), &[-559_580_957]);
        check(Arc::new(Int16Array::from(vec![1])), &[-559_580_957]);
        check(Arc::new(BooleanArray::from(vec![true, false])), &[-559_580_957, 933_211_791]);
        check(Arc::new(Date32Array::from(vec![1])), &[-559_580_957]);
        check(Arc::new(Int64Array::from(vec![1])), &[-1_712_319_331]);
        check(Arc::new(TimestampMicrosecondArray::from(vec![1])), &[-1_712_319_331]);
        check(Arc::new(TimestampNanosecondArray::from(vec![1_999])), &[-1_712_319_331]);
        check(Arc::new(StringArray::from(vec!["", "Spark"])), &[142_593_372, hashes(&[view("Spark")])[0]]);
    }

    fn view(text: &str) -> ArrayRef {
        Arc::new(StringViewArray::from(vec![text]))
    }

    #[test]
    fn equal_values_hash_alike() {
        let check = |a: ArrayRef, b: ArrayRef| assert_eq!(hashes(&[a]), hashes(&[b]));
        check(Arc::new(Float32Array::from(vec![-0.0])), Arc::new(Int32Array::from(vec![0])));
        check(Arc::new(Float64Array::from(vec![-0.0])), Arc::new(Int64Array::from(vec![0])));
        let nan = f64::from_bits(0xfff8_0000_0000_0001);
        check(Arc::new(Float64Array::from(vec![nan])), Arc::new(Float64Array::from(vec![f64::NAN])));
        check(Arc::new(Float32Array::from(vec![-f32::NAN])), Arc::new(Float32Array::from(vec![f32::NAN])));
        let short = Decimal128Array::from(vec![1]).with_precision_and_scale(18, 2).unwrap();
        check(Arc::new(short), Arc::new(Int64Array::from(vec![1])));
        let long = Decimal128Array::from(vec![i128::from(u64::MAX)]).with_precision_and_scale(20, 0).unwrap();
        check(Arc::new(long), Arc::new(UInt64Array::from(vec![u64::MAX])));
    }

    #[test]
    fn columns_are_chained() {
        let one: ArrayRef = Arc::new(Int32Array::from(vec![1]));
        let null: ArrayRef = Arc::new(Int32Array::from(vec![None]));
        assert_eq!(hashes(&[one.clone(), null.clone()]), hashes(std::slice::from_ref(&one)));
        assert_eq!(hashes(&[null, one.clone()]), hashes(std::slice::from_ref(&one)));
        assert_ne!(hashes(&[one.clone(), one.clone()]), hashes(&[one]));
    }

    #[test]
    fn lists_are_their_items() {
        use arrow::array::{FixedSizeListArray, ListArray};
        use arrow::datatypes::Int32Type;
        let rows = vec![Some(vec![Some(1), Some(2)]), None, Some(vec![None, Some(3)])];
        let fixed = FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(rows.clone(), 2);
        let list = ListArray::from_iter_primitive::<Int32Type, _, _>(rows);
        let first: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None, None]));
        let second: ArrayRef = Arc::new(Int32Array::from(vec![Some(2), None, Some(3)]));
        let expected = hashes(&[first, second]);
        assert_eq!(hashes(&[Arc::new(list)]), expected);
        assert_eq!(hashes(&[Arc::new(fixed.clone())]), expected);
        assert_eq!(hashes(&[Arc::new(fixed.slice(1, 2))]), expected[1..]);
    }

    #[test]
    fn partitions_are_never_negative() {
        let column: ArrayRef = Arc::new(Int32Array::from(vec![1, 0]));
        assert_eq!(partitions(&[column], 8).unwrap(), [(-559_580_957_i64).rem_euclid(8) as u32, 933_211_791 % 8]);
        let cases = [(-7, 3, Some(2)), (7, 3, Some(1)), (7, 0, None), (-7, -3, Some(-1)), (i64::MIN, -1, None)];
        for (number, divisor, expected) in cases {
            assert_eq!(positive_remainder(number, divisor), expected, "{number} {divisor}");
        }
    }
}
