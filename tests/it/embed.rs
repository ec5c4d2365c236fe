//! Embedding tables: what is written of each row, and how versions come and go.

mod commit;

use std::{
    collections::BTreeMap,
    fs::File,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use arrow::{
    array::{
        Array, ArrayRef, AsArray, BooleanArray, Date32Array, Decimal128Array, DictionaryArray, FixedSizeListArray,
        Float32Array, Int64Array, LargeStringArray, ListArray, RecordBatch, StringArray, StructArray,
        TimestampMicrosecondArray,
    },
    compute::{cast, concat_batches},
    datatypes::{DataType, Field, Float32Type, Int32Type, Int64Type},
};
use emberflow::{
    data::Dataset,
    embed::{EmbedError, EmbedJob, Written, embed},
    learn::{LearnError, Model, Step},
    pipeline::EmbeddingPlan,
    remedy::{Remedied, Remedy},
};
use parquet::{
    arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder},
    file::properties::WriterProperties,
};

use crate::training::{Prepared, World, bits, runtime};

const MODEL: &str = "features: [{ columns: ['f*'] }], hidden: [4], latent: 2";

/// Parameters and everything else that encoding needs; nothing is learned.
fn untrained(prepared: &Prepared) -> Model {
    let step = prepared.step();
    let mut parameters = vec![0.0; step.parameters()];
    step.read_parameters(&mut parameters);
    prepared.model(parameters)
}

/// Embeds `dataset` as `plan` says into `staging`.
fn embed_as(
    world: &World,
    prepared: &Prepared,
    plan: &EmbeddingPlan,
    dataset: &Arc<Dataset>,
    executors: u32,
    (stop, progress): (&AtomicBool, &(dyn Fn(u64) + Send + Sync)),
) -> Result<Written, EmbedError> {
    let model = untrained(prepared);
    let replica = || -> Result<Box<dyn Step>, LearnError> { Ok(prepared.step()) };
    let staging = world.location("staged");
    let job = EmbedJob { plan, dataset, model: &model, replica: &replica, executors, staging: &staging };
    runtime().block_on(embed(&world.storage, &job, stop, progress))
}

fn embed_all(world: &World, prepared: &Prepared, executors: u32) -> Written {
    let watch = (&AtomicBool::new(false), &|_| {});
    embed_as(world, prepared, world.table_plan(), &prepared.dataset, executors, (watch.0, watch.1)).unwrap()
}

/// The rows of a Parquet file in one batch, and its metadata.
fn read(path: &Path) -> (RecordBatch, BTreeMap<String, String>) {
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let pairs = reader.metadata().file_metadata().key_value_metadata().unwrap_or(&Vec::new()).clone();
    let pairs = pairs.into_iter().map(|pair| (pair.key, pair.value.unwrap_or_default())).collect();
    let schema = Arc::clone(reader.schema());
    let batches: Vec<_> = reader.build().unwrap().map(Result::unwrap).collect();
    (concat_batches(&schema, &batches).unwrap(), pairs)
}

/// The written files in order, and everything in them.
fn read_all(written: &Written) -> (Vec<RecordBatch>, RecordBatch) {
    let folder = written.staging.local_path().unwrap();
    let mut files = Vec::new();
    for file in &written.files {
        let path = folder.join(&file.name);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), file.size_bytes, "{}", file.name);
        let (batch, _) = read(&path);
        assert_eq!(batch.num_rows() as u64, file.rows, "{}", file.name);
        files.push(batch);
    }
    assert_eq!(files.iter().map(|batch| batch.num_rows() as u64).sum::<u64>(), written.rows);
    let whole = concat_batches(&files[0].schema(), &files).unwrap();
    (files, whole)
}

fn ids(batch: &RecordBatch) -> Vec<i64> {
    batch.column_by_name("id").unwrap().as_primitive::<Int64Type>().values().to_vec()
}

/// The vectors of a batch, whatever their encoding, row after row.
fn vectors(batch: &RecordBatch) -> Vec<f32> {
    let column = batch.column_by_name("embedding").unwrap();
    assert_eq!(column.null_count(), 0);
    let numbers = match column.data_type() {
        DataType::FixedSizeList(_, _) => column.as_fixed_size_list().values(),
        _ => column.as_list::<i32>().values(),
    };
    numbers.as_primitive::<Float32Type>().values().to_vec()
}

fn value(id: i64, feature: usize) -> f32 {
    ((id as f32) * (feature as f32 + 1.0) * 0.37).sin()
}

/// Columns `id`, `f0` and `f1` of these rows.
fn columns(ids: std::ops::Range<i64>) -> Vec<(&'static str, ArrayRef)> {
    let feature =
        |feature| Arc::new(Float32Array::from_iter_values(ids.clone().map(|id| value(id, feature)))) as ArrayRef;
    vec![("id", Arc::new(Int64Array::from_iter_values(ids.clone()))), ("f0", feature(0)), ("f1", feature(1))]
}

/// Writes rows as one file of small row groups.
fn put_groups(path: &Path, ids: std::ops::Range<i64>, group_rows: usize) {
    let batch = RecordBatch::try_from_iter(columns(ids)).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(group_rows)).build();
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Embeddings and errors of rows by identity, one row at a time.
fn by_hand(prepared: &Prepared, ids: &[i64]) -> (Vec<f32>, Vec<f32>) {
    let (mut embeddings, mut errors) = (Vec::new(), Vec::new());
    let mut step = prepared.step();
    for id in ids {
        step.encode(&[value(*id, 0), value(*id, 1)], 1, &mut embeddings, Some(&mut errors)).unwrap();
    }
    (embeddings, errors)
}

fn all_near(got: &[f32], expected: &[f32]) -> bool {
    got.len() == expected.len() && got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-6)
}

#[test]
fn every_row_is_embedded_once_in_order_by_any_number_of_executors() {
    let check = |files: &[usize], group_rows: usize, parts: usize| {
        let world = World::new(MODEL, "key: [id], reconstruction_error: true");
        let mut first = 0;
        for (index, rows) in files.iter().enumerate() {
            put_groups(&world.path(index), first..first + *rows as i64, group_rows);
            first += *rows as i64;
        }
        let prepared = world.prepare();
        let mut contents = None;
        for executors in [1, 3, 20] {
            let written = embed_all(&world, &prepared, executors);
            assert_eq!((written.rows, written.latent), (first as u64, 2));
            assert_eq!(written.files.len(), parts, "{files:?}");
            let (_, whole) = read_all(&written);
            let ids = ids(&whole);
            assert_eq!(ids, (0..first).collect::<Vec<_>>(), "{files:?}, {executors} executors");
            let folder = written.staging.local_path().unwrap();
            let found: Vec<_> =
                written.files.iter().map(|file| std::fs::read(folder.join(&file.name)).unwrap()).collect();
            assert!(*contents.get_or_insert_with(|| found.clone()) == found, "the same bytes each time");
            if executors == 1 {
                let (embeddings, errors) = by_hand(&prepared, &ids);
                assert!(all_near(&vectors(&whole), &embeddings));
                let column = whole.column_by_name("reconstruction_error").unwrap();
                assert!(all_near(column.as_primitive::<Float32Type>().values(), &errors));
            }
        }
    };
    check(&[1], 100, 1);
    check(&[0, 5, 0], 100, 1);
    check(&[37; 60], 10, 1);
    // Row groups near the size of a file, and one that is cut.
    check(&[70_000, 70_000], 70_000, 2);
    check(&[200_000, 3], 1_000_000, 4);
}

#[test]
fn a_hash_partition_is_a_file() {
    let model = format!("{MODEL}, partition: {{ by: hash, columns: [id], count: 5 }}");
    let world = World::new(&model, "key: [id]");
    for index in 0..4 {
        put_groups(&world.path(index), index as i64 * 300..(index as i64 + 1) * 300, 100);
    }
    let prepared = world.prepare();
    let mut expected: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for file in &prepared.dataset.files {
        let name = format!("part-{:05}.parquet", file.partition.unwrap().0);
        let (batch, _) = read(&file.entry.location.local_path().unwrap());
        expected.entry(name).or_default().extend(ids(&batch));
    }
    for executors in [1, 4] {
        let written = embed_all(&world, &prepared, executors);
        let (files, whole) = read_all(&written);
        let found: BTreeMap<_, _> =
            written.files.iter().zip(&files).map(|(file, batch)| (file.name.clone(), ids(batch))).collect();
        assert_eq!(found, expected);
        assert!(written.files.is_sorted_by(|a, b| a.name < b.name));
        let mut all = ids(&whole);
        all.sort_unstable();
        assert_eq!(all, (0..1_200).collect::<Vec<_>>());
    }
}

#[test]
fn a_table_of_no_rows_has_its_columns() {
    let world = World::new(MODEL, "key: [id]");
    world.put(0, columns(0..3));
    let prepared = world.prepare();
    let empty = Arc::new(Dataset { files: Vec::new(), ..Dataset::clone(&prepared.dataset) });
    let stop = AtomicBool::new(false);
    let written = embed_as(&world, &prepared, world.table_plan(), &empty, 2, (&stop, &|_| {})).unwrap();
    let (_, whole) = read_all(&written);
    assert_eq!((written.rows, whole.num_rows(), whole.num_columns()), (0, 0, 2));
}

/// Columns of many types, all carried.
fn carried() -> Vec<(&'static str, ArrayRef)> {
    let text = ["a", "", "ü"];
    let parts: StructArray = vec![(
        Arc::new(Field::new("x", DataType::Int64, true)),
        Arc::new(Int64Array::from(vec![Some(1), None, Some(3)])) as ArrayRef,
    )]
    .into();
    let lists = vec![Some(vec![Some(1), None]), None, Some(vec![])];
    let decimals = Decimal128Array::from(vec![Some(12_345), None, Some(-1)]).with_precision_and_scale(12, 2).unwrap();
    let times = TimestampMicrosecondArray::from(vec![Some(0), None, Some(1_764_547_200_000_000)]);
    vec![
        ("text", Arc::new(StringArray::from(vec![Some("a"), None, Some("ü")]))),
        ("large", Arc::new(LargeStringArray::from_iter_values(text))),
        ("yes", Arc::new(BooleanArray::from(vec![Some(true), None, Some(false)]))),
        ("money", Arc::new(decimals)),
        ("day", Arc::new(Date32Array::from(vec![Some(20_000), None, Some(-1)]))),
        ("time", Arc::new(times.with_timezone("UTC"))),
        ("kind", Arc::new(text.into_iter().collect::<DictionaryArray<Int32Type>>())),
        ("parts", Arc::new(parts)),
        ("lists", Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists))),
    ]
}

#[test]
fn carried_columns_keep_their_types_and_values() {
    let names: Vec<&str> = carried().iter().map(|(name, _)| *name).collect();
    let world = World::new(MODEL, &format!("key: [id], columns: [{}, f1]", names.join(", ")));
    world.put(0, [columns(0..3), carried()].concat());
    let prepared = world.prepare();
    let (_, found) = read_all(&embed_all(&world, &prepared, 1));
    let expected = [&["id"], &names[..], &["f1", "embedding"]].concat();
    assert_eq!(found.schema().fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>(), expected);
    for (name, column) in carried() {
        let found = found.column_by_name(name).unwrap();
        // What only Arrow knows becomes what it encodes.
        let plain = if name == "kind" { cast(&column, &DataType::Utf8).unwrap() } else { column };
        assert_eq!(found.data_type(), plain.data_type(), "{name}");
        assert_eq!(found, &plain, "{name}");
    }
}

#[test]
fn vectors_are_lists_or_of_a_fixed_size() {
    let mut numbers = Vec::new();
    for (encoding, fixed) in [("list", false), ("fixed_size_list", true)] {
        let world = World::new(MODEL, &format!("key: [id], encoding: {encoding}"));
        world.put(0, columns(0..50));
        let prepared = world.prepare();
        let written = embed_all(&world, &prepared, 1);
        let (_, whole) = read_all(&written);
        let element = Arc::new(Field::new("element", DataType::Float32, false));
        let expected = if fixed { DataType::FixedSizeList(element, 2) } else { DataType::List(element) };
        assert_eq!(whole.schema().field_with_name("embedding").unwrap().data_type(), &expected);
        numbers.push(bits(&vectors(&whole)));
        let path = written.staging.local_path().unwrap().join("part-00000.parquet");
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
        let leaf = reader.parquet_schema().columns().iter().find(|leaf| leaf.path().parts()[0] == "embedding");
        assert_eq!(leaf.unwrap().path().string(), "embedding.list.element");
    }
    assert_eq!(numbers[0], numbers[1]);
}

#[test]
fn a_fixed_size_list_can_be_a_feature_again() {
    let world = World::new("features: [{ column: v }], latent: 1", "key: [id], columns: [v]");
    let pairs = (0..9).map(|id| Some([Some(value(id, 0)), Some(value(id, 1))]));
    let pairs = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(pairs, 2);
    world.put(0, vec![("id", Arc::new(Int64Array::from_iter_values(0..9))), ("v", Arc::new(pairs.clone()))]);
    let prepared = world.prepare();
    let (_, whole) = read_all(&embed_all(&world, &prepared, 1));
    assert_eq!(whole.column_by_name("v").unwrap().as_fixed_size_list(), &pairs);
}

#[test]
fn the_mean_reconstruction_error_is_the_loss() {
    for loss in ["mse", "binary_cross_entropy"] {
        let model = format!(
            "features: [{{ columns: ['f*'], scale: min_max }}], hidden: [4], latent: 2, train: {{ loss: {loss}, epochs: 2 }}"
        );
        let world = World::new(&model, "key: [id], reconstruction_error: true");
        world.put(0, columns(0..500));
        let prepared = world.prepare();
        let (_, whole) = read_all(&embed_all(&world, &prepared, 2));
        let column = whole.column_by_name("reconstruction_error").unwrap();
        let errors = column.as_primitive::<Float32Type>().values();
        let mean = errors.iter().map(|error| f64::from(*error)).sum::<f64>() / 500.0;
        let mut epoch = prepared.feed(emberflow::ids::Rank(0), 1).epoch(0, 0);
        let (mut step, mut loss, mut rows) = (prepared.step(), 0.0, 0);
        while let Some(batch) = epoch.next_batch().unwrap() {
            loss += step.loss(&batch.x, batch.rows).unwrap();
            rows += batch.rows;
        }
        assert_eq!(rows, 500);
        assert!((mean - loss / 500.0).abs() < 1e-6 * mean, "{mean}, {}", loss / 500.0);
    }
}

#[test]
fn files_are_stamped_with_their_model() {
    let world = World::new(MODEL, "key: [id]");
    world.put(0, columns(0..5));
    let prepared = world.prepare();
    let written = embed_all(&world, &prepared, 1);
    let fingerprint = untrained(&prepared).fingerprint().to_string();
    let (batch, pairs) = read(&written.staging.local_path().unwrap().join("part-00000.parquet"));
    assert_eq!(pairs["emberflow.fingerprint"], fingerprint);
    assert_eq!((pairs["emberflow.model"].as_str(), pairs["emberflow.table"].as_str()), ("m", "t"));
    let schema = batch.schema();
    let field = schema.field_with_name("embedding").unwrap();
    assert_eq!(field.metadata().get(emberflow::embed::FINGERPRINT_KEY), Some(&fingerprint));
}

#[test]
fn names_that_are_added_cannot_be_carried() {
    let world = World::new(MODEL, "key: [id], reconstruction_error: true");
    let vectors = Arc::new(Int64Array::from(vec![1, 2, 3]));
    world.put(0, [columns(0..3), vec![("embedding", vectors.clone() as ArrayRef), ("other", vectors)]].concat());
    let prepared = world.prepare();
    let stop = AtomicBool::new(false);
    for (key, columns) in [("embedding", "f0"), ("id", "embedding"), ("id", "reconstruction_error")] {
        let plan = EmbeddingPlan { key: vec![key.into()], columns: vec![columns.into()], ..world.table_plan().clone() };
        let error = embed_as(&world, &prepared, &plan, &prepared.dataset, 1, (&stop, &|_| {})).unwrap_err();
        assert!(matches!(error, EmbedError::ReservedColumn { .. }), "{error}");
        assert_eq!(error.remedy(), Remedy::FixFile);
    }
    assert!(!world.folder.path().join("staged").exists(), "nothing was begun");
    let plan = EmbeddingPlan { columns: vec!["nothing".into()], ..world.table_plan().clone() };
    let error = embed_as(&world, &prepared, &plan, &prepared.dataset, 1, (&stop, &|_| {})).unwrap_err();
    assert!(matches!(error, EmbedError::Columns { .. }), "{error}");
}

#[test]
fn a_request_to_stop_interrupts_and_the_next_attempt_begins_with_an_empty_folder() {
    let world = World::new(MODEL, "key: [id]");
    world.put(0, columns(0..200_000));
    let prepared = world.prepare();
    for executors in [1, 3] {
        let stop = AtomicBool::new(false);
        let seen = Mutex::new(Vec::new());
        let progress = |rows| {
            seen.lock().unwrap().push(rows);
            stop.store(true, Ordering::Relaxed);
        };
        let stopped = embed_as(&world, &prepared, world.table_plan(), &prepared.dataset, executors, (&stop, &progress));
        let error = stopped.unwrap_err();
        assert!(matches!(error, EmbedError::Learn(LearnError::Interrupted)), "{error}");
        assert_eq!(error.remedy(), Remedy::Interrupted);
        let most = seen.into_inner().unwrap().into_iter().max().unwrap();
        assert!(most < 100_000, "{most} rows were done by then");
    }
    let left = world.folder.path().join("staged");
    std::fs::create_dir_all(left.join("deep")).unwrap();
    std::fs::write(left.join("deep/part-00009.parquet"), "half").unwrap();
    let written = embed_all(&world, &prepared, 2);
    let mut names: Vec<_> = std::fs::read_dir(left).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, written.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>());
}

#[test]
fn an_input_that_is_gone_is_named() {
    let world = World::new(MODEL, "key: [id]");
    world.put(0, columns(0..100));
    world.put(1, columns(100..200));
    let prepared = world.prepare();
    std::fs::remove_file(world.path(1)).unwrap();
    let stop = AtomicBool::new(false);
    let gone = embed_as(&world, &prepared, world.table_plan(), &prepared.dataset, 2, (&stop, &|_| {}));
    let error = gone.unwrap_err();
    assert!(error.to_string().contains("part-001.parquet"), "{error}");
    assert_eq!(error.remedy(), Remedy::FixData);
}
