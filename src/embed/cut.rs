//! Which rows go to which file: a function of the data set alone.

use std::collections::BTreeMap;

use crate::{
    data::{Dataset, Split, all_splits},
    limits,
};

/// One file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its name.
    pub(super) name: String,
    /// Its rows.
    pub(super) splits: Vec<Split>,
}

impl Part {
    fn new(number: usize, splits: Vec<Split>) -> Self {
        Self { name: format!("part-{number:05}.parquet"), splits }
    }

    /// How many rows it holds.
    pub(super) fn rows(&self) -> u64 {
        rows(&self.splits)
    }
}

/// Cuts a data set into files: one per hash partition where rows were dealt by hash, else
/// consecutive row groups. At least one file, so that an empty table still has columns.
pub(super) fn cut(dataset: &Dataset) -> Vec<Part> {
    let splits = all_splits(dataset);
    let partition = |split: &Split| dataset.files.get(split.file).and_then(|file| file.partition);
    if !splits.is_empty() && splits.iter().all(|split| partition(split).is_some()) {
        let mut parts: BTreeMap<u32, Vec<Split>> = BTreeMap::new();
        for split in splits {
            let id = partition(&split).unwrap_or_default();
            parts.entry(id.0).or_default().push(split);
        }
        return parts.into_iter().map(|(id, splits)| Part::new(id as usize, splits)).collect();
    }
    consecutive(splits)
}

/// Files of about equal numbers of consecutive rows. A row group is cut only where it is much
/// larger than a file should be: each of its pieces reads the group anew.
fn consecutive(splits: Vec<Split>) -> Vec<Part> {
    let bounds = limits::EMBEDDING_FILE_ROWS;
    let target = (rows(&splits) / limits::EMBEDDING_FILES).clamp(*bounds.start(), *bounds.end());
    let mut files = vec![Vec::new()];
    let mut filled = 0;
    for piece in splits.into_iter().flat_map(|split| pieces(&split, target)) {
        let piece_rows = piece.rows.end - piece.rows.start;
        // Whatever comes nearer to the target: with the piece, or without it.
        if filled > 0 && filled + piece_rows / 2 >= target {
            files.push(Vec::new());
            filled = 0;
        }
        filled += piece_rows;
        if let Some(file) = files.last_mut() {
            file.push(piece);
        }
    }
    files.into_iter().enumerate().map(|(number, splits)| Part::new(number, splits)).collect()
}

/// A split as even pieces of about `target` rows.
fn pieces(split: &Split, target: u64) -> Vec<Split> {
    let rows = split.rows.end - split.rows.start;
    let count = ((rows + target / 2) / target).max(1);
    let cut = |piece: u64| rows * piece / count;
    let piece = |i: u64| Split {
        rows: split.rows.start + cut(i)..split.rows.start + cut(i + 1),
        first_row: split.first_row + cut(i),
        ..split.clone()
    };
    (0..count).map(piece).collect()
}

fn rows(splits: &[Split]) -> u64 {
    splits.iter().map(|split| split.rows.end - split.rows.start).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn splits(groups: &[u64]) -> Vec<Split> {
        let mut first_row = 0;
        let groups = groups.iter().enumerate();
        groups
            .map(|(row_group, rows)| {
                let split = Split { file: 0, row_group, rows: 0..*rows, first_row };
                first_row += rows;
                split
            })
            .collect()
    }

    #[test]
    fn files_are_even_and_of_a_good_size() {
        let check = |groups: &[u64], expected: &[u64]| {
            let rows: Vec<u64> = consecutive(splits(groups)).iter().map(Part::rows).collect();
            assert_eq!(rows, expected, "{groups:?}");
        };
        check(&[], &[0]);
        check(&[1], &[1]);
        check(&[10_000], &[10_000]);
        // Many small row groups, as of many small files.
        check(&[1000; 100], &[66_000, 34_000]);
        // A few fit together; none is cut.
        check(&[50_000; 4], &[50_000, 50_000, 50_000, 50_000]);
        check(&[30_000; 4], &[60_000, 60_000]);
        // One large group is cut so that executors share it.
        check(&[1 << 20], &[65_536; 16]);
        check(&[32 << 20], &[1 << 20; 32]);
        assert_eq!(consecutive(splits(&[5])).remove(0).name, "part-00000.parquet");
    }

    proptest! {
        #[test]
        fn every_row_goes_to_exactly_one_file_in_order(groups in prop::collection::vec(0_u64..400_000, 0..40)) {
            let parts = consecutive(splits(&groups));
            let mut next = 0;
            for split in parts.iter().flat_map(|part| &part.splits) {
                prop_assert_eq!(split.first_row, next);
                next += split.rows.end - split.rows.start;
                let before: u64 = groups[..split.row_group].iter().sum();
                prop_assert_eq!(split.first_row, before + split.rows.start);
            }
            prop_assert_eq!(next, groups.iter().sum::<u64>());
        }
    }
}
