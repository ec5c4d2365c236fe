//! Slices of a network on one rank. What ranks exchange in a step is the sum of their partial
//! embeddings, `[rows, latent]`, and that of its gradient.

use std::ops::Range;

use burn::tensor::{Device, Gradients, Tensor};

use super::super::{
    Communicator, LearnError, NetShape, SharedComm, Step, Wire, device,
    network::{self, Graph, Network, activate, download, take_gradient, total},
    slice::{self, Place},
};
use crate::pipeline::spec::{DeviceKind, Loss};

pub(super) struct Slices {
    /// Of the whole network.
    shape: NetShape,
    device: Device,
    own: Vec<Slice>,
    /// Features of a row, all own slices together.
    features: usize,
    comm: SharedComm,
    /// Of the whole network; only the own part is ever used.
    parameters: Vec<f32>,
}

struct Slice {
    network: Network,
    /// Its columns of this rank's rows.
    features: Range<usize>,
    /// Its part of all features: what its loss counts for.
    weight: f32,
    places: Vec<Place>,
    /// Its own flat buffer, for parameters or gradients.
    flat: Vec<f32>,
}

impl Slices {
    pub fn open(
        shape: &NetShape,
        loss: Loss,
        (kind, index): (DeviceKind, usize),
        own: Range<usize>,
        comm: SharedComm,
    ) -> Result<Self, LearnError> {
        let (mut slices, mut features) = (Vec::with_capacity(own.len()), 0);
        for number in own {
            let net = slice::shape(shape, number);
            slices.push(Slice {
                network: Network::open(&net, loss, kind, index, 0..net.layers().len())?,
                features: features..features + net.features,
                weight: (net.features as f64 / shape.features as f64) as f32,
                places: slice::places(shape, number),
                flat: vec![0.0; net.parameters()],
            });
            features += net.features;
        }
        let (device, parameters) = (device::open(kind, index)?, vec![0.0; shape.parameters()]);
        Ok(Self { shape: shape.clone(), device, own: slices, features, comm, parameters })
    }

    /// Each slice's columns.
    fn upload(&self, x: &[f32], rows: usize, graph: Graph) -> Vec<Tensor<2>> {
        let x = graph.constant(network::upload(x, [rows, self.features], &self.device));
        self.own.iter().map(|slice| x.clone().slice([0..rows, slice.features.clone()])).collect()
    }

    /// What the own slices add to the embedding, before its activation.
    fn partial(&self, x: &[Tensor<2>], rows: usize, graph: Graph) -> Tensor<2> {
        let nothing = graph.constant(Tensor::zeros([rows, self.shape.net.latent], &self.device));
        self.own.iter().zip(x).fold(nothing, |sum, (slice, x)| {
            let (network, last) = (&slice.network, slice.network.depth() - 1);
            sum + network.linear(last, network.forward(0..last, x.clone(), graph), graph)
        })
    }

    /// The sum over all ranks of a matrix of the embedding's width.
    fn meet(&mut self, mut numbers: Vec<f32>, rows: usize) -> Result<Tensor<2>, LearnError> {
        self.comm.all_reduce_sum(&mut numbers, Wire::F32)?;
        Ok(network::upload(&numbers, [rows, self.shape.net.latent], &self.device))
    }

    /// The embedding before its activation, on every rank.
    fn embedding(&mut self, x: &[Tensor<2>], rows: usize) -> Result<Tensor<2>, LearnError> {
        let partial = download(self.partial(x, rows, Graph::Plain))?;
        self.meet(partial, rows)
    }

    /// Each row's loss over the own slices, as their share of the mean over all features. `z` is
    /// the embedding before its activation.
    fn losses(&self, z: Tensor<2>, x: &[Tensor<2>], rows: usize, graph: Graph) -> Tensor<2> {
        let latent = activate(self.shape.net.latent_activation, z);
        let nothing = graph.constant(Tensor::zeros([rows, 1], &self.device));
        self.own.iter().zip(x).fold(nothing, |sum, (slice, x)| {
            let network = &slice.network;
            let output = network.forward(network.depth()..network.layers().len(), latent.clone(), graph);
            sum + network.losses(output, x.clone()) * slice.weight
        })
    }
}

impl Slice {
    /// Keeps the gradients of some layers.
    fn take_gradients(&mut self, layers: Range<usize>, found: &mut Gradients) -> Result<(), LearnError> {
        let Self { network, flat, .. } = self;
        network.take_gradients(layers, found, |place, numbers| flat[place].copy_from_slice(numbers))
    }
}

impl Step for Slices {
    fn parameters(&self) -> usize {
        self.parameters.len()
    }

    fn read_parameters(&self, out: &mut [f32]) {
        out.copy_from_slice(&self.parameters);
    }

    fn write_parameters(&mut self, parameters: &[f32]) {
        self.parameters.copy_from_slice(parameters);
        for slice in &mut self.own {
            slice.flat.fill(0.0);
            for place in &slice.places {
                slice.flat[place.own()].copy_from_slice(&parameters[place.whole.clone()]);
            }
            slice.network.write(&slice.flat);
        }
    }

    /// The loss is that of the own slices: the ranks' add up to the whole one.
    fn gradients(&mut self, x: &[f32], rows: usize, gradients: &mut [f32]) -> Result<f64, LearnError> {
        gradients.fill(0.0);
        if rows == 0 {
            return Ok(0.0);
        }
        let x = self.upload(x, rows, Graph::Tracked);
        let partial = self.partial(&x, rows, Graph::Tracked);
        // The graph is cut here: what the others add to the embedding is not in it.
        let z = self.meet(download(partial.clone().inner())?, rows)?.autodiff().require_grad();
        let losses = self.losses(z.clone(), &x, rows, Graph::Tracked);
        let mut found = losses.clone().sum().backward();
        for slice in &mut self.own {
            slice.take_gradients(slice.network.depth()..slice.network.layers().len(), &mut found)?;
        }
        let gradient = self.meet(take_gradient(&z, &mut found)?, rows)?;
        let mut found = (partial * gradient.autodiff()).sum().backward();
        for slice in &mut self.own {
            slice.take_gradients(0..slice.network.depth(), &mut found)?;
            for place in &slice.places {
                gradients[place.whole.clone()].copy_from_slice(&slice.flat[place.own()]);
            }
        }
        total(losses.inner())
    }

    /// That of the own slices: the ranks' add up to the whole one.
    fn loss(&mut self, x: &[f32], rows: usize) -> Result<f64, LearnError> {
        if rows == 0 {
            return Ok(0.0);
        }
        let x = self.upload(x, rows, Graph::Plain);
        let z = self.embedding(&x, rows)?;
        total(self.losses(z, &x, rows, Graph::Plain))
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
        let x = self.upload(x, rows, Graph::Plain);
        let z = self.embedding(&x, rows)?;
        embeddings.extend(download(activate(self.shape.net.latent_activation, z.clone()))?);
        if let Some(errors) = errors {
            let mut losses = download(self.losses(z, &x, rows, Graph::Plain))?;
            self.comm.all_reduce_sum(&mut losses, Wire::F32)?;
            errors.extend(losses);
        }
        Ok(())
    }
}
