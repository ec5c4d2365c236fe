//! Update rules and step-size schedules over flat buffers, with PyTorch's meaning.

use crate::pipeline::{Optimizer, TrainPlan, spec::Schedule};

/// Zeroed buffers that the rule keeps between updates.
pub(super) fn initial_moments(optimizer: Optimizer, parameters: usize) -> Vec<Vec<f32>> {
    vec![vec![0.0; parameters]; optimizer.moments()]
}

/// One update in place. `updates` counts those made before it.
pub(super) fn update(
    plan: &TrainPlan,
    learning_rate: f64,
    updates: u64,
    parameters: &mut [f32],
    gradients: &[f32],
    moments: &mut [Vec<f32>],
) {
    let decay = plan.weight_decay;
    match (plan.optimizer, moments) {
        (Optimizer::Sgd { momentum }, [velocity]) => {
            sgd_with_momentum(momentum as f32, learning_rate as f32, decay as f32, parameters, gradients, velocity);
        }
        (Optimizer::Sgd { .. }, _) => {
            let (learning_rate, decay) = (learning_rate as f32, decay as f32);
            for (p, &g) in parameters.iter_mut().zip(gradients) {
                *p -= learning_rate * (g + decay * *p);
            }
        }
        (Optimizer::Adam { betas, epsilon }, [first, second]) => {
            let adam = Adam::new(learning_rate, betas, epsilon, updates);
            adam.update(decay as f32, 1.0, parameters, gradients, first, second);
        }
        (Optimizer::Adamw { betas, epsilon }, [first, second]) => {
            let adam = Adam::new(learning_rate, betas, epsilon, updates);
            adam.update(0.0, (1.0 - learning_rate * decay) as f32, parameters, gradients, first, second);
        }
        // `initial_moments` gives these rules two buffers, and checkpoints are checked for it.
        (Optimizer::Adam { .. } | Optimizer::Adamw { .. }, _) => debug_assert!(false, "moments are missing"),
    }
}

/// Writes where `ahead` further updates would take the parameters if they went on as they do;
/// `updates` counts those made.
pub(super) fn predict(
    plan: &TrainPlan,
    learning_rate: f64,
    updates: u64,
    ahead: f64,
    parameters: &[f32],
    moments: &[Vec<f32>],
    predicted: &mut [f32],
) {
    predicted.copy_from_slice(parameters);
    match (plan.optimizer, moments) {
        (Optimizer::Sgd { momentum }, [velocity]) => {
            let step_size = (learning_rate * momentum * ahead) as f32;
            predicted.iter_mut().zip(velocity).for_each(|(p, v)| *p -= step_size * v);
        }
        (Optimizer::Adam { betas, epsilon } | Optimizer::Adamw { betas, epsilon }, [first, second]) if updates > 0 => {
            let Adam { step_size, root_correction2, epsilon, .. } =
                Adam::new(learning_rate * ahead, betas, epsilon, updates - 1);
            for ((p, m), v) in predicted.iter_mut().zip(first).zip(second) {
                *p -= step_size * m / (v.sqrt() / root_correction2 + epsilon);
            }
        }
        _ => {}
    }
}

fn sgd_with_momentum(
    momentum: f32,
    learning_rate: f32,
    decay: f32,
    parameters: &mut [f32],
    gradients: &[f32],
    velocity: &mut [f32],
) {
    for ((p, &g), v) in parameters.iter_mut().zip(gradients).zip(velocity) {
        *v = momentum * *v + (g + decay * *p);
        *p -= learning_rate * *v;
    }
}

/// Adam's constants of one update; bias corrections are taken in f64.
struct Adam {
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    step_size: f32,
    root_correction2: f32,
    epsilon: f32,
}

impl Adam {
    fn new(learning_rate: f64, [beta1, beta2]: [f64; 2], epsilon: f64, updates: u64) -> Self {
        let count = (updates + 1) as f64;
        Self {
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            step_size: (learning_rate / (1.0 - beta1.powf(count))) as f32,
            root_correction2: (1.0 - beta2.powf(count)).sqrt() as f32,
            epsilon: epsilon as f32,
        }
    }

    fn update(
        &self,
        decay: f32,
        shrink: f32,
        parameters: &mut [f32],
        gradients: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        for (((p, &g), m), v) in parameters.iter_mut().zip(gradients).zip(first).zip(second) {
            let g = g + decay * *p;
            *m = self.beta1 * *m + self.rest1 * g;
            *v = self.beta2 * *v + self.rest2 * g * g;
            *p = *p * shrink - self.step_size * *m / (v.sqrt() / self.root_correction2 + self.epsilon);
        }
    }
}

/// The step size of an update; `updates` counts those made before it.
pub(super) fn learning_rate(plan: &TrainPlan, updates: u64, steps_per_epoch: u64) -> f64 {
    let steps = steps_per_epoch.max(1);
    let factor = match plan.schedule {
        Schedule::Constant {} => 1.0,
        Schedule::Step { epochs, factor } => {
            let changes = updates / steps / u64::from(epochs.max(1));
            factor.powi(i32::try_from(changes).unwrap_or(i32::MAX))
        }
        Schedule::Cosine { warmup_epochs, floor } => {
            let warmup = u64::from(warmup_epochs) * steps;
            let last = (u64::from(plan.epochs) * steps).saturating_sub(1);
            if updates < warmup {
                (updates + 1) as f64 / warmup as f64
            } else {
                let way = (updates - warmup) as f64 / last.saturating_sub(warmup).max(1) as f64;
                floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * way.min(1.0)).cos())
            }
        }
    };
    plan.learning_rate * factor
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::pipeline::spec::{Compression, Keep, Loss, SyncStrategy};

    pub(in super::super) fn plan(optimizer: Optimizer) -> TrainPlan {
        TrainPlan {
            choose_sync: false,
            sync: SyncStrategy::default(),
            compression: Compression::None,
            epochs: 4,
            batch: 8,
            loss: Loss::Mse,
            optimizer,
            learning_rate: 0.1,
            weight_decay: 0.0,
            schedule: Schedule::Constant {},
            clip_norm: None,
            validation: 0.0,
            early_stopping: None,
            keep: Keep::Last,
            checkpoint_steps: None,
        }
    }

    /// PyTorch's formulas in f64, gradient `p` of the bowl p²/2, three updates.
    fn expected(plan: &TrainPlan, mut p: f64) -> f64 {
        let (lr, decay) = (plan.learning_rate, plan.weight_decay);
        let (mut m, mut v) = (0.0, 0.0);
        for t in 1..=3 {
            let mut g = p;
            match plan.optimizer {
                Optimizer::Sgd { momentum } => {
                    m = momentum * m + (g + decay * p);
                    p -= lr * m;
                }
                Optimizer::Adam { betas: [b1, b2], epsilon } | Optimizer::Adamw { betas: [b1, b2], epsilon } => {
                    if matches!(plan.optimizer, Optimizer::Adamw { .. }) {
                        p *= 1.0 - lr * decay;
                    } else {
                        g += decay * p;
                    }
                    m = b1 * m + (1.0 - b1) * g;
                    v = b2 * v + (1.0 - b2) * g * g;
                    let (m, v) = (m / (1.0 - b1.powi(t)), v / (1.0 - b2.powi(t)));
                    p -= lr * m / (v.sqrt() + epsilon);
                }
            }
        }
        p
    }

    #[test]
    fn updates_follow_the_formulas() {
        let betas = [0.9, 0.999];
        let check = |optimizer: Optimizer, weight_decay: f64| {
            let plan = TrainPlan { weight_decay, ..plan(optimizer) };
            let start = [1.0_f32, -2.0, 0.5];
            let mut parameters = start;
            let mut moments = initial_moments(optimizer, 3);
            for updates in 0..3 {
                let gradients = parameters;
                update(&plan, plan.learning_rate, updates, &mut parameters, &gradients, &mut moments);
            }
            for (p, p0) in parameters.iter().zip(start) {
                let expected = expected(&plan, f64::from(p0));
                assert!((f64::from(*p) - expected).abs() < 1e-6, "{optimizer:?} {weight_decay}: {p}, not {expected}");
            }
        };
        for decay in [0.0, 0.1] {
            check(Optimizer::Sgd { momentum: 0.0 }, decay);
            check(Optimizer::Sgd { momentum: 0.9 }, decay);
            check(Optimizer::Adam { betas, epsilon: 1e-8 }, decay);
            check(Optimizer::Adam { betas: [0.5, 0.9], epsilon: 0.1 }, decay);
            check(Optimizer::Adamw { betas, epsilon: 1e-8 }, decay);
        }
    }

    #[test]
    fn a_prediction_goes_on_along_the_moments() {
        let betas = [0.9, 0.999];
        for (optimizer, tolerance) in [
            (Optimizer::Sgd { momentum: 0.0 }, 1.0),
            (Optimizer::Sgd { momentum: 0.9 }, 0.02),
            (Optimizer::Adam { betas, epsilon: 1e-8 }, 1e-3),
            (Optimizer::Adamw { betas, epsilon: 1e-8 }, 1e-3),
        ] {
            let (plan, mut parameters) = (plan(optimizer), [1.0, -2.0]);
            let mut moments = initial_moments(optimizer, 2);
            let mut predicted = [0.0; 2];
            predict(&plan, 0.1, 0, 1.0, &parameters, &moments, &mut predicted);
            assert_eq!(predicted, parameters, "nothing is known yet");
            let gradients = [1.0, -0.5];
            for updates in 0..60 {
                update(&plan, 0.1, updates, &mut parameters, &gradients, &mut moments);
            }
            predict(&plan, 0.1, 60, 2.0, &parameters, &moments, &mut predicted);
            for updates in 60..62 {
                update(&plan, 0.1, updates, &mut parameters, &gradients, &mut moments);
            }
            for (predicted, found) in predicted.iter().zip(&parameters) {
                assert!((predicted - found).abs() < tolerance * found.abs(), "{optimizer:?}: {predicted}, {found}");
            }
        }
    }

    #[test]
    fn schedules_rise_and_fall() {
        let check = |schedule: Schedule, expected: &[(u64, f64)]| {
            let plan = TrainPlan { schedule, ..plan(Optimizer::Sgd { momentum: 0.0 }) };
            for &(updates, factor) in expected {
                let found = learning_rate(&plan, updates, 10);
                assert!((found - 0.1 * factor).abs() < 1e-12, "{schedule:?} at {updates}: {found}");
            }
        };
        check(Schedule::Constant {}, &[(0, 1.0), (39, 1.0)]);
        check(Schedule::Step { epochs: 2, factor: 0.5 }, &[(0, 1.0), (19, 1.0), (20, 0.5), (39, 0.5), (40, 0.25)]);
        check(Schedule::Cosine { warmup_epochs: 0, floor: 0.1 }, &[(0, 1.0), (39, 0.1), (40, 0.1)]);
        check(
            Schedule::Cosine { warmup_epochs: 1, floor: 0.0 },
            &[(0, 0.1), (9, 1.0), (10, 1.0), (39, 0.0), (10 + 29, 0.0)],
        );
        check(Schedule::Cosine { warmup_epochs: 9, floor: 0.0 }, &[(0, 1.0 / 90.0)]);
    }
}
