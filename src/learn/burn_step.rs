//! The training step of a whole network on one device.
//!
//! ```text
//!   x [rows, features] ─▶ h = f(h Wᵀ + b) per layer ─▶ z ─▶ per-row loss [rows, 1] ─▶ sum ─▶ backward
//! ```
//!
//! On the CPU, Burn runs on the calling thread's rayon pool: whoever makes the replica decides how
//! many threads it has, by calling from within `ThreadPool::install`. One single-thread replica per
//! core is the fastest.

use super::{
    LearnError, NetShape, Step,
    network::{Graph, Network, download, total},
};
use crate::pipeline::spec::{DeviceKind, Loss};

/// A replica on a device, with parameters drawn from `seed` (the same on every rank). `index`
/// is the device's number where there are several.
pub fn burn_step(
    shape: &NetShape,
    loss: Loss,
    device: DeviceKind,
    index: usize,
    seed: u64,
) -> Result<Box<dyn Step>, LearnError> {
    let network = Network::open(shape, loss, device, index, 0..shape.layers().len())?;
    let mut step = BurnStep { network, parameters: vec![0.0; shape.parameters()] };
    step.write_parameters(&shape.initial_parameters(seed));
    Ok(Box::new(step))
}

struct BurnStep {
    network: Network,
    /// What the device holds, so that reading never waits for it.
    parameters: Vec<f32>,
}

impl Step for BurnStep {
    fn parameters(&self) -> usize {
        self.parameters.len()
    }

    fn read_parameters(&self, out: &mut [f32]) {
        out.copy_from_slice(&self.parameters);
    }

    fn write_parameters(&mut self, parameters: &[f32]) {
        self.parameters.copy_from_slice(parameters);
        self.network.write(parameters);
    }

    fn gradients(&mut self, x: &[f32], rows: usize, gradients: &mut [f32]) -> Result<f64, LearnError> {
        if rows == 0 {
            gradients.fill(0.0);
            return Ok(0.0);
        }
        let (network, layers) = (&self.network, 0..self.network.layers().len());
        let x = network.upload(x, [rows, network.features()]).autodiff();
        let output = network.forward(layers.clone(), x.clone(), Graph::Tracked);
        let losses = network.losses(output, x);
        let mut found = losses.clone().sum().backward();
        network.take_gradients(layers, &mut found, |place, numbers| gradients[place].copy_from_slice(numbers))?;
        total(losses.inner())
    }

    fn loss(&mut self, x: &[f32], rows: usize) -> Result<f64, LearnError> {
        if rows == 0 {
            return Ok(0.0);
        }
        let network = &self.network;
        let x = network.upload(x, [rows, network.features()]);
        let output = network.forward(0..network.layers().len(), x.clone(), Graph::Plain);
        total(network.losses(output, x))
    }

    fn encode(
        &mut self,
        x: &[f32],
        rows: usize,
        embeddings: &mut Vec<f32>,
        errors: Option<&mut Vec<f32>>,
    ) -> Result<(), LearnError> {
        if rows == 0 {
            return Ok(());
        }
        let (network, depth) = (&self.network, self.network.depth());
        let x = network.upload(x, [rows, network.features()]);
        let latent = network.forward(0..depth, x.clone(), Graph::Plain);
        if let Some(errors) = errors {
            let output = network.forward(depth..network.layers().len(), latent.clone(), Graph::Plain);
            errors.extend(download(network.losses(output, x))?);
        }
        embeddings.extend(download(latent)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        learn::shape::{Weight, tests::shape},
        pipeline::spec::Activation,
    };

    /// The network in f64, by the book.
    struct Reference {
        shape: NetShape,
        loss: Loss,
        parameters: Vec<f64>,
    }

    impl Reference {
        fn activate(f: Activation, z: f64) -> f64 {
            match f {
                Activation::Relu => z.max(0.0),
                Activation::LeakyRelu => {
                    if z > 0.0 {
                        z
                    } else {
                        0.01 * z
                    }
                }
                Activation::Tanh => z.tanh(),
                Activation::Sigmoid => 1.0 / (1.0 + (-z).exp()),
                Activation::Identity => z,
                Activation::Gelu => {
                    // Φ by Simpson's rule; the standard library has no erf.
                    let steps = 2000;
                    let width = z / f64::from(steps);
                    let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
                    let sum: f64 = (0..steps)
                        .map(|i| f64::from(i) * width)
                        .map(|t| (density(t) + 4.0 * density(t + width / 2.0) + density(t + width)) * width / 6.0)
                        .sum();
                    z * (0.5 + sum)
                }
            }
        }

        /// Embedding and loss of one row.
        fn row(&self, x: &[f64]) -> (Vec<f64>, f64) {
            let layers = self.shape.layers();
            let depth = layers.len() / 2;
            let net = &self.shape.net;
            let mut h = x.to_vec();
            let mut latent = Vec::new();
            for (index, layer) in layers.iter().enumerate() {
                let weight = |o: usize, i: usize| match &layer.weight {
                    Weight::Own(range) => self.parameters[range.start + o * layer.inputs + i],
                    Weight::Tied(other) => match &layers[*other].weight {
                        Weight::Own(range) => self.parameters[range.start + i * layer.outputs + o],
                        Weight::Tied(_) => unreachable!(),
                    },
                };
                let f = if index + 1 == depth {
                    net.latent_activation
                } else if index + 1 == layers.len() {
                    net.output_activation
                } else {
                    net.activation
                };
                h = (0..layer.outputs)
                    .map(|o| {
                        let sum: f64 = (0..layer.inputs).map(|i| weight(o, i) * h[i]).sum();
                        Self::activate(f, sum + self.parameters[layer.bias.start + o])
                    })
                    .collect();
                if index + 1 == depth {
                    latent.clone_from(&h);
                }
            }
            let loss: f64 = match self.loss {
                Loss::Mse => x.iter().zip(&h).map(|(x, y)| (x - y).powi(2)).sum(),
                Loss::BinaryCrossEntropy => {
                    x.iter().zip(&h).map(|(x, y)| -x * y.ln() - (1.0 - x) * (1.0 - y).ln()).sum()
                }
            };
            (latent, loss / x.len() as f64)
        }

        fn loss(&self, x: &[f32]) -> f64 {
            let rows = x.chunks_exact(self.shape.features);
            rows.map(|row| self.row(&row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>()).1).sum()
        }
    }

    fn rows(count: usize, features: usize) -> Vec<f32> {
        (0..count * features).map(|i| (((i * 37 + 11) % 101) as f32 / 101.0).powi(2)).collect()
    }

    #[test]
    fn forward_and_backward_agree_with_the_book() {
        use Activation::{Gelu, Identity, LeakyRelu, Relu, Sigmoid, Tanh};
        let check = |activation: Activation, latent: Activation, output: Activation, loss: Loss, tied: bool| {
            let mut shape = shape(6, &[5], 3, tied);
            shape.net.activation = activation;
            shape.net.latent_activation = latent;
            shape.net.output_activation = output;
            let case = format!("{activation:?} {latent:?} {output:?} {loss:?} {tied}");
            let mut step = burn_step(&shape, loss, DeviceKind::Cpu, 0, 7).unwrap();
            let count = step.parameters();
            let (mut parameters, mut gradients) = (vec![0.0; count], vec![0.0; count]);
            step.read_parameters(&mut parameters);
            let x = rows(4, 6);
            let mut reference =
                Reference { shape, loss, parameters: parameters.iter().map(|p| f64::from(*p)).collect() };

            let found = step.gradients(&x, 4, &mut gradients).unwrap();
            let expected = reference.loss(&x);
            assert!((found - expected).abs() < 1e-5 * expected, "{case}: {found}, not {expected}");
            assert!((step.loss(&x, 4).unwrap() - found).abs() < 1e-6, "{case}");

            for (index, gradient) in gradients.iter().enumerate() {
                let middle = reference.parameters[index];
                let mut side = |shift: f64| {
                    reference.parameters[index] = middle + shift;
                    reference.loss(&x)
                };
                let expected = (side(1e-6) - side(-1e-6)) / 2e-6;
                reference.parameters[index] = middle;
                let found = f64::from(*gradient);
                assert!((found - expected).abs() < 1e-4, "{case}: gradient {index} is {found}, not {expected}");
            }

            let (mut embeddings, mut errors) = (vec![9.0], vec![9.0]);
            step.encode(&x, 4, &mut embeddings, Some(&mut errors)).unwrap();
            assert_eq!((embeddings.len(), errors.len()), (1 + 4 * 3, 1 + 4), "{case}");
            for (row, x) in x.chunks_exact(6).enumerate() {
                let (latent, loss) = reference.row(&x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
                assert!((f64::from(errors[1 + row]) - loss).abs() < 1e-5, "{case}");
                for (found, expected) in embeddings[1 + row * 3..].iter().zip(&latent) {
                    assert!((f64::from(*found) - expected).abs() < 1e-5, "{case}");
                }
            }
        };
        let (mse, cross_entropy) = (Loss::Mse, Loss::BinaryCrossEntropy);
        for tied in [false, true] {
            check(Relu, Identity, Identity, mse, tied);
            check(Tanh, Sigmoid, Identity, mse, tied);
            check(Sigmoid, Relu, Sigmoid, cross_entropy, tied);
        }
        check(LeakyRelu, Tanh, Sigmoid, mse, false);
        check(Gelu, Identity, Sigmoid, cross_entropy, false);
    }

    #[test]
    fn no_rows_have_no_loss_and_no_gradient() {
        let mut step = burn_step(&shape(6, &[5], 3, false), Loss::Mse, DeviceKind::Cpu, 0, 7).unwrap();
        let mut gradients = vec![1.0; step.parameters()];
        assert_eq!(step.gradients(&[], 0, &mut gradients).unwrap(), 0.0);
        assert!(gradients.iter().all(|g| *g == 0.0));
        let mut embeddings = Vec::new();
        step.encode(&[], 0, &mut embeddings, None).unwrap();
        assert!(embeddings.is_empty());
    }

    #[test]
    fn cross_entropy_of_large_logits_stays_finite() {
        let mut shape = shape(2, &[], 1, false);
        shape.net.output_activation = Activation::Sigmoid;
        let mut step = burn_step(&shape, Loss::BinaryCrossEntropy, DeviceKind::Cpu, 0, 7).unwrap();
        let mut gradients = vec![0.0; step.parameters()];
        // Encoder [1, 2] and its bias, decoder [2, 1] and its bias: logits of ±1000.
        step.write_parameters(&[0.0, 0.0, 0.0, 0.0, 0.0, 1000.0, -1000.0]);
        let loss = step.gradients(&[0.0, 1.0], 1, &mut gradients).unwrap();
        assert_eq!(loss, 1000.0);
        assert!(gradients.iter().all(|g| g.is_finite()));
        assert_eq!(step.gradients(&[1.0, 0.0], 1, &mut gradients).unwrap(), 0.0);
    }
}
