//! One function: its types and its evaluation.

use std::{fmt, ops::Range, sync::Arc};

use arrow::{
    array::Float64Array,
    datatypes::{DataType, Field, FieldRef},
};
use datafusion::{
    common::{exec_err, internal_err, plan_err, utils::take_function_args},
    error::Result,
    logical_expr::{ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility},
    scalar::ScalarValue,
};

use super::{
    kernel::{Number, dot, norm, squared_distance},
    vectors::{Numbers, Vectors, vector_type},
};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Measure {
    /// Euclidean distance.
    Distance,
    /// Its square.
    SquaredDistance,
    /// 1 - cosine similarity.
    CosineDistance,
    /// Cosine of the angle, -1 to 1; NULL where a vector is zero.
    CosineSimilarity,
    /// Sum of products.
    InnerProduct,
    /// -1 times that, so that near ones come first.
    NegativeInnerProduct,
    /// Length of the one vector given.
    Norm,
}

/// A function under one of its names.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct MeasureFunction {
    name: &'static str,
    measure: Measure,
    signature: Signature,
}

impl MeasureFunction {
    pub(super) fn new(name: &'static str, measure: Measure) -> Self {
        Self { name, measure, signature: Signature::user_defined(Volatility::Immutable) }
    }

    /// The name under which it was called.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Whether it sets two vectors beside each other.
    pub(super) fn compares(&self) -> bool {
        self.measure != Measure::Norm
    }

    /// Fails where both sides have a fixed width, and not the same.
    fn check_widths(&self, arguments: &[FieldRef]) -> Result<()> {
        match arguments.iter().map(|field| field.data_type()).collect::<Vec<_>>()[..] {
            [DataType::FixedSizeList(_, left), DataType::FixedSizeList(_, right)] if left != right => {
                plan_err!("{}: vectors of width {left} and {right} cannot be compared", self.name)
            }
            _ => Ok(()),
        }
    }

    fn evaluate(&self, arguments: &[Vectors], rows: usize) -> Result<Float64Array> {
        match arguments {
            [only] => Ok(match &only.numbers {
                Numbers::F32(a) => norms(only, a, rows),
                Numbers::F64(a) => norms(only, a, rows),
            }),
            [left, right] => match (&left.numbers, &right.numbers) {
                (Numbers::F32(a), Numbers::F32(b)) => self.pairs((left, a), (right, b), rows),
                (Numbers::F32(a), Numbers::F64(b)) => self.pairs((left, a), (right, b), rows),
                (Numbers::F64(a), Numbers::F32(b)) => self.pairs((left, a), (right, b), rows),
                (Numbers::F64(a), Numbers::F64(b)) => self.pairs((left, a), (right, b), rows),
            },
            _ => internal_err!("{} takes one or two arguments", self.name),
        }
    }

    fn pairs<A: Number, B: Number>(
        &self,
        (left, left_numbers): (&Vectors, &[A]),
        (right, right_numbers): (&Vectors, &[B]),
        rows: usize,
    ) -> Result<Float64Array> {
        let (left_norm, right_norm) = (Norm::new(left, left_numbers), Norm::new(right, right_numbers));
        let pair = |row| -> Result<Option<f64>> {
            let (Some(left), Some(right)) = (left.place(row), right.place(row)) else { return Ok(None) };
            if left.len() != right.len() {
                let (left, right) = (left.len(), right.len());
                return exec_err!("{}: vectors of width {left} and {right} cannot be compared", self.name);
            }
            let (a, b) = (&left_numbers[left.clone()], &right_numbers[right.clone()]);
            let cosine = || {
                let norms = left_norm.of(left) * right_norm.of(right);
                // Rounding must not push it out of its range.
                (norms != 0.0).then(|| (dot(a, b) / norms).clamp(-1.0, 1.0))
            };
            Ok(match self.measure {
                Measure::Distance => Some(squared_distance(a, b).sqrt()),
                Measure::SquaredDistance => Some(squared_distance(a, b)),
                Measure::CosineDistance => cosine().map(|cosine| 1.0 - cosine),
                Measure::CosineSimilarity => cosine(),
                Measure::InnerProduct => Some(dot(a, b)),
                Measure::NegativeInnerProduct => Some(-dot(a, b)),
                Measure::Norm => return internal_err!("{} takes one argument", self.name),
            })
        };
        (0..rows).map(pair).collect()
    }
}

/// Norms of a side; that of a constant side is computed once.
struct Norm<'a, N> {
    numbers: &'a [N],
    constant: Option<f64>,
}

impl<'a, N: Number> Norm<'a, N> {
    fn new(vectors: &Vectors, numbers: &'a [N]) -> Self {
        let place = vectors.is_constant().then(|| vectors.place(0)).flatten();
        Self { numbers, constant: place.map(|place| norm(&numbers[place])) }
    }

    fn of(&self, place: Range<usize>) -> f64 {
        self.constant.unwrap_or_else(|| norm(&self.numbers[place]))
    }
}

fn norms<A: Number>(vectors: &Vectors, numbers: &[A], rows: usize) -> Float64Array {
    (0..rows).map(|row| vectors.place(row).map(|place| norm(&numbers[place]))).collect()
}

impl fmt::Debug for MeasureFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl ScalarUDFImpl for MeasureFunction {
    fn name(&self) -> &str {
        self.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(DataType::Float64)
    }

    fn return_field_from_args(&self, arguments: ReturnFieldArgs) -> Result<FieldRef> {
        self.check_widths(arguments.arg_fields)?;
        Ok(Arc::new(Field::new(self.name, DataType::Float64, true)))
    }

    fn coerce_types(&self, arguments: &[DataType]) -> Result<Vec<DataType>> {
        if self.compares() {
            take_function_args(self.name, arguments).map(|[_, _]: [&DataType; 2]| ())?;
        } else {
            take_function_args(self.name, arguments).map(|[_]: [&DataType; 1]| ())?;
        }
        arguments.iter().map(|argument| vector_type(self.name, argument)).collect()
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let constant = args.args.iter().all(|argument| matches!(argument, ColumnarValue::Scalar(_)));
        let vectors = |argument: &ColumnarValue| match argument {
            ColumnarValue::Array(array) => Vectors::new(array, false),
            ColumnarValue::Scalar(scalar) => Vectors::new(&scalar.to_array()?, true),
        };
        let arguments = args.args.iter().map(vectors).collect::<Result<Vec<_>>>()?;
        let values = self.evaluate(&arguments, if constant { 1 } else { args.number_rows })?;
        Ok(if constant {
            ColumnarValue::Scalar(ScalarValue::try_from_array(&values, 0)?)
        } else {
            ColumnarValue::Array(Arc::new(values))
        })
    }
}
