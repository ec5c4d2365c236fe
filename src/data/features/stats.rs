//! What is learned of a column in one pass: least, greatest, mean, variance, quantiles, for
//! each element of its lists. Parts are learned apart and merged in order.

use super::layout::LayoutColumn;
use crate::{
    limits,
    pipeline::spec::{Missing, Scale},
};

/// What must be learned of a column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub moments: bool,
    pub quantiles: bool,
}

impl Wanted {
    pub fn of(column: &LayoutColumn) -> Self {
        let quantiles = column.scale == Scale::Robust || column.missing == Missing::Median;
        let mean = matches!(column.scale, Scale::MinMax | Scale::Standard) || column.missing == Missing::Mean;
        // Moments stand in for quantiles where the sample has no value.
        Self { moments: mean || quantiles, quantiles }
    }
}

/// Statistics of one column, over the values that are there.
#[derive(Clone, Debug)]
pub(super) struct Stats {
    pub elements: Vec<Moments>,
    /// Rows of the sample, row-major; NaN where a value is missing.
    sample: Vec<f64>,
}

/// Statistics of one element, over the values that are there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moments {
    pub count: u64,
    pub min: f64,
    pub max: f64,
    pub mean: f64,
    /// Sum of the squared distances from the mean.
    squares: f64,
}

impl Moments {
    const NONE: Self = Self { count: 0, min: f64::INFINITY, max: f64::NEG_INFINITY, mean: 0.0, squares: 0.0 };

    /// Standard deviation of the population.
    pub fn deviation(&self) -> f64 {
        (self.squares / self.count as f64).sqrt()
    }

    /// Chan, Golub and `LeVeque`, "Updating Formulae and a Pairwise Algorithm for Computing
    /// Sample Variances", 1979.
    fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        let (count, more) = (self.count as f64, other.count as f64);
        let distance = other.mean - self.mean;
        self.count += other.count;
        let total = self.count as f64;
        self.mean += distance * (more / total);
        self.squares += other.squares + distance * distance * (count * more / total);
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }
}

impl Stats {
    pub fn new(width: usize) -> Self {
        Self { elements: vec![Moments::NONE; width], sample: Vec::new() }
    }

    /// Adds some rows, row-major, NaN where a value is missing. Twice over a block that is in
    /// the cache is exact and cheap; a single pass would be one of the two.
    pub fn add(&mut self, rows: &[f64]) {
        let width = self.elements.len();
        let mut block = vec![Moments::NONE; width];
        for row in rows.chunks_exact(width) {
            for (moments, value) in block.iter_mut().zip(row) {
                let there = !value.is_nan();
                moments.count += u64::from(there);
                moments.mean += if there { *value } else { 0.0 };
                moments.min = moments.min.min(*value);
                moments.max = moments.max.max(*value);
            }
        }
        for moments in block.iter_mut().filter(|moments| moments.count > 0) {
            moments.mean /= moments.count as f64;
        }
        for row in rows.chunks_exact(width) {
            for (moments, value) in block.iter_mut().zip(row) {
                let distance = if value.is_nan() { 0.0 } else { *value - moments.mean };
                moments.squares += distance * distance;
            }
        }
        self.elements.iter_mut().zip(&block).for_each(|(moments, block)| moments.merge(block));
    }

    /// Adds one row to the sample.
    pub fn add_sample(&mut self, row: &[f64]) {
        self.sample.extend_from_slice(row);
    }

    pub fn merge(&mut self, other: &Self) {
        self.elements.iter_mut().zip(&other.elements).for_each(|(moments, other)| moments.merge(other));
        self.sample.extend_from_slice(&other.sample);
    }

    /// First quartile, median and third quartile of an element, linear between ranks (`NumPy`'s
    /// default); the mean three times where the sample has no value.
    pub fn quartiles(&self, element: usize) -> [f64; 3] {
        let values = self.sample.iter().skip(element).step_by(self.elements.len());
        let mut values: Vec<f64> = values.copied().filter(|value| !value.is_nan()).collect();
        values.sort_unstable_by(f64::total_cmp);
        let Some(last) = values.len().checked_sub(1) else { return [self.elements[element].mean; 3] };
        [0.25, 0.5, 0.75].map(|quantile| {
            let rank = quantile * last as f64;
            let (low, high) = (values[rank.floor() as usize], values[rank.ceil() as usize]);
            low + (high - low) * rank.fract()
        })
    }
}

/// The fraction of `rows` rows that quantiles are taken from, for `width` numbers per row.
pub(super) fn sample_fraction(rows: u64, width: usize) -> f64 {
    let wanted = limits::SAMPLE_ROWS.min(limits::SAMPLE_VALUES / width.max(1));
    if rows <= wanted as u64 { 1.0 } else { wanted as f64 / rows as f64 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()))
    }

    proptest! {
        /// However the rows are cut, the statistics are those of all values that are there.
        #[test]
        fn parts_merge_to_the_whole(
            rows in proptest::collection::vec((-1e3_f64..1e3, proptest::option::of(-1.0_f64..1.0)), 0..60), cut in 1_usize..20,
        ) {
            let mut whole = Stats::new(2);
            for part in rows.chunks(cut) {
                let mut stats = Stats::new(2);
                let values: Vec<f64> = part.iter().flat_map(|(a, b)| [*a, b.unwrap_or(f64::NAN)]).collect();
                stats.add(&values);
                values.chunks_exact(2).for_each(|row| stats.add_sample(row));
                whole.merge(&stats);
            }
            let columns = [rows.iter().map(|row| row.0).collect(), rows.iter().filter_map(|row| row.1).collect::<Vec<_>>()];
            for (element, mut values) in columns.into_iter().enumerate() {
                let moments = whole.elements[element];
                prop_assert_eq!(moments.count, values.len() as u64);
                if values.is_empty() {
                    continue;
                }
                let mean = values.iter().sum::<f64>() / values.len() as f64;
                let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
                prop_assert!(close(moments.mean, mean) && close(moments.deviation(), variance.sqrt()));
                values.sort_by(f64::total_cmp);
                prop_assert_eq!((moments.min, moments.max), (values[0], values[values.len() - 1]));
                let [_, median, _] = whole.quartiles(element);
                let middle = f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]);
                prop_assert!(close(median, middle));
            }
        }
    }

    #[test]
    fn quartiles_are_linear_between_ranks() {
        let mut stats = Stats::new(1);
        for value in [4.0, 1.0, f64::NAN, 3.0, 2.0] {
            stats.add_sample(&[value]);
        }
        assert_eq!(stats.quartiles(0), [1.75, 2.5, 3.25]);
        let mut empty = Stats::new(1);
        empty.add(&[7.0, 9.0]);
        assert_eq!(empty.quartiles(0), [8.0; 3]);
    }

    #[test]
    fn samples_are_bounded() {
        assert_eq!(sample_fraction(0, 1), 1.0);
        assert_eq!(sample_fraction(60_000, 3), 1.0);
        assert_eq!(sample_fraction(131_072, 1), 0.5);
        let rows = 1_000_000_000;
        assert!(sample_fraction(rows, 784) * rows as f64 * 784.0 <= limits::SAMPLE_VALUES as f64);
    }
}
