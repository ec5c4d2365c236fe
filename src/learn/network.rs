//! Layers on a device, forward and backward, on Burn: CPU (flex), wgpu or CUDA.
//!
//! Weights are kept `[outputs, inputs]`, as in the flat buffers; the matrix product takes the
//! transposed view, which costs no copy.

use std::ops::Range;

use burn::tensor::{Device, Gradients, Tensor, TensorData, activation};

use super::{
    LearnError, NetShape, device,
    shape::{Linear, Weight},
};
use crate::pipeline::spec::{Activation, DeviceKind, Loss};

/// Consecutive layers of a network.
pub(super) struct Network {
    shape: NetShape,
    loss: Loss,
    device: Device,
    /// Of the whole network.
    layers: Vec<Linear>,
    /// Those that are held here.
    own: Range<usize>,
    /// Tensors of own layers.
    plain: Vec<Variables>,
    /// The same numbers, as leaves of the gradient graph.
    tracked: Vec<Variables>,
}

/// Whether gradients will be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Graph {
    Plain,
    Tracked,
}

impl Graph {
    /// A tensor that takes part without a gradient of its own.
    pub fn constant(self, tensor: Tensor<2>) -> Tensor<2> {
        if self == Self::Tracked { tensor.autodiff() } else { tensor }
    }
}

/// A layer's tensors.
struct Variables {
    /// `[outputs, inputs]`; none where it is tied to another layer's.
    weight: Option<Tensor<2>>,
    /// `[1, outputs]`.
    bias: Tensor<2>,
}

impl Network {
    /// The layers `own` of a network; without numbers until `write`.
    pub fn open(
        shape: &NetShape,
        loss: Loss,
        kind: DeviceKind,
        index: usize,
        own: Range<usize>,
    ) -> Result<Self, LearnError> {
        let (device, layers) = (device::open(kind, index)?, shape.layers());
        Ok(Self { shape: shape.clone(), loss, device, layers, own, plain: Vec::new(), tracked: Vec::new() })
    }

    /// Features of a row.
    pub fn features(&self) -> usize {
        self.shape.features
    }

    /// Layers of the whole network.
    pub fn layers(&self) -> &[Linear] {
        &self.layers
    }

    /// Layers of the encoder.
    pub fn depth(&self) -> usize {
        self.layers.len() / 2
    }

    /// Takes the own layers' numbers from the whole network's.
    pub fn write(&mut self, parameters: &[f32]) {
        let upload = |numbers: &[f32], shape| self.upload(numbers, shape);
        let variables = |layer: &Linear| Variables {
            weight: match &layer.weight {
                Weight::Own(range) => Some(upload(&parameters[range.clone()], [layer.outputs, layer.inputs])),
                Weight::Tied(_) => None,
            },
            bias: upload(&parameters[layer.bias.clone()], [1, layer.outputs]),
        };
        let plain: Vec<_> = self.layers[self.own.clone()].iter().map(variables).collect();
        self.tracked = plain.iter().map(Variables::track).collect();
        self.plain = plain;
    }

    pub fn upload(&self, numbers: &[f32], shape: [usize; 2]) -> Tensor<2> {
        upload(numbers, shape, &self.device)
    }

    /// Through some own layers, each with its activation. What the last layer of all gives is the
    /// reconstruction, or its logits where the loss takes those.
    pub fn forward(&self, layers: Range<usize>, h: Tensor<2>, graph: Graph) -> Tensor<2> {
        layers.fold(h, |h, layer| self.activate(layer, self.linear(layer, h, graph)))
    }

    /// Through an own layer, up to its activation.
    pub fn linear(&self, layer: usize, h: Tensor<2>, graph: Graph) -> Tensor<2> {
        let variables = if graph == Graph::Tracked { &self.tracked } else { &self.plain };
        let of = |layer: usize| &variables[layer - self.own.start];
        let bias = of(layer).bias.clone();
        let weight = match self.layers[layer].weight {
            Weight::Own(_) => of(layer).weight.clone().map(Tensor::transpose),
            Weight::Tied(other) => of(other).weight.clone(),
        };
        match weight {
            Some(weight) => h.matmul(weight) + bias,
            // A layer has its own weight or is tied to one that has.
            None => bias,
        }
    }

    /// A layer's activation.
    pub fn activate(&self, layer: usize, z: Tensor<2>) -> Tensor<2> {
        let net = &self.shape.net;
        let function = if layer + 1 == self.depth() {
            net.latent_activation
        } else if layer + 1 < self.layers.len() {
            net.activation
        } else {
            match self.loss {
                Loss::Mse => net.output_activation,
                // Cross-entropy comes with a sigmoid, which the loss folds in.
                Loss::BinaryCrossEntropy => Activation::Identity,
            }
        };
        activate(function, z)
    }

    /// Each row's loss, mean over features: `[rows, 1]`.
    pub fn losses(&self, output: Tensor<2>, x: Tensor<2>) -> Tensor<2> {
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

    /// Hands `take` the gradients of some own layers, each with its place in the flat buffers.
    pub fn take_gradients(
        &self,
        layers: Range<usize>,
        found: &mut Gradients,
        mut take: impl FnMut(Range<usize>, &[f32]),
    ) -> Result<(), LearnError> {
        for layer in layers {
            let (places, variables) = (&self.layers[layer], &self.tracked[layer - self.own.start]);
            if let (Weight::Own(range), Some(weight)) = (&places.weight, &variables.weight) {
                take(range.clone(), &take_gradient(weight, found)?);
            }
            take(places.bias.clone(), &take_gradient(&variables.bias, found)?);
        }
        Ok(())
    }
}

impl Variables {
    fn track(&self) -> Self {
        let leaf = |tensor: &Tensor<2>| tensor.clone().autodiff().require_grad();
        Self { weight: self.weight.as_ref().map(leaf), bias: leaf(&self.bias) }
    }
}

pub(super) fn upload(numbers: &[f32], shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), shape), device)
}

/// The gradient of a leaf, zero where nothing depended on it.
pub(super) fn take_gradient(leaf: &Tensor<2>, found: &mut Gradients) -> Result<Vec<f32>, LearnError> {
    match leaf.grad_remove(found) {
        Some(gradient) => download(gradient),
        None => Ok(vec![0.0; leaf.dims().iter().product()]),
    }
}

pub(super) fn download(tensor: Tensor<2>) -> Result<Vec<f32>, LearnError> {
    tensor.try_into_vec_as::<f32>().map_err(|error| LearnError::Device { source: Box::new(error) })
}

/// The sum of all numbers, in f64: a sum over many rows in f32 would lose digits.
pub(super) fn total(losses: Tensor<2>) -> Result<f64, LearnError> {
    Ok(download(losses)?.into_iter().map(f64::from).sum())
}

pub(super) fn activate(function: Activation, z: Tensor<2>) -> Tensor<2> {
    match function {
        Activation::Relu => activation::relu(z),
        Activation::LeakyRelu => activation::leaky_relu(z, 0.01),
        Activation::Gelu => activation::gelu(z),
        Activation::Tanh => activation::tanh(z),
        Activation::Sigmoid => activation::sigmoid(z),
        Activation::Identity => z,
    }
}
