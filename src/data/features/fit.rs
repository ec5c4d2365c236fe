//! Scaling and fill values, learned in one pass over all rows.
//!
//! Row groups are read side by side and merged in their order, so that the result is the same,
//! bit for bit, in every attempt. Quantiles come from a random sample of rows that is a
//! function of row identities alone.

use std::sync::Arc;

use datafusion::common::runtime::SpawnedTask;
use futures::{StreamExt, TryStreamExt, stream};

use super::{
    FeatureError, FeatureLayout, FittedFeatures,
    column::{Column, Number, Work, with_values},
    encode::Place,
    fitted::FittedColumn,
    layout::{LayoutColumn, Shape},
    stats::{Moments, Stats, Wanted, sample_fraction},
};
use crate::{
    data::{
        DataError,
        partition::Split,
        prepare::Dataset,
        read::{Rows, all_splits, read},
        shuffle::{Purpose, Subset},
    },
    limits,
    pipeline::spec::{Missing, Scale},
    storage::Storage,
};

/// Numbers of a column that are looked at together: they fit a level-2 cache.
const BLOCK_VALUES: usize = 32 << 10;

/// Learns scaling and fill values in one pass over all rows; bounded memory. `progress` is
/// told the rows done so far. Where nothing is to be learned, no row is read (but for the
/// first ones, where lists have no fixed size).
pub async fn fit(
    storage: &Storage,
    layout: &FeatureLayout,
    dataset: &Arc<Dataset>,
    progress: &(dyn Fn(u64) + Send + Sync),
) -> Result<FittedFeatures, DataError> {
    let lists = list_widths(storage, layout, dataset).await?;
    let wanted: Vec<Target> =
        layout.columns.iter().zip(&lists).filter_map(|(column, list)| Target::new(column, *list)).collect();
    let learned = if wanted.is_empty() { Vec::new() } else { learn(storage, wanted, dataset, progress).await? };
    let mut learned = learned.into_iter();
    let mut columns = Vec::with_capacity(layout.columns.len());
    for (column, list) in layout.columns.iter().zip(lists) {
        let stats = if Wanted::of(column).moments { learned.next() } else { None };
        columns.push(fitted(column, list, stats.as_ref())?);
    }
    Ok(FittedFeatures { columns })
}

/// The elements of each column's lists; `None` for plain numbers.
async fn list_widths(
    storage: &Storage,
    layout: &FeatureLayout,
    dataset: &Arc<Dataset>,
) -> Result<Vec<Option<usize>>, DataError> {
    let mut widths: Vec<Option<usize>> = Vec::with_capacity(layout.columns.len());
    let mut open = Vec::new();
    for (index, column) in layout.columns.iter().enumerate() {
        widths.push(if let Shape::FixedList(width) = column.shape { Some(width) } else { None });
        if column.shape == Shape::List {
            open.push(index);
        }
    }
    if !open.is_empty() {
        let names: Vec<String> = open.iter().map(|index| layout.columns[*index].name.clone()).collect();
        let mut rows = read(storage, dataset, all_splits(dataset), &names);
        while let Some(rows) = rows.try_next().await? {
            let width = |index: &usize| Column::first_width(rows.batch.column_by_name(&layout.columns[*index].name)?);
            for index in &open {
                widths[*index] = widths[*index].or_else(|| width(index));
            }
            if open.iter().all(|index| widths[*index].is_some()) {
                break;
            }
        }
    }
    if let Some(index) = open.iter().find(|index| widths[**index].is_none()) {
        let column = layout.columns[*index].name.clone();
        return Err(FeatureError::NoValues { column, what: "the width of its lists" }.into());
    }
    let width = widths.iter().map(|width| width.unwrap_or(1)).sum::<usize>();
    let indicators = layout.columns.iter().filter(|column| column.indicator).count();
    if width + indicators > limits::MAX_FEATURES {
        return Err(FeatureError::TooWide { width: width + indicators, limit: limits::MAX_FEATURES }.into());
    }
    Ok(widths)
}

/// A column to learn from.
#[derive(Clone, Debug)]
struct Target {
    name: String,
    list: Option<usize>,
    wanted: Wanted,
    /// Whether a missing value ends the pass: it would end the training anyway.
    strict: bool,
}

impl Target {
    fn new(column: &LayoutColumn, list: Option<usize>) -> Option<Self> {
        let wanted = Wanted::of(column);
        let strict = matches!(column.missing, Missing::Error | Missing::Reject);
        wanted.moments.then(|| Self { name: column.name.clone(), list, wanted, strict })
    }

    fn width(&self) -> usize {
        self.list.unwrap_or(1)
    }

    fn value_name(&self, element: usize) -> String {
        if self.list.is_some() { format!("{}[{element}]", self.name) } else { self.name.clone() }
    }
}

/// Reads all rows once; one `Stats` per target.
async fn learn(
    storage: &Storage,
    targets: Vec<Target>,
    dataset: &Arc<Dataset>,
    progress: &(dyn Fn(u64) + Send + Sync),
) -> Result<Vec<Stats>, DataError> {
    let sampled = targets.iter().filter(|target| target.wanted.quantiles).map(Target::width).sum();
    let pass = Arc::new(Pass {
        storage: storage.clone(),
        dataset: Arc::clone(dataset),
        columns: targets.iter().map(|target| target.name.clone()).collect(),
        // The seed is fixed: features do not depend on how the rows are dealt.
        sample: Subset::new(0, Purpose::Sample, sample_fraction(dataset.rows(), sampled)),
        targets,
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let groups = (limits::FIT_BYTES / dataset.largest_row_group().max(1)) as usize;
    let tasks = groups.clamp(1, cores);
    let mut parts = stream::iter(all_splits(dataset))
        .map(|split| {
            let (pass, rows) = (Arc::clone(&pass), split.len());
            let task = SpawnedTask::spawn(async move { pass.learn_split(split).await });
            async move { Ok::<_, DataError>((rows, task.join().await.map_err(FeatureError::Stopped)??)) }
        })
        .buffered(tasks);
    let mut learned = pass.empty();
    let mut done = 0;
    while let Some((rows, part)) = parts.try_next().await? {
        learned.iter_mut().zip(&part).for_each(|(stats, part)| stats.merge(part));
        done += rows;
        progress(done);
    }
    Ok(learned)
}

/// What the tasks of a pass share.
struct Pass {
    storage: Storage,
    dataset: Arc<Dataset>,
    columns: Vec<String>,
    targets: Vec<Target>,
    sample: Subset,
}

impl Pass {
    fn empty(&self) -> Vec<Stats> {
        self.targets.iter().map(|target| Stats::new(target.width())).collect()
    }

    async fn learn_split(&self, split: Split) -> Result<Vec<Stats>, DataError> {
        let mut learned = self.empty();
        let mut batches = read(&self.storage, &self.dataset, vec![split], &self.columns);
        while let Some(rows) = batches.try_next().await? {
            for (target, stats) in self.targets.iter().zip(&mut learned) {
                self.learn_batch(target, &rows, stats)?;
            }
        }
        Ok(learned)
    }

    fn learn_batch(&self, target: &Target, rows: &Rows, stats: &mut Stats) -> Result<(), FeatureError> {
        let file = self.dataset.files[rows.file].entry.location.to_string();
        let place = Place { file: &file, first_row: rows.row_in_file };
        let column = place.column(&rows.batch, &target.name, target.list)?;
        let width = target.width();
        let block = (BLOCK_VALUES / width).max(1);
        let mut values = Vec::with_capacity(block.min(rows.batch.num_rows()) * width);
        for start in (0..rows.batch.num_rows()).step_by(block) {
            let end = rows.batch.num_rows().min(start + block);
            values.clear();
            let fault = with_values!(column, numbers => copy(&column, numbers, start..end, &mut values));
            let fault =
                fault.or_else(|| target.strict.then(|| values.iter().position(|value| value.is_nan())).flatten());
            if let Some(index) = fault {
                let (row, name) = (start + index / width, target.value_name(index % width));
                let value = values[index];
                return Err(if value.is_nan() { place.missing(row, name) } else { place.not_finite(row, name, value) });
            }
            stats.add(&values);
            if target.wanted.quantiles {
                let identities = (rows.row + start as u64)..;
                let sampled = values.chunks_exact(width).zip(identities).filter(|(_, id)| self.sample.contains(*id));
                sampled.for_each(|(row, _)| stats.add_sample(row));
            }
        }
        Ok(())
    }
}

/// Some rows of a column, row-major, NaN where a value is missing; gives the place of the
/// first infinity.
fn copy<T: Number>(
    column: &Column,
    numbers: &[T],
    rows: std::ops::Range<usize>,
    values: &mut Vec<f64>,
) -> Option<usize> {
    let width = column.width();
    for row in rows {
        let Some(start) = column.start(row) else {
            values.resize(values.len() + width, f64::NAN);
            continue;
        };
        values.extend(numbers[start..start + width].iter().map(|number| number.work().double()));
        if column.has_nulls() {
            let first = values.len() - width;
            (0..width).filter(|element| column.is_null(start + element)).for_each(|e| values[first + e] = f64::NAN);
        }
    }
    values.iter().position(|value| value.is_infinite())
}

/// A column's constants from what was learned of it.
fn fitted(column: &LayoutColumn, list: Option<usize>, stats: Option<&Stats>) -> Result<FittedColumn, FeatureError> {
    let mut fitted = FittedColumn {
        name: column.name.clone(),
        list,
        offset: vec![0.0],
        divisor: vec![1.0],
        fill: Vec::new(),
        indicator: column.indicator,
        reject: column.missing == Missing::Reject,
    };
    if let Scale::Divide(divisor) = column.scale {
        fitted.divisor = vec![divisor];
    }
    if let Missing::Constant(value) = column.missing {
        fitted.fill = vec![value];
    }
    let Some(stats) = stats else { return Ok(fitted) };
    if matches!(column.missing, Missing::Mean | Missing::Median)
        && let Some(element) = stats.elements.iter().position(|moments| moments.count == 0)
    {
        let what = if column.missing == Missing::Mean { "a mean" } else { "a median" };
        return Err(FeatureError::NoValues { column: fitted.value_name(element), what });
    }
    let wanted = Wanted::of(column);
    let learned: Vec<Learned> = (0..stats.elements.len())
        .map(|element| {
            let moments = stats.elements[element];
            Learned { moments, quartiles: if wanted.quantiles { stats.quartiles(element) } else { [0.0; 3] } }
        })
        .collect();
    if !matches!(column.scale, Scale::None | Scale::Divide(_)) {
        (fitted.offset, fitted.divisor) = learned.iter().map(|learned| learned.affine(column.scale)).unzip();
    }
    match column.missing {
        Missing::Mean => fitted.fill = learned.iter().map(|learned| learned.moments.mean).collect(),
        Missing::Median => fitted.fill = learned.iter().map(|learned| learned.quartiles[1]).collect(),
        Missing::Error | Missing::Reject | Missing::Constant(_) => {}
    }
    Ok(fitted)
}

struct Learned {
    moments: Moments,
    quartiles: [f64; 3],
}

impl Learned {
    /// Offset and divisor. A column with one value only becomes 0 throughout, never a division
    /// by 0 or by rounding errors.
    fn affine(&self, scale: Scale) -> (f64, f64) {
        let Moments { count, min, max, mean, .. } = self.moments;
        let (offset, range) = match scale {
            _ if count == 0 => (0.0, 1.0),
            Scale::MinMax => (min, max - min),
            Scale::Standard if min == max => (min, 1.0),
            Scale::Standard => (mean, self.moments.deviation()),
            Scale::Robust => (self.quartiles[1], self.quartiles[2] - self.quartiles[0]),
            Scale::None | Scale::Divide(_) => (0.0, 1.0),
        };
        (offset, if range.is_finite() && range > 0.0 { range } else { 1.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offset, divisor and fill.
    fn fit_values(scale: Scale, missing: Missing, values: &[f64]) -> Result<[Vec<f64>; 3], String> {
        let column = LayoutColumn { name: "c".to_owned(), shape: Shape::Scalar, scale, missing, indicator: false };
        let mut stats = Stats::new(1);
        stats.add(values);
        for value in values {
            stats.add_sample(&[*value]);
        }
        let stats = Wanted::of(&column).moments.then_some(stats);
        let fitted = fitted(&column, None, stats.as_ref()).map_err(|error| error.to_string())?;
        Ok([fitted.offset, fitted.divisor, fitted.fill])
    }

    #[test]
    fn scales_are_as_in_the_text_books() {
        let check = |scale, values: &[f64], offset: f64, divisor: f64| {
            let [offsets, divisors, _] = fit_values(scale, Missing::Error, values).unwrap();
            assert_eq!((offsets, divisors), (vec![offset], vec![divisor]), "{scale:?} of {values:?}");
        };
        let values = [1.0, 2.0, 3.0, 4.0, 10.0];
        check(Scale::None, &values, 0.0, 1.0);
        check(Scale::Divide(255.0), &values, 0.0, 255.0);
        check(Scale::MinMax, &values, 1.0, 9.0);
        check(Scale::Standard, &values, 4.0, 10_f64.sqrt());
        check(Scale::Robust, &values, 3.0, 2.0);
    }

    #[test]
    fn a_constant_column_becomes_zero() {
        // 0.1 has no exact sum: the deviation comes out above 0.
        for value in [0.1, 0.0, -7e300, 1e-310] {
            for scale in [Scale::MinMax, Scale::Standard, Scale::Robust] {
                let [offset, divisor, _] = fit_values(scale, Missing::Error, &[value; 1000]).unwrap();
                assert_eq!((offset[0], divisor[0]), (value, 1.0), "{scale:?}");
            }
        }
    }

    #[test]
    fn fills_are_learned_from_the_values_that_are_there() {
        let nan = f64::NAN;
        let fill = |missing, values: &[f64]| fit_values(Scale::None, missing, values).map(|[_, _, fill]| fill);
        assert_eq!(fill(Missing::Mean, &[1.0, nan, 5.0]), Ok(vec![3.0]));
        assert_eq!(fill(Missing::Median, &[1.0, nan, 2.0, 9.0]), Ok(vec![2.0]));
        assert_eq!(fill(Missing::Constant(-1.0), &[]), Ok(vec![-1.0]));
        assert_eq!(fill(Missing::Error, &[]), Ok(vec![]));
        for (missing, what) in [(Missing::Mean, "a mean"), (Missing::Median, "a median")] {
            let error = fill(missing, &[nan, nan]).unwrap_err();
            assert!(error.contains("column `c`") && error.contains(what), "{error}");
        }
        let [offset, divisor, fill] = fit_values(Scale::Standard, Missing::Constant(2.0), &[nan, nan]).unwrap();
        assert_eq!((offset, divisor, fill), (vec![0.0], vec![1.0], vec![2.0]));
    }
}
