//! Parameter servers: every mode counts every row, and none hangs or loses anything.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use emberflow::{
    ids::Rank,
    learn::{AbortHandle, Checkpoint, CommError, LearnError},
};

use crate::training::{Outcome, Pass, Prepared, World, bits, go_on, losses, on};

const NET: &str = "features: [{ columns: [\"f*\"] }], hidden: [5], latent: 2";
/// Files of very unequal size, one of them empty.
const FILES: &[usize] = &[40, 0, 1, 90, 17];

const MODES: [&str; 5] = [
    "{}",
    "{ servers: 3 }",
    "{ mode: async }",
    "{ mode: bounded, staleness: 1, servers: 2 }",
    "{ mode: bounded, staleness: 0 }",
];

fn prepared(sync: &str, train: &str, files: &[usize]) -> (World, Prepared) {
    let model = format!("{NET}, train: {{ sync: {{ parameter_server: {sync} }}, batch: 16, {train} }}");
    let world = World::with_rows(&model, files);
    let prepared = world.prepare();
    (world, prepared)
}

fn last_loss(outcome: &Outcome) -> f64 {
    outcome.trained().history.last().unwrap().loss
}

/// Every epoch has every planned row, and each worker its own.
fn assert_rows(prepared: &Prepared, outcome: &Outcome, executors: u32, case: &str) {
    let planned = prepared.partitions.train_rows();
    assert!(outcome.trained().history.iter().all(|epoch| epoch.rows == planned), "{case}");
    for (rank, trained) in outcome.ranks.iter().flatten().enumerate() {
        let owned = prepared.partitions.owned_by(Rank(rank as u32), executors);
        let own: u64 = owned.iter().map(|id| prepared.partitions.partitions[id.0 as usize].train_rows).sum();
        assert!(trained.rows_per_epoch.iter().all(|rows| *rows == own), "{case}, rank {rank}");
    }
}

#[test]
fn servers_in_step_are_all_reduce_to_the_last_bit() {
    for train in ["optimizer: adam", "optimizer: sgd, momentum: 0.9", "optimizer: adamw, validation: 0.2"] {
        let model = format!("{NET}, train: {{ batch: 16, epochs: 3, {train} }}");
        let world = World::with_rows(&model, FILES);
        let whole = world.prepare().train(3);
        for servers in [1, 2, 5] {
            let (_world, prepared) =
                prepared(&format!("{{ servers: {servers} }}"), &format!("epochs: 3, {train}"), FILES);
            let outcome = prepared.train(3);
            let case = format!("{train}, {servers} servers");
            assert_eq!(bits(&outcome.trained().parameters), bits(&whole.trained().parameters), "{case}");
            assert_eq!(losses(&outcome.trained().history), losses(&whole.trained().history), "{case}");
            assert_eq!(outcome.checkpoints[2].moments, whole.checkpoints[2].moments, "a checkpoint is whole");
            assert_rows(&prepared, &outcome, 3, &case);
        }
    }
}

#[test]
fn the_norm_is_that_of_all_servers() {
    for (more, tolerance) in [("", 1e-4), (", compression: bf16", 2e-2)] {
        let train = format!("epochs: 3, optimizer: sgd, learning_rate: 0.5, clip_norm: 0.05{more}");
        let world = World::with_rows(&format!("{NET}, train: {{ batch: 16, {train} }}"), FILES);
        let whole = world.prepare().train(3);
        let outcome = prepared("{ servers: 3 }", &train, FILES).1.train(3);
        for (got, expected) in outcome.trained().history.iter().zip(&whole.trained().history) {
            assert!((got.loss - expected.loss).abs() <= tolerance * expected.loss, "{got:?}, not {expected:?}");
        }
    }
}

#[test]
fn looser_modes_reach_the_loss_of_the_strict_one() {
    let expected = last_loss(&prepared("{}", "epochs: 30", FILES).1.train(1));
    for mode in ["mode: async", "mode: async, servers: 2", "mode: bounded, staleness: 2", "mode: bounded, servers: 3"] {
        for more in ["", ", compression: bf16", ", optimizer: sgd, learning_rate: 0.2, clip_norm: 10"] {
            let train = format!("epochs: 30{more}");
            let strict =
                if more.contains("sgd") { last_loss(&prepared("{}", &train, FILES).1.train(1)) } else { expected };
            for executors in [1, 2, 4] {
                let (_world, prepared) = prepared(&format!("{{ {mode} }}"), &train, FILES);
                let outcome = prepared.train(executors);
                let case = format!("{mode}{more}, {executors} executors");
                let got = last_loss(&outcome);
                assert!((got - strict).abs() < 0.1 * strict, "{case}: {got}, not {strict}");
                assert_rows(&prepared, &outcome, executors, &case);
                let servers: Vec<_> = outcome.ranks.iter().flatten().filter_map(|rank| rank.staleness).collect();
                assert!(!servers.is_empty() && servers.iter().all(|staleness| staleness.pushes > 0), "{case}");
                assert!(executors > 1 || servers.iter().all(|staleness| staleness.max == 0), "{case}");
            }
        }
    }
}

#[test]
fn unequal_and_empty_partitions_end_and_count_every_row() {
    for mode in MODES {
        for files in [&[0, 1, 7][..], &[1], FILES] {
            for executors in [1, 2, 3, 11] {
                let (_world, prepared) = prepared(mode, "epochs: 2, validation: 0.2, keep: last", files);
                if prepared.partitions.train_rows() == 0 {
                    continue;
                }
                let outcome = prepared.train(executors);
                assert_rows(&prepared, &outcome, executors, &format!("{mode}, {files:?}, {executors} executors"));
            }
        }
    }
}

#[test]
fn no_worker_runs_further_ahead_than_it_may() {
    for (staleness, executors) in [(0, 2), (1, 2), (2, 3)] {
        let mode = format!("{{ mode: bounded, staleness: {staleness} }}");
        let (_world, prepared) = prepared(&mode, "epochs: 2", &[400]);
        let places: Arc<Mutex<Vec<u64>>> = Arc::new(Mutex::new(vec![0; executors as usize]));
        let apart = Arc::new(Mutex::new(0));
        let outcome = prepared.train_tampered(executors, None, &go_on, &|comm, step| {
            let (rank, places, apart) = (comm.rank().0, Arc::clone(&places), Arc::clone(&apart));
            if rank >= executors {
                return step;
            }
            on(rank, comm, step, move |pass, _| {
                if rank == 0 {
                    thread::sleep(Duration::from_millis(5));
                }
                let mut places = places.lock().unwrap();
                places[rank as usize] = pass;
                let slowest = *places.iter().min().unwrap();
                let mut apart = apart.lock().unwrap();
                *apart = pass.saturating_sub(slowest).max(*apart);
                Pass::Good
            })
        });
        let measured = outcome.ranks.last().unwrap().as_ref().unwrap().staleness.unwrap();
        // Between a pull and the push, each other goes from at most `staleness` behind to one
        // step beyond the same ahead.
        let most = u64::from(executors - 1) * (2 * staleness + 1);
        assert!(measured.max <= most, "{measured:?}, {most}");
        assert!(measured.max > 0 && measured.mean() > 0.0, "{measured:?}");
        // A worker that is slow to note its place is seen one step behind it.
        assert!(*apart.lock().unwrap() <= staleness + 1, "staleness {staleness}");
        assert_rows(&prepared, &outcome, executors, &mode);
    }
}

#[test]
fn servers_in_step_resume_to_the_last_bit() {
    for mode in ["{}", "{ servers: 3 }"] {
        let (_world, prepared) = prepared(mode, "epochs: 3, checkpoint_steps: 2, validation: 0.2", FILES);
        let whole = prepared.train(3);
        for after in [0, 1, 4] {
            let stop = |number: usize, _: &Checkpoint| {
                if number == after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let stopped = prepared.train_watched(3, None, &stop);
            assert!(stopped.errors().iter().all(|error| matches!(error, LearnError::Interrupted)), "{mode}");
            let resumed = prepared.train_watched(3, stopped.checkpoints.last(), &go_on);
            assert_eq!(bits(&resumed.trained().parameters), bits(&whole.trained().parameters), "{mode}, {after}");
        }
    }
}

/// The rows of each pass with some, sorted.
fn sorted(rows: &Mutex<Vec<[u32; 3]>>) -> Vec<[u32; 3]> {
    let mut rows = rows.lock().unwrap().clone();
    rows.sort_unstable();
    rows
}

/// Trains with three executors, one of them slow, and notes the rows of all passes.
fn train_noting(
    prepared: &Prepared,
    resume: Option<&Checkpoint>,
    watch: &(dyn Fn(usize, &Checkpoint) -> ControlFlow<()> + Sync),
    rows: &Arc<Mutex<Vec<[u32; 3]>>>,
) -> Outcome {
    prepared.train_tampered(3, resume, watch, &|comm, step| {
        let (rank, rows) = (comm.rank().0, Arc::clone(rows));
        on(rank, comm, step, move |_, x| {
            rows.lock().unwrap().extend(x.as_chunks::<3>().0.iter().map(|row| row.map(f32::to_bits)));
            if rank == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            Pass::Good
        })
    })
}

#[test]
fn a_stop_in_mid_epoch_leaves_no_row_out_and_repeats_none() {
    let files = &[700, 0, 300];
    for mode in ["{ mode: async }", "{ mode: async, servers: 2 }", "{ mode: bounded, staleness: 2 }", "{}"] {
        let (_world, prepared) = prepared(mode, "epochs: 1, checkpoint_steps: 7", files);
        let whole = Arc::default();
        let undisturbed = train_noting(&prepared, None, &go_on, &whole);
        let whole = sorted(&whole);
        assert_eq!(whole.len(), 1000);
        // At each checkpoint, then a resumed run goes on from where all met.
        for after in [0, 2, 5] {
            let rows = Arc::default();
            let stop = |number: usize, _: &Checkpoint| {
                if number == after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            let stopped = train_noting(&prepared, None, &stop, &rows);
            let case = format!("{mode}, stopped after checkpoint {after}");
            assert!(stopped.errors().iter().all(|error| matches!(error, LearnError::Interrupted)), "{case}");
            let last = stopped.checkpoints.last().unwrap();
            let asked = stopped.checkpoints[after].step;
            assert!(last.step > asked && last.step <= asked + 17, "{case}: {} after {asked}", last.step);
            assert!(last.moments.iter().all(|moment| moment.len() == last.parameters.len()), "{case}");
            let resumed = train_noting(&prepared, Some(last), &go_on, &rows);
            assert_eq!(sorted(&rows), whole, "{case}");
            assert_eq!(resumed.trained().history[0].rows, 1000, "{case}");
            let (got, expected) = (last_loss(&resumed), last_loss(&undisturbed));
            assert!((got - expected).abs() < 0.05 * expected, "{case}: {got}, not {expected}");
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_named_by_all_and_not_applied() {
    for mode in MODES {
        let (_world, prepared) = prepared(mode, "epochs: 3", &[300]);
        for culprit in [0, 2] {
            let outcome = prepared.train_tampered(3, None, &go_on, &|comm, step| {
                on(culprit, comm, step, |pass, _| if pass == 5 { Pass::NotFinite } else { Pass::Good })
            });
            let mut places = Vec::new();
            for (rank, error) in outcome.errors().into_iter().enumerate() {
                let LearnError::NotFinite { rank: named, epoch, step, blame } = error else {
                    panic!("{mode}: {error}")
                };
                assert_eq!(*named, Rank(culprit), "{mode}");
                assert_eq!(blame.is_empty(), rank as u32 != culprit, "{mode}: only the culprit has the rows");
                places.push((*epoch, *step));
            }
            assert!(places.iter().all(|place| *place == places[0]) && places[0].1 >= 6, "{mode}: {places:?}");
            assert!(outcome.checkpoints.is_empty(), "{mode}");
        }
    }
}

/// Trains with three executors; in the second epoch rank `dead` dies. Then all from the last checkpoint.
fn check_death(mode: &str, dead: u32) {
    let (_world, prepared) = prepared(mode, "epochs: 3", &[300, 0, 40]);
    let case = format!("{mode}, rank {dead} dies");
    let server: Mutex<Option<AbortHandle>> = Mutex::default();
    let steps = prepared.partitions.train_rows().div_ceil(16);
    let outcome = prepared.train_tampered(3, None, &go_on, &|comm, step| {
        if comm.rank() == Rank(dead) && dead >= 3 {
            *server.lock().unwrap() = Some(comm.abort_handle());
        }
        let killer = if dead < 3 { dead } else { 1 };
        let handle = Arc::new(Mutex::new(None));
        // A server dies while it waits for messages.
        if comm.rank() == Rank(killer) && dead >= 3 {
            while server.lock().unwrap().is_none() {
                thread::yield_now();
            }
            handle.lock().unwrap().clone_from(&server.lock().unwrap());
        }
        on(killer, comm, step, move |pass, _| match (pass == steps + 3, &*handle.lock().unwrap()) {
            (true, None) => Pass::Fails,
            (true, Some(server)) => {
                server.abort();
                Pass::Good
            }
            (false, _) => Pass::Good,
        })
    });
    for (rank, error) in outcome.errors().into_iter().enumerate() {
        let names = matches!(error, LearnError::Comm(CommError::Gone { rank, .. }) if *rank == Rank(dead));
        assert_eq!(names, rank as u32 != dead, "{case}: rank {rank}: {error}");
    }
    let [last] = &outcome.checkpoints[..] else { panic!("{case}: that of the first epoch") };
    assert_eq!((last.epoch, last.step), (1, 0));
    let resumed = prepared.train_watched(3, Some(last), &go_on);
    let history = &resumed.trained().history;
    assert_eq!(history.iter().map(|epoch| epoch.rows).collect::<Vec<_>>(), [340; 3], "{case}");
    assert_eq!(history[0].loss.to_bits(), last.history[0].loss.to_bits(), "{case}: goes on, does not start over");
    assert!(history[2].loss < history[0].loss, "{case}");
}

#[test]
fn a_worker_or_server_that_dies_is_named_and_nothing_beyond_the_checkpoint_is_lost() {
    for mode in MODES {
        let servers = if mode.contains("servers: 3") { 3 } else { 1 };
        for dead in [0, 2, 2 + servers] {
            check_death(mode, dead);
        }
    }
}
