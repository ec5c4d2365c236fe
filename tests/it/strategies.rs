//! How ranks keep one model, strategy by strategy, within the test's process.

use std::{ops::ControlFlow, thread, time::Duration};

use emberflow::learn::LearnError;

use crate::training::{Outcome, Pass, Prepared, World, bits, go_on, losses, on};

const NET: &str = "features: [{ columns: [\"f*\"] }], hidden: [5], latent: 2";
/// Files of very unequal size, one of them empty.
const FILES: &[usize] = &[40, 0, 1, 90, 17];

fn prepared(train: &str, files: &[usize]) -> (World, Prepared) {
    let world = World::with_rows(&format!("{NET}, train: {{ batch: 16, {train} }}"), files);
    let prepared = world.prepare();
    (world, prepared)
}

fn trained(train: &str, executors: u32) -> (Prepared, Outcome) {
    let epochs = if train.contains("epochs") { "" } else { ", epochs: 3" };
    let (_world, prepared) = prepared(&format!("{train}{epochs}"), FILES);
    let outcome = prepared.train(executors);
    (prepared, outcome)
}

fn curve(outcome: &Outcome) -> Vec<f64> {
    outcome.trained().history.iter().map(|epoch| epoch.loss).collect()
}

/// The same losses, but for a fraction of them.
fn assert_near(got: &Outcome, expected: &Outcome, tolerance: f64, case: &str) {
    let (got, expected) = (curve(got), curve(expected));
    assert_eq!(got.len(), expected.len(), "{case}");
    let near = |(got, expected): (&f64, &f64)| (got - expected).abs() <= tolerance * expected.abs().max(1e-3);
    assert!(got.iter().zip(&expected).all(near), "{case}: {got:?}, not {expected:?}");
}

#[test]
fn synchronous_strategies_give_the_curve_of_one_executor() {
    for (train, tolerance) in [
        ("sync: all_reduce", 1e-4),
        ("sync: { all_reduce: { batches: 3 } }", 1e-4),
        ("sync: sharded", 1e-4),
        ("sync: sharded, optimizer: sgd, momentum: 0.9, clip_norm: 0.1", 1e-4),
        // An average of single steps of plain gradient descent is a step along the average.
        ("sync: { local_sgd: { steps: 1 } }, optimizer: sgd, learning_rate: 0.1", 1e-4),
        ("compression: bf16", 2e-2),
        ("sync: sharded, compression: bf16", 2e-2),
        ("compression: { top_k: 1.0 }", 1e-4),
    ] {
        let single = trained(train, 1).1;
        for executors in [2, 4] {
            let (prepared, fleet) = trained(train, executors);
            let case = format!("{train}, {executors} executors");
            assert_near(&fleet, &single, tolerance, &case);
            for epoch in 0..3 {
                let rows: u64 = fleet.ranks.iter().flatten().map(|rank| rank.rows_per_epoch[epoch]).sum();
                assert_eq!(rows, prepared.partitions.train_rows(), "{case}");
            }
        }
    }
}

#[test]
fn sharded_is_all_reduce_to_the_last_bit() {
    for optimizer in ["optimizer: adam", "optimizer: sgd, momentum: 0.9", "optimizer: adamw, validation: 0.2"] {
        let whole = trained(&format!("sync: all_reduce, {optimizer}"), 3).1;
        let sharded = trained(&format!("sync: sharded, {optimizer}"), 3).1;
        assert_eq!(bits(&sharded.trained().parameters), bits(&whole.trained().parameters), "{optimizer}");
        assert_eq!(losses(&sharded.trained().history), losses(&whole.trained().history), "{optimizer}");
        let (sharded, whole) = (&sharded.checkpoints[2], &whole.checkpoints[2]);
        assert_eq!(sharded.moments, whole.moments, "a checkpoint is whole");
    }
}

#[test]
fn looser_strategies_come_near() {
    let plain = trained("sync: all_reduce, epochs: 20", 1).1;
    let last = |outcome: &Outcome| *curve(outcome).last().unwrap();
    for train in [
        "sync: { local_sgd: { steps: 4 } }",
        "sync: { local_sgd: { steps: 2, outer_momentum: 0.3, outer_learning_rate: 0.9 } }",
        "sync: { local_sgd: { steps: 4 } }, compression: bf16",
        "compression: { top_k: 0.2 }",
    ] {
        let looser = trained(&format!("{train}, epochs: 20"), 3).1;
        let (got, expected) = (last(&looser), last(&plain));
        let first = curve(&looser)[0];
        assert!(got < first && got < 1.6 * expected, "{train}: {got} from {first}, against {expected}");
    }
}

#[test]
fn every_strategy_resumes_to_the_last_bit() {
    for train in [
        "sync: { all_reduce: { batches: 2 } }",
        "sync: sharded",
        "sync: { local_sgd: { steps: 4, outer_momentum: 0.5 } }",
    ] {
        let (_world, prepared) = prepared(&format!("{train}, checkpoint_steps: 2, validation: 0.2, epochs: 3"), FILES);
        let whole = prepared.train(3);
        for after in [1, 2, 5] {
            let stop =
                |number: usize, _: &_| if number == after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            let stopped = prepared.train_watched(3, None, &stop);
            assert!(stopped.errors().iter().all(|error| matches!(error, LearnError::Interrupted)), "{train}");
            let resumed = prepared.train_watched(3, stopped.checkpoints.last(), &|_, _| ControlFlow::Continue(()));
            assert_eq!(bits(&resumed.trained().parameters), bits(&whole.trained().parameters), "{train}, {after}");
        }
    }
}

#[test]
fn a_slow_executor_hands_partitions_over() {
    let (_world, prepared) = prepared("epochs: 3", &[400]);
    let even = prepared.train(2);
    let outcome = prepared.train_tampered(2, None, &go_on, &|comm, step| {
        on(1, comm, step, |_, x| {
            thread::sleep(Duration::from_millis(10) * (x.len() / 3) as u32);
            Pass::Good
        })
    });
    let rows: Vec<_> = outcome.ranks.iter().map(|rank| rank.as_ref().unwrap().rows_per_epoch.clone()).collect();
    assert_eq!(rows[1][0], 200);
    assert!(rows[1][1] < 100 && rows[1][2] < 100, "{rows:?}");
    assert!((0..3).all(|epoch| rows[0][epoch] + rows[1][epoch] == 400), "{rows:?}");
    // The same rows make the same steps, whoever computes them.
    assert_near(&outcome, &even, 1e-4, "handed over");
}
