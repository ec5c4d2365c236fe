//! A network's shape, and where each of its numbers stands in the flat buffers.
//!
//! ```text
//!   encoder  features ─▶ hidden[0] ─▶ .. ─▶ latent      decoder  latent ─▶ .. ─▶ hidden[0] ─▶ features
//!
//!   flat     [ W₀ b₀ | W₁ b₁ | .. ]  encoder, then decoder, layer by layer
//! ```
//!
//! A weight is row-major `[outputs, inputs]`, as in PyTorch's `nn.Linear`; its bias follows.
//! With tied weights a decoder layer has a bias only and uses the transposed weight of the
//! encoder layer that it mirrors.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::slice;
use crate::{
    data::FittedFeatures,
    pipeline::{ModelPlan, NetPlan, spec::Spread},
};

/// A network's shape with its input width.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetShape {
    /// Features of a row.
    pub features: usize,
    /// The layers.
    pub net: NetPlan,
    /// Features of each slice where the network is cut into slices that meet at the embedding;
    /// empty where it is not. What would join two slices is zero.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<usize>,
}

/// A linear layer, `y = W x + b`, within the flat buffers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Linear {
    pub inputs: usize,
    pub outputs: usize,
    pub weight: Weight,
    pub bias: Range<usize>,
}

/// Where a layer's weight comes from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Weight {
    /// It has its own, `[outputs, inputs]`.
    Own(Range<usize>),
    /// It uses that of this layer, transposed.
    Tied(usize),
}

impl NetShape {
    /// The shape of a model's network over these features.
    pub fn new(model: &ModelPlan, features: &FittedFeatures) -> Self {
        let slices = match model.spread {
            Spread::Vertical { slices } => features.slices(slices as usize).iter().map(FittedFeatures::width).collect(),
            Spread::Data {} | Spread::Pipeline { .. } => Vec::new(),
        };
        Self { features: features.width(), net: model.net.clone(), slices }
    }

    /// How many numbers are trained.
    pub fn parameters(&self) -> usize {
        self.layers().last().map_or(0, |layer| layer.bias.end)
    }

    /// The encoder's layers, then as many of the decoder.
    pub(super) fn layers(&self) -> Vec<Linear> {
        let mut widths = vec![self.features];
        widths.extend(&self.net.hidden);
        widths.push(self.net.latent);
        let depth = widths.len() - 1;
        widths.extend_from_within(..depth);
        widths[depth + 1..].reverse();

        let mut layers = Vec::with_capacity(2 * depth);
        let mut end = 0;
        for (index, pair) in widths.windows(2).enumerate() {
            let (inputs, outputs) = (pair[0], pair[1]);
            let weight = if self.net.tied_weights && index >= depth {
                Weight::Tied(2 * depth - 1 - index)
            } else {
                end += outputs * inputs;
                Weight::Own(end - outputs * inputs..end)
            };
            end += outputs;
            layers.push(Linear { inputs, outputs, weight, bias: end - outputs..end });
        }
        layers
    }

    /// Flat parameters to start from: weights and biases uniform within `±1/sqrt(inputs)`, as
    /// PyTorch's `nn.Linear` draws them; the same on every machine and device. Between slices they
    /// are zero, and do not count as inputs.
    pub(super) fn initial_parameters(&self, seed: u64) -> Vec<f32> {
        let mut random = SplitMix64(seed);
        let mut parameters = Vec::with_capacity(self.parameters());
        for layer in self.layers() {
            let bound = 1.0 / (layer.inputs as f64).sqrt();
            let weights = if matches!(layer.weight, Weight::Own(_)) { layer.outputs * layer.inputs } else { 0 };
            parameters.extend((0..weights + layer.outputs).map(|_| (random.symmetric() * bound) as f32));
        }
        if !self.slices.is_empty() {
            slice::keep_within(self, &mut parameters);
        }
        parameters
    }
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): a few exact
/// integer operations, so every machine draws the same.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    fn symmetric(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::pipeline::spec::Activation;

    pub(in super::super) fn shape(features: usize, hidden: &[usize], latent: usize, tied_weights: bool) -> NetShape {
        let net = NetPlan {
            hidden: hidden.to_vec(),
            latent,
            activation: Activation::Relu,
            latent_activation: Activation::Identity,
            output_activation: Activation::Identity,
            tied_weights,
        };
        NetShape { features, net, slices: Vec::new() }
    }

    #[test]
    fn layers_mirror_and_fill_the_flat_buffer() {
        let check = |tied: bool, hidden: &[usize], widths: &[(usize, usize)], parameters: usize| {
            let shape = shape(7, hidden, 2, tied);
            let layers = shape.layers();
            let found: Vec<_> = layers.iter().map(|layer| (layer.inputs, layer.outputs)).collect();
            assert_eq!(found, widths);
            assert_eq!(shape.parameters(), parameters);
            assert_eq!(shape.initial_parameters(1).len(), parameters);
            let mut end = 0;
            for layer in &layers {
                if let Weight::Own(range) = &layer.weight {
                    assert_eq!(range.clone(), end..end + layer.inputs * layer.outputs);
                    end = range.end;
                } else if let Weight::Tied(other) = layer.weight {
                    assert_eq!((layers[other].outputs, layers[other].inputs), (layer.inputs, layer.outputs));
                }
                assert_eq!(layer.bias, end..end + layer.outputs);
                end = layer.bias.end;
            }
        };
        check(false, &[], &[(7, 2), (2, 7)], 14 + 2 + 14 + 7);
        check(true, &[], &[(7, 2), (2, 7)], 14 + 2 + 7);
        check(
            false,
            &[5, 3],
            &[(7, 5), (5, 3), (3, 2), (2, 3), (3, 5), (5, 7)],
            2 * (35 + 15 + 6) + 5 + 3 + 2 + 3 + 5 + 7,
        );
        check(true, &[5, 3], &[(7, 5), (5, 3), (3, 2), (2, 3), (3, 5), (5, 7)], 35 + 15 + 6 + 5 + 3 + 2 + 3 + 5 + 7);
    }

    #[test]
    fn the_first_numbers_are_drawn_within_bounds_and_by_seed() {
        let shape = shape(100, &[], 10, false);
        let parameters = shape.initial_parameters(42);
        assert_eq!(parameters, shape.initial_parameters(42));
        assert_ne!(parameters, shape.initial_parameters(43));
        assert!(parameters[..1000].iter().all(|weight| weight.abs() <= 0.1));
        let mean_square = parameters[..1000].iter().map(|weight| f64::from(*weight).powi(2)).sum::<f64>() / 1000.0;
        assert!((mean_square - 0.01 / 3.0).abs() < 3e-4, "{mean_square}");
    }

    #[test]
    fn splitmix_gives_the_published_numbers() {
        let mut random = SplitMix64(1_234_567);
        let drawn: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(drawn, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
