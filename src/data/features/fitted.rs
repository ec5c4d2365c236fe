//! Feature columns with everything learned: what is saved with the model.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::data::partition::consecutive;

/// Feature columns with everything learned from the rows: saved as JSON with the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FittedFeatures {
    pub(super) columns: Vec<FittedColumn>,
}

/// One column: its features are `(value - offset) / divisor`, then its indicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct FittedColumn {
    pub name: String,
    /// Elements of its lists; none for a plain number.
    pub list: Option<usize>,
    /// One for all elements, or one each.
    #[serde(with = "exact")]
    pub offset: Vec<f64>,
    /// One for all elements, or one each.
    #[serde(with = "exact")]
    pub divisor: Vec<f64>,
    /// In place of missing values, before scaling: one for all elements, or one each; empty
    /// where a missing value is an error.
    #[serde(with = "exact")]
    pub fill: Vec<f64>,
    pub indicator: bool,
    /// Whether a row with a missing value is left out before it comes here.
    pub reject: bool,
}

impl FittedColumn {
    /// Values per row, without the indicator.
    pub fn values(&self) -> usize {
        self.list.unwrap_or(1)
    }

    /// Features per row: values and the indicator.
    pub fn width(&self) -> usize {
        self.values() + usize::from(self.indicator)
    }

    /// The name of one of its values: `price`, `pixels[17]`.
    pub fn value_name(&self, element: usize) -> String {
        match self.list {
            Some(_) => format!("{}[{element}]", self.name),
            None => self.name.clone(),
        }
    }
}

impl FittedFeatures {
    /// Features of a row.
    pub fn width(&self) -> usize {
        self.columns.iter().map(FittedColumn::width).sum()
    }

    /// The columns read, each once.
    pub fn columns(&self) -> Vec<String> {
        self.columns.iter().map(|column| column.name.clone()).collect()
    }

    /// Consecutive columns, so many parts of them, about equally wide; none is empty unless there
    /// are fewer columns than parts.
    pub fn slices(&self, parts: usize) -> Vec<Self> {
        let widths: Vec<u64> = self.columns.iter().map(|column| column.width() as u64).collect();
        let part = |columns: Range<usize>| Self { columns: self.columns[columns].to_vec() };
        consecutive(&widths, parts).into_iter().map(part).collect()
    }

    /// The columns of several such parts, side by side; of none, no columns.
    pub fn concat(parts: &[Self]) -> Self {
        Self { columns: parts.iter().flat_map(|part| part.columns.iter().cloned()).collect() }
    }

    /// The columns in which a missing value rejects the row.
    pub fn reject_missing(&self) -> Vec<String> {
        self.columns.iter().filter(|column| column.reject).map(|column| column.name.clone()).collect()
    }

    /// The name of each feature: `price`, `pixels[17]`, `price is missing`.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::with_capacity(self.width());
        for column in &self.columns {
            names.extend((0..column.values()).map(|element| column.value_name(element)));
            names.extend(column.indicator.then(|| format!("{} is missing", column.name)));
        }
        names
    }
}

/// Numbers as their shortest decimal text: JSON readers may round numbers, text stays exact.
mod exact {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(numbers: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(numbers.iter().map(f64::to_string))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}
