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
    factor: Constants,
}

impl<'a> Lane<'a> {
    fn new(
        fitted: &'a FittedColumn,
        batch: &RecordBatch,
        place: Place<'a>,
        first: usize,
    ) -> Result<Self, FeatureError> {
        let column = place.column(batch, &fitted.name, fitted.list)?;
        let (offset, factor) = (Constants::new(&fitted.offset), Constants::new(&fitted.factor));
        Ok(Self { fitted, column, place, first, offset, factor })
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
        let factor = T::Work::of(&self.factor);
        let width = self.column.width();
        let mut infinite = 0;
        if let ([offset], [factor], 1) = (offset, factor, width) {
            for (value, row) in values[rows].iter().zip(out.chunks_exact_mut(stride)) {
                let feature = ((value.work() - *offset) * *factor).single();
                infinite |= is_infinite(feature);
                row[self.first] = feature;
            }
            return infinite == 0;
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(stride)) {
            let Some(start) = self.column.start(row) else { continue };
            let out = &mut out[self.first..self.first + width];
            let values = &values[start..start + width];
            if let ([offset], [factor]) = (offset, factor) {
                for (feature, value) in out.iter_mut().zip(values) {
                    *feature = ((value.work() - *offset) * *factor).single();
                }
            } else {
                for (((feature, value), offset), factor) in out.iter_mut().zip(values).zip(offset).zip(factor) {
                    *feature = ((value.work() - *offset) * *factor).single();
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
            for element in 0..width {
                let value = start
                    .map(|start| start + element)
                    .filter(|place| !self.column.is_null(*place))
                    .map(|place| values[place].work().double())
                    .filter(|value| !value.is_nan());
                if let Some(value) = value {
                    all_missing = false;
                    if !out[element].is_finite() {
                        return Err(self.place.not_finite(row, self.fitted.value_name(element), value));
                    }
                } else {
                    let fill = self.fill(element);
                    out[element] = fill.ok_or_else(|| self.place.missing(row, self.missing_name(start, element)))?;
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
        Some(((fill - of(&self.fitted.offset)?) * of(&self.fitted.factor)?) as f32)
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
