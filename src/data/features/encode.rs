//! Batches to row-major f32: the hot loops of the data path.
//!
//! Rows are done in blocks that stay in the cache; within a block, column by column, each with
//! a loop compiled for its type. A block is written as if every value were fine; only where
//! one is not (NULL, or something not finite came out) is it looked at value by value.

use std::ops::Range;

use arrow::array::RecordBatch;

use super::{
    FeatureError,
    column::{Column, ColumnError, Constants, Number, Work, with_values},
    fitted::{FittedColumn, FittedFeatures},
};
use crate::data::DataError;

/// Output of one block: half of a usual level-2 cache.
const BLOCK_BYTES: usize = 256 << 10;

impl FittedFeatures {
    /// Appends the batch's rows to `out`, row-major, `width` numbers each. `file` and
    /// `first_row` (the batch's first row within that file) are for error messages. A missing
    /// value under `missing: error`, an infinity, a list of another width are errors that
    /// name file, row and column; `out` is then as it was.
    pub fn encode(&self, batch: &RecordBatch, file: &str, first_row: u64, out: &mut Vec<f32>) -> Result<(), DataError> {
        let place = Place { file, first_row };
        let before = out.len();
        let result = self.encode_blocks(batch, place, out);
        if result.is_err() {
            out.truncate(before);
        }
        Ok(result?)
    }

    fn encode_blocks(&self, batch: &RecordBatch, place: Place<'_>, out: &mut Vec<f32>) -> Result<(), FeatureError> {
        let width = self.width();
        let mut lanes = Vec::with_capacity(self.columns.len());
        let mut first = 0;
        for fitted in &self.columns {
            lanes.push(Lane::new(fitted, batch, place, first)?);
            first += fitted.values() + usize::from(fitted.indicator);
        }
        let rows = batch.num_rows();
        out.reserve(rows * width);
        let block = (BLOCK_BYTES / size_of::<f32>() / width.max(1)).max(1);
        for start in (0..rows).step_by(block) {
            let rows = start..rows.min(start + block);
            let from = out.len();
            out.resize(from + rows.len() * width, 0.0);
            for lane in &lanes {
                lane.write(rows.clone(), &mut out[from..], width)?;
            }
        }
        Ok(())
    }
}

/// Where a batch comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub file: &'a str,
    pub first_row: u64,
}

impl Place<'_> {
    /// A column of the batch, ready to be walked.
    pub fn column(self, batch: &RecordBatch, name: &str, list: Option<usize>) -> Result<Column, FeatureError> {
        let (file, column) = (self.file.to_owned(), name.to_owned());
        let Some(array) = batch.column_by_name(name) else {
            return Err(FeatureError::NoColumn { file, column });
        };
        Column::new(array, list).map_err(|error| match error {
            ColumnError::Ragged { row, found } => {
                FeatureError::Ragged { file, row: self.row(row), column, found, expected: list.unwrap_or(1) }
            }
            ColumnError::Type => {
                let expected = list.map_or("a number".to_owned(), |width| format!("a list of {width} numbers"));
                FeatureError::WrongType { file, column, found: array.data_type().clone(), expected }
            }
            ColumnError::Arrow(source) => FeatureError::Arrow { file, column, source },
        })
    }

    pub fn missing(self, row: usize, column: String) -> FeatureError {
        FeatureError::Missing { file: self.file.to_owned(), row: self.row(row), column }
    }

    pub fn not_finite(self, row: usize, column: String, value: f64) -> FeatureError {
        FeatureError::NotFinite { file: self.file.to_owned(), row: self.row(row), column, value }
    }

    /// From 1, within the file.
    fn row(self, row: usize) -> u64 {
        self.first_row + row as u64 + 1
    }
}

/// A column of one batch on its way into the output.
struct Lane<'a> {
    fitted: &'a FittedColumn,
    column: Column,
    place: Place<'a>,
    /// Its first feature.
    first: usize,
    offset: Constants,
    divisor: Constants,
}

impl<'a> Lane<'a> {
    fn new(
        fitted: &'a FittedColumn,
        batch: &RecordBatch,
        place: Place<'a>,
        first: usize,
    ) -> Result<Self, FeatureError> {
        let column = place.column(batch, &fitted.name, fitted.list)?;
        let (offset, divisor) = (Constants::new(&fitted.offset), Constants::new(&fitted.divisor));
        Ok(Self { fitted, column, place, first, offset, divisor })
    }

    /// Writes its features of some rows; `out` holds exactly those rows.
    fn write(&self, rows: Range<usize>, out: &mut [f32], stride: usize) -> Result<(), FeatureError> {
        with_values!(self.column, values => {
            let finite = self.scale(values, rows.clone(), out, stride);
            if finite && !self.column.has_nulls() { Ok(()) } else { self.mend(values, rows, out, stride) }
        })
    }

    /// Writes every value as if it were there; tells whether all results are finite.
    fn scale<T: Number>(&self, values: &[T], rows: Range<usize>, out: &mut [f32], stride: usize) -> bool {
        let offset = T::Work::of(&self.offset);
        let divisor = T::Work::of(&self.divisor);
        let width = self.column.width();
        let mut infinite = 0;
        if let ([offset], [divisor], true) = (offset, divisor, self.column.is_flat()) {
            for (value, row) in values[rows].iter().zip(out.chunks_exact_mut(stride)) {
                let feature = ((value.work() - *offset) / *divisor).single();
                infinite |= is_infinite(feature);
                row[self.first] = feature;
            }
            return infinite == 0;
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(stride)) {
            let Some(start) = self.column.start(row) else { continue };
            let out = &mut out[self.first..self.first + width];
            let values = &values[start..start + width];
            if let ([offset], [divisor]) = (offset, divisor) {
                for (feature, value) in out.iter_mut().zip(values) {
                    *feature = ((value.work() - *offset) / *divisor).single();
                }
            } else {
                for (((feature, value), offset), divisor) in out.iter_mut().zip(values).zip(offset).zip(divisor) {
                    *feature = ((value.work() - *offset) / *divisor).single();
                }
            }
            infinite |= out.iter().fold(0, |any, feature| any | is_infinite(*feature));
        }
        infinite == 0
    }

    /// Value by value: fills what is missing, sets the indicator, finds what is wrong.
    fn mend<T: Number>(
        &self,
        values: &[T],
        rows: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) -> Result<(), FeatureError> {
        let width = self.column.width();
        for (row, out) in rows.zip(out.chunks_exact_mut(stride)) {
            let out = &mut out[self.first..];
            let start = self.column.start(row);
            let mut all_missing = true;
            for (element, feature) in out[..width].iter_mut().enumerate() {
                let value = start
                    .map(|start| start + element)
                    .filter(|place| !self.column.is_null(*place))
                    .map(|place| values[place].work().double())
                    .filter(|value| !value.is_nan());
                if let Some(value) = value {
                    all_missing = false;
                    if !feature.is_finite() {
                        return Err(self.place.not_finite(row, self.fitted.value_name(element), value));
                    }
                } else {
                    let fill = self.fill(element);
                    *feature = fill.ok_or_else(|| self.place.missing(row, self.missing_name(start, element)))?;
                }
            }
            if self.fitted.indicator {
                out[width] = f32::from(u8::from(all_missing));
            }
        }
        Ok(())
    }

    /// What stands in for a missing element, scaled.
    fn fill(&self, element: usize) -> Option<f32> {
        let of = |constants: &[f64]| constants.get(element).or(constants.first()).copied();
        let fill = of(&self.fitted.fill)?;
        Some(((fill - of(&self.fitted.offset)?) / of(&self.fitted.divisor)?) as f32)
    }

    /// A list that is missing as a whole goes by the column's name.
    fn missing_name(&self, start: Option<usize>, element: usize) -> String {
        if start.is_none() { self.fitted.name.clone() } else { self.fitted.value_name(element) }
    }
}

/// 1 for an infinity or NaN; without a branch, so that loops over it are vectorised.
#[inline]
fn is_infinite(value: f32) -> u32 {
    const EXPONENT: u32 = 0x7f80_0000;
    u32::from(value.to_bits() & EXPONENT == EXPONENT)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{
        array::{
            Array, ArrayRef, BooleanArray, Date32Array, Date64Array, Decimal128Array, Decimal256Array, DictionaryArray,
            FixedSizeListArray, Float32Array, Float64Array, Int8Array, Int32Array, Int64Array, LargeListArray,
            ListArray, StringArray, Time32MillisecondArray, TimestampMicrosecondArray, UInt8Array, UInt64Array,
        },
        compute::cast,
        datatypes::{DataType, Float32Type, Int32Type, UInt8Type, i256},
    };

    use super::*;
    use crate::data::DataError;

    fn fitted(list: Option<usize>) -> FittedColumn {
        FittedColumn {
            name: "c".to_owned(),
            list,
            offset: vec![0.0],
            divisor: vec![1.0],
            fill: Vec::new(),
            indicator: false,
            reject: false,
        }
    }

    fn encode(fitted: FittedColumn, array: ArrayRef) -> Result<Vec<f32>, String> {
        let features = FittedFeatures { columns: vec![fitted] };
        let batch = RecordBatch::try_from_iter_with_nullable([("c", array, true)]).unwrap();
        let mut out = vec![-1.0];
        let result = features.encode(&batch, "/data/a.parquet", 100, &mut out);
        assert_eq!(out.remove(0), -1.0);
        match result {
            Ok(()) => Ok(out),
            Err(DataError::Feature(error)) => {
                assert!(out.is_empty(), "rows of a failed batch are left");
                Err(error.to_string())
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn any_number_is_a_feature() {
        let check = |array: ArrayRef, expected: &[f32]| {
            let name = array.data_type().to_string();
            assert_eq!(encode(fitted(None), array).as_deref(), Ok(expected), "{name}");
        };
        check(Arc::new(UInt8Array::from(vec![0, 255])), &[0.0, 255.0]);
        check(Arc::new(Int8Array::from(vec![-128, 127])), &[-128.0, 127.0]);
        check(Arc::new(Int32Array::from(vec![-7, 16_777_216])), &[-7.0, 16_777_216.0]);
        check(Arc::new(UInt64Array::from(vec![u64::MAX])), &[u64::MAX as f32]);
        check(Arc::new(Float64Array::from(vec![0.1, -1e30])), &[0.1, -1e30]);
        check(Arc::new(BooleanArray::from(vec![true, false])), &[1.0, 0.0]);
        check(cast(&Float32Array::from(vec![1.5, -2.0]), &DataType::Float16).unwrap(), &[1.5, -2.0]);
        let decimal = Decimal128Array::from(vec![12345, -5]).with_precision_and_scale(10, 2).unwrap();
        check(Arc::new(decimal), &[123.45, -0.05]);
        let decimal = Decimal256Array::from(vec![i256::from(12345)]).with_precision_and_scale(50, 2).unwrap();
        check(Arc::new(decimal), &[123.45]);
        check(Arc::new(Date32Array::from(vec![-1, 19_000])), &[-1.0, 19_000.0]);
        check(Arc::new(Date64Array::from(vec![86_400_000])), &[1.0]);
        let instants = TimestampMicrosecondArray::from(vec![1_500_000, -500_000]);
        check(Arc::new(instants.clone()), &[1.5, -0.5]);
        check(Arc::new(instants.with_timezone("+02:00")), &[1.5, -0.5]);
        check(Arc::new(Time32MillisecondArray::from(vec![1500])), &[1.5]);
        let dictionary = DictionaryArray::<Int32Type>::new(
            Int32Array::from(vec![1, 0, 1]),
            Arc::new(Float64Array::from(vec![3.0, 4.0])),
        );
        check(Arc::new(dictionary), &[4.0, 3.0, 4.0]);
    }

    fn lists() -> Vec<Option<Vec<Option<f32>>>> {
        vec![Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(3.0), Some(4.0)])]
    }

    #[test]
    fn any_list_of_numbers_is_its_elements() {
        let check = |array: ArrayRef, expected: &[f32]| {
            let name = array.data_type().to_string();
            assert_eq!(encode(fitted(Some(2)), Arc::clone(&array)).as_deref(), Ok(expected), "{name}");
            let sliced = array.slice(1, array.len() - 1);
            assert_eq!(encode(fitted(Some(2)), sliced).as_deref(), Ok(&expected[2..]), "{name}, sliced");
        };
        check(Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(lists())), &[1.0, 2.0, 3.0, 4.0]);
        check(Arc::new(LargeListArray::from_iter_primitive::<Float32Type, _, _>(lists())), &[1.0, 2.0, 3.0, 4.0]);
        let fixed = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(lists(), 2);
        check(Arc::new(fixed), &[1.0, 2.0, 3.0, 4.0]);
        let bytes = vec![Some(vec![Some(7), Some(8)]), Some(vec![Some(9), Some(0)])];
        check(Arc::new(FixedSizeListArray::from_iter_primitive::<UInt8Type, _, _>(bytes, 2)), &[7.0, 8.0, 9.0, 0.0]);
    }

    #[test]
    fn what_is_missing_is_filled_before_scaling_and_indicated() {
        let scaled =
            FittedColumn { offset: vec![10.0], divisor: vec![2.0], fill: vec![12.0], indicator: true, ..fitted(None) };
        let column = Float32Array::from(vec![Some(10.0), None, Some(f32::NAN), Some(14.0)]);
        let expected = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 0.0];
        assert_eq!(encode(scaled.clone(), Arc::new(column)).as_deref(), Ok(&expected[..]));

        let list = FittedColumn {
            list: Some(2),
            fill: vec![10.0, 20.0],
            divisor: vec![1.0, 0.5],
            offset: vec![0.0, 1.0],
            ..scaled
        };
        let rows = vec![None, Some(vec![Some(1.0), None]), Some(vec![Some(f32::NAN), Some(3.0)])];
        let expected = [10.0, 38.0, 1.0, 1.0, 38.0, 0.0, 10.0, 4.0, 0.0];
        for array in [
            Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows.clone())) as ArrayRef,
            Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(rows, 2)),
        ] {
            assert_eq!(encode(list.clone(), array).as_deref(), Ok(&expected[..]));
        }
        let nothing = ListArray::from_iter_primitive::<Float32Type, Vec<Option<f32>>, _>(vec![None, None]);
        let expected = [10.0, 38.0, 1.0, 10.0, 38.0, 1.0];
        assert_eq!(encode(list, Arc::new(nothing)).as_deref(), Ok(&expected[..]));
    }

    #[test]
    fn errors_name_file_row_and_column() {
        let check = |fitted: FittedColumn, array: ArrayRef, expected: &[&str]| {
            let error = encode(fitted, array).unwrap_err();
            assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        };
        let list = |rows| Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows));
        let place = "/data/a.parquet, row 102: column `c`";
        check(fitted(None), Arc::new(Int32Array::from(vec![Some(1), None])), &[place, "NULL or NaN", "missing: mean"]);
        check(fitted(None), Arc::new(Float64Array::from(vec![1.0, f64::NAN])), &[place, "NULL or NaN"]);
        check(fitted(None), Arc::new(Float64Array::from(vec![1.0, f64::INFINITY])), &[place, "is inf"]);
        check(fitted(None), Arc::new(Float64Array::from(vec![1.0, 1e300])), &[place, "32-bit"]);
        let filled = FittedColumn { fill: vec![0.0], ..fitted(None) };
        check(filled, Arc::new(Float32Array::from(vec![None, Some(f32::NEG_INFINITY)])), &[place, "is -inf"]);
        check(fitted(Some(1)), list(vec![Some(vec![Some(1.0)]), None]), &[place, "NULL or NaN"]);
        let element = "/data/a.parquet, row 101: column `c[1]`";
        check(fitted(Some(2)), list(vec![Some(vec![Some(1.0), None])]), &[element]);
        let ragged = vec![Some(vec![Some(1.0)]), Some(vec![])];
        check(fitted(Some(1)), list(ragged), &[place, "has 0 elements, others have 1"]);
        check(fitted(None), list(vec![None]), &["column `c` is List", "fitted on a number"]);
        check(fitted(Some(3)), Arc::new(Int64Array::from(vec![1])), &["column `c` is Int64", "a list of 3 numbers"]);
        check(fitted(None), Arc::new(StringArray::from(vec!["1"])), &["column `c` is Utf8"]);
        let other = FittedColumn { name: "d".to_owned(), ..fitted(None) };
        check(other, Arc::new(Int64Array::from(vec![1])), &["no column `d`"]);
    }

    /// Rows of several blocks, several columns side by side, twice: the same bits.
    #[test]
    fn blocks_and_columns_do_not_disturb_each_other() {
        let rows = 5000;
        let number = |name: &str| FittedColumn { name: name.to_owned(), offset: vec![1.0], ..fitted(None) };
        let pixels = FittedColumn { name: "pixels".to_owned(), divisor: vec![255.0], ..fitted(Some(100)) };
        let features = FittedFeatures { columns: vec![number("a"), pixels, number("b")] };
        let bytes = (0..rows).map(|row| Some((0..100).map(move |element| Some(((row * 7 + element) % 256) as u8))));
        let pixels = FixedSizeListArray::from_iter_primitive::<UInt8Type, _, _>(bytes, 100);
        let batch = RecordBatch::try_from_iter([
            ("b", Arc::new(Int64Array::from_iter_values(0..rows)) as ArrayRef),
            ("pixels", Arc::new(pixels)),
            ("a", Arc::new(Float32Array::from_iter_values((0..rows).map(|row| row as f32 / 2.0)))),
        ])
        .unwrap();
        let mut out = Vec::new();
        features.encode(&batch, "", 0, &mut out).unwrap();
        for (row, features) in out.chunks_exact(102).enumerate() {
            assert_eq!(features[0], row as f32 / 2.0 - 1.0);
            assert_eq!(features[101], row as f32 - 1.0);
            let pixel = |element: usize| ((row * 7 + element) % 256) as f32 / 255.0;
            assert!(features[1..101].iter().enumerate().all(|(element, feature)| *feature == pixel(element)));
        }
        let mut again = Vec::new();
        for start in (0..rows as usize).step_by(777) {
            let slice = batch.slice(start, 777.min(rows as usize - start));
            features.encode(&slice, "", 0, &mut again).unwrap();
        }
        assert_eq!(out, again);
        assert_eq!(features.names()[..3], ["a", "pixels[0]", "pixels[1]"]);
    }

    #[test]
    fn json_keeps_every_bit() {
        let third = 1.0 / 3.0;
        let column = FittedColumn {
            offset: vec![0.1 + 0.2, 5e-324],
            divisor: vec![third, f64::MAX],
            fill: vec![-0.0],
            ..fitted(Some(2))
        };
        let features = FittedFeatures { columns: vec![column] };
        let json = serde_json::to_string(&features).unwrap();
        let back: FittedFeatures = serde_json::from_str(&json).unwrap();
        assert_eq!(back, features);
        assert!(back.columns[0].fill[0].is_sign_negative());
    }
}
