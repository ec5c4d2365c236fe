//! One model spread over executors: by layers, and by columns.

use std::{ops::ControlFlow, sync::Arc, thread, time::Duration};

use arrow::array::{ArrayRef, Float32Array, Int64Array};
use emberflow::{
    ids::Rank,
    learn::{self, Communicator, LearnError, Parts, SharedComm},
};

use crate::{
    command::{Answer, emberflow, lists, pipelines, wave, write_parquet, write_pipeline},
    pipeline, run,
    training::{Outcome, Prepared, World, bits, losses},
};

/// Five columns, so that they can be cut into up to five slices.
const COLUMNS: usize = 5;
const NET: &str = "features: [{ columns: [\"f*\"], scale: min_max }], hidden: [12, 8], latent: 3, activation: tanh";
/// Files of very unequal size, one of them empty.
const FILES: &[usize] = &[40, 0, 1, 90, 17];

fn columns(rows: std::ops::Range<usize>) -> Vec<(&'static str, ArrayRef)> {
    let ids = Arc::new(rows.clone().map(|row| row as i64).collect::<Int64Array>()) as ArrayRef;
    let feature = |feature| Arc::new(rows.clone().map(|row| wave(row, feature)).collect::<Float32Array>()) as ArrayRef;
    let names = ["f0", "f1", "f2", "f3", "f4"];
    std::iter::once(("id", ids)).chain(names.into_iter().zip((0..COLUMNS).map(feature))).collect()
}

fn prepared(spread: &str, train: &str, files: &[usize]) -> (World, Prepared) {
    let world = World::new(&format!("{NET}, spread: {spread}, train: {{ {train} }}"), "key: [id]");
    let mut first = 0;
    for (index, rows) in files.iter().enumerate() {
        world.put(index, columns(first..first + rows));
        first += rows;
    }
    let prepared = world.prepare();
    (world, prepared)
}

fn trained(spread: &str, train: &str, executors: u32) -> (Prepared, Outcome) {
    let (_world, prepared) = prepared(spread, train, FILES);
    let outcome = prepared.train(executors);
    (prepared, outcome)
}

/// The largest difference of losses and parameters, relative to losses and to the largest number.
fn difference(got: &Outcome, expected: &Outcome) -> f64 {
    let (got, expected) = (got.trained(), expected.trained());
    assert_eq!(got.history.len(), expected.history.len());
    let largest = expected.parameters.iter().fold(0.0_f32, |most, number| most.max(number.abs()));
    let numbers = got.parameters.iter().zip(&expected.parameters).map(|(a, b)| f64::from((a - b).abs() / largest));
    let curve = |outcome: &learn::Trained| -> Vec<f64> {
        outcome.history.iter().flat_map(|epoch| [epoch.loss].into_iter().chain(epoch.held_out_loss)).collect()
    };
    let curves = curve(got).into_iter().zip(curve(expected)).map(|(a, b)| (a - b).abs() / b.abs());
    numbers.chain(curves).fold(0.0, f64::max)
}

/// Every row once, in each epoch and among those held out.
fn assert_counted(prepared: &Prepared, outcome: &Outcome, case: &str) {
    let ranks = || outcome.ranks.iter().map(|rank| rank.as_ref().unwrap());
    for epoch in 0..outcome.trained().history.len() {
        let rows: u64 = ranks().map(|rank| rank.rows_per_epoch[epoch]).sum();
        assert_eq!(rows, prepared.partitions.train_rows(), "{case}");
        assert_eq!(outcome.epochs[epoch].rows, rows, "{case}");
    }
    let held_out: u64 = ranks().map(|rank| rank.held_out_rows).sum();
    assert_eq!(held_out, prepared.partitions.held_out_rows(), "{case}");
}

#[test]
fn a_pipeline_is_the_unsplit_model() {
    for train in [
        "batch: 16, epochs: 3",
        "batch: 16, epochs: 3, optimizer: adamw, clip_norm: 0.05, validation: 0.2",
        "batch: 50, epochs: 3, optimizer: sgd, momentum: 0.9, learning_rate: 0.1, clip_norm: 0.1",
        "batch: 7, epochs: 30, early_stopping: { patience: 2, min_delta: 0.01 }, validation: 0.3, learning_rate: 0.01",
        "batch: 1000, epochs: 2, loss: binary_cross_entropy",
    ] {
        let single = trained("{ data: {} }", train, 1).1;
        for stages in [1, 2, 3, 4, 6] {
            assert!(!train.contains("early") || single.trained().history.len() < 30, "{train}: stops early");
            let (prepared, whole) = trained("{ pipeline: { micro_batches: 1 } }", train, stages);
            let case = format!("{train}, {stages} stages");
            assert_eq!(bits(&whole.trained().parameters), bits(&single.trained().parameters), "{case}");
            assert_eq!(losses(&whole.trained().history), losses(&single.trained().history), "{case}");
            assert_counted(&prepared, &whole, &case);
            for micro_batches in [2, 5] {
                let spread = format!("{{ pipeline: {{ micro_batches: {micro_batches} }} }}");
                let (prepared, parts) = trained(&spread, train, stages);
                let found = difference(&parts, &single);
                eprintln!("{case}, {micro_batches} micro-batches: {found:.1e}");
                assert!(found < 1e-6, "{case}, {micro_batches} micro-batches: {found:e}");
                assert_counted(&prepared, &parts, &case);
            }
        }
    }
}

#[test]
fn executors_share_slices_in_any_way() {
    for train in [
        "batch: 16, epochs: 3",
        "batch: 16, epochs: 3, optimizer: adamw, clip_norm: 0.05, validation: 0.2",
        "batch: 50, epochs: 3, optimizer: sgd, momentum: 0.9, learning_rate: 0.1",
        "batch: 1000, epochs: 2, loss: binary_cross_entropy",
    ] {
        for slices in [1, 2, 4, 5] {
            let spread = format!("{{ vertical: {{ slices: {slices} }} }}");
            let (_, single) = trained(&spread, train, 1);
            for executors in (2..=slices).filter(|executors| [2, 3, 4, 5].contains(executors)) {
                let (prepared, fleet) = trained(&spread, train, executors);
                let case = format!("{train}, {slices} slices, {executors} executors");
                let found = difference(&fleet, &single);
                eprintln!("{case}: {found:.1e}");
                assert!(found < 1e-5, "{case}: {found:e}");
                assert_counted(&prepared, &fleet, &case);
            }
        }
    }
    let one = trained("{ vertical: { slices: 1 } }", "batch: 16, epochs: 3", 1).1;
    let dense = trained("{ data: {} }", "batch: 16, epochs: 3", 1).1;
    assert!(difference(&one, &dense) < 1e-5, "one slice is the dense model");
}

#[test]
fn slices_are_a_dense_model_that_is_zero_between_them() {
    let train = "batch: 16, epochs: 3, optimizer: adamw, weight_decay: 0.1, validation: 0.2";
    let (_world, prepared) = prepared("{ vertical: { slices: 4 } }", train, FILES);
    let parameters = prepared.train(2).trained().parameters.clone();
    let zeros = parameters.iter().filter(|number| **number == 0.0).count();
    // Slices of 2, 1, 1 and 1 columns; 3 of 12 and 2 of 8 outputs each.
    let between = (5 * 12 - 5 * 3) + (12 * 8 - 4 * 3 * 2);
    assert_eq!(zeros, 2 * between, "weights between slices are zero, and only they");

    let mut batch = prepared.feed(Rank(0), 1).epoch(0, 0);
    let batch = batch.next_batch().unwrap().unwrap();
    let (mut embeddings, mut errors) = (Vec::new(), Vec::new());
    let mut dense = prepared.step();
    dense.write_parameters(&parameters);
    dense.encode(&batch.x, batch.rows, &mut embeddings, Some(&mut errors)).unwrap();
    let found = on_ranks(4, |comm| {
        let mut step = learn::replica(&prepared.model, &prepared.shape, &prepared.plan.run, &comm).unwrap();
        step.write_parameters(&parameters);
        let mut own = prepared.feed(comm.rank(), 4).epoch(0, 0);
        let own = own.next_batch().unwrap().unwrap();
        assert!(own.x.len() < batch.x.len(), "a rank reads its own columns only");
        let (mut embeddings, mut errors) = (Vec::new(), Vec::new());
        step.encode(&own.x, own.rows, &mut embeddings, Some(&mut errors)).unwrap();
        (embeddings, errors)
    });
    let near = |got: &[f32], expected: &[f32]| {
        got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
    };
    assert!(found.iter().all(|(got, wrong)| near(got, &embeddings) && near(wrong, &errors)));
}

#[test]
fn stages_encode_what_the_whole_model_does() {
    let (_world, prepared) = prepared("{ pipeline: { micro_batches: 3 } }", "batch: 16", FILES);
    let mut batch = prepared.feed(Rank(0), 1).epoch(0, 0);
    let batch = batch.next_batch().unwrap().unwrap();
    let (mut embeddings, mut errors) = (Vec::new(), Vec::new());
    prepared.step().encode(&batch.x, batch.rows, &mut embeddings, Some(&mut errors)).unwrap();
    let found = on_ranks(4, |comm| {
        let mut step = learn::replica(&prepared.model, &prepared.shape, &prepared.plan.run, &comm).unwrap();
        let mut own = prepared.feed(comm.rank(), 4).epoch(0, 0);
        let own = own.next_batch().unwrap().unwrap();
        assert_eq!(own.rows, batch.rows);
        assert_eq!(own.x.is_empty(), [1, 2].contains(&comm.rank().0), "ranks in the middle read nothing");
        let (mut embeddings, mut errors) = (Vec::new(), Vec::new());
        step.encode(&own.x, own.rows, &mut embeddings, Some(&mut errors)).unwrap();
        (embeddings, errors)
    });
    assert!(found.iter().all(|(got, wrong)| *got == embeddings && *wrong == errors));
}

fn on_ranks<T: Send>(world: u32, work: impl Fn(SharedComm) -> T + Sync) -> Vec<T> {
    let (work, comms) = (&work, learn::in_process(world, Duration::from_mins(1)));
    thread::scope(|scope| {
        let run = |comm: Box<dyn Communicator>| scope.spawn(move || work(SharedComm::new(comm)));
        let threads: Vec<_> = comms.into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_spread_training_resumes_to_the_last_bit() {
    for spread in ["{ pipeline: { micro_batches: 2 } }", "{ vertical: { slices: 4 } }"] {
        let train = "batch: 16, epochs: 3, checkpoint_steps: 2, validation: 0.2";
        let (_world, prepared) = prepared(spread, train, FILES);
        let whole = prepared.train(3);
        for after in [1, 2, 6] {
            let stop =
                |number: usize, _: &_| if number == after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            let stopped = prepared.train_watched(3, None, &stop);
            assert!(stopped.errors().iter().all(|error| matches!(error, LearnError::Interrupted)), "{spread}");
            for executors in [3, 2] {
                let go_on = |_: usize, _: &_| ControlFlow::Continue(());
                let resumed = prepared.train_watched(executors, stopped.checkpoints.last(), &go_on);
                if executors == 3 {
                    assert_eq!(bits(&resumed.trained().parameters), bits(&whole.trained().parameters), "{spread}");
                    assert_eq!(losses(&resumed.trained().history), losses(&whole.trained().history), "{spread}");
                }
                assert!(difference(&resumed, &whole) < 1e-5, "{spread}, {executors} executors go on");
            }
        }
    }
}

#[test]
fn rows_that_do_not_fit_in_memory_meet_all_the_same() {
    for spread in ["{ pipeline: { micro_batches: 2 } }", "{ vertical: { slices: 4 } }"] {
        let (_world, mut prepared) = prepared(spread, "batch: 16, epochs: 2, validation: 0.2", FILES);
        prepared.memory_bytes = 2_000;
        let single = prepared.train(1);
        let fleet = prepared.train(3);
        assert!(difference(&fleet, &single) < 1e-5, "{spread}");
        assert_counted(&prepared, &fleet, spread);
    }
}

#[test]
fn few_rows_and_none() {
    for spread in ["{ pipeline: { micro_batches: 4 } }", "{ vertical: { slices: 4 } }"] {
        for rows in [1, 7] {
            let (_world, prepared) = prepared(spread, "batch: 4, epochs: 2", &[rows]);
            let (single, fleet) = (prepared.train(1), prepared.train(4));
            assert!(difference(&fleet, &single) < 1e-5, "{spread}, {rows} rows");
            assert_counted(&prepared, &fleet, spread);
        }
        // The one row is held out by this seed.
        let (_world, prepared) = prepared(spread, "batch: 4, epochs: 2, validation: 0.9", &[1]);
        let none = prepared.train(4);
        assert!(none.errors().iter().all(|error| matches!(error, LearnError::NoRows { held_out: 1 })), "{spread}");
    }
}

#[test]
fn a_loss_that_is_not_finite_stops_all_ranks() {
    for spread in ["{ pipeline: { micro_batches: 2 } }", "{ vertical: { slices: 4 } }"] {
        let train = "batch: 16, epochs: 3, optimizer: sgd, learning_rate: 1.0e+30";
        let outcome = trained(spread, train, 4).1;
        assert!(outcome.errors().iter().all(|error| matches!(error, LearnError::NotFinite { .. })), "{spread}");
        let blamed = |error: &&LearnError| matches!(error, LearnError::NotFinite { blame, .. } if !blame.is_empty());
        assert_eq!(outcome.errors().iter().filter(|error| blamed(error)).count(), 1, "{spread}: one rank tells why");
    }
}

#[test]
fn parts_cover_what_is_trained() {
    let check = |spread: &str, executors: u32, expected: Option<usize>| {
        let (_world, prepared) = prepared(spread, "batch: 16", &[3]);
        let parts = Parts::new(prepared.model.spread, &prepared.shape, executors);
        assert_eq!(parts.map(|parts| parts.largest()), expected, "{spread}, {executors} executors");
    };
    // Layers 5-12-8-3-8-12-5 with biases.
    let layers = [5 * 12 + 12, 12 * 8 + 8, 8 * 3 + 3, 3 * 8 + 8, 8 * 12 + 12, 12 * 5 + 5];
    check("{ data: {} }", 3, None);
    check("pipeline", 1, Some(layers.iter().sum()));
    check("pipeline", 2, Some(layers[3..].iter().sum()));
    check("pipeline", 6, Some(layers[4]));
    // The first executor has slices w-3-2-3-2-3-w of 2 and of 1 column; the embedding's bias is one's.
    let slice = |w: usize| (w * 3 + 3) + (3 * 2 + 2) + 2 * 3 + (3 * 2 + 2) + (2 * 3 + 3) + (3 * w + w);
    check("{ vertical: { slices: 4 } }", 2, Some(slice(2) + slice(1) + 3));
}

/// One, two and four slices of the connections, whose loss is near the dense model's.
#[test]
fn connections_are_learned_in_slices() {
    let folder = tempfile::tempdir().unwrap();
    let sql = pipelines().join("../sql/nsl_kdd.sql").display().to_string();
    let text = std::fs::read_to_string(pipelines().join("nsl_kdd.yaml")).unwrap();
    let text = text.replace("../sql/nsl_kdd.sql", &sql).replace("epochs: 10", "epochs: 4");
    let run = |spread: &str, executors: &str| {
        let file = folder.path().join("nsl_kdd.yaml");
        std::fs::write(&file, text.replace("latent: 8", &format!("latent: 8\n    spread: {spread}"))).unwrap();
        let out = folder
            .path()
            .join(format!("{}{executors}", spread.replace(|c: char| !c.is_alphanumeric(), "")))
            .display()
            .to_string();
        let data = format!("data={}", pipelines().join("data/nsl-kdd-test.csv").display());
        let params = ["--param", &format!("out={out}"), "--param", &data, "--executors", executors];
        let file = file.display().to_string();
        emberflow(&[&["run", &file, "--output", "json"][..], &params].concat()).expect(0);
        let ledger = "SELECT count(*) AS n FROM connection_embeddings";
        let rows = emberflow(&["sql", "--db", &out, ledger, "--format", "csv"]).expect(0).stdout;
        (run::losses(&out), rows)
    };
    let (dense, rows) = run("{ data: {} }", "1");
    let sliced: Vec<_> = ["1", "2", "4"].into_iter().map(|count| run("{ vertical: { slices: 4 } }", count)).collect();
    for (curve, embedded) in &sliced {
        assert_eq!(*embedded, rows);
        let pairs = || curve.iter().zip(&sliced[0].0);
        eprintln!("{:.1e}", pairs().map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max));
        assert!(pairs().all(|(a, b)| (a - b).abs() < 1e-3 * b), "{curve:?}, not {:?}", sliced[0].0);
    }
    for count in ["1", "2"] {
        let (curve, embedded) = run(&format!("{{ vertical: {{ slices: {count} }} }}"), count);
        assert!(embedded == rows && curve[3] < 0.7 * curve[0] && curve[3] < 1.6 * dense[3], "{count}: {curve:?}");
    }
    let (curve, _) = &sliced[0];
    assert!(curve[3] < 0.7 * curve[0] && curve[3] < 1.6 * dense[3], "{curve:?}, dense {dense:?}");
    let (staged, _) = run("{ pipeline: { micro_batches: 4 } }", "4");
    eprintln!("{staged:?} {dense:?} {curve:?}");
    assert!(staged.iter().zip(&dense).all(|(a, b)| (a - b).abs() < 1e-3 * b), "{staged:?}, not {dense:?}");
}

#[test]
fn spreads_that_make_no_sense_are_faults() {
    let check = |to: &str, expected: &str| pipeline::check(&[("latent: 8", &format!("latent: 8\n    {to}"))], expected);
    check("spread: pipeline", "no fault");
    check("spread: vertical\n    hidden: [2]", "no fault");
    check("spread: { pipeline: { micro_batches: 0 } }", "25:42 [0] expected at least one part of a batch");
    check(
        "spread: { pipeline: { micro_batches: 300 } }",
        "25:42 [300] a batch of 256 rows has no 300 parts | give fewer, or a larger `batch`",
    );
    check("spread: { vertical: { slices: 0 } }", "25:35 [0] expected at least one slice");
    check(
        "spread: { vertical: { slices: 4 } }\n    hidden: [8, 3]",
        "25:35 [4] 4 slices do not fit a hidden layer of 3 | a slice needs a part of each hidden layer",
    );
    check(
        "spread: { vertical: { slices: 1 } }",
        "25:13 [{ vertical: { slices: 1 } }] more executors than slices: 2 for 1 | \
         set `executors: 1`, or use `spread: data`",
    );
    check(
        "spread: pipeline\n    tied_weights: true",
        "25:13 [pipeline] `tied_weights` needs encoder and decoder in one place | use `spread: data`",
    );
    let train = |to: &str, expected: &str| {
        let spread = ("latent: 8", "latent: 8\n    spread: pipeline");
        pipeline::check(&[spread, ("epochs: ${rows}", to)], expected);
    };
    train(
        "sync: sharded",
        "27:13 [sharded] a model that is spread has no replicas to keep alike | \
         leave `sync` out, or use `spread: data`",
    );
    train("compression: bf16", "27:20 [bf16] a model that is spread exchanges no gradients | leave `compression` out");
    pipeline::check(
        &[("executors: 2", "executors: 3"), ("latent: 8", "latent: 8\n    spread: pipeline")],
        "25:13 [pipeline] more executors than layers: 3 for 2 | set `executors: 2`, or use `spread: data`",
    );
}

#[test]
fn explain_shows_what_each_executor_reads() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows");
    write_parquet(&data.join("a.parquet"), columns(0..20));
    let check = |spread: &str, executors: u32, lines: &[&str]| {
        let extra = format!("    hidden: [6]\n    spread: {spread}\nrun: {{ executors: {executors} }}\n");
        let file = write_pipeline(folder.path(), &data, "[{ columns: [\"f*\"] }]", &extra);
        let text = emberflow(&["explain", &file]).expect(0).stdout;
        assert!(lines.iter().all(|line| text.contains(line)), "{lines:?}\n{text}");
    };
    let (first, second) = ("rank 0: 8 partitions, 20 rows, 240 B", "rank 1: 8 partitions, 20 rows, 160 B");
    check("{ vertical: { slices: 2 } }", 2, &[first, second, "executor: 256 B"]);
    let (first, second) = ("rank 0: 8 partitions, 20 rows, 400 B", "rank 1: 8 partitions, 20 rows, 0 B");
    check("pipeline", 3, &[first, second, "rank 2: 8 partitions, 20 rows, 400 B"]);
}

/// Runs a small pipeline over rows of one list, and over a few columns.
fn refused(spread: &str, executors: &str, list: bool) -> Answer {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("rows");
    let mut table = columns(0..20);
    if list {
        table.truncate(1);
        table.push(("f", lists(&[8; 20])));
    }
    write_parquet(&data.join("a.parquet"), table);
    let file = write_pipeline(folder.path(), &data, "[{ columns: [\"f*\"] }]", &format!("    spread: {spread}\n"));
    emberflow(&["run", &file, "--executors", executors])
}

#[test]
fn what_cannot_be_spread_is_refused_with_a_way_out() {
    let check = |spread: &str, executors: &str, list: bool, named: &[&str]| {
        let answer = refused(spread, executors, list).expect(78);
        assert!(named.iter().all(|name| answer.stderr.contains(name)), "{named:?}\n{}", answer.stderr);
    };
    let staged = "{ pipeline: { micro_batches: 2 } }";
    check(staged, "3", false, &["more executors than layers, 3 for 2", "executors: 2", "spread: data"]);
    check("{ vertical: { slices: 2 } }", "3", false, &["more executors than slices, 3 for 2", "executors: 2"]);
    check("{ vertical: { slices: 6 } }", "1", false, &["6 slices need", "there are 5", "5 slices at most"]);
    check("{ vertical: { slices: 2 } }", "1", true, &["column `f`", "a list stays whole", "transform"]);
    assert_eq!(refused("{ vertical: { slices: 5 } }", "5", false).code, Some(0));
    assert_eq!(refused(staged, "2", true).code, Some(0));
}
