//! A network cut into slices that meet at the embedding (Vepakomma et al., "Split learning for
//! health", 2018; here the partial embeddings are added).
//!
//! ```text
//!   features of slice 0 ─▶ hidden ─▶ ┐                        ┌─▶ hidden ─▶ features of slice 0
//!   features of slice 1 ─▶ hidden ─▶ ┴ Σ + bias ─ f ─▶ z ─▶ ──┴─▶ hidden ─▶ features of slice 1
//! ```
//!
//! This is a dense network whose weights are zero between slices: each slice is a network of its
//! own, and its numbers are blocks of the dense one's. The embedding's bias belongs to slice 0.

use std::ops::Range;

use super::{
    NetShape,
    shape::{Linear, Weight},
};
use crate::{ids::Rank, learn::shard, pipeline::NetPlan};

/// Where consecutive numbers of a slice's flat buffer stand in the whole network's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub layer: usize,
    /// Where they begin in the slice's.
    pub start: usize,
    /// In the whole one's.
    pub whole: Range<usize>,
}

impl Place {
    /// In the slice's.
    pub fn own(&self) -> Range<usize> {
        self.start..self.start + self.whole.len()
    }
}

/// The network of a slice: its own features, its part of each hidden layer, the whole embedding.
pub(super) fn shape(whole: &NetShape, slice: usize) -> NetShape {
    let hidden = whole.net.hidden.iter().map(|width| part(whole, slice, *width).len()).collect();
    let net = NetPlan { hidden, ..whole.net.clone() };
    NetShape { features: whole.slices[slice], net, slices: Vec::new() }
}

/// Where a slice's numbers stand, in order. Its embedding's bias stands nowhere, unless it is the
/// first slice.
pub(super) fn places(whole: &NetShape, slice: usize) -> Vec<Place> {
    let (layers, parts) = (whole.layers(), shape(whole, slice).layers());
    let depth = layers.len() / 2;
    let mut places = Vec::new();
    for (layer, (dense, own)) in layers.iter().zip(&parts).enumerate() {
        let (inputs, outputs) = ends(whole, slice, layer, dense);
        if let (Weight::Own(dense_weight), Weight::Own(weight)) = (&dense.weight, &own.weight) {
            for (row, output) in outputs.clone().enumerate() {
                let first = dense_weight.start + output * dense.inputs;
                let whole = first + inputs.start..first + inputs.end;
                places.push(Place { layer, start: weight.start + row * own.inputs, whole });
            }
        }
        if layer + 1 != depth || slice == 0 {
            let whole = dense.bias.start + outputs.start..dense.bias.start + outputs.end;
            places.push(Place { layer, start: own.bias.start, whole });
        }
    }
    places
}

/// Makes weights between slices zero, and scales the others up from the bounds of the whole
/// network's inputs to those of the slice's.
pub(super) fn keep_within(whole: &NetShape, parameters: &mut [f32]) {
    let layers = whole.layers();
    let dense = parameters.to_vec();
    parameters.fill(0.0);
    for slice in 0..whole.slices.len() {
        let parts = shape(whole, slice).layers();
        for place in places(whole, slice) {
            // The embedding has the inputs of all slices.
            let of_all = place.layer + 1 == layers.len() / 2;
            let inputs = if of_all { layers[place.layer].inputs } else { parts[place.layer].inputs };
            let scale = (layers[place.layer].inputs as f64 / inputs as f64).sqrt();
            let numbers = parameters[place.whole.clone()].iter_mut().zip(&dense[place.whole]);
            numbers.for_each(|(number, drawn)| *number = (f64::from(*drawn) * scale) as f32);
        }
    }
}

/// A slice's inputs and outputs of a layer.
fn ends(whole: &NetShape, slice: usize, layer: usize, dense: &Linear) -> (Range<usize>, Range<usize>) {
    let depth = whole.net.hidden.len() + 1;
    let end = |boundary: usize, width: usize| {
        if boundary == depth {
            0..width
        } else if boundary == 0 || boundary == 2 * depth {
            let start = whole.slices[..slice].iter().sum();
            start..start + whole.slices[slice]
        } else {
            part(whole, slice, width)
        }
    };
    (end(layer, dense.inputs), end(layer + 1, dense.outputs))
}

/// A slice's part of a hidden layer.
fn part(whole: &NetShape, slice: usize, width: usize) -> Range<usize> {
    shard(Rank(slice as u32), whole.slices.len() as u32, width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::learn::shape::tests::shape as dense;

    fn sliced(hidden: &[usize], slices: &[usize]) -> NetShape {
        NetShape { slices: slices.to_vec(), ..dense(slices.iter().sum(), hidden, 3, false) }
    }

    #[test]
    fn slices_share_the_whole_network_without_overlap() {
        let check = |hidden: &[usize], slices: &[usize], zeros: usize| {
            let whole = sliced(hidden, slices);
            let mut owners = vec![0; whole.parameters()];
            for slice in 0..slices.len() {
                let own = shape(&whole, slice);
                let mut end = 0;
                for place in places(&whole, slice) {
                    let bias = if slice > 0 && place.start != end { own.net.latent } else { 0 };
                    assert_eq!(place.start, end + bias, "only the embedding's bias is left out");
                    end = place.start + place.whole.len();
                    owners[place.whole].iter_mut().for_each(|owners| *owners += 1);
                }
                assert_eq!(end, own.parameters());
            }
            assert!(owners.iter().all(|owners| *owners <= 1));
            assert_eq!(owners.iter().filter(|owners| **owners == 0).count(), zeros, "{hidden:?} {slices:?}");
            let drawn = whole.initial_parameters(7);
            assert!(drawn.iter().zip(&owners).all(|(number, owners)| (*number == 0.0) == (*owners == 0)));
        };
        check(&[], &[2, 3], 0);
        check(&[4], &[2, 4], 2 * (6 * 4 - 2 * 2 - 4 * 2));
        check(&[5, 3], &[1, 2, 6], 2 * (9 * 5 - (1 + 2 * 2 + 6 * 2)) + 2 * (5 * 3 - 5));
        check(&[5], &[7], 0);
    }

    #[test]
    fn a_slices_numbers_are_within_its_own_bounds() {
        let whole = sliced(&[40], &[10, 90]);
        let drawn = whole.initial_parameters(3);
        for (slice, features) in [10.0_f32, 90.0].into_iter().enumerate() {
            let first = places(&whole, slice).into_iter().filter(|place| place.layer == 0);
            let numbers: Vec<f32> = first.flat_map(|place| drawn[place.whole].to_vec()).collect();
            let most = numbers.iter().fold(0.0_f32, |most, number| most.max(number.abs()));
            let bound = 1.0 / features.sqrt();
            assert!(most <= bound * 1.000_001 && most > 0.9 * bound, "{most}, not {bound}");
        }
        let one = sliced(&[4], &[6]);
        assert_eq!(one.initial_parameters(5), dense(6, &[4], 3, false).initial_parameters(5));
    }
}
