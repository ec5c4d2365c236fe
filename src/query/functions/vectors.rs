//! A column of vectors as slices of numbers, without copying them.

use std::ops::Range;

use arrow::{
    array::{Array, ArrayRef, AsArray, Float32Array, Float64Array},
    buffer::{NullBuffer, OffsetBuffer, ScalarBuffer},
    datatypes::{DataType, Field},
};
use datafusion::{
    common::{exec_err, plan_err},
    error::Result,
};

/// The numbers of a column's vectors.
pub(super) enum Numbers {
    F32(ScalarBuffer<f32>),
    F64(ScalarBuffer<f64>),
}

/// Where each vector's numbers are.
enum Places {
    Offsets(OffsetBuffer<i32>),
    LargeOffsets(OffsetBuffer<i64>),
    Fixed(usize),
}

/// A column of vectors, or one vector that stands for every row.
pub(super) struct Vectors {
    pub(super) numbers: Numbers,
    places: Places,
    missing: Option<NullBuffer>,
    missing_numbers: Option<NullBuffer>,
    constant: bool,
}

impl Vectors {
    /// `array` is a list of f32 or f64 (see `vector_type`); `constant` if its one row stands
    /// for all rows.
    pub(super) fn new(array: &ArrayRef, constant: bool) -> Result<Self> {
        let (values, places) = match array.data_type() {
            DataType::List(_) => {
                let list = array.as_list::<i32>();
                (list.values(), Places::Offsets(list.offsets().clone()))
            }
            DataType::LargeList(_) => {
                let list = array.as_list::<i64>();
                (list.values(), Places::LargeOffsets(list.offsets().clone()))
            }
            DataType::FixedSizeList(_, width) => (array.as_fixed_size_list().values(), Places::Fixed(*width as usize)),
            other => return exec_err!("{other} is no list of numbers"),
        };
        let numbers = if let Some(values) = values.as_any().downcast_ref::<Float32Array>() {
            Numbers::F32(values.values().clone())
        } else if let Some(values) = values.as_any().downcast_ref::<Float64Array>() {
            Numbers::F64(values.values().clone())
        } else {
            return exec_err!("{} is no list of floats", array.data_type());
        };
        let missing_numbers = values.nulls().filter(|nulls| nulls.null_count() > 0).cloned();
        Ok(Self { numbers, places, missing: array.nulls().cloned(), missing_numbers, constant })
    }

    /// Whether one vector stands for every row.
    pub(super) fn is_constant(&self) -> bool {
        self.constant
    }

    /// Where a row's numbers are; `None` where the vector or one of its numbers is NULL.
    pub(super) fn place(&self, row: usize) -> Option<Range<usize>> {
        let row = if self.constant { 0 } else { row };
        if self.missing.as_ref().is_some_and(|missing| missing.is_null(row)) {
            return None;
        }
        let place = match &self.places {
            Places::Offsets(offsets) => offsets[row] as usize..offsets[row + 1] as usize,
            Places::LargeOffsets(offsets) => offsets[row] as usize..offsets[row + 1] as usize,
            Places::Fixed(width) => row * width..(row + 1) * width,
        };
        let whole = |numbers: &NullBuffer| place.clone().all(|i| numbers.is_valid(i));
        self.missing_numbers.as_ref().is_none_or(whole).then_some(place)
    }
}

/// The type as which an argument is read: lists of floats as they are, other numbers in f64.
pub(super) fn vector_type(function: &str, given: &DataType) -> Result<DataType> {
    let unusable = || plan_err!("{function} takes lists of numbers, not {given}");
    let element = |field: &Field| match field.data_type() {
        DataType::Float32 | DataType::Float64 => Some(field.clone()),
        other if other.is_numeric() || other.is_null() => Some(field.clone().with_data_type(DataType::Float64)),
        _ => None,
    };
    match given {
        DataType::Null => Ok(DataType::new_list(DataType::Float64, true)),
        DataType::List(field) | DataType::ListView(field) => {
            element(field).map_or_else(unusable, |field| Ok(DataType::List(field.into())))
        }
        DataType::LargeList(field) | DataType::LargeListView(field) => {
            element(field).map_or_else(unusable, |field| Ok(DataType::LargeList(field.into())))
        }
        DataType::FixedSizeList(field, width) => {
            element(field).map_or_else(unusable, |field| Ok(DataType::FixedSizeList(field.into(), *width)))
        }
        _ => unusable(),
    }
}
