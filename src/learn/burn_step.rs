//! The training step on Burn: CPU (flex), wgpu or CUDA, chosen at run time.
//!
//! ```text
//!   x [rows, features] ─▶ h = f(h Wᵀ + b) per layer ─▶ z ─▶ per-row loss [rows, 1] ─▶ sum ─▶ backward
//! ```
//!
//! Weights are kept `[outputs, inputs]`, as in the flat buffers; the matrix product takes the
//! transposed view, which costs no copy. On the CPU, Burn runs on the calling thread's rayon
//! pool: whoever makes the replica decides how many threads it has, by calling from within
//! `ThreadPool::install`. One single-thread replica per core is the fastest.

use burn::tensor::{Device, Gradients, Tensor, TensorData, activation};

use super::{
    LearnError, NetShape, Step, device,
    shape::{Linear, Weight},
};
use crate::pipeline::spec::{Activation, DeviceKind, Loss};

/// A replica on a device, with parameters drawn from `seed` (the same on every rank). `index`
/// is the device's number where there are several.
pub fn burn_step(
    shape: &NetShape,
    loss: Loss,
    device: DeviceKind,
    index: usize,
    seed: u64,
) -> Result<Box<dyn Step>, LearnError> {
    let device = device::open(device, index)?;
    let mut step = BurnStep {
        shape: shape.clone(),
        loss,
        device,
        layers: shape.layers(),
        parameters: vec![0.0; shape.parameters()],
        plain: Vec::new(),
        tracked: Vec::new(),
    };
    step.write_parameters(&shape.initial_parameters(seed));
    Ok(Box::new(step))
}

struct BurnStep {
    shape: NetShape,
    loss: Loss,
    device: Device,
    layers: Vec<Linear>,
    /// What the device holds, so that reading never waits for it.
    parameters: Vec<f32>,
    /// By layer.
    plain: Vec<Variables>,
    /// The same numbers, as leaves of the gradient graph.
    tracked: Vec<Variables>,
}

/// A layer's tensors.
struct Variables {
    /// `[outputs, inputs]`; none where it is tied to another layer's.
    weight: Option<Tensor<2>>,
    /// `[1, outputs]`.
    bias: Tensor<2>,
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
        let upload = |numbers: &[f32], shape: [usize; 2]| {
            Tensor::<2>::from_data(TensorData::new(numbers.to_vec(), shape), &self.device)
        };
        let variables = |layer: &Linear| Variables {
            weight: match &layer.weight {
                Weight::Own(range) => Some(upload(&parameters[range.clone()], [layer.outputs, layer.inputs])),
                Weight::Tied(_) => None,
            },
            bias: upload(&parameters[layer.bias.clone()], [1, layer.outputs]),
        };
        self.plain = self.layers.iter().map(variables).collect();
        self.tracked = self.plain.iter().map(Variables::track).collect();
    }

    fn gradients(&mut self, x: &[f32], rows: usize, gradients: &mut [f32]) -> Result<f64, LearnError> {
        if rows == 0 {
            gradients.fill(0.0);
            return Ok(0.0);
        }
        let x = self.upload(x, rows).autodiff();
        let output = self.decode(self.encoder(x.clone(), &self.tracked), &self.tracked);
        let losses = self.losses(output, x);
        let mut found = losses.clone().sum().backward();
        for (layer, variables) in self.layers.iter().zip(&self.tracked) {
            if let (Weight::Own(range), Some(weight)) = (&layer.weight, &variables.weight) {
                take_gradient(weight, &mut found, &mut gradients[range.clone()])?;
            }
            take_gradient(&variables.bias, &mut found, &mut gradients[layer.bias.clone()])?;
        }
        total(losses.inner())
    }

    fn loss(&mut self, x: &[f32], rows: usize) -> Result<f64, LearnError> {
        if rows == 0 {
            return Ok(0.0);
        }
        let x = self.upload(x, rows);
        let output = self.decode(self.encoder(x.clone(), &self.plain), &self.plain);
        total(self.losses(output, x))
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
        let x = self.upload(x, rows);
        let latent = self.encoder(x.clone(), &self.plain);
        if let Some(errors) = errors {
            let output = self.decode(latent.clone(), &self.plain);
            errors.extend(download(self.losses(output, x))?);
        }
        embeddings.extend(download(latent)?);
        Ok(())
    }
}

impl BurnStep {
    fn upload(&self, x: &[f32], rows: usize) -> Tensor<2> {
        Tensor::from_data(TensorData::new(x.to_vec(), [rows, self.shape.features]), &self.device)
    }

    /// `[rows, features]` to `[rows, latent]`.
    fn encoder(&self, x: Tensor<2>, variables: &[Variables]) -> Tensor<2> {
        let depth = self.layers.len() / 2;
        let net = &self.shape.net;
        (0..depth).fold(x, |h, layer| {
            let f = if layer + 1 == depth { net.latent_activation } else { net.activation };
            activate(f, self.linear(layer, h, variables))
        })
    }

    /// `[rows, latent]` to `[rows, features]`: the reconstruction, or its logits where the loss
    /// takes those.
    fn decode(&self, latent: Tensor<2>, variables: &[Variables]) -> Tensor<2> {
        let net = &self.shape.net;
        let output = match self.loss {
            Loss::Mse => net.output_activation,
            // Cross-entropy comes with a sigmoid, which the loss folds in.
            Loss::BinaryCrossEntropy => Activation::Identity,
        };
        (self.layers.len() / 2..self.layers.len()).fold(latent, |h, layer| {
            let f = if layer + 1 == self.layers.len() { output } else { net.activation };
            activate(f, self.linear(layer, h, variables))
        })
    }

    fn linear(&self, layer: usize, h: Tensor<2>, variables: &[Variables]) -> Tensor<2> {
        let bias = variables[layer].bias.clone();
        let weight = match self.layers[layer].weight {
            Weight::Own(_) => variables[layer].weight.clone().map(Tensor::transpose),
            Weight::Tied(other) => variables[other].weight.clone(),
        };
        match weight {
            Some(weight) => h.matmul(weight) + bias,
            // A layer has its own weight or is tied to one that has.
            None => bias,
        }
    }

    /// Each row's loss, mean over features: `[rows, 1]`.
    fn losses(&self, output: Tensor<2>, x: Tensor<2>) -> Tensor<2> {
        let losses = match self.loss {
            Loss::Mse => {
                let difference = output - x;
                difference.clone() * difference
            }
            // -x ln σ(z) - (1 - x) ln(1 - σ(z)), with no exponential of a large number and no
            // logarithm of a small one.
            Loss::BinaryCrossEntropy => (1.0 - x) * output.clone() - activation::log_sigmoid(output),
        };
        losses.mean_dim(1)
    }
}

impl Variables {
    fn track(&self) -> Self {
        let leaf = |tensor: &Tensor<2>| tensor.clone().autodiff().require_grad();
        Self { weight: self.weight.as_ref().map(leaf), bias: leaf(&self.bias) }
    }
}

fn activate(function: Activation, z: Tensor<2>) -> Tensor<2> {
    match function {
        Activation::Relu => activation::relu(z),
        Activation::LeakyRelu => activation::leaky_relu(z, 0.01),
        Activation::Gelu => activation::gelu(z),
        Activation::Tanh => activation::tanh(z),
        Activation::Sigmoid => activation::sigmoid(z),
        Activation::Identity => z,
    }
}

fn take_gradient(variable: &Tensor<2>, found: &mut Gradients, out: &mut [f32]) -> Result<(), LearnError> {
    match variable.grad_remove(found) {
        Some(gradient) => out.copy_from_slice(&download(gradient)?),
        None => out.fill(0.0),
    }
    Ok(())
}

fn download(tensor: Tensor<2>) -> Result<Vec<f32>, LearnError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| LearnError::Device { source: Box::new(error) })
}

/// The sum of all numbers, in f64: a sum over many rows in f32 would lose digits.
fn total(losses: Tensor<2>) -> Result<f64, LearnError> {
    Ok(download(losses)?.into_iter().map(f64::from).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::shape::tests::shape;

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
