//! Training over real files: the number of executors does not matter, nor do interruptions.

use std::{ops::ControlFlow, sync::Arc};

use arrow::array::{Float32Array, Int64Array};
use emberflow::{
    data::is_held_out,
    ids::Rank,
    learn::{Checkpoint, LearnError, Model},
    remedy::{Remedied, Remedy},
    runs::EpochRecord,
    storage::Location,
};
use safetensors::{Dtype, SafeTensors};

use crate::training::{IDENTITY, Outcome, Prepared, World, bits, losses, runtime};

const NET: &str = "features: [{ columns: ['f*'] }], hidden: [5], latent: 2, activation: tanh";

/// Files of very unequal size, one of them empty.
const FILES: &[usize] = &[40, 0, 1, 90, 17];

fn prepared(more: &str, files: &[usize]) -> (World, Prepared) {
    let world = World::with_rows(&format!("{NET}, {more}"), files);
    let prepared = world.prepare();
    (world, prepared)
}

fn near(got: f64, expected: f64) -> bool {
    (got - expected).abs() <= 1e-4 * expected.abs().max(1e-3)
}

/// The same losses, epoch by epoch, but for rounding.
fn assert_same_curve(got: &[EpochRecord], expected: &[EpochRecord], case: &str) {
    assert_eq!(got.len(), expected.len(), "{case}");
    for (got, expected) in got.iter().zip(expected) {
        assert!(near(got.loss, expected.loss), "{case}: {got:?}, not {expected:?}");
        assert_eq!(got.held_out_loss.is_some(), expected.held_out_loss.is_some(), "{case}");
        let held_out = got.held_out_loss.zip(expected.held_out_loss);
        assert!(held_out.is_none_or(|(got, expected)| near(got, expected)), "{case}: {got:?}, not {expected:?}");
        assert_eq!((got.rows, got.learning_rate), (expected.rows, expected.learning_rate), "{case}");
    }
}

#[test]
fn the_number_of_executors_does_not_change_the_curve() {
    let check = |train: &str, partition: &str, files: &[usize]| {
        let (_world, prepared) =
            prepared(&format!("partition: {{ {partition} }}, train: {{ epochs: 3, {train} }}"), files);
        let single = prepared.train(1);
        let single = single.trained();
        assert_eq!(single.history.len(), 3);
        for executors in [2, 3, 4, files.iter().sum::<usize>() as u32 + 2] {
            let case = format!("{train} {partition} {files:?}, {executors} executors");
            let fleet = prepared.train(executors);
            let trained = fleet.trained();
            assert_same_curve(&trained.history, &single.history, &case);
            let pairs = trained.parameters.iter().zip(&single.parameters);
            assert!(pairs.into_iter().all(|(got, expected)| (got - expected).abs() < 1e-3), "{case}");
            let held_out: u64 = fleet.ranks.iter().flatten().map(|rank| rank.held_out_rows).sum();
            assert_eq!(held_out, prepared.partitions.held_out_rows(), "{case}");
            for epoch in 0..3 {
                let rows: u64 = fleet.ranks.iter().flatten().map(|rank| rank.rows_per_epoch[epoch]).sum();
                assert_eq!(rows, prepared.partitions.train_rows(), "{case}");
            }
        }
    };
    check("batch: 16", "by: random", FILES);
    check("batch: 16, validation: 0.3", "by: round_robin, count: 3", FILES);
    // Five keys for seven partitions: some are empty, and so are some ranks.
    check("batch: 7, optimizer: sgd, momentum: 0.9, learning_rate: 0.1", "by: hash, columns: [id], count: 7", &[5]);
    check("batch: 1000, optimizer: adamw, clip_norm: 0.1", "by: random, count: 2", FILES);
    check("batch: 2", "by: random", &[3]);
    check("batch: 4", "by: random", &[1]);
}

/// What a checkpoint holds but for the time it took, as bits.
fn state(checkpoint: &Checkpoint) -> impl PartialEq + std::fmt::Debug {
    let moments: Vec<_> = checkpoint.moments.iter().map(|moment| bits(moment)).collect();
    let best = checkpoint.best.as_ref().map(|(loss, parameters)| (loss.to_bits(), bits(parameters)));
    let place = (checkpoint.epoch, checkpoint.step, checkpoint.updates, checkpoint.epoch_rows);
    let judged = (checkpoint.stale_epochs, checkpoint.reference_loss.map(f64::to_bits));
    let sums = (checkpoint.epoch_loss.to_bits(), losses(&checkpoint.history));
    (place, sums, bits(&checkpoint.parameters), moments, best, judged)
}

/// Saves and loads it, as a later process does.
fn stored(prepared: &Prepared, checkpoint: &Checkpoint) -> Checkpoint {
    let location = Location::parse("memory:///work/checkpoint.safetensors", std::path::Path::new("/")).unwrap();
    runtime().block_on(async {
        checkpoint.save(&prepared.storage, &location).await.unwrap();
        Checkpoint::load(&prepared.storage, &location, IDENTITY).await.unwrap().unwrap()
    })
}

#[test]
fn a_resumed_training_goes_on_bit_for_bit() {
    let check = |train: &str| {
        for executors in [1, 3] {
            let train = format!("train: {{ batch: 16, checkpoint_steps: 1, {train} }}");
            let (_world, prepared) = prepared(&train, FILES);
            let whole = prepared.train(executors);
            let expected = bits(&whole.trained().parameters);
            let count = whole.checkpoints.len();
            assert!(count > 20, "one per step and one per epoch, not {count}");
            for from in [0, 1, 4, 8, 9, 10, 15, count - 2, count - 1] {
                let resumed =
                    prepared.train_watched(executors, Some(&stored(&prepared, &whole.checkpoints[from])), &|_, _| {
                        ControlFlow::Continue(())
                    });
                let case = format!("{train}, {executors} executors, from checkpoint {from}");
                assert_eq!(bits(&resumed.trained().parameters), expected, "{case}");
                assert_eq!(losses(&resumed.trained().history), losses(&whole.trained().history), "{case}");
                // A training that was done keeps its state once more: whoever should have may be gone.
                assert_eq!(resumed.checkpoints.len(), (count - from - 1).max(1), "{case}");
                for (got, expected) in resumed.checkpoints.iter().zip(&whole.checkpoints[from + 1..]) {
                    assert_eq!(state(got), state(expected), "{case}");
                }
            }
        }
    };
    check("epochs: 3, validation: 0.2, schedule: { cosine: { warmup_epochs: 1, floor: 0.1 } }");
    check("epochs: 3, optimizer: sgd, momentum: 0.9, clip_norm: 0.5, schedule: { step: { epochs: 1, factor: 0.5 } }");
    check("epochs: 3, optimizer: adamw, betas: [0.8, 0.99]");
    // So large a step that the loss soon rises: it stops early, and the best model is not the last.
    check("epochs: 50, validation: 0.3, learning_rate: 0.2, early_stopping: { patience: 2 }");
}

#[test]
fn early_stopping_ends_and_the_best_is_kept() {
    let train = "epochs: 50, batch: 16, validation: 0.3, learning_rate: 0.2, early_stopping: { patience: 2 }";
    let (_world, prepared) = prepared(&format!("train: {{ {train} }}"), FILES);
    let outcome = prepared.train(2);
    let trained = outcome.trained();
    let held_out: Vec<f64> = trained.history.iter().map(|epoch| epoch.held_out_loss.unwrap()).collect();
    let (best, _) = held_out.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    assert_eq!(held_out.len(), best + 3, "two epochs after the best: {held_out:?}");
    assert_eq!(bits(&trained.parameters), bits(&outcome.checkpoints[best].parameters));
    assert_ne!(bits(&trained.parameters), bits(&outcome.checkpoints.last().unwrap().parameters));
    assert_eq!(losses(&outcome.epochs), losses(&trained.history));
    let finished = outcome.checkpoints.last().unwrap();
    let again = prepared.train_watched(2, Some(finished), &|_, _| ControlFlow::Continue(()));
    assert_eq!(bits(&again.trained().parameters), bits(&trained.parameters));
    assert_eq!(again.steps, [0, 0], "a finished training is not gone on with");
}

#[test]
fn another_number_of_executors_can_go_on() {
    let (_world, prepared) = prepared("train: { epochs: 3, batch: 16, checkpoint_steps: 1, validation: 0.2 }", FILES);
    let whole = prepared.train(3);
    for executors in [1, 2, 5] {
        let middle = Some(&whole.checkpoints[11]);
        let resumed = prepared.train_watched(executors, middle, &|_, _| ControlFlow::Continue(()));
        assert_same_curve(&resumed.trained().history, &whole.trained().history, &format!("{executors} executors"));
    }
}

#[test]
fn a_request_to_one_rank_stops_all_at_the_same_step() {
    let (_world, prepared) = prepared("train: { epochs: 3, batch: 16, checkpoint_steps: 1 }", FILES);
    let expected = bits(&prepared.train(1).trained().parameters);
    for executors in [1, 2, 4] {
        let whole = bits(&prepared.train(executors).trained().parameters);
        // In the middle of an epoch, before its last step, after it, and at its end.
        for at in [0, 3, 8, 9, 10] {
            let stopped = prepared.train_watched(executors, None, &|number, _| {
                if number == at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            let case = format!("{executors} executors, stopped at checkpoint {at}");
            assert!(stopped.errors().iter().all(|error| matches!(error, LearnError::Interrupted)), "{case}");
            assert!(stopped.errors().iter().all(|error| error.remedy() == Remedy::Interrupted), "{case}");
            let last = stopped.checkpoints.last().unwrap();
            assert!(stopped.steps.iter().all(|steps| *steps == last.updates), "{case}: {:?}", stopped.steps);
            // A rank looks at its flag after its pass: it may have passed when the flag is set.
            assert!(last.updates <= stopped.checkpoints[at].updates + 2, "{case}");
            let resumed =
                prepared.train_watched(executors, Some(&stored(&prepared, last)), &|_, _| ControlFlow::Continue(()));
            assert_eq!(bits(&resumed.trained().parameters), whole, "{case}");
        }
        if executors == 1 {
            assert_eq!(whole, expected);
        }
    }
}

/// One file of tame rows, but for one value.
fn one_wild_value(more: &str, row: usize, value: f32) -> (World, Prepared) {
    let world = World::new(&format!("{NET}, {more}"), "key: [id]");
    let tame = |feature: usize| (0..100).map(move |row| (row * (feature + 1)) as f32 / 300.0);
    let wild = tame(1).enumerate().map(|(at, tame)| if at == row { value } else { tame });
    world.put(
        0,
        vec![
            ("id", Arc::new(Int64Array::from_iter_values(0..100))),
            ("f0", Arc::new(Float32Array::from_iter_values(tame(0)))),
            ("f1", Arc::new(Float32Array::from_iter_values(wild))),
            ("f2", Arc::new(Float32Array::from_iter_values(tame(2)))),
        ],
    );
    let prepared = world.prepare();
    (world, prepared)
}

/// Rank, epoch and step that all ranks must agree on, and the blame that exactly one tells.
fn not_finite(outcome: &Outcome) -> (Rank, u32, u64, String) {
    let errors = outcome.errors();
    let mut place = None;
    let mut blames = Vec::new();
    for (at, error) in errors.iter().enumerate() {
        assert_eq!(error.remedy(), Remedy::FixData);
        let LearnError::NotFinite { rank, epoch, step, blame } = error else { panic!("{error}") };
        assert_eq!(*place.get_or_insert((*rank, *epoch, *step)), (*rank, *epoch, *step));
        if !blame.is_empty() {
            assert_eq!(rank.0 as usize, at, "only the rank to blame has the rows");
            blames.push(blame.clone());
        }
    }
    assert_eq!(blames.len(), 1, "{errors:?}");
    let (rank, epoch, step) = place.unwrap();
    (rank, epoch, step, blames.remove(0))
}

/// The rank and step (from 1) that meet the wild value in the first epoch.
fn where_it_is(prepared: &Prepared, executors: u32) -> (Rank, u64) {
    for rank in (0..executors).map(Rank) {
        let mut epoch = prepared.feed(rank, executors).epoch(0, 0);
        let mut step = 1;
        while let Some(batch) = epoch.next_batch().unwrap() {
            if batch.x.iter().any(|x| x.abs() > 1e30) {
                return (rank, step);
            }
            step += 1;
        }
    }
    panic!("no rank has it");
}

#[test]
fn a_loss_that_is_not_finite_stops_all_and_names_rank_step_and_column() {
    for executors in [1, 2, 3, 5] {
        let (_world, prepared) = one_wild_value("train: { batch: 8 }", 61, 3e38);
        let outcome = prepared.train(executors);
        let (rank, epoch, step, blame) = not_finite(&outcome);
        assert_eq!(((rank, step), epoch), (where_it_is(&prepared, executors), 1), "{executors} executors");
        assert!(blame.starts_with("largest values: f1 (3.0e38)"), "{blame}");
        assert!(outcome.steps.iter().all(|steps| *steps == step), "{:?}", outcome.steps);
    }
}

#[test]
fn a_held_out_loss_that_is_not_finite_is_told() {
    let row = (0..100).find(|row| is_held_out(42, *row, 0.3)).unwrap() as usize;
    let (_world, prepared) = one_wild_value("train: { batch: 8, validation: 0.3 }", row, 3e38);
    for executors in [1, 3] {
        let (_, epoch, _, blame) = not_finite(&prepared.train(executors));
        assert_eq!(epoch, 1);
        assert!(blame.starts_with("in held-out rows, largest values: f1"), "{blame}");
    }
}

#[test]
fn a_training_that_runs_away_is_told() {
    let (_world, prepared) = prepared("train: { optimizer: sgd, learning_rate: 1e30 }", FILES);
    let (_, epoch, _, blame) = not_finite(&prepared.train(2));
    assert!(epoch <= 2 && blame.contains("lower the learning rate"), "{epoch}: {blame}");
}

#[test]
fn features_beyond_cross_entropy_are_named_also_where_they_are_held_out() {
    let held_out = |row: &usize| is_held_out(42, *row as u64, 0.3);
    let rows = [(0..100).find(held_out).unwrap(), (0..100).find(|row| !held_out(row)).unwrap()];
    for row in rows {
        let train = "train: { loss: binary_cross_entropy, batch: 8, validation: 0.3 }";
        let (_world, prepared) = one_wild_value(train, row, 1.5);
        let outcome = prepared.train(1);
        let error = outcome.errors()[0];
        assert!(matches!(error, LearnError::BeyondCrossEntropy { .. }), "{error}");
        assert!(error.to_string().contains("feature f1 is 1.5"), "{error}");
    }
}

#[test]
fn a_damaged_checkpoint_is_an_error_and_a_foreign_one_is_ignored() {
    let (world, prepared) = prepared("train: { epochs: 2, batch: 16 }", FILES);
    let outcome = prepared.train(1);
    let location = world.location("work/checkpoint.safetensors");
    let path = location.local_path().unwrap();
    let load = |identity: &str| runtime().block_on(Checkpoint::load(&world.storage, &location, identity));
    assert_eq!(load(IDENTITY).unwrap(), None, "there is none");
    runtime().block_on(outcome.checkpoints[0].save(&world.storage, &location)).unwrap();
    assert_eq!(load(IDENTITY).unwrap().as_ref(), Some(&outcome.checkpoints[0]));
    assert_eq!(load("another").unwrap(), None);

    let whole = std::fs::read(&path).unwrap();
    let mut longer = whole.clone();
    longer.push(0);
    let mut garbled = whole.clone();
    garbled[20] ^= 0x55;
    let cuts = [0, 7, 8, 100, whole.len() - 1].map(|length| whole[..length].to_vec());
    for damaged in cuts.into_iter().chain([longer, garbled, b"<html>not found</html>".to_vec()]) {
        std::fs::write(&path, &damaged).unwrap();
        let error = load(IDENTITY).unwrap_err();
        assert!(matches!(error, LearnError::Unreadable { what: "checkpoint", .. }), "{error}");
        assert!(error.to_string().contains("work/checkpoint.safetensors"), "{error}");
        assert_eq!(error.remedy(), Remedy::CheckStorage);
    }

    // Another run's, or one of another network, is no place to go on from.
    let foreign = Checkpoint { identity: "another".into(), ..outcome.checkpoints[0].clone() };
    let parameters = vec![0.5; 3];
    let narrow = Checkpoint { parameters, ..outcome.checkpoints[0].clone() };
    let momentless = Checkpoint { moments: Vec::new(), ..outcome.checkpoints[0].clone() };
    for other in [foreign, narrow, momentless] {
        let again = prepared.train_watched(1, Some(&other), &|_, _| ControlFlow::Continue(()));
        assert_eq!(bits(&again.trained().parameters), bits(&outcome.trained().parameters));
        assert_eq!(again.steps, outcome.steps, "from the beginning");
    }
}

#[test]
fn a_model_comes_back_and_its_fingerprint_tells_what_it_does() {
    for tied in [false, true] {
        let (world, prepared) = prepared(&format!("tied_weights: {tied}, train: {{ epochs: 1 }}"), FILES);
        let model = prepared.model(prepared.train(1).trained().parameters.clone());
        let store = world.location("out");
        let folder = runtime().block_on(model.save(&world.storage, &store)).unwrap();
        assert_eq!(folder, store.join(&format!("models/m/{}", model.fingerprint())));
        let load = || runtime().block_on(Model::load(&world.storage, &folder));
        let again = load().unwrap();
        assert_eq!(bits(&again.parameters), bits(&model.parameters));
        assert_eq!((&again.name, &again.shape, again.loss), (&model.name, &model.shape, model.loss));
        assert_eq!(again.features, model.features);
        assert_eq!(again.fingerprint(), model.fingerprint());
        assert_eq!(runtime().block_on(model.save(&world.storage, &store)).unwrap(), folder, "once more");

        let renamed = Model { name: "other".into(), ..model.clone() };
        assert_eq!(renamed.fingerprint(), model.fingerprint());
        let mut changed = model.clone();
        changed.parameters[3] = f32::from_bits(changed.parameters[3].to_bits() ^ 1);
        assert_ne!(changed.fingerprint(), model.fingerprint());
        let mut changed = model.clone();
        changed.shape.net.activation = emberflow::pipeline::spec::Activation::Relu;
        assert_ne!(changed.fingerprint(), model.fingerprint());

        check_damage(&folder, &load);
    }
}

/// A model whose files are not what was written is refused, and the file is named.
fn check_damage(folder: &Location, load: &dyn Fn() -> Result<Model, LearnError>) {
    let weights = folder.join("model.safetensors").local_path().unwrap();
    let whole = std::fs::read(&weights).unwrap();
    let at = encoder_weight(&whole);
    let mut flipped = whole.clone();
    flipped[at] ^= 1;
    for damaged in [flipped, whole[..whole.len() - 4].to_vec(), Vec::new()] {
        std::fs::write(&weights, damaged).unwrap();
        let error = load().unwrap_err();
        assert!(matches!(error, LearnError::Unreadable { what: "model", .. }), "{error}");
        assert!(error.to_string().contains("model.safetensors"), "{error}");
    }
    std::fs::remove_file(&weights).unwrap();
    assert!(load().unwrap_err().to_string().contains("model.safetensors"));
    std::fs::write(&weights, whole).unwrap();
    load().unwrap();

    let description = folder.join("model.json").local_path().unwrap();
    let text = std::fs::read_to_string(&description).unwrap();
    for damaged in [&text[..text.len() / 2], &text.replace("\"format\": 1", "\"format\": 2")] {
        std::fs::write(&description, damaged).unwrap();
        let error = load().unwrap_err().to_string();
        assert!(error.contains("model.json"), "{error}");
    }
}

/// Where the encoder's first weight stands in the file.
fn encoder_weight(file: &[u8]) -> usize {
    let (length, metadata) = SafeTensors::read_metadata(file).unwrap();
    8 + length + metadata.info("encoder.0.weight").unwrap().data_offsets.0
}

/// The names and shapes of `encoder = nn.Sequential(Linear, Tanh, Linear)`, and the numbers of
/// the network that was trained.
#[test]
fn weights_have_the_names_and_shapes_of_pytorch() {
    for tied in [false, true] {
        let (world, prepared) = prepared(&format!("tied_weights: {tied}, train: {{ epochs: 1 }}"), FILES);
        let model = prepared.model(prepared.train(1).trained().parameters.clone());
        let folder = runtime().block_on(model.save(&world.storage, &world.location("out"))).unwrap();
        let bytes = std::fs::read(folder.join("model.safetensors").local_path().unwrap()).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut found: Vec<_> = file.iter().map(|(name, view)| (name.to_owned(), view.shape().to_vec())).collect();
        found.sort();
        let expected = [
            ("decoder.0.bias", vec![5]),
            ("decoder.0.weight", vec![5, 2]),
            ("decoder.2.bias", vec![3]),
            ("decoder.2.weight", vec![3, 5]),
            ("encoder.0.bias", vec![5]),
            ("encoder.0.weight", vec![5, 3]),
            ("encoder.2.bias", vec![2]),
            ("encoder.2.weight", vec![2, 5]),
        ];
        assert_eq!(found, expected.map(|(name, shape)| (name.to_owned(), shape)));
        assert!(file.iter().all(|(_, view)| view.dtype() == Dtype::F32));

        let x = [0.3, -0.2, 0.9];
        let (mut latent, mut error) = (Vec::new(), Vec::new());
        let mut step = prepared.step();
        step.write_parameters(&model.parameters);
        step.encode(&x, 1, &mut latent, Some(&mut error)).unwrap();
        let tanh = |h: Vec<f32>| h.into_iter().map(f32::tanh).collect::<Vec<_>>();
        let by_hand = linear(&file, "encoder.2", &tanh(linear(&file, "encoder.0", &x)));
        let output = linear(&file, "decoder.2", &tanh(linear(&file, "decoder.0", &by_hand)));
        let squares: f32 = output.iter().zip(x).map(|(y, x)| (y - x).powi(2)).sum();
        assert!(by_hand.iter().zip(&latent).all(|(a, b)| (a - b).abs() < 1e-6), "{by_hand:?}, {latent:?}");
        assert!((squares / 3.0 - error[0]).abs() < 1e-6);
    }
}

/// `nn.Linear` by hand: `W x + b` with `W` of `[outputs, inputs]`.
fn linear(file: &SafeTensors<'_>, module: &str, x: &[f32]) -> Vec<f32> {
    let numbers = |name: &str| -> Vec<f32> {
        let data = file.tensor(&format!("{module}.{name}")).unwrap().data().to_vec();
        data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let rows = numbers("weight");
    let row = |row: &[f32]| row.iter().zip(x).map(|(weight, x)| weight * x).sum::<f32>();
    rows.chunks_exact(x.len()).zip(numbers("bias")).map(|(weights, bias)| row(weights) + bias).collect()
}

/// A model without a row to learn from must not come out as if it had been trained.
#[test]
fn a_training_without_rows_is_an_error() {
    let (_world, prepared) = prepared("train: { validation: 0.9 }", &[1]);
    assert_eq!(prepared.partitions.train_rows(), 0, "the one row is held out by this seed");
    for executors in [1, 2] {
        for error in prepared.train(executors).errors() {
            assert!(matches!(error, LearnError::NoRows { held_out: 1 }), "{error}");
            assert_eq!(error.remedy(), Remedy::FixFile);
        }
    }
}
