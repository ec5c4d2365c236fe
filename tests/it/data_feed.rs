//! Features fitted over real Parquet files, and the batches that a feed makes of them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use arrow::{
    array::{ArrayRef, FixedSizeListArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch, UInt8Array},
    datatypes::{Float64Type, Int32Type},
};
use emberflow::{
    config::SiteConfig,
    data::{
        Batch, DataError, DataFile, Dataset, EpochFeed, FeatureLayout, Feed, FeedPlan, FittedFeatures, Partitions,
        RowGroup, StepPlan, deal, fit, is_held_out,
    },
    ids::{PartitionId, Rank},
    pipeline::{ModelPlan, PartitionPlan, PipelinePlan, spec::PartitionBy},
    remedy::{Remedied, Remedy},
    storage::{FileEntry, Location, Storage},
};
use parquet::{
    arrow::{
        ArrowWriter,
        arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions},
    },
    file::properties::WriterProperties,
};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// One runtime for all tests, as one serves all executors of a process.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().unwrap())
}

fn storage() -> Storage {
    Storage::new(&SiteConfig::default())
}

/// Writes each batch as a file and gives the data set of all its columns.
fn dataset(folder: &Path, batches: &[RecordBatch], row_group_rows: usize) -> Arc<Dataset> {
    let file = |(index, batch): (usize, &RecordBatch)| {
        let path = folder.join(format!("part-{index:03}.parquet"));
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(row_group_rows)).build();
        let file = File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(batch).unwrap();
        writer.close().unwrap();
        let footer = ArrowReaderMetadata::load(&File::open(&path).unwrap(), ArrowReaderOptions::new()).unwrap();
        let group = |group: &parquet::file::metadata::RowGroupMetaData| RowGroup {
            rows: group.num_rows() as u64,
            size_bytes: group.total_byte_size() as u64,
        };
        let location = Location::parse(path.to_str().unwrap(), folder).unwrap();
        let entry: FileEntry = runtime().block_on(storage().head(&location)).unwrap().unwrap();
        DataFile {
            entry,
            row_groups: footer.metadata().row_groups().iter().map(group).collect(),
            partition: None,
            metadata: Arc::clone(footer.metadata()),
        }
    };
    Arc::new(Dataset {
        schema: batches[0].schema(),
        files: batches.iter().enumerate().map(file).collect(),
        rejected: BTreeMap::new(),
    })
}

/// A model with these features, read from a pipeline file as a user writes it.
fn model(folder: &Path, features: &str) -> (ModelPlan, PipelinePlan) {
    let file = folder.join("pipeline.yaml");
    let text = format!(
        "version: 1\nname: test\nstore: out\nsources:\n  rows: {{path: rows}}\nmodels:\n  m:\n    from: rows\n    \
         features: [{features}]\n    latent: 2\n"
    );
    std::fs::write(&file, text).unwrap();
    let plan = PipelinePlan::read(&file, &[], folder).unwrap_or_else(|faults| panic!("{faults}"));
    (plan.model("m").unwrap().clone(), plan)
}

fn fitted(folder: &Path, features: &str, dataset: &Arc<Dataset>) -> Result<FittedFeatures, DataError> {
    let (model, plan) = model(folder, features);
    let layout = FeatureLayout::resolve(&model, &dataset.schema, &plan.origin)?;
    runtime().block_on(fit(&storage(), &layout, dataset, &|_| {}))
}

fn encoded(features: &FittedFeatures, batch: &RecordBatch) -> Result<Vec<Vec<f32>>, DataError> {
    let mut out = Vec::new();
    features.encode(batch, "a.parquet", 0, &mut out)?;
    Ok(out.chunks_exact(features.width()).map(<[f32]>::to_vec).collect())
}

#[test]
fn features_are_fitted_over_all_files() {
    let folder = TempDir::new().unwrap();
    let file = |numbers: Vec<Option<i64>>, lists: Vec<Option<Vec<Option<f64>>>>| {
        RecordBatch::try_from_iter_with_nullable([
            ("amount", Arc::new(Int64Array::from(numbers)) as ArrayRef, true),
            ("v", Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(lists)), true),
        ])
        .unwrap()
    };
    let list = |a: f64, b: f64| Some(vec![Some(a), Some(b)]);
    let files = [
        file(vec![Some(10), None, Some(20)], vec![None, list(0.0, 5.0), list(4.0, 5.0)]),
        file(
            vec![Some(30), Some(40), Some(20)],
            vec![list(2.0, 5.0), Some(vec![Some(2.0), None]), list(2.0, f64::NAN)],
        ),
    ];
    let dataset = dataset(folder.path(), &files, 2);
    let check = |entries: &str, expected: &[&[f32]]| {
        let features = fitted(folder.path(), entries, &dataset).unwrap();
        let rows: Vec<Vec<f32>> = files.iter().flat_map(|batch| encoded(&features, batch).unwrap()).collect();
        assert_eq!(rows, expected, "{entries}");
        let again: FittedFeatures = serde_json::from_str(&serde_json::to_string(&features).unwrap()).unwrap();
        assert_eq!(again, features);
        assert_eq!(features.names().len(), features.width());
    };
    check(
        "{column: amount, scale: min_max, missing: median, indicator: true}",
        &[&[0.0, 0.0], &[1.0 / 3.0, 1.0], &[1.0 / 3.0, 0.0], &[2.0 / 3.0, 0.0], &[1.0, 0.0], &[1.0 / 3.0, 0.0]],
    );
    check(
        "{column: v, scale: min_max, missing: mean, indicator: true}",
        &[&[0.5, 0.0, 1.0], &[0.0, 0.0, 0.0], &[1.0, 0.0, 0.0], &[0.5, 0.0, 0.0], &[0.5, 0.0, 0.0], &[0.5, 0.0, 0.0]],
    );
    check(
        "{columns: ['*'], missing: {constant: 0}}",
        &[
            &[10.0, 0.0, 0.0],
            &[0.0, 0.0, 5.0],
            &[20.0, 4.0, 5.0],
            &[30.0, 2.0, 5.0],
            &[40.0, 2.0, 0.0],
            &[20.0, 2.0, 0.0],
        ],
    );
    check("{column: amount, scale: {divide: 10}, missing: mean}", &[&[1.0], &[2.4], &[2.0], &[3.0], &[4.0], &[2.0]]);
}

#[test]
fn fitting_is_the_same_bit_for_bit() {
    let folder = TempDir::new().unwrap();
    let wave = |row: usize| ((row * 2_654_435_761) % 10_007) as f64 / 7.0 - 300.0;
    let column = Float64Array::from_iter_values((0..20_000).map(wave));
    let batch = RecordBatch::try_from_iter([("x", Arc::new(column) as ArrayRef)]).unwrap();
    let dataset = dataset(folder.path(), &[batch.slice(0, 7_000), batch.slice(7_000, 13_000)], 1000);
    let done = AtomicU64::new(0);
    let (model, plan) = model(folder.path(), "{column: x, scale: standard, missing: median}");
    let layout = FeatureLayout::resolve(&model, &dataset.schema, &plan.origin).unwrap();
    let progress = |rows| done.store(rows, Ordering::Relaxed);
    let fits: BTreeSet<String> = (0..5)
        .map(|_| runtime().block_on(fit(&storage(), &layout, &dataset, &progress)).unwrap())
        .map(|features| serde_json::to_string(&features).unwrap())
        .collect();
    assert_eq!(fits.len(), 1);
    assert_eq!(done.into_inner(), 20_000);
}

#[test]
fn rows_that_cannot_be_learned_from_are_named() {
    let folder = TempDir::new().unwrap();
    let good = Float64Array::from(vec![1.0, 2.0, 3.0]);
    let lists = |rows: Vec<Option<Vec<Option<i32>>>>| ListArray::from_iter_primitive::<Int32Type, _, _>(rows);
    let check = |first: ArrayRef, second: ArrayRef, entries: &str, expected: &[&str]| {
        let folder = TempDir::new().unwrap();
        let file = |array| RecordBatch::try_from_iter_with_nullable([("c", array, true)]).unwrap();
        let dataset = dataset(folder.path(), &[file(first), file(second)], 100);
        let error = fitted(folder.path(), entries, &dataset).unwrap_err();
        assert_eq!(error.remedy(), Remedy::FixData);
        let text = error.to_string();
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    };
    let with = |value| Arc::new(Float64Array::from(vec![Some(4.0), value]));
    let place = ["part-001.parquet", "row 2", "`c`"];
    check(Arc::new(good.clone()), with(Some(f64::INFINITY)), "{column: c, scale: standard}", &place);
    check(Arc::new(good.clone()), with(None), "{column: c, scale: robust}", &[&place[..], &["NULL or NaN"]].concat());
    check(Arc::new(good), with(Some(f64::NEG_INFINITY)), "{column: c, missing: mean}", &["-inf"]);
    let nothing = Arc::new(Float64Array::from(vec![None, Some(f64::NAN)]));
    check(nothing.clone(), nothing, "{column: c, missing: median}", &["`c` has no value in any row"]);
    let pair = || Some(vec![Some(1), Some(2)]);
    let ragged = Arc::new(lists(vec![pair(), Some(vec![Some(1)])]));
    check(
        Arc::new(lists(vec![None, pair()])),
        ragged,
        "{column: c, missing: mean}",
        &["row 2", "has 1 elements, others have 2"],
    );
    let empty = Arc::new(lists(vec![None, Some(vec![])]));
    check(empty.clone(), empty, "{column: c, missing: {constant: 0}}", &["`c` has no value", "the width of its lists"]);
    drop(folder);
}

#[test]
fn faults_of_columns_point_into_the_file_all_together() {
    let folder = TempDir::new().unwrap();
    let batch = RecordBatch::try_from_iter([
        ("price", Arc::new(Int32Array::from(vec![1])) as ArrayRef),
        ("name", Arc::new(arrow::array::StringArray::from(vec!["x"]))),
    ])
    .unwrap();
    let entries = "{column: prise}, {columns: [price]}, {columns: ['p*', name]}, {columns: ['zz*']}";
    let (model, plan) = model(folder.path(), entries);
    let error = FeatureLayout::resolve(&model, &batch.schema(), &plan.origin).unwrap_err();
    let DataError::Faults(faults) = &error else { panic!("{error}") };
    assert_eq!(faults.faults.len(), 4, "{error}");
    let marked: Vec<&str> = faults.faults.iter().map(|fault| &faults.text[fault.span.clone()]).collect();
    assert_eq!((marked[0], marked[2]), ("prise", "name"), "{marked:?}");
    let text = error.to_string();
    for part in ["did you mean `price`?", "by entry 2", "`name` is Utf8", "categories", "matches `zz*`"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Rows whose first feature is their identity, and whose others depend on it.
struct Table {
    _folder: TempDir,
    dataset: Arc<Dataset>,
    features: Arc<FittedFeatures>,
}

const WIDTH: usize = 4;

fn table(files: &[usize], row_group_rows: usize) -> Table {
    let folder = TempDir::new().unwrap();
    let mut first = 0;
    let mut batches = Vec::new();
    for rows in files {
        let ids = first..first + rows;
        first += rows;
        let bytes = ids.clone().map(|id| Some((0..3).map(move |element| Some((id * 3 + element) as i32 % 1000))));
        batches.push(
            RecordBatch::try_from_iter([
                ("id", Arc::new(Int32Array::from_iter_values(ids.map(|id| id as i32))) as ArrayRef),
                ("v", Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(bytes, 3))),
            ])
            .unwrap(),
        );
    }
    let dataset = dataset(folder.path(), &batches, row_group_rows);
    let features = Arc::new(fitted(folder.path(), "{columns: [id, v]}", &dataset).unwrap());
    Table { _folder: folder, dataset, features }
}

impl Table {
    fn partitions(&self, count: u32, validation: f64) -> Arc<Partitions> {
        let plan = PartitionPlan { by: PartitionBy::Random, columns: Vec::new(), count, choose: false };
        Arc::new(deal(&self.dataset, &plan, validation, 42))
    }

    fn feed(&self, partitions: &Arc<Partitions>, owned: Vec<PartitionId>, batch: usize, memory_bytes: u64) -> Feed {
        let _runtime = runtime().enter();
        let plan = FeedPlan {
            dataset: Arc::clone(&self.dataset),
            features: Arc::clone(&self.features),
            width: WIDTH,
            partitions: Arc::clone(partitions),
            owned,
            batch,
            memory_bytes,
        };
        Feed::new(storage(), plan)
    }
}

fn drain(mut feed: EpochFeed) -> Vec<Batch> {
    let mut batches = Vec::new();
    while let Some(batch) = feed.next_batch().unwrap() {
        assert_eq!(batch.x.len(), batch.rows * WIDTH);
        feed.recycle(Batch { x: Vec::with_capacity(batch.x.len()), rows: 0 });
        batches.push(batch);
    }
    assert!(feed.next_batch().unwrap().is_none());
    assert_eq!(feed.rows(), batches.iter().map(|batch| batch.rows as u64).sum::<u64>());
    batches
}

/// The identities of a batch's rows, whose other features are checked.
fn ids(batch: &Batch) -> Vec<u64> {
    let id = |row: &[f32]| {
        let id = row[0] as u64;
        (0..3).for_each(|element| assert_eq!(row[1 + element as usize], ((id * 3 + element) % 1000) as f32));
        id
    };
    batch.x.chunks_exact(WIDTH).map(id).collect()
}

/// Everything that a feed promises, for one table, partition count, hold-out and budget.
fn check_feed(table: &Table, count: u32, validation: f64, batch: usize, memory_bytes: u64) {
    let partitions = table.partitions(count, validation);
    let rows: Vec<u64> = partitions.partitions.iter().map(|partition| partition.train_rows).collect();
    let steps = StepPlan::new(&rows, batch);
    let all: Vec<PartitionId> = (0..count).map(PartitionId).collect();
    let single = table.feed(&partitions, all, batch, memory_bytes);
    let total = table.dataset.rows();
    let (held_out, train): (Vec<u64>, Vec<u64>) = (0..total).partition(|row| is_held_out(42, *row, validation));

    let epochs = [0, 1].map(|epoch| drain(single.epoch(epoch, 0)));
    for batches in &epochs {
        assert_eq!(batches.len() as u64, steps.steps());
        assert!((0..).zip(batches).all(|(step, batch)| batch.rows as u64 == steps.rows(step)));
        let mut given: Vec<u64> = batches.iter().flat_map(ids).collect();
        given.sort_unstable();
        assert_eq!(given, train, "every training row once");
    }
    assert!(train.len() < 10 || epochs[0] != epochs[1], "the order differs from epoch to epoch");
    assert_eq!(drain(single.epoch(1, 0)), epochs[1], "an epoch can be had again");
    for from in [1, steps.steps() / 2, steps.steps().saturating_sub(1), steps.steps()] {
        let tail = &epochs[1][(from as usize).min(epochs[1].len())..];
        assert_eq!(drain(single.epoch(1, from)), tail, "from step {from}");
    }
    let measured = drain(single.held_out());
    assert_eq!(drain(single.held_out()), measured);
    assert!(measured.iter().all(|measured| (1..=batch).contains(&measured.rows)));
    let mut given: Vec<u64> = measured.iter().flat_map(ids).collect();
    given.sort_unstable();
    assert_eq!(given, held_out);

    for world in [2, 3, count + 2] {
        let feeds = (0..world).map(|rank| {
            let owned = partitions.owned_by(Rank(rank), world);
            table.feed(&partitions, owned, batch, memory_bytes)
        });
        let feeds: Vec<Feed> = feeds.collect();
        let ranks: Vec<Vec<Batch>> = feeds.iter().map(|feed| drain(feed.epoch(1, 0))).collect();
        for (step, whole) in epochs[1].iter().enumerate() {
            let mut met: Vec<u64> = ranks.iter().flat_map(|batches| ids(&batches[step])).collect();
            let mut expected = ids(whole);
            met.sort_unstable();
            expected.sort_unstable();
            assert_eq!(met, expected, "{world} ranks, step {step}");
        }
        let mut parts: Vec<Vec<u64>> = feeds.iter().flat_map(|feed| drain(feed.held_out())).map(|b| ids(&b)).collect();
        let mut expected: Vec<Vec<u64>> = measured.iter().map(ids).collect();
        parts.sort();
        expected.sort();
        assert_eq!(parts, expected, "{world} ranks, held out");
    }
}

#[test]
fn a_feed_gives_every_row_once_in_memory_and_streamed() {
    let table = table(&[1000, 1, 499, 700], 150);
    let row_bytes = WIDTH as u64 * 4 + 4;
    let batches = 16 * WIDTH as u64 * 4 * 8;
    for validation in [0.0, 0.2] {
        // All kept; chunks of some dozens of rows; chunks of a few rows; one row at a time.
        for memory_bytes in [1 << 30, batches + 500 * row_bytes, batches + 40 * row_bytes, 1] {
            check_feed(&table, 4, validation, 16, memory_bytes);
        }
    }
    check_feed(&table, 4, 0.9, 7, batches + 900 * row_bytes);
    check_feed(&table, 1, 0.1, 5000, 1 << 30);
}

#[test]
fn a_feed_of_few_rows_works() {
    for files in [&[1][..], &[0, 2], &[3, 0, 0]] {
        for memory_bytes in [1 << 20, 1] {
            check_feed(&table(files, 100), 8, 0.0, 4, memory_bytes);
            check_feed(&table(files, 100), 8, 0.5, 4, memory_bytes);
        }
    }
}

#[test]
fn an_order_is_mixed() {
    let table = table(&[4000], 500);
    let partitions = table.partitions(2, 0.0);
    let owned = vec![PartitionId(0), PartitionId(1)];
    let feed = table.feed(&partitions, owned, 100, 1 << 30);
    // The mean identity of a batch of random rows is near that of all rows: 2000 ± 115.
    let batches = drain(feed.epoch(0, 0));
    let mean = |batch: &Batch| ids(batch).iter().sum::<u64>() as f64 / batch.rows as f64;
    assert!(batches.iter().all(|batch| (mean(batch) - 2000.0).abs() < 700.0));
}

#[test]
fn a_feed_passes_errors_on_and_can_be_dropped() {
    let table = table(&[500, 500], 100);
    let partitions = table.partitions(2, 0.0);
    let owned = vec![PartitionId(0), PartitionId(1)];
    for memory_bytes in [1 << 30, 4000] {
        let feed = table.feed(&partitions, owned.clone(), 10, memory_bytes);
        let mut epoch = feed.epoch(0, 0);
        assert!(epoch.next_batch().unwrap().is_some());
        drop(epoch);
        drop(feed.epoch(0, 0));
    }
    let gone = table.dataset.files[1].entry.location.local_path().unwrap();
    std::fs::remove_file(gone).unwrap();
    for memory_bytes in [1 << 30, 4000] {
        let mut epoch = table.feed(&partitions, owned.clone(), 10, memory_bytes).epoch(0, 0);
        let error = loop {
            match epoch.next_batch() {
                Ok(batch) => assert!(batch.is_some(), "the epoch ended without an error"),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("part-001.parquet"), "{error}");
        assert!(epoch.next_batch().unwrap().is_none());
    }
}

#[test]
fn bytes_are_scaled_as_by_hand() {
    let folder = TempDir::new().unwrap();
    let batch = RecordBatch::try_from_iter([("x", Arc::new(UInt8Array::from(vec![0, 51, 255])) as ArrayRef)]).unwrap();
    let dataset = dataset(folder.path(), std::slice::from_ref(&batch), 100);
    let features = fitted(folder.path(), "{column: x, scale: {divide: 255}}", &dataset).unwrap();
    assert_eq!(encoded(&features, &batch).unwrap(), [[0.0], [51.0 / 255.0], [1.0]]);
}
