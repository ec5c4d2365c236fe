//! What a step costs: a model of a fleet's speed from what a short trial measured. Pure functions.
//!
//! ```text
//!   step = compute + wait + exchange + update
//!     compute   the largest share of the rows; on a host that executors share, its cores' shares
//!     wait      the account that all ranks exchange, and the slowest rank's jitter
//!     exchange  by strategy: messages x latency + bytes on one rank's wire x time per byte
//! ```
//!
//! Ring and direct exchange as `learn::tcp` does them (Patarasuk and Yuan 2009); the expected
//! greatest of n normal deviates as Blom (1958) approximates it.

use serde::{Deserialize, Serialize};

use crate::{
    data, limits,
    pipeline::spec::{Compression, ServerMode, SyncStrategy},
};

/// A step of a trial, means over its steps; seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Executors that took part.
    pub executors: u32,
    /// Rows of a step, over all executors.
    pub rows: f64,
    /// The whole step.
    pub step_s: f64,
    /// Forward and backward, mean over executors.
    pub compute_s: f64,
    /// Waiting for rows.
    pub feed_s: f64,
    /// Waiting for other executors, their accounts included.
    pub wait_s: f64,
    /// Exchanging gradients.
    pub communicate_s: f64,
    /// Updating parameters.
    pub update_s: f64,
    /// A barrier.
    pub barrier_s: f64,
}

impl Measured {
    /// Rows per second.
    pub fn rows_per_s(&self) -> f64 {
        self.rows / self.step_s.max(f64::MIN_POSITIVE)
    }
}

/// What the model is made of; seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Constants {
    /// A step's forward and backward, whatever its rows.
    pub step_s: f64,
    /// A row's forward and backward on all cores of a host, its way through the feed included.
    pub row_s: f64,
    /// How a row takes longer on fewer cores: its time grows by this power of the cores given up; 1
    /// where cores share a row's work perfectly, 0 where further ones do nothing.
    pub cores_power: f64,
    /// Updating all parameters.
    pub update_s: f64,
    /// A message between executors, until it is there.
    pub latency_s: f64,
    /// A byte on an executor's wire.
    pub byte_s: f64,
    /// Standard deviation of an executor's step.
    pub jitter_s: f64,
}

/// What is trained, and where.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Rows of a step.
    pub batch: usize,
    /// Numbers that are exchanged.
    pub parameters: usize,
    /// Numbers that the optimizer keeps of each parameter.
    pub moments: usize,
    /// Rows of each partition.
    pub partitions: Vec<u64>,
    /// Cores of a host.
    pub cores: u32,
    /// Whether all executors share one host; else each has its own.
    pub one_host: bool,
}

/// A way to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    /// Executors.
    pub executors: u32,
    /// How they keep one model.
    pub sync: SyncStrategy,
    /// How gradients travel.
    pub compression: Compression,
}

/// A step as the model has it; seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Forward and backward.
    pub compute: f64,
    /// Waiting for others.
    pub wait: f64,
    /// Exchanging gradients or parameters.
    pub communicate: f64,
    /// Updating parameters.
    pub update: f64,
}

impl Predicted {
    /// The whole step.
    pub fn step_s(&self) -> f64 {
        self.compute + self.wait + self.communicate + self.update
    }
}

impl Constants {
    /// From trials: of one executor, of one with half the rows, and of two, where two can be.
    pub fn new(whole: &Measured, half: &Measured, pair: Option<&Measured>, setting: &Setting) -> Self {
        let busy = |measured: &Measured| measured.compute_s + measured.feed_s;
        let more = f64::max(whole.rows - half.rows, 1.0);
        let row_s = ((busy(whole) - busy(half)) / more).clamp(0.0, busy(whole) / whole.rows.max(1.0));
        let step_s = f64::max(busy(whole) - row_s * whole.rows, 0.0);
        let alone = Self { step_s, row_s, cores_power: 1.0, update_s: whole.update_s, ..Self::default() };
        let Some(pair) = pair else { return alone };
        let share = pair.rows * setting.share(2);
        let crowd = if setting.one_host { f64::max(1.0, 2.0 / f64::from(setting.cores)) } else { 1.0 };
        let pair_row_s = (busy(pair) / crowd - step_s).max(0.0) / share.max(1.0);
        let cores_power = if setting.one_host && setting.cores > 1 && row_s > 0.0 {
            (pair_row_s / row_s).max(f64::MIN_POSITIVE).log2().clamp(0.0, 2.0)
        } else {
            1.0
        };
        let latency_s = pair.barrier_s;
        let bucket = setting.parameters * size_of::<f32>();
        let (messages, on_wire) = all_reduce(2, bucket as f64);
        let byte_s = (pair.communicate_s - messages * latency_s).max(0.0) / crowd / on_wire;
        let jitter_s = (pair.wait_s - latency_s).max(0.0) / greatest_of(2);
        Self { cores_power, latency_s, byte_s, jitter_s, ..alone }
    }

    /// A step of one way to train.
    pub fn predict(&self, setting: &Setting, way: &Way) -> Predicted {
        let executors = way.executors.max(1);
        let n = f64::from(executors);
        let cores = f64::from(setting.cores.max(1));
        // Executors of a host beyond its cores take turns at what is work; while one waits, another works.
        let (crowd, per_row_s) = if setting.one_host {
            let own = f64::max(1.0, (cores / n).floor());
            (f64::max(1.0, n / cores), self.row_s * (cores / own).powf(self.cores_power))
        } else {
            (1.0, self.row_s)
        };
        let own_rows = (setting.batch as f64 * setting.share(executors)).max(1.0);
        let compute_s = crowd * (self.step_s + own_rows * per_row_s);
        let update_s = crowd * self.update_s;
        if executors == 1 {
            return Predicted { compute: compute_s, update: update_s, ..Predicted::default() };
        }
        let wire = if way.compression == Compression::Bf16 { 0.5 } else { 1.0 };
        let bytes = (setting.parameters * size_of::<f32>()) as f64;
        let exchange = |bytes: f64| {
            let (messages, on_wire) = all_reduce(executors, bytes);
            messages * self.latency_s + crowd * on_wire * self.byte_s
        };
        let accounts = exchange(8.0 * (4.0 + n));
        let wait_s = accounts + self.jitter_s * greatest_of(executors);
        match way.sync {
            SyncStrategy::AllReduce { batches } => {
                let often = 1.0 / f64::from(batches.max(1));
                let communicate_s = often * exchange(wire * bytes);
                Predicted {
                    compute: compute_s,
                    wait: often * wait_s,
                    communicate: communicate_s,
                    update: often * update_s,
                }
            }
            SyncStrategy::Sharded {} => {
                // The gradients' half of the exchange may be shorter, that of the parameters not.
                let communicate_s = exchange(f64::midpoint(wire * bytes, bytes));
                Predicted { compute: compute_s, wait: wait_s, communicate: communicate_s, update: update_s / n }
            }
            SyncStrategy::LocalSgd { steps, .. } => {
                let often = 1.0 / f64::from(steps.max(1));
                let buckets = 1.0 + setting.moments as f64;
                let communicate_s = often * buckets * exchange(wire * bytes);
                Predicted { compute: compute_s, wait: often * wait_s, communicate: communicate_s, update: update_s }
            }
            SyncStrategy::ParameterServer { servers, mode, .. } => {
                let round_trip = 2.0 * self.latency_s + crowd * 2.0 * bytes * self.byte_s;
                // A server's wire carries all workers' numbers.
                let served = crowd * n * 2.0 * bytes * self.byte_s / f64::from(servers.max(1));
                let update_s = update_s / f64::from(servers.max(1));
                if mode == ServerMode::Sync {
                    let communicate_s = f64::max(round_trip, 2.0 * self.latency_s + served);
                    return Predicted {
                        compute: compute_s,
                        wait: wait_s,
                        communicate: communicate_s,
                        update: update_s,
                    };
                }
                let busiest = served + n * update_s;
                let communicate_s = f64::max(round_trip, busiest - compute_s);
                Predicted { compute: compute_s, wait: 0.0, communicate: communicate_s, update: 0.0 }
            }
        }
    }

    /// Rows per second of one way to train.
    pub fn rows_per_s(&self, setting: &Setting, way: &Way) -> f64 {
        setting.batch as f64 / self.predict(setting, way).step_s().max(f64::MIN_POSITIVE)
    }
}

impl Setting {
    fn share(&self, executors: u32) -> f64 {
        share(&self.partitions, executors)
    }
}

/// The fullest executor's part of the rows. Where there are more executors than partitions, the
/// rows are taken to be dealt to as many partitions, as skewed as these.
pub fn share(partitions: &[u64], executors: u32) -> f64 {
    let total: u64 = partitions.iter().sum();
    if total == 0 || executors as usize >= partitions.len() {
        let fullest = partitions.iter().copied().max().unwrap_or(0);
        let skew = fullest as f64 * partitions.len() as f64 / total.max(1) as f64;
        return (skew.max(1.0) / f64::from(executors.max(1))).min(1.0);
    }
    let mut loads = vec![0; executors.max(1) as usize];
    let owners = data::balance(partitions, loads.len());
    owners.into_iter().zip(partitions).for_each(|(owner, rows)| loads[owner] += rows);
    loads.into_iter().max().unwrap_or(0) as f64 / total as f64
}

/// Messages one after the other, and bytes on a rank's wire, of an all-reduce.
fn all_reduce(executors: u32, bytes: f64) -> (f64, f64) {
    let others = f64::from(executors) - 1.0;
    if bytes <= limits::DIRECT_BYTES as f64 {
        (1.0, others * bytes)
    } else {
        (2.0 * others, 2.0 * others / (others + 1.0) * bytes)
    }
}

/// The expected greatest of so many standard normal deviates.
fn greatest_of(count: u32) -> f64 {
    let count = f64::from(count.max(2));
    let tail = 1.0 - (count - 0.375) / (count + 0.25);
    // The quantile, right to 0.0005 (Abramowitz and Stegun 26.2.23).
    let t = (-2.0 * tail.ln()).sqrt();
    let above = (0.010_328 * t + 0.802_853).mul_add(t, 2.515_517);
    let below = ((0.001_308 * t + 0.189_269).mul_add(t, 1.432_788)).mul_add(t, 1.0);
    t - above / below
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(one_host: bool) -> Setting {
        Setting { batch: 800, parameters: 1_000_000, moments: 2, partitions: vec![100; 8], cores: 2, one_host }
    }

    fn way(executors: u32, sync: SyncStrategy) -> Way {
        Way { executors, sync, compression: Compression::None }
    }

    fn constants() -> Constants {
        Constants {
            step_s: 1e-3,
            row_s: 1e-5,
            cores_power: 0.5,
            update_s: 5e-4,
            latency_s: 5e-5,
            byte_s: 1e-9,
            jitter_s: 1e-4,
        }
    }

    /// What a trial of the modelled fleet would measure.
    fn measured(setting: &Setting, executors: u32) -> Measured {
        let predicted = constants().predict(setting, &way(executors, SyncStrategy::default()));
        Measured {
            executors,
            rows: setting.batch as f64,
            step_s: predicted.step_s(),
            compute_s: predicted.compute,
            feed_s: 0.0,
            wait_s: predicted.wait,
            communicate_s: predicted.communicate,
            update_s: predicted.update,
            barrier_s: constants().latency_s,
        }
    }

    #[test]
    fn constants_come_back_from_what_they_predict() {
        for one_host in [true, false] {
            let setting = setting(one_host);
            let half = Setting { batch: 400, ..setting.clone() };
            let (whole, half, pair) = (measured(&setting, 1), measured(&half, 1), measured(&setting, 2));
            let found = Constants::new(&whole, &half, Some(&pair), &setting);
            let expected = constants();
            let near = |got: f64, expected: f64| (got - expected).abs() <= 1e-3 * expected;
            assert!(near(found.step_s, expected.step_s) && near(found.row_s, expected.row_s), "{found:?}");
            assert!(near(found.byte_s, expected.byte_s) && near(found.latency_s, expected.latency_s), "{found:?}");
            assert!((found.jitter_s / expected.jitter_s - 1.0).abs() < 0.01, "{found:?}");
            assert!(!one_host || near(found.cores_power, expected.cores_power), "{found:?}");
        }
    }

    #[test]
    fn more_hosts_help_until_the_exchange_costs_more() {
        let (setting, constants) = (setting(false), constants());
        let speed = |executors, sync| constants.rows_per_s(&setting, &way(executors, sync));
        let plain = SyncStrategy::default();
        assert!(speed(1, plain) > speed(2, plain), "8 MB take longer than 400 rows");
        let local = SyncStrategy::LocalSgd { steps: 8, outer_momentum: 0.0, outer_learning_rate: 1.0 };
        assert!(speed(2, local) > speed(1, plain));
        assert!(speed(10_000, plain) < speed(100, plain), "a ring of 10,000 has 20,000 latencies");
    }

    #[test]
    fn the_fullest_executor_holds_the_others_up() {
        let setting = Setting { partitions: vec![700, 100, 100, 100], ..setting(false) };
        assert_eq!([1, 2, 4].map(|executors| setting.share(executors)), [1.0, 0.7, 0.7]);
        assert!(setting.share(100) < 0.03);
    }

    #[test]
    fn the_greatest_of_many() {
        for (count, expected) in [(2, 0.56), (4, 1.03), (100, 2.51), (10_000, 3.85)] {
            assert!((greatest_of(count) - expected).abs() < 0.05, "{count}: {}", greatest_of(count));
        }
    }
}
