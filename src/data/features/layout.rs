//! The feature columns of a model against a table's schema.

use std::{collections::HashMap, ops::Range};

use arrow::datatypes::{DataType, Schema};

use super::column::is_number;
use crate::{
    data::{DataError, partition::consecutive},
    limits,
    pipeline::{
        Faults, FeaturePlan, ModelPlan, Origin,
        spec::{Missing, Scale, Spread},
    },
};

/// How alike two names must be (Jaro-Winkler) for the one to be meant by the other.
const ALIKE: f64 = 0.8;

/// The feature columns of a model, resolved against a table's columns; not yet fitted.
#[derive(Clone, Debug, PartialEq)]
pub struct FeatureLayout {
    pub(super) columns: Vec<LayoutColumn>,
}

/// One feature column.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LayoutColumn {
    pub name: String,
    pub shape: Shape,
    pub scale: Scale,
    pub missing: Missing,
    pub indicator: bool,
}

/// What a row holds in a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// One number.
    Scalar,
    /// As many numbers as the type says.
    FixedList(usize),
    /// As many numbers as the first row has.
    List,
}

impl FeatureLayout {
    /// Resolves patterns, checks that each column exists and can be a feature. Faults point
    /// into the pipeline file (`models.<name>.features[i]`).
    pub fn resolve(model: &ModelPlan, schema: &Schema, origin: &Origin) -> Result<Self, DataError> {
        let mut resolver =
            Resolver { model: &model.name, schema, origin, columns: Vec::new(), used: HashMap::new(), faults: None };
        for (index, feature) in model.features.iter().enumerate() {
            for (place, pattern) in feature.columns.iter().enumerate() {
                resolver.add(index, feature, place, pattern);
            }
        }
        let layout = Self { columns: resolver.columns };
        let mut faults = resolver.faults;
        if let Some(width) = layout.width().filter(|width| *width > limits::MAX_FEATURES) {
            let message = format!("{width} features; a model has {} at most", limits::MAX_FEATURES);
            merge(&mut faults, origin.fault(&["models", &model.name, "features"], message, None));
        }
        if let Spread::Vertical { slices } = model.spread
            && faults.is_none()
            && (layout.columns.len() as u64) < u64::from(slices)
        {
            let (message, help) = layout.uncut(slices);
            let path = ["models", &model.name, "spread", "vertical", "slices"];
            merge(&mut faults, origin.fault(&path, message, Some(help)));
        }
        faults.map_or(Ok(layout), |faults| Err(faults.into()))
    }

    /// Why there are no such many slices, and what to do.
    fn uncut(&self, slices: u32) -> (String, String) {
        if let [column] = &self.columns[..]
            && column.shape != Shape::Scalar
        {
            let message = format!("column `{}` cannot be cut into {slices} slices: a list stays whole", column.name);
            return (
                message,
                "select its parts as columns of their own in a transform, or use `spread: data`".to_owned(),
            );
        }
        let columns = self.columns.len();
        let message = format!("{slices} slices need as many feature columns, and there are {columns}");
        (message, format!("give {columns} slices at most, or add features"))
    }

    /// The columns, each once.
    pub fn columns(&self) -> Vec<String> {
        self.columns.iter().map(|column| column.name.clone()).collect()
    }

    /// The columns in which a missing value rejects the row.
    pub fn reject_missing(&self) -> Vec<String> {
        let rejecting = self.columns.iter().filter(|column| column.missing == Missing::Reject);
        rejecting.map(|column| column.name.clone()).collect()
    }

    /// Features of a row, where that is known without reading rows (no variable-size lists).
    pub fn width(&self) -> Option<usize> {
        self.columns.iter().map(LayoutColumn::width).sum()
    }

    /// The widths of so many slices, where they are known: as `FittedFeatures::slices` cuts them.
    pub fn slices(&self, parts: usize) -> Option<Vec<usize>> {
        let widths: Vec<u64> =
            self.columns.iter().map(|column| column.width().map(|width| width as u64)).collect::<Option<_>>()?;
        let width = |part: Range<usize>| widths[part].iter().sum::<u64>() as usize;
        Some(consecutive(&widths, parts).into_iter().map(width).collect())
    }
}

impl LayoutColumn {
    fn width(&self) -> Option<usize> {
        let values = match self.shape {
            Shape::Scalar => 1,
            Shape::FixedList(width) => width,
            Shape::List => return None,
        };
        Some(values + usize::from(self.indicator))
    }
}

struct Resolver<'a> {
    model: &'a str,
    schema: &'a Schema,
    origin: &'a Origin,
    columns: Vec<LayoutColumn>,
    /// Index into `features:` by column.
    used: HashMap<String, usize>,
    faults: Option<Faults>,
}

impl Resolver<'_> {
    fn add(&mut self, index: usize, feature: &FeaturePlan, place: usize, pattern: &str) {
        let names = self.matches(pattern);
        if names.is_empty() {
            let (message, help) = self.unknown(pattern);
            self.fault(index, place, &message, help.as_deref());
        }
        for name in names {
            match self.used.get(&name) {
                // Patterns of one entry may overlap: they all say the same.
                Some(other) if *other == index => continue,
                Some(other) => {
                    let message = format!("column `{name}` is a feature already, by entry {} of `features`", other + 1);
                    let help = "a column can be used once; leave it to one of the two entries";
                    self.fault(index, place, &message, Some(help));
                    continue;
                }
                None => self.used.insert(name.clone(), index),
            };
            let Ok(field) = self.schema.field_with_name(&name) else { continue };
            match shape_of(field.data_type()) {
                Ok(shape) => self.columns.push(LayoutColumn {
                    name,
                    shape,
                    scale: feature.scale,
                    missing: feature.missing,
                    indicator: feature.indicator,
                }),
                Err(help) => {
                    let message = format!("column `{name}` is {}, which cannot be a feature", field.data_type());
                    self.fault(index, place, &message, Some(&help));
                }
            }
        }
    }

    /// The columns that a name or pattern means, in the schema's order.
    fn matches(&self, pattern: &str) -> Vec<String> {
        let names = self.schema.fields().iter().map(|field| field.name());
        if self.schema.field_with_name(pattern).is_ok() {
            return vec![pattern.to_owned()];
        }
        names.filter(|name| pattern.contains('*') && glob(pattern, name)).cloned().collect()
    }

    fn unknown(&self, pattern: &str) -> (String, Option<String>) {
        let from = &self.model;
        if pattern.contains('*') {
            let columns: Vec<&str> = self.schema.fields().iter().take(10).map(|field| field.name().as_str()).collect();
            let more = if self.schema.fields().len() > columns.len() { ", ..." } else { "" };
            let help = format!("its columns are {}{more}", columns.join(", "));
            return (format!("no column of the table that `{from}` learns from matches `{pattern}`"), Some(help));
        }
        let likeness = |name: &str| strsim::jaro_winkler(&pattern.to_lowercase(), &name.to_lowercase());
        let best = self.schema.fields().iter().map(|field| (likeness(field.name()), field.name()));
        let best = best.max_by(|(a, _), (b, _)| a.total_cmp(b)).filter(|(likeness, _)| *likeness >= ALIKE);
        let help = best.map(|(_, name)| format!("did you mean `{name}`?"));
        (format!("no column `{pattern}` in the table that `{from}` learns from"), help)
    }

    fn fault(&mut self, index: usize, place: usize, message: &str, help: Option<&str>) {
        let (index, place) = (index.to_string(), place.to_string());
        let entry = ["models", self.model, "features", &index];
        // Written as `column` or as `columns`: the one that is not there marks the whole entry.
        let paths = [[&entry[..], &["column"]].concat(), [&entry[..], &["columns", &place]].concat()];
        let faults = paths.map(|path| self.origin.fault(&path, message.to_owned(), help.map(str::to_owned)));
        let marked = |faults: &Faults| faults.faults.first().map_or(usize::MAX, |fault| fault.span.len());
        let narrowest = faults.into_iter().min_by_key(marked);
        if let Some(narrowest) = narrowest {
            merge(&mut self.faults, narrowest);
        }
    }
}

fn merge(all: &mut Option<Faults>, more: Faults) {
    match all {
        Some(all) => {
            all.faults.extend(more.faults);
            all.faults.sort_by_key(|fault| fault.span.start);
        }
        None => *all = Some(more),
    }
}

/// Whether `*` in the pattern can stand for characters so that it equals the name.
fn glob(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(head) else { return false };
    let Some((middles, last)) = tail.rsplit_once('*') else { return rest.ends_with(tail) };
    let Some(mut rest) = rest.strip_suffix(last) else { return false };
    for middle in middles.split('*') {
        let Some(at) = rest.find(middle) else { return false };
        rest = &rest[at + middle.len()..];
    }
    true
}

/// The shape of a column's rows, or what its owner can do about a type that has none.
fn shape_of(data_type: &DataType) -> Result<Shape, String> {
    use DataType::{
        Binary, BinaryView, FixedSizeBinary, FixedSizeList, LargeBinary, LargeList, LargeUtf8, List, Map, Null, Struct,
        Utf8, Utf8View,
    };
    match data_type {
        data_type if is_number(data_type) => Ok(Shape::Scalar),
        FixedSizeList(element, width) if *width > 0 && is_number(element.data_type()) => {
            Ok(Shape::FixedList(*width as usize))
        }
        List(element) | LargeList(element) if is_number(element.data_type()) => Ok(Shape::List),
        DataType::Dictionary(_, values) => shape_of(values).and(Err("CAST it to a number in a transform".to_owned())),
        Utf8 | LargeUtf8 | Utf8View => {
            Err("categories are not supported yet; CAST it to a number in a transform, or leave it out".to_owned())
        }
        Binary | LargeBinary | BinaryView | FixedSizeBinary(_) => {
            Err("decode it to numbers in a transform, or leave it out".to_owned())
        }
        Struct(_) | Map(..) => Err("select its numbers as columns of their own in a transform".to_owned()),
        List(_) | LargeList(_) | FixedSizeList(..) => {
            Err("only lists of numbers can; flatten or CAST it in a transform".to_owned())
        }
        Null => Err("it has no value in any row; leave it out".to_owned()),
        _ => Err("CAST it to a number in a transform, or leave it out".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::Field;

    use super::*;

    #[test]
    fn a_star_stands_for_any_characters() {
        let check = |pattern, yes: &[&str], no: &[&str]| {
            for name in yes.iter().chain(no) {
                assert_eq!(glob(pattern, name), yes.contains(name), "{pattern} {name}");
            }
        };
        check("*", &["", "a", "ab"], &[]);
        check("a*", &["a", "ab"], &["", "ba", "A"]);
        check("*_rate", &["_rate", "x_rate"], &["rate", "x_rates"]);
        check("a*b*c", &["abc", "aXbYc", "abbc", "abcbc"], &["ac", "abcd", "acb"]);
        check("aa*a", &["aaa", "aaXa"], &["aa"]);
        check("**x**", &["x", "axb"], &["a"]);
    }

    #[test]
    fn a_type_that_cannot_be_a_feature_comes_with_a_way_out() {
        let check = |data_type: DataType, help: &str| {
            let way_out = shape_of(&data_type).unwrap_err();
            assert!(way_out.contains(help), "{data_type}: {way_out}");
        };
        let item = |data_type| Arc::new(Field::new("item", data_type, true));
        check(DataType::Utf8, "categories");
        check(DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)), "categories");
        check(DataType::Binary, "decode");
        check(DataType::Struct(vec![Field::new("a", DataType::Int32, true)].into()), "columns of their own");
        check(DataType::List(item(DataType::List(item(DataType::Int8)))), "flatten");
        check(DataType::FixedSizeList(item(DataType::Utf8), 3), "lists of numbers");
        check(DataType::Null, "no value");
        check(DataType::Interval(arrow::datatypes::IntervalUnit::DayTime), "CAST");
        let shape = |data_type| shape_of(&data_type);
        assert_eq!(shape(DataType::Decimal256(50, 2)), Ok(Shape::Scalar));
        assert_eq!(shape(DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Int8))), Ok(Shape::Scalar));
        assert_eq!(shape(DataType::FixedSizeList(item(DataType::UInt8), 784)), Ok(Shape::FixedList(784)));
        assert_eq!(shape(DataType::LargeList(item(DataType::Boolean))), Ok(Shape::List));
    }
}
