//! One column of a batch as plain numbers: whatever its Arrow type, `width` values per row in
//! one primitive buffer.
//!
//! Booleans become 0 and 1, decimals their value, dates days since 1970, timestamps seconds
//! since 1970 UTC, times and durations seconds.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, GenericListArray, OffsetSizeTrait},
    buffer::NullBuffer,
    compute::{cast, unary},
    datatypes::{DataType, Float64Type, Int64Type, TimeUnit},
    error::ArrowError,
};

/// A primitive number and the precision that it is scaled in: 32-bit floats where they hold
/// every value exactly, 64-bit ones elsewhere.
pub(super) trait Number: Copy {
    type Work: Work;
    fn work(self) -> Self::Work;
}

/// The precision that numbers are scaled in.
pub(super) trait Work: Copy + std::ops::Sub<Output = Self> + std::ops::Div<Output = Self> {
    fn single(self) -> f32;
    fn double(self) -> f64;
    /// The constants in this precision.
    fn of(constants: &Constants) -> &[Self];
}

/// Constants of a column, one for all its elements or one each, in both precisions.
#[derive(Debug)]
pub(super) struct Constants {
    single: Vec<f32>,
    double: Vec<f64>,
}

impl Constants {
    pub fn new(double: &[f64]) -> Self {
        Self { single: double.iter().map(|value| *value as f32).collect(), double: double.to_vec() }
    }
}

impl Work for f32 {
    fn single(self) -> f32 {
        self
    }

    fn double(self) -> f64 {
        f64::from(self)
    }

    fn of(constants: &Constants) -> &[Self] {
        &constants.single
    }
}

impl Work for f64 {
    fn single(self) -> f32 {
        self as f32
    }

    fn double(self) -> f64 {
        self
    }

    fn of(constants: &Constants) -> &[Self] {
        &constants.double
    }
}

macro_rules! numbers {
    ($($number:ty as $work:ty: $value:ident => $convert:expr;)*) => {$(
        impl Number for $number {
            type Work = $work;

            fn work(self) -> $work {
                let $value = self;
                $convert
            }
        }
    )*};
}

numbers! {
    u8 as f32: value => f32::from(value);
    i8 as f32: value => f32::from(value);
    u16 as f32: value => f32::from(value);
    i16 as f32: value => f32::from(value);
    f32 as f32: value => value;
    u32 as f64: value => f64::from(value);
    i32 as f64: value => f64::from(value);
    u64 as f64: value => value as f64;
    i64 as f64: value => value as f64;
    f64 as f64: value => value;
}

/// Evaluates the body with `$values` as a slice of the column's primitive type: the one
/// dispatch by type, outside all loops.
macro_rules! with_values {
    ($column:expr, $values:ident => $body:expr) => {
        with_values!(@ $column, $values, $body,
            UInt8: UInt8Type, Int8: Int8Type, UInt16: UInt16Type, Int16: Int16Type, UInt32: UInt32Type,
            Int32: Int32Type, UInt64: UInt64Type, Int64: Int64Type, Float32: Float32Type)
    };
    (@ $column:expr, $values:ident, $body:expr, $($variant:ident: $kind:ident),*) => {{
        use arrow::{array::AsArray, datatypes::*};
        let array = $column.array();
        match array.data_type() {
            $(DataType::$variant => {
                let $values: &[_] = array.as_primitive::<$kind>().values();
                $body
            })*
            // `numbers` gives no other type.
            _ => {
                let $values: &[_] = array.as_primitive::<Float64Type>().values();
                $body
            }
        }
    }};
}
pub(super) use with_values;

/// A column of one batch, ready to be walked.
#[derive(Debug)]
pub(super) struct Column {
    values: ArrayRef,
    starts: Starts,
    width: usize,
    /// Which elements of `values` are there; `None` if all are.
    elements: Option<NullBuffer>,
    /// Which lists are there; `None` if all are.
    lists: Option<NullBuffer>,
}

/// Where rows start in the values.
#[derive(Debug)]
enum Starts {
    /// Row after row.
    Even,
    /// Of each row; of no meaning for a missing list.
    At(Vec<usize>),
}

/// Why a column cannot be walked.
#[derive(Debug)]
pub(super) enum ColumnError {
    /// A list of another width.
    Ragged { row: usize, found: usize },
    /// Not a number, or not a list of numbers.
    Type,
    /// A conversion failed.
    Arrow(ArrowError),
}

impl From<ArrowError> for ColumnError {
    fn from(error: ArrowError) -> Self {
        Self::Arrow(error)
    }
}

impl Column {
    /// A column of numbers, or, with a width, of lists of that many numbers.
    pub fn new(array: &ArrayRef, list: Option<usize>) -> Result<Self, ColumnError> {
        let (values, starts, lists) = match (array.data_type(), list) {
            (data_type, None) if is_number(data_type) => (Arc::clone(array), Starts::Even, None),
            (DataType::FixedSizeList(..), Some(width)) => {
                let array = array.as_fixed_size_list();
                let found = array.value_length() as usize;
                if found != width {
                    return Err(ColumnError::Ragged { row: 0, found });
                }
                (Arc::clone(array.values()), Starts::Even, array.nulls().cloned())
            }
            (DataType::List(_), Some(width)) => from_lists(array.as_list::<i32>(), width)?,
            (DataType::LargeList(_), Some(width)) => from_lists(array.as_list::<i64>(), width)?,
            _ => return Err(ColumnError::Type),
        };
        let values = numbers(&values)?;
        let elements = values.nulls().filter(|nulls| nulls.null_count() > 0).cloned();
        let lists = lists.filter(|nulls| nulls.null_count() > 0);
        Ok(Self { values, starts, width: list.unwrap_or(1), elements, lists })
    }

    /// Values per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Whether the value of row `i` stands at place `i`.
    pub fn is_flat(&self) -> bool {
        self.width == 1 && matches!(self.starts, Starts::Even)
    }

    /// The values, in one of the types of `with_values`.
    pub fn array(&self) -> &ArrayRef {
        &self.values
    }

    /// Where a row's values start, unless the list as a whole is missing.
    #[inline]
    pub fn start(&self, row: usize) -> Option<usize> {
        if self.lists.as_ref().is_some_and(|lists| lists.is_null(row)) {
            return None;
        }
        Some(match &self.starts {
            Starts::Even => row * self.width,
            Starts::At(starts) => starts[row],
        })
    }

    /// Whether any value or list of the column is NULL.
    pub fn has_nulls(&self) -> bool {
        self.elements.is_some() || self.lists.is_some()
    }

    /// Whether the value at a place of the values is NULL.
    #[inline]
    pub fn is_null(&self, place: usize) -> bool {
        self.elements.as_ref().is_some_and(|elements| elements.is_null(place))
    }

    /// The width of the first list that is there and not empty.
    pub fn first_width(array: &ArrayRef) -> Option<usize> {
        match array.data_type() {
            DataType::List(_) => first_width(array.as_list::<i32>()),
            DataType::LargeList(_) => first_width(array.as_list::<i64>()),
            _ => None,
        }
    }
}

fn first_width<O: OffsetSizeTrait>(array: &GenericListArray<O>) -> Option<usize> {
    let valid = (0..array.len()).filter(|row| array.is_valid(*row));
    valid.map(|row| array.value_length(row).as_usize()).find(|width| *width > 0)
}

type Parts = (ArrayRef, Starts, Option<NullBuffer>);

fn from_lists<O: OffsetSizeTrait>(array: &GenericListArray<O>, width: usize) -> Result<Parts, ColumnError> {
    let offsets = array.value_offsets();
    let first = offsets[0].as_usize();
    let last = offsets[array.len()].as_usize();
    for row in 0..array.len() {
        let found = (offsets[row + 1] - offsets[row]).as_usize();
        if found != width && array.is_valid(row) {
            return Err(ColumnError::Ragged { row, found });
        }
    }
    let starts = if array.null_count() == 0 {
        Starts::Even
    } else {
        Starts::At(offsets[..array.len()].iter().map(|offset| offset.as_usize() - first).collect())
    };
    Ok((array.values().slice(first, last - first), starts, array.nulls().cloned()))
}

/// Whether values of this type are numbers to us.
pub(super) fn is_number(data_type: &DataType) -> bool {
    use DataType::{
        Boolean, Date32, Date64, Decimal32, Decimal64, Decimal128, Decimal256, Duration, Time32, Time64, Timestamp,
    };
    match data_type {
        DataType::Dictionary(_, values) => !matches!(**values, DataType::Dictionary(..)) && is_number(values),
        Boolean | Date32 | Date64 | Timestamp(..) | Time32(_) | Time64(_) | Duration(_) | Decimal32(..)
        | Decimal64(..) | Decimal128(..) | Decimal256(..) => true,
        other => other.is_integer() || other.is_floating(),
    }
}

/// Any array of `is_number` as one of the types of `with_values`.
fn numbers(array: &ArrayRef) -> Result<ArrayRef, ColumnError> {
    let seconds = |unit: &TimeUnit| match unit {
        TimeUnit::Second => 1.0,
        TimeUnit::Millisecond => 1e3,
        TimeUnit::Microsecond => 1e6,
        TimeUnit::Nanosecond => 1e9,
    };
    match array.data_type() {
        DataType::Boolean => Ok(cast(array, &DataType::UInt8)?),
        DataType::Float16 => Ok(cast(array, &DataType::Float32)?),
        DataType::Date32 => Ok(cast(array, &DataType::Int32)?),
        DataType::Date64 => divided(array, 86_400e3),
        DataType::Timestamp(unit, _) | DataType::Time64(unit) | DataType::Duration(unit) => {
            divided(array, seconds(unit))
        }
        DataType::Time32(unit) => divided(&cast(array, &DataType::Int32)?, seconds(unit)),
        DataType::Decimal32(..) | DataType::Decimal64(..) | DataType::Decimal128(..) | DataType::Decimal256(..) => {
            Ok(cast(array, &DataType::Float64)?)
        }
        DataType::Dictionary(_, values) => numbers(&cast(array, values)?),
        other if other.is_integer() || other.is_floating() => Ok(Arc::clone(array)),
        _ => Err(ColumnError::Type),
    }
}

fn divided(array: &ArrayRef, divisor: f64) -> Result<ArrayRef, ColumnError> {
    let whole = cast(array, &DataType::Int64)?;
    let divided = unary::<_, _, Float64Type>(whole.as_primitive::<Int64Type>(), |value| value as f64 / divisor);
    Ok(Arc::new(divided))
}
